"""Tapes of int16 and uint8, and in host memory: they replay the same bits as int32 on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes
from tests.moe import stack
from tests.sharding.meshes import mesh_of, place

RoutingTape = jlp.moe.RoutingTape
NARROW = ("int16", "uint8")
each_dtype = pytest.mark.parametrize("dtype", NARROW)


def choices(experts, k, seed=0, layers=2, tokens=24):
    """Choices of every id, and a row that chooses afresh."""
    rng = np.random.default_rng(seed)
    found = np.stack([[rng.permutation(experts)[:k] for _ in range(tokens)] for _ in range(layers)]).astype(np.int32)
    found[0, 0] = experts - 1 - np.arange(k)
    found[1, 3] = jlp.moe.AFRESH
    return RoutingTape(jnp.asarray(found))


class TestAstype:
    @pytest.mark.parametrize(
        ("dtype", "experts", "k"),
        [
            ("uint8", 256, 2),
            ("uint8", 256, 8),
            ("uint8", 254, 1),
            ("int16", 300, 4),
            ("int16", 32768, 1),
            ("uint8", 8, 2),
        ],
    )
    def test_there_and_back_is_the_same_tape(self, dtype, experts, k):
        tape = choices(experts, k)
        narrow = jax.jit(lambda tape: tape.astype(dtype, num_experts=experts))(tape)
        assert (
            narrow.experts.dtype == dtype
            and narrow.experts.nbytes * (4 if dtype == "uint8" else 2) == tape.experts.nbytes
        )
        narrow.check(experts)
        assert_same_bytes(jax.jit(lambda t: t.astype("int32", num_experts=experts))(narrow), tape)
        assert_same_bytes(RoutingTape(np.asarray(tape.experts)).astype(dtype, num_experts=experts), narrow)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("dtype", "experts", "k"),
        [("uint8", 256, 2), ("uint8", 254, 1), ("uint8", 8, 3), ("int16", 8, 1), ("int16", 300, 2)],
    )
    def test_what_is_no_choice_stays_none(self, dtype, experts, k):
        tape, logits = choices(experts, k), jnp.zeros((24, experts))
        for first in (experts, 2**16 + 256 + 1, -2, *((1, -1) if k > 1 else ())):  # the last two: twice, and partly -1
            spoilt = RoutingTape(tape.experts.at[1, 5].set(jnp.arange(k)).at[1, 5, 0].set(first))
            narrow = spoilt.astype(dtype, num_experts=experts)
            for either in (spoilt, narrow):
                with pytest.raises(ValueError, match="layer 1, token 5"):
                    either.check(experts)
            weights = jlp.moe.route(logits, k, tape=narrow[1]).weights
            assert jnp.all(jnp.isnan(weights[5])) and jnp.all(jnp.isfinite(weights.at[5].set(0)))

    @pytest.mark.parametrize(
        ("dtype", "experts", "k", "remedy"),
        [
            ("uint8", 257, 2, "int16"),
            ("uint8", 255, 1, "int16"),
            ("int16", 32769, 2, "int32"),
            ("uint8", 40000, 2, "int32"),
        ],
    )
    def test_experts_that_do_not_fit_are_named(self, dtype, experts, k, remedy):
        with pytest.raises(
            ValueError, match=rf"astype: {experts} experts with k={k} and a tape of {dtype}.*needs {remedy}"
        ):
            RoutingTape.afresh(1, 2, k).astype(dtype, num_experts=experts)
        with pytest.raises(ValueError, match=rf"route: {experts} experts with k={k}"):
            jlp.moe.route(jnp.zeros((2, experts)), k, tape=jnp.zeros((2, k), dtype))
        with pytest.raises(ValueError, match=f"{experts} experts"):
            RoutingTape.afresh(1, 2, k, dtype).check(experts)

    def test_another_dtype_is_named(self):
        with pytest.raises(ValueError, match=r"astype: dtype=int8; needs int32, int16 or uint8"):
            RoutingTape.afresh(1, 2, 2).astype("int8", num_experts=4)
        with pytest.raises(ValueError, match=r"afresh: dtype=float32; needs int32, int16 or uint8"):
            RoutingTape.afresh(1, 2, 2, jnp.float32)
        with pytest.raises(
            ValueError, match=r"layers are int32\[2, 2\], uint8\[2, 2\]; needs int32, int16 or uint8 of one"
        ):
            RoutingTape.of_layers([jnp.zeros((2, 2), dtype) for dtype in (jnp.int32, jnp.uint8)])


@each_dtype
class TestNarrow:
    @pytest.mark.slow
    def test_route_takes_it(self, dtype):
        x = jax.random.normal(jax.random.key(0), (24, 256))
        tape = choices(256, 4)
        narrow = tape.astype(dtype, num_experts=256)
        route = jax.jit(lambda tape: jlp.moe.route(x, 4, tape=tape))
        assert_same_bytes(route(narrow[1]), route(tape[1]))

    def test_overlap_compares_it_with_any_other(self, dtype):
        a, b = choices(256, 4), choices(256, 4, seed=1)
        expected = jlp.moe.overlap(a, b)
        assert_same_bytes(jlp.moe.overlap(a.astype(dtype, num_experts=256), b), expected)

    @pytest.mark.slow
    def test_a_pass_records_in_the_dtype_that_it_is_given(self, dtype):
        moe, params, x = stack.block(), stack.parameters(), stack.tokens()
        run = jax.jit(lambda tape: stack.run(moe, params, x, tape))
        expected = run(RoutingTape.afresh(stack.LAYERS, stack.TOKENS, stack.K))
        recorded = run(RoutingTape.afresh(stack.LAYERS, stack.TOKENS, stack.K, dtype))
        assert recorded[2].experts.dtype == dtype
        assert_same_bytes(recorded[2], expected[2].astype(dtype, num_experts=stack.EXPERTS))
        assert_same_bytes(run(recorded[2]), recorded)
        assert_same_bytes(recorded[:2], expected[:2])


class TestHostMemory:
    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["int32", *NARROW])
    def test_replays_from_there_within_scan(self, dtype):
        moe, params, x = stack.block(), stack.parameters(), stack.tokens()
        run = jax.jit(lambda tape: stack.run(moe, params, x, tape))
        tape = run(RoutingTape.afresh(stack.LAYERS, stack.TOKENS, stack.K, dtype))[2]
        hosted = tape.to_host()
        assert hosted.experts.sharding.memory_kind == "pinned_host" and hosted.experts.dtype == dtype
        assert_same_bytes(run(hosted), run(tape))
        hosted.check(stack.EXPERTS)
        assert_same_bytes(hosted.to_device(), tape)
        assert hosted.to_device().experts.sharding.memory_kind == "device"

    def test_keeps_the_sharding(self):
        mesh = mesh_of((2,))
        tape = choices(8, 2)
        placed = RoutingTape(place(tape.experts, mesh, P(None, "a")))
        hosted = placed.to_host()
        assert hosted.experts.sharding.spec == P(None, "a") and hosted.experts.sharding.memory_kind == "pinned_host"
        x = place(jax.random.normal(jax.random.key(0), (24, 8)), mesh, P("a"))
        route = jax.jit(lambda experts: jlp.moe.route(x, 2, tape=experts[1]))
        assert_same_bytes(jax.device_get(route(hosted.experts)), jax.device_get(route(placed.experts)))

    def test_a_pass_may_leave_its_record_there(self):
        tape = choices(8, 2)
        hosted = jax.jit(lambda tape: tape.to_host())(tape)
        assert hosted.experts.sharding.memory_kind == "pinned_host"
        assert_same_bytes(jax.jit(lambda tape: tape.to_device())(hosted), tape)
        assert_same_bytes(hosted[0], tape[0])

    def test_devices_without_it_are_named(self, monkeypatch):
        class Device:
            def __repr__(self):
                return "tpu:0"

            def addressable_memories(self):
                return [type("Memory", (), {"kind": "device"})]

        tape = RoutingTape(jnp.zeros((1, 2, 2), jnp.int32))
        monkeypatch.setattr(type(tape.experts), "devices", lambda _: {Device()})
        with pytest.raises(ValueError, match=r"to_host: tpu:0 has memories device; needs pinned_host: keep the tape"):
            tape.to_host()
