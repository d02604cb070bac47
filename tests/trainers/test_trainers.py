"""The programs of the page about trainers run with the real packages, and print what the page shows."""

import importlib.util
import re

import pytest

from tests.docs.pages import differs, pieces
from tests.helpers import run_python

PAGE = "docs/how-to/trainers.md"
PIECES = pieces(PAGE)
TRAINERS = ("keras", "penzai")
MOST_ADDED = 10


def needed(code):
    """The trainers that a program imports."""
    return [name for name in TRAINERS if re.search(rf"^(import|from) {name}\b", code, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: "_".join(needed(piece.code)) or "explicit_mesh")
def test_a_program_prints_what_the_page_shows(piece):
    """In a process of its own: a backend, a number of devices and a mesh are for all of it."""
    for name in needed(piece.code):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is missing")
    printed = run_python("-c", piece.code).stdout
    assert not differs(printed, piece.shown), f"{PAGE}:{piece.line}: prints\n{printed}"


def test_few_lines_are_added():
    for piece in PIECES:
        _, said, after = piece.code.partition("\n# added\n")
        assert said and piece.shown and after.partition("\n\n")[0].count("\n") < MOST_ADDED
