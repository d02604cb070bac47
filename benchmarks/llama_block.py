"""A training step of one Llama block: the gradients of its parameters and input, for a given gradient of its output.

RMSNorm, causal attention and a SwiGLU MLP of 3.5 times the width, without biases. Parameters are float32, everything
else is bfloat16. Flax's layers, this library's in their place, or its layers of blocks; attention is the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp

HEAD = 128

KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"} if jax.default_backend() == "cpu" else {}
"""XLA's CPU compiler otherwise takes what is rematerialised from the forward pass, of every side."""

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


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
    """Activations [batch, time, width] to the same, by separate layers.

    Arguments:
        linear: the class of the linears.
        attention: of q, k and v [batch, time, heads, HEAD].
    """

    def __init__(self, size: Size, linear: type[nnx.Linear], attention: Attention, rngs: nnx.Rngs):
        def project(inputs, outputs):
            return linear(inputs, outputs, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

        self.attention = attention
        self.norm1, self.norm2 = (nnx.RMSNorm(size.width, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2))
        self.qkv, self.out = project(size.width, 3 * size.width), project(size.width, size.width)
        self.gate, self.up = (project(size.width, size.hidden) for _ in range(2))
        self.down = project(size.hidden, size.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.out(attended(self.attention, self.qkv(self.norm1(x))))
        normed = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(normed)) * self.up(normed))


class FusedLlamaBlock(nnx.Module):
    """The same by layers of blocks. `saved`: see `jaxlowprec.mlp`."""

    def __init__(self, size: Size, saved: str, attention: Attention, rngs: nnx.Rngs):
        options = {"use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
        self.attention = attention
        self.qkv = jlp.nnx.NormLinear(size.width, 3 * size.width, **options)
        self.out = jlp.nnx.Linear(size.width, size.width, **options)
        self.mlp = jlp.nnx.MLP(size.width, size.hidden, normalization="rms", saved=saved, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.out(attended(self.attention, self.qkv(x)))
        return x + self.mlp(x)


def attended(attention: Attention, qkv: jax.Array) -> jax.Array:
    """qkv [batch, time, 3 * width] to [batch, time, width]."""
    *tokens, features = qkv.shape
    q, k, v = jnp.split(qkv.reshape(*tokens, features // HEAD, HEAD), 3, axis=2)
    return attention(q, k, v).reshape(*tokens, features // 3)


def attention_by(implementation: str) -> Attention:
    """Causal attention by "xla" or "cudnn"."""
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)


@dataclasses.dataclass(frozen=True)
class Side:
    """Of a measurement.

    Attributes:
        recipe: of the linears; None: Flax's layers.
        saved: None: separate layers; otherwise layers of blocks, with this argument.
    """

    recipe: jlp.Recipe | None = None
    saved: str | None = None

    def model(self, size: Size, attention: Attention, blocks: int = 1) -> nnx.Sequential:
        """So many blocks, one after the other."""

        def block() -> nnx.Module:
            if self.saved is not None:
                return FusedLlamaBlock(size, self.saved, attention, nnx.Rngs(0))
            return LlamaBlock(size, jlp.nnx.Linear if self.recipe else nnx.Linear, attention, nnx.Rngs(0))

        with under(self.recipe):
            return nnx.Sequential(*(block() for _ in range(blocks)))


def under(recipe: jlp.Recipe | None) -> contextlib.AbstractContextManager:
    """A block in which the recipe holds; without one, no recipe."""
    return jlp.autocast(recipe, enabled=recipe is not None)


def pulled_back(graph: Any, parameters: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    """The block's output, and the function from its gradient to those of parameters and input."""
    return jax.vjp(lambda p, x: nnx.merge(graph, p)(x), parameters, x)


def compiled(size: Size, side: Side, attention: Attention, blocks: int = 1) -> jax.stages.Compiled:
    """The program of a step."""
    with under(side.recipe):
        graph, parameters = nnx.split(nnx.eval_shape(lambda: side.model(size, attention, blocks)), nnx.Param)
        x = jax.ShapeDtypeStruct((size.batch, size.time, size.width), jnp.bfloat16)

        def gradients(parameters, x, dy):
            y, pullback = pulled_back(graph, parameters, x)
            return y, *pullback(dy)

        return jax.jit(gradients).lower(parameters, x, x).compile(KEEP_BARRIERS)


def step(size: Size, side: Side, attention: Attention) -> Callable[[], Any]:
    """A call that makes one step of a block."""
    program = compiled(size, side, attention)
    parameters = nnx.state(side.model(size, attention), nnx.Param)
    x, dy = (jax.random.normal(jax.random.key(i), (size.batch, size.time, size.width), jnp.bfloat16) for i in range(2))
    return lambda: program(parameters, x, dy)
