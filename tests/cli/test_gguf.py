"""`jaxlowprec convert`, `dequantize` and `inspect` with GGUF files."""

import json

import pytest

from tests.checkpoints.gguf.models import folder
from tests.checkpoints.small_models import read_config, read_tensors, same
from tests.cli.test_checkpoints import command


@pytest.fixture
def source(tmp_path):
    return folder(tmp_path / "source")


def test_there_and_back(capsys, source, tmp_path):
    out, err = command(capsys, "convert", source, tmp_path / "a.gguf", "--scheme", "w4a16", "--verify")
    assert "GGUF Q4_0: changed 14 weights" in out and "verified: 21 tensors" in out and "wrote 1 file" in out
    assert "warning: no tokenizer is written" in err
    out, _ = command(capsys, "convert", tmp_path / "a.gguf", tmp_path / "back", "--verify")
    assert "GGUF to w4a16: kept the codes of 14 weights" in out
    assert "in high precision: 2 matrices\n  2 BF16 as bfloat16" in out
    command(capsys, "convert", tmp_path / "back", tmp_path / "b.gguf")
    assert "Q4_0: 14" in command(capsys, "inspect", tmp_path / "b.gguf").out
    command(capsys, "dequantize", tmp_path / "a.gguf", tmp_path / "plain", "--dtype", "float16")
    assert "quantization_config" not in read_config(tmp_path / "plain")


def test_a_plain_file_keeps_its_dtypes(capsys, source, tmp_path):
    command(capsys, "convert", source, tmp_path / "a.gguf")
    command(capsys, "convert", tmp_path / "a.gguf", tmp_path / "back")
    found = read_tensors(tmp_path / "back")
    assert all(same(found[name], tensor) for name, tensor in read_tensors(source).items())


def test_inspect_lists_tensors_types_shapes_and_sizes(capsys, source, tmp_path):
    command(capsys, "convert", source, tmp_path / "a.gguf", "--scheme", "mxfp4")
    out, _ = command(capsys, "inspect", tmp_path / "a.gguf")
    assert "GGUF v3 llama, 21 modules" in out and "MXFP4: 14" in out
    assert any(line.split()[:5] == ["blk.0.attn_q.weight", "MXFP4", "128", "x", "64"] for line in out.splitlines())
    shown = json.loads(command(capsys, "inspect", tmp_path / "a.gguf", "--json").out)
    assert shown["formats"]["F32"]["modules"] == 5


REFUSED = {
    "rules without a scheme": (("convert", "source", "a.gguf", "--ignore", "lm_head"), "--ignore does nothing here"),
    "a scheme from GGUF": (("convert", "x.gguf", "back", "--scheme", "nvfp4"), "--scheme does nothing here"),
    "no scheme": (("convert", "source", "low"), "--scheme is missing; needs one of w4a16"),
    "no exact form": (("convert", "source", "a.gguf", "--scheme", "nvfp4"), "nvfp4 has no exact form in GGUF"),
    "from GGUF to GGUF": (
        ("convert", "x.gguf", "y.gguf"),
        "y.gguf: both are GGUF files; from GGUF needs",
    ),
    "other groups": (
        ("convert", "source", "a.gguf", "--scheme", "w4a16", "--group-size", "64"),
        "groups of 64 has no exact",
    ),
    "dequantize to GGUF": (("dequantize", "source", "a.gguf"), "needs a folder"),
    "a reference": (("inspect", "a.gguf", "--reference", "source"), "--reference compares folders"),
    "no file": (("inspect", "x.gguf"), "no such file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_are_one_line(capsys, source, tmp_path, monkeypatch, case):
    arguments, reason = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    _, err = command(capsys, *arguments, status=2)
    assert reason in err and err.count("\n") == 1
    assert not (tmp_path / "a.gguf").exists()
