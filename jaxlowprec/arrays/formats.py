"""Number formats: what a tensor is quantised to.

A format is a frozen, hashable description, so that it can be a static argument, part of a pytree's structure and part
of jit's cache key. It holds no arrays. `xla_ffi/numerics` has the rules of each format to the bit.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxlowprec.arguments import a_flag, one_of, shown

BLOCK = 16
"""Elements that share one NVFP4 block scale. Random bytes of stochastic rounding come by as many."""

Float8 = Literal["e4m3", "e5m2"]
ScaleRule = Literal["up", "floor", "even", "six", "four_over_six", "four_over_six_mse", "search"]
Int4Rule = Literal["deploy", "slime", "compressed-tensors"]


@dataclasses.dataclass(frozen=True)
class Element:
    """The numbers that codes of one type stand for.

    Attributes:
        dtype: of numpy, for one such number.
        data_dtype: the dtype that holds codes in an array: of one code, or uint8 for two codes of 4 bits.
        maximum: the largest number.
        mantissa_bits, exponent_bias: of a floating-point element; 0 for integers.
        meets_itself: whether there is a GEMM of two operands of this element.
    """

    dtype: Any
    data_dtype: Any
    maximum: float
    mantissa_bits: int = 0
    exponent_bias: int = 0
    meets_itself: bool = True

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return self.data_dtype == jnp.uint8

    @property
    def largest_exponent(self) -> int:
        """The exponent of `maximum`."""
        return math.frexp(self.maximum)[1] - 1

    @property
    def overflow(self) -> tuple[float, bool]:
        """The middle between `maximum` and the number that would follow it, and whether that middle is out of range.

        Rounding to nearest takes greater numbers out of the element's range. The middle itself goes to the even code.
        """
        step = 2.0 ** (self.largest_exponent - self.mantissa_bits)
        return self.maximum + step / 2, self.maximum / step % 2 == 1


ELEMENTS = {
    "e2m1": Element(ml_dtypes.float4_e2m1fn, jnp.uint8, 6.0, mantissa_bits=1, exponent_bias=1),
    "e4m3": Element(ml_dtypes.float8_e4m3fn, jnp.float8_e4m3fn, 448.0, mantissa_bits=3, exponent_bias=7),
    "e5m2": Element(
        ml_dtypes.float8_e5m2, jnp.float8_e5m2, 57344.0, mantissa_bits=2, exponent_bias=15, meets_itself=False
    ),
    "int4": Element(ml_dtypes.int4, jnp.uint8, 7.0, meets_itself=False),
    "int8": Element(np.int8, jnp.int8, 127.0),
}
"""All elements by the names that `Format.element` has."""

SYMMETRIC_ZERO = 8
"""The 4-bit integer code of zero where there are no zero points."""


def check_amax_epsilon(who: str, value: Any) -> None:
    """Raises ValueError unless the value is an amax_epsilon."""
    float32 = np.finfo(np.float32)
    a_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not a_number or not (value == 0 or float(float32.tiny) <= value <= float(float32.max)):
        raise ValueError(
            f"{who}: amax_epsilon={shown(value)}; needs a finite number, 0 or more, that is 0 or normal in float32"
        )


class Format:
    """The properties that every format states. `xla_ffi/problems.h` has its counterpart.

    Attributes:
        element: of the codes, one of `ELEMENTS`: "e2m1" (4 bits), "e4m3", "e5m2", "int4" or "int8".
        scaling: what the codes are relative to: "two_level" (an E4M3 scale per block and an amax per tensor), "e8m0"
            (a power of two per block), "float32" (one per block), "tensor" (one float32), "float16" (a 16-bit float per
            block, bfloat16 or float16), "rows" (a float per line along the quantised axis).
        scale_dtype: of the scales.
        block, scale_rule, power_of_two, amax_epsilon: fields of the formats that have them, else these defaults.
        row_scaled: whether each line along the quantised axis is a tensor with an amax of its own.
        pad: whether zeros fill a last block that the array does not fill; else such an array is an error.
        weight_only: whether it is for weights only.
        least: no scale of a line is smaller.
        without_kernel: the rule, in words, that has no kernel, so that the reference quantises; else "".
    """

    element: str
    scaling: Literal["two_level", "e8m0", "float32", "tensor", "float16", "rows"]
    scale_dtype: Any
    block: tuple[int, int] = (1, 1)
    scale_rule: ScaleRule = "up"
    power_of_two: bool = False
    amax_epsilon: float = 0.0
    row_scaled: bool = False
    pad: bool = True
    weight_only: bool = False
    without_kernel: str = ""

    @property
    def least(self) -> float:
        """See above."""
        return 0.0

    @property
    def length(self) -> int:
        """Elements of a block along the quantised axis; 1 where the tensor or the line is the block."""
        return self.block[1]

    def blocks(self, length: int) -> int:
        """How many scales a line of so many elements has, unless its tensor has the only one."""
        return 1 if self.scaling == "rows" else -(-length // self.length)

    @property
    def tiles(self) -> bool:
        """Whether blocks are square tiles."""
        return self.block[0] > 1

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a tensor's own amax is needed before its elements can be cast."""
        return self.scaling in ("two_level", "tensor") and not self.row_scaled

    @property
    def scaled_by_blocks_alone(self) -> bool:
        """Whether a block's scale depends on its own elements alone, so that what makes them can quantise them, without
        storing them.

        An amax of the tensor would take a pass of its own over what they are made of, which finds what the second one
        finds again; on CPUs that takes as long as to store them and to read them (docs/benchmarks/speed.md).
        """
        return self.scaling in ("e8m0", "float32")

    @property
    def chooses_scales(self) -> bool:
        """Whether a block takes the best of several scales (numerics.md 13): for codes that round to nearest."""
        return False

    @property
    def nearest_only(self) -> bool:
        """Whether arrays are neither rotated nor rounded stochastically."""
        return self.weight_only or self.row_scaled

    @property
    def has_zero_point(self) -> bool:
        """Whether each block has a code of its own for zero."""
        return False

    @property
    def served_dtype(self) -> str | None:
        """The dtype of the served model, which arrays are rounded to first and decoded to; None: any."""
        return None

    @property
    def numbers(self) -> Element:
        """The element type of its codes."""
        return ELEMENTS[self.element]

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return self.numbers.packed

    @property
    def data_dtype(self) -> Any:
        """The dtype of the codes."""
        return self.numbers.data_dtype

    @property
    def maximum(self) -> float:
        """The largest element."""
        return self.numbers.maximum

    @property
    def attributes(self) -> dict[str, Any]:
        """The format for a native call; `xla_ffi/bindings/format.h` decodes it."""
        return {
            "element": self.element,
            "scaling": self.scaling,
            "block": np.int32(self.length),
            "tiles": self.tiles,
            "scale_rule": self.scale_rule,
            "power_of_two": self.power_of_two,
            "amax_epsilon": np.float32(self.amax_epsilon),
        }

    def _check(self, field: str, allowed: tuple[Any, ...]) -> None:
        one_of(type(self).__name__, field, getattr(self, field), *allowed)

    def _check_float32_scale(self) -> None:
        """The fields of the scale rule in numerics.md 5."""
        a_flag(type(self).__name__, power_of_two=self.power_of_two)
        check_amax_epsilon(type(self).__name__, self.amax_epsilon)

    def __str__(self) -> str:
        words = [type(self).__name__]
        words += [self.element.upper()] if self.element != "e2m1" else []
        words += [f"{self.block[0]}x{self.block[1]}"] if self.length > 1 else []
        words += ["row-scaled"] if self.row_scaled else []
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class NVFP4(Format):
    """4-bit E2M1 codes, an E4M3 scale per block, a float32 amax per tensor.

    A number decodes to `code * block_scale * amax / 2688`.

    Arguments:
        block: `(1, 16)`: 16 consecutive elements of the quantised axis share a scale (activations, gradients).
            `(16, 16)`: square tiles, so that an array and its transpose are quantised alike (weights).
        scale_rule: how a block gets its scale. "six": its largest element becomes the code of 6. The others try more
            than one scale and keep that with the least error; they are for rounding to nearest. "four_over_six": 6 or
            4, by the sum of absolute errors, as Transformer Engine does. "four_over_six_mse": the same by squared
            errors. "search": 6, 4, or the scale below that of 6, by squared errors. All are plain NVFP4 data: GEMMs
            take operands of any two rules.
        row_scaled: each line along the quantised axis has an amax of its own instead of the tensor's. So a token's
            codes do not depend on the tokens beside it. Only for blocks of `(1, 16)`, rounded to nearest, not rotated.

    Source: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, appendix B; scale rules: "Four Over Six",
    arXiv 2512.02010; numerics.md 2 and 13.
    """

    block: tuple[int, int] = (1, BLOCK)
    scale_rule: ScaleRule = "six"
    row_scaled: bool = False

    element = "e2m1"
    scaling = "two_level"
    scale_dtype = jnp.float8_e4m3fn

    def __post_init__(self) -> None:
        self._check("block", ((1, BLOCK), (BLOCK, BLOCK)))
        self._check("scale_rule", ("six", "four_over_six", "four_over_six_mse", "search"))
        a_flag(type(self).__name__, row_scaled=self.row_scaled)
        if self.row_scaled and self.tiles:
            raise ValueError("NVFP4: row_scaled=True and block=(16, 16); a tile lies in several lines: use (1, 16)")

    @property
    def chooses_scales(self) -> bool:
        """See `Format`."""
        return self.scale_rule != "six"

    def __str__(self) -> str:
        return super().__str__() + (f" {self.scale_rule}" if self.chooses_scales else "")


