"""What a decoder's linears and norms have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.models.decoder.config import DecoderConfig

INIT = nnx.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Makes the parts of a decoder.

    Attributes:
        config: sizes and options.
        dtype, param_dtype: of activations and parameters.
        rngs: of the initial parameters.
    """

    config: DecoderConfig
    dtype: Any
    param_dtype: Any
    rngs: nnx.Rngs

    @property
    def dtypes(self) -> dict[str, Any]:
        """Arguments of every layer."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": self.rngs}

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of every layer with kernels."""
        return {**self.dtypes, "kernel_init": INIT}

    def linear(self, inputs: int, outputs: int, bias: bool = False, **more: Any) -> jlp.nnx.Linear:
        """A linear that follows the recipe, or holds a quantised kernel."""
        return jlp.nnx.Linear(inputs, outputs, use_bias=bias, **self.options, **more)

    def norm(self, features: int, epsilon: float | None = None) -> jlp.nnx.RMSNorm:
        """A norm with the config's epsilon, or its own."""
        epsilon = self.config.epsilon if epsilon is None else epsilon
        centred = self.config.zero_centered
        return jlp.nnx.RMSNorm(features, epsilon=epsilon, zero_centered_scale=centred, **self.dtypes)

    def parameter(self, *shape: int) -> nnx.Param:
        """A random parameter that no layer has."""
        return nnx.Param(INIT(self.rngs.params(), shape, self.param_dtype))
