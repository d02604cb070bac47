"""Trees as trainers hold them, made of a checkpoint's tensors by hand, without a mapping."""

import collections
import re

import numpy as np

SPECIAL = {
    "mlp.gate.weight": "mlp.router.kernel",
    "block_sparse_moe.gate.weight": "mlp.router.kernel",
    "mlp.gate.e_score_correction_bias": "mlp.selection_bias",
    "mlp.experts.down_proj": "mlp.experts.down_proj.kernel",
    "mlp.experts.down_proj_bias": "mlp.experts.down_proj.bias",
}
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def leaves_of(tensors):
    """The leaves of a tree with Hugging Face's names without "model.", one for each layer, by their paths."""
    leaves, experts = {}, collections.defaultdict(dict)
    for name, tensor in tensors.items():
        path = name.removeprefix("model.")
        layer, _, module = re.fullmatch(r"((layers\.\d+\.)?)(.*)", path).groups()
        if match := re.fullmatch(r"\w+\.experts\.(\d+)\.(\w+)\.weight", module):
            experts[f"{layer}mlp.experts.{MIXTRAL.get(match[2], match[2])}.kernel"][int(match[1])] = tensor.T
        elif module in ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"):
            last = "bias" if module.endswith("bias") else "kernel"
            leaves[f"{layer}mlp.experts.gate_proj.{last}"] = tensor[..., ::2]
            leaves[f"{layer}mlp.experts.up_proj.{last}"] = tensor[..., 1::2]
        elif module in SPECIAL:
            leaves[layer + SPECIAL[module]] = tensor.T if module.endswith("gate.weight") else tensor
        elif module == "embed_tokens.weight":
            leaves["embed_tokens.embedding"] = tensor
        elif module.endswith(".weight") and tensor.ndim == 1:
            leaves[f"{layer}{module.removesuffix('weight')}scale"] = tensor
        elif module.endswith(".weight"):
            leaves[f"{layer}{module.removesuffix('weight')}kernel"] = tensor.T
        else:
            leaves[path] = tensor
    return leaves | {path: np.stack([each[e] for e in sorted(each)]) for path, each in experts.items()}


def with_heads(leaves, heads, groups):
    """Leaves of attention with an axis of heads."""
    made = {}
    for path, leaf in leaves.items():
        count = {"q": heads, "k": groups, "v": groups, "o": heads}.get(path.rpartition("self_attn.")[2][:1])
        if re.search(r"self_attn\.[qkv]_proj\.(kernel|bias)$", path):
            leaf = leaf.reshape(*leaf.shape[:-1], count, -1)
        elif path.endswith("self_attn.o_proj.kernel"):
            leaf = leaf.reshape(count, -1, leaf.shape[-1])
        made[path] = leaf
    return made


def fused(leaves, module, parts, kinds=("kernel", "bias")):
    """Leaves of parts of a module joined along their last axis; for q, k and v with heads along the axis before."""
    made = dict(leaves)
    for path in leaves:
        for kind in kinds:
            if path.endswith(f"{parts[0]}.{kind}"):
                at = path.removesuffix(f"{parts[0]}.{kind}")
                held = [made.pop(f"{at}{part}.{kind}") for part in parts]
                axis = -2 if held[0].ndim == (3 if kind == "kernel" else 2) and "qkv" in module else -1
                made[f"{at}{module}.{kind}"] = np.concatenate(held, axis)
    return made


def stacked(leaves, under=lambda layer: "layers"):
    """Leaves of all layers stacked; `under` says the path for a layer."""
    made, layers = {}, collections.defaultdict(list)
    for path, leaf in sorted(leaves.items(), key=lambda item: [int(n) for n in re.findall(r"layers\.(\d+)", item[0])]):
        if match := re.fullmatch(r"layers\.(\d+)\.(.*)", path):
            layers[f"{under(int(match[1]))}.{match[2]}"].append(leaf)
        else:
            made[path] = leaf
    return made | {path: np.stack(each) for path, each in layers.items()}


def nested(leaves):
    """A tree of leaves by their paths."""
    tree = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = leaf
    return tree
