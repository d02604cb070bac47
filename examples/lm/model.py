"""A GPT-style transformer over bytes in Flax NNX, with jaxlowprec's linears, norms and MLP in its blocks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp
from lm.mesh import constrain, partitioned

VOCABULARY = 256
LOAD_BALANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model.

    Attributes:
        layers, width, heads: sizes of the transformer.
        context: the number of bytes that it sees.
        high_precision_first, high_precision_last: how many blocks at each end ignore the recipe.
        dtype: the dtype of activations. Parameters are float32.
        saved: what the MLP keeps for its backward pass, see `jaxlowprec.mlp`.
        experts: 0, or the number of experts in place of each block's MLP; top_k: how many of them each byte goes to.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    high_precision_first: int = 0
    high_precision_last: int = 1
    dtype: str = "bfloat16"
    saved: str = "quantized"
    experts: int = 0
    top_k: int = 2

    def follows_recipe(self, layer: int) -> bool:
        """Whether a block is quantised under a recipe."""
        return self.high_precision_first <= layer < self.layers - self.high_precision_last


SIZES = {
    "tiny": Config(layers=2, width=64, heads=4, context=32),
    "demo": Config(),
    "small": Config(layers=6, width=384, heads=6, context=256),
    "medium": Config(layers=12, width=768, heads=12, context=512),
}


class Block(nnx.Module):
    """Pre-norm causal attention and a GELU MLP, or experts in its place. Norms, softmax and both attention products
    stay in high precision."""

    def __init__(self, config: Config, rngs: nnx.Rngs, linear: type[nnx.Linear]):
        width, dtype = config.width, jnp.dtype(config.dtype)
        residual = nnx.initializers.normal(0.02 / (2 * config.layers) ** 0.5)
        plain = nnx.initializers.normal(0.02)

        def project(inputs, outputs, init, *axes):
            kernel_init = partitioned(init, *axes)
            return linear(inputs, outputs, use_bias=False, dtype=dtype, kernel_init=kernel_init, rngs=rngs)

        self.heads, self.saved, self.ours = config.heads, config.saved, issubclass(linear, jlp.nnx.Linear)
        norm = jlp.nnx.RMSNorm if self.ours else nnx.RMSNorm
        self.norm1, self.norm2 = (norm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.qkv = project(width, 3 * width, plain, "embed", "heads")
        self.out = project(width, width, residual, "heads", "embed")
        self.experts = bool(config.experts)
        if not self.experts:
            self.up = project(width, 4 * width, plain, "embed", "mlp")
            self.down = project(4 * width, width, residual, "mlp", "embed")
            return
        follows = {} if self.ours else {"recipe": None}
        self.moe = jlp.nnx.MoE(
            config.experts,
            width,
            2 * width,  # two of them have the size of the MLP
            top_k=config.top_k,
            activation=jax.nn.gelu,
            gated=False,
            routing=jlp.moe.RouterConfig(load_balance_coef=LOAD_BALANCE),
            dtype=dtype,
            kernel_init=partitioned(plain, None, "embed", "mlp"),
            down_kernel_init=partitioned(residual, None, "mlp", "embed"),
            router_kernel_init=partitioned(plain, "embed", None),
            rngs=rngs,
            **follows,
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jlp.moe.MoEAux | None]:
        """Activations [batch, time, width], and the experts' `MoEAux`, if there are experts."""
        batch, time, width = x.shape
        normed = constrain(self.norm1(x), "batch", "time", None)
        qkv = self.qkv(normed).reshape(batch, time, 3, self.heads, width // self.heads)
        q, k, v = (constrain(qkv[:, :, i], "batch", None, "heads", None) for i in range(3))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, time, width)
        x = x + constrain(self.out(constrain(attended, "batch", None, "heads")), "batch", "time", None)
        normed = constrain(self.norm2(x), "batch", "time", None)
        if self.experts:
            y, aux = self.moe(normed)
            return x + constrain(y, "batch", "time", None), aux
        return x + constrain(self._mlp(normed), "batch", "time", None), None

    def _mlp(self, x: jax.Array) -> jax.Array:
        if self.ours:
            return jlp.nnx.mlp(x, [self.up, self.down], activation="gelu", saved=self.saved)
        return self.down(constrain(jax.nn.gelu(self.up(x)), "batch", None, "mlp"))


class LanguageModel(nnx.Module):
    """Bytes [batch, time] to float32 logits [batch, time, 256].

    `linear` makes the linears of the blocks that follow a recipe, which have jaxlowprec's norms and MLP, too; with
    Flax's own `nnx.Linear` the model does without jaxlowprec. All other layers are Flax's.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs, linear: type[nnx.Linear] = jlp.nnx.Linear):
        dtype = jnp.dtype(config.dtype)
        init = nnx.initializers.normal(0.02)
        self.config = config
        table = partitioned(init, "vocabulary", None)  # a split along the width would regroup its rows
        self.tokens = nnx.Embed(VOCABULARY, config.width, dtype=dtype, embedding_init=table, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.width, dtype=dtype, embedding_init=init, rngs=rngs)
        layers = [linear if config.follows_recipe(layer) else nnx.Linear for layer in range(config.layers)]
        self.blocks = nnx.List([Block(config, rngs, linear) for linear in layers])
        self.norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        kernel = partitioned(nnx.initializers.lecun_normal(), "embed", "vocabulary")
        self.head = nnx.Linear(config.width, VOCABULARY, use_bias=False, dtype=dtype, kernel_init=kernel, rngs=rngs)
        jlp.nnx.name_layers(self)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.with_experts(tokens)[0]

    def with_experts(self, tokens: jax.Array) -> tuple[jax.Array, list[jlp.moe.MoEAux]]:
        """The logits, and the `MoEAux` of each block with experts."""
        x = constrain(self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])), "batch", "time", None)
        said = []
        for block in self.blocks:
            x, aux = block(x)
            said += [] if aux is None else [aux]
        normed = constrain(self.norm(x), "batch", None, None)
        return constrain(self.head(normed).astype(jnp.float32), "batch", None, "vocabulary"), said


def loss(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of predicting each byte of [batch, time + 1] from those before it."""
    return _cross_entropy(model(tokens[:, :-1]), tokens)


def training_loss(model: LanguageModel, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    """The loss that is trained: `loss`, plus the load-balance loss if there are experts.

    It comes with `loss` by itself, and with the load of the busiest expert divided by an even share, averaged over the
    blocks (None without experts).
    """
    logits, said = model.with_experts(tokens[:, :-1])
    value = _cross_entropy(logits, tokens)
    if not said:
        return value, (value, None)
    shares = [aux.group_sizes.max() * aux.group_sizes.size / aux.group_sizes.sum() for aux in said]
    return value + sum(aux.load_balance_loss for aux in said), (value, sum(shares) / len(shares))


def _cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1).mean()
