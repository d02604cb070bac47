"""Tokens that travel once to each device of their experts: everything is as where each device has all tokens, and the
devices' sums are rounded and added up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec import traffic
from jaxlowprec.moe.deduplicated import DeduplicatedAllToAll, to_devices
from jaxlowprec.moe.router import Routing
from jaxlowprec.moe.wire import formats_of
from tests.helpers import assert_same_bytes, often, random_array
from tests.moe.exchange.test_exchange import CASES, EXPERTS, FORMS, K, step
from tests.moe.exchange.test_wire import (
    FP4,
    MX,
    TOKENS,
    WIDTH,
    assert_same_in_remat_and_scan,
    experts_of,
    layers_of,
    operands,
    through,
)
from tests.sharding.meshes import mesh_of


def routing_of(experts, weights):
    sizes = jnp.zeros(EXPERTS, jnp.int32).at[experts.reshape(-1)].add(1)
    none = jnp.zeros((), jnp.float32)
    return Routing(experts, weights, sizes, none, none, none)


def over_devices(devices, recipe, form="padded", factor=2.0, wire="rows", pure=True):
    def local(x, kernels, weights, experts):
        layers = layers_of(kernels, recipe)
        groups = DeduplicatedAllToAll(routing_of(experts, weights), "a", factor, form, wire)
        return groups.run(experts_of(layers), x, layers if pure else None)[0]

    return jax.shard_map(local, mesh=mesh_of((devices,)), in_specs=(P("a"),) * 4, out_specs=P("a"))


@functools.cache
def step_over_devices(devices, recipe, form="padded", wire="rows"):
    """Compiled once for all choices of experts."""
    return step(over_devices(devices, recipe, form, wire=wire))


@functools.cache
def step_in_turn(devices, recipe, wire):
    return step(functools.partial(in_turn, devices=devices, recipe=recipe, wire=wire))


def in_turn(x, kernels, weights, experts, devices, recipe, wire="rows"):
    """Each device's experts, one device after the other, in buffers for all tokens."""
    own = EXPERTS // devices
    found = formats_of("MoE", layers_of(kernels, recipe), x.dtype, wire)
    where = to_devices(experts, own, devices)
    ends = jnp.cumsum(where.group_sizes)
    device = jnp.searchsorted(ends, jnp.arange(where.order.shape[0]), side="right")  # of each row
    token = where.order // K
    rows = through(jlp.moe.scatter_to_experts(x, where), found.rows, found.back)
    tokens = jnp.zeros((devices, *x.shape), x.dtype).at[device, token].set(rows, mode="drop")

    def of(d):
        layers = layers_of(tuple(w[d * own : (d + 1) * own] for w in kernels), recipe)
        here = jlp.moe.dispatch(experts - own * d, own)
        rows = experts_of(layers)(jlp.moe.scatter_to_experts(tokens[d], here), here.group_sizes)
        return jlp.moe.combine(rows, weights, here).astype(rows.dtype)

    sums = jnp.stack([of(d) for d in range(devices)])
    returned = through(sums.at[device, token].get(mode="fill", fill_value=0), found.back, found.gradient)
    return jlp.moe.combine(returned, jnp.ones(where.places.shape, jnp.float32), where)


