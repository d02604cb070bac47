"""Counts, sizes and numbers that a file states are compared with what is there, whichever side states them."""

import json
import math
import time

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import CheckpointError, ConvertOptions, inspect
from jaxlowprec.checkpoints.gguf import TYPES, GGUFFile, TensorSpec, export_gguf, import_gguf, inspect_gguf
from tests.checkpoints.gguf.models import config, folder, tensors
from tests.checkpoints.gguf.test_foreign_files import rewritten

VALUES = {
    "text": "x",
    "a list": np.asarray([1, 2], np.int32),
    "texts": ["a", "b"],
    "true": True,
    "nan": np.float32("nan"),
    "infinity": np.float64("inf"),
    "a fraction": np.float32(2.9),
    "none": np.uint32(0),
    "below 0": np.int32(-1),
    "2**31 - 1": np.uint32(2**31 - 1),
    "2**64 - 1": np.uint64(2**64 - 1),
    "another": np.uint32(65),
}
CONFIG_VALUES = ("x", [1, 2], [], {}, True, -1, 0, 2.9, 65, 2**31 - 1, 2**63, 10**400, 1e39, [[]], {"a": []})
SECONDS = 5  # a count that is believed takes hours


def accepted(work):
    """Whether work is done; not, if it is refused in a sentence, and quickly."""
    began = time.process_time()
    try:
        work()
        return True
    except CheckpointError as error:
        assert len(str(error)) < 1500
        return False
    finally:
        assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_metadata_of_any_value_gives_a_folder_or_an_error(tmp_path, family):
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}}
    export_gguf(folder(tmp_path / "hf", family, **(scaled if family != "mixtral" else {})), tmp_path / "a.gguf")
    with GGUFFile(tmp_path / "a.gguf") as file:
        keys = [key for key in file.metadata if not key.startswith("tokenizer.")]
    for key in [*keys, "split.count", "general.alignment"]:
        for n, value in enumerate(VALUES.values()):
            if key == "general.alignment" and not isinstance(value, str):
                continue  # the writer would lay the file out by it
            back = tmp_path / f"{key}{n}"
            copy = rewritten(tmp_path / "a.gguf", metadata={key: value})
            if accepted(lambda copy=copy, back=back: import_gguf(copy, back)):
                content = json.loads((back / "config.json").read_text(), parse_constant=pytest.fail)
                numbers = [number for number in content.values() if isinstance(number, float)]
                assert all(map(math.isfinite, numbers)) and inspect(back).modules
            accepted(lambda copy=copy: inspect_gguf(copy))


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_a_config_of_any_value_gives_a_file_or_an_error(tmp_path, family):
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
    source = folder(tmp_path / "hf", family, rope_scaling=scaling)
    said = json.loads((source / "config.json").read_text())
    for key in said:
        for value in CONFIG_VALUES:
            (source / "config.json").write_text(json.dumps({**said, key: value}))
            accepted(lambda: export_gguf(source, tmp_path / "a.gguf", options=ConvertOptions(dry_run=True)))
    for key in scaling:
        for value in CONFIG_VALUES:
            (source / "config.json").write_text(json.dumps({**said, "rope_scaling": {**scaling, key: value}}))
            accepted(lambda: export_gguf(source, tmp_path / "a.gguf", options=ConvertOptions(dry_run=True)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"llama.block_count": np.uint32(2**31 - 1)}, "says 2147483647 layers; the file has tensors of 2"),
        ({"llama.block_count": np.uint32(3)}, "says 3 layers; the file has tensors of 2"),
        (
            {"llama.expert_count": np.uint32(2**31 - 1), "llama.expert_used_count": np.uint32(2)},
            "hold 0 matrices of exp",
        ),
        (
            {"llama.embedding_length": np.uint32(65)},
            r"token_embd.weight is \[300, 64\]; the model's sizes say \[tokens, 65",
        ),
        ({"llama.attention.key_length": np.uint32(33)}, "has heads of 33; rotations need an even number"),
    ],
)
def test_a_count_of_the_metadata_that_the_file_does_not_hold(tmp_path, changed, message):
    export_gguf(folder(tmp_path / "hf"), tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=message):
        import_gguf(rewritten(tmp_path / "a.gguf", metadata=changed), tmp_path / "back")


