"""Trees of MaxText, tunix and the gemma package as those packages make them: captured/ has the trees, and numbers that
the packages' own converters read from a checkpoint, or the logits that their models compute.
"""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import CheckpointError, decoders, mapping_for, save
from jaxlowprec.checkpoints.trees.tree_paths import leaves
from tests.checkpoints.families.captured.capture import FOLDER, TOKENS, digest, numbers
from tests.checkpoints.families.trees import nested
from tests.helpers import assert_same_bytes
from tests.package.test_readme import programs

CAPTURED = {tree: json.loads((FOLDER / f"{tree}.json").read_text()) for tree in ("maxtext", "tunix", "flax_gemma")}


def over_models(*trees):
    found = [(tree, model) for tree in trees for model in CAPTURED[tree]["models"]]
    return pytest.mark.parametrize("tree, model", found, ids=[f"{tree}: {model}" for tree, model in found])


def abstract(captured):
    """The tree's leaves without numbers."""
    return nested({p: jax.ShapeDtypeStruct(leaf["shape"], jnp.float32) for p, leaf in captured["leaves"].items()})


@over_models("maxtext", "tunix")
class TestConverters:
    def test_leaves_are_those_of_the_trainers_own_converter(self, tree, model):
        captured = CAPTURED[tree]["models"][model]
        tensors = {name: numbers(name, shape).astype(ml_dtypes.bfloat16) for name, shape in captured["file"].items()}
        made = leaves(mapping_for(captured["config"], tree).from_tensors(tensors, abstract(captured)))
        found = {path: {"shape": list(leaf.shape), "digest": digest(leaf)} for path, leaf in made.items()}
        assert found == captured["leaves"]

    def test_and_go_back_to_the_same_file(self, tree, model):
        captured = CAPTURED[tree]["models"][model]
        tensors = {name: numbers(name, shape).astype(ml_dtypes.bfloat16) for name, shape in captured["file"].items()}
        mapping = mapping_for(captured["config"], tree)
        made = mapping.to_tensors(mapping.from_tensors(tensors, abstract(captured)), dtype="bfloat16")
        assert set(made) == set(tensors)
        assert_same_bytes(made, {name: tensors[name] for name in made})


CONTRACTED = {"out": "ab", "o_proj": "ab", "attn_vec_einsum": "ab"}
CONTRACTED |= {"q_einsum": "b", "kv_einsum": "c", "qkv_einsum": "c", "gating_einsum": "c"}
"""The axes of a kernel, from a on, that its product contracts, by the module. That of others is a."""


def adapter_of(tree, path, shape):
    """(A, B, their product with the kernel's axes), of rank 3, as the package makes them: MaxText's are matrices."""
    scanned = tree == "maxtext" and re.search(r"layers\.(layers_\d+\.)?[a-z]", path) is not None
    layers, own = (shape[1], (shape[0], *shape[2:])) if scanned else (1, shape)
    sizes = dict(zip("abcd", own, strict=False))
    inputs = CONTRACTED.get(re.sub(r"\.(kernel|w)$", "", path).split(".")[-1], "a")
    outputs = "".join(axis for axis in sizes if axis not in inputs)
    a = numbers(f"{path} a", (layers, *(sizes[axis] for axis in inputs), 3))
    b = numbers(f"{path} b", (layers, 3, *(sizes[axis] for axis in outputs)))
    product = np.einsum(f"l{inputs}r,lr{outputs}->l{''.join(sizes)}", a, b)
    if tree == "maxtext":
        a, b = a.reshape(layers, -1, 3), b.reshape(layers, 3, -1)
    return tuple(np.moveaxis(array, 0, 1) if scanned else array[0] for array in (a, b, product))


def half_of(tree, path, half):
    """The path of half an adapter."""
    if tree != "flax_gemma":
        return f"{path}_lora_{half}"
    module, _, parameter = path.rpartition(".")
    return f"{module}._LoRAEinsum_{'0' if parameter == 'w' else parameter}.lora.{half}"


