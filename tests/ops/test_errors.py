"""Bad input gets a clear error at trace time, in the user's terms, from every op."""

import functools
import inspect
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes

FMT = jlp.NVFP4()
X = jnp.ones((16, 32))
KEY = jax.random.key(0)
SIGNS = tuple(-s for s in jlp.DEFAULT_SIGNS)


def quantized(rows=16, columns=32, axis=-1, hadamard=False, batch=(), fmt=FMT):
    return jlp.quantize(jnp.ones((*batch, rows, columns)), fmt, axis=axis, hadamard=hadamard)


def multiply(a=None, b=None, **options):
    return jlp.scaled_matmul(quantized() if a is None else a, quantized(24) if b is None else b, **options)


def assert_raised_at_trace_time(call, error, *messages):
    """Where shapes and dtypes are all that is known."""
    with pytest.raises(error) as raised:
        jax.eval_shape(call)
    for message in messages:
        assert message in str(raised.value)


OPS = {
    "quantize": lambda x, **options: jlp.quantize(x, FMT, **options),
    "quantize_both": lambda x, **options: jlp.quantize_both(x, FMT, **options),
    "hadamard_transform": lambda x, **options: jlp.hadamard_transform(x, **options),
}


class TestInputs:
    @pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "float8_e4m3fn"])
    @pytest.mark.parametrize("op", OPS)
    def test_arrays_that_are_not_floats(self, op, dtype):
        x = jnp.ones((16, 32), dtype)
        message = f"{op}: x has dtype {dtype}; needs bfloat16, float16 or float32: cast it with .astype(...)"
        assert_raised_at_trace_time(lambda: OPS[op](x), TypeError, message)

    @pytest.mark.parametrize("op", OPS)
    def test_numpy_doubles_are_not_narrowed_silently(self, op):
        assert_raised_at_trace_time(lambda: OPS[op](np.ones((16, 32))), TypeError, f"{op}: x has dtype float64")

    @pytest.mark.parametrize("op", ["quantize", "hadamard_transform"])
    @pytest.mark.parametrize(
        ("axis", "error", "message"),
        [
            (2, ValueError, "axis=2 is out of range for an array of 2 dimensions"),
            (-3, ValueError, "axis=-3 is out of range"),
            (1.0, TypeError, "axis=1.0; needs an int"),
            (True, TypeError, "axis=True; needs an int"),
            (None, TypeError, "axis=None; needs an int"),
        ],
    )
    def test_axes(self, op, axis, error, message):
        assert_raised_at_trace_time(lambda: OPS[op](X, axis=axis), error, f"{op}: {message}")

    @pytest.mark.parametrize("op", ["quantize", "hadamard_transform"])
    def test_batch_axes(self, op):
        x = jnp.ones((16, 16, 32))
        for axis in (0, -3):
            message = f"{op}: axis={axis} of 3 dimensions is a batch axis; needs the last or second last"
            assert_raised_at_trace_time(lambda axis=axis: OPS[op](x, axis=axis), ValueError, message)

    @pytest.mark.parametrize("op", ["quantize", "quantize_both"])
    @pytest.mark.parametrize("fmt", ["nvfp4", jlp.NVFP4, None])
    def test_formats(self, op, fmt):
        assert_raised_at_trace_time(lambda: getattr(jlp, op)(X, fmt), TypeError, f"{op}: fmt={fmt!r}; needs a format")

    def test_scalars_and_vectors(self):
        assert_raised_at_trace_time(lambda: jlp.quantize(X[0, 0], FMT), ValueError, "quantize: x is a scalar")
        assert_raised_at_trace_time(
            lambda: jlp.quantize_both(X[0], FMT), ValueError, "shape (32,); needs two dimensions"
        )
        tiles = jlp.NVFP4((16, 16))
        assert_raised_at_trace_time(lambda: jlp.quantize(X[0], tiles), ValueError, "x is a vector; NVFP4 16x16 has two")
        assert_raised_at_trace_time(lambda: jlp.hadamard_transform(X[0, 0]), ValueError, "out of range", "0 dimensions")

    @pytest.mark.parametrize("block", [(1, 32), (16, 1), 16, (16,)])
    def test_block_shapes(self, block):
        assert_raised_at_trace_time(lambda: jlp.NVFP4(block), ValueError, "NVFP4: block=", "needs (1, 16) or (16, 16)")

    def test_things_that_are_not_quantised(self):
        assert_raised_at_trace_time(
            lambda: jlp.dequantize(X), TypeError, "dequantize: q is a", "needs a QuantizedArray"
        )
        assert_raised_at_trace_time(lambda: multiply(b=X[0]), TypeError, "scaled_matmul: rhs is a", "quantise it first")

    @pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "float8_e4m3fn"])
    def test_result_dtypes(self, dtype):
        assert_raised_at_trace_time(
            lambda: quantized().dequantize(dtype), TypeError, f"dequantize: dtype={dtype}; needs"
        )
        assert_raised_at_trace_time(
            lambda: multiply(preferred_element_type=dtype),
            TypeError,
            f"scaled_matmul: preferred_element_type={dtype}; needs bfloat16",
        )


