"""Telemetry of hostile numbers: it changes no result, says how many elements are lost, and its record can be read."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.layers import delayed_scaling
from jaxlowprec.recipes.roles import GEMMS
from jaxlowprec.telemetry.limits import findings
from tests.helpers import random_array
from tests.low_precision import STRUCTURES, state_for

RECIPES = {name: recipe for name, recipe in STRUCTURES.items() if recipe is not None}
ROWS, WIDTH, FEATURES = 32, 32, 16


def spoilt(*values):
    """An input with these values among its numbers."""
    x = np.array(random_array((ROWS, WIDTH), np.float32))
    x.flat[: 5 * len(values) : 5] = values
    return x


INPUTS = {
    "nan": spoilt(np.nan),
    "inf": spoilt(np.inf, -np.inf),
    "all nan": np.full((ROWS, WIDTH), np.nan, np.float32),
    "zeros": np.zeros((ROWS, WIDTH), np.float32),
    "negative zeros": np.full((ROWS, WIDTH), -0.0, np.float32),
    "largest": np.full((ROWS, WIDTH), jnp.finfo(jnp.bfloat16).max, np.float32),
    "smallest": np.full((ROWS, WIDTH), 1e-40, np.float32),
    "no rows": np.zeros((0, WIDTH), np.float32),
    "no width": np.zeros((ROWS, 0), np.float32),
    "no batch": np.zeros((0, ROWS, WIDTH), np.float32),
    "nothing": np.zeros((0, 0), np.float32),
}
LOST = {name: int((~np.isfinite(x)).sum()) for name, x in INPUTS.items()}


def cases():
    """Each input under one recipe and each recipe with an empty batch and NaN; with --slow all."""
    for (i, name), (j, values) in itertools.product(enumerate(RECIPES), enumerate(INPUTS)):
        marks = () if i == j % len(RECIPES) or values in ("no rows", "nan") else pytest.mark.slow
        yield pytest.param(RECIPES[name], values, marks=marks, id=f"{name}-{values}")


@pytest.mark.parametrize(("recipe", "values"), list(cases()))
def test_it_changes_no_result_and_counts_what_is_lost(recipe, values, tmp_path):
    x = jnp.asarray(INPUTS[values], jnp.bfloat16)
    params = {"up": random_array((x.shape[-1], FEATURES), "float32", 1), "x": x}
    if (state := state_for(recipe)) is not None:
        params[delayed_scaling.OVERWRITE_WITH_GRADIENT] = state

    def loss(params):
        state = params.get(delayed_scaling.OVERWRITE_WITH_GRADIENT)
        y = jlp.linear(params["x"], params["up"], recipe=recipe, name="up", state=state)
        return (y if state is None else y[0]).astype(jnp.float32).sum()

    plain = jax.jit(jax.value_and_grad(loss))(params)
    loss_and_gradients, found = jax.jit(jlp.telemetry.value_and_grad(loss))(params)
    for got, wanted in zip(jax.tree.leaves(loss_and_gradients), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(got, wanted)

    tensors = jlp.telemetry.read(found).get("up", {})
    assert tensors or not x.size
    for name, statistics in tensors.items():
        if name in GEMMS:
            continue
        elements = {"input": x.size, "weight": params["up"].size, "gradient": x[..., :1].size * FEATURES}[
            name.split()[0]
        ]
        nonfinite = statistics.scalars().get("nonfinite")  # a share, which nothing does not have
        lost = LOST[values] if name.startswith("input") else 0
        if not elements:
            assert not nonfinite
        elif name.endswith("rowwise"):
            assert nonfinite == pytest.approx(lost / elements, rel=1e-5)
        elif values != "largest":  # whose rotations spread what is lost, and are infinite of the largest numbers
            assert (nonfinite > 0) == (lost > 0)
        if not lost and values != "largest":  # which a rotation or a scale rounds to infinity
            assert not statistics.scalars().get("poisoned")
    with jlp.telemetry.Recorder(tmp_path / "t.jsonl") as recorder:
        recorder.record(0, found, loss=loss_and_gradients[0])
        recorder.record(1, found, loss=loss_and_gradients[0])
    for line in (tmp_path / "t.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    run = jlp.telemetry.load(tmp_path / "t.jsonl")
    assert run.steps == [0, 1] and list(run.records[0].layers.get("up", {})) == list(tensors)
    said = {finding.statistic for finding in findings(run) if finding.tensor.startswith("input")}
    measured = any(name.startswith("input") for name in tensors)
    if values != "largest":
        assert ("nonfinite" in said) == bool(LOST[values] and measured)
