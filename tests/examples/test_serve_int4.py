"""examples/serve_int4.py on what examples/train_lm.py trained."""

import json

import numpy as np
import pytest
import serve_int4


@pytest.mark.slow
def test_training_lowers_the_loss(trained_demo):
    runs = {run["name"]: run for run in json.loads((trained_demo / "report.json").read_text())["runs"]}
    losses = runs["int4_qat"]["losses"]
    assert np.isfinite(losses).all() and losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_the_served_model_gives_the_logits_of_training(trained_demo, tmp_path, program):
    options = ("--tokens", "8", "--prompt", "the low ")
    said = program(serve_int4.main, "--run", trained_demo, "--out", tmp_path / "served", *options)
    assert "blocks/0/up    128x512  Int4 1x128" in said
    assert "the low " in said
    assert "loaded in 4 bits: identical bits" in said
    config = json.loads((tmp_path / "served" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized"
    assert "lm_head" in config["ignore"] and "model.layers.3.mlp.up_proj" in config["ignore"]


@pytest.mark.slow
def test_a_recipe_that_did_not_train_it_is_refused(trained_demo, tmp_path, refused_by, monkeypatch):
    monkeypatch.setenv("JAXLOWPREC_INT4_QAT_GROUP_SIZE", "64")
    said = refused_by(serve_int4.main, "--run", trained_demo, "--out", tmp_path / "served")
    assert "was trained with Int4QAT(group_size=128" in said
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "no finished run of train_lm.py --recipe int4_qat"), (("--tokens",), "expected one argument")],
)
def test_a_wrong_argument_is_named(tmp_path, refused_by, arguments, message):
    assert message in refused_by(serve_int4.main, "--run", tmp_path, "--out", tmp_path / "served", *arguments)