class TestRounding:
    @pytest.mark.parametrize("op", ["quantize", "quantize_both"])
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"rounding": "up"}, ValueError, 'rounding=\'up\'; needs "nearest", "stochastic" or "eden"'),
            ({"rounding": None}, ValueError, "rounding=None; needs"),
            ({"rounding": "stochastic"}, ValueError, "needs key=, such as jax.random.key(0)"),
            ({"key": KEY}, ValueError, 'a key was given but rounding is "nearest"'),
            ({"rounding": "stochastic", "key": 3}, TypeError, "key=3; needs a JAX key"),
            ({"rounding": "stochastic", "key": np.zeros(3, np.uint32)}, TypeError, "uint32 and shape (3,)"),
            ({"rounding": "stochastic", "key": jnp.zeros(2, jnp.int32)}, TypeError, "key has dtype int32"),
            ({"rounding": "stochastic", "key": jax.random.split(KEY, 3)}, TypeError, "one for each slice"),
        ],
    )
    def test_roundings_and_keys(self, op, options, error, message):
        assert_raised_at_trace_time(lambda: OPS[op](X, **options), error, f"{op}: ", message)

    @pytest.mark.parametrize("amax", [jnp.ones(3), jnp.ones((), jnp.bfloat16), 2])
    def test_amax(self, amax):
        message = f"amax has dtype {jnp.asarray(amax).dtype} and shape {jnp.shape(amax)}; needs float32"
        assert_raised_at_trace_time(lambda: jlp.quantize(X, FMT, amax=amax), ValueError, f"quantize: {message}")
        assert_raised_at_trace_time(lambda: jlp.quantize_both(X, FMT, amax=(1.0, amax)), ValueError, message)

    @pytest.mark.parametrize("amax", [1.0, jnp.ones(2), (), (1.0,), (1.0, 1.0, 1.0)], ids=str)
    def test_amax_of_both_is_a_pair(self, amax):
        assert_raised_at_trace_time(lambda: jlp.quantize_both(X, FMT, amax=amax), TypeError, "needs a pair")

    @pytest.mark.parametrize(
        ("axis", "offset", "message"),
        [
            (-1, (3, 8), "along axis -1 it needs a multiple of 16"),
            (-2, (8, 3), "along axis -2 it needs a multiple of 16"),
            (-1, (-1, 0), "along axis -2 it needs a multiple of 1 from 0 on"),
            (-1, (0, np.int64(8)), "along axis -1 it needs a multiple of 16"),
            (-1, (2**32, 0), "needs a multiple of 1 from 0 on and below 2^32"),
        ],
    )
    def test_offsets(self, axis, offset, message):
        options = {"rounding": "stochastic", "key": KEY, "offset": offset}
        assert_raised_at_trace_time(lambda: jlp.quantize(X, FMT, axis=axis, **options), ValueError, message)
        assert_raised_at_trace_time(lambda: jlp.quantize_both(X, FMT, **options), ValueError, "needs a multiple")

    @pytest.mark.parametrize("op", ["quantize", "quantize_both"])
    @pytest.mark.parametrize("offset", [None, 3, (0,), (0, 0, 0), (0.0, 0), ("0", 0), (True, 0), (None, 0)], ids=repr)
    def test_an_offset_is_a_pair_of_ints(self, op, offset):
        message = f"{op}: offset={offset!r}; needs a pair of ints"
        assert_raised_at_trace_time(lambda: OPS[op](X, offset=offset), TypeError, message)

    @pytest.mark.parametrize("index", [jnp.zeros(2, jnp.int32), jnp.float32(16)])
    def test_an_offset_on_the_device_is_a_pair_of_integer_scalars(self, index):
        message = f"offset has {index.dtype}{list(index.shape)} along axis -2; needs an integer scalar"
        assert_raised_at_trace_time(lambda: jlp.quantize(X, FMT, offset=(index, 0)), TypeError, message)

    @pytest.mark.parametrize("amax", [-1.0, np.float32(-3), np.full((), -0.5, np.float32)])
    def test_an_amax_is_a_magnitude(self, amax):
        message = "quantize: amax="
        assert_raised_at_trace_time(lambda: jlp.quantize(X, FMT, amax=amax), ValueError, message, "needs magnitudes")

    @pytest.mark.parametrize("amax", ["3", [None], object()])
    def test_an_amax_is_a_number(self, amax):
        assert_raised_at_trace_time(lambda: jlp.quantize(X, FMT, amax=amax), TypeError, "quantize: amax=", "an array")

    @pytest.mark.parametrize("op", ["quantize", "quantize_both"])
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"rows_split": 1}, TypeError, "rows_split=1; needs True or False"),
            ({"implementation": "native"}, ValueError, 'implementation=\'native\'; needs None, "ffi", "portable" or'),
            ({"axis_name": ["x"]}, TypeError, "axis_name=['x']; needs an axis of the mesh"),
            ({"axis_name": "x"}, ValueError, "axis_name='x'; needs an axis of the mesh, or a tuple of them, within"),
            ({"rounding": ["nearest"]}, ValueError, "rounding=['nearest']; needs"),
        ],
    )
    def test_other_options(self, op, options, error, message):
        assert_raised_at_trace_time(lambda: OPS[op](X, **options), error, f"{op}: {message}")


