"""Eight bits with one scale per line along the quantised axis: what servers call W8A8, per token and per channel."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import one_of, shown
from jaxlowprec.arrays.formats import Float8, Format

Float8Rule = Literal["deploy", "cache", "w4afp8"]
Int8Rule = Literal["deploy", "compressed-tensors", "cache"]
LEAST_SCALE_SERVED = 1 / (448 * 512)
"""The least scale of a token's activations in vLLM's FP8 kernels."""
LEAST_SCALE_OF_CACHES = 1e-6
"""The least scale of a token's key or value in vLLM's caches."""
W4AFP8_GROUP = 128
"""Elements that share 15 numbers under the rule of 4-bit weights."""


class _Rows(Format):
    """The common part of the formats whose lines have a scale each."""

    scaling = "rows"
    least_scale: float = 0.0

    @property
    def caches(self) -> bool:
        """Whether its rule is that of caches of keys and values."""
        return self.scale_rule == "cache"

    @property
    def without_kernel(self) -> str:  # type: ignore[override]
        """See `Format`."""
        return "the rule of caches" if self.caches else ""

    @property
    def least(self) -> float:
        """See `Format`."""
        return float(np.float32(LEAST_SCALE_OF_CACHES)) if self.caches else self.least_scale

    @property
    def attributes(self) -> dict[str, Any]:
        """See `Format`. A kernel decodes codes without knowing by which rule they were chosen."""
        rule = "deploy" if self.element == "int8" else "up"
        named = {"scale_rule": rule, "block": np.int32(1)} if self.without_kernel else {}
        return {**super().attributes, **named, "least_scale": np.float32(self.least)}

    def _check_scale_dtype(self) -> None:
        """Raises ValueError for scales that are not float32 under a rule that has no others."""
        if self.without_kernel and self.scale_dtype != "float32":
            raise ValueError(
                f'{type(self).__name__}: rule="{self.scale_rule}" with scale_dtype={self.scale_dtype!r}; '
                f"{self.without_kernel} has float32 scales"
            )

    def _set_scale_dtype(self) -> None:
        """Sets the name of the field's dtype; raises ValueError for another than those of scales."""
        given: Any = self.scale_dtype
        with contextlib.suppress(TypeError):
            given = jnp.dtype(given).name
        one_of(type(self).__name__, "scale_dtype", given, "float32", "bfloat16", "float16")
        object.__setattr__(self, "scale_dtype", given)

    def __str__(self) -> str:
        words = [type(self).__name__]
        words += [self.element.upper()] if self.element == "e5m2" else []
        words += [self.scale_dtype] if self.scale_dtype != "float32" else []
        words += [f"{self.scale_rule} rule"] if self.scale_rule not in ("up", "deploy") else []
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class Float8Rows(_Rows):
    """8-bit floats, one scale per line: a row, or a column if the array is quantised along axis -2.

    A number decodes to `code * scale`. The scale is the line's amax over the largest element, and elements are divided
    by it, as vLLM and compressed-tensors do ("FP8_DYNAMIC"): a token's codes do not depend on the tokens beside it.

    Arguments:
        element: "e4m3" or "e5m2".
        scale_dtype: what scales are rounded to, before elements are divided: "float32" (activations), or "bfloat16" or
            "float16", as checkpoints hold the scales of weights in the model's dtype.
        least_scale: scales are no smaller. vLLM's kernels have 1 / (448 * 512) for activations. Gradients must not have
            it: their lines would underflow.
        rule: "deploy": that of activations and weights. "cache": that of keys and values in vLLM's
            `fp8_per_token_head` caches, whose least scale is 1e-6 and which multiplies by the scale's reciprocal.
            "w4afp8": 4-bit weights as vLLM's kernel for Hopper decodes them from files of the scheme `w4afp8`: each
            128 elements of a line have 15 numbers, rounded to E4M3, among them. The files hold 4 bits per element, and
            what is served is what these codes say; a GEMM takes them as any others. "cache" and "w4afp8" have no
            kernel: pure JAX quantises.

    Source: vLLM 0.32, compressed-tensors 0.20, `packed_scale_t` of CUTLASS; numerics.md 18.
    """

    element: Float8 = "e4m3"
    scale_dtype: str = "float32"
    least_scale: float = 0.0
    rule: Float8Rule = "deploy"

    def __post_init__(self) -> None:
        self._check("element", ("e4m3", "e5m2"))
        self._set_scale_dtype()
        value, limits = self.least_scale, np.finfo(np.float32)
        a_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not a_number or not (value == 0 or float(limits.tiny) <= value <= float(limits.max)):
            raise ValueError(
                f"Float8Rows: least_scale={shown(value)}; needs a finite number, 0 or more, that is 0 or normal in "
                "float32"
            )
        object.__setattr__(self, "least_scale", float(np.float32(value)))
        self._check("rule", ("deploy", "cache", "w4afp8"))
        self._check_scale_dtype()
        if self.without_kernel and (value or self.element != "e4m3"):
            raise ValueError(
                f'Float8Rows: rule="{self.rule}" with element={self.element!r}, least_scale={value}; it is a rule of '
                f"E4M3 with its own least scale, {self.least:.6g}: leave both out"
            )

    @property
    def in_groups(self) -> bool:
        """Whether its rule is that of 4-bit weights."""
        return self.rule == "w4afp8"

    @property
    def nearest_only(self) -> bool:
        """See `Format`."""
        return self.in_groups

    @property
    def pad(self) -> bool:  # type: ignore[override]
        """See `Format`."""
        return not self.in_groups

    @property
    def block(self) -> tuple[int, int]:  # type: ignore[override]
        """See `Format`: the elements that share 15 numbers, if its rule is that of 4-bit weights."""
        return 1, W4AFP8_GROUP if self.in_groups else 1

    @property
    def without_kernel(self) -> str:  # type: ignore[override]
        """See `Format`."""
        return "the rule of 4-bit weights" if self.in_groups else super().without_kernel

    @property
    def least(self) -> float:
        """See `Format`."""
        return float(8 * np.float32(LEAST_SCALE_SERVED)) if self.in_groups else super().least

    @property
    def scale_rule(self) -> Any:  # type: ignore[override]
        """See `Format`."""
        return "up" if self.rule == "deploy" else self.rule


@dataclasses.dataclass(frozen=True)
class Int8Rows(_Rows):
    """8-bit integers, one scale per line: a row, or a column if the array is quantised along axis -2.

    A number decodes to `code * scale`. A GEMM sums the products of codes exactly, in int32, so its bytes are the same
    on every platform, and vLLM's.

    Arguments:
        scale_dtype: of the stored scales: "float32" (activations), or "bfloat16" or "float16", as checkpoints hold the
            scales of weights in the model's dtype; elements are then divided by the rounded scale.
        rule: "deploy": codes from -127 to 127. "compressed-tensors": that tool's rule for weights, whose scale is
            the amax over 127.5, with codes from -128 on; for the second operand of a GEMM only. "cache": that of keys
            and values in vLLM's `int8_per_token_head` caches, as that of `Float8Rows`; halves round away from zero.

    Source: vLLM 0.32, compressed-tensors 0.20; numerics.md 18.
    """

    scale_dtype: str = "float32"
    rule: Int8Rule = "deploy"

    element = "int8"

    def __post_init__(self) -> None:
        self._check("rule", ("deploy", "compressed-tensors", "cache"))
        self._set_scale_dtype()
        self._check_scale_dtype()

    @property
    def scale_rule(self) -> Any:  # type: ignore[override]
        """See `Format`."""
        return self.rule
