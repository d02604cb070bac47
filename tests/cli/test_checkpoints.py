"""`jaxlowprec convert`, `dequantize` and `inspect`: reports, and errors of one line."""

import json
import sys

import pytest

from jaxlowprec.checkpoints.schemes import from_config
from jaxlowprec.cli.main import main
from jaxlowprec.cli.streams import Bar, bar, readable
from tests.checkpoints.small_models import contents, llama, read_config, write_checkpoint
from tests.helpers import run_python


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source", llama(1), shards=2)


def command(capsys, *arguments, status=0):
    """What a command prints on standard output, and on standard error."""
    assert main([str(a) for a in arguments]) == status
    return capsys.readouterr()


def test_convert_and_back(capsys, source, tmp_path):
    out, err = command(capsys, "convert", source, tmp_path / "low", "--scheme", "mxfp4", "--verify")
    assert "mxfp4: changed 7 weights" in out and "left alone: 2 matrices" in out and "verified: 19 tensors" in out
    assert "wrote 2 files of weights; copied 2 other files" in out and not err
    assert from_config(read_config(tmp_path / "low")).name == "mxfp4"
    out, _ = command(capsys, "dequantize", tmp_path / "low", tmp_path / "back", "--dtype", "float32")
    assert "mxfp4: changed 7 weights" in out
    out, _ = command(capsys, "inspect", tmp_path / "back", "--reference", source)
    assert "F32: 7" in out and "exact" in out


def test_json_is_all_there_is_on_standard_output(capsys, source, tmp_path):
    arguments = ("convert", source, tmp_path / "low", "--scheme", "nvfp4", "--json", "--ignore", "re:.*down_proj")
    out, err = command(capsys, *arguments, "--dry-run")
    planned = json.loads(out)
    assert planned["dry_run"] and not planned["written"] and not (tmp_path / "low").exists() and not err
    found = json.loads(command(capsys, *arguments).out)
    assert found["command"] == "convert" and found["scheme"] == "nvfp4" and len(found["changed"]) == 6
    assert {"module": "model.layers.0.mlp.down_proj", "reason": "rule re:.*down_proj"} in found["left"]
    assert found["ignore"] == planned["ignore"] and len(found["written"]) == 2
    shown = json.loads(command(capsys, "inspect", tmp_path / "low", "--json", "--reference", source).out)
    assert shown["formats"]["nvfp4"]["modules"] == 6


def test_a_dry_run_lists_every_matrix(capsys, source, tmp_path):
    out, _ = command(capsys, "convert", source, tmp_path / "low", "--scheme", "mxfp4", "--dry-run")
    assert "would change 7 weights" in out and "  model.layers.0.mlp.up_proj\n" in out
    assert "  lm_head  (default: heads)" in out and "wrote" not in out


def test_options_reach_the_conversion(capsys, source, tmp_path):
    rules = (
        "--include",
        "lm_head",
        "--ignore",
        "re:.*o_proj",
        "--ignore",
        "re:.*down_proj",
        "re:.*experts",
        "--workers",
        "1",
    )
    out, err = command(capsys, "convert", source, tmp_path / "a", "--scheme", "mxfp4", *rules, "--json")
    found = json.loads(out)
    assert "lm_head" in found["changed"] and not [m for m in found["changed"] if "o_proj" in m or "down_proj" in m]
    assert found["warnings"][0] == "rule 're:.*experts' matches no weight"
    assert [warning[:28] for warning in found["warnings"][1:]] == ["heads are quantised (lm_head"]
    out, err = command(capsys, "convert", source, tmp_path / "b", "--scheme", "mxfp4", "--ignore", "re:.*experts")
    assert err == "jaxlowprec convert: warning: rule 're:.*experts' matches no weight\n"
    found = command(capsys, "convert", source, tmp_path / "c", "--scheme", "mxfp4", "--no-defaults", "--json").out
    assert len(json.loads(found)["changed"]) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "SRC", "DST", "--scheme", "w4a16", "--group-size", "96"], "cannot hold 7 weights"),
        (["convert", "SRC", "DST", "--scheme", "w4a16", "--group-size", "0"], "group_size=0"),
        (["convert", "SRC", "DST", "--scheme", "nvfp4", "--group-size", "32"], "nvfp4 has groups of 16"),
        (["convert", "SRC", "DST", "--scheme", "mxfp4", "--workers", "0"], "workers=0; needs 1 or more"),
        (["convert", "SRC", "DST", "--scheme", "mxfp4", "--ignore", "re:("], "not a valid regular expression"),
        (["convert", "NONE", "DST", "--scheme", "mxfp4"], "no such folder; needs a folder with"),
        (["convert", "FILE", "DST", "--scheme", "mxfp4"], "config.json: is a file; needs a folder with"),
        (["convert", "SRC", "SRC", "--scheme", "mxfp4"], "lies in the source"),
        (["dequantize", "SRC", "DST"], "no quantization_config, so the weights are not quantised"),
        (["inspect", "NONE"], "no such folder"),
        (["inspect", "SRC", "--plot", "x.png"], "give --reference"),
        (["inspect", "SRC", "--workers", "0"], "needs 1 or more"),
        (["inspect", "SRC", "--reference", "SRC", "--plot", "x.png"], "no module has an error to draw"),
    ],
)
def test_an_error_is_one_line_and_status_2(capsys, source, tmp_path, arguments, message):
    names = {"SRC": source, "DST": tmp_path / "low", "NONE": tmp_path / "none", "FILE": source / "config.json"}
    out, err = command(capsys, *(names.get(a, a) for a in arguments), status=2)
    assert not out and err.startswith(f"jaxlowprec {arguments[0]}: ") and err.count("\n") == 1 and message in err


def test_what_cannot_be_written_is_one_line_too(capsys, source, tmp_path):
    (tmp_path / "file").write_text("no folder")
    _, err = command(capsys, "convert", source, tmp_path / "file" / "low", "--scheme", "mxfp4", status=2)
    assert err.count("\n") == 1 and "Not a directory" in err


def test_an_unknown_scheme_lists_the_known(capsys, source):
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(source), "x", "--scheme", "w3"])
    assert ended.value.code == 2 and "w4a16_asym" in capsys.readouterr().err


def test_interrupted_and_resumed(capsys, source, tmp_path, monkeypatch):
    arguments = ("convert", source, tmp_path / "low", "--scheme", "mxfp4")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxlowprec.checkpoints.conversion.convert.write_index", interrupt)
    _, err = command(capsys, *arguments, status=130)
    assert err == "jaxlowprec convert: interrupted\n"
    monkeypatch.undo()
    assert "wrote 0 files of weights, 2 were finished before" in command(capsys, *arguments).out
    assert set(contents(tmp_path / "low")) == set(contents(source))


@pytest.mark.slow
def test_the_reader_of_a_pipe_may_leave(source):
    code = (
        "import os, sys; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); "
        f"from jaxlowprec.cli.main import main; sys.exit(main(['inspect', {str(source)!r}]))"
    )
    assert run_python("-c", code).stderr == ""


def test_the_bar_is_for_terminals(capsys, monkeypatch):
    assert bar(quiet=False) is None  # captured
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(bar(quiet=False), Bar) and bar(quiet=True) is None
    show = Bar()
    for done in (0, 512, 1024):
        show(done, 1024, "converting")
    lines = capsys.readouterr().err.split("\r")
    assert lines[1].startswith(f"converting [{'':30}]   0 %  0 B of 1.0 KiB")
    assert lines[-1].startswith(f"converting [{'#' * 30}] 100 %") and lines[-1].endswith("\n") and len(lines) == 3


def test_sizes_are_readable():
    assert [readable(n) for n in (0, 1023, 1536, 3 << 30, 1 << 42)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "4.00 TiB",
    ]
