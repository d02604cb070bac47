"""`jaxlowprec convert --calibrate`: what it writes, reports and refuses."""

import functools
import json
import os
import re

import numpy as np
import pytest

from jaxlowprec.checkpoints.calibration import Calibration, Method
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, convert, dequantize, scheme_for
from jaxlowprec.checkpoints.decoders import load
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.cli.main import main
from tests.checkpoints.small_models import contents, read_config, read_tensors, write_checkpoint
from tests.helpers import assert_same_bytes
from tests.models.decoder import tiny

CONTEXT = 32


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("the low bits of a block are kept in order " * 40)
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.folder(tmp_path_factory.mktemp("model") / "m", "llama2", num_hidden_layers=1)


def calibrated(model, text, to, name, *, options=ConvertOptions(), method=Method(), group_size=None):  # noqa: B008
    scheme = scheme_for(model, name, group_size=group_size, static=True)
    return convert(model, to, scheme, calibration=Calibration(text, 4, CONTEXT, method), options=options)


@pytest.fixture(scope="module")
def made_of(model, text, tmp_path_factory):
    """The report and the folder of a scheme's calibration of the model, each made once."""

    @functools.cache
    def of(name, group_size):
        folder = tmp_path_factory.mktemp("made") / name
        return calibrated(model, text, folder, name, group_size=group_size, options=ConvertOptions(verify=True)), folder

    return of


@pytest.mark.parametrize(
    ("name", "group_size"),
    [
        ("nvfp4", None),
        *(pytest.param(name, 32, marks=pytest.mark.slow) for name in ("w4a16", "w4a16_asym", "gptq", "awq")),
    ],
)
def test_the_result_is_a_checkpoint_of_the_scheme(model, made_of, tmp_path, name, group_size):
    report, folder = made_of(name, group_size)
    plain = convert(model, tmp_path / "plain", scheme_for(model, name, group_size=group_size))
    made, others = read_tensors(folder), read_tensors(tmp_path / "plain")
    assert {n: (t.dtype, t.shape) for n, t in made.items()} == {n: (t.dtype, t.shape) for n, t in others.items()}
    assert read_config(folder) == read_config(tmp_path / "plain")
    assert set(contents(folder)) == set(contents(tmp_path / "plain"))  # nothing temporary is left
    assert any(not np.array_equal(made[n], others[n]) for n in made)
    found = report.calibrated
    assert report.verified == len(made) and plain.calibrated is None
    assert set(found.weight_errors) == set(report.changed) and not found.without_inputs
    assert found.calibration_tokens == 4 * CONTEXT and found.held_out_tokens == 5 * CONTEXT
    assert all(0 < error < 0.2 for error in (*found.layer_errors, *found.weight_errors.values()))
    assert np.isfinite([found.perplexity_before, found.perplexity_after]).all()
    load(folder)  # the decoder reads it
    dequantize(folder, tmp_path / "back")


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"])
def test_a_tensor_with_nan_is_named_and_nothing_is_left(model, text, tmp_path, name):
    tensors = dict(read_tensors(model))
    tensors[name] = np.full_like(tensors[name], np.nan)
    (write_checkpoint(tmp_path / "model", tensors, config=read_config(model)) / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=f"tensor '{name}' holds NaN or infinity"):
        calibrated(tmp_path / "model", text, tmp_path / "made", "nvfp4")
    assert not (tmp_path / "made").exists()