class TestRotations:
    @pytest.mark.parametrize("hadamard", [16, "rht", jlp.DEFAULT_SIGNS])
    def test_what_is_no_rotation(self, hadamard):
        message = f"hadamard={hadamard!r}; needs True, False or a jaxlowprec.Hadamard"
        assert_raised_at_trace_time(lambda: jlp.quantize(X, FMT, hadamard=hadamard), TypeError, message)
        assert_raised_at_trace_time(lambda: jlp.quantize_both(X, FMT, hadamard_columnwise=hadamard), TypeError, message)

    @pytest.mark.parametrize("size", [-16, 0, 1, 8, 24, 48, 512])
    def test_sizes(self, size):
        message = f"Hadamard: size={size}; needs 16, 32, 64, 128 or 256"
        assert_raised_at_trace_time(lambda: jlp.hadamard_transform(X, size=size), ValueError, message)
        with pytest.raises(ValueError, match=message):
            jlp.Hadamard(size)

    @pytest.mark.parametrize("signs", [(), (1, 2), (1, 0), (1.5,) * 16, (1,) * 12, (1,) * 32, 1, "+-"])
    def test_signs(self, signs):
        assert_raised_at_trace_time(
            lambda: jlp.hadamard_transform(X, signs=signs), ValueError, "Hadamard: signs=", "+1 or"
        )

    def test_signs_longer_than_those_that_are_drawn(self):
        message = 'Hadamard: size=256 and signs="drawn"; a key draws 128 signs: use size=128 or less, or fixed signs'
        assert_raised_at_trace_time(
            lambda: jlp.hadamard_transform(X, size=256, signs="drawn", sign_key=KEY), ValueError, message
        )

    @pytest.mark.parametrize("op", ["quantize", "quantize_both", "hadamard_transform"])
    def test_drawn_signs_need_a_key_and_others_have_none(self, op):
        drawn, fixed = (
            {"signs": signs}
            if op == "hadamard_transform"
            else {"hadamard_columnwise" if op == "quantize_both" else "hadamard": jlp.Hadamard(16, signs)}
            for signs in ("drawn", jlp.DEFAULT_SIGNS)
        )
        needs = f"{op}: the rotation is Hadamard(16, drawn), which needs sign_key=, such as jax.random.key(0)"
        assert_raised_at_trace_time(lambda: OPS[op](X, **drawn), ValueError, needs)
        has_no_use = f"{op}: sign_key= was given, but the rotation is Hadamard(16); pass Hadamard(signs="
        assert_raised_at_trace_time(lambda: OPS[op](X, **fixed, sign_key=KEY), ValueError, has_no_use)
        for key, message in (
            (0, f"{op}: sign_key=0; needs a JAX key"),
            (jnp.zeros(3, jnp.uint32), f"{op}: sign_key has dtype uint32 and shape (3,); needs one JAX key"),
            (jnp.zeros((5, 4), jnp.uint32), f"{op}: sign_key has the signs of batch axes (5,); needs one vector"),
        ):
            assert_raised_at_trace_time(functools.partial(OPS[op], X, **drawn, sign_key=key), TypeError, message)

    def test_no_rotation_has_no_key(self):
        message = "quantize: sign_key= was given, but the rotation is None"
        assert_raised_at_trace_time(lambda: jlp.quantize(X, FMT, sign_key=KEY), ValueError, message)

    def test_the_signs_that_are_not_known_yet(self):
        with pytest.raises(ValueError, match=r"Hadamard\(16, drawn\): its signs are known once a key draws them"):
            _ = jlp.Hadamard(16, "drawn").mask

    def test_lengths(self):
        message = "hadamard_transform: axis -1 has 24 elements; needs a multiple of size=16: pad it with jnp.pad"
        assert_raised_at_trace_time(lambda: jlp.hadamard_transform(jnp.ones((16, 24))), ValueError, message)
        message = "axis -2 has 16 elements; needs a multiple of size=32"
        assert_raised_at_trace_time(lambda: jlp.hadamard_transform(X, axis=0, size=32), ValueError, message)


