"""save_adapters: LoRA adapters in the form of the package peft."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jaxlowprec as jlp
from jaxlowprec.checkpoints import Rule, TreeMapping, mapping_for, save_adapters

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


def of_up(**leaves):
    """A tree with a kernel [8, 6] and these leaves beside it."""
    return {"layers": [{"mlp": {"up_proj": {"kernel": np.zeros((8, 6))} | leaves}}]}


def adapted(a=(8, 2), b=(2, 6)):
    return of_up(kernel_lora_a=np.zeros(a), kernel_lora_b=np.zeros(b))


LLAMA = mapping_for({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1})
EXPERTS = TreeMapping((Rule("up", "experts.{expert}.up.weight", "expert D N -> N D"),))


@pytest.mark.parametrize(
    ("mapping", "tree", "said"),
    [
        (LLAMA, of_up(), "has no leaves such as kernel_lora_a"),
        (LLAMA, of_up(kernel_lora_a=np.zeros((8, 2))), "needs layers.0.mlp.up_proj.kernel and both halves"),
        (LLAMA, of_up(gate_lora_a=np.zeros((8, 2)), gate_lora_b=np.zeros((2, 6))), "needs layers.0.mlp.up_proj.gate"),
        (LLAMA, adapted(a=(6, 2)), r"shape \(6, 2\) beside a kernel of shape \(8, 6\); needs \[K rank\]"),
        (LLAMA, adapted(b=(2, 8)), r"shape \(2, 8\) beside a kernel of shape \(8, 6\); needs \[rank N\]"),
        (LLAMA, adapted(b=(2, 3, 2)), r"shape \(2, 3, 2\)"),
        (EXPERTS, {"up": np.zeros((3, 8, 6)), "up_lora_a": 1, "up_lora_b": 1}, "none of experts"),
    ],
)
def test_adapters_that_have_no_place_are_refused(mapping, tree, said):
    with pytest.raises(ValueError, match=said):
        mapping.adapters(tree)


def test_joined_leaves_share_a_pair_also_if_one_has_no_adapter():
    paths = tuple(f"{part}_proj.kernel" for part in ("gate", "up"))
    mapping = TreeMapping((Rule(paths, "gate_up.weight", "D N -> +N D"),))
    a, b = pair(2)
    kernels = {f"{part}_proj": {"kernel": np.zeros((8, 6))} for part in ("gate", "up")}
    kernels["up_proj"] |= {"kernel_lora_a": a, "kernel_lora_b": b}
    down, up = mapping.adapters(kernels)["gate_up.weight"]
    np.testing.assert_allclose(down @ up, np.concatenate([np.zeros((8, 6)), a @ b], axis=1), rtol=1e-5, atol=1e-6)
    kernels["gate_proj"] |= {"kernel_lora_a": 2 * a, "kernel_lora_b": b}
    down, up = mapping.adapters(kernels)["gate_up.weight"]
    np.testing.assert_allclose(down @ up, np.concatenate([2 * a @ b, a @ b], axis=1), rtol=1e-5, atol=1e-6)


def test_those_of_add_lora_are_found_beside_quantised_kernels():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.q_proj = nnx.LinearGeneral(16, (2, 32), rngs=rngs)
            self.up_proj = nnx.Linear(64, 32, rngs=rngs)

    model = jlp.quantize_params(jlp.nnx.convert(Model(nnx.Rngs(0))), jlp.WeightQAT(jlp.NVFP4()))
    model = jlp.nnx.add_lora(model, rank=4, rngs=nnx.Rngs(1))
    for number, half in enumerate(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)).leaves):
        half[...] = jnp.sin(number + jnp.arange(half.size)).reshape(half.shape)
    kinds = "D N -> N D | D H d -> (H d) D"
    mapping = TreeMapping(tuple(Rule(f"{name}.kernel", f"{name}.weight", kinds) for name in ("q_proj", "up_proj")))
    pairs = mapping.adapters(model)
    for name in ("q_proj", "up_proj"):
        a, b = pairs[f"{name}.weight"]
        lora = getattr(model, name).lora
        np.testing.assert_array_equal(a, np.float32(lora.lora_a[...]))
        np.testing.assert_array_equal(b.reshape(4, -1), np.float32(lora.lora_b[...]))
