"""The command where streams are closed, narrow or full, and where names hold what a terminal would obey."""

import io
import json
import os
import pathlib
import sys

import numpy as np
import pytest

from jaxlowprec.cli.main import main
from jaxlowprec.cli.streams import printable
from tests.checkpoints.small_models import contents, llama, write_checkpoint
from tests.cli.processes import command, one_line


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source", llama(1), shards=2)


@pytest.mark.slow
def test_without_standard_error_the_work_is_done(source, tmp_path):
    arguments = ("convert", source, tmp_path / "low", "--scheme", "mxfp4", "--ignore", "re:nothing")
    status, out, err = command(*arguments, after="2>&-")
    assert (status, err) == (0, "") and "changed 7 weights" in out
    assert set(contents(tmp_path / "low")) == set(contents(source))


@pytest.mark.slow
def test_without_standard_error_an_error_is_still_a_status(tmp_path):
    assert command("inspect", tmp_path / "none", after="<&- 2>&-") == (2, "", "")


@pytest.mark.slow
def test_without_standard_output_nothing_is_begun(source, tmp_path):
    err = one_line(*command("convert", source, tmp_path / "low", "--scheme", "mxfp4", after=">&-"))
    assert "standard output is closed" in err and not (tmp_path / "low").exists()


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_under_standard_output_is_said(capsys, source, monkeypatch):
    with pathlib.Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        status = main(["inspect", str(source)])
    assert one_line(status, *capsys.readouterr()) == "jaxlowprec inspect: standard output: No space left on device\n"


def test_a_terminal_that_went_away_stops_no_work(source, tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:  # noqa: PTH123 (a descriptor)
        monkeypatch.setattr(sys, "stderr", gone)
        monkeypatch.setattr(gone, "isatty", lambda: True, raising=False)
        assert main(["convert", str(source), str(tmp_path / "low"), "--scheme", "mxfp4"]) == 0
    assert "config.json" in contents(tmp_path / "low")


HOSTILE = {
    "a\x1b]0;owned\x07.weight": "a\\x1b]0;owned\\x07",
    "b\r\nc.weight": "b\\r\\nc",
    "d\u202ee.weight": "d\\u202ee",
}


def hostile(path):
    """A checkpoint whose tensors have names that a terminal obeys, and one in another alphabet."""
    names = [*HOSTILE, "ключ.weight"]
    return write_checkpoint(path, {name: np.ones((2, 32), np.float32) for name in names}, shards=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "SRC"],
        ["inspect", "SRC", "--reference", "REF"],
        ["convert", "SRC", "DST", "--scheme", "mxfp4", "--dry-run"],
        ["convert", "SRC", "DST", "--scheme", "mxfp4", "--ignore", "b\r\nc", "d\u202ee", "re:a\x1b.*"],
        ["convert", "SRC", "DST", "--scheme", "fp8_block", "--json"],
        ["convert", "SRC", "DST", "--scheme", "w4a16"],
    ],
)
def test_names_reach_the_terminal_escaped(capsys, tmp_path, arguments):
    reference = write_checkpoint(tmp_path / "reference", {"x.weight": np.ones((1, 32), np.float32)}, shards=1)
    names = {"SRC": hostile(tmp_path / "source"), "DST": tmp_path / "low", "REF": reference}
    main([str(names.get(a, a)) for a in arguments])
    out, err = capsys.readouterr()
    text = out + err
    assert text and all(line.isprintable() for line in text.split("\n"))
    if "--json" not in arguments:
        assert any(shown in text for shown in HOSTILE.values())


def test_unknown_arguments_too(capsys):
    with pytest.raises(SystemExit):
        main(["inspect", "x", "--\x1b[31m"])
    assert "\\x1b[31m" in capsys.readouterr().err


def test_what_a_narrow_terminal_lacks_is_escaped(tmp_path, monkeypatch):
    for encoding, shown in (("ascii", rb"\u043a\u043b\u044e\u0447 "), ("koi8-r", "ключ ".encode("koi8-r"))):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
        assert main(["inspect", str(hostile(tmp_path / encoding))]) == 0
        assert shown in sys.stdout.buffer.getvalue()
    assert printable("\udcff") == "\\udcff"


def test_arguments_that_are_no_text(capsys, source, tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    source.rename(folder)
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path}/\\udcff: not quantised")
    assert main(["convert", str(folder), str(tmp_path / "\udcfe"), "--scheme", "mxfp4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] and (tmp_path / "\udcfe" / "config.json").exists()
    arguments = ["convert", str(folder), str(tmp_path / "low"), "--scheme", "mxfp4", "--ignore", "\udcff"]
    assert "rule '\\udcff' is not text in UTF-8" in one_line(main(arguments), *capsys.readouterr())
