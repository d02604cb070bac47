"""References leave no rounding to the platform: what they lower to for a TPU, and their bytes by integers on a CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.layers import delayed_scaling
from jaxlowprec.ops import exact
from jaxlowprec.ops.activations import reference as activations
from jaxlowprec.ops.grouped_matmul.api import multiply_within_groups, quantize_groups
from jaxlowprec.ops.int4 import reference as int4
from jaxlowprec.ops.norms import reference as norms
from jaxlowprec.ops.quantize import reference as quantize
from tests.helpers import (
    BY_WEIGHTS_RULE,
    CHOSEN_SCALES,
    OF_CACHES,
    ONE_OF_EACH,
    assert_same_numbers,
    format_name,
    random_array,
)

REFERENCE = {"implementation": "reference"}
INT4S = (jlp.Int4(), jlp.Int4(symmetric=False), jlp.Int4(rule="slime"), jlp.Int4(rule="compressed-tensors"))
FORMATS = (*ONE_OF_EACH, *OF_CACHES, BY_WEIGHTS_RULE, jlp.MXFP8(scale_rule="up"), *CHOSEN_SCALES)
SHAPE = (64, 256)

ESTIMATES = ("reciprocal_estimate", "inverse_root_estimate")  # functions whose results are corrected
LEFT_TO_PLATFORMS = re.compile(r"stablehlo\.(divide|sqrt|rsqrt|cbrt|exponential|log|power|tanh|logistic|remainder) ")
CAST = re.compile(r"stablehlo\.convert .*tensor<(?:[0-9x]*x)?(\w+)>\) -> tensor<(?:[0-9x]*x)?(\w+)>")


def faults(function, *args):
    """Operations of a function's program for TPUs whose rounding is the platform's, or that a TPU's compiler drops."""
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",))
    within, found = "", []
    for line in lowered.as_text().splitlines():
        if name := re.search(r"func\.func .*?@(\w+?)(_\d+)?\(", line):
            within = name[1]
        cast = CAST.search(line)
        dropped = cast and (cast[2].startswith("f8") or (cast[1] in ("bf16", "f16") and cast[2] == "f32"))
        rounded = LEFT_TO_PLATFORMS.search(line) and "xf32>" in line.replace("tensor<f32>", "xf32>")
        if dropped or (rounded and within not in ESTIMATES):
            found.append(f"{within}: {line.strip()}")
    return found


def array_like(dtype="bfloat16"):
    return jax.ShapeDtypeStruct(SHAPE, jnp.dtype(dtype))


class TestLoweredForTPUs:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("fmt", (*FORMATS, *INT4S), ids=format_name)
    def test_quantising(self, fmt, dtype):
        assert not faults(lambda x: jlp.quantize(x, fmt, **REFERENCE), array_like(dtype))

    @pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=format_name)
    def test_quantising_both_ways_with_random_bits(self, fmt):
        options = {"rounding": "stochastic", "hadamard_columnwise": fmt.packed, **REFERENCE}
        key = jax.ShapeDtypeStruct((2,), jnp.uint32)
        assert not faults(lambda x, key: jlp.quantize_both(x, fmt, key=key, **options), array_like(), key)

    def test_quantising_with_random_scales(self):
        options = {"rounding": "eden", "hadamard": True, **REFERENCE}
        key = jax.ShapeDtypeStruct((2,), jnp.uint32)
        assert not faults(lambda x, key: jlp.quantize(x, jlp.NVFP4(), key=key, **options), array_like(), key)

    def test_a_given_scale(self):
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        fmt = jlp.Float8Tensor()
        assert not faults(lambda x, s: jlp.quantize(x, fmt, encode_scale=s, **REFERENCE), array_like(), scale)

    @pytest.mark.parametrize("norm", [jlp.rms_norm, jlp.layer_norm])
    def test_norms(self, norm):
        parameters = [jax.ShapeDtypeStruct(SHAPE[1:], jnp.bfloat16)] * (1 if norm is jlp.rms_norm else 2)

        def normed(x, *parameters):
            y, gradients = jax.vjp(lambda x: norm(x, *parameters, **REFERENCE), x)
            return y, gradients(y)

        assert not faults(normed, array_like(), *parameters)

    @pytest.mark.parametrize("activation", [jlp.gelu, jlp.silu, jlp.swiglu, jlp.geglu])
    def test_activations(self, activation):
        def activated(*operands):
            y, gradients = jax.vjp(lambda *operands: activation(*operands, **REFERENCE), *operands)
            return y, gradients(y)

        assert not faults(activated, *[array_like()] * (2 if activation in (jlp.swiglu, jlp.geglu) else 1))

    def test_delayed_scaling(self):
        recipe = jlp.DelayedScaling(amax_history_len=4)

        def step(state, amax):
            new = delayed_scaling.updated(recipe, state, "kernel", 448.0, amax)
            return new, delayed_scaling.encode_scale(recipe, new, "kernel", 448.0)

        state = delayed_scaling.init_state(recipe)
        assert not faults(step, state, jax.ShapeDtypeStruct((), jnp.float32))

    @pytest.mark.parametrize("fmt", (*ONE_OF_EACH, *INT4S[:2]), ids=format_name)
    def test_products_with_a_quantised_weight(self, fmt):
        weight = jax.eval_shape(lambda w: jlp.quantize(w, fmt), array_like())
        assert not faults(lambda x, w: jlp.scaled_matmul(x, w, **REFERENCE), array_like(), weight)

    @pytest.mark.parametrize("implementation", ["reference", "portable"])
    @pytest.mark.parametrize("fmt", [f for f in ONE_OF_EACH if not f.tiles and f.scaling != "rows"], ids=format_name)
    def test_gradients_that_are_added_to_others(self, fmt, implementation):
        sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
        options = {"rowwise": False, "columnwise": True, "implementation": "reference"}
        operand = jax.eval_shape(lambda x, sizes: quantize_groups(x, sizes, fmt, **options)[1], array_like(), sizes)
        before = jax.ShapeDtypeStruct((2, SHAPE[1], SHAPE[1]), jnp.bfloat16)

        def added(operand, before):
            return multiply_within_groups(operand, operand, jnp.bfloat16, implementation, accumulate=before)

        assert not faults(added, operand, before)

    @pytest.mark.parametrize(
        "fault",
        [
            lambda x: 448.0 / x,
            lambda x: jnp.sqrt(x),
            lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32),
            lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
        ],
    )
    def test_faults_are_found(self, fault):
        assert faults(fault, array_like("float32"))


