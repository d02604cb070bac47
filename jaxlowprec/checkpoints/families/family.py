"""What a family of models is."""

from __future__ import annotations

import dataclasses

from jaxlowprec.checkpoints.trees.mapping import TreeMapping


@dataclasses.dataclass(frozen=True)
class Family:
    """Models whose checkpoints have the same tensors.

    Attributes:
        title: their names, for readers.
        architectures: what their config.json has in `architectures`.
        mapping: the rules that do not depend on a config.
        sizes: the keys of the config that say how large an axis is, by the axis's name in layouts.
        splits_qkv: whether files have queries, keys and values apart, so that a tree that fuses them needs to know the
            numbers of heads.
        dense_first: the key of the config that says how many layers come before those with experts.
        draft_layers: whether files may have layers after the last, which predict further tokens; a tree without them
            leaves their tensors out.
        tied: whether the head is the embedding if the config does not say it.
    """

    title: str
    architectures: tuple[str, ...]
    mapping: TreeMapping
    sizes: tuple[tuple[str, str], ...] = (
        ("V", "vocab_size"),
        ("H", "num_attention_heads"),
        ("G", "num_key_value_heads"),
        ("d", "head_dim"),
    )
    splits_qkv: bool = True
    dense_first: str | None = None
    draft_layers: bool = False
    tied: bool = False
