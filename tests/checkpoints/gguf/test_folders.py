"""Folders become GGUF files and come back: names, rows, dtypes, codes, scales and sizes."""

import json
import re

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import CheckpointError, ConvertOptions, convert, schemes
from jaxlowprec.checkpoints.gguf import GGUFFile, export_gguf, import_gguf
from jaxlowprec.checkpoints.gguf.names import ARCHITECTURES, places, to_halves, to_neighbours
from tests.checkpoints.gguf.models import CLASSES, EXPERTS, HEAD, HEADS, HIDDEN, INNER, LAYERS, LLAMA3, folder, tensors
from tests.checkpoints.small_models import contents, read_config, read_tensors, same

W4A16 = schemes.by_name("w4a16", group_size=32, scale_dtype="float16")
MXFP4 = schemes.by_name("mxfp4")


def assert_same_tensors(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert same(found[name], tensor), name


@pytest.mark.parametrize("family", CLASSES)
def test_a_plain_folder_comes_back_byte_for_byte(tmp_path, family):
    source = folder(tmp_path / "hf", family)
    report = export_gguf(source, tmp_path / "a.gguf", options=ConvertOptions(verify=True))
    assert report.scheme == "GGUF" and not report.changed and report.verified
    back = import_gguf(tmp_path / "a.gguf", tmp_path / "back", options=ConvertOptions(verify=True))
    assert back.verified == len(read_tensors(source))
    assert_same_tensors(read_tensors(tmp_path / "back"), read_tensors(source))
    before, after = read_config(source), read_config(tmp_path / "back")
    if family == "mistral":  # one architecture in llama.cpp
        before |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert {key: after.get(key) for key in before if key in after} == {k: v for k, v in before.items() if k in after}
    assert set(before) - set(after) <= {"mlp_only_layers", "decoder_sparse_step"}


@pytest.mark.parametrize("scheme", [W4A16, MXFP4], ids=lambda s: s.name)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_codes_and_scales_come_back_byte_for_byte(tmp_path, family, scheme):
    convert(folder(tmp_path / "hf", family), tmp_path / "low", scheme)
    report = export_gguf(tmp_path / "low", tmp_path / "a.gguf", options=ConvertOptions(verify=True))
    assert report.scheme == f"GGUF {'Q4_0' if scheme == W4A16 else 'MXFP4'}"
    import_gguf(tmp_path / "a.gguf", tmp_path / "back", options=ConvertOptions(verify=True))
    assert_same_tensors(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "low"))
    assert schemes.from_config(read_config(tmp_path / "back")).name == scheme.name


