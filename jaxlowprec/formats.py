"""Number formats: what a tensor is quantised to.

A format is a frozen, hashable description, so that it can be a static argument, part of a pytree's structure and part
of jit's cache key. It holds no arrays. `xla_ffi/numerics` has the rules of each format to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

BLOCK = 16
"""Elements that share one NVFP4 block scale, along the contraction axis."""

DEFAULT_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs of NVIDIA's NVFP4 recipe (Transformer Engine): one fixed vector for all layers and steps."""


@dataclasses.dataclass(frozen=True)
class NVFP4:
    """4-bit E2M1 codes, an E4M3 scale a block, a float32 amax a tensor.

    A number decodes to `code * block_scale * amax / 2688`.

    Arguments:
        block: `(1, 16)`: 16 consecutive elements of the quantised axis share a scale (activations, gradients).
            `(16, 16)`: square tiles, so that an array and its transpose are quantised alike (weights).

    Source: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, appendix B.
    """

    block: tuple[int, int] = (1, BLOCK)

    bits: ClassVar[int] = 4

    def __post_init__(self):
        if self.block not in ((1, BLOCK), (BLOCK, BLOCK)):
            raise ValueError(f"NVFP4: block={self.block!r}; needs (1, 16) or (16, 16)")

    @property
    def tiles(self) -> bool:
        """Whether blocks are square tiles."""
        return self.block[0] > 1

    def __str__(self) -> str:
        return f"NVFP4 {self.block[0]}x{self.block[1]}"


@dataclasses.dataclass(frozen=True)
class Hadamard:
    """A random Hadamard transform: `((x * signs) @ H) / sqrt(size)` on each `size` consecutive elements of an axis.

    It is orthogonal, so it cancels in a GEMM whose operands are both rotated along the contraction axis.

    Arguments:
        size: 16, 32, 64, 128 or 256.
        signs: +1 or -1 for each of the `size` elements; a shorter pattern is repeated. None: no signs, plain H.
    """

    size: int = 16
    signs: tuple[int, ...] | None = DEFAULT_SIGNS

    def __post_init__(self):
        if self.size not in (16, 32, 64, 128, 256):
            raise ValueError(f"Hadamard: size={self.size!r}; needs 16, 32, 64, 128 or 256")
        if self.signs is None:
            return
        signs = tuple(self.signs) if isinstance(self.signs, Iterable) else ()
        if not signs or any(s not in (1, -1) for s in signs) or self.size % len(signs):
            raise ValueError(
                f"Hadamard: signs={self.signs!r}; needs {self.size} numbers that are +1 or -1, or a pattern whose "
                f"length divides {self.size}, or None for none"
            )
        object.__setattr__(self, "signs", tuple(int(s) for s in signs) * (self.size // len(signs)))

    @property
    def negative(self) -> tuple[int, ...]:
        """1 where the sign is -1, else 0; `size` of them."""
        return tuple(int(s < 0) for s in self.signs or (1,) * self.size)

    @property
    def mask(self) -> int:
        """The negative signs as a bit mask: bit i is element i's."""
        return sum(bit << i for i, bit in enumerate(self.negative))

    def __str__(self) -> str:
        return f"Hadamard({self.size}{'' if self.signs else ', plain'})"


def as_hadamard(who: str, hadamard: bool | Hadamard) -> Hadamard | None:
    """What a `hadamard=` argument means: True is the default transform, False none."""
    if isinstance(hadamard, Hadamard):
        return hadamard
    if isinstance(hadamard, bool):
        return Hadamard() if hadamard else None
    raise TypeError(f"{who}: hadamard={hadamard!r}; needs True, False or a jaxlowprec.Hadamard")
