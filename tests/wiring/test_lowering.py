"""Result types, which body is lowered where, and the transforms that only pass through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlowprec.wiring.defining import ShardingRule, define
from tests.sharding.meshes import by_axis_type, mesh_of, place
from tests.wiring.small_ops import BLOCK, RULE, assert_right, block_sums, body, operands, outputs, reference_only


def plus_one(name, record, **options):
    """An op that notes which body was traced, and for which shape."""

    def recording(which):
        def run(x):
            record.append((which, x.shape))
            return [x + 1]

        return run

    bodies = {"reference": recording("reference"), "native": recording("native")}
    return define(
        name, rule=ShardingRule("... r -> ... r"), outputs=lambda x: [(x.shape, x.dtype)], **bodies, **options
    )


@pytest.mark.parametrize("shape", [(16, 64), (2, 3, 5, 8)], ids=str)
def test_shapes_and_dtypes_come_from_outputs_alone(shape):
    def never(*_):
        raise AssertionError("a body was traced")

    op = define("typed", rule=RULE, outputs=outputs, reference=never, native=never, platforms=("cpu",))
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (shape, shape[:-2], shape[-2:-1])]
    sums, seen = jax.eval_shape(op, *args)
    assert (sums.shape, sums.dtype, sums.weak_type) == ((*shape[:-1], shape[-1] // BLOCK), jnp.float32, False)
    assert (seen.shape, seen.dtype) == (sums.shape, jnp.int32)


def test_an_op_is_one_equation():
    """How a mesh splits it is found when it is lowered."""
    op = define("within", rule=RULE, outputs=outputs, reference=body(1), inline=True)
    (eqn,) = jax.make_jaxpr(op)(*operands((4, 8))).eqns
    assert eqn.primitive.name == "within"


@pytest.mark.parametrize(("platform", "ran"), [("cpu", "native"), ("cuda", "reference"), ("tpu", "reference")])
def test_only_the_chosen_body_is_traced(platform, ran):
    traced = []
    op = plus_one("recorded", traced, platforms=("cpu",))
    jax.jit(lambda x: op(x)).trace(jnp.ones(4)).lower(lowering_platforms=(platform,))
    assert traced == [(ran, (4,))]


class TestOnOneDevice:
    """A body that the platform's compiler cannot split over devices."""

    def ran(self, function, *args, platform="tpu", **options):
        traced = []
        bodies = {which: lambda x, w=which: [traced.append(w) or x + 1] for which in ("portable", "alone", "reference")}
        op = define(
            "alone",
            rule=ShardingRule("... r -> ... r"),
            outputs=lambda x: [(x.shape, x.dtype)],
            reference=bodies["reference"],
            portable=bodies["portable"],
            on_one_device={"tpu": bodies["alone"]},
            **{"elsewhere": "portable", **options},
        )
        jax.jit(lambda *args: function(op, *args)).trace(*args).lower(lowering_platforms=(platform,))
        return traced

    def test_a_program_of_one(self):
        assert self.ran(lambda op, x: op(x), jnp.ones(4)) == ["alone"]
        assert self.ran(lambda op, x: op(x), jnp.ones(4), platform="cuda") == ["portable"]
        assert self.ran(lambda op, x: op(x), jnp.ones(4), elsewhere="reference") == ["reference"]

    def test_nothing_to_do(self):
        assert self.ran(lambda op, x: op(x), jnp.ones(0)) == ["reference"]

    @by_axis_type
    def test_a_program_of_several(self, axis_type):
        x = place(jnp.ones(8), mesh_of((4,), axis_type), P("a"))
        assert self.ran(lambda op, x: op(x), x) == ["portable"]

    def test_in_shard_map_over_all_axes(self):
        mesh = mesh_of((2, 2))

        def within(op, x):
            return jax.shard_map(lambda x: op(x)[0], mesh=mesh, in_specs=P("a"), out_specs=P("a"))(x)

        assert self.ran(within, place(jnp.ones(8), mesh, P("a"))) == ["alone"]

    def test_in_shard_map_over_some_axes(self):
        mesh = mesh_of((2, 2))

        def within(op, x):
            mapped = jax.shard_map(lambda x: op(x)[0], mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
            return mapped(x)

        assert self.ran(within, place(jnp.ones(8), mesh, P("a"))) == ["portable"]


@pytest.mark.parametrize(("platform", "ran"), [("cpu", "on the CPU"), ("cuda", "on the GPU"), ("tpu", "reference")])
def test_platforms_may_have_different_native_bodies(platform, ran):
    traced = []

    def recording(which):
        return lambda x: [traced.append(which) or x + 1]

    bodies = {"cpu": recording("on the CPU"), "cuda": recording("on the GPU")}
    op = define(
        "differing",
        rule=ShardingRule("... r -> ... r"),
        outputs=lambda x: [(x.shape, x.dtype)],
        reference=recording("reference"),
        native=bodies,
        platforms=tuple(bodies),
    )
    jax.jit(lambda x: op(x)).trace(jnp.ones(4)).lower(lowering_platforms=(platform,))
    assert traced == [ran]


def test_eager_calls_of_one_shape_trace_once():
    traced = []
    op = plus_one("counted", traced)
    for n in (4, 4, 4, 5):
        op(jnp.ones(n))
    assert traced == [("reference", (4,)), ("reference", (5,))]


def test_disable_jit_still_runs_the_native_body():
    args = operands((4, 8))
    with jax.disable_jit():
        assert_right(block_sums(*args), args, (4, 2))


def test_disable_jit_runs_ops_whose_bodies_call_other_ops():
    outer = define("block_sums_outside", rule=RULE, outputs=outputs, reference=lambda *args: list(block_sums(*args)))
    args = operands((4, 8))
    with jax.disable_jit():
        assert_right(outer(*args), args, (4, 2))


def test_a_derivative_is_refused_not_wrong():
    x, gain, rows = operands((4, 8))
    with pytest.raises((NotImplementedError, ValueError, TypeError)):
        jax.grad(lambda x: block_sums(x, gain, rows)[0].sum())(x)


def test_scan_and_remat():
    args = operands((3, 8, 16))
    x, gain, rows = args

    def step(carry, slices):
        return carry + 1, jax.checkpoint(lambda s: block_sums(*s, rows))(slices)

    count, out = jax.jit(lambda: jax.lax.scan(step, 0, (x, gain)))()
    assert count == 3
    assert_right(out, args, (8, 4))


def test_cond_runs_the_branch_it_takes():
    args = operands((8, 16))
    chosen = jax.jit(lambda flag: jax.lax.cond(flag, block_sums, reference_only, *args))
    assert set(np.unique(chosen(True)[1])) == {-8004}
    assert set(np.unique(chosen(False)[1])) == {8004}


class TestOnlyNative:
    OP = staticmethod(
        define(
            "demanding",
            rule=RULE,
            outputs=outputs,
            reference=body(1),
            native=body(-1),
            platforms=("cuda",),
            elsewhere="refused",
        )
    )
    MESSAGE = r'demanding: implementation="ffi" has kernels for \(\'cuda\',\), not for this platform'

    def test_another_platform_is_refused(self):
        with pytest.raises(NotImplementedError, match=self.MESSAGE):
            self.OP(*operands((4, 8)))

    def test_another_platform_is_refused_on_a_mesh(self):
        x, gain, rows = operands((4, 8))
        with pytest.raises(Exception, match=self.MESSAGE):  # XLA wraps what a partitioner raises
            self.OP(place(x, mesh_of((2,)), P("a")), gain, rows)

    def test_shapes_and_lowering_for_its_platform_work_anywhere(self):
        args = operands((4, 8))
        assert jax.eval_shape(self.OP, *args)[0].shape == (4, 2)
        lowered = jax.jit(lambda *a: self.OP(*a)).trace(*args).lower(lowering_platforms=("cuda",))
        assert "-4002" in lowered.as_text()

    def test_the_reason_is_named_where_it_is_known(self):
        op = plus_one("absent", [], platforms=("cpu",), elsewhere="refused", missing={"cuda": "no driver"})
        traced = jax.jit(lambda x: op(x)).trace(jnp.ones(4))
        with pytest.raises(NotImplementedError, match=r"absent: .* kernels for \('cpu',\), not for cuda: no driver"):
            traced.lower(lowering_platforms=("cuda",))
