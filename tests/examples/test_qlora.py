"""examples/qlora.py as a user runs it, on what examples/train_lm.py trained."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.helpers import python_environment, run_python

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_adapters_learn_and_merge(tmp_path, text):
    out = tmp_path / "run"
    options = ("--steps", "20", "--batch", "2", "--recipe", "bf16", "--no-noise-floor")
    run_python(str(EXAMPLES / "train_lm.py"), "--text", text, "--out", str(out), *options)
    options = ("--steps", "20", "--batch", "2", "--format", "int4", "--rank", "4", "--tokens", "4")
    said = run_python(str(EXAMPLES / "qlora.py"), "--run", str(out), *options).stdout
    assert "blocks/0/up    128x512  Int4 1x32  -      -         loaded, adapter of rank 4" in said
    rows = re.findall(r"^(.{28}) +([\d.]+) +([\d.]+) *([\d.]*)%?$", said, re.MULTILINE)
    assert [row[0].strip() for row in rows] == [
        "int4, before",
        "int4, adapters applied",
        "adapters merged",
        "merged, int4 again",
    ]
    (size, loss), (_, learnt), (merged_size, _), (again, _) = ((float(row[1]), float(row[2])) for row in rows)
    assert learnt < 0.95 * loss
    assert again == size < 0.3 * merged_size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "no finished run of train_lm.py --recipe bf16"), (("--format", "int3"), "invalid choice: 'int3'")],
)
def test_a_wrong_argument_is_named(tmp_path, arguments, message):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "qlora.py"), "--run", str(tmp_path), *arguments],
        env=python_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr
