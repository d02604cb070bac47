"""save_adapters: LoRA adapters in the form of the package peft."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxlowprec.checkpoints import save_adapters

UP, QUERY = "model.layers.{}.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"


def pair(rank, inputs=(8,), outputs=(6,)):
    rng = np.random.default_rng(rank)
    return rng.standard_normal((*inputs, rank)), rng.standard_normal((rank, *outputs))


def test_axes_of_inputs_and_of_outputs_become_one(tmp_path):
    a, b = pair(2, (4, 2), (3, 5))
    save_adapters(tmp_path / "new", {QUERY: (a, b)}, rank=2, alpha=8.0, base="model")
    held = load_file(tmp_path / "new" / "adapter_model.safetensors")
    ours = [held[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight"] for part in "AB"]
    assert [(array.shape, array.dtype) for array in ours] == [((2, 8), np.float32), ((15, 2), np.float32)]
    np.testing.assert_allclose(ours[1] @ ours[0], np.einsum("ijr,rkl->klij", a, b).reshape(15, 8), rtol=1e-5, atol=1e-6)
    said = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"]) == (2, 8.0, ["q_proj"])
    assert said["base_model_name_or_path"] == "model" and not said["rank_pattern"]


def test_other_ranks_are_named_by_module_or_by_last_name(tmp_path):
    mixed = {UP.format(0): pair(2), UP.format(1): pair(4), QUERY: pair(3)}
    save_adapters(tmp_path, mixed, rank=2, alpha=8.0)
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert said["rank_pattern"] == {"model.layers.1.mlp.up_proj": 4, "q_proj": 3}
    assert said["alpha_pattern"] == {"model.layers.1.mlp.up_proj": 16.0, "q_proj": 12.0}


@pytest.mark.parametrize(
    ("adapters", "said"),
    [
        ({}, "no adapters"),
        ({"q_proj": pair(2)}, "end with '.weight'"),
        ({QUERY: (pair(2)[0], pair(3)[1])}, r"got shapes \(8, 2\) and \(3, 6\)"),
    ],
)
def test_wrong_adapters_are_refused(adapters, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        save_adapters(tmp_path / "new", adapters, rank=2, alpha=4.0)
    assert not (tmp_path / "new").exists()