@dataclasses.dataclass(frozen=True)
class MXFP8(Format):
    """8-bit floats, a power of two (E8M0) per block of 32, as in OCP MX; scales follow Transformer Engine by default.

    A number decodes to `code * scale`. The byte e of a scale stands for 2**(e - 127): in NumPy `scale.view(np.uint8)`.

    Arguments:
        element: "e4m3" or "e5m2".
        block: `(1, 32)`, or `(32, 32)`: square tiles, so that an array and its transpose are quantised alike (weights).
        scale_rule: how a block's amax becomes a power of two. "up": amax over the largest element, rounded up, so that
            nothing saturates (Transformer Engine, cuBLAS). "floor": the OCP specification's, with a byte that is one
            less in about a sixth of blocks, whose largest elements saturate. "even": as "floor", after rounding amax to
            the element's precision.

    Source: OCP Microscaling Formats (MX) v1.0; numerics.md 6.
    """

    element: Float8 = "e4m3"
    block: tuple[int, int] = (1, 32)
    scale_rule: ScaleRule = "up"

    scaling = "e8m0"
    scale_dtype = jnp.float8_e8m0fnu

    def __post_init__(self) -> None:
        self._check("element", ("e4m3", "e5m2"))
        self._check("block", ((1, 32), (32, 32)))
        self._check("scale_rule", ("up", "floor", "even"))


