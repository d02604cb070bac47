"""examples/serve_int4.py as a user runs it, on what examples/train_lm.py trained."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers import python_environment, run_python

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("int4") / "run"
    options = ("--steps", "20", "--batch", "2", "--recipe", "int4_qat")
    run_python(str(EXAMPLES / "train_lm.py"), "--text", text, "--out", str(out), *options)
    return out


def command(run, out, *more):
    return [str(EXAMPLES / "serve_int4.py"), "--run", str(run), "--out", str(out), *more]


@pytest.mark.slow
def test_training_lowers_the_loss(run):
    losses = json.loads((run / "report.json").read_text())["runs"][0]["losses"]
    assert np.isfinite(losses).all() and losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_the_served_model_gives_the_logits_of_training(run, tmp_path):
    done = run_python(*command(run, tmp_path / "served", "--tokens", "8", "--prompt", "the low "))
    assert "blocks/0/up    128x512  Int4 1x128" in done.stdout
    assert "the low " in done.stdout
    assert "loaded in 4 bits: identical bits" in done.stdout
    config = json.loads((tmp_path / "served" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized"
    assert "lm_head" in config["ignore"] and "model.layers.3.mlp.up_proj" in config["ignore"]


@pytest.mark.slow
def test_a_recipe_that_did_not_train_it_is_refused(run, tmp_path):
    done = subprocess.run(
        [sys.executable, *command(run, tmp_path / "served")],
        env=python_environment(JAXLOWPREC_INT4_QAT_GROUP_SIZE="64"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "was trained with Int4QAT(group_size=128" in done.stderr
    assert not (tmp_path / "served").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "no finished run of train_lm.py --recipe int4_qat"), (("--tokens",), "expected one argument")],
)
def test_a_wrong_argument_is_named(tmp_path, arguments, message):
    done = subprocess.run(
        [sys.executable, *command(tmp_path, tmp_path / "served", *arguments)],
        env=python_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr
