"""The lowering of platforms without kernels: one product of XLA's, within the bounds of numerics.md 9.3."""

import ast
import dataclasses
import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm.data import Batches
from lm.mesh import ONE_DEVICE
from lm.model import SIZES as MODELS
from lm.training import Run, Schedule, initial_parameters, make_steps, optimizer

import jaxlowprec as jlp
from jaxlowprec.ops.grouped_matmul import api, ragged
from jaxlowprec.ops.grouped_matmul.op import GroupedMatmulSpec
from jaxlowprec.ops.grouped_matmul.plain import plain_rows
from jaxlowprec.ops.scaled_matmul import portable
from tests.helpers import ONE_OF_EACH, assert_same_bytes, format_name, random_array, run_python
from tests.products import assert_is_product, calls_of, decoded

ROOT = pathlib.Path(__file__).parents[3]
PAIRS = [
    (jlp.NVFP4(), jlp.NVFP4()),
    (jlp.NVFP4(), jlp.NVFP4((16, 16))),
    (jlp.MXFP4(), jlp.MXFP4((32, 32))),
    (jlp.MXFP8(), jlp.MXFP4()),
    (jlp.MXFP8("e5m2"), jlp.MXFP8("e4m3", (32, 32))),
    (jlp.Float8Block(), jlp.Float8Block(block=(128, 128))),
    (jlp.Float8Block(power_of_two=False), jlp.Float8Block(block=(128, 128), power_of_two=False)),
    (jlp.Float8Block(), jlp.MXFP4((32, 32))),
    (jlp.Float8Block(power_of_two=False), jlp.MXFP4()),
    (jlp.Float8Tensor(), jlp.Float8Tensor("e5m2")),
]


def pair_name(pair):
    return "-by-".join(map(format_name, pair))


by_pair = pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
SIZES = {"even": (33, 256, 48), "ragged": (7, 41, 18)}


@functools.cache
def operands(pair, sizes):
    m, k, n = SIZES[sizes]
    return tuple(
        jlp.quantize(random_array((rows, k), seed=k + rows), fmt) for rows, fmt in zip((m, n), pair, strict=True)
    )


@functools.cache
def multiply(**options):
    return jax.jit(functools.partial(jlp.scaled_matmul, implementation="portable", **options))


@by_pair
@pytest.mark.parametrize("sizes", SIZES)
class TestScaledMatmul:
    def test_the_sums_are_within_the_bound(self, pair, sizes):
        a, b = operands(pair, sizes)
        y = multiply(preferred_element_type=jnp.float32)(a, b)
        assert_is_product(y, decoded(a), decoded(b).T)

    def test_it_is_one_product_without_a_loop(self, pair, sizes):
        program = multiply(preferred_element_type=jnp.bfloat16).lower(*operands(pair, sizes)).as_text()
        assert program.count("stablehlo.dot_general") == 1
        assert "stablehlo.while" not in program

    def test_decoding_is_exact(self, pair, sizes):
        for q in operands(pair, sizes):
            values = portable.decoded(q.data, q.scale, q.format)
            assert values.dtype == (jnp.bfloat16 if portable.is_exact_in_bfloat16(q.format) else jnp.float32)
            scale = 1.0 if q.format.scaling == "tensor" else q.amax
            plain = jlp.dequantize(q, dtype=jnp.float32)
            factor = q.scale if q.format.scaling == "tensor" else 1.0 if scale is None else scale / 2688
            np.testing.assert_allclose(values.astype(jnp.float32)[:, : plain.shape[1]] * factor, plain, rtol=2**-22)


def decodes_on_tpu(pair):
    return pair[0].scaling not in ("tensor", "rows") and all(map(portable.is_exact_in_bfloat16, pair))


class TestDecodedForOneTpu:
    @pytest.mark.parametrize("sizes", SIZES)
    @pytest.mark.parametrize("pair", [p for p in PAIRS if decodes_on_tpu(p)], ids=pair_name)
    def test_the_sums_are_within_the_bound(self, pair, sizes):
        a, b = operands(pair, sizes)
        arrays = a.data, a.scale, a.format, b.data, b.scale, b.format
        y = portable.products(*arrays, on_one_tpu=True)
        a, b = (portable.decoded(q.data, q.scale, q.format)[:, : SIZES[sizes][1]].astype(jnp.float32) for q in (a, b))
        assert_is_product(y, a, b.T)

    @pytest.mark.parametrize("fmt", [f for f in ONE_OF_EACH if decodes_on_tpu([f])], ids=format_name)
    def test_decoding_is_that_of_other_platforms(self, fmt):
        """Any codes and, in three matrices, any scales: NaN among bytes; without NaN among float32."""
        codes, scales = (np.random.default_rng(0).integers(0, 256, n, "uint8") for n in ((3, 70, 512), (3, 70, 4 * 32)))
        data = jnp.asarray(codes).view(fmt.data_dtype)
        rows, blocks = (-(-70 // fmt.length) if fmt.tiles else 70), 512 * (1 + fmt.packed) // fmt.length
        scale = jnp.asarray(scales[:, :rows, :blocks])
        scale = (scale.astype(jnp.int32).clip(1, 254) << 23).view(jnp.float32) if fmt.scaling == "float32" else scale
        scale = scale if fmt.scaling == "float32" else scale.view(fmt.scale_dtype)
        wanted = portable.decoded(data, scale, fmt)
        assert_same_bytes(portable.decoded_on_tpu(data, scale, fmt)[:, 0], wanted)
        if fmt.packed:
            halves = portable.decoded_on_tpu(data, scale, fmt, halves=True)
            assert_same_bytes(jnp.stack([halves[:, 0], halves[:, 1]], axis=-1).reshape(wanted.shape), wanted)


def test_operands_of_a_tensor_scale_are_multiplied_as_codes():
    a, b = operands(PAIRS[-1], "even")
    how = {
        "codes": ("cuda", None, "f8E4M3FN"),
        "decoded for more exact sums": ("cuda", "highest", "bf16"),
        "decoded where XLA has no FP8": ("METAL", None, "bf16"),
    }
    for platform, precision, dtype in how.values():
        traced = multiply(precision=precision).trace(a, b)
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        (product,) = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
        assert dtype in product, (platform, precision)


def test_exact_operands_need_one_pass_whatever_is_the_default():
    a, b = operands(PAIRS[0], "even")
    with jax.default_matmul_precision("highest"):
        program = jax.jit(functools.partial(jlp.scaled_matmul, implementation="portable")).lower(a, b).as_text()
    (product,) = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert "HIGHEST" not in product


def test_an_epilogue_follows_in_the_same_order():
    a, b = operands(PAIRS[0], "even")
    bias, before = random_array((48,), "float32", 1), random_array((33, 48), "bfloat16", 2)
    options = {"bias": bias, "activation": "gelu", "accumulate": before}
    actual = jlp.scaled_matmul(a, b, **options, implementation="portable")
    wanted = jlp.scaled_matmul(a, b, **options, implementation="reference")
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (actual, wanted)), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.MXFP8(), jlp.Int4(32), jlp.Float8Tensor()], ids=format_name)
def test_a_quantised_weight_is_decoded_for_one_product(fmt):
    x, w = random_array((33, 256)), jlp.quantize(random_array((48, 256), seed=3), fmt)
    function = functools.partial(jlp.scaled_matmul, preferred_element_type=jnp.float32, implementation="portable")
    program = jax.jit(function).lower(x, w).as_text()
    assert program.count("stablehlo.dot_general") == 1
    assert "stablehlo.while" not in program
    assert_is_product(function(x, w), np.asarray(x, np.float64), decoded(w).T)


