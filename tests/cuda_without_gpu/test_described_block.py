"""What XLA's compiler for NVIDIA GPUs makes of a block's training step: which kernels it calls, and what lies between a
producer and the GEMM that reads it. Nothing runs; skipped as test_described_gpu.py is."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.cuda_without_gpu.described_gpu import compiled, described

WIDTH, HIDDEN, HEAD, TOKENS = 256, 896, 64, (2, 128)
RECIPES = {"nvfp4": jlp.NVFP4BlockScaling(), "mxfp8": jlp.MXFP8BlockScaling()}
OPTIONS = {"use_bias": False, "dtype": jnp.bfloat16}
NORMS = 2
NORM_GRADIENTS = {"norm_gradient": NORMS}
ACTIVATIONS = {"activation": 1, "activation_gradient": 1}
GEMMS = 3 * 5
OPERANDS = 4 + 5 + 5  # inputs (gate and up share theirs), weights, gradients of results
BROUGHT = 2 + 1 + 2  # amaxes that come with the tensor: of norms, the activation, the gradients of gate and up


def attended(qkv):
    tokens = qkv.shape[:-1]
    q, k, v = jnp.split(qkv.reshape(*tokens, -1, HEAD), 3, axis=2)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*tokens, -1)


class Separate(nnx.Module):
    """A block of separate layers, norms and activation, by the same rules."""

    def __init__(self, rngs):
        sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "down": (HIDDEN, WIDTH)}
        for name, size in (sizes | dict.fromkeys(("gate", "up"), (WIDTH, HIDDEN))).items():
            setattr(self, name, jlp.nnx.Linear(*size, rngs=rngs, **OPTIONS))
        self.norm1, self.norm2 = (jlp.nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        x = x + self.out(attended(self.qkv(self.norm1(x))))
        normed = self.norm2(x)
        return x + self.down(jlp.swiglu(self.gate(normed), self.up(normed)))


class Fused(nnx.Module):
    """The same by the layers of blocks."""

    def __init__(self, rngs, saved, width=WIDTH, hidden=HIDDEN):
        self.qkv = jlp.nnx.NormLinear(width, 3 * width, rngs=rngs, **OPTIONS)
        self.out = jlp.nnx.Linear(width, width, rngs=rngs, **OPTIONS)
        self.mlp = jlp.nnx.MLP(width, hidden, normalization="rms", saved=saved, rngs=rngs, **OPTIONS)

    def __call__(self, x):
        x = x + self.out(attended(self.qkv(x)))
        return x + self.mlp(x)


def training_step(gpu, recipe, make):
    """What XLA makes of a block's gradients."""
    with described(gpu) as devices, jlp.autocast(recipe):
        graph, parameters = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param)
        x = jax.ShapeDtypeStruct((*TOKENS, WIDTH), jnp.bfloat16)

        def gradients(parameters, x, dy):
            y, pullback = jax.vjp(lambda p, x: nnx.merge(graph, p)(x), parameters, x)
            return y, pullback(dy)

        return compiled(gradients, parameters, x, x, devices=devices)


def ours(step):
    """How many calls of each of this library's kernels."""
    return {name.removeprefix("jaxlowprec_"): n for name, n in step.calls.items() if name.startswith("jaxlowprec_")}


def with_amaxes(count, calls):
    return calls | ({"amax": count} if count else {})


def readers(text, producer):
    """What reads the first result of each call of a producer: names of custom calls, or kinds of instructions."""
    instruction = re.compile(r"^ *(?:ROOT )?%(\S+) = (\([^=]*?\)|\S+) ([a-z][\w-]*)\((.*)$", re.MULTILINE)
    found, waiting = [], []
    lines = instruction.findall(text[text.index("\nENTRY") :])
    for name, shape, _, rest in lines:
        if f'custom_call_target="jaxlowprec_{producer}"' in rest:
            waiting.append((name, shape.startswith("(")))
    while waiting:
        name, is_tuple = waiting.pop()
        for reader, _, kind, rest in lines:
            operands, _, attributes = rest.partition(")")
            if f"%{name}" not in re.split(r"[, ]+", operands):
                continue
            if is_tuple and "index=0" not in attributes.split(", "):
                continue
            if kind in ("get-tuple-element", "bitcast"):
                waiting.append((reader, False))
            else:
                target = re.search(r'custom_call_target="jaxlowprec_(\w+)"', attributes)
                found.append(target[1] if target else kind)
    return found


@pytest.mark.parametrize("gpu", ["H100", "B200"])
@pytest.mark.parametrize("name", RECIPES)
class TestTrainingStep:
    @pytest.mark.parametrize("saved", ["quantized", "recompute"])
    def test_which_kernels_are_called(self, gpu, name, saved):
        """Under NVFP4 46 of our kernels for 49 of separate layers, with "recompute" 48: the activation is computed and
        quantised again. Under MXFP8 31 and 33 for 35: norms, the activation and its gradients are quantised in the
        calls that make them."""
        separate = ours(training_step(gpu, RECIPES[name], Separate))
        amaxes = OPERANDS if name == "nvfp4" else 0
        expected = NORM_GRADIENTS | ACTIVATIONS | {"norm": NORMS, "quantize": OPERANDS, "scaled_matmul": GEMMS}
        assert separate == with_amaxes(amaxes, expected)

        expected = NORM_GRADIENTS | {"scaled_matmul": GEMMS + 2 * (saved == "recompute")}
        if name == "mxfp8":
            expected |= {"norm_quantize": NORMS, "activation_quantize": 2, "activation_gradient_quantize": 1}
            expected |= {"quantize": OPERANDS - NORMS - 1 - 2}  # gradients of gate and up
        else:
            expected |= ACTIVATIONS | {"norm": NORMS, "activation": 2, "quantize": OPERANDS + 1}
        fused = ours(training_step(gpu, RECIPES[name], lambda rngs: Fused(rngs, saved)))
        assert fused == with_amaxes(amaxes and amaxes - BROUGHT, expected)

    def test_only_quantisers_read_what_producers_write(self, gpu, name):
        """No copy in high precision lies between: the result of a norm or an activation is written once, under MXFP8
        not at all."""
        step = training_step(gpu, RECIPES[name], lambda rngs: Fused(rngs, "quantized"))
        quantisers = ["quantize", "quantize"] if name == "nvfp4" else []
        for producer in ("activation", "norm"):
            assert readers(step.text, producer) == quantisers