@dataclasses.dataclass(frozen=True)
class MXFP4(Format):
    """4-bit E2M1 codes, a power of two (E8M0) per block of 32.

    A number decodes to `code * scale`; see `MXFP8`.

    Arguments:
        block, scale_rule: see `MXFP8`. Weights of published MXFP4 checkpoints follow "even" or "floor".

    Source: OCP Microscaling Formats (MX) v1.0; numerics.md 6.
    """

    block: tuple[int, int] = (1, 32)
    scale_rule: ScaleRule = "up"

    element = "e2m1"
    scaling = "e8m0"
    scale_dtype = jnp.float8_e8m0fnu

    def __post_init__(self) -> None:
        self._check("block", ((1, 32), (32, 32)))
        self._check("scale_rule", ("up", "floor", "even"))


@dataclasses.dataclass(frozen=True)
class Float8Block(Format):
    """8-bit floats, a float32 scale per block of 128: DeepSeek-V3's and Transformer Engine's blockwise FP8.

    A number decodes to `code * scale`.

    Arguments:
        element: "e4m3" or "e5m2".
        block: `(1, 128)` (activations, gradients) or `(128, 128)`: square tiles (weights).
        power_of_two: round scales to powers of two, in the direction that nothing saturates.
        amax_epsilon: the least amax that a block is scaled by.

    Source: "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3; numerics.md 5.
    """

    element: Float8 = "e4m3"
    block: tuple[int, int] = (1, 128)
    power_of_two: bool = True
    amax_epsilon: float = 0.0

    scaling = "float32"
    scale_dtype = jnp.float32

    def __post_init__(self) -> None:
        self._check("element", ("e4m3", "e5m2"))
        self._check("block", ((1, 128), (128, 128)))
        self._check_float32_scale()


