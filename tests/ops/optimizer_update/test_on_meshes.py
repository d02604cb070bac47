"""AdamW's and Lion's update in programs: the same bytes on every mesh and under vmap, in the memory of its operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlowprec.ops.optimizer_states import Coded
from jaxlowprec.ops.optimizer_update import optimizer_update
from tests.helpers import assert_same_bytes
from tests.ops.optimizer_update.cases import SCALARS, WORDS, expected, operands
from tests.sharding.meshes import by_axis_type, mesh_of, name_of, place

STOCHASTIC = ("stochastic", "stochastic")
SHAPES = ((16, 256), (16, 96), (2, 8, 64), (256,))  # on the second and the last, shards straddle blocks of 32
MESHES = [((8, 1), P("a", None)), ((2, 4), P("a", "b")), ((1, 8), P(None, "b"))]


def placed(args, mesh, spec):
    """Operands split along their last two axes; the exponents of shards that straddle blocks are whole."""

    def put(x):
        if x.shape in ((9,), (6,), (2, 2)):
            return place(x, mesh, P())
        axes = [None] * max(x.ndim - 2, 0) + list(spec)[-x.ndim :]
        sizes = [1 if axis is None else mesh.shape[axis] for axis in axes]
        fits = [axis if n % size == 0 else None for axis, n, size in zip(axes, x.shape, sizes, strict=True)]
        return place(x, mesh, P(*fits))

    return jax.tree.map(put, args)


class TestMeshes:
    @by_axis_type
    @pytest.mark.parametrize(("sizes", "spec"), MESHES, ids=name_of)
    @pytest.mark.parametrize("implementation", [None, "reference"])
    @pytest.mark.parametrize(("rule", "codes"), [("adamw", STOCHASTIC), ("lion", ("stochastic", None))])
    def test_bytes_do_not_depend_on_the_mesh(self, sizes, spec, axis_type, implementation, rule, codes):
        mesh = mesh_of(sizes, axis_type)
        all_args = [operands(s, codes, jnp.bfloat16, 16, seed=i, rule=rule) for i, s in enumerate(SHAPES)]
        step = functools.partial(optimizer_update, rule=rule, codes=codes, bits=16, implementation=implementation)
        with jax.set_mesh(mesh):
            found = jax.jit(lambda many: [step(*args) for args in many])([placed(a, mesh, spec) for a in all_args])
        for args, new in zip(all_args, found, strict=True):
            assert_same_bytes(tuple(jax.device_get(new)), expected(args, codes, 16, rule=rule))

    @by_axis_type
    def test_results_are_split_as_operands(self, axis_type):
        mesh, spec = mesh_of((2, 4), axis_type), P("a", "b")
        args = operands((16, 256), STOCHASTIC, jnp.bfloat16, 32)
        with jax.set_mesh(mesh):
            new = jax.jit(functools.partial(optimizer_update, codes=STOCHASTIC, bits=32))(*placed(args, mesh, spec))
        for x in jax.tree.leaves(new):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2), x.sharding

    def test_float32_states_are_split_anywhere(self):
        """Without blocks and draws nothing moves between devices."""
        mesh = mesh_of((2, 4))
        args = operands((6, 20), (None, None), np.float32, None)
        step = jax.jit(functools.partial(optimizer_update, codes=(None, None)))
        with jax.set_mesh(mesh):
            given = placed(args, mesh, P("a", "b"))
            compiled = step.lower(*given).compile()
            new = compiled(*given)
        assert_same_bytes(tuple(jax.device_get(new)), expected(args, (None, None), None))
        assert "all-gather" not in compiled.as_text() and "all-reduce" not in compiled.as_text()

    def test_shards_within_shard_map_are_refused_if_drawn(self):
        mesh = mesh_of((8,))
        args = operands((16, 64), ("nearest", None), np.float32, None)

        def step(codes, words):
            part = functools.partial(optimizer_update, codes=codes)
            specs = (P("a"), P("a"), None, P("a"), P("a"), P(), P())
            return jax.jit(jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P("a")))(*args[:6], words)

        assert_same_bytes(tuple(jax.device_get(step(("nearest", None), None))), expected(args, ("nearest", None), None))
        with pytest.raises(ValueError, match=r"differs along the mesh axes \['a'\].*update outside of jax.shard_map"):
            step(("stochastic", None), WORDS)


class TestVmap:
    def test_a_mapped_axis_is_no_axis_of_the_array(self):
        """Each example has the draws of an array of its own, by its own words or by the same."""
        examples = [operands((5, 40), STOCHASTIC, jnp.bfloat16, 16, seed=i) for i in range(3)]
        step = functools.partial(optimizer_update, codes=STOCHASTIC, bits=16)
        for own in (True, False):
            words = [WORDS + np.uint32(i * own) for i in range(3)]
            many = jax.tree.map(lambda *x: np.stack(x), *[e[:5] for e in examples])
            mapped = jax.vmap(step, (0, 0, None, 0, 0, None, 0 if own else None))
            found = jax.jit(mapped)(*many, SCALARS, np.stack(words) if own else WORDS)
            for i, example in enumerate(examples):
                wanted = expected((*example[:6], words[i]), STOCHASTIC, 16)
                assert_same_bytes(jax.tree.map(lambda x, i=i: x[i], tuple(found)), wanted)

    def test_scalars_may_be_those_of_each_example(self):
        """inject_hyperparams over a population."""
        args = operands((4, 33), (None, "nearest"), np.float32, None)
        scalars = np.stack([SCALARS, 2 * SCALARS])
        step = functools.partial(optimizer_update, codes=(None, "nearest"))
        found = jax.vmap(lambda s: step(*args[:5], s, None))(scalars)
        for i in range(2):
            wanted = expected((*args[:5], scalars[i], None), (None, "nearest"), None)
            assert_same_bytes(jax.tree.map(lambda x, i=i: x[i], tuple(found)), wanted)


class TestMemory:
    @pytest.mark.parametrize(("bits", "result"), [(32, "parameter"), (24, "update")])
    @pytest.mark.parametrize(("rule", "codes"), [("adamw", STOCHASTIC), ("lion", ("stochastic", None))])
    def test_the_new_state_takes_the_place_of_the_old_one(self, rule, codes, bits, result):
        shape = (256, 512)
        args = jax.tree.map(jnp.array, operands(shape, codes, jnp.bfloat16, bits, hostile=False, rule=rule))
        update = functools.partial(optimizer_update, rule=rule, codes=codes, bits=bits, result=result)
        step = jax.jit(update, donate_argnums=(1, 2, 3, 4))
        compiled = step.lower(*args).compile()
        memory = compiled.memory_analysis()
        kept = [*args[1:5]] if result == "parameter" else [*args[2:5]]
        assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(kept))
        assert memory.temp_size_in_bytes <= 0.1 * np.prod(shape)
        places = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(kept)}
        new = compiled(*args)
        kept = tuple(new) if result == "parameter" else tuple(new)[1:]
        assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(kept)} == places

    def test_operands_that_are_not_donated_stay(self):
        args = jax.device_put(operands((16, 64), STOCHASTIC, jnp.bfloat16, 32))
        before = jax.tree.map(np.array, args)
        new = jax.jit(functools.partial(optimizer_update, codes=STOCHASTIC, bits=32))(*args)
        assert_same_bytes(args, before)
        assert_same_bytes(tuple(new), expected(before, STOCHASTIC, 32))


def test_an_array_without_elements():
    zero = np.zeros((0, 64), np.float32)
    codes = Coded(np.zeros((0, 64), np.uint8), np.zeros((0, 2), np.uint8))
    new = optimizer_update(zero, zero, None, codes, codes, SCALARS, WORDS, codes=STOCHASTIC)
    assert new.parameter.shape == (0, 64) and new.mu.exponents.shape == (0, 2)
