"""Parts of a decoder's config."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.moe.router import RouterConfig


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """GPT-OSS's gated activation: `min(gate, limit) sigmoid(alpha gate) (clip(up, -limit, limit) + 1)`.

    Attributes:
        alpha: what the clamped gate is multiplied by in the sigmoid.
        limit: the largest gate, and the largest magnitude of up.
    """

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The activation of the results of gate and up."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@dataclasses.dataclass(frozen=True)
class Experts:
    """Sizes and routing of a mixture of experts.

    Attributes:
        number, per_token: the number of experts, and of those that each token goes to.
        width: the hidden features of an expert.
        routing: how tokens choose experts.
        shared: the hidden features of the experts that process every token; 0: there are none.
        bias: whether the router and the experts' layers have biases.
        clamped: the experts' activation; None: SwiGLU.
    """

    number: int
    per_token: int
    width: int
    routing: RouterConfig
    shared: int = 0
    bias: bool = False
    clamped: ClampedSwiGLU | None = None


@dataclasses.dataclass(frozen=True)
class Latent:
    """Widths of multi-head latent attention (arXiv 2405.04434, section 2.1).

    Attributes:
        query_rank: features of the latent that queries are made of; None: they are made of the layer's inputs.
        rank: features of the latent that keys and values are made of.
        plain, rotated: features of a head's query and key without and with a rotary embedding.
        value: features of a head's value.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotated: int
    value: int


class Norms(NamedTuple):
    """The names of a layer's norms; None: there is none at this place.

    Attributes:
        attention, mlp: of what attention and MLP read.
        after_attention, after_mlp: of their results, before these are added to the residual stream.
    """

    attention: str = "input_layernorm"
    after_attention: str | None = None
    mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None
