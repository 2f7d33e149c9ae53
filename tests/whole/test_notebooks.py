"""The notebooks run, and what they print is what is stored in them."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

NUMBER = r"-?\d+(?:\.\d+)?"
FOLDER = Path(__file__).parent.parent.parent / "examples" / "notebooks"


def printed(book):
    """The words that a notebook printed, and its figures."""
    outputs = (output for cell in book.cells for output in cell.get("outputs", []))
    text = "".join(
        output["text"] for output in outputs if output.get("name") == "stdout"
    )
    return re.sub(NUMBER, "", text).split(), [
        float(each) for each in re.findall(NUMBER, text)
    ]


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem
)
def test_a_notebook_prints_what_is_stored_in_it(path):
    book = nbformat.read(path, as_version=4)
    words, figures = printed(book)
    NotebookClient(
        book, timeout=300, resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    assert printed(book)[0] == words != []
    assert printed(book)[1] == pytest.approx(
        figures, abs=0.5
    )  # another processor rounds a near-tie otherwise