@over_models("maxtext", "tunix", "flax_gemma")
def test_adapters_change_the_weights_as_they_change_the_leaves(tree, model):
    captured = CAPTURED[tree]["models"][model]
    mapping, base, moved, halves = mapping_for(captured["config"], tree), {}, {}, {}
    for path, leaf in captured["leaves"].items():
        base[path] = moved[path] = np.zeros(leaf["shape"], np.float32)
        if re.search(r"\.(mlp|self_attention|attn)\..*(kernel|w|linear|gating_einsum)$", path) and "norm" not in path:
            a, b, product = adapter_of(tree, path, leaf["shape"])
            halves |= {half_of(tree, path, "a"): a, half_of(tree, path, "b"): b}
            moved[path] = product.astype(np.float32)
    pairs = mapping.adapters(nested(base | halves))
    tensors = mapping.to_tensors(nested(moved), dtype="float32")
    changed = {name: tensor for name, tensor in tensors.items() if tensor.any() and "norm" not in name}
    assert set(pairs) == set(changed)
    for name, tensor in changed.items():
        a, b = (np.float64(half) for half in pairs[name])
        np.testing.assert_allclose(b.reshape(3, -1).T @ a.reshape(-1, 3).T, tensor, rtol=1e-5, atol=1e-5)


@over_models("flax_gemma")
class TestGemma:
    """The gemma package has no converter of such files: its model and a decoder of the file have the same logits."""

    def filled(self, captured):
        shapes = {path: leaf["shape"] for path, leaf in captured["leaves"].items()}
        return nested({path: numbers(path, shape).astype(np.float32) for path, shape in shapes.items()})

    def test_the_file_has_the_models_logits(self, tree, model, tmp_path):
        captured = CAPTURED[tree]["models"][model]
        mapping = mapping_for(captured["config"], tree)
        save(tmp_path / "saved", self.filled(captured), mapping, captured["config"])
        logits = decoders.load(tmp_path / "saved")(jnp.asarray([TOKENS]))[0]
        np.testing.assert_allclose(logits, captured["logits"], rtol=1e-4, atol=1e-4)

    def test_the_tree_comes_back(self, tree, model):
        captured = CAPTURED[tree]["models"][model]
        filled, mapping = self.filled(captured), mapping_for(captured["config"], tree)
        back = mapping.from_tensors(mapping.to_tensors(filled), abstract(captured))
        assert_same_bytes(back, jax.tree.map(jax.device_put, filled))


def test_gate_and_up_of_gemma_2_2b_are_not_transposed():
    """gm.nn.Gemma2_2B has [2, D, I], and all other models of the gemma package [2, I, D]."""
    config = CAPTURED["flax_gemma"]["models"]["Gemma 2"]["config"] | {"hidden_size": 2304}
    tensors = {f"model.layers.0.mlp.{part}_proj.weight": numbers(part, (8, 2304)) for part in ("gate", "up")}
    tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    tree = {"layer_0": {"mlp": {"gating_einsum": jnp.stack([tensor.T for tensor in tensors.values()])}}}
    assert_same_bytes(mapping_for(config, "flax_gemma").to_tensors(tree), tensors)


def test_gate_and_up_the_other_way_round_are_an_error():
    config = CAPTURED["flax_gemma"]["models"]["Gemma 2"]["config"]
    tree = {"layer_0": {"mlp": {"gating_einsum": np.ones((2, 16, 24), np.float32)}}}
    with pytest.raises(ValueError, match=r"layer_0.mlp.gating_einsum has .* its axis D has 24; needs 16"):
        mapping_for(config, "flax_gemma").to_tensors(tree)


def test_a_tree_that_is_not_known():
    with pytest.raises(CheckpointError, match=r"tree='maxtext' with Phi3ForCausalLM; known are .*maxtext: Qwen3"):
        mapping_for({"architectures": ["Phi3ForCausalLM"]}, "maxtext")


@pytest.mark.parametrize(
    "architecture, tree, trainer", [("Llama", "maxtext", "MaxText"), ("Gemma2", "flax_gemma", "the gemma package")]
)
def test_a_config_without_the_sizes_that_rules_need(architecture, tree, trainer):
    with pytest.raises(CheckpointError, match=f"hidden_size of the config is None; the tree of {trainer} follows"):
        mapping_for({"architectures": [f"{architecture}ForCausalLM"]}, tree)


def test_the_documents_examples():
    for program in programs("docs/how-to/models.md"):
        exec(program, {})