@pytest.fixture(params=[0.0, 2.0**-18, -(2.0**-18)], ids=["good", "above", "below"])
def by_integers(monkeypatch, request):
    """Compiles a function twice: as CPUs run it, and as other platforms do, with estimates off by this."""

    def compiled(function):
        as_cpus = jax.jit(lambda *args: function(*args))

        def as_others(*args):
            with monkeypatch.context() as other:
                other.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
                for name, error in zip(ESTIMATES, (request.param, request.param / 4), strict=True):
                    estimate = getattr(exact, name)
                    other.setattr(exact, name, lambda x, e=estimate, by=error: e(x) * np.float32(1 + by))
                return jax.jit(lambda *args: function(*args))(*args)

        return as_cpus, as_others

    return compiled


def hostile_rows(dtype):
    """Rows of magnitudes from subnormal to the largest, zeros, and some that are not finite."""
    x = np.array(random_array(SHAPE, "float32", 3)) * np.float32(2.0) ** np.arange(-126, 130, 4)[:64, None]
    x[5], x[6, 3], x[7, 9], x[8, 20] = 0, np.nan, np.inf, -np.inf
    return jnp.asarray(x, dtype)


@pytest.mark.sampled(5)
class TestByIntegers:
    @pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
    @pytest.mark.parametrize("amax", [0.0, 3.0, 2.0**-120, 3e38, jnp.inf])
    def test_quantising(self, fmt, amax, by_integers):
        tensor = None if fmt.scaling not in ("tensor", "two_level") else jnp.float32(amax)
        cpus, others = by_integers(lambda x: quantize.quantize_rows(x, fmt, tensor))
        x = hostile_rows("float32")
        assert_same_numbers(others(x), cpus(x))

    @pytest.mark.parametrize("fmt", INT4S, ids=format_name)
    def test_int4(self, fmt, by_integers):
        cpus, others = by_integers(lambda x: int4.quantize(x, fmt))
        x = hostile_rows("bfloat16")
        assert_same_numbers(others(x), cpus(x))

    def test_norms(self, by_integers):
        cpus, others = by_integers(lambda x: norms.layer_norm(x, jnp.ones(SHAPE[1]), None, 0.0))
        x = hostile_rows("float32")
        assert_same_numbers(others(x), cpus(x))

    @pytest.mark.parametrize("kind", ["gelu", "silu"])
    def test_activations(self, kind, by_integers):
        cpus, others = by_integers(
            lambda x: [activations.activation(kind, x), *activations.activation_gradient(kind, x, x)]
        )
        x = hostile_rows("float32")
        assert_same_numbers(others(x), cpus(x))
