"""The notebook of the tour has the page's programs and all its text."""

import json

from tests.docs.pages import pieces
from tests.docs.test_site import script

NOTEBOOK = script("notebook")


def test_it_is_the_page():
    text = NOTEBOOK.NOTEBOOK.read_text()
    assert text == NOTEBOOK.notebook(NOTEBOOK.PAGE.read_text()), "run scripts/site/notebook.py"
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert cells == [piece.code.strip() for piece in pieces("docs/tutorials/tour.md")]
