"""A training step of one Llama block: the gradients of its parameters and input, for a given gradient of its output.

RMSNorm, causal attention and a SwiGLU MLP of 3.5 times the width, without biases. Parameters are float32, everything
else is bfloat16; only the linears differ between the two sides of a measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp

HEAD = 128


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the block and its input."""

    width: int = 4096
    batch: int = 4
    time: int = 2048

    @property
    def hidden(self) -> int:
        return self.width * 7 // 2

    def divided(self, by: int) -> Size:
        """A small one, to show that the program works."""
        return self if by == 1 else Size(max(HEAD, self.width // by), 2, max(64, self.time // by))


def fastest_attention() -> str:
    """cuDNN's fused attention where it runs, otherwise XLA's, which writes every score to memory."""
    if jax.default_backend() != "gpu":
        return "xla"
    q = jnp.zeros((1, HEAD, 1, HEAD), jnp.bfloat16)
    try:
        jax.block_until_ready(jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn"))
    except Exception as error:  # no cuDNN, or one that refuses: the other one always runs
        print(f"attention by XLA, because cuDNN's fails: {str(error)[:200]}", flush=True)
        return "xla"
    return "cudnn"


class LlamaBlock(nnx.Module):
    """Activations [batch, time, width] to the same."""

    def __init__(self, size: Size, linear: type[nnx.Linear], attention: Any, rngs: nnx.Rngs):
        def project(inputs, outputs):
            return linear(inputs, outputs, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

        self.attention = attention
        self.norm1, self.norm2 = (nnx.RMSNorm(size.width, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2))
        self.qkv, self.out = project(size.width, 3 * size.width), project(size.width, size.width)
        self.gate, self.up = (project(size.width, size.hidden) for _ in range(2))
        self.down = project(size.hidden, size.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        q, k, v = jnp.split(self.qkv(self.norm1(x)).reshape(batch, time, 3 * width // HEAD, HEAD), 3, axis=2)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        x = x + self.out(attended.reshape(x.shape))
        normed = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(normed)) * self.up(normed))


def step(size: Size, recipe: jlp.Recipe | None, attention: str) -> Callable[[], Any]:
    """A call that makes one step under a recipe, or in plain Flax if there is none."""

    def context():
        return jlp.autocast(recipe) if recipe else contextlib.nullcontext()

    with context():
        linear = jlp.nnx.Linear if recipe else nnx.Linear
        graph, parameters = nnx.split(LlamaBlock(size, linear, attention, nnx.Rngs(0)), nnx.Param)
    shape = (size.batch, size.time, size.width)
    x, dy = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2))

    @jax.jit
    def gradients(parameters, x, dy):
        y, pullback = jax.vjp(lambda p, x: nnx.merge(graph, p)(x), parameters, x)
        return y, *pullback(dy)

    def call():
        with context():
            return gradients(parameters, x, dy)

    return call
