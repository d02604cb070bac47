"""Hostile command lines."""

import contextlib
import io
import os
import pathlib

from jaxlowprec.cli.main import main
from tests.hostile.of_checkpoints import checkpoint
from tests.hostile.target import Target

WORDS = (
    *("convert", "dequantize", "inspect", "info", "plain", "DST", "w4a16", "nvfp4", "gptq", "32", "0", "-1", "1e9"),
    *("--scheme", "--group-size", "--dry-run", "--json", "--verify", "--workers", "--ignore", "--include"),
    *("--no-defaults", "--leave-unfit", "--reference", "--plot", "9" * 5000, "re:(a+)+$", "re:[", "re:", ""),
    *("../plain", "/dev/null", "/proc/self/mem", "loop", "\x1b[31m"),
    *("--dtype", "float16", "bfloat16", "float128", "--", "-h", "\udcff", "a\nb", "٣"),
)


def command(data, folder):
    """Arguments with a zero byte between them. A status other than 0 says why, in a line and without a traceback."""
    if not (folder / "plain").exists():
        checkpoint(folder / "plain")
        (folder / "loop").symlink_to("loop")
    arguments = data.decode(errors="surrogateescape").split("\0")
    said = io.StringIO()
    before = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            status = main(arguments)
    except SystemExit as end:
        status = end.code
    finally:
        os.chdir(before)
    assert status in (0, 1, 2) and "Traceback" not in said.getvalue(), (status, said.getvalue()[-500:])
    if status:
        assert said.getvalue(), f"status {status} without a word"


def seeds():
    lines = (
        ("convert", "plain", "DST", "--scheme", "w4a16", "--dry-run"),
        ("inspect", "plain", "--json"),
        ("dequantize", "plain", "DST", "--dry-run"),
        ("info",),
    )
    return ["\0".join(line).encode() for line in lines]


def change(mutator, data):
    """A word more, less, in another's place, or other bytes."""
    if mutator.random.random() < 0.1:
        return mutator.bytes(data)
    words = data.split(b"\0")
    at = mutator.random.randrange(len(words) + 1)
    word = mutator.random.choice(WORDS).encode(errors="surrogateescape")
    how = mutator.random.choice(("insert", "replace", "delete"))
    rest = words[at:] if how == "insert" else words[at + 1 :]
    return b"\0".join([*words[:at], *([] if how == "delete" else [word]), *rest])


TARGETS = {"command": Target(command, seeds, (), change)}
