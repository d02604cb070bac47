"""GGUF files of others: what is decoded, what is kept, and what is refused with the tensor's name."""

import numpy as np
import pytest

from jaxlowprec.checkpoints import CheckpointError, schemes
from jaxlowprec.checkpoints.gguf import TYPES, GGUFFile, GGUFWriter, TensorSpec, export_gguf, import_gguf
from tests.checkpoints.gguf.models import folder
from tests.checkpoints.small_models import read_config, read_tensors

SCALES = {"Q8_0": slice(0, 2), "Q4_0": slice(0, 2), "Q6_K": slice(208, 210)}


@pytest.fixture
def original(tmp_path):
    """A file of Q4_0 as `export_gguf` writes it."""
    export_gguf(
        folder(tmp_path / "hf"), tmp_path / "a.gguf", schemes.by_name("w4a16", group_size=32, scale_dtype="float16")
    )
    return tmp_path / "a.gguf"


def any_blocks(spec, seed=0):
    """Random codes with scales that are numbers."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (spec.nbytes // spec.type.block_bytes, spec.type.block_bytes), np.uint8)
    if spec.type.name in SCALES:
        scale = (random.standard_normal((len(blocks), 1)) * 0.01).astype("<f2")
        blocks[:, SCALES[spec.type.name]] = scale.view(np.uint8)
    return blocks


def rewritten(path, kinds=None, metadata=None, without=(), more=None):
    """A copy with tensors of other types, other metadata, tensors left out, and more tensors."""
    copy = path.with_name("b.gguf")
    with GGUFFile(path) as file:
        specs = {name: spec for name, spec in file.specs.items() if name not in without} | (more or {})
        specs |= {name: TensorSpec(TYPES[kind], specs[name].shape) for name, kind in (kinds or {}).items()}
        changed = {k: v for k, v in ({**file.metadata} | (metadata or {})).items() if v is not None}
        with GGUFWriter(copy, specs, changed) as writer:
            for name, spec in specs.items():
                writer.write(name, file.blocks(name) if spec == file.specs.get(name) else any_blocks(spec))
    return copy


def test_an_embedding_and_a_head_in_other_types_are_decoded(original, tmp_path):
    copy = rewritten(original, {"token_embd.weight": "Q8_0", "output.weight": "Q8_0"})
    report = import_gguf(copy, tmp_path / "back")
    assert len(report.changed) == 14
    assert {(e.module, e.reason) for e in report.left} == {
        ("model.embed_tokens", "Q8_0 as float16"),
        ("lm_head", "Q8_0 as float16"),
    }
    with GGUFFile(copy) as file:
        numbers = file.read("output.weight").astype(np.float16)
    found = read_tensors(tmp_path / "back")
    np.testing.assert_array_equal(found["lm_head.weight"], numbers)
    assert set(read_config(tmp_path / "back")["quantization_config"]["ignore"]) == {"lm_head", "model.embed_tokens"}


def test_a_file_of_types_without_a_scheme_becomes_plain(original, tmp_path):
    blocks = [name for name in GGUFFile(original).specs if name.startswith("blk.") and "norm" not in name]
    report = import_gguf(rewritten(original, dict.fromkeys(blocks, "Q8_0")), tmp_path / "back", dtype="float16")
    assert not report.changed and report.scheme == "GGUF to plain weights" and len(report.left) == 16
    assert "quantization_config" not in read_config(tmp_path / "back")


REFUSED = {
    "parts of one matrix": ({"kinds": {"blk.0.attn_v.weight": "Q8_0"}}, "self_attn.v_proj.* are in different types"),
    "two formats": ({"kinds": {"blk.0.ffn_up.weight": "MXFP4"}}, "has weights in MXFP4 and Q4_0"),
    "no numbers": (
        {"kinds": {"output.weight": "F32"}, "more": {"x.weight": TensorSpec(TYPES["F32"], (2,))}},
        "'x.weight'",
    ),
    "a missing tensor": (
        {"without": ("blk.1.attn_q.weight",)},
        "has no tensor 'blk.1.attn_q.weight', which model.layers.1",
    ),
    "no embedding": ({"without": ("token_embd.weight",)}, "has no token_embd.weight"),
    "another family": (
        {"metadata": {"general.architecture": "rwkv7"}},
        "general.architecture is 'rwkv7'; to a folder go llama",
    ),
    "no family": ({"metadata": {"general.architecture": None}}, "general.architecture is None"),
    "a missing size": (
        {"metadata": {"llama.embedding_length": None}},
        "llama.embedding_length is None; needs one number",
    ),
    "sizes by layer": (
        {"metadata": {"llama.attention.head_count": np.asarray([4, 4], np.uint32)}},
        "needs one number for all layers",
    ),
    "other heads": (
        {"metadata": {"llama.attention.head_count": np.uint32(8)}},
        "attn_q.weight is .*says 8 heads of 32",
    ),
    "another scaling": ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "rope.scaling.type is 'longrope'"),
    "other divisors": (
        {"more": {"rope_freqs.weight": TensorSpec(TYPES["I8"], (16,))}},
        "other divisors than those of Llama 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_folder_says_is_refused(original, tmp_path, case):
    changes, reason = REFUSED[case]
    with pytest.raises(CheckpointError, match=reason):
        import_gguf(rewritten(original, **changes), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_scale_that_is_no_number_names_the_tensor(original, tmp_path):
    with GGUFFile(original) as file:
        offset = file.header.tensors["blk.1.ffn_down.weight"].offset
    with original.open("r+b") as opened:
        opened.seek(offset)
        opened.write(np.float16(np.nan).tobytes())
    with pytest.raises(CheckpointError, match="'blk.1.ffn_down.weight'.*a scale is NaN or infinity"):
        import_gguf(original, tmp_path / "back")
    with pytest.raises(CheckpointError, match="blk.1.ffn_down.weight holds NaN"):
        import_gguf(original, tmp_path / "plain", keep=False)


def test_a_norm_in_the_type_of_the_weights_is_decoded(original, tmp_path):
    copy = rewritten(original, {"blk.0.attn_norm.weight": "Q4_0", "output_norm.weight": "Q4_0"})
    import_gguf(copy, tmp_path / "back")
    found = read_tensors(tmp_path / "back")
    with GGUFFile(copy) as file:
        for name, place in (("model.layers.0.input_layernorm", "blk.0.attn_norm"), ("model.norm", "output_norm")):
            numbers = file.read(f"{place}.weight")
            np.testing.assert_array_equal(found[f"{name}.weight"], numbers.astype(found[f"{name}.weight"].dtype))