def test_static_scales_are_the_largest_activations(model, text, tmp_path):
    calibrated(model, text, tmp_path / "made", "fp8_tensor")
    made = read_tensors(tmp_path / "made")
    scales = {n.split(".")[-2]: float(t[0]) for n, t in made.items() if n.endswith(".input_scale")}
    assert len(scales) == 7 and all(scale > 0 for scale in scales.values())
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"] and scales["gate_proj"] == scales["up_proj"]
    assert scales["q_proj"] != scales["down_proj"]
    written = read_config(tmp_path / "made")["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    assert written["dynamic"] is False
    # RMSNorm of rows of 128 numbers, and its scale of ones: no more than sqrt(128)
    assert scales["q_proj"] * 448 <= np.sqrt(128) + 1e-3


@pytest.mark.slow
def test_nvfp4_has_measured_scales_of_activations(model, text, tmp_path):
    """compressed-tensors' file holds 2688 over the largest activation, ModelOpt's the inverse."""
    search = Method(feedback=False)
    for name in ("nvfp4_w4a4", "modelopt_nvfp4", "nvfp4"):
        calibrated(model, text, tmp_path / name, name, method=search)
    found = {}
    for name, field in (("nvfp4_w4a4", "input_global_scale"), ("modelopt_nvfp4", "input_scale")):
        made = read_tensors(tmp_path / name)
        found[name] = {n.split(".")[-2]: np.float64(t.item()) for n, t in made.items() if n.endswith(f".{field}")}
        scales = found[name]
        assert len(scales) == 7 and scales["q_proj"] == scales["k_proj"] == scales["v_proj"] != scales["down_proj"]
    for module, encode in found["nvfp4_w4a4"].items():
        assert encode > 0 and encode * found["modelopt_nvfp4"][module] == pytest.approx(1, rel=1e-6)
    assert 2688 / found["nvfp4_w4a4"]["q_proj"] <= np.sqrt(128) + 1e-3  # behind RMSNorm
    both, weights = (read_tensors(tmp_path / name) for name in ("nvfp4_w4a4", "nvfp4"))
    assert_same_bytes({n: t for n, t in both.items() if not n.endswith("input_global_scale")}, weights)
    load(tmp_path / "nvfp4_w4a4")


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("mxfp4", 40, "calibration does nothing for mxfp4.*choose one of w4a16"),
        ("nvfp4", 2, "has 84 tokens; needs 330 or more"),
        ("nvfp4", None, "No such file.*needs a text file in UTF-8"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_at_once(model, tmp_path, name, words, message):
    file = tmp_path / "text"
    if words:
        file.write_text("the low bits of a block are kept in order " * words)
    with pytest.raises(CheckpointError, match=message):
        calibrated(model, file, tmp_path / "made", name)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("text", ["pipe", "/dev/zero"])
def test_a_text_without_an_end_is_refused_at_once(model, tmp_path, text):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is a pipe or a device; needs a text file in UTF-8"):
        calibrated(model, tmp_path / text, tmp_path / "made", "nvfp4")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 300}, "has no tokenizer.json, and its vocabulary of 300"),
        ({"model_type": "bloom"}, "calibration computes the model.*model_type is 'bloom'.*needs one of llama"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantised already"),
    ],
)
def test_a_model_that_cannot_be_computed_is_refused_at_once(model, text, tmp_path, changed, message):
    source = tmp_path / "model"
    source.mkdir()
    (source / "model.safetensors").symlink_to(model / "model.safetensors")
    (source / "config.json").write_text(json.dumps(read_config(model) | changed))
    with pytest.raises(CheckpointError, match=message):
        calibrated(source, text, tmp_path / "made", "nvfp4")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calibrate-rows", "2"], "need --calibrate TEXT_FILE"),
        (["--calibrate", "t", "--calibrate-rows", "0"], "rows=0; needs 1 or more"),
    ],
)
def test_options_that_do_nothing_are_refused(model, tmp_path, capsys, options, message):
    assert main(["convert", str(model), str(tmp_path / "made"), "--scheme", "nvfp4", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_reports_it(model, text, tmp_path, capsys):
    command = ["convert", str(model), str(tmp_path / "made"), "--scheme", "nvfp4", "--calibrate", str(text), "--json"]
    assert main([*command, "--calibrate-rows", "2", "--calibrate-context", "32", "--calibrate-by", "search"]) == 0
    said = json.loads(capsys.readouterr().out)["calibrated"]
    assert said["calibration_tokens"] == 64 and said["perplexity_before"] > 1 and len(said["layer_errors"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "phi3", "gemma3", "glm4", "mixtral"])
def test_families(text, tmp_path, family):
    layers = 2 if family == "gemma3" else 1  # whose layers differ
    source = tiny.folder(tmp_path / "m", family, num_hidden_layers=layers)
    found = calibrated(source, text, tmp_path / "made", "w4a16", group_size=32).calibrated
    assert found.weight_errors and max(found.layer_errors) < 0.2
    assert all(".experts." in module for module in found.without_inputs)  # no token was sent to them
    load(tmp_path / "made")


def with_arrays(tensors):
    """The tensors with the experts of each layer in arrays [E, out, in], gate above up."""
    parts, made = {}, {}
    for name, tensor in tensors.items():
        if expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            parts.setdefault(expert[1], {}).setdefault(expert[3], {})[int(expert[2])] = tensor
        else:
            made[name] = tensor
    for at, of in parts.items():
        gate, up, down = (np.stack([of[part][e] for e in range(len(of[part]))]) for part in ("gate", "up", "down"))
        made |= {f"{at}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}.down_proj": down}
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "nvfp4"),
        ("deepseek_v3", "fp8_tensor"),
        pytest.param("qwen3_moe", "fp8_tensor", marks=pytest.mark.every_case),
        pytest.param("glm4_moe", "fp8_tensor", marks=pytest.mark.every_case),
    ],
)
def test_arrays_of_experts_are_calibrated_as_single_ones(text, tmp_path, family, name):
    """Each expert by the inputs that it received."""
    single = tiny.folder(tmp_path / "single", family, num_hidden_layers=2)
    tensors = with_arrays(read_tensors(single))
    assert any(tensor.ndim == 3 for tensor in tensors.values())
    arrays = write_checkpoint(tmp_path / "arrays", tensors, 1, read_config(single))
    (arrays / "tokenizer.json").unlink()
    reports = [calibrated(at, text, tmp_path / f"made-{at.name}", name) for at in (single, arrays)]
    assert reports[0].calibrated == reports[1].calibrated
    assert any(".experts.3." in module for module in reports[1].calibrated.weight_errors)
    assert_same_bytes(read_tensors(tmp_path / "made-arrays"), read_tensors(tmp_path / "made-single"))
    assert read_config(tmp_path / "made-arrays") == read_config(tmp_path / "made-single")


@pytest.mark.slow
def test_arrays_that_stay_as_they_are(text, tmp_path):
    """Those of GPT-OSS are computed with, and only the other linears are calibrated."""
    source = tiny.folder(tmp_path / "m", "gpt_oss")
    report = calibrated(source, text, tmp_path / "made", "w4a16", group_size=32)
    assert len(report.changed) == 8 and set(report.calibrated.weight_errors) == set(report.changed)
    assert max(report.calibrated.layer_errors) < 0.2
    with pytest.raises(CheckpointError, match="calibration does nothing for gpt_oss_mxfp4"):
        calibrated(source, text, tmp_path / "other", "gpt_oss_mxfp4")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "group_size"), [("w4a16", 32), ("w4a16_asym", 32), ("nvfp4", None)])
def test_transformers_reads_the_same_weights(made_of, tmp_path, name, group_size):
    pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    _, folder = made_of(name, group_size)
    dequantize(folder, tmp_path / "back")
    options = transformers.CompressedTensorsConfig(run_compressed=False)
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=options)
    theirs = {n: t.float().numpy() for n, t in read.state_dict().items() if n.endswith("_proj.weight")}
    ours = read_tensors(tmp_path / "back")
    assert len(theirs) == 7
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(tensor, ours[name].astype(np.float32))