@pytest.mark.slow
@pytest.mark.usefixtures("ragged_on_cpus")
@pytest.mark.parametrize("case", often(CASES[:1], CASES))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("devices", often([4], [1, 2, 4, 8]))
@pytest.mark.parametrize("wire", ["rows", "codes", "codes_both_ways"])
@pytest.mark.parametrize("recipe", often([MX], [MX, FP4, None]), ids=str)
def test_a_step(recipe, wire, devices, form, case):
    given = operands(case, devices)
    *found, of_weights = step_over_devices(devices, recipe, form, wire)(*given)
    *expected, expected_of_weights = step_in_turn(devices, recipe, wire)(*given)
    assert_same_bytes(found, expected)
    np.testing.assert_allclose(of_weights, expected_of_weights, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_token_travels_once_to_a_device():
    where = to_devices(jnp.asarray([[5, 0, 4], [1, 3, 2], [7, 6, 0]], jnp.int32), 2, 4)
    assert where.group_sizes.tolist() == [3, 1, 1, 1]
    # Rows by device: tokens 0, 1, 2 to the first, 1 to the second, 0 to the third, 2 to the last.
    assert (where.order // 3).tolist()[:6] == [0, 1, 2, 1, 0, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "pure"), [(0.1, True), (0.1, False), (0.6, True), (100, False)])
def test_buffers_of_any_size(factor, pure):
    given = operands("even", 4)
    *wanted, wanted_of_weights = step_over_devices(4, MX)(*given)
    *found, of_weights = step(over_devices(4, MX, factor=factor, pure=pure))(*given)
    assert_same_bytes(found, wanted)
    # The compiler chooses the order of a weight's sum over features, by program.
    np.testing.assert_allclose(of_weights, wanted_of_weights, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_under_remat_scan_and_without_tokens():
    x, kernels, weights, experts = given = operands("even", 4)
    function = over_devices(4, MX, wire="codes_both_ways")
    assert_same_in_remat_and_scan(function, given, step_over_devices(4, MX, wire="codes_both_ways")(*given))
    assert jax.jit(function)(x[:0], kernels, weights[:0], experts[:0]).shape == (0, x.shape[1])


@pytest.mark.slow
def test_the_result_is_near_that_of_one_device():
    """A bf16 sum of each device, and codes on top, are rounded once each: 2^-9 and 2^-4 of a number at most."""
    *given, experts = operands("even", 4)
    dy = random_array(given[0].shape, "float32", seed=5)

    def results(function):
        @jax.jit
        def run(*given):
            y, pullback = jax.vjp(lambda *given: function(*given, experts), *given)
            return jax.tree.leaves((y, pullback(dy)[:2]))

        return jax.device_get(run(*given))

    exact = [np.float32(leaf) for leaf in results(over_devices(1, MX))]

    def error(wire):
        found = results(over_devices(4, MX, wire=wire))
        return [np.linalg.norm(np.float32(a) - b) / np.linalg.norm(b) for a, b in zip(found, exact, strict=True)]

    assert max(error("rows")) < 0.005
    y, of_x, *of_kernels = error("codes_both_ways")
    assert 0.01 < y < 0.04 and 0.01 < of_x < 0.05 and max(of_kernels) < 0.06


@pytest.mark.slow
def test_hostile_rows_stay_with_their_tokens():
    x, kernels, weights, experts = operands("even", 4)
    bad = 7
    function = jax.jit(over_devices(4, MX, wire="codes_both_ways"))
    fine = function(x, kernels, weights, experts)
    x, weights = np.array(x), np.array(weights)
    for value in (np.nan, np.inf):
        spoiled = x.copy()
        spoiled[bad] = value
        y = np.float32(function(spoiled, kernels, weights, experts))
        assert np.isnan(y[bad]).all()
        assert_same_bytes(np.delete(y, bad, axis=0), np.delete(np.float32(fine), bad, axis=0))
    weights[bad, 1] = np.nan
    y = np.float32(function(x, kernels, weights, experts))
    assert np.isnan(y[bad]).any() and np.isfinite(np.delete(y, bad, axis=0)).all()


def test_codes_travel():
    compiled = step(over_devices(8, MX, factor=100, wire="codes_both_ways")).lower(*operands("even", 8)).compile()
    large = [c for c in traffic.collectives(compiled) if c.elements > 8 * TOKENS * WIDTH // 2]
    assert {c.kind for c in large} == {"all-to-all"}
    assert [dtype for c in large for dtype in {dtype for dtype, _ in c.results}] == ["u8"] * 4
