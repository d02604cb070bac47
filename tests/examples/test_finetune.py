"""examples/finetune.py as a user runs it, on tiny models: what it trains, resumes, exports and refuses."""

import contextlib
import functools
import io
import json
import pathlib
import shutil
import sys

import finetune
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lm import finetuning

import jaxlowprec as jlp
from jaxlowprec.checkpoints import decoders
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from tests.checkpoints.small_models import read_config, write_checkpoint
from tests.models.decoder import tiny

OPTIONS = ("--steps", "4", "--batch", "2", "--context", "16", "--checkpoint-every", "2", "--tokens", "3")
RATE = ("--learning-rate", "0.01")
INT4 = ("--recipe", "int4_qat", "--group-size", "32")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("the low bits of a block " * 100)
    return file


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = tiny.folder(tmp_path_factory.mktemp(family) / "model", family)
            (made[family] / "generation_config.json").write_text('{"temperature": 0.5}')
        return made[family]

    return folder


def words(model, text, out, *more):
    """The program's command line."""
    command = ["finetune.py", "--model", model, "--text", text, "--out", out, *OPTIONS, *RATE, *more]
    return [str(word) for word in command]


@pytest.fixture
def run(monkeypatch, capsys, text):
    """Runs the program; what it printed."""

    def run(model, out, *more):
        monkeypatch.setattr(sys, "argv", words(model, text, out, *more))
        finetune.main()
        return capsys.readouterr().out

    return run


def tensors(folder):
    with CheckpointFolder(folder) as opened:
        return {name: opened.read(name).copy() for name in opened.shard_of}


def same(one, other):
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.fixture(scope="module")
def trained(models, text, tmp_path_factory):
    """The folder of a whole run of a family under INT4, and what it printed; each family is trained once."""

    @functools.cache
    def of(family):
        out = tmp_path_factory.mktemp("whole") / family
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
            patch.setattr(sys, "argv", words(models(family), text, out, *INT4))
            finetune.main()
        return out, said.getvalue()

    return of


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("llama3", marks=pytest.mark.every_case)])
def test_a_resumed_run_ends_with_the_same_bytes(family, models, trained, run, tmp_path, monkeypatch):
    whole, said = trained(family)
    assert "Int4 1x32" in said and "The " in said and "export: " in said
    losses = json.loads((whole / "losses.json").read_text())
    assert len(losses) == 4 and losses[-1] < losses[0]

    save = finetuning.Checkpoints.save

    def save_and_end(self, *content):
        save(self, *content)
        self.close()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(finetuning.Checkpoints, "save", save_and_end)
        with pytest.raises(Killed):
            run(models(family), tmp_path / "killed", *INT4)
    assert len(json.loads((tmp_path / "killed" / "losses.json").read_text())) == 2
    run(models(family), tmp_path / "killed", *INT4)
    assert json.loads((tmp_path / "killed" / "losses.json").read_text()) == losses
    whole, resumed = (tensors(folder / "export") for folder in (whole, tmp_path / "killed"))
    assert same(whole, resumed) and any(name.endswith("weight_packed") for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_transformers_loads_the_weights_of_the_export(family, trained):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    folder = trained(family)[0] / "export"
    assert (folder / "generation_config.json").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.CompressedTensorsConfig(run_compressed=False), dtype=torch.bfloat16
    )
    found = {name: tensor.view(torch.int16).numpy() for name, tensor in model.state_dict().items()}
    decoder = decoders.load(folder, param_dtype=jnp.bfloat16)
    mapping = decoders.mapping_of(decoder.config)
    expected = mapping.to_tensors(decoders.decoded(nnx.state(decoder, nnx.Param)), dtype=jnp.bfloat16)
    for name, tensor in expected.items():
        if ".experts." not in name:
            np.testing.assert_array_equal(found[name], tensor.view(np.int16), err_msg=name)
    for layer in range(2 if family == "qwen3_moe" else 0):
        at = f"model.layers.{layer}.mlp.experts"
        for expert in range(4):
            parts = [expected[f"{at}.{expert}.{part}_proj.weight"].view(np.int16) for part in ("gate", "up", "down")]
            np.testing.assert_array_equal(found[f"{at}.gate_up_proj"][expert], np.concatenate(parts[:2]))
            np.testing.assert_array_equal(found[f"{at}.down_proj"][expert], parts[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma3", INT4),
        ("deepseek_v3", INT4),
        ("phi4-mini", INT4),
        ("gpt_oss", ("--recipe", "nvfp4")),
        ("glm4_moe", ("--recipe", "qlora", "--base", "int4", "--rank", "4")),
    ],
)
def test_other_families_learn(family, options, models, run, tmp_path):
    """The export is loaded and writes a text, and has the tensors of the source, quantised or not."""
    assert "The " in run(models(family), tmp_path, *options)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses[-1] < losses[0]
    before, after = tensors(models(family)), tensors(tmp_path / "export")
    packed = {name.removesuffix("_packed") for name in after if name.endswith("_packed")}
    assert {name for name in after if not name.endswith(("_packed", "_scale", "_shape"))} | packed == set(before)
    assert bool(packed) == (options == INT4)


