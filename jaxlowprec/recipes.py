"""Recipes: what a linear layer quantises, and how.

A recipe is a frozen, hashable description. It says for each role (`input`, `weight`, `gradient`) the format, the
rounding and the rotation, as data: `linear` reads nothing else, so a new recipe is a new set of roles. Being hashable,
it is part of jit's cache key, and a changed recipe is never ignored.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

from jaxlowprec.formats import NVFP4, Hadamard


@dataclasses.dataclass(frozen=True)
class Role:
    """How the tensors of one role are quantised.

    Attributes:
        format: what to.
        rounding: of the codes.
        hadamard: rotation of the columnwise form, for the GEMM (wgrad) whose operands are both columnwise; or None.
    """

    format: NVFP4
    rounding: Literal["nearest", "stochastic"] = "nearest"
    hadamard: Hadamard | None = None


class Recipe:
    """Base of all recipes.

    A linear has three GEMMs, each with its own pair of operands:
    fprop: input rowwise x weight; dgrad: gradient rowwise x weight transposed; wgrad: input columnwise x gradient
    columnwise.
    """

    @property
    def input(self) -> Role:
        """The layer's input."""
        raise NotImplementedError

    @property
    def weight(self) -> Role:
        """The layer's kernel."""
        raise NotImplementedError

    @property
    def gradient(self) -> Role:
        """The gradient of the layer's output."""
        raise NotImplementedError


def _default_from(variable: str) -> bool:
    value = os.environ.get(variable, "0").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"{variable}={value!r}; needs 0 or 1")


def _flag(name: str) -> bool:
    return dataclasses.field(default_factory=lambda: _default_from(f"JAXLOWPREC_NVFP4_DISABLE_{name}"))


@dataclasses.dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVIDIA's NVFP4 training recipe: all three GEMMs of a linear on 4-bit operands.

    | role | blocks | rounding | rotated in wgrad |
    |---|---|---|---|
    | input | 1x16 | nearest | yes |
    | weight | 16x16 | nearest | no |
    | gradient | 1x16 | stochastic | yes |

    Arguments:
        disable_rht: no random Hadamard transform of the wgrad operands.
        disable_stochastic_rounding: gradients round to nearest.
        disable_2d_quantization: weights in 1x16 blocks, quantised apart for fprop and dgrad.

    A default is 0, or what the environment says when the recipe is made: JAXLOWPREC_NVFP4_DISABLE_RHT,
    JAXLOWPREC_NVFP4_DISABLE_STOCHASTIC_ROUNDING, JAXLOWPREC_NVFP4_DISABLE_2D_QUANTIZATION.

    Raises:
        TypeError: a field that is not listed here, or is no bool.
        ValueError: an environment variable that is neither 0 nor 1.

    Source: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149; field names are Transformer Engine's.
    """

    disable_rht: bool = _flag("RHT")
    disable_stochastic_rounding: bool = _flag("STOCHASTIC_ROUNDING")
    disable_2d_quantization: bool = _flag("2D_QUANTIZATION")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise TypeError(f"NVFP4BlockScaling: {field.name}={value!r}; needs True or False")

    @property
    def _rotation(self) -> Hadamard | None:
        return None if self.disable_rht else Hadamard()

    @property
    def input(self) -> Role:
        """1x16 blocks, nearest, rotated in wgrad."""
        return Role(NVFP4(), hadamard=self._rotation)

    @property
    def weight(self) -> Role:
        """16x16 blocks, so that fprop and dgrad see the same weight; nearest, never rotated."""
        return Role(NVFP4((1, 16) if self.disable_2d_quantization else (16, 16)))

    @property
    def gradient(self) -> Role:
        """1x16 blocks, stochastic, rotated in wgrad."""
        return Role(NVFP4(), "nearest" if self.disable_stochastic_rounding else "stochastic", self._rotation)