class TestProducts:
    @pytest.mark.parametrize(
        ("call", "error", "messages"),
        [
            (
                lambda: multiply(quantized(axis=-2)),
                ValueError,
                ["lhs of shape (16, 32)", "axis -2", "lhs.mT", "axis of 16"],
            ),
            (lambda: multiply(b=quantized(24).mT), ValueError, ["rhs of shape (32, 24)", "axis -2", "rhs.mT"]),
            (lambda: multiply(quantized(columns=48)), ValueError, ["contracted last axis: 48 and 32"]),
            (lambda: multiply(quantized(columns=31)), ValueError, ["lhs (16, 31) and rhs (24, 32)"]),
            (
                lambda: multiply(quantized(hadamard=True)),
                ValueError,
                ["lhs has hadamard=Hadamard(16) and rhs has None"],
            ),
            (lambda: multiply(b=quantized(24, hadamard=True)), ValueError, ["a rotation cancels only if both"]),
            (
                lambda: multiply(quantized(hadamard=True), quantized(24, hadamard=jlp.Hadamard(signs=SIGNS))),
                ValueError,
                ["a rotation cancels only if both operands have it"],
            ),
            (
                lambda: multiply(quantized(hadamard=True), quantized(24, hadamard=jlp.Hadamard(32))),
                ValueError,
                ["Hadamard(16)", "Hadamard(32)"],
            ),
            (lambda: multiply(quantized(batch=(2,))), ValueError, ["differ in their batch axes"]),
            (
                lambda: multiply(quantized(batch=(2,)), quantized(batch=(3,))),
                ValueError,
                ["(2, 16, 32) and rhs (3, 16, 32)"],
            ),
            (lambda: multiply(jlp.quantize(X[0], FMT)), ValueError, ["lhs has shape (32,); needs two dimensions"]),
            (
                lambda: multiply(b=quantized(24, fmt=jlp.MXFP4())),
                NotImplementedError,
                ["lhs is NVFP4 1x16 and rhs is MXFP4 1x32", "quantise both alike, or dequantise them"],
            ),
            (lambda: multiply(activation="relu"), ValueError, ['activation=\'relu\'; needs None, "gelu" or "dgelu"']),
            (
                lambda: multiply(return_pre_activation=True),
                ValueError,
                ['return_pre_activation=True with activation=None; it is for "gelu"'],
            ),
            (
                lambda: multiply(activation="dgelu", activation_input=jnp.ones((16, 24)), return_pre_activation=True),
                ValueError,
                ["return_pre_activation=True with activation='dgelu'"],
            ),
            (lambda: multiply(activation="dgelu"), ValueError, ["activation_input= is missing and activation='dgelu'"]),
            (
                lambda: multiply(activation="gelu", activation_input=jnp.ones((16, 24))),
                ValueError,
                ["activation_input= is given and activation='gelu'", '"dgelu" needs it, other activations take none'],
            ),
            (
                lambda: multiply(activation="dgelu", activation_input=jnp.ones((24, 16))),
                ValueError,
                ["activation_input has shape (24, 16); needs (16, 24)"],
            ),
            (
                lambda: multiply(activation="dgelu", activation_input=jnp.ones((16, 24), jnp.int8)),
                TypeError,
                ["activation_input has dtype int8"],
            ),
            (lambda: multiply(bias=jnp.ones(16)), ValueError, ["bias has shape (16,); needs (24,)"]),
            (lambda: multiply(bias=jnp.ones((1, 24))), ValueError, ["bias has shape (1, 24)"]),
            (lambda: multiply(bias=jnp.ones(24, jnp.int32)), TypeError, ["bias has dtype int32"]),
            (lambda: multiply(bias=jnp.ones(24, jnp.complex64)), TypeError, ["bias has dtype complex64"]),
            (lambda: multiply(accumulate=jnp.ones((24, 16))), ValueError, ["shape (24, 16); needs (16, 24)"]),
            (lambda: multiply(accumulate=jnp.ones(24)), ValueError, ["accumulate has shape (24,)"]),
            (lambda: multiply(accumulate=jnp.ones((16, 24), jnp.int8)), TypeError, ["accumulate has dtype int8"]),
        ],
    )
    def test_operands_that_do_not_fit(self, call, error, messages):
        assert_raised_at_trace_time(call, error, "scaled_matmul: ", *messages)


