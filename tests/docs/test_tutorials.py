"""Every program of the front page, the tutorials and some other pages runs and prints what the page shows."""

import pytest

from tests.docs.pages import differs, pieces, printed_by
from tests.helpers import often
from tests.package.test_readme import ROOT

TOUR = "docs/tutorials/tour.md"  # needs tunix: tests/trainers/test_tour.py
TUTORIALS = sorted({str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "tutorials").glob("*.md")} - {TOUR})
OTHERS = ["docs/index.md", *(f"docs/how-to/{page}.md" for page in ("export", "optimizer", "transformer_engine"))]
OTHERS += ["docs/explanation/kernel.md"]
PAGES = [*OTHERS, *(page for page in TUTORIALS if pieces(page))]
SHORT = [*OTHERS, "docs/tutorials/first_matmul.md"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("page", often(SHORT, PAGES))
def test_a_page_prints_what_it_shows(page):
    names = {}
    for piece in pieces(page):
        printed = printed_by(piece, page, names)
        assert not differs(printed, piece.shown), f"{page}:{piece.line}: shows\n{piece.shown}\nbut prints\n{printed}"


def test_every_tutorial_has_programs():
    assert len(PAGES) == len(TUTORIALS) - 1 + len(OTHERS)  # all tutorials but their index


def test_only_the_last_digits_of_fractions_may_differ():
    assert not differs("loss 0.31 of 3\n", "loss 0.32 of 3\n")
    assert differs("loss 0.31 of 3\n", "loss 0.35 of 3\n")
    assert differs("loss 0.31 of 3\n", "loss 0.31 of 4\n")
    assert differs("True\n", "False\n")
    assert differs("", "True\n")
