"""What the examples' tests learn from."""

import os
import pathlib

import numpy as np
import pytest

from tests.helpers import run_python

TRAIN_LM = pathlib.Path(__file__).parents[2] / "examples" / "train_lm.py"


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with a small text of few words."""
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0).choice(["the ", "low ", "bits ", "of a ", "block\n"], 20_000)
    (folder / "a.txt").write_text("".join(words))
    return str(folder)


@pytest.fixture(scope="session")
def trained_demo(tmp_path_factory, text):
    """A run of train_lm.py on the model that other examples begin with, in bf16 and under INT4."""
    out = tmp_path_factory.mktemp("demo") / "run"
    options = ("--steps", "20", "--batch", "2", "--recipe", "bf16,int4_qat", "--no-noise-floor")
    run_python(str(TRAIN_LM), "--text", text, "--out", str(out), *options)
    return out


@pytest.fixture
def program(monkeypatch, capsys):
    """Runs the main function of an example in this process; what it prints. A wrong status is a SystemExit."""

    def run(main, *arguments):
        monkeypatch.setattr("sys.argv", [main.__module__, *map(str, arguments)])
        main()
        return capsys.readouterr().out

    return run


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
