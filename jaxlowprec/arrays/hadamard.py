"""Hadamard: the rotation that is applied to an array before it is quantised."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import one_of, shown

DEFAULT_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs of NVIDIA's NVFP4 recipe (Transformer Engine): one fixed vector for all layers and steps."""

DRAWN_SIGNS = 128
"""How many signs a key draws: those of the longest transform that has such signs."""


@dataclasses.dataclass(frozen=True)
class Hadamard:
    """A random Hadamard transform: `((x * signs) @ H) / sqrt(size)` on each `size` consecutive elements of an axis.

    It is orthogonal, so it cancels in a GEMM whose operands are both rotated along the contraction axis.

    Arguments:
        size: 16, 32, 64, 128 or 256.
        signs: +1 or -1 for each of the `size` elements; a shorter pattern is repeated. None: no signs, plain H.
            "drawn", for sizes up to 128: from the key that `quantize` and `hadamard_transform` take as `sign_key=`, so
            that each step has other signs and none compiles anew.

    Source: numerics.md 3 and 15.
    """

    size: int = 16
    signs: tuple[int, ...] | Literal["drawn"] | None = DEFAULT_SIGNS

    def __post_init__(self) -> None:
        one_of("Hadamard", "size", self.size, 16, 32, 64, 128, 256)
        if self.signs is None or (self.signs is DEFAULT_SIGNS and self.size == len(DEFAULT_SIGNS)):
            return
        if self.drawn:
            if self.size > DRAWN_SIGNS:
                raise ValueError(
                    f'Hadamard: size={self.size} and signs="drawn"; a key draws {DRAWN_SIGNS} signs: use '
                    f"size={DRAWN_SIGNS} or less, or fixed signs"
                )
            return
        signs = _numbers(self.signs)
        if not signs or any(s not in (1, -1) for s in signs) or self.size % len(signs):
            raise ValueError(
                f"Hadamard: signs={shown(self.signs)}; needs {self.size} numbers that are +1 or -1, or a pattern whose "
                f'length divides {self.size}, or None for none, or "drawn"'
            )
        object.__setattr__(self, "signs", tuple(int(s) for s in signs) * (self.size // len(signs)))

    def padded(self, length: Any) -> Any:
        """The length of an axis, padded to whole transforms; written so that JAX knows it of a symbolic length, too.

        >>> Hadamard(16).padded(17)
        32
        """
        return -(-length // self.size) * self.size

    @property
    def drawn(self) -> bool:
        """Whether the signs are drawn from a key."""
        return isinstance(self.signs, str) and self.signs == "drawn"

    @property
    def in_pass(self) -> bool:
        """Whether the kernels of NVFP4 rotate in the pass that quantises or decodes; others rotate apart."""
        return self.size == len(DEFAULT_SIGNS) and not self.drawn

    @property
    def negative(self) -> tuple[int, ...]:
        """1 where the sign is -1, else 0; `size` of them.

        Raises:
            ValueError: the signs are drawn.
        """
        if isinstance(self.signs, str):
            raise ValueError(f"{self}: its signs are known once a key draws them: see `QuantizedArray.signs`")
        return tuple(int(s < 0) for s in self.signs or (1,) * self.size)

    @property
    def mask(self) -> int:
        """The negative signs as a bit mask: bit i is element i's. Raises as `negative`."""
        return sum(bit << i for i, bit in enumerate(self.negative))

    def __str__(self) -> str:
        return f"Hadamard({self.size}{', drawn' if self.drawn else '' if self.signs else ', plain'})"


def _numbers(given: Any) -> tuple[Any, ...]:
    """The given numbers as a tuple; empty where it is something else."""
    if isinstance(given, jax.core.Tracer):  # signs are static
        return ()
    if isinstance(given, jax.Array | np.ndarray | np.generic):
        given = given.tolist() if jnp.issubdtype(given.dtype, jnp.number) else ()
    values = tuple(itertools.islice(given, 257)) if isinstance(given, Iterable) else ()
    return values if all(isinstance(v, int | float | np.number) for v in values) else ()


def as_hadamard(who: str, hadamard: bool | Hadamard) -> Hadamard | None:
    """The transform that a `hadamard=` argument means: True is the default one, False is None."""
    if isinstance(hadamard, Hadamard):
        return hadamard
    if isinstance(hadamard, bool):
        return Hadamard() if hadamard else None
    raise TypeError(f"{who}: hadamard={shown(hadamard)}; needs True, False or a jaxlowprec.Hadamard")
