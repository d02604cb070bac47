"""The scales of FP8 blocks on their way from quantiser to GEMM, as XLA's compiler for NVIDIA GPUs leaves it. On Hopper
both state cuBLASLt's order as a layout. Nothing runs; skipped as test_described_gpu.py is."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxlowprec as jlp
from tests.cuda_without_gpu.described_gpu import compiled, described
from tests.cuda_without_gpu.test_described_block import Fused, Separate, training_step
from tests.sharding.meshes import mesh_of

RECIPE = jlp.Float8BlockScaling()
ROWS, TILES = jlp.Float8Block(), jlp.Float8Block(block=(128, 128))
TOKENS, INPUTS, OUTPUTS = 1024, 512, 1536
XLAS_KERNELS = ("fusion", "copy")

_INSTRUCTION = re.compile(r"^ *(?:ROOT )?%(\S+) = (?:\(.*?\)|\S+) ([a-z][\w-]*)\((.*)$", re.MULTILINE)
_GEMM = re.compile(r'\(([^)]*)\), custom_call_target="jaxlowprec_scaled_matmul", operand_layout_constraints={(.*?})}')


def scales(found):
    """Of each GEMM's scales: the shape with its layout, and the instruction or the custom call that they come from."""
    by_name = {name: (kind, rest) for name, kind, rest in _INSTRUCTION.findall(found.text)}

    def source(name):
        kind, rest = by_name[name]
        if kind in ("get-tuple-element", "bitcast"):
            return source(re.search(r"%([^\s,)]+)", rest)[1])
        if "kind=kCustom" in rest:  # a call and the slice that it reads or writes
            called = re.search(r"calls=(%\S+),", rest)[1]
            rest = re.search(rf"^{re.escape(called)} .*?^}}", found.text, re.MULTILINE | re.DOTALL)[0]
        target = re.search(r'custom_call_target="jaxlowprec_(\w+)"', rest)
        return target[1] if target else kind

    pairs = []
    for operands, shapes in _GEMM.findall(found.text):
        names, shapes = re.findall(r"%([^\s,)]+)", operands), re.findall(r"\w+\[[\d,]*\]{[\d,]*}", shapes)
        pairs += [(shapes[i], source(names[i])) for i in (1, 3)]
    return pairs


def laid_out(shape):
    """Whether the GEMM's call launches a kernel that brings these scales into order: see `gemm_scales_in_order`."""
    blocks, layout = re.fullmatch(r"f32\[\d+,(\d+)\]{(.*)}", shape).groups()
    return layout == "1,0" and int(blocks) % 4 != 0


def by_rows(found):
    """The scales of 1x128 blocks that lie row by row; there are 128 rows or more."""
    return [shape for shape, _ in scales(found) if re.match(r"f32\[\d{3,},.*\{1,0\}", shape)]


def launches(found):
    """Kernels: those of each custom call, and XLA's."""
    return found.calls.total() + sum(laid_out(s) for s, _ in scales(found)) + sum(found.kinds[k] for k in XLAS_KERNELS)


def linear_step(batch=()):
    def step(x, w, dy):
        y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=RECIPE), x, w)
        return y, *pullback(dy)

    x, dy = (jnp.ones((*batch, TOKENS, size), jnp.bfloat16) for size in (INPUTS, OUTPUTS))
    return step, (x, jnp.ones((INPUTS, OUTPUTS), jnp.bfloat16), dy)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_linear_step(batch):
    """Three quantisations and three GEMMs: no more launches than custom calls."""
    step, arrays = linear_step(batch)
    with described("H100") as devices:
        found = compiled(step, *arrays, devices=devices)
    assert found.calls == {"jaxlowprec_quantize": 3, "jaxlowprec_scaled_matmul": 3}
    assert {source for _, source in scales(found)} == {"quantize"}
    assert not by_rows(found)
    assert launches(found) == 6


@pytest.mark.parametrize(("fmt", "transposes"), [(ROWS, 1), (TILES, 0)], ids=str)
def test_a_weight_quantised_outside(fmt, transposes):
    """Arguments lie row by row: XLA transposes the scales of 1x128 blocks, once."""
    weight = jax.eval_shape(lambda: jlp.quantize(jnp.ones((OUTPUTS, INPUTS)), fmt))

    def run(x, weight):
        return jlp.scaled_matmul(jlp.quantize(x, ROWS), weight)

    with described("H100") as devices:
        found = compiled(run, jnp.ones((TOKENS, INPUTS), jnp.bfloat16), weight, devices=devices)
    assert found.kinds["transpose"] == transposes and not found.kinds["copy"]
    assert launches(found) == 2 + transposes


@pytest.mark.parametrize("make", [Separate, lambda rngs: Fused(rngs, "quantized")], ids=["separate", "fused"])
def test_a_block(make):
    """Norms and activations that are quantised in one pass write the same order."""
    step = training_step("H100", RECIPE, make)
    assert all(source.endswith("quantize") for _, source in scales(step)) and not by_rows(step)


def test_layers_in_a_scan():
    """Each computed again for its gradient: nothing is kept, and nothing transposed."""

    def gradients(x, kernels):
        def layer(x, kernel):
            return jnp.tanh(jlp.linear(x, kernel, recipe=RECIPE)), None

        return jax.grad(lambda *args: jax.lax.scan(jax.checkpoint(layer), *args)[0].astype(jnp.float32).sum())(
            x, kernels
        )

    x, kernels = jnp.ones((TOKENS, INPUTS), jnp.bfloat16), jnp.ones((4, INPUTS, INPUTS), jnp.bfloat16)
    with described("H100") as devices:
        found = compiled(gradients, x, kernels, devices=devices)
    assert {source for _, source in scales(found)} == {"quantize"} and not by_rows(found)


@pytest.mark.parametrize("spec", [PartitionSpec("x", None), PartitionSpec(None, "x")], ids=["tokens", "contraction"])
def test_several_gpus(spec):
    with described("H100", 4) as devices:
        mesh = mesh_of((len(devices),), names="x", devices=devices)
        x = jax.ShapeDtypeStruct((TOKENS, INPUTS), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        kernel = NamedSharding(mesh, PartitionSpec(spec[1], None))
        w = jax.ShapeDtypeStruct((INPUTS, OUTPUTS), jnp.float32, sharding=kernel)
        found = compiled(lambda x, w: jlp.linear(x, w, recipe=RECIPE), x, w, devices=devices)
    assert {source for _, source in scales(found)} == {"quantize"} and not by_rows(found)


@pytest.mark.parametrize("gpu", ["A100", "B200"])
def test_other_gpus_have_no_such_order(gpu):
    step, arrays = linear_step()
    with described(gpu) as devices:
        found = compiled(step, *arrays, devices=devices)
    assert not any("{0,1}" in shape for shape, _ in scales(found)) and "column_major" not in found.text
