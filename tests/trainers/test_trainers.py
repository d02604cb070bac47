"""The programs of the page about trainers run with the real packages, and print what the page shows."""

import importlib.util
import re

import pytest

from tests.docs.pages import differs, pieces
from tests.helpers import run_python

PAGE = "docs/how-to/trainers.md"
PIECES = pieces(PAGE)
TRAINERS = ("keras", "keras_hub", "penzai")
MOST_ADDED = 10


def needed(code):
    """The trainers that a program imports."""
    return [name for name in TRAINERS if re.search(rf"^(import|from) {name}\b", code, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: "_".join(needed(piece.code)) or "explicit_mesh")
def test_a_program_prints_what_the_page_shows(piece):
    """In a process of its own: a backend, a number of devices and a mesh are for all of it."""
    for name in needed(piece.code):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is missing")
    printed = run_python("-c", piece.code).stdout
    assert not differs(printed, piece.shown), f"{PAGE}:{piece.line}: prints\n{printed}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("model.compile(", "model.layers[1].trainable = False"),  # the first block, behind the embedding
        ("model = ", "keras.distribution.set_distribution(keras.distribution.DataParallel())"),
    ],
    ids=["frozen", "data_parallel"],
)
def test_keras_layers_follow_the_rules_as_the_page_shows(before, line):
    (piece,) = (piece for piece in PIECES if needed(piece.code) == ["keras"])
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is missing")
    assert piece.code.count(before) == 1
    code = piece.code.replace(before, f"{line}\n{before}")
    printed = run_python("-c", code, XLA_FLAGS="--xla_force_host_platform_device_count=4").stdout
    table, loss = printed.split("loss ")
    assert table == piece.shown.split("loss ")[0]
    first, last = map(float, loss.split(" to "))
    assert last < 0.5 * first


def test_few_lines_are_added():
    for piece in PIECES:
        _, said, after = piece.code.partition("\n# added\n")
        assert said and piece.shown and after.partition("\n\n")[0].count("\n") < MOST_ADDED
