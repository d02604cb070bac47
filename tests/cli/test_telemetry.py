"""`jaxlowprec watch` and `jaxlowprec report`."""

import contextlib
import io
import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time

import pytest

import jaxlowprec as jlp
from jaxlowprec.cli import watch
from jaxlowprec.cli.main import main
from jaxlowprec.telemetry.limits import Limits
from jaxlowprec.telemetry.probes import AS_TRAINED
from jaxlowprec.telemetry.recording import load
from tests.cli.processes import ENTRY
from tests.helpers import python_environment
from tests.telemetry.test_recording import found


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose layer "down" has a gradient of NaNs from step 20 on."""
    with jlp.telemetry.Recorder(tmp_path / "run" / "telemetry.jsonl", every=10, recipe="nvfp4") as recorder:
        for step in range(0, 40, 10):
            measured = {
                layer: {AS_TRAINED: state[AS_TRAINED].at[:, 1:15].set(0.04).at[:, 4:6].set(0)}
                for layer, state in found(step).items()
            }
            if step >= 20:
                measured["down"] = {AS_TRAINED: measured["down"][AS_TRAINED].at[4, 4].set(0.25)}
            recorder.record(step, measured, loss=2.0)
    return tmp_path / "run"


@pytest.mark.slow
def test_watch_prints_the_worst_layers_and_alarms(run, capsys):
    assert main(["watch", "--once", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "step 30, loss 2" in printed
    assert "gradient rowwise of down: 25 % of the elements are infinite or NaN since step 20" in printed
    assert re.search(r"^up +gradient columnwise ", printed, re.M)


def test_watch_while_nothing_is_recorded(tmp_path, capsys):
    jlp.telemetry.Recorder(tmp_path / "telemetry.jsonl").close()
    assert main(["watch", "--once", str(tmp_path)]) == 0
    assert "nothing is recorded yet" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["watch", "report"])
def test_a_run_that_is_not_there(command, tmp_path, capsys):
    assert main([command, str(tmp_path / "none")]) == 2
    assert "none: there is no record of a run; give the file of a telemetry.Recorder" in capsys.readouterr().err


@pytest.mark.slow
def test_report_writes_one_page_with_all_runs(run, tmp_path, capsys):
    pytest.importorskip("vl_convert")
    out = tmp_path / "page.html"
    assert main(["report", str(run), str(run), "--out", str(out), "--title", "A <b> & c"]) == 0
    assert "since step 20" in capsys.readouterr().out
    text = out.read_text()
    assert "<h1>A &lt;b&gt; &amp; c</h1>" in text and "<!--" not in text.split("<script>")[0]
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])
    assert [of["name"] for of in data["runs"]] == ["run", "run (2)"]
    assert data["runs"][0]["steps"] == [0, 10, 20, 30]
    assert not re.search(r"""(src|href)=["']?http""", text.split("<script>")[0])


@pytest.mark.slow
def test_both_print_json(run, tmp_path, capsys):
    assert main(["watch", "--json", str(run)]) == 0
    watched = json.loads(capsys.readouterr().out)
    assert (watched["step"], watched["about"]) == (30, {"recipe": "nvfp4"})
    first = watched["findings"][0]
    assert (first["layer"], first["statistic"], first["since"]) == ("down", "nonfinite", 20)
    assert watched["layers"]["down"]["gradient rowwise"]["nonfinite"] == 0.25
    pytest.importorskip("vl_convert")
    assert main(["report", "--json", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["findings"] == watched["findings"]


def test_a_limit_makes_a_finding(run, capsys):
    assert main(["watch", "--once", str(run), "--limit", "underflow=0.03"]) == 0
    assert "input rowwise of up: 4 % underflow since step 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "needs"), [("underflw=1", "needs one of underflow, "), ("sqnr=x", "such as sqnr=12.0")]
)
def test_a_limit_that_is_none(given, needs, run, capsys):
    assert main(["watch", "--once", str(run), "--limit", given]) == 2
    assert needs in capsys.readouterr().err


@pytest.mark.slow
def test_in_a_terminal_watch_follows_the_run(run):
    pytest.importorskip("rich")
    ours, its = pty.openpty()
    environment = python_environment(TERM="xterm", COLUMNS="160", LINES="50")
    words = [sys.executable, "-c", ENTRY, "watch", str(run), "--every", "0.2"]
    words = ["env", "--default-signal=INT", *words]  # a shell's background jobs, such as these tests may be, ignore it
    watch = subprocess.Popen(words, stdout=its, stdin=its, stderr=its, env=environment)
    os.close(its)
    try:
        text = read_until(ours, "since step 20")
        assert "step 30, loss 2" in text and "gradient columnwise" in text
        with jlp.telemetry.Recorder(run / "telemetry.jsonl", every=10) as recorder:
            recorder.record(40, found(40), loss=1.5)
        assert "step 40, loss 1.5" in read_until(ours, "step 40, loss 1.5")
        watch.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # that is the end of a terminal; who does not read it stops the process
            read_until(ours, "no such words")
        assert watch.wait(timeout=300) == 130
    finally:
        watch.kill()
        os.close(ours)


def read_until(terminal, words):
    """What a terminal shows, up to these words."""
    text, ends = "", time.monotonic() + 600
    while words not in text:
        assert time.monotonic() < ends, text
        if select.select([terminal], [], [], 1)[0]:
            text += os.read(terminal, 4096).decode(errors="replace")
    return text


NAMES = ("\x1b]0;PWNED\x1b\\loss", "\x1b[31mbad", "\ud800", "<!--script-->", "<!--<script>", "</script>", "7" * 5000)
"""Names of layers and scalars that a terminal or a browser would take for something else."""


@pytest.fixture
def named(tmp_path):
    """A run whose scalars and layers have such names."""
    header = {"format": "jaxlowprec telemetry", "version": 1, "about": dict.fromkeys(NAMES, 1)}
    layers = {name: {"input rowwise": [1, 2, 3]} for name in NAMES}
    record = {"step": 1, "time": 1.0, "scalars": dict.fromkeys(NAMES, "inf"), "layers": layers}
    path = tmp_path / "n\udcff.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, record)))
    return path


def test_no_name_reaches_a_terminal_as_an_escape_sequence(named, capsys):
    for words in ((), ("--json",)):
        assert main(["watch", str(named), "--once", *words]) == 0
        assert "\x1b" not in capsys.readouterr().out
    rich = pytest.importorskip("rich.console")
    console = rich.Console(record=True, force_terminal=True, file=io.StringIO(), width=200)
    for shown in watch._shown(load(named), Limits(), 12)[:-1]:
        console.print(shown)
    text = console.file.getvalue()
    assert "PWNED" in text and "\x1b]" not in text and "\x1b[31mbad" not in text


def test_no_name_breaks_the_page(named, tmp_path):
    pytest.importorskip("vl_convert")
    out = tmp_path / "r.html"
    assert main(["report", str(named), "--out", str(out)]) == 0
    text = out.read_text("utf-8")
    data = text.partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    assert "<" not in data and set(json.loads(data)["runs"][0]["layers"]) == set(NAMES)
    assert text.count("<script") == 3 + text.partition("<script>")[2].partition("</script>")[0].count("<script")


def test_a_report_is_written_whole_or_not_at_all(named, tmp_path, capsys):
    pytest.importorskip("vl_convert")
    out, before = tmp_path / "r.html", resource.getrlimit(resource.RLIMIT_FSIZE)
    out.write_text("the old report")
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
        assert main(["report", str(named), "--out", str(out)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert out.read_text() == "the old report" and "File too large" in capsys.readouterr().err
