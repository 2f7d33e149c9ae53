"""The site's reading of a docstring: a line `name: meaning` is an item of a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

ITEM = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): ", re.MULTILINE)


class Parameters(griffe.Extension):
    """Makes lists of the lines that tell what parameters and attributes mean."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and ITEM.search(obj.docstring.value):
            # An indented line goes on with its item; an item after a paragraph needs an empty line between them.
            as_list = ITEM.sub(r"- `\1`: ", obj.docstring.value)
            obj.docstring.value = re.sub(
                r"(?m)^((?!- |\s).+)\n(?=- `)", r"\1\n\n", as_list
            )
