"""The table of docs/how-to/memory.md is what the programs of benchmarks/checkpoint_policies.py keep and repeat."""

import dataclasses
import functools
import importlib
import json

import jax
import pytest

from jaxlowprec.wiring import native
from tests.docs.pages import differs, pieces, printed_by
from tests.scripts.stand_ins import SOURCE

BENCHMARKS = SOURCE / "benchmarks"
pytestmark = pytest.mark.skipif(not (BENCHMARKS / "tables.py").exists(), reason="not in the source tree")
FILE = BENCHMARKS / "results" / "checkpoint_policies.json"
POLICIES = [result["policy"] for result in json.loads(FILE.read_text())["results"]] if FILE.exists() else []


@pytest.fixture(scope="module")
def counted():
    """The benchmark's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("checkpoint_policies")


@functools.cache
def without_checkpoint(module):
    return module.kernel_calls(None, module.RECIPES[module.COUNTED])


def test_every_policy_is_in_the_table(counted):
    assert list(counted.POLICIES) == POLICIES and len(POLICIES) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_row_is_what_the_programs_say(counted, name):
    if native.isa() is None:
        pytest.skip("without kernels there are no calls to count")
    recorded = json.loads(FILE.read_text())
    row = next(result for result in recorded["results"] if result["policy"] == name)
    policy = counted.POLICIES[name]
    calls = counted.kernel_calls(policy, counted.RECIPES[counted.COUNTED])
    assert counted.again(calls, without_checkpoint(counted)) == row["again"]
    if policy is None and jax.__version__ != recorded["environment"]["versions"]["jax"]:
        return  # what XLA's own operations keep without a policy is JAX's choice
    for recipe, value in counted.RECIPES.items():
        assert dataclasses.asdict(counted.kept(policy, value)) == row["kept"][recipe]


def test_the_programs_of_the_page_print_what_it_shows():
    names = {}
    for piece in pieces("docs/how-to/memory.md"):
        assert not differs(printed_by(piece, "docs/how-to/memory.md", names), piece.shown)
    assert names["gradients"].shape == (4, 128, 128) and jax.numpy.isfinite(names["gradients"]).all()
    for name in ("everything", "only_products", "with_plain_dots", "offloaded"):
        layer = jax.checkpoint(names["block"], policy=names[name])
        found = jax.grad(lambda x, layer=layer: layer(x, names["kernels"][0]).sum())(names["x"])
        assert found.shape == names["x"].shape
