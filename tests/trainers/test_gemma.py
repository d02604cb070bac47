"""docs/how-to/gemma.md: its program with the real packages, where they are."""

import importlib.util

import pytest

from tests.docs.pages import differs, pieces
from tests.helpers import run_python

if any(importlib.util.find_spec(name) is None for name in ("gemma", "kauldron")):
    pytest.skip("gemma or kauldron is missing", allow_module_level=True)

PAGE = "docs/how-to/gemma.md"
PIECES = pieces(PAGE)
TRAINING = PIECES[0]


def test_the_program_prints_what_the_page_shows():
    """Then the adapters' folder is merged into the base's by peft's rule, and has the logits of gemma's LoRA model."""
    printed = run_python("-c", "".join(piece.code for piece in PIECES) + MERGED).stdout
    assert not differs(printed, "".join(piece.shown for piece in PIECES)), printed


MERGED = """
from safetensors.numpy import load_file
from tests.checkpoints.small_models import merged

weights = load_file(folder / "hugging_face" / "model.safetensors")
assert set(pairs) == {name for name in weights if name.endswith("_proj.weight")}
adapted = gm.nn.LoRA(rank=4, model=exact, dtype=jnp.float32)
adapted = adapted.apply({"params": jax.tree.map(jnp.float32, state.params)}, sample).logits
assert abs(adapted - theirs).max() > 0.1
both = merged(folder / "hugging_face", folder / "adapters", folder / "merged")
np.testing.assert_allclose(decoders.load(both)(sample), adapted, rtol=0, atol=1e-5)
"""


def test_parameters_on_eight_devices_train_the_same():
    before = "    writer=None,\n"
    assert TRAINING.code.count(before) == 1
    sharded = (
        before + "    sharding=kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding(min_size_to_shard_mb=0)),\n"
    )
    code = TRAINING.code.replace(before, sharded)
    code += "\nassert len(state.params['layer_0']['mlp']['linear'].devices()) == 8\n"
    code += "assert not state.params['layer_0']['mlp']['linear'].is_fully_replicated\n"
    printed = run_python("-c", code, XLA_FLAGS="--xla_force_host_platform_device_count=8").stdout
    assert not differs(printed, TRAINING.shown), printed
