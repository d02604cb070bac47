"""Rows that travel to experts as codes: the forward pass is that of one device, and gradients are of what travelled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec import traffic
from jaxlowprec.layers.shared_input import Layer
from jaxlowprec.moe.exchange import AllToAll
from jaxlowprec.moe.grouped_linear import GatedActivation, fused_experts
from jaxlowprec.moe.wire import formats_of, is_kept, sent
from tests.helpers import assert_same_bytes, often, random_array
from tests.moe.exchange.test_exchange import CASES, EXPERTS, FORMS, K, choices, step
from tests.sharding.meshes import mesh_of

TOKENS, WIDTH, HIDDEN = 12, 128, 64
MX, BLOCK = jlp.MXFP8BlockScaling(), jlp.Float8BlockScaling(use_f32_scales=False)
HYBRID = jlp.MXFP8BlockScaling(fp8_format="HYBRID")
FP4 = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)
KEPT = [
    *(jlp.MXFP8(element, scale_rule=rule) for element in ("e4m3", "e5m2") for rule in ("up", "floor", "even")),
    *(jlp.MXFP4(scale_rule=rule) for rule in ("up", "floor", "even")),
    *(jlp.Float8Block(element) for element in ("e4m3", "e5m2")),
    jlp.Float8Block(amax_epsilon=0.5),
]


def hostile(dtype):
    """Rows of any magnitude, whose largest elements lie all over a binade, with zeros, infinities and NaN."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 300)) * np.exp2(rng.integers(-100, 100, (512, 1)))
    x[:64, 5] = np.exp2(rng.uniform(8, 10, 64))
    x[64], x[65, 7], x[66, 200] = 0, np.inf, np.nan
    return x.astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fmt", often(KEPT[::3], KEPT), ids=repr)
def test_what_travelled_is_quantised_again_without_another_error(fmt, dtype):
    x = hostile(dtype)
    assert is_kept(fmt)

    @jax.jit
    def travelled(x):
        once = jlp.quantize(x, fmt).dequantize()
        return once, sent(x, fmt, lambda rows: rows), jlp.quantize(once, fmt).dequantize()

    once, found, again = travelled(x)
    assert_same_bytes(found, once)
    np.testing.assert_array_equal(np.float32(again), np.float32(once))  # a zero may have the other sign


@pytest.mark.parametrize(
    "fmt", [jlp.NVFP4(), jlp.Float8Tensor(), jlp.Float8Block(power_of_two=False), jlp.MXFP8(block=(32, 32))], ids=str
)
def test_others_are_not_kept(fmt):
    assert not is_kept(fmt)


def layers_of(kernels, recipe):
    names = ("experts/gate_proj", "experts/up_proj", "experts/down_proj")
    return [Layer(w, None, None, recipe, None, name, None, None) for w, name in zip(kernels, names, strict=True)]


def experts_of(layers):
    return functools.partial(
        fused_experts, "MoE", layers=layers, activation=GatedActivation(jax.nn.silu), saved="quantized"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def through(x, fmt, of_gradient):
    """x as it travels, and its gradient likewise."""
    return x if fmt is None else jlp.quantize(x, fmt).dequantize()


through.defvjp(
    lambda x, fmt, of_gradient: (through(x, fmt, of_gradient), None),
    lambda fmt, of_gradient, _, dx: (through(dx, of_gradient, None),),
)


def on_one_device(x, kernels, weights, experts, recipe, wire="codes"):
    where, layers = jlp.moe.dispatch(experts, EXPERTS), layers_of(kernels, recipe)
    found = formats_of("MoE", layers, x.dtype, wire)
    rows = through(jlp.moe.scatter_to_experts(x, where), found.rows, found.back)
    rows = through(experts_of(layers)(rows, where.group_sizes), found.back, found.gradient)
    return jlp.moe.combine(rows, weights, where)


def over_devices(devices, recipe, form="padded", factor=2.0, wire="codes"):
    def local(x, kernels, weights, experts):
        where, layers = jlp.moe.dispatch(experts, EXPERTS), layers_of(kernels, recipe)
        return AllToAll(where, weights, "a", factor, form, wire).run(experts_of(layers), x, layers)[0]

    return jax.shard_map(local, mesh=mesh_of((devices,)), in_specs=(P("a"),) * 4, out_specs=P("a"))


@functools.cache
def step_over_devices(devices, recipe, form="padded", factor=2.0, wire="codes"):
    """Compiled once for all choices of experts."""
    return step(over_devices(devices, recipe, form, factor, wire))


@functools.cache
def step_on_one_device(recipe, wire="codes"):
    return step(functools.partial(on_one_device, recipe=recipe, wire=wire))


@functools.cache
def operands(case, devices):
    tokens = devices * TOKENS
    sizes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    return (
        random_array((tokens, WIDTH)),
        tuple(random_array((EXPERTS, *size), "float32", seed=seed) for seed, size in enumerate(sizes)),
        random_array((tokens, K), "float32", seed=9),
        jnp.asarray(choices(case, devices)),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("ragged_on_cpus")
@pytest.mark.parametrize("case", often(CASES[:1], CASES))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("devices", often([4], [1, 4, 8]))
@pytest.mark.parametrize("wire", ["codes", "codes_both_ways"])
@pytest.mark.parametrize("recipe", often([MX], [MX, HYBRID, FP4, None]), ids=str)
def test_a_step(recipe, wire, devices, form, case):
    """The result and the gradients are those of one device, of the numbers that travelled, to the bit."""
    given = operands(case, devices)
    *found, of_weights = step_over_devices(devices, recipe, form, wire=wire)(*given)
    *expected, expected_of_weights = step_on_one_device(recipe, wire)(*given)
    assert_same_bytes(found, expected)
    np.testing.assert_allclose(of_weights, expected_of_weights, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [MX, BLOCK, None], ids=str)
def test_codes_that_experts_read_keep_the_result(recipe):
    given = operands("even", 4)
    found = jax.jit(over_devices(4, recipe))(*given)
    assert_same_bytes(found, jax.jit(functools.partial(on_one_device, recipe=recipe, wire="rows"))(*given))


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.1, 100])
def test_buffers_of_any_size(factor):
    given = operands("even", 4)
    wanted = step_over_devices(4, MX)(*given)
    assert_same_bytes(step(over_devices(4, MX, factor=factor))(*given), wanted)


