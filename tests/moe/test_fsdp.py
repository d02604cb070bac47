"""Blocks whose experts' kernels are split over the devices that have the tokens: FSDP within shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec import traffic
from tests.flax.experts import EXPERTS, WIDTH, K, X
from tests.flax.libraries import LIBRARIES, weighted
from tests.helpers import assert_same_bytes, often
from tests.sharding.meshes import mesh_of

HIDDEN, DEVICES = 64, 2  # half of it is one block of MXFP8
RECIPES = {"nvfp4": jlp.NVFP4BlockScaling(), "mxfp8": jlp.MXFP8BlockScaling(), "int4_qat": jlp.Int4QAT(group_size=32)}
RECIPES |= {"int8_rows": jlp.Int8RowScaling(disable_stochastic_rounding=True), "bf16": None}
each_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def block(library, **options):
    return library.maker("MoE", EXPERTS, WIDTH, HIDDEN, K, dtype=jnp.bfloat16, **options)


def whole(library):
    return library.model(block(library), X)


def step_of(model, loss_of=weighted):
    """The result, and the gradients of the parameters."""

    def step(tree, x):
        def loss(tree):
            y, _ = model.apply(tree, x)
            return loss_of(y), y

        (_, y), gradients = jax.value_and_grad(loss, has_aux=True)(tree)
        return y, gradients

    return step


def split_step(library, alone, recipe):
    """The step with tokens and kernels split over the devices."""
    specs = jax.tree.map(lambda leaf: P(None, "a") if leaf.ndim == 3 else P(), alone.tree)
    split = library.like(alone, block(library, fsdp_axis="a"))
    mapped = jax.shard_map(
        step_of(split), mesh=mesh_of((DEVICES,)), in_specs=(specs, P("a")), out_specs=(P("a"), specs)
    )

    def step(tree, x):
        with jlp.autocast(recipe, enabled=recipe is not None):
            return mapped(tree, x)

    return jax.jit(step).lower(alone.tree, X).compile()


@pytest.mark.slow
@each_library
@pytest.mark.parametrize("name", often(["nvfp4"], RECIPES))
def test_a_step_is_that_of_whole_kernels(library, name):
    alone, recipe = whole(library), RECIPES[name]
    y, gradients = split_step(library, alone, recipe)(alone.tree, X)
    with jlp.autocast(recipe, enabled=recipe is not None):
        parts = [jax.jit(step_of(alone))(alone.tree, part) for part in np.split(X, DEVICES)]
    assert_same_bytes(y, jnp.concatenate([y for y, _ in parts]))
    for found, *terms in zip(*(jax.tree.leaves(g) for g in (gradients, *(g for _, g in parts))), strict=True):
        expected = np.float32(sum(terms))
        np.testing.assert_allclose(np.float32(found), expected, rtol=0, atol=2e-6 * max(1, np.abs(expected).max()))


@each_library
def test_codes_are_gathered_and_gradients_scattered(library):
    found = traffic.collectives(split_step(library, whole(library), RECIPES["nvfp4"]))
    sent = {(c.kind, dtype) for c in found for dtype, dims in c.results if np.prod(dims) > EXPERTS * WIDTH}
    assert sent == {("all-gather", "u8"), ("reduce-scatter", "f32")}


@each_library
def test_kernels_that_are_quantised_already_are_refused(library):
    rows, sizes = X.reshape(-1, WIDTH), jnp.full(EXPERTS, 8, jnp.int32)
    layer = library.model(library.maker("GroupedLinear", EXPERTS, WIDTH, HIDDEN), rows, sizes)
    split = layer.served(jlp.Int4QAT(group_size=32), rows, sizes).changed(fsdp_axis="a")
    mapped = jax.shard_map(
        lambda x: split.apply(split.tree, x, sizes), mesh=mesh_of((DEVICES,)), in_specs=P("a"), out_specs=P("a")
    )
    with pytest.raises(ValueError, match="fsdp_axis='a' and a kernel that is quantised already; needs the master"):
        jax.eval_shape(mapped, rows)


@each_library
def test_outside_of_shard_map_the_axis_is_missing(library):
    alone = whole(library)
    split = library.like(alone, block(library, fsdp_axis="a"))
    with jlp.autocast(RECIPES["nvfp4"]), pytest.raises(ValueError, match="axis_name='a'; needs an axis of the mesh"):
        jax.eval_shape(split.apply, alone.tree, X)


@each_library
def test_an_axis_that_is_none(library):
    with pytest.raises(TypeError, match=r"fsdp_axis=bytearray\(b'a'\); needs an axis of the mesh"):
        library.model(block(library, fsdp_axis=bytearray(b"a")), X)