class TestPairs:
    """Formats that no GEMM multiplies, on either side."""

    @pytest.mark.parametrize(
        ("a", "b", "error", "messages"),
        [
            (jlp.NVFP4(), jlp.MXFP4(), NotImplementedError, ["scaled differently", "quantise both alike"]),
            (
                jlp.MXFP8(),
                jlp.Float8Block(),
                NotImplementedError,
                ["lhs is MXFP8 E4M3 1x32 and rhs is Float8Block E4M3"],
            ),
            (jlp.MXFP8(), jlp.Float8Tensor(), NotImplementedError, ["scaled differently"]),
            (jlp.Float8Block(), jlp.Float8Tensor(), NotImplementedError, ["scaled differently"]),
            *(
                (make("e5m2"), make("e5m2"), NotImplementedError, ["no GEMM takes E5M2 x E5M2", "one of them to E4M3"])
                for make in (jlp.MXFP8, jlp.Float8Block, jlp.Float8Tensor)
            ),
            (
                jlp.Float8Block(block=(128, 128)),
                jlp.Float8Block("e5m2", block=(128, 128)),
                NotImplementedError,
                ["both operands have 128x128 blocks (2D x 2D)", "quantise one in 1x128 blocks"],
            ),
            (
                jlp.Float8Block(),
                jlp.Float8Block(power_of_two=False),
                ValueError,
                ["lhs has power_of_two=True and rhs has False", "quantise both by the same scale rule"],
            ),
        ],
        ids=lambda v: str(v) if hasattr(v, "element") else "",
    )
    def test_pairs_without_a_gemm(self, a, b, error, messages):
        assert_raised_at_trace_time(
            lambda: multiply(quantized(fmt=a), quantized(24, fmt=b)), error, "scaled_matmul: ", *messages
        )
        with pytest.raises(error):
            jax.eval_shape(lambda: multiply(quantized(fmt=b), quantized(24, fmt=a)))

    def test_per_tensor_scales_of_different_kinds_multiply(self):
        """They are one number each, however it came about."""
        formats = jlp.Float8Tensor(power_of_two=True), jlp.Float8Tensor(amax_epsilon=1.0)
        a, b = (quantized(fmt=fmt) for fmt in formats)
        assert jax.eval_shape(lambda: multiply(a, b)).shape == (16, 16)


class TestTensorScales:
    def quantize(self, fmt, **options):
        return lambda: jlp.quantize(X, fmt, **options)

    @pytest.mark.parametrize("fmt", [jlp.MXFP8(), jlp.MXFP4(), jlp.Float8Block()], ids=str)
    @pytest.mark.parametrize("name", ["amax", "encode_scale"])
    def test_formats_that_scale_each_block(self, fmt, name):
        message = f"{name}= was given, but {fmt} scales each block by its own amax; leave it out"
        assert_raised_at_trace_time(self.quantize(fmt, **{name: jnp.float32(1)}), ValueError, f"quantize: {message}")

    def test_an_encode_scale_is_for_one_scale_a_tensor(self):
        one = jnp.float32(1)
        message = "NVFP4 1x16 has two levels of scales; pass amax=, or Float8Tensor"
        assert_raised_at_trace_time(self.quantize(jlp.NVFP4(), encode_scale=one), ValueError, message)
        both = {"amax": one, "encode_scale": one}
        message = "amax= and encode_scale= were given; pass one of them"
        assert_raised_at_trace_time(self.quantize(jlp.Float8Tensor(), **both), ValueError, message)

    @pytest.mark.parametrize("scale", [jnp.ones(3), jnp.ones((), jnp.bfloat16), 2])
    def test_encode_scales(self, scale):
        message = f"encode_scale has dtype {jnp.asarray(scale).dtype} and shape {jnp.shape(scale)}; needs float32"
        assert_raised_at_trace_time(self.quantize(jlp.Float8Tensor(), encode_scale=scale), ValueError, message)

    @pytest.mark.parametrize("fmt", [jlp.MXFP8(block=(32, 32)), jlp.Float8Block(block=(128, 128))], ids=str)
    def test_vectors_have_no_tiles(self, fmt):
        message = f"x is a vector; {fmt} has two-dimensional blocks: use {type(fmt).__name__}(block=(1, {fmt.length}))"
        assert_raised_at_trace_time(lambda: jlp.quantize(X[0], fmt), ValueError, message)


