"""What `mismatch` measures, beside float64 NumPy, and its picture."""

import functools
import json
import math
import operator

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxlowprec as jlp
from jaxlowprec.rl.measures import EDGES
from tests.rl.test_importance import batch

THRESHOLD = 0.5
measure = jax.jit(functools.partial(jlp.rl.mismatch, threshold=THRESHOLD))


def reference(trainer, engine, mask):
    """The same in float64."""
    log = (trainer.astype(np.float64) - engine.astype(np.float64))[mask]
    ratio = np.exp(log)
    return {
        "tokens": len(log),
        "nonfinite": 0,
        "k1": -log.mean(),
        "k2": (log**2 / 2).mean(),
        "k3": (np.expm1(log) - log).mean(),
        "mean_absolute": np.abs(log).mean(),
        "largest_absolute": np.abs(log).max(),
        "extreme_fraction": (np.abs(log) > THRESHOLD).mean(),
        "least_ratio": ratio.min(),
        "largest_ratio": ratio.max(),
        "effective_sample_size": ratio.sum() ** 2 / (ratio**2).sum() / len(log),
    }


def assert_close(found, expected, rtol=2e-5):
    found = found.summary()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, err_msg=name)


@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_measures_are_those_of_numpy(spread):
    given = batch(spread=spread)
    assert_close(measure(*given), reference(*given))


def test_small_divergences_keep_their_digits():
    """k3 of log-ratios near 1e-5 is near 5e-11, which r - 1 - log r in float32 would lose."""
    trainer, engine, mask = batch()
    trainer = engine + np.float32(1e-5) * np.sign(trainer - engine)
    expected = reference(trainer, engine, mask)
    assert 1e-11 < expected["k3"] < 1e-10
    assert_close(measure(trainer, engine, mask), expected)


def test_batches_add_up_to_the_whole():
    batches = [batch(seed) for seed in range(3)]
    whole = measure(*map(np.concatenate, zip(*batches, strict=True)))
    added = functools.reduce(operator.add, [measure(*each) for each in batches])
    assert_close(added, whole.summary())
    np.testing.assert_array_equal(added.counts, whole.counts)
    on_host = functools.reduce(operator.add, [measure(*each).on_host() for each in batches])
    assert on_host.tokens.dtype == np.int64 and on_host.sum_k3.dtype == np.float64
    assert_close(on_host, whole.summary())


def test_shards_add_up_to_the_whole():
    devices = jax.device_count()
    trainer, engine, mask = batch(shape=(4 * devices, 5))
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("data")
    of_all = jax.shard_map(
        lambda *given: jlp.rl.mismatch(*given, threshold=THRESHOLD).over("data"),
        mesh=mesh,
        in_specs=(rows, rows, rows),
        out_specs=PartitionSpec(),
    )
    assert_close(jax.jit(of_all)(trainer, engine, mask), reference(trainer, engine, mask))


def test_an_empty_shard_changes_nothing():
    trainer, engine, mask = batch()
    none = measure(trainer, engine, np.zeros_like(mask))
    assert none.summary()["tokens"] == 0 and math.isnan(none.k3) and math.isnan(none.effective_sample_size)
    assert_close(measure(trainer, engine, mask) + none, reference(trainer, engine, mask))


def test_numbers_that_are_not_finite_are_counted_and_left_out():
    trainer, engine, mask = batch()
    expected = reference(trainer, engine, mask)
    places = np.argwhere(~mask)[:4]
    for (row, column), value in zip(places, (np.nan, np.inf, -np.inf, np.nan), strict=True):
        (trainer if value == np.inf else engine)[row, column] = value
        mask[row, column] = True
    assert_close(measure(trainer, engine, mask), expected | {"nonfinite": 4})


def test_the_histogram_counts_every_token_in_its_bin():
    trainer, engine, mask = batch(spread=3.0)
    found = measure(trainer, engine, mask)
    log = np.float32(trainer - engine)[mask]
    edges = np.float32([-np.inf, *EDGES, np.inf])
    np.testing.assert_array_equal(found.histogram, np.histogram(log, edges)[0])
    tenth = np.minimum(np.exp(engine[mask]) * 10, 9).astype(int)
    np.testing.assert_array_equal(np.asarray(found.counts).sum(1), np.bincount(tenth, minlength=10))
    assert measure(engine, engine, mask).histogram.tolist() == [0] * 29 + [int(mask.sum())] + [0] * 29


def test_equal_log_probabilities_have_no_divergence():
    _, engine, mask = batch()
    found = measure(engine, engine, mask)
    assert found.k1 == found.k2 == found.k3 == found.largest_absolute == found.extreme_fraction == 0
    assert found.least_ratio == found.largest_ratio == 1
    assert found.effective_sample_size == pytest.approx(1, abs=1e-6)


def test_ratios_beyond_float32_leave_the_effective_sample_size():
    found = jlp.rl.mismatch(jax.device_put(np.float32([-1.0, -1.0])), jax.device_put(np.float32([-200.0, -1.0])))
    assert found.effective_sample_size == pytest.approx(0.5, rel=1e-4)
    assert found.k3 == math.inf and found.k1 == pytest.approx(-99.5)


def test_wrong_arguments_are_named():
    a = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="threshold=0; needs a number above 0"):
        jlp.rl.mismatch(a, a, threshold=0)
    with pytest.raises(ValueError, match=r"thresholds 0.5 and 1.0; needs the same"):
        measure(a, a) + jlp.rl.mismatch(a, a, threshold=1)
    with pytest.raises(ValueError, match=r"mismatch: trainer \(3,\)"):
        jlp.rl.mismatch(a, a[:2])


def test_json_keeps_every_sum():
    found = measure(*batch()).on_host() + jlp.rl.mismatch(*batch(1), threshold=THRESHOLD).on_host()
    again = jlp.rl.Mismatch.from_json(json.loads(json.dumps(found.to_json())))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.all(a == b)), again, found))
    for wrong in ({}, {"sums": 1}, None):
        with pytest.raises(ValueError, match="needs what to_json gave"):
            jlp.rl.Mismatch.from_json(wrong)
