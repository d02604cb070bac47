"""What a layer is for, where its name alone cannot tell: routers and heads, which stay in high precision by default."""

from __future__ import annotations

import enum
import re

ROUTERS = r"(?i)(^|[/.])((\w*_)?(moe|experts?|rout\w*)_)?gate($|[/.])"
"""Of `DEFAULT_EXCLUDE`: the gates of mixtures of experts. A `gate` may be the projection of a gated MLP, too."""
HEADS = r"(?i)(^|[/.])((\w+_)?head|(\w+_)?logits?\w*|classifier)($|[/.])"
"""Of `DEFAULT_EXCLUDE`: the layers that compute logits."""

_GATE = re.compile(r"(?i)(^|[/.])gate$")
_PERHAPS_A_HEAD = re.compile(r"(?i)(^|[/.])(output|out|fc|decoder|predictions?)$")


class Use(enum.Enum):
    """What a layer is for, as far as it is known beyond its name; the value is what `explain` says."""

    UNKNOWN = ""
    ROUTER = "a router by its use"
    HEAD = "a head by its shape or use"
    PROJECTION = "no router by its shape or use"


def use_of(
    name: str,
    kernel: tuple[int, int] | None = None,
    *,
    has_twin: bool = False,
    vocabulary: int = 0,
    is_normalised: bool | None = None,
) -> Use:
    """What a layer is whose name may be that of a router, or of a head, but need not be.

    Arguments:
        name: its path in the model.
        kernel: (K, N), if they are known.
        has_twin: a layer beside it has a kernel of the same shape, as the `up` of a gated MLP.
        vocabulary: the number of rows of the model's embedding, if it is known.
        is_normalised: whether a softmax is taken along N; None if the result's use is not known.
    """
    if _GATE.search(name):
        if is_normalised is not None:
            return Use.ROUTER if is_normalised else Use.PROJECTION
        return Use.PROJECTION if has_twin or (kernel is not None and kernel[1] >= kernel[0]) else Use.UNKNOWN
    if _PERHAPS_A_HEAD.search(name):
        in_a_block = re.search(r"\d", name) is not None
        long = kernel is not None and kernel[1] == vocabulary and not in_a_block
        return Use.HEAD if is_normalised or long else Use.UNKNOWN
    return Use.UNKNOWN
