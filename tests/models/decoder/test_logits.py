"""The decoder beside transformers: the same logits for each family, and for each weight-only scheme."""

import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec import checkpoints
from jaxlowprec.checkpoints import decoders
from jaxlowprec.models.decoder.model import Decoder
from tests.helpers import often
from tests.models.decoder import tiny

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 24), np.int32)
SCHEMES = ("w4a16", "w4a16_asym", "nvfp4", "mxfp4", "mxfp8", "fp8_block")
SAME = ("llama2", "mistral", "qwen2-window", "qwen3_moe-dense", "glm", "phi3")  # the matrices of another one
OFTEN = (*tiny.LLAMAS, "gemma3", "gpt_oss", "deepseek_v3")


@pytest.fixture(scope="module")
def theirs():
    """Logits of transformers' model in a folder."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def logits(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            return model(torch.from_numpy(TOKENS).long()).logits.numpy()

    return logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory, theirs):
    """The folder that transformers' `save_pretrained` makes of a random model of a family."""
    import torch
    import transformers

    def make(family):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**tiny.config(family))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # norms that are not 1, biases that are not 0
                parameter.add_(torch.randn_like(parameter) * 0.05)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.2)
        folder = tmp_path_factory.mktemp(family) / "saved"
        model.save_pretrained(folder)
        return folder

    return make


def ours(folder):
    decoder = decoders.load(pathlib.Path(folder))
    return decoder, np.asarray(nnx.jit(lambda decoder, tokens: decoder(tokens))(decoder, TOKENS))


def matrices(config):
    """The paths of kernels that a conversion quantises."""
    made = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    left = ("router", "lm_head", *(["experts"] if config.family == "gpt_oss" else []))
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(made, nnx.Param))]
    return [path for path in paths if path[-1] == "kernel" and not set(path) & set(left)]


@pytest.mark.slow
def test_gpt_oss_in_the_format_that_it_is_published_in(saved, theirs, tmp_path):
    """Experts in MXFP4, in arrays of all experts with the rows of gate and up in turn."""
    scheme = checkpoints.schemes.by_name("gpt_oss_mxfp4")
    checkpoints.convert(saved("gpt_oss"), tmp_path / "codes", scheme)
    checkpoints.dequantize(tmp_path / "codes", tmp_path / "decoded", dtype="float32")
    decoder, logits = ours(tmp_path / "codes")
    np.testing.assert_allclose(logits, theirs(tmp_path / "decoded"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", often(OFTEN, tiny.FAMILIES))
def test_logits_are_those_of_transformers(family, saved, theirs):
    folder = saved(family)
    expected = theirs(folder)
    assert expected.std() > 0.1
    np.testing.assert_allclose(ours(folder)[1], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", often(("llama3", "qwen3_moe"), [f for f in tiny.FAMILIES if f not in SAME]))
def test_quantised_logits_are_those_of_decoded_weights(family, scheme, saved, theirs, tmp_path):
    """transformers' model holds the decoded weights in float32; ours multiplies by codes."""
    group = {"group_size": 32} if scheme.startswith("w4a16") else {}
    checkpoints.convert(saved(family), tmp_path / "codes", checkpoints.schemes.by_name(scheme, **group))
    checkpoints.dequantize(tmp_path / "codes", tmp_path / "decoded", dtype="float32")
    expected = theirs(tmp_path / "decoded")
    decoder, logits = ours(tmp_path / "codes")
    leaves = jax.tree.leaves(nnx.state(decoder), is_leaf=lambda leaf: isinstance(leaf, jlp.QuantizedArray))
    assert sum(isinstance(leaf, jlp.QuantizedArray) for leaf in leaves) == len(matrices(decoder.config))
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
