"""What the examples' tests learn from."""

import numpy as np
import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with a small text of few words."""
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0).choice(["the ", "low ", "bits ", "of a ", "block\n"], 20_000)
    (folder / "a.txt").write_text("".join(words))
    return str(folder)