@dataclasses.dataclass(frozen=True)
class Float8Tensor(Format):
    """8-bit floats, one float32 scale per tensor.

    A number decodes to `code * scale`. The scale comes from the tensor's amax (current scaling), or is given (delayed
    scaling).

    Arguments:
        element: "e4m3" or "e5m2".
        power_of_two, amax_epsilon: see `Float8Block`.

    Source: "FP8 Formats for Deep Learning", arXiv 2209.05433; numerics.md 7.
    """

    element: Float8 = "e4m3"
    power_of_two: bool = False
    amax_epsilon: float = 0.0

    scaling = "tensor"
    scale_dtype = jnp.float32

    def __post_init__(self) -> None:
        self._check("element", ("e4m3", "e5m2"))
        self._check_float32_scale()


@dataclasses.dataclass(frozen=True)
class Int4(Format):
    """4-bit integers, a bfloat16 or float16 scale per block: the weights of W4A16 checkpoints.

    A number decodes to `code * scale`, or `(code - zero_point) * scale`, rounded once to the scale's dtype: to the bit
    what compressed-tensors and Marlin kernels decode, so that the weight trained with is the weight served.

    Arguments:
        group_size: consecutive elements of the quantised axis that share a scale: checkpoints' word for a block.
        symmetric: codes from -7 to 7. Otherwise codes from 0 to 15 and a zero point per block; zero is always a code.
        scale_dtype: "bfloat16" or "float16": the dtype of the model that is served. Arrays are rounded to it first, so
            that a float32 master weight gives what its exported copy gives.
        pad: whether the quantised axis may end within a block, which zeros then fill. False: it is an error.
        rule: "deploy": the scale is rounded before it divides. For comparison with published pipelines, in pure JAX
            only: "slime": the trainer divides by the unrounded scale, the checkpoint holds the rounded one.
            "compressed-tensors": that library's rule on a CPU, 16 levels and 16-bit arithmetic throughout.

    Source: int4_qat.md 1.1, 1.2 and 1.4.
    """

    group_size: int = 128
    symmetric: bool = True
    scale_dtype: str = "bfloat16"
    pad: bool = False
    rule: Int4Rule = "deploy"

    element = "int4"
    scaling = "float16"
    weight_only = True

    def __post_init__(self) -> None:
        size = self.group_size
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 1 <= size < 2**31:
            raise ValueError(f"Int4: group_size={shown(size)}; needs a whole number, 1 or more and below 2^31")
        a_flag("Int4", symmetric=self.symmetric, pad=self.pad)
        try:
            name = jnp.dtype(self.scale_dtype).name
        except (TypeError, ValueError):
            name = self.scale_dtype
        object.__setattr__(self, "group_size", int(size))
        object.__setattr__(self, "scale_dtype", name)
        object.__setattr__(self, "block", (1, int(size)))
        self._check("scale_dtype", ("bfloat16", "float16"))
        self._check("rule", ("deploy", "slime", "compressed-tensors"))

    @property
    def has_zero_point(self) -> bool:
        """See `Format`."""
        return not self.symmetric

    @property
    def served_dtype(self) -> str:
        """See `Format`."""
        return self.scale_dtype

    def __str__(self) -> str:
        words = [f"Int4 1x{self.group_size}"]
        words += [] if self.symmetric else ["asymmetric"]
        words += [self.scale_dtype] if self.scale_dtype != "bfloat16" else []
        words += [f"{self.rule} rule"] if self.rule != "deploy" else []
        return " ".join(words)
