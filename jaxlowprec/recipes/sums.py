"""How devices add up the partial sums of a layer's GEMMs, as a recipe's field."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxlowprec.arguments import is_one_of, one_of, shown
from jaxlowprec.ops.sums.kinds import KINDS, SumKind, draws


@dataclasses.dataclass(frozen=True)
class Sums:
    """In how many bits the partial sums of each GEMM travel, where a mesh splits its contraction axis.

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

    def __post_init__(self):
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