@pytest.mark.parametrize("scheme", [W4A16, MXFP4], ids=lambda s: s.name)
def test_quantising_on_the_way_writes_the_same_file(tmp_path, scheme):
    source = folder(tmp_path / "model")
    convert(source, tmp_path / "low" / "model", scheme)
    export_gguf(tmp_path / "low" / "model", tmp_path / "a.gguf")
    report = export_gguf(source, tmp_path / "b.gguf", scheme, options=ConvertOptions(verify=True))
    assert len(report.changed) == 14 and {entry.module for entry in report.left} == {"lm_head", "model.embed_tokens"}
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_decoding_gives_the_numbers_of_the_file(tmp_path):
    export_gguf(folder(tmp_path / "hf"), tmp_path / "a.gguf", W4A16)
    import_gguf(tmp_path / "a.gguf", tmp_path / "plain", dtype="float32", keep=False)
    found = read_tensors(tmp_path / "plain")
    assert {tensor.dtype for tensor in found.values()} == {np.dtype(np.float32)}
    assert "quantization_config" not in read_config(tmp_path / "plain")
    with GGUFFile(tmp_path / "a.gguf") as file:
        down = file.read("blk.1.ffn_down.weight")
        q = file.read("blk.1.attn_q.weight")
    np.testing.assert_array_equal(found["model.layers.1.mlp.down_proj.weight"], down)
    np.testing.assert_array_equal(found["model.layers.1.self_attn.q_proj.weight"], q[to_halves(HEADS * HEAD, HEADS)])


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.model_type)
def test_names_are_those_of_the_package_gguf(architecture):
    oracle = pytest.importorskip("gguf", reason="gguf is not installed: pip install jaxlowprec[gguf]")
    kind = next(kind for kind, name in oracle.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = oracle.get_tensor_name_map(kind, LAYERS)
    for module, place in places(architecture, LAYERS, EXPERTS).items():
        together = re.sub(r"experts\.\d+", "experts", module)
        assert names.get_name(together) + "." == place.tensor


def test_rows_of_q_and_k_are_in_the_order_of_llama_cpp(tmp_path):
    export_gguf(folder(tmp_path / "hf"), tmp_path / "a.gguf")
    export_gguf(folder(tmp_path / "qwen", "qwen2"), tmp_path / "q.gguf")
    name = "model.layers.0.self_attn.q_proj"
    with GGUFFile(tmp_path / "a.gguf") as file:
        q = tensors()[f"{name}.weight"]
        halves = q.reshape(HEADS, 2, HEAD // 2, HIDDEN)
        assert same(file.read("blk.0.attn_q.weight"), np.stack([halves[:, 0], halves[:, 1]], 2).reshape(q.shape))
    with GGUFFile(tmp_path / "q.gguf") as file:
        assert same(file.read("blk.0.attn_q.weight"), tensors("qwen2")[f"{name}.weight"])
        assert same(file.read("blk.0.attn_q.bias"), tensors("qwen2")[f"{name}.bias"].astype(np.float32))
    assert (to_neighbours(HEADS * HEAD, HEADS)[to_halves(HEADS * HEAD, HEADS)] == np.arange(HEADS * HEAD)).all()


def test_norms_and_routers_are_float32(tmp_path):
    export_gguf(folder(tmp_path / "hf", "qwen3_moe"), tmp_path / "a.gguf")
    with GGUFFile(tmp_path / "a.gguf") as file:
        kinds = {name.split(".")[-2]: spec.type.name for name, spec in file.specs.items()}
        assert file.specs["blk.0.ffn_down_exps.weight"].shape == (EXPERTS, HIDDEN, INNER)
        second = tensors("qwen3_moe")["model.layers.0.mlp.experts.2.down_proj.weight"]
        assert same(file.read("blk.0.ffn_down_exps.weight", 2), second)
        assert file.metadata["general.file_type"] == 32 and file.metadata["qwen3moe.expert_count"] == EXPERTS
    assert {kind for kind, name in kinds.items() if name == "F32"} == {
        "attn_norm",
        "attn_q_norm",
        "attn_k_norm",
        "ffn_norm",
        "ffn_gate_inp",
        "output_norm",
    }
    assert set(kinds.values()) == {"F32", "BF16"}


def test_tied_embeddings_have_no_output(tmp_path):
    source = folder(tmp_path / "hf", held=tensors(tied=True), tie_word_embeddings=True)
    export_gguf(source, tmp_path / "a.gguf")
    with GGUFFile(tmp_path / "a.gguf") as file:
        assert "output.weight" not in file.specs
    import_gguf(tmp_path / "a.gguf", tmp_path / "back")
    assert read_config(tmp_path / "back")["tie_word_embeddings"] is True
    assert_same_tensors(read_tensors(tmp_path / "back"), read_tensors(source))


@pytest.mark.parametrize("factor", [1, -2])
def test_a_head_that_differs_from_a_tied_embedding_is_written(tmp_path, factor):
    held = tensors(tied=True)
    held["lm_head.weight"] = held["model.embed_tokens.weight"] * np.asarray(factor, ml_dtypes.bfloat16)
    source = folder(tmp_path / "hf", held=held, tie_word_embeddings=True)
    report = export_gguf(source, tmp_path / "a.gguf", options=ConvertOptions(verify=True))
    warned = [w for w in report.warnings if "but lm_head has a weight of its own" in w]
    with GGUFFile(tmp_path / "a.gguf") as file:
        assert ("output.weight" in file.specs) == (factor != 1) == bool(warned)
        if factor != 1:
            np.testing.assert_array_equal(file.read("output.weight"), held["lm_head.weight"])


@pytest.mark.parametrize("tied", [True, False])
def test_llama_cpp_decodes_embeddings_and_heads(tmp_path, tied):
    source = folder(tmp_path / "hf", held=tensors(tied=tied), tie_word_embeddings=tied)
    report = export_gguf(source, tmp_path / "a.gguf", W4A16, defaults=(), options=ConvertOptions(verify=True))
    assert "model.embed_tokens" in report.changed and ("lm_head" in report.changed) != tied
    assert not [warning for warning in report.warnings if "lm_head" in warning or "heads" in warning]


def test_the_scaling_of_llama_3_is_a_tensor_and_comes_back(tmp_path):
    export_gguf(folder(tmp_path / "hf", rope_scaling=LLAMA3, rope_theta=500000.0), tmp_path / "a.gguf")
    with GGUFFile(tmp_path / "a.gguf") as file:
        divisors = file.read("rope_freqs.weight")
        assert file.metadata["llama.rope.freq_base"] == 500000
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(**read_config(tmp_path / "hf"))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 500000.0 ** (np.arange(0, HEAD, 2) / HEAD)
    np.testing.assert_allclose(plain / divisors, scaled.numpy(), rtol=1e-5)
    import_gguf(tmp_path / "a.gguf", tmp_path / "back")
    assert read_config(tmp_path / "back")["rope_scaling"] == LLAMA3


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_other_scalings_are_metadata_and_come_back(tmp_path, rope):
    parameters = {**rope, "rope_theta": 50000.0}  # as transformers 5 writes them
    source = folder(tmp_path / "hf", "qwen2", rope_parameters=parameters)
    export_gguf(source, tmp_path / "a.gguf")
    import_gguf(tmp_path / "a.gguf", tmp_path / "back")
    config = read_config(tmp_path / "back")
    assert config["rope_scaling"] == rope and config["rope_theta"] == 50000.0


def test_norms_that_lose_bits_stay_float32(tmp_path):
    held = tensors()
    held["model.norm.weight"] = np.linspace(0.9, 1.1, HIDDEN, dtype=np.float32)
    source = folder(tmp_path / "hf", held=held)
    export_gguf(source, tmp_path / "a.gguf")
    import_gguf(tmp_path / "a.gguf", tmp_path / "back")
    assert_same_tensors(read_tensors(tmp_path / "back"), held)


def test_a_dry_run_writes_nothing(tmp_path):
    source = folder(tmp_path / "hf")
    assert len(export_gguf(source, tmp_path / "a.gguf", MXFP4, options=ConvertOptions(dry_run=True)).changed) == 14
    export_gguf(source, tmp_path / "b.gguf")
    assert import_gguf(tmp_path / "b.gguf", tmp_path / "back", options=ConvertOptions(dry_run=True)).output_bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.gguf", "hf"]


REFUSED = {
    "another family": (
        {"model_type": "gemma3_text"},
        "model_type is 'gemma3_text'; to and from GGUF go llama, mistral",
    ),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "another rotation": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    "a parameter of its own": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0}},
        "rope_scaling has 'attention_factor', which llama.cpp reads otherwise",
    ),
    "a factor that is missing": ({"rope_scaling": {"rope_type": "llama3"}}, "needs a factor, and low below high"),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "no layers": ({"num_hidden_layers": None}, "num_hidden_layers is None; needs a whole number"),
    "text for a number": ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; needs a number"),
    "too many layers": ({"num_hidden_layers": 3}, "9 modules are missing: model.layers.2"),
    "too few layers": ({"num_hidden_layers": 1}, "9 modules have no name in llama.cpp's llama: model.layers.1"),
    "other heads": ({"num_attention_heads": 8}, r"say \[64, 256\]: .*config.json says 8 heads of 32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_would_compute_wrong_is_refused(tmp_path, case):
    more, reason = REFUSED[case]
    source = folder(tmp_path / "hf", **({} if "model_type" in more else more))
    if "model_type" in more:
        (source / "config.json").write_text(json.dumps(read_config(source) | more))
    with pytest.raises(CheckpointError, match=reason):
        export_gguf(source, tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


def test_a_head_that_is_missing_is_refused_unless_it_is_tied(tmp_path):
    with pytest.raises(
        CheckpointError, match='modules are missing: lm_head; with tied embeddings, config.json says "tie'
    ):
        export_gguf(folder(tmp_path / "hf", held=tensors(tied=True)), tmp_path / "a.gguf")


def test_schemes_without_an_exact_form_are_refused(tmp_path):
    source = folder(tmp_path / "hf")
    for name, options in (("nvfp4", {}), ("w4a16", {"group_size": 64}), ("w4a16_asym", {"group_size": 32})):
        scheme = schemes.by_name(name, **options)
        with pytest.raises(CheckpointError, match=rf"{name}.* has no exact form in GGUF.*dequantize"):
            export_gguf(source, tmp_path / "a.gguf", scheme)
    convert(source, tmp_path / "low", schemes.by_name("nvfp4"))
    with pytest.raises(CheckpointError, match="'model.layers.0.*nvfp4 has no exact form"):
        export_gguf(tmp_path / "low", tmp_path / "a.gguf")


def test_scales_that_float16_lacks_are_refused_and_nothing_stays(tmp_path):
    held = tensors()
    held["model.layers.1.mlp.up_proj.weight"] *= ml_dtypes.bfloat16(2**30)
    convert(folder(tmp_path / "hf", held=held), tmp_path / "low", schemes.by_name("w4a16", group_size=32))
    with pytest.raises(CheckpointError, match="'model.layers.1.mlp.up_proj'.*no numbers of float16"):
        export_gguf(tmp_path / "low", tmp_path / "a.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "low"]


def test_a_file_that_is_there_is_not_replaced(tmp_path):
    source = folder(tmp_path / "hf")
    (tmp_path / "a.gguf").write_text("mine")
    with pytest.raises(CheckpointError, match="is there already"):
        export_gguf(source, tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="cannot be written"):
        export_gguf(source, tmp_path / "nowhere" / "b.gguf")
    assert (tmp_path / "a.gguf").read_text() == "mine"


def test_an_import_that_was_stopped_is_continued(tmp_path, monkeypatch):
    export_gguf(folder(tmp_path / "hf"), tmp_path / "a.gguf")
    import_gguf(tmp_path / "a.gguf", tmp_path / "whole")
    from jaxlowprec.checkpoints.gguf import importing

    with monkeypatch.context() as patched:
        patched.setattr(importing, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            import_gguf(tmp_path / "a.gguf", tmp_path / "again")
    with pytest.raises(CheckpointError, match="holds another unfinished conversion"):
        import_gguf(tmp_path / "a.gguf", tmp_path / "again", dtype="float32")
    report = import_gguf(tmp_path / "a.gguf", tmp_path / "again")
    assert report.kept == ["model.safetensors"] and contents(tmp_path / "again") == contents(tmp_path / "whole")


def test_heads_of_qwen2_are_as_wide_as_the_model(tmp_path):
    with pytest.raises(CheckpointError, match="2 heads of 64 in a width of 64; llama.cpp's qwen2 needs"):
        export_gguf(folder(tmp_path / "hf", "qwen2", head_dim=64), tmp_path / "a.gguf")
