"""Every op compiled for TPUs that are not there: no loop over blocks, one product of the types that the matrix unit
multiplies, no gather, and no rounding that the compiler drops or chooses. Skipped without libtpu."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.ops.activations.quantized import quantized_activation
from tests.sharding.meshes import mesh_of
from tests.tpu_without_tpu.described_tpu import ESTIMATES, RAGGED_CODES, REPEATING, by_tpu, compiled, devices_of

SIZE = 256
X = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16)
KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)
FORMATS = {
    "nvfp4": jlp.NVFP4(),
    "mxfp4": jlp.MXFP4(),
    "mxfp8": jlp.MXFP8(),
    "fp8_block": jlp.Float8Block(),
    "fp8_tensor": jlp.Float8Tensor(),
}
INT4S = {"int4": jlp.Int4(), "int4 asymmetric": jlp.Int4(32, symmetric=False)}
BF16, CODES = ("bf16", "bf16"), ("f8e4m3fn", "f8e4m3fn")

by_format = pytest.mark.parametrize("name", FORMATS)


def quantized(fmt):
    """The shapes of a quantised matrix."""
    return jax.eval_shape(lambda x: jlp.quantize(x, fmt), X)


class TestQuantisers:
    @by_tpu
    @by_format
    def test_rows(self, name, tpu):
        found = compiled(lambda x: jlp.quantize(x, FORMATS[name]), X, devices=devices_of(tpu))
        assert found.faults == [] and found.products() == []

    @pytest.mark.sampled(4)
    @by_tpu
    @by_format
    def test_both_ways(self, name, tpu):
        found = compiled(lambda x: jlp.quantize_both(x, FORMATS[name]), X, devices=devices_of(tpu))
        assert found.faults == [] and found.products() == []

    @pytest.mark.sampled(4)
    @by_tpu
    @by_format
    def test_both_ways_with_random_bits(self, name, tpu):
        fmt = FORMATS[name]

        def quantize(x, key):
            return jlp.quantize_both(x, fmt, hadamard_columnwise=fmt.packed, rounding="stochastic", key=key)

        found = compiled(quantize, X, KEY, devices=devices_of(tpu))
        assert found.faults == [] and found.products() == []

    def kernels(self, function, *args):
        """How many Pallas kernels the program has."""
        found = compiled(function, *args, devices=devices_of("7x"))
        assert found.faults == []
        return len([i for i in found.of_kind("custom-call") if "/pallas_call" in i.origin])

    @by_format
    def test_one_kernel_on_one_chip(self, name):
        assert self.kernels(lambda x: jlp.quantize_both(x, FORMATS[name]), X) == 1

    @pytest.mark.parametrize("axis", [-1, -2])
    @pytest.mark.parametrize("name", INT4S)
    def test_one_kernel_of_int4(self, name, axis):
        assert self.kernels(lambda x: jlp.quantize(x, INT4S[name], axis=axis), X) == 1

    def test_two_where_columns_are_rotated(self):
        """The amax of the rotated columns is needed first."""
        assert self.kernels(lambda x: jlp.quantize_both(x, jlp.NVFP4(), hadamard_columnwise=True), X) == 2

    def test_an_activation(self):
        """XLA computes it, and a kernel quantises it."""
        assert self.kernels(lambda x: quantized_activation("gelu", jlp.MXFP8(), [x]), X) == 1

    def test_four_chips(self):
        """A kernel in shard_map; under jit XLA partitions its own operations."""
        mesh = mesh_of((4,), names="x", devices=devices_of("7x"))
        x = jax.ShapeDtypeStruct((4 * SIZE, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))

        def quantize(x):
            return jlp.quantize(x, jlp.MXFP8()).data

        assert self.kernels(quantize, x) == 0
        assert self.kernels(jax.shard_map(quantize, mesh=mesh, in_specs=P("x"), out_specs=P("x")), x) == 1

    @by_tpu
    @pytest.mark.parametrize("name", INT4S)
    def test_int4(self, name, tpu):
        fmt = INT4S[name]
        step = lambda w: (jlp.quantize(w, fmt, axis=-2), jlp.fake_quantize(w, fmt, axis=-2))  # noqa: E731
        found = compiled(step, X, devices=devices_of(tpu))
        assert found.faults == [] and found.products() == []


class TestProducts:
    @by_tpu
    @by_format
    def test_scaled_matmul(self, name, tpu):
        """One product of operands decoded to bfloat16, or of FP8 codes."""
        q = quantized(FORMATS[name])
        found = compiled(lambda a, b: jlp.scaled_matmul(a, b), q, q, devices=devices_of(tpu))
        assert found.faults == []
        assert found.products() == [CODES if name == "fp8_tensor" else BF16]

    def test_four_chips(self):
        """Scales are repeated by a product in shard_map; under jit XLA would send them to all chips."""
        mesh = mesh_of((4,), names="x", devices=devices_of("7x"))
        x = jax.ShapeDtypeStruct((4 * SIZE, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))

        def multiply(x):
            q = jlp.quantize(x, jlp.MXFP8())
            return jlp.scaled_matmul(q, q)

        def repeats(function):
            found = compiled(function, x, devices=mesh.devices)
            assert found.faults == [] and found.products() == [BF16]
            return any(REPEATING in i.origin for i in found.of_kind("convolution"))

        assert not repeats(multiply)
        assert repeats(jax.shard_map(multiply, mesh=mesh, in_specs=P("x"), out_specs=P("x")))

    @pytest.mark.sampled(3)
    @by_tpu
    @pytest.mark.parametrize("name", [*FORMATS, *INT4S])
    def test_weight_only(self, name, tpu):
        weight = quantized({**FORMATS, **INT4S}[name])
        found = compiled(lambda x, w: jlp.scaled_matmul(x, w), X, weight, devices=devices_of(tpu))
        assert found.faults == []
        assert found.products() == [BF16]

    @pytest.mark.sampled(3)
    @by_tpu
    @by_format
    def test_grouped_matmul(self, name, tpu):
        """One product by libtpu's own kernel for ragged ones, of the same operands where it takes them."""
        recipe = jlp.Custom(lambda role: FORMATS[name])
        w, sizes = jax.ShapeDtypeStruct((4, SIZE, SIZE), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
        step = lambda x, w, sizes: jlp.grouped_matmul(x, w, sizes, recipe=recipe)  # noqa: E731
        found = compiled(step, X, w, sizes, devices=devices_of(tpu))
        assert found.faults == []
        assert found.products() == [RAGGED_CODES[tpu] if name == "fp8_tensor" else BF16]


class TestFaultsAreFound:
    """Small functions, each of which has one fault."""

    @pytest.mark.parametrize("name", ESTIMATES)
    def test_estimates_are_functions_of_the_library(self, name):
        """So that no renaming makes a division look corrected that is not."""
        assert callable(getattr(importlib.import_module("jaxlowprec.ops.exact"), name))

    @pytest.mark.parametrize(
        ("what", "function"),
        [
            ("rounded by the platform: divide", lambda x: 448 / x),
            ("rounded by the platform: multiply", lambda x: x / 7),
            ("rounded by the platform: sqrt", jnp.sqrt),
            ("dropped cast", lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32) * 3),
            ("dropped cast", lambda x: abs(x.astype(jnp.bfloat16).astype(jnp.float32)).max()),
            ("loop", lambda x: jax.lax.fori_loop(0, 9, lambda i, y: y @ x, x)),
            ("gather", lambda x: jnp.take(x, jax.lax.bitcast_convert_type(x[0], jnp.int32), axis=0)),
        ],
    )
    def test_planted(self, what, function):
        (fault,) = self.found(function).faults
        assert fault.startswith(what)

    def found(self, function):
        return compiled(function, jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32), devices=devices_of("7x"))

    def test_what_is_read_by_nobody_unrounded_is_none(self):
        """A cast that is only cast back, one behind a barrier, and a division that is corrected by integers."""

        @jax.jit
        def reciprocal_estimate(x):
            return 1 / x

        found = self.found(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32).astype(jnp.bfloat16))
        assert found.faults == []
        found = self.found(lambda x: jax.lax.optimization_barrier(x.astype(jnp.bfloat16)).astype(jnp.float32) * 3)
        assert found.faults == []
        found = self.found(lambda x: reciprocal_estimate(x).astype(jnp.int32))
        assert found.faults == []
