"""docs/how-to/gemma.md: its program with the real packages, where they are."""

import importlib.util

import pytest

from tests.docs.pages import differs, pieces
from tests.helpers import run_python

if any(importlib.util.find_spec(name) is None for name in ("gemma", "kauldron")):
    pytest.skip("gemma or kauldron is missing", allow_module_level=True)

PAGE = "docs/how-to/gemma.md"
(PIECE,) = pieces(PAGE)


def test_the_program_prints_what_the_page_shows():
    printed = run_python("-c", PIECE.code).stdout
    assert not differs(printed, PIECE.shown), printed


def test_parameters_on_eight_devices_train_the_same():
    before = "    writer=None,\n"
    assert PIECE.code.count(before) == 1
    sharded = (
        before + "    sharding=kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding(min_size_to_shard_mb=0)),\n"
    )
    code = (
        PIECE.code.replace(before, sharded) + "\nassert len(state.params['layer_0']['mlp']['linear'].devices()) == 8\n"
    )
    code += "assert not state.params['layer_0']['mlp']['linear'].is_fully_replicated\n"
    printed = run_python("-c", code, XLA_FLAGS="--xla_force_host_platform_device_count=8").stdout
    assert not differs(printed, PIECE.shown), printed
