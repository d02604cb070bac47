"""A layer whose weight is scaled by 2^-20 from step 50 on is found by watch, report and first_bad."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from jaxlowprec.cli.main import main

NVFP4 = jlp.NVFP4BlockScaling()
SICK, LAYER = 50, "blocks/1"


def loss(params, x, scale=1.0):
    h = x
    for i, w in enumerate(params):
        w = w * scale if f"blocks/{i}" == LAYER else w
        h = h + jax.nn.gelu(jlp.linear(h, w, recipe=NVFP4, name=f"blocks/{i}"))
    return jnp.square(h.astype(jnp.float32)).mean()


def scale_at(step):
    return jnp.where(step < SICK, 1.0, 2.0**-20)


@pytest.fixture(scope="module")
def inputs():
    *keys, key = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(k, (64, 64)) / 8 for k in keys], jax.random.normal(key, (128, 64), jnp.bfloat16)


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory):
    """The folder of a run that records every tenth step."""
    path = tmp_path_factory.mktemp("run") / "telemetry.jsonl"

    @jax.jit
    def train_step(params, x, step):
        (value, gradients), found = jlp.telemetry.value_and_grad(loss, on=step % 10 == 0)(params, x, scale_at(step))
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value, found

    params, x = inputs
    with jlp.telemetry.Recorder(path, every=10) as recorder:
        for step in range(0, 80, 5):
            params, value, found = train_step(params, x, step)
            recorder.record(step, found, loss=value)
    return path.parent


def test_watch_names_the_layer_and_the_step(run, capsys):
    assert main(["watch", "--once", str(run)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "since step" in line]
    assert lines and all(f" of {LAYER}: " in line and f"since step {SICK}" in line for line in lines)


def test_no_record_before_it_has_a_finding(run):
    whole = jlp.telemetry.load(run)
    for end in range(1, 1 + whole.steps.index(SICK)):
        assert jlp.telemetry.findings(dataclasses.replace(whole, records=whole.records[:end])) == []
    assert jlp.telemetry.findings(whole)


@pytest.mark.slow
def test_report_lists_it_with_a_remedy(run, tmp_path, capsys):
    pytest.importorskip("vl_convert")
    out = tmp_path / "report.html"
    assert main(["report", str(run), "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)["runs"][0]["findings"]
    assert found and {(f["layer"], f["since"]) for f in found} == {(LAYER, SICK)}
    assert all(f["remedy"] for f in found) and LAYER in out.read_text()


def test_first_bad_names_the_layer_the_tensor_and_the_step(inputs):
    steps = ((step, (*inputs, scale_at(step))) for step in range(40, 80, 10))
    bad = jlp.debug.first_bad_step(loss, steps, reference=lambda params, x, scale: loss(params, x))
    assert (bad.step, bad.layer, bad.tensor) == (SICK, LAYER, "weight")