class TestGroups:
    SIZES = ([5, 0, 37, 1, 82, 0, 15], 140, 160)

    BY_ROWS = [
        (jlp.Float8Rows(), jlp.Float8Rows(scale_dtype="bfloat16")),
        (jlp.Int8Rows(), jlp.Int4(32)),
        (jlp.Int8Rows(), jlp.MXFP4()),
    ]

    @pytest.fixture(params=[PAIRS[0], PAIRS[2], PAIRS[5], *PAIRS[7:], *BY_ROWS], ids=pair_name)
    def groups(self, request):
        sizes, rows, depth = self.SIZES
        sizes = jnp.asarray(sizes, jnp.int32)
        a, _ = api.quantize_groups(
            random_array((rows, depth)), sizes, request.param[0], rowwise=True, columnwise=False, implementation="ffi"
        )
        return a, jlp.quantize(random_array((7, 48, depth), seed=5), request.param[1]), sizes

    def test_chunks_agree_with_the_kernel(self, groups):
        a, b, _ = groups
        wanted, actual = (api.multiply_groups(a, b, None, jnp.float32, how) for how in ("ffi", "portable"))
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())

    def test_ragged_dot_agrees_with_the_kernel(self, groups):
        """The body for TPUs, on a CPU."""
        a, b, sizes = groups
        bias = jnp.asarray(random_array((7, 48), "float32", 8))
        wanted = api.multiply_groups(a, b, bias, jnp.float32, "ffi")
        spec = GroupedMatmulSpec(a.format, b.format, True, True, True, jnp.dtype("float32"), float32_sums=True)
        amaxes = [] if a.amax is None else [a.amax, b.amax]
        actual = ragged.matmul(spec, a.data, sizes, a.scale, b.data, b.scale, *amaxes, bias)
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())

    def test_plain_rows_agree(self):
        sizes, rows, depth = self.SIZES
        x, w = random_array((rows, depth)), random_array((7, depth, 48), seed=6)
        sizes = jnp.asarray(sizes, jnp.int32)
        actual = ragged.plain_rows(jnp.float32, None, x, sizes, w)
        np.testing.assert_allclose(actual, plain_rows(x, w, sizes, jnp.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.MXFP8(), jlp.Float8Tensor(), jlp.Int4(32)], ids=format_name)
def test_quantisers_give_the_kernels_bytes_and_are_stored(fmt):
    x = random_array((64, 256))
    function = jax.jit(functools.partial(jlp.quantize, fmt=fmt, implementation="portable"))
    assert_same_bytes(function(x), jlp.quantize(x, fmt))
    assert "stablehlo.optimization_barrier" in function.lower(x).as_text()


def test_a_cpu_without_kernels_keeps_the_references_bytes():
    """There `implementation=None` is the reference: its 4-bit products have the kernels' bytes."""
    program = (
        "import jax, jax.numpy as jnp, jaxlowprec as jlp\n"
        "q = jlp.quantize(jnp.ones((4, 64)), jlp.NVFP4())\n"
        "text = jax.jit(jlp.scaled_matmul).trace(q, q)\n"
        "print('while' in text.lower().as_text(), 'while' in text.lower(lowering_platforms=('tpu',)).as_text())"
    )
    assert run_python("-c", program, JAXLOWPREC_DISABLE_NATIVE="1").stdout.strip() == "True False"


def train_the_demo(steps):
    """The losses of one small block of the model of `make demo` under NVFP4, with random rotations and stochastic
    rounding; and the calls of this library's kernels in a step."""
    config, recipe = dataclasses.replace(MODELS["tiny"], layers=1, high_precision_last=0), jlp.NVFP4BlockScaling()
    schedule = Schedule(steps, learning_rate=1e-3, batch=8, seed=0, checkpoint_every=steps)
    words = np.random.default_rng(0).choice([b"the ", b"low ", b"bits ", b"of a ", b"block\n"], 20_000)
    batches = Batches(np.frombuffer(b"".join(words), np.uint8), schedule.batch, config.context, schedule.seed)
    transformation = optimizer(schedule)
    graph, parameters = initial_parameters(config, Run("nvfp4", recipe), schedule.seed, ONE_DEVICE)
    state, losses = transformation.init(parameters), []
    with jlp.autocast(recipe):
        step = make_steps(graph, transformation)[0].lower(parameters, state, batches.train(0)).compile()
    for i in range(steps):
        parameters, state, loss = step(parameters, state, batches.train(i))
        losses.append(float(loss))
    return losses, calls_of(step)


@pytest.mark.slow
def test_training_the_demo_follows_the_kernels():
    by_kernels, calls = train_the_demo(12)
    assert calls["jaxlowprec_scaled_matmul"] == 3 * 4  # of four linears
    program = f"from {__name__} import train_the_demo as train; print(*train(12), sep='\\n')"
    paths = f"{ROOT}{os.pathsep}{ROOT / 'examples'}"
    done = run_python("-c", program, PYTHONPATH=paths, JAXLOWPREC_IMPLEMENTATION="portable")
    losses, calls = done.stdout.splitlines()
    assert calls == "Counter()"
    losses = ast.literal_eval(losses)
    assert losses[-1] < 0.4 * losses[0]
    np.testing.assert_allclose(losses[:3], by_kernels[:3], rtol=1e-3)
    # JAX 0.12 fuses a product that is no call with what is around it, where other bfloat16 numbers stay unrounded.
    np.testing.assert_allclose(losses, by_kernels, rtol=2e-2)
