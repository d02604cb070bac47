"""llama.cpp loads what is exported, computes what transformers computes, and splits texts into the same tokens.

With F32 weights, both compute in float32, and differ by the order of additions. With others llama.cpp rounds
activations to the weights' F16 or BF16, or to 8 bits in blocks of 32 (Q8_0) for Q4_0 and MXFP4; the weights themselves
are equal.
"""

import copy

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.gguf import export_gguf, import_gguf
from tests.checkpoints.gguf.llama_cpp import ask
from tests.checkpoints.gguf.models import (
    CLASSES,
    EXPERTS,
    LLAMA3,
    VOCABULARY,
    byte_level,
    folder,
    from_sentencepiece,
    tensors,
)

pytestmark = pytest.mark.slow
pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install jaxlowprec[llama_cpp]")
torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PROMPTS = [[3, 17, 200, 5, 9], np.random.default_rng(0).integers(0, 256, 60).tolist()]
BOUNDS = {"F32": 2e-5, "F16": 1e-2, "BF16": 6e-2, "Q4_0": 1e-1, "MXFP4": 1e-1}
"""The largest difference of a log-probability. Those of the tiny models have a standard deviation of about 0.8."""

ROPES = {
    "llama3": ("llama", LLAMA3),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "yarn": ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
}
SCHEMES = {
    "Q4_0": schemes.by_name("w4a16", group_size=32, scale_dtype="float16"),
    "MXFP4": schemes.by_name("mxfp4"),
}


def expected(path):
    """transformers' log-probabilities after each prompt, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1].double() for prompt in PROMPTS]
    return torch.log_softmax(torch.stack(logits), -1).numpy()


def difference(gguf_file, path):
    """The largest difference between llama.cpp's and transformers' log-probabilities."""
    found, _ = ask(gguf_file, PROMPTS)
    assert np.shape(found) == (len(PROMPTS), VOCABULARY)
    return np.abs(np.asarray(found) - expected(path)).max()


@pytest.mark.parametrize("family", [family for family in CLASSES if family != "mistral"])
def test_float32_models_agree(tmp_path, family):
    source = folder(tmp_path / "hf", family, held=tensors(family, np.float32), tokenizer=byte_level())
    assert not export_gguf(source, tmp_path / "a.gguf").warnings
    assert difference(tmp_path / "a.gguf", source) <= BOUNDS["F32"]


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rotations_agree(tmp_path, kind):
    family, rope = ROPES[kind]
    held = tensors(family, np.float32)
    source = folder(tmp_path / "hf", family, held=held, tokenizer=byte_level(), rope_scaling=rope, rope_theta=500000.0)
    export_gguf(source, tmp_path / "a.gguf")
    assert difference(tmp_path / "a.gguf", source) <= BOUNDS["F32"]
    plain = folder(tmp_path / "plain", family, held=held, tokenizer=byte_level(), rope_theta=500000.0)
    assert difference(tmp_path / "a.gguf", plain) > 10 * BOUNDS["F32"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["F16", "BF16"])
def test_models_of_16_bits_agree(tmp_path, dtype):
    source = folder(tmp_path / "hf", held=tensors(dtype=dtype), tokenizer=byte_level())
    export_gguf(source, tmp_path / "a.gguf")
    assert difference(tmp_path / "a.gguf", source) <= BOUNDS["F16" if dtype is np.float16 else "BF16"]


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_quantised_models_agree(tmp_path, family, kind):
    held = tensors(family, np.float32)
    more = {"num_experts_per_tok": EXPERTS} if family == "qwen3_moe" else {}  # rounding chooses no other experts then
    source = folder(tmp_path / "hf", family, held=held, tokenizer=byte_level(), **more)
    export_gguf(source, tmp_path / "a.gguf", SCHEMES[kind])
    import_gguf(tmp_path / "a.gguf", tmp_path / "decoded", dtype="float32", keep=False)
    assert difference(tmp_path / "a.gguf", tmp_path / "decoded") <= BOUNDS[kind]
    assert difference(tmp_path / "a.gguf", source) > BOUNDS[kind]  # so much do other weights change


TEXTS = [
    "hello world",
    " hello  wo\n\n12 1234 12345",
    "héllo, wörld! 🙂",
    "a\tb\r\nc   ",
    "we'll SHE'LL 'tis",
    "x1y22z333",
    "",
]


def qwen2():
    content = byte_level(ignore_merges=False)
    split = content["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"]["Regex"] = split["pattern"]["Regex"].replace("{1,3}", "")
    return content


def gpt2():
    content = byte_level(ignore_merges=False)
    content["pre_tokenizer"] = content["pre_tokenizer"]["pretokenizers"][1] | {"use_regex": True}
    return content


@pytest.mark.parametrize("make", [byte_level, qwen2, gpt2, from_sentencepiece], ids=lambda make: make.__name__)
def test_texts_are_split_into_the_same_tokens(tmp_path, make):
    content = make()
    source = folder(tmp_path / "hf", held=tensors(dtype=np.float16), tokenizer=copy.deepcopy(content))
    assert not export_gguf(source, tmp_path / "a.gguf").warnings
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
    _, found = ask(tmp_path / "a.gguf", texts=TEXTS)
    assert found == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert len(set(sum(found, []))) > 20
