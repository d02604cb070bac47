"""The threat model says how many hostile inputs are tried: its numbers are counted here, from what draws them."""

import math
import re

from tests.hostile.targets import TARGETS
from tests.hostile.test_campaign import SHORT, cases_of
from tests.layers.delayed_scaling import test_optimizers
from tests.low_precision import STRUCTURES
from tests.models import test_accumulation_layouts
from tests.package.test_readme import ROOT
from tests.telemetry import test_hostile_numbers

GROUPS = {
    "GGUF files, and folders that become one": ("gguf", "to_gguf"),
    "`config.json` of decoders of every family": ("decoder_config",),
    "regular expressions in a checkpoint's config": ("patterns",),
    "telemetry records": ("telemetry",),
    "logs of `find_policy`": ("policy_log",),
}


def without_marks(params):
    return [case for case in params if not case.marks]


def parametrised(module):
    """How many cases the tests of a module have together, all of which a default run has."""
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    marks = [[m for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"] for test in tests]
    assert not any(m.name == "slow" for test in tests for m in getattr(test, "pytestmark", ()))
    return sum(math.prod(len(mark.args[1]) for mark in of_test) for of_test in marks)


def rows():
    """Each kind of input, with the cases of a default run and of a slow one."""
    named = {name for names in GROUPS.values() for name in names}
    others = "checkpoints, weight syncs, servers' answers, command lines"
    for kind, targets in {**GROUPS, others: tuple(name for name in TARGETS if name not in named)}.items():
        short = sum(SHORT.get(name, 0) for name in targets)
        yield kind, short, sum(map(cases_of, targets)), "tests/hostile/test_campaign.py"
    numbers = list(test_hostile_numbers.cases())
    yield (
        "hostile numbers under telemetry, times recipes",
        len(without_marks(numbers)),
        len(numbers),
        "tests/telemetry/test_hostile_numbers.py",
    )
    layouts = list(test_accumulation_layouts.chosen())
    assert len(layouts) == len(test_accumulation_layouts.LAYOUTS) * len(STRUCTURES)
    yield (
        "layouts of a kernel times structures of a recipe",
        len(without_marks(layouts)),
        len(layouts),
        "tests/models/test_accumulation_layouts.py",
    )
    optimizers = parametrised(test_optimizers)
    yield (
        "optimizers around the state of delayed scaling",
        optimizers,
        optimizers,
        "tests/layers/delayed_scaling/test_optimizers.py",
    )


def test_the_table_of_the_threat_model_says_what_is_tried():
    page = (ROOT / "docs/explanation/threat_model.md").read_text()
    table = re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d,]+) \| `(.+?)` \|$", page, re.MULTILINE)
    assert table == [(kind, f"{short:,}", f"{slow:,}", where) for kind, short, slow, where in rows()]
