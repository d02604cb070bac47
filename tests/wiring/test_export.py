"""jax.export: one module for several platforms, symbolic shapes, and back from bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.arrays import serialised
from tests.helpers import CHOSEN_SCALES, OF_CACHES, ONE_OF_EACH, assert_same_bytes, golden_input, often
from tests.low_precision import STRUCTURES, recipes, state_for, without_state
from tests.sharding.meshes import mesh_of, name_of, place
from tests.wiring.small_ops import assert_right, block_sums, operands

KERNELS, KEY = jlp.disabled_checks(), jax.random.key(1)
FORMATS = (*ONE_OF_EACH, *OF_CACHES, *CHOSEN_SCALES, jlp.NVFP4(row_scaled=True))


@jax.jit
def every_op(x):
    """The library's ops in one function."""
    row, column = jlp.quantize_both(x, jlp.NVFP4(), hadamard_columnwise=True)
    rotated = jlp.hadamard_transform(x)
    random = jlp.quantize(rotated, jlp.NVFP4(), rounding="stochastic", key=jax.random.key(1))
    y = jlp.scaled_matmul(row, jlp.quantize(jnp.ones((32, x.shape[-1])), jlp.NVFP4((16, 16))))
    return [row.data, row.scale, row.amax, column.data, column.scale, column.amax, random.data, column.dequantize(), y]


def test_one_module_holds_each_platforms_own_body():
    args = operands((8, 16))
    exported = export.export(jax.jit(block_sums), platforms=("cpu", "cuda", "tpu"))(*args)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert_right(exported.call(*args), args, (8, 4))
    assert all(f"dense<{piece}>" in exported.mlir_module() for piece in (-8004, 8004))


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda", "tpu")], ids=name_of)
def test_the_librarys_ops_give_the_same_bytes(platforms):
    x = jnp.asarray(golden_input((32, 64), 3))
    exported = export.export(every_op, platforms=platforms, disabled_checks=KERNELS)(x)
    assert_same_bytes(exported.call(x), every_op(x))


def test_every_format_gives_the_same_bytes():
    def run(x):
        pairs = [(jlp.quantize_both(x, fmt), fmt) for fmt in FORMATS]
        products = [jlp.scaled_matmul(row, row) for (row, _), fmt in pairs if fmt.element != "e5m2"]
        return [(both, both[0].dequantize()) for both, _ in pairs], products

    x = jnp.asarray(golden_input((33, 140), 3))
    exported = export.export(jax.jit(run), platforms=("cpu", "cuda", "tpu"), disabled_checks=KERNELS)(x)
    assert_same_bytes(exported.call(x), run(x))


@pytest.mark.parametrize(
    ("symbols", "shapes"),
    [("m, 64", [(16, 64), (37, 64)]), ("16*m, 64", [(48, 64)]), ("m, 16*n", [(5, 16), (32, 48)])],
)
def test_symbolic_shapes(symbols, shapes):
    spec = jax.ShapeDtypeStruct(export.symbolic_shape(symbols), jnp.float32)
    exported = export.export(every_op, disabled_checks=KERNELS)(spec)
    for shape in shapes:
        x = jnp.asarray(golden_input(shape, 5))
        assert_same_bytes(exported.call(x), every_op(x))


def test_serialized_and_back():
    pytest.importorskip("flatbuffers", reason="jax.export serializes with it")
    x = jnp.asarray(golden_input((32, 64), 3))
    exported = export.export(every_op, disabled_checks=KERNELS)(x)
    assert_same_bytes(export.deserialize(exported.serialize()).call(x), every_op(x))


SERVED = {
    **{str(fmt): lambda w, fmt=fmt: jlp.quantize(w, fmt, axis=-2) for fmt in FORMATS},
    "rotated": lambda w: jlp.quantize(w, jlp.NVFP4(), axis=-2, hadamard=jlp.Hadamard(32, (1, -1))),
    "signs drawn": lambda w: jlp.quantize(
        w, jlp.NVFP4(), axis=-2, hadamard=jlp.Hadamard(32, "drawn"), sign_key=jax.random.key(1)
    ),
    "vector": lambda w: jlp.quantize(w[0], jlp.MXFP8("e5m2")),
    "batch": lambda w: jlp.quantize(jnp.stack([w, w]), jlp.NVFP4()),
    "kernel": lambda w: jlp.quantize_kernel(w, jlp.NVFP4BlockScaling()),
    "adapter": lambda w: jlp.lora.init(jax.random.key(0), {"w": w}, rank=4)["w"],
}


