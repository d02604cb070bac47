"""The picture of how far an engine's log-probabilities are from the trainer's."""

import sys

import pytest
from rl.mismatch_picture import plot

from tests.rl.test_importance import batch
from tests.rl.test_mismatch import measure


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_the_picture_is_drawn(tmp_path, count, spread):
    pytest.importorskip("matplotlib")
    found = [measure(*batch(seed, spread=spread)) for seed in range(count)]
    plot(found if count > 1 else found[0], tmp_path / "picture.svg", title="INT4 $_")
    said = (tmp_path / "picture.svg").read_text()
    assert said.lstrip().startswith("<?xml") and len(said) > 10_000


def test_a_picture_of_nothing_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    given = batch()
    with pytest.raises(ValueError, match="no token was compared"):
        plot([], tmp_path / "picture.png")
    with pytest.raises(TypeError, match="needs a Mismatch, or a list of them"):
        plot(given, tmp_path / "picture.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot(measure(*given), tmp_path / "picture.png")
    assert not any(tmp_path.iterdir())
