"""Folders that KerasHub itself exports: our decoder computes from them what its models compute."""

import importlib.util
import os

import numpy as np
import pytest

from jaxlowprec.checkpoints import decoders

if importlib.util.find_spec("keras_hub") is None:
    pytest.skip("keras_hub is missing", allow_module_level=True)
os.environ.setdefault("KERAS_BACKEND", "jax")

SIZES = {"vocabulary_size": 256, "num_layers": 2, "hidden_dim": 64, "intermediate_dim": 128}
HEADS = {"num_query_heads": 4, "num_key_value_heads": 2}
GEMMA3 = dict.fromkeys(("use_query_key_norm", "use_post_ffw_norm", "use_post_attention_norm"), True) | {
    "head_dim": 16,
    "image_size": 16,
    "vision_encoder": None,
    "query_head_dim_normalize": True,
    "use_sliding_window_attention": True,
    "sliding_window_size": 8,
}
FAMILIES = {"Llama3": {}, "Mistral": {"sliding_window": 8}, "Qwen": {}, "Gemma3": GEMMA3}
TOKENS = np.arange(1, 33)[None] * 7 % 256


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_our_decoder_has_the_logits_of_a_family(family, tmp_path):
    import keras
    from keras_hub import models

    keras.utils.set_random_seed(0)
    backbone = getattr(models, f"{family}Backbone")(**SIZES, **HEADS, **FAMILIES[family])
    model = getattr(models, f"{family}CausalLM")(backbone=backbone, preprocessor=None)
    for v in model.trainable_variables:  # norms and biases, too
        v.assign_add(0.05 * keras.random.normal(v.shape))
    model.export_to_transformers(tmp_path)
    theirs = model({"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS, bool)})
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(decoders.load(tmp_path)(TOKENS), theirs, rtol=0, atol=1e-5)
