"""LoRA adapters: those in a trainer's tree, with names and order of rows as in Hugging Face's weights; and a folder in
the form of the package peft, which servers load beside the model's own folder.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.files.safetensors_file import write_tensors
from jaxlowprec.checkpoints.trees.groups import Group, Place, groups
from jaxlowprec.checkpoints.trees.layout import PLUS, Layout, Moves, flat, joined
from jaxlowprec.checkpoints.trees.rule import Rule
from jaxlowprec.checkpoints.trees.tree_paths import on_host

Pair = tuple[np.ndarray, np.ndarray]
"""A and B."""

_WHO, _END = "save_adapters", ".weight"
_HALVES = (
    (r"(.+)_lora_[ab]", r"\1"),  # qwix
    (r"(.+)\.lora\.lora_[ab]", r"\1.kernel"),  # jaxlowprec.nnx.add_lora
    (r"(.+)\._LoRAEinsum_0\.lora\.[ab]", r"\1.w"),  # the gemma package: modules, and
    (r"(.+)\._LoRAEinsum_(\w+)\.lora\.[ab]", r"\1.\2"),  # parameters
)
"""Paths of halves of adapters, and their kernels'."""
_RANK = "rank"


def _kernel_of(path: str) -> str | None:
    """The path of the kernel that a leaf is half of an adapter of; None if the leaf is something else.

    >>> _kernel_of("mlp.wo.kernel_lora_a"), _kernel_of("mlp.wo.lora.lora_b"), _kernel_of("mlp.wo.kernel")
    ('mlp.wo.kernel', 'mlp.wo.kernel', None)
    >>> _kernel_of("attn.q_einsum._LoRAEinsum_0.lora.a"), _kernel_of("mlp._LoRAEinsum_linear.lora.b")
    ('attn.q_einsum.w', 'mlp.linear')
    """
    for pattern, kernel in _HALVES:
        if half := re.fullmatch(pattern, path):
            return half.expand(kernel)
    return None


def pairs_of(rules: Sequence[Rule], found: Mapping[str, Any]) -> dict[str, Pair]:
    """The adapters among a tree's leaves, as `TreeMapping.adapters` returns them."""
    who = "adapters"
    halves: dict[str, list[str]] = {}
    for path in found:
        if (kernel := _kernel_of(path)) is not None:
            halves.setdefault(kernel, []).append(path)
    for kernel, paths in halves.items():
        if len(paths) != 2 or kernel not in found:
            raise ValueError(f"{who}: the tree has {', '.join(paths)}; needs {kernel} and both halves of its adapter")
    if not halves:
        raise ValueError(f"{who}: the tree has no leaves such as kernel_lora_a; needs a model with adapters")
    adapters = {
        kernel: [(path, np.asarray(on_host(path, found[path]), np.float32)) for path in sorted(paths)]
        for kernel, paths in halves.items()
    }
    joining = [rule for rule in rules if len(rule.paths) > 1]
    kernels = {path: leaf for path, leaf in found.items() if path in halves or any(r.bound(path) for r in joining)}
    pairs = {}
    for group in groups(who, rules, kernels):
        if adapters.keys().isdisjoint(group.paths):
            continue
        if group.rule.of_experts or not group.rule.is_kernel:
            raise ValueError(
                f"{who}: {group.path} has an adapter and is {', '.join(group.names)} in the file; needs a kernel, and "
                "none of experts: give embeddings and experts no adapters"
            )
        for place in group.places():
            pairs[place.name] = _pair(who, group, place, adapters)
    return pairs


def _pair(who: str, group: Group, place: Place, adapters: Mapping[str, Sequence[tuple[str, np.ndarray]]]) -> Pair:
    """A and B beside a tensor. Leaves that are joined to it have theirs side by side in A, and on B's diagonal."""
    outputs, downs, ups = group.layout.right[0], [], []
    for path, leaf in zip(group.paths, group.moves, strict=True):
        if path in adapters:
            a, b = adapters[path]
            downs.append(_moves(who, leaf, *a, outputs=False).out(a[1], place.counts))
            up = _moves(who, leaf, *b, outputs=True).out(b[1], place.counts, place.part)
            ups.append(up / np.float32(group.rule.factor))
        else:
            sizes = leaf.file_sizes()
            ups.append(np.zeros((0, *(sizes[axis] for axis in outputs if axis != PLUS)), np.float32))
    ranks, blocks = [len(up) for up in ups], []
    for n, up in enumerate(ups):
        blocks.append(np.pad(up, [(sum(ranks[:n]), sum(ranks[n + 1 :])), *[(0, 0)] * (up.ndim - 1)]))
    axis = None if group.layout.splits_leaf else group.layout.joined
    return np.concatenate(downs, axis=-1), joined(blocks, (_RANK, *outputs), axis)


def _moves(who: str, moves: Moves, path: str, half: np.ndarray, outputs: bool) -> Moves:
    """How half an adapter becomes a matrix of the rank and of the weight's outputs or inputs.

    The half has the kernel's inputs or outputs in their order, or merged to one axis; the axes that count layers are
    where the kernel has them.

    Arguments:
        who, path: for errors.
        moves: the kernel's.
        half: A or B.
        outputs: whether it is B, whose first axis is the rank, and not A, which has it last.
    """
    kernel, shape = moves.layout, half.shape
    axes = [axis for axis in kernel.right[0 if outputs else 1] if axis != PLUS]
    splits = outputs and kernel.splits_leaf
    left = [each for each in kernel.left if set(each) & {*axes, *((PLUS,) if splits else ())}]
    if len(shape) == 2 + len(kernel.counted) and (PLUS,) not in left:
        left = [flat(tuple(left))]
    right = [(axis,) for axis in axes]
    for side in left, right:
        side.insert(0 if outputs else len(side), (_RANK,))
    for at, each in enumerate(kernel.left):
        if each[0] in kernel.counted:
            left.insert(at, each)
    text = " ".join(each[0] if len(each) == 1 else f"({' '.join(each)})" for each in left)
    sizes = moves.file_sizes()
    known = tuple((axis, sizes[axis]) for axis in axes if axis != kernel.joined)
    layout = Layout(text, tuple(left), tuple(right), kernel.joined if splits else None, splits)
    made = Moves(layout, shape, moves.shares if splits else (1,), known, moves.padded)
    if len(shape) != len(left) or made.counts != moves.counts or not _agree(made, moves):
        raise ValueError(f"{who}: {path} has shape {shape} beside a kernel of shape {moves.shape}; needs [{text}]")
    return made


def _agree(made: Moves, kernel: Moves) -> bool:
    """Whether half an adapter fits its layout, and each part has the size that the kernel's part has."""
    try:
        pairs = [(made.file_sizes(part), kernel.file_sizes(part)) for part in range(len(kernel.shares))]
    except ValueError:
        return False
    return all(ours | theirs == theirs | ours for ours, theirs in pairs)


def save_adapters(
    folder: str | os.PathLike[str],
    adapters: Mapping[str, tuple[Any, Any]],
    *,
    rank: int,
    alpha: float,
    base: str | os.PathLike[str] = "",
) -> None:
    """Writes LoRA adapters in the form of the package peft, float32: adapter_model.safetensors and adapter_config.json.

    Arguments:
        folder: to be made, or whose files of these names are replaced.
        adapters: the two arrays of each adapter, by the name that the weight has in the model's checkpoint, such as
            "model.layers.0.mlp.up_proj.weight": A [K..., rank] and B [rank, N...]. Several axes of inputs or outputs
            count as one, in their order.
        rank: of the adapters. One of another rank is named in the config.
        alpha: an adapter adds alpha / rank times x A B to its layer's output, also one of another rank.
        base: the name or the folder of the model.

    Raises:
        ValueError: there are no adapters, a name does not end with ".weight", or A and B have different ranks.

    >>> import jax.numpy as jnp, jaxlowprec as jlp, tempfile
    >>> pair = jnp.ones((64, 8)), jnp.zeros((8, 4, 32))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     adapters = {"model.layers.0.self_attn.q_proj.weight": pair}
    ...     jlp.checkpoints.save_adapters(folder, adapters, rank=8, alpha=16)
    """
    if not adapters:
        raise ValueError(f"{_WHO}: there are no adapters; needs one or more")
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, dict[str, int]] = {}
    for name, pair in adapters.items():
        if not name.endswith(_END):
            raise ValueError(f"{_WHO}: needs the names of weights, which end with '{_END}'; got {name!r}")
        a, b = (np.asarray(half, np.float32) for half in pair)
        own = a.shape[-1]
        if min(a.ndim, b.ndim) < 2 or b.shape[0] != own:
            raise ValueError(
                f"{_WHO}: {name} needs A [K..., rank] and B [rank, N...]; got shapes {a.shape} and {b.shape}"
            )
        module = name.removesuffix(_END)
        for letter, matrix in (("A", a.reshape(-1, own)), ("B", b.reshape(own, -1))):
            tensors[f"base_model.model.{module}.lora_{letter}{_END}"] = np.ascontiguousarray(matrix.T)
        ranks.setdefault(module.rpartition(".")[2], {})[module] = own
    others: dict[str, int] = {}
    for last, found in ranks.items():  # modules of one name that share a rank are one entry
        entries = found if len(set(found.values())) > 1 else {last: next(iter(found.values()))}
        others |= {module: own for module, own in entries.items() if own != rank}
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {module: alpha * own / rank for module, own in others.items()},
    }
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(path / "adapter_model.safetensors", tensors)
    (path / "adapter_config.json").write_text(json.dumps(said, indent=2) + "\n")