@pytest.mark.slow
@pytest.mark.parametrize("export", ["bf16", "nvfp4"])
def test_nvfp4_trains_and_exports(export, models, run, tmp_path):
    said = run(models("llama3"), tmp_path, "--recipe", "nvfp4", "--export", export)
    assert "NVFP4" in said
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and ("quantization_config" in config) == (export == "nvfp4")
    before, after = tensors(models("llama3")), tensors(tmp_path / "export")
    assert before["lm_head.weight"].tobytes() != after["lm_head.weight"].tobytes()


@pytest.mark.slow
def test_adapters_are_trained_and_merged(models, run, tmp_path):
    from safetensors.numpy import load_file

    run(models("llama3"), tmp_path, "--recipe", "qlora", "--base", "int4", "--rank", "4", "--alpha", "8")
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    said = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert said["r"] == 4 and said["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    name = "model.layers.1.mlp.down_proj"
    a, b = (adapters[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    base = jlp.quantize(tensors(models("llama3"))[f"{name}.weight"].astype(np.float32), jlp.Int4(32)).dequantize()
    merged = np.asarray(base, np.float32) + 8 / 4 * b @ a
    exported = tensors(tmp_path / "export")[f"{name}.weight"].astype(np.float32)
    assert np.abs(b).max() > 0
    np.testing.assert_allclose(exported, merged, rtol=2**-8, atol=1e-6)


@pytest.mark.slow
def test_experts_stay_frozen_beside_adapters(models, run, tmp_path):
    run(models("qwen3_moe"), tmp_path, "--recipe", "qlora", "--base", "mxfp4", "--rank", "4")
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    base = jlp.quantize(tensors(models("qwen3_moe"))[name].astype(np.float32), jlp.MXFP4()).dequantize()
    exported = tensors(tmp_path / "export")[name]
    assert exported.tobytes() == np.asarray(base.astype(jnp.bfloat16)).tobytes()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--recipe", "int3"), "invalid choice: 'int3'"),
        (("--recipe", "int4_qat", "--group-size", "96"), "needs a divisor of the model's widths [128, 256], not [128"),
        (("--recipe", "nvfp4", "--steps", "0"), "need 1 or more"),
        (("--recipe", "nvfp4", "--context", "500"), "--context 500: the model was made for 128"),
        (("--recipe", "nvfp4", "--context", "127"), "needs 2580 or more: a longer text, or a smaller --context"),
        (("--recipe", "nvfp4", "--text", "/nowhere"), "--text /nowhere: no such file"),
        (("--recipe", "nvfp4", "--prompt", ""), "one or more of --prompt"),
        (("--recipe", "nvfp4", "--model", "/nowhere"), "/nowhere: has no config.json"),
    ],
)
def test_a_wrong_argument_is_named(models, text, tmp_path, refused_by, more, message):
    base = ("--model", models("llama3"), "--text", text, "--out", tmp_path / "out", *OPTIONS)
    assert message in refused_by(finetune.main, *base, *more)
    assert not (tmp_path / "out").exists()


def test_experts_that_no_format_holds_are_refused(models, text, tmp_path, refused_by):
    command = ("--model", models("gpt_oss"), "--text", text, "--out", tmp_path / "out", *OPTIONS, *INT4)
    assert "no format has INT4 experts of gpt_oss" in refused_by(finetune.main, *command)


def test_a_foreign_folder_is_not_touched(models, text, tmp_path, refused_by):
    (tmp_path / "mine.txt").write_text("x")
    command = ("--model", models("llama3"), "--text", text, "--out", tmp_path, *OPTIONS, *INT4)
    assert "holds something that is not a run of finetune.py" in refused_by(finetune.main, *command)


@pytest.mark.parametrize("out", ["file", "file/run"])
def test_a_file_in_place_of_the_output_folder_is_named(models, text, tmp_path, refused_by, out):
    (tmp_path / "file").write_text("x")
    command = ("--model", models("llama3"), "--text", text, "--out", tmp_path / out, *OPTIONS, *INT4)
    assert f"{tmp_path / 'file'} is not a folder; choose another --out" in refused_by(finetune.main, *command)


@pytest.mark.slow
def test_a_model_that_computes_nan_is_refused(models, text, tmp_path, refused_by):
    weights, name = tensors(models("llama3")), "model.layers.0.mlp.up_proj.weight"
    weights[name] = np.full_like(weights[name], np.nan)
    model = write_checkpoint(tmp_path / "model", weights, config=read_config(models("llama3")))
    command = ("--model", model, "--text", text, "--out", tmp_path / "out", *OPTIONS, *INT4)
    (model / "tokenizer.json").unlink()
    assert "its loss on the text is nan before training" in refused_by(finetune.main, *command)
    assert not (tmp_path / "out").exists()


def test_weights_that_are_cut_off_are_named_in_one_line(models, text, tmp_path, refused_by):
    model, out = shutil.copytree(models("llama3"), tmp_path / "model"), tmp_path / "out"
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    command = ("--model", model, "--text", text, "--out", out, *OPTIONS, *INT4)
    said = refused_by(finetune.main, *command)
    assert said.startswith("finetune.py: error: ") and "model.safetensors: the file is truncated" in said
    assert not out.exists()


def test_other_settings_are_refused(models, text, tmp_path, refused_by):
    (tmp_path / finetune.SETTINGS).write_text(json.dumps({"steps": "5"}))
    command = ("--model", models("llama3"), "--text", text, "--out", tmp_path, *OPTIONS, *INT4)
    assert "was begun with other settings" in refused_by(finetune.main, *command)


def test_a_vocabulary_without_a_tokenizer_is_refused(text, tmp_path, refused_by):
    model = tiny.folder(tmp_path / "model", "llama2", vocab_size=300)
    command = ("--model", model, "--text", text, "--out", tmp_path / "out", *OPTIONS, *INT4)
    assert "has no tokenizer.json, and its vocabulary of 300" in refused_by(finetune.main, *command)


def test_a_tokenizer_file_is_used(text, models, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from jaxlowprec.checkpoints.tokens import encoded_file, tokens_of

    words = tokenizers.models.WordLevel({"the": 0, "low": 1, "bits": 2, "?": 3}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = tokens_of(tmp_path, 300)
    assert tokens.encode("the low bits") == [0, 1, 2] and "low bits" in tokens.decode([1, 2])
    assert encoded_file(pathlib.Path(text), tokens, 300, 10)[:4].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="the tokenizer gives token 3, but the model's vocabulary is 3"):
        encoded_file(pathlib.Path(text), tokens, 3, 10)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: .*needs a file of the package tokenizers"):
        tokens_of(tmp_path, 300)
