"""examples/qlora.py on what examples/train_lm.py trained."""

import re

import pytest
import qlora


@pytest.mark.slow
def test_adapters_learn_and_merge(trained_demo, program):
    options = ("--steps", "20", "--batch", "2", "--format", "int4", "--rank", "4", "--tokens", "4")
    said = program(qlora.main, "--run", trained_demo, *options)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "no finished run of train_lm.py --recipe bf16"), (("--format", "int3"), "invalid choice: 'int3'")],
)
def test_a_wrong_argument_is_named(tmp_path, refused_by, arguments, message):
    assert message in refused_by(qlora.main, "--run", tmp_path, *arguments)
