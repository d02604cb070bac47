"""The page about tunix, run with tunix; and which layers of its models are reached."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.docs.pages import differs, pieces, printed_by

pytest.importorskip("tunix")

PAGE = "docs/how-to/tunix.md"
SMALL = {"num_layers": 1, "embed_dim": 128, "hidden_dim": 256, "num_heads": 4, "head_dim": 32, "num_kv_heads": 2}
ROWS = {"rope_theta": 1_000_000, "norm_eps": 1e-5, "vocab_size": 256}
MLP = {f"layers/0/mlp/{name}_proj" for name in ("gate", "up", "down")}
QKV = {f"layers/0/attn/{name}_proj" for name in "qkvo"}
GEMMA = {f"layers/0/attn/{name}" for name in ("q_einsum", "kv_einsum", "attn_vec_einsum")}


def qwen3():
    from tunix.models.qwen3 import model

    return model.Qwen3(model.ModelConfig(**SMALL, **ROWS, use_tied_embedding=True), rngs=nnx.Rngs(0)), QKV


def qwen3_remat():
    from tunix.models.qwen3 import model

    config = model.ModelConfig(**SMALL, **ROWS, use_tied_embedding=True, remat_config=model.RematConfig.DECODER)
    return model.Qwen3(config, rngs=nnx.Rngs(0)), QKV


def llama3():
    from tunix.models.llama3 import model

    return model.Llama3(model.ModelConfig(**SMALL, **ROWS), rngs=nnx.Rngs(0)), QKV


def gemma2():
    from tunix.models.gemma import model

    config = dataclasses.replace(model.ModelConfig.gemma2_2b(), **SMALL, num_embed=256)
    return model.Gemma(config, rngs=nnx.Rngs(0)), GEMMA


def gemma3():
    from tunix.models.gemma3 import model

    config = dataclasses.replace(model.ModelConfig.gemma3_1b_pt(), **SMALL, num_embed=256)
    return model.Gemma3(config, rngs=nnx.Rngs(0)), GEMMA


def inputs():
    from tunix.sft import utils

    mask = jnp.ones((2, 8), bool)
    tokens = jnp.ones((2, 8), jnp.int32)
    places, attention = utils.build_positions_from_mask(mask), utils.make_causal_attn_mask(mask)
    return {"input_tokens": tokens, "input_mask": mask, "positions": places, "attention_mask": attention}


def reached(explanation):
    return {path for path, format in explanation.formats.items() if format is not None}


def test_the_pieces_of_the_page_are_one_program():
    names = {"__name__": "example"}
    for piece in pieces(PAGE)[1:]:  # the first is the line to add
        printed = printed_by(piece, PAGE, names)
        assert not differs(printed, piece.shown), f"{PAGE}:{piece.line}: prints\n{printed}"


@pytest.mark.parametrize("make", [qwen3, qwen3_remat, llama3, gemma2, gemma3])
def test_the_loss_reaches_the_layers_that_the_page_names(make):
    from tunix.sft import peft_trainer

    (model, attention), rules = make(), jlp.PerLayer(((".*(embedding|lm_head)", None),), jlp.NVFP4BlockScaling())
    loss = jlp.quantize_matmuls(peft_trainer._default_loss_fn, rules)
    assert reached(jlp.explain(loss, jlp.FROM_CONTEXT, model, **inputs())) == MLP | attention


def test_convert_reaches_the_mlp_alone_and_says_so():
    model, attention = qwen3()
    with pytest.warns(UserWarning, match="3 of 7 matrices are quantised"):
        converted = jlp.nnx.convert(model, jlp.NVFP4BlockScaling())
    assert reached(jlp.explain(converted)) == MLP


def test_a_written_folder_has_the_models_logits(tmp_path):
    from jaxlowprec.checkpoints import decoders, mapping_for, save

    model, _ = qwen3()
    kernels = (v for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param)) if path[-1] == "kernel")
    for i, kernel in enumerate(kernels):  # tunix makes them zero
        kernel[...] = jnp.sin(jnp.arange(kernel.size) * 0.7 + i).reshape(kernel.shape) / 16
    content = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": SMALL["embed_dim"]}
    content |= {"intermediate_size": SMALL["hidden_dim"], "num_hidden_layers": 1, "num_attention_heads": 4}
    content |= {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True, "hidden_act": "silu"}
    content |= {"vocab_size": 256, "rms_norm_eps": ROWS["norm_eps"], "rope_theta": float(ROWS["rope_theta"])}
    tree = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    save(tmp_path / "saved", tree, mapping_for(content, "tunix"), content)
    batch = inputs() | {"input_tokens": jnp.arange(16).reshape(2, 8)}
    theirs, _ = model(batch["input_tokens"], batch["positions"], None, batch["attention_mask"])
    ours = decoders.load(tmp_path / "saved")(batch["input_tokens"])
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
