"""Fields that recipes share: defaults from the environment, checks, what a layer is for, and sums over devices."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Sequence
from typing import Any

from jaxlowprec.arguments import is_one_of, one_of, shown
from jaxlowprec.ops.sums.kinds import KINDS, SumKind, draws

ROUTERS = r"(?i)(^|[/.])((\w*_)?(moe|experts?|rout\w*)_)?gate($|[/.])"
"""A pattern of `DEFAULT_EXCLUDE`: gates of mixtures of experts. A `gate` may be the projection of a gated MLP, too."""
HEADS = r"(?i)(^|[/.])((\w+_)?head|(\w+_)?logits?\w*|classifier)($|[/.])"
"""A pattern of `DEFAULT_EXCLUDE`: the layers that compute logits."""

_GATE = re.compile(r"(?i)(^|[/.])gate$")
_PERHAPS_A_HEAD = re.compile(r"(?i)(^|[/.])(output|out|fc|decoder|predictions?)$")


class Use(enum.Enum):
    """The use of a layer, as far as it is known beyond its name; the value is the text of `explain`."""

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
    """The use of a layer whose name may be that of a router or of a head, but need not be.

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


def environment_flag(variable: str, default: bool = False) -> bool:
    """The value of a yes-or-no variable in the environment; the default if it is not set.

    Raises:
        ValueError: the value is neither.
    """
    value = os.environ.get(variable, "").strip().lower()
    if not value:
        return default
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{variable}={value!r}; needs 0 or 1")


def flag(variable: str) -> Any:
    """A boolean field whose default is set by the environment variable JAXLOWPREC_ plus this name."""
    return dataclasses.field(default_factory=lambda: environment_flag(f"JAXLOWPREC_{variable}"))


def backward_override() -> Any:
    """A field whose default is set by JAXLOWPREC_BACKWARD_OVERRIDE."""
    return dataclasses.field(default_factory=lambda: os.environ.get("JAXLOWPREC_BACKWARD_OVERRIDE") or None)


def check_field(recipe: Any, field: str, allowed: tuple[Any, ...]) -> None:
    """Raises ValueError if a field's value, or its type, is not among the allowed ones."""
    value = getattr(recipe, field)
    if not is_one_of(value, allowed):
        needs = " or ".join(f'"{a}"' if isinstance(a, str) else str(a) for a in allowed)
        raise (TypeError if all(isinstance(a, bool) for a in allowed) else ValueError)(
            f"{type(recipe).__name__}: {field}={shown(value)}; needs {needs}"
        )


def check_one_override(recipe: Any) -> None:
    """Raises ValueError for another `forward_override` than there is, or one beside a `backward_override`."""
    check_field(recipe, "forward_override", (None, "high_precision"))
    forward, backward = recipe.forward_override, recipe.backward_override
    if forward is not None and backward is not None:
        raise ValueError(
            f"{type(recipe).__name__}: forward_override={forward!r} and backward_override={backward!r}, so nothing "
            "would be quantised; give one of them, or no recipe (recipe=None, autocast(enabled=False))"
        )


def check_patterns(who: str, field: str, given: Any) -> tuple[str, ...]:
    """Checks a field of regular expressions; returns them as a tuple."""
    patterns = tuple(given) if isinstance(given, list | tuple) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f'{who}: {field}={shown(given)}; needs a tuple of regular expressions, such as ("mlp/", "out$")'
        )
    for pattern in patterns:
        check_pattern(f"{who}: {field}", pattern)
    return patterns


def check_pattern(where: str, pattern: str) -> None:
    """Raises TypeError or ValueError unless it is a regular expression."""
    if not isinstance(pattern, str):
        raise TypeError(f"{where} has {shown(pattern)}; needs a regular expression as a text")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{where} has {shown(pattern)}, which is not a valid regular expression: {error}") from None


def is_chosen(name: str, include: Sequence[str], exclude: Sequence[str], use: Use = Use.UNKNOWN) -> bool:
    """Whether a pattern of `include` is found in the name and none of `exclude` is.

    Arguments:
        use: what the layer is: of a router or head it is as if its name said so, of a projection as if it did not.
    """
    if (use is Use.ROUTER and ROUTERS in exclude) or (use is Use.HEAD and HEADS in exclude):
        return False
    if use is Use.PROJECTION:
        exclude = [pattern for pattern in exclude if pattern != ROUTERS]
    return any(re.search(p, name) for p in include) and not any(re.search(p, name) for p in exclude)


@dataclasses.dataclass(frozen=True)
class Sums:
    """The bits in which the partial sums of each GEMM travel, where a mesh splits its contraction axis.

    | GEMM | result | its partial sums are added up under |
    |---|---|---|
    | fprop | activations | tensor and sequence parallelism, in layers whose kernel is split along K |
    | dgrad | their gradients | the same, in layers whose kernel is split along N |
    | wgrad | the kernel's gradient | data parallelism and FSDP |

    | value | each device sends, a number | error of a sum over 8 devices |
    |---|---|---|
    | "float32" | 4 bytes | that of float32 |
    | "bfloat16" | 2 bytes, each partial sum rounded to nearest | 0.2 % |
    | "bfloat16_stochastic" | 2 bytes, each partial sum rounded stochastically | 0.3 %, unbiased |
    | "quantized" | 1.03 bytes: MXFP8, rounded stochastically | 3.7 %, unbiased; 5.3 % where all devices have the sum |

    Quantised sums are added up in float32 in the order of the contraction axis: the bytes do not depend on which device
    has which part. A result that is scattered over some mesh axes and added up over others, too, is quantised for each
    of these sums: 6.4 %. GEMMs in high precision, quantisation-aware training and experts add up in float32.

    Arguments:
        fprop, dgrad, wgrad: one of those values.

    Raises:
        ValueError: a field has another value.

    Source: numerics.md 16. Errors: relative, of the Frobenius norm, of partial sums that are normally distributed
        (`tests/ops/sums`).

    >>> import jaxlowprec as jlp
    >>> jlp.NVFP4BlockScaling(sums=jlp.Sums(fprop="bfloat16", dgrad="bfloat16")).sums.wgrad
    'float32'
    >>> jlp.MXFP8BlockScaling(sums="quantized").sums
    Sums(fprop='quantized', dgrad='quantized', wgrad='quantized')
    """

    fprop: SumKind = "float32"
    dgrad: SumKind = "float32"
    wgrad: SumKind = "float32"

    def __post_init__(self) -> None:
        for gemm in ("fprop", "dgrad", "wgrad"):
            one_of("Sums", gemm, getattr(self, gemm), *KINDS)

    @property
    def drawn(self) -> bool:
        """Whether any sum takes random bits."""
        return any(draws(kind) for kind in (self.fprop, self.dgrad, self.wgrad))


IN_FLOAT32 = Sums()


def check_sums(recipe: Any) -> None:
    """Checks a recipe's field `sums`, and makes one value those of all GEMMs.

    Raises:
        TypeError: it is neither `Sums` nor a kind of sum.
    """
    given = recipe.sums
    if isinstance(given, Sums):
        return
    if not is_one_of(given, KINDS):
        needs = ", ".join(f'"{kind}"' for kind in KINDS)
        raise TypeError(f"{type(recipe).__name__}: sums={shown(given)}; needs {needs}, or jaxlowprec.Sums")
    object.__setattr__(recipe, "sums", Sums(given, given, given))