class TestQuantizedArguments:
    """Quantised arrays go into exported programs, and out of them."""

    @pytest.mark.parametrize("make", SERVED.values(), ids=SERVED)
    def test_there_and_back(self, make):
        pytest.importorskip("flatbuffers", reason="jax.export serializes with it")
        w = make(jnp.asarray(golden_input((64, 32), 3)))
        exported = export.export(jax.jit(lambda w: {"same": w}), disabled_checks=KERNELS)(w)
        loaded = export.deserialize(exported.serialize())
        found = loaded.call(w)["same"]
        assert jax.tree.structure(found) == jax.tree.structure(w)
        assert_same_bytes(jax.tree.leaves(found), jax.tree.leaves(w))

    def test_another_format_is_refused(self):
        pytest.importorskip("flatbuffers", reason="jax.export serializes with it")
        w = jnp.asarray(golden_input((64, 32), 3))
        exported = export.export(jax.jit(lambda q: q.dequantize()), disabled_checks=KERNELS)(
            jlp.quantize(w, jlp.MXFP8())
        )
        with pytest.raises(ValueError, match="invalid pytree|PyTreeDef|structure"):
            export.deserialize(exported.serialize()).call(jlp.quantize(w, jlp.MXFP8("e5m2")))

    def test_what_a_newer_version_wrote_is_refused_in_words(self):
        with pytest.raises(
            ValueError, match=r"\['NVFP5', \{\}\] is not of this version.*that wrote it, or a newer one"
        ):
            serialised._static_from_bytes(b'[["NVFP5", {}], [32], "float32", -1, null]')

    def test_symbolic_sizes_are_refused_in_words(self):
        spec = jax.ShapeDtypeStruct(export.symbolic_shape("m, 64"), jnp.float32)
        exported = export.export(jax.jit(lambda x: jlp.quantize(x, jlp.MXFP8())), disabled_checks=KERNELS)(spec)
        with pytest.raises(ValueError, match=r"QuantizedArray: shape \(m, 64\) is symbolic"):
            exported.serialize()


RECIPES = {name: recipe for name, recipe in STRUCTURES.items() if recipe is not None}
RECIPES |= {"eden": jlp.NVFP4Eden(), **recipes("fp8_block", "fp8_current rotated stochastic")}


@pytest.mark.parametrize("name", often(["eden"], RECIPES))
def test_a_symbolic_batch_under_every_recipe(name):
    """Forward and backward, with a key: without one random bits depend on the shape, which a symbol is not."""
    recipe, w = RECIPES[name], jnp.asarray(golden_input((64, 32), 3))
    state = state_for(recipe)

    def loss(w, x):
        return jnp.square(without_state(jlp.linear(x, w, recipe=recipe, key=KEY, state=state), state)).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 64"), jnp.float32)
    exported = export.export(step, disabled_checks=KERNELS)(w, x)
    for rows in (128, 37):
        x = jnp.asarray(golden_input((rows, 64), 5))
        assert_same_bytes(exported.call(w, x), step(w, x))


def test_several_devices_through_shard_map():
    """custom_partitioning cannot be exported for several devices; inside shard_map there is nothing to partition."""
    mesh, spec, x = mesh_of((2, 2)), P("a", "b"), jnp.asarray(golden_input((32, 64), 3))
    function = jax.jit(jax.shard_map(jlp.hadamard_transform, mesh=mesh, in_specs=spec, out_specs=spec))
    placed = place(x, mesh, spec)
    exported = export.export(function, disabled_checks=KERNELS)(placed)
    assert exported.nr_devices == 4
    assert_same_bytes(exported.call(placed), jlp.hadamard_transform(x))
