"""Models of trainers and model libraries for tracing.py, each quantised by the line of its page in docs/how-to.

Each needs its package, and the packages need not get along: docs/how-to says how each is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxlowprec as jlp

BATCH, TOKENS, WORDS, WIDTH = 4, 64, 256, 128

Side = tuple[Callable[[Any, Any], jax.Array], Any, Any]
"""(parameters, batch) -> the loss; parameters; a batch."""


def tokens() -> np.ndarray:
    """Of a batch; values do not matter to compilers."""
    return np.ones((BATCH, TOKENS), "int32")


def rules_of(recipe: Any, block: str, layers: int | None = None) -> Any:
    """All blocks by the recipe, and the head in high precision."""
    return jlp.PerLayer.keep_ends(recipe, layers, 0, 0, block=block)


def transformed(function: Callable[..., Any], rules: Any, **options: Any) -> Callable[..., Any]:
    """The function, with its products under the rules if there are some."""
    return function if rules is None else jlp.quantize_matmuls(function, rules, **options)


def tunix(layers: int, recipe: Any) -> Side:
    """Qwen3 under `PeftTrainer`'s loss."""
    from tunix.models.qwen3 import model as qwen3
    from tunix.sft import peft_trainer, utils

    sizes = {"vocab_size": WORDS, "embed_dim": WIDTH, "hidden_dim": 2 * WIDTH, "rope_theta": 1_000_000}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "norm_eps": 1e-6}
    config = qwen3.ModelConfig(num_layers=layers, **sizes, **heads, use_tied_embedding=True, dtype=jnp.bfloat16)
    graph, params = nnx.split(qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
    mask = jnp.ones((BATCH, TOKENS), bool)
    batch = {"input_tokens": tokens(), "input_mask": mask}
    batch |= {"positions": utils.build_positions_from_mask(mask), "attention_mask": utils.make_causal_attn_mask(mask)}
    loss = transformed(peft_trainer._default_loss_fn, recipe and rules_of(recipe, "layers/{}", layers))
    return lambda params, batch: loss(nnx.merge(graph, params), **batch), params, batch


def maxtext(layers: int, recipe: Any, scan: bool) -> Side:
    """Qwen3 under the loss of MaxText's pre-training."""
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # MaxText then imports nothing of Google's cloud
    import maxtext
    from flax.core import spmd
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train
    from maxtext.utils import model_creation_utils

    settings = f"""run_name=x dataset_type=synthetic enable_checkpointing=false skip_jax_distributed_system=true
        base_output_directory=unused model_name=qwen3-8b override_model_config=true vocab_size={WORDS}
        base_num_decoder_layers={layers} base_emb_dim={WIDTH} base_mlp_dim={2 * WIDTH} base_num_query_heads=4
        base_num_kv_heads=2 head_dim=32 max_target_length={TOKENS} per_device_batch_size={BATCH} attention=dot_product
        scan_layers={str(scan).lower()}""".split()
    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    config = pyconfig.initialize(["", str(base), *settings])
    model = model_creation_utils.from_config(config, rngs=nnx.Rngs(0))
    jax.set_mesh(model.mesh)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    names = [f"{of}{what}" for of in ("inputs", "targets") for what in ("", "_position", "_segmentation")]
    block = ("decoder/layers",) if scan else ("decoder/layers_{}", layers)
    loss = transformed(train.loss_fn, recipe and rules_of(recipe, *block))

    def total(params: Any, batch: Any) -> jax.Array:
        with spmd.logical_axis_rules(config.logical_axis_rules):
            return loss(nnx.merge(graph, params, rest, copy=True), config, batch, None, None)[0]

    return total, params, dict.fromkeys(names, tokens())


def levanter(layers: int, recipe: Any) -> Side:
    """Llama under its own loss, in bfloat16 as the trainer casts it."""
    import equinox as eqx
    import haliax as hax
    import jmp
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample

    heads = {"num_heads": 4, "num_kv_heads": 2}
    config = LlamaConfig(max_seq_len=TOKENS, hidden_dim=WIDTH, intermediate_dim=2 * WIDTH, num_layers=layers, **heads)
    model = config.build(hax.Axis("vocab", WORDS), key=jax.random.PRNGKey(0))
    one, axis = LmExample.causal(hax.named(tokens()[0], config.max_Pos)), hax.Axis("batch", BATCH)
    weights = one.loss_weight.broadcast_axis(axis)
    batch = dataclasses.replace(one, tokens=one.tokens.broadcast_axis(axis), loss_weight=weights)
    params, static = eqx.partition(model, eqx.is_array)
    policy = jmp.get_policy("p=f32,c=bfloat16")

    def loss(params: Any, batch: Any) -> jax.Array:
        model = policy.cast_to_compute(eqx.combine(params, static))
        return model.compute_next_token_loss(batch, key=None).scalar().astype(jnp.float32)

    return transformed(loss, recipe and rules_of(recipe, "transformer/layers/stacked")), params, batch


def gemma(layers: int, recipe: Any) -> Side:
    """Gemma 3 under the loss of kauldron's example."""
    import optax
    from gemma import gm

    config = gm.nn.Gemma3_270M.config
    sizes = {"num_embed": WORDS, "embed_dim": WIDTH, "hidden_dim": 2 * WIDTH, "num_heads": 4, "num_kv_heads": 2}
    kinds = (config.attention_types * layers)[:layers]
    config = dataclasses.replace(config, **sizes, head_dim=32, attention_types=kinds)
    model = gm.nn.Gemma3_270M(config=config)
    params = model.init(jax.random.key(0), tokens())["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch).mean()

    return transformed(loss, recipe and rules_of(recipe, "layer_{}", layers)), params, tokens()


def keras(layers: int, recipe: Any) -> Side:
    """Attention and MLPs under Keras' own loss."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    class Block(keras.layers.Layer):
        def __init__(self, **options: Any):
            super().__init__(**options)
            self.attention = keras.layers.MultiHeadAttention(4, WIDTH // 4, name="attention")
            self.norm = keras.layers.LayerNormalization(name="norm")
            self.up = keras.layers.Dense(2 * WIDTH, activation="gelu", name="up")
            self.down = keras.layers.Dense(WIDTH, name="down")

        def call(self, x: Any) -> Any:
            x = x + self.attention(x, x, use_causal_mask=True)
            return x + self.down(self.up(self.norm(x)))

    keras.config.set_dtype_policy("mixed_bfloat16")
    parts = [keras.Input((TOKENS,), dtype="int32"), keras.layers.Embedding(WORDS, WIDTH, name="embed")]
    parts += [Block(name=f"block_{i}") for i in range(layers)]
    model = keras.Sequential([*parts, keras.layers.Dense(WORDS, name="head")])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    groups = model.trainable_variables, model.non_trainable_variables, model.metrics_variables
    rules, names = recipe and rules_of(recipe, "block_{}", layers), [v.path for group in groups[:2] for v in group]
    of_keras = transformed(model.compute_loss_and_updates, rules, params=(0, 1), names=names)
    params, *rest = ([v.value for v in group] for group in groups)
    return lambda params, batch: of_keras(params, *rest, batch, batch, None)[0], params, tokens()


def penzai(layers: int, recipe: Any) -> Side:
    """A model like Llama."""
    import optax
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    sizes = {"embedding_dim": WIDTH, "projection_dim": 32, "mlp_hidden_dim": 2 * WIDTH, "vocab_size": WORDS}
    heads = {"num_kv_heads": 2, "query_head_multiplier": 2}
    config = llamalike_common.LlamalikeTransformerConfig(
        **sizes, **heads, num_decoder_blocks=layers, mlp_variant="swiglu", tie_embedder_and_logits=False
    )
    frozen = pz.freeze_params(llamalike_common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0)))
    leaves = jax.tree.leaves(frozen, is_leaf=lambda leaf: isinstance(leaf, pz.ParameterValue))
    names = [getattr(leaf, "label", "a constant").rpartition(".")[0] or "a constant" for leaf in leaves]

    def loss(model: Any, batch: Any) -> jax.Array:
        logits = model(pz.nx.wrap(batch).tag("batch", "seq")).unwrap("batch", "seq", "vocabulary")
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch).mean()

    return transformed(loss, recipe and rules_of(recipe, "block_{}", layers), names=names), frozen, tokens()


MODELS: dict[str, tuple[str, Callable[[int, Any], Side]]] = {  # the package that each needs
    "tunix": ("tunix", tunix),
    "MaxText, scanned": ("maxtext", functools.partial(maxtext, scan=True)),
    "MaxText, unrolled": ("maxtext", functools.partial(maxtext, scan=False)),
    "Levanter": ("levanter", levanter),
    "gemma": ("gemma", gemma),
    "Keras": ("keras", keras),
    "Penzai": ("penzai", penzai),
}
