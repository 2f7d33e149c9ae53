"""What cannot be done is told in one line."""

import re
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind, said):
    """Expect an error of this kind, of one line that has `said`: a text or a pattern."""
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    assert said in message or re.search(said, message), message
    assert "\n" not in message
