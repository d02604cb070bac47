"""What the examples' tests learn from."""

import os

import numpy as np
import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with a small text of few words."""
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0).choice(["the ", "low ", "bits ", "of a ", "block\n"], 20_000)
    (folder / "a.txt").write_text("".join(words))
    return str(folder)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """A cache for processes that compile the same programs; `make test` has one already."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield
