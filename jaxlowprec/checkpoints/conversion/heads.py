"""Embeddings and heads: what readers of a quantised checkpoint decode of them, and whether they are one weight."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxlowprec.checkpoints.conversion.rules import EMBEDDINGS, HEADS, KINDS, ROUTERS, SHARED_EXPERT_GATES, matching
from jaxlowprec.checkpoints.files.config import text_configs
from jaxlowprec.checkpoints.files.dtypes import same_bytes
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.schemes.mixed import CLASSES

NOT_LOOKED_UP = "an embedding, whose rows readers look up in high precision"
"""Why an embedding is left alone even where no rule says so: configurations name linear layers only."""

LM_HEAD = r"re:(.*\.)?lm_head(\.|$)"
"""The head of a model with tied embeddings, which has no tensor, wherever its module is."""

_HEAD = re.compile(r"(.*\.)?(lm_head|output_layer|embed_out)")
_TIED = "tie_word_embeddings"
_READ_BY = {
    HEADS: "transformers reads them in compressed-tensors' formats, vLLM and SGLang not in all formats and versions",
    ROUTERS: "vLLM, SGLang and transformers 5 hold them in high precision, and take codes for numbers",
    SHARED_EXPERT_GATES: "vLLM and SGLang hold them in high precision, and take codes for numbers",
}
_ELSE = "engines may hold them in high precision, and take codes for numbers"


def is_embedding(module: str) -> bool:
    """Whether a module is a table whose rows tokens or positions choose, by its name.

    >>> [is_embedding(name) for name in ("model.embed_tokens", "transformer.wpe", "embed_out", "time_embed.0")]
    [True, True, False, False]
    """
    return CLASSES["Embedding"](module)


def is_head(module: str) -> bool:
    """Whether a module is a head that a model may tie to its embedding, by its name."""
    return bool(_HEAD.fullmatch(module))


def reading_warnings(quantised: Collection[str]) -> list[str]:
    """A sentence for each kind of modules that the default rules leave alone, and that are quantised nevertheless."""
    found = []
    for rule, kind in KINDS.items():
        modules = sorted(module for module in quantised if matching(module, [rule]))
        if modules and rule != EMBEDDINGS:
            more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
            found.append(f"{kind} are quantised ({modules[0]}{more}): {_READ_BY.get(rule, _ELSE)}")
    return found


def with_true_tie(
    source: CheckpointFolder, config: dict[str, Any], changed: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """A config whose `tie_word_embeddings` is true of the new file, and a warning where it was not.

    Arguments:
        source: the source.
        config: the new config.
        changed: the modules whose format changes.
    """
    stored = {name.removesuffix(".weight") for name in source.shard_of if name.endswith(".weight")}
    head = next((module for module in sorted({*changed, *stored}) if is_head(module)), None)
    said = [place for place in text_configs(config) if place.get(_TIED) is True]
    if head is None or (head not in changed and (not said or shares_embedding(source, f"{head}.weight"))):
        return config, []
    config = copy.deepcopy(config)
    for place in text_configs(config):
        if place is config or place.get(_TIED) is True:
            place[_TIED] = False
    why = "is quantised" if head in changed else "differs from the embedding"
    warning = f"config.json says {_TIED}, but {head} has a weight of its own, which {why}: it says false now"
    return config, [warning] if said else []


def shares_embedding(source: CheckpointFolder, head: str) -> bool:
    """Whether a head's weight equals that of an embedding bit for bit."""
    return any(
        source.spec(name) == source.spec(head) and same_bytes(source.read(name), source.read(head))
        for name in source.shard_of
        if name.endswith(".weight") and is_embedding(name.removesuffix(".weight"))
    )


def only_copy(source: CheckpointFolder, config: Mapping[str, Any], quantised: Collection[str]) -> str | None:
    """A head that is to be quantised and is, in a model with tied embeddings, the only tensor of both."""
    tied = any(place.get(_TIED) is True for place in text_configs(dict(config)))
    if not tied or any(is_embedding(name.removesuffix(".weight")) for name in source.shard_of):
        return None
    return next((module for module in sorted(quantised) if is_head(module)), None)