def test_a_count_of_the_config_that_the_folder_does_not_hold(tmp_path):
    for family, key in (("llama", "num_hidden_layers"), ("qwen3_moe", "num_experts")):
        source = folder(tmp_path / family, family, **{key: 2**31 - 1})
        with pytest.raises(CheckpointError, match=r"says 2\d* layers.*; the folder has \d+ tensors"):
            export_gguf(source, tmp_path / "a.gguf")


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("shape", [(), (64,), (2, 64, 64), (2, 2, 64, 64), (0, 64), (64, 0), (96, 64)])
def test_a_tensor_of_another_shape_is_named(tmp_path, kind, shape):
    export_gguf(folder(tmp_path / "hf"), tmp_path / "a.gguf")
    for name in ("attn_v", "attn_q", "ffn_down", "attn_norm"):
        if kind != "F32" and shape in ((), (64, 0)):
            continue  # blocks have 32 elements
        if name == "attn_norm" and (kind != "F32" or shape == (64,)):
            continue  # norms are F32, and have this shape
        spec = {f"blk.0.{name}.weight": TensorSpec(TYPES[kind], shape)}
        with pytest.raises(CheckpointError, match=rf"blk.0.{name}.weight is \[.*the model's sizes say"):
            import_gguf(rewritten(tmp_path / "a.gguf", more=spec), tmp_path / "back")


@pytest.mark.parametrize("shape", [(), (64,), (2, 64, 64), (0, 64), (65, 64)])
def test_a_tensor_of_a_folder_of_another_shape_is_named(tmp_path, shape):
    for n, name in enumerate(("model.embed_tokens", "model.layers.0.self_attn.v_proj", "model.norm", "lm_head")):
        if (shape == (65, 64) and name in ("model.embed_tokens", "lm_head")) or (shape, name) == ((64,), "model.norm"):
            continue  # any number of tokens
        held = tensors() | {f"{name}.weight": np.ones(shape, ml_dtypes.bfloat16)}
        with pytest.raises(CheckpointError, match=rf"{name}.weight is \[.*the model's sizes say"):
            export_gguf(folder(tmp_path / str(n), held=held), tmp_path / "a.gguf")


def tokenizer(**changed):
    """A tokenizer of two tokens, made from SentencePiece, with changes."""
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\N{LOWER ONE EIGHTH BLOCK}"}
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [], "byte_fallback": True}
    plain = {"model": model, "pre_tokenizer": None, "normalizer": spaces, "added_tokens": []}
    if isinstance(changed.get("model"), dict):
        changed["model"] = {**model, **changed["model"]}
    return plain | changed


ODD = (None, 5, "x", [], ["x"], [5], {}, {"type": "x"}, {"type": "TemplateProcessing", "single": []}, [["a", "b", "c"]])


def test_a_tokenizer_of_any_value_is_written_or_warned_of(tmp_path):
    source = folder(tmp_path / "hf", tokenizer=tokenizer())
    assert not export_gguf(source, tmp_path / "a.gguf", options=ConvertOptions(dry_run=True)).warnings
    changes = [{key: value} for key in (*tokenizer(), "post_processor") for value in ODD]
    changes += [{"model": {key: value}} for key in ("vocab", "merges", "unk_token", "type") for value in ODD]
    changes += [{"added_tokens": [{"id": 3, "content": 5, "special": True}]}, {"added_tokens": [{"id": "3"}]}]
    changes += [{"model": {"vocab": {"a" * 300_000: 0}}}, {"model": {"vocab": {"a" * n: n for n in range(280)}}}]
    for change in changes:
        (source / "tokenizer.json").write_text(json.dumps(tokenizer(**change)))
        assert accepted(lambda: export_gguf(source, tmp_path / "a.gguf", options=ConvertOptions(dry_run=True)))


def test_a_name_that_is_not_utf8_is_written_with_escapes(tmp_path):
    source = folder(tmp_path / "n\udcff")
    export_gguf(source, tmp_path / "a\udcff.gguf")
    with GGUFFile(tmp_path / "a\udcff.gguf") as file:
        assert file.metadata["general.name"] == r"n\xff"
    import_gguf(tmp_path / "a\udcff.gguf", tmp_path / "back\udcfe")
    assert config()["hidden_size"] == json.loads((tmp_path / "back\udcfe" / "config.json").read_text())["hidden_size"]
