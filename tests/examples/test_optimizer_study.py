"""examples/optimizer_study.py finds what trains otherwise than float32 states, and finds nothing in those of 8 bits."""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_study
import pytest
from lm import study
from lm.data import read_text
from lm.mesh import ONE_DEVICE
from lm.model import SIZES
from lm.optimizers import STATES, Optimizer, linear_int8
from lm.training import Run, Schedule, initial_parameters

from jaxlowprec.ops.optimizer_states import join_weight as join
from tests.helpers import assert_same_bytes

CONFIG = dataclasses.replace(SIZES["tiny"], layers=1, high_precision_last=0)
SCHEDULE = Schedule(10, 1e-3, 2, 0, 10)


@pytest.fixture(scope="module")
def parameters():
    return initial_parameters(CONFIG, Run("bf16"), 0, ONE_DEVICE)[1]


@pytest.mark.parametrize("states", [name for name in STATES if name != "float32"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_starts_from_the_float32_parameters(parameters, name, states):
    if name == "muon" and states in optimizer_study.FAULTS:
        pytest.skip("faults of AdamW")
    p, state = Optimizer(name, states=states).start(SCHEDULE, parameters)
    expected = jax.tree.leaves(parameters)
    rests = jax.tree.leaves(state.inner_state[1].remainders, is_leaf=lambda x: x is None) if "masters" in states else []
    for i, (x, whole) in enumerate(zip(jax.tree.leaves(p), expected, strict=True)):
        assert x.dtype == (jnp.bfloat16 if "masters" in states and x.ndim > 1 else jnp.float32)
        if states.endswith("32") and x.ndim > 1:
            assert_same_bytes(join(x, rests[i]), whole)
        elif x.dtype == jnp.float32:
            assert_same_bytes(x, whole)


def test_equal_steps_make_second_moments_zero():
    x = jnp.zeros((32, 200)).at[:, 0].set(2.55).at[:, 1].set(0.004).at[:, 150].set(1e-6)
    inner = optax.scale_by_adam(b1=0.0, b2=0.0)
    nu = np.asarray(linear_int8(inner).update(jnp.sqrt(x), inner.init(x))[1].nu)
    np.testing.assert_allclose(nu[:, :2], [[2.55, 0.0]] * 32, rtol=1e-6)
    np.testing.assert_allclose(nu[:, 150], 1e-6, rtol=1e-6)  # of another block


def test_a_gap_of_either_sign_exceeds_the_bound():
    def entry(run, gap, finite=True):
        return {"run": run, "finite": finite, "loss_gap_percent": {"mean": gap, "mean_magnitude": abs(gap)}}

    def within(noise, *others):
        return [e["within"] for e in optimizer_study.judged([entry(optimizer_study.NOISE, noise), *others])[1:]]

    assert within(0.001, entry("a", 0.05), entry("b", -0.07), entry("c", 0.07)) == [True, False, False]
    assert within(0.03, entry("a", 0.08), entry("b", -0.1), entry("c", 0.0, finite=False)) == [True, False, False]


@pytest.mark.slow
def test_states_of_8_bits_train_as_float32_and_faults_do_not(tmp_path):
    """A second moment that stands still lowers the loss, equal steps raise it: both are seen."""
    options = argparse.Namespace(out=tmp_path, seeds=1, batch=8, learning_rate=1e-3, split=None)
    part = optimizer_study.Part("adamw", 0.999, "bf16", ("8-bit", "8-bit-masters-24", *optimizer_study.FAULTS))
    sides = [(run, CONFIG) for run in part.runs()]
    found = study.results_of(options, read_text(None), 200, sides)
    entries = {e["run"]: e for e in optimizer_study.judged(study.summarize(found, optimizer_study.BASELINE))}
    within = {name: e["within"] for name, e in entries.items()}
    assert within == {name: name not in optimizer_study.FAULTS for name in within}, entries
    assert entries["8-bit-nearest"]["loss_gap_percent"]["mean"] < 0 < entries["linear-int8"]["loss_gap_percent"]["mean"]
