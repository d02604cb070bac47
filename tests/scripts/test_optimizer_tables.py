"""The tables of optimizer states are what benchmarks/optimizer_memory.py counts, and the README says the same."""

import importlib
import json

import pytest

from tests.scripts.stand_ins import SOURCE

BENCHMARKS = SOURCE / "benchmarks"
pytestmark = pytest.mark.skipif(not (BENCHMARKS / "tables.py").exists(), reason="not in the source tree")


@pytest.fixture(scope="module")
def modules():
    """The benchmark and its tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("optimizer_memory"), importlib.import_module("memory_tables")


def test_the_rows_are_what_the_trees_say(modules):
    counted, _ = modules
    recorded = json.loads((BENCHMARKS / "results" / "optimizer_memory.json").read_text())
    assert recorded["model"]["elements"] == 8_030_261_248  # of Llama 3 8B
    rows = recorded["results"]
    assert rows == counted.counted()
    assert rows["float32"]["parameters"] == 4 * recorded["model"]["elements"]


def test_the_readme_has_the_smallest_and_the_largest(modules):
    _, tables = modules
    cells = {
        row.split("|")[1].strip(): row.split("|")[-2].strip() for row in tables.optimizer_bytes().splitlines()[2:-2]
    }
    saved = [row.split("|")[-3].strip() for row in tables.optimizer_bytes().splitlines() if "both" in row]
    assert saved[:3] == ["6.06", "5.06", "4.06"]  # checkpoints; float32 ones have 12
    both = [cells[f"both wrappers, {bits} bits"] for bits in (16, 32)]
    needed = (
        f"| {both[0]} to {both[1]} ({cells['float32'].removesuffix('.00')} in float32), for any optax transformation |"
    )
    assert needed in (SOURCE / "README.md").read_text()
