"""The programs of the tour run and print what the page shows."""

import pytest

from tests.docs.pages import differs, pieces, printed_by

PAGE = "docs/tutorials/tour.md"


@pytest.mark.slow
def test_the_tour_prints_what_it_shows():
    pytest.importorskip("tunix")
    names = {"__name__": "example"}
    for piece in pieces(PAGE):
        printed = printed_by(piece, PAGE, names)
        assert not differs(printed, piece.shown), f"{PAGE}:{piece.line}: prints\n{printed}"