EVERY_OP = {
    "quantize": lambda q, i: jlp.quantize(X, FMT, implementation=i),
    "quantize_both": lambda q, i: jlp.quantize_both(X, FMT, hadamard_columnwise=True, implementation=i),
    "hadamard_transform": lambda q, i: jlp.hadamard_transform(X, implementation=i),
    "dequantize": lambda q, i: jlp.dequantize(q, implementation=i),
    "scaled_matmul": lambda q, i: jlp.scaled_matmul(q, q, implementation=i),
    "fake_quantize": lambda q, i: jlp.fake_quantize(X, FMT, implementation=i),
    "rms_norm": lambda q, i: jlp.ops.rms_norm(X, X[0], implementation=i),
    "layer_norm": lambda q, i: jlp.ops.layer_norm(X, X[0], X[0], implementation=i),
    "gelu": lambda q, i: jlp.ops.gelu(X, implementation=i),
    "silu": lambda q, i: jlp.ops.silu(X, implementation=i),
    "relu_squared": lambda q, i: jlp.ops.relu_squared(X, implementation=i),
    "swiglu": lambda q, i: jlp.ops.swiglu(X, X, implementation=i),
    "geglu": lambda q, i: jlp.ops.geglu(X, X, implementation=i),
}

WITHOUT_LIBRARY = """
import jaxlowprec as jlp
from tests.ops.test_errors import EVERY_OP, quantized
q = quantized()
for name, call in EVERY_OP.items():
    call(q, None)
    try:
        call(q, "ffi")
    except NotImplementedError as error:
        assert 'implementation="ffi": JAXLOWPREC_DISABLE_NATIVE is set' in str(error), error
    else:
        raise AssertionError(name)
"""


class TestImplementations:
    def test_every_function_that_takes_one_is_here(self):
        public = {name: getattr(jlp, name) for name in jlp.__all__} | {n: getattr(jlp.ops, n) for n in jlp.ops.__all__}
        functions = {n: f for n, f in public.items() if inspect.isfunction(f)}
        taking = {n for n, f in functions.items() if "implementation" in inspect.signature(f).parameters}
        assert taking == set(EVERY_OP)

    @pytest.mark.parametrize("op", EVERY_OP)
    def test_portable_results_are_those_of_the_reference(self, op):
        def found(implementation):
            return jax.jit(lambda q: EVERY_OP[op](q, implementation))(quantized())

        assert_same_bytes(found("portable"), found("reference"))

    @pytest.mark.parametrize("op", EVERY_OP)
    def test_unknown_ones(self, op):
        q = quantized()
        message = 'implementation=\'cuda\'; needs None, "ffi", "portable" or "reference"'
        assert_raised_at_trace_time(lambda: EVERY_OP[op](q, "cuda"), ValueError, message)

    @pytest.mark.parametrize("op", EVERY_OP)
    def test_a_platform_without_kernels_has_pure_jax_alone(self, op):
        def lower(implementation):
            traced = jax.jit(lambda q: EVERY_OP[op](q, implementation)).trace(quantized())
            return traced.lower(lowering_platforms=("tpu",)).as_text()

        for implementation in (None, "portable", "reference"):
            assert "custom_call @jaxlowprec" not in lower(implementation)
        with pytest.raises(NotImplementedError, match="has kernels for .*cpu.* not for this platform"):
            lower("ffi")

    @pytest.mark.slow
    def test_without_the_library_every_op_has_the_reference_alone(self):
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAXLOWPREC_DISABLE_NATIVE": "1"}
        run = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARY], env=env, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
