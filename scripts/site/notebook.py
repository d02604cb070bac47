"""The tour as a notebook: python scripts/site/notebook.py writes docs/tutorials/tour.ipynb from the page of that name.

Blocks of Python become cells, and the text below one the cell's output; all else is Markdown.
"""

from __future__ import annotations

import json
import pathlib
import re

TUTORIALS = pathlib.Path(__file__).parents[2] / "docs/tutorials"
PAGE, NOTEBOOK = TUTORIALS / "tour.md", TUTORIALS / "tour.ipynb"
_PIECE = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def notebook(page: str) -> str:
    """The notebook of a page, as JSON."""
    cells: list[dict] = []
    at = 0
    for piece in _PIECE.finditer(page):
        cells += [*_markdown(page[at : piece.start()]), _code(piece[1], piece[2])]
        at = piece.end()
    cells += _markdown(page[at:])
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _markdown(text: str) -> list[dict]:
    text = text.strip()
    return [{"cell_type": "markdown", "metadata": {}, "source": _lines(text)}] if text else []


def _code(code: str, shown: str | None) -> dict:
    outputs = [{"name": "stdout", "output_type": "stream", "text": _lines(shown)}] if shown else []
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": outputs,
        "source": _lines(code.strip()),
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text()))
