"""jax.export: one module for several platforms, symbolic shapes, and back from bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import CHOSEN_SCALES, ONE_OF_EACH, assert_same_bytes, golden_input
from tests.sharding.meshes import mesh_of, name_of, place
from tests.wiring.small_ops import assert_right, block_sums, operands

TARGETS = ("amax", "quantize", "row_scaled_quantize", "dequantize", "hadamard", "scaled_matmul")
KERNELS = [export.DisabledSafetyCheck.custom_call(f"jaxlowprec_{name}") for name in TARGETS]


@jax.jit
def every_op(x):
    """The library's ops in one function."""
    row, column = jlp.quantize_both(x, jlp.NVFP4(), True)
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
        pairs = [(jlp.quantize_both(x, fmt), fmt) for fmt in (*ONE_OF_EACH, *CHOSEN_SCALES, jlp.NVFP4(row_scaled=True))]
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


def test_several_devices_through_shard_map():
    """custom_partitioning cannot be exported for several devices; inside shard_map there is nothing to partition."""
    mesh, spec, x = mesh_of((2, 2)), P("a", "b"), jnp.asarray(golden_input((32, 64), 3))
    function = jax.jit(jax.shard_map(jlp.hadamard_transform, mesh=mesh, in_specs=spec, out_specs=spec))
    placed = place(x, mesh, spec)
    exported = export.export(function, disabled_checks=KERNELS)(placed)
    assert exported.nr_devices == 4
    assert_same_bytes(exported.call(placed), jlp.hadamard_transform(x))
