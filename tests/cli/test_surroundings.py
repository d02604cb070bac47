"""The command where the system, the environment or the user's keyboard stops it: one line, and a status."""

import os
import signal
import subprocess
import sys

import pytest

from jaxlowprec.cli.main import main
from jaxlowprec.wiring import native
from tests.checkpoints.small_models import llama, write_checkpoint
from tests.cli.processes import ENTRY, command, one_line
from tests.helpers import python_environment


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source", llama(1), shards=2)


@pytest.mark.slow
def test_an_instruction_set_that_is_not_here(source):
    err = one_line(*command("inspect", source, JAXLOWPREC_ISA="bogus"))
    assert "JAXLOWPREC_ISA='bogus' is not available here; set it to one of " in err


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["bogus", "cuda"])
def test_a_platform_that_jax_cannot_start(source, tmp_path, platform):
    if platform == "cuda" and native.compute_capability():
        pytest.skip("there is a GPU here")
    variables = {"JAX_PLATFORMS": platform}
    status, out, err = command("info", **variables)
    assert status == 0 and f"none: JAX cannot use JAX_PLATFORMS={platform}: " in out and not err
    err = one_line(*command("convert", source, tmp_path / "low", "--scheme", "mxfp4", **variables))
    assert f"weights are quantised on the CPU: JAX cannot use JAX_PLATFORMS={platform}: " in err
    assert not (tmp_path / "low").exists()


@pytest.mark.slow
def test_a_working_folder_that_is_gone(source, tmp_path):
    gone = f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone"
    err = one_line(*command("convert", source, "low", "--scheme", "mxfp4", before=gone))
    assert err == "jaxlowprec convert: [Errno 2] No such file or directory: 'low'\n"


def test_links_that_point_to_each_other(capsys, source, tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    loop = tmp_path / "a"
    for arguments in (
        ["convert", str(source), str(loop), "--scheme", "mxfp4"],
        ["convert", str(source), str(loop / "low"), "--scheme", "mxfp4"],
        ["convert", str(loop), str(tmp_path / "low"), "--scheme", "mxfp4"],
        ["inspect", str(loop)],
    ):
        one_line(main(arguments), *capsys.readouterr())
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to("tokenizer.json")
    main(["convert", str(source), str(tmp_path / "low"), "--scheme", "mxfp4"])
    assert "files left out: tokenizer.json" in capsys.readouterr().out


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_named(source, tmp_path):
    err = one_line(*command("convert", source, tmp_path / "low", "--scheme", "mxfp4", before="ulimit -f 20"))
    assert "File too large: " in err and "model-00001-of-00002.safetensors" in err


@pytest.mark.slow
def test_too_many_files_are_named(tmp_path):
    source = write_checkpoint(tmp_path / "source", llama(4), shards=40)
    err = one_line(*command("inspect", source, before="ulimit -n 30"))
    assert ".safetensors: cannot be read: Too many open files; raise the limit of open files" in err


def test_deep_configs(capsys, source, tmp_path):
    for depth in (101, 995, 100_000):
        (source / "config.json").write_bytes(b'{"a":' * depth + b"0" + b"}" * depth)
        err = one_line(main(["convert", str(source), str(tmp_path / "x"), "--scheme", "mxfp4"]), *capsys.readouterr())
        assert "config.json" in err


def test_threads_that_the_system_does_not_start(capsys, source, tmp_path, monkeypatch):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refused)
    err = one_line(main(["convert", str(source), str(tmp_path / "x"), "--scheme", "mxfp4"]), *capsys.readouterr())
    assert "can't start new thread; give fewer workers" in err


def test_memory_that_is_not_there(capsys, source, monkeypatch):
    def refused(*_):
        raise MemoryError("Unable to allocate 1 TiB")

    monkeypatch.setattr("jaxlowprec.checkpoints.files.safetensors_file.memory", refused)
    err = one_line(main(["inspect", str(source)]), *capsys.readouterr())
    assert "out of memory (Unable to allocate 1 TiB)" in err


def importing(tmp_path, code):
    """The environment of a command whose import of jax does something else."""
    (tmp_path / "jax.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), python_environment()["PYTHONPATH"]])
    return python_environment(PYTHONPATH=path)


def test_an_interruption_while_modules_are_imported_is_one_line(tmp_path):
    code = "import os, time; os.write(1, b'.'); time.sleep(3600)"
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY, "info"],
        env=importing(tmp_path, code),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # what a shell starts in the background ignores it
    )
    process.stdout.read(1)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (130, b"", b"jaxlowprec: interrupted\n")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("open('/nowhere/\\u043a')", "[Errno 2] No such file or directory: '/nowhere/\\u043a'"),
    ],
)
def test_what_cannot_be_imported_is_one_line(tmp_path, code, reason):
    err = one_line(*command("info", PYTHONPATH=importing(tmp_path, code)["PYTHONPATH"]))
    assert err == f"jaxlowprec: cannot be started: {reason}\n"
