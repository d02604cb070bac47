"""The table of docs/how-to/lora.md is what benchmarks/lora_memory.py counts, and the programs of the page run."""

import importlib
import json

import jax
import pytest

from tests.package.test_readme import programs
from tests.scripts.stand_ins import SOURCE

BENCHMARKS = SOURCE / "benchmarks"
pytestmark = pytest.mark.skipif(not (BENCHMARKS / "tables.py").exists(), reason="not in the source tree")
FILE = BENCHMARKS / "results" / "lora_memory.json"


@pytest.fixture(scope="module")
def counted():
    """The benchmark's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("lora_memory")


def test_the_rows_are_what_the_trees_say(counted):
    recorded = json.loads(FILE.read_text())["results"]
    assert recorded["all parameters, float32"] == counted.kept({}, counted.parameters("float32"))
    for name, fmt in {"LoRA, bfloat16 kernels": None, "QLoRA, NVFP4": counted.FORMATS["NVFP4"]}.items():
        assert recorded[name] == counted.with_adapters(counted.parameters("bfloat16", fmt))
    assert recorded["all parameters, float32"]["trained"] == 4 * 8_030_261_248  # the parameters of Llama 3 8B


@pytest.mark.slow
def test_the_programs_of_the_page_run():
    names = {}
    for program in programs("docs/how-to/lora.md"):
        exec(program, names)
    assert all(jax.tree.map(lambda leaf: bool(jax.numpy.isfinite(leaf).all()), jax.tree.leaves(names["gradients"])))
    assert type(names["served"].up.kernel.get_value()).__name__ == "QuantizedArray"