def assert_same_in_remat_and_scan(function, given, wanted):
    assert_same_bytes(step(jax.checkpoint(function))(*given)[:2], wanted[:2])

    def scanned(x, kernels, weights, experts):
        again = jax.lax.scan(lambda _, x: (0, function(x, kernels, weights, experts)), 0, x[None])
        return again[1][0]

    assert_same_bytes(step(scanned)(*given)[:2], wanted[:2])


@pytest.mark.slow
def test_under_remat_and_scan():
    given = operands("even", 4)
    assert_same_in_remat_and_scan(over_devices(4, MX), given, step_over_devices(4, MX)(*given))


@pytest.mark.slow
def test_gradients_of_kernels_are_as_near_as_those_of_whole_rows():
    """Numbers are rounded to as many digits twice, with scales that are powers of two: only tiny ones change again."""
    x, kernels, weights, experts = operands("even", 4)
    dy = random_array(x.shape, "float32", seed=5)

    @functools.partial(jax.jit, static_argnums=0)
    def of_kernels(function):
        return jax.grad(lambda kernels: jnp.vdot(function(x, kernels, weights, experts), dy))(kernels)

    exact = of_kernels(functools.partial(on_one_device, recipe=None))

    def error(wire):
        found = of_kernels(over_devices(4, MX, wire=wire))
        return [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(found, exact, strict=True)]

    np.testing.assert_allclose(error("codes"), error("rows"), rtol=0.01)


def test_codes_travel():
    given = operands("even", 8)
    compiled = step(over_devices(8, MX, factor=100)).lower(*given).compile()
    large = [c for c in traffic.collectives(compiled) if c.elements > 64 * EXPERTS]
    assert {c.kind for c in large} == {"all-to-all"}
    kinds = [dtype for c in large for dtype in {dtype for dtype, _ in c.results}]
    assert kinds.count("u8") == 2 and len(kinds) == 4  # the others are bfloat16, which XLA widens on CPUs


@pytest.mark.parametrize(
    ("recipe", "rows", "gradient"),
    [
        (HYBRID, jlp.MXFP8(), jlp.MXFP8("e5m2")),
        (jlp.NVFP4BlockScaling(), jlp.MXFP8(), jlp.MXFP8()),
        (jlp.Float8CurrentScaling(), jlp.MXFP8(), jlp.MXFP8()),
        (jlp.Int8RowScaling(), jlp.MXFP8(), jlp.MXFP8()),
        (jlp.Float8BlockScaling(use_f32_scales=True), jlp.MXFP8(), jlp.MXFP8()),
        (jlp.MXFP8BlockScaling(backward_override="high_precision"), jlp.MXFP8(), None),
        (None, None, None),
    ],
    ids=str,
)
def test_what_travels(recipe, rows, gradient):
    """What is read, if it keeps its numbers, and otherwise MXFP8."""
    layers = layers_of((None,) * 3, recipe)
    assert formats_of("MoE", layers, "bfloat16", "rows") == (None, None, None)
    assert formats_of("MoE", layers, "bfloat16", "codes") == (rows, gradient, None)
    back = None if recipe is None else jlp.MXFP8()
    assert formats_of("MoE", layers, "bfloat16", "codes_both_ways") == (rows, gradient, back)


def test_layers_in_high_precision_get_rows_as_they_are():
    layers = layers_of((None,) * 3, MX)
    up = layers[:1] + [layers[1]._replace(recipe=None)] + layers[2:]
    down = [*layers[:2], layers[2]._replace(recipe=None)]
    assert formats_of("MoE", up, "bfloat16", "codes") == (None, jlp.MXFP8(), None)
    assert formats_of("MoE", down, "bfloat16", "codes") == (jlp.MXFP8(), None, None)


def test_what_cannot_travel_is_named():
    with pytest.raises(TypeError, match="rows of float16, which does not hold all numbers that MXFP8 E4M3 1x32 stands"):
        formats_of("MoE", layers_of((None,) * 3, MX), "float16", "codes")
    with pytest.raises(ValueError, match='wire="codes" and experts that are not one function'):
        formats_of("MoE", None, "bfloat16", "codes")
