"""The programs of pages about other libraries run and print what the page shows, where that library is."""

import re

import pytest

from tests.docs.pages import differs, pieces, printed_by
from tests.package.test_readme import ROOT

PAGE, QWIX = "docs/how-to/bring_your_own_model.md", "docs/how-to/qwix.md"
PIECES = pieces(PAGE)
_FRAMEWORKS_AT = (ROOT / PAGE).read_text().partition("\n## Flax NNX\n")[0].count("\n")
ONE_PROGRAM = [piece for piece in PIECES if piece.line < _FRAMEWORKS_AT]
EXAMPLES = [piece for piece in PIECES if piece.line > _FRAMEWORKS_AT]
FRAMEWORKS = ("equinox", "haiku", "haliax")
MOST_LINES = 40


@pytest.mark.slow
def test_the_pieces_in_plain_jax_are_one_program():
    names = {"__name__": "example"}
    for piece in ONE_PROGRAM:
        printed = printed_by(piece, PAGE, names)
        assert not differs(printed, piece.shown), f"{PAGE}:{piece.line}: prints\n{printed}"


@pytest.mark.slow
@pytest.mark.parametrize("piece", EXAMPLES, ids=lambda piece: f"line_{piece.line}")
def test_an_example_prints_what_it_shows(piece):
    for name in re.findall(r"^import (\w+)", piece.code, re.MULTILINE):
        if name in FRAMEWORKS:
            pytest.importorskip(name, exc_type=ImportError)
    printed = printed_by(piece, PAGE, {"__name__": "example"})
    assert not differs(printed, piece.shown), f"{PAGE}:{piece.line}: prints\n{printed}"


def test_the_program_beside_qwix_prints_what_the_page_shows():
    pytest.importorskip("qwix")
    (piece,) = pieces(QWIX)
    printed = printed_by(piece, QWIX, {"__name__": "example"})
    assert not differs(printed, piece.shown), f"{QWIX}:{piece.line}: prints\n{printed}"


def test_examples_are_short_and_show_what_they_print():
    assert len(ONE_PROGRAM) == 6 and len(EXAMPLES) == 6
    assert all(piece.code.count("\n") <= MOST_LINES and piece.shown for piece in EXAMPLES)
