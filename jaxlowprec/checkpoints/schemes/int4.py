"""INT4 in int32 words: compressed-tensors "pack-quantized", symmetric and asymmetric.

    w = RNE_dtype((code - zero) * scale)        zero is 8, or one per group

Source: int4_qat.md 1.4 and 2.1 to 2.3; compressed-tensors 0.20.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import SYMMETRIC_ZERO, Format, Int4
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.schemes.base import Scheme, Spec, Tensors, as_dtype
from jaxlowprec.checkpoints.schemes.codes import AWQ_ORDER, bytes_of_words, pack_words, unpack_words, words_of_bytes
from jaxlowprec.checkpoints.schemes.compressed_tensors import config_of


def decode(
    codes: np.ndarray, zeros: np.ndarray | None, scale: np.ndarray, scale_dtype: str, dtype: np.dtype
) -> np.ndarray:
    """Decodes codes [N, K]: rounded to the scale's dtype and then to `dtype`.

    Arguments:
        codes: uint8.
        zeros: uint8, in the shape of the scale; None: 8.
        scale: [N, K/g], or [N, K] if groups are scattered.
    """
    n, k = codes.shape
    values = codes.astype(np.float32).reshape(n, scale.shape[1], -1)
    values -= np.float32(SYMMETRIC_ZERO) if zeros is None else zeros[..., None]
    values *= scale.astype(np.float32)[..., None]
    return values.reshape(n, k).astype(as_dtype(scale_dtype)).astype(dtype, copy=False)


def scattered(who: str, g_idx: np.ndarray, group_size: int) -> np.ndarray | None:
    """The group of each k where groups are not consecutive (act-order), or None where they are.

    Raises:
        ValueError: a group that does not exist.
    """
    k = g_idx.shape[0]
    if np.array_equal(g_idx, np.arange(k) // group_size) or (g_idx == -1).all():  # -1: not set
        return None
    groups = -(-k // group_size)
    if g_idx.min() < 0 or g_idx.max() >= groups:
        named = g_idx.min() if g_idx.min() < 0 else g_idx.max()
        raise ValueError(f"{who} names group {named}; there are {groups}")
    return g_idx


def not_loadable(who: str, g_idx: str) -> ValueError:
    """The error of `load` for act-order."""
    return ValueError(
        f"{who}.load: {g_idx} is not k // group_size (act-order): groups of a QuantizedArray are consecutive, and no "
        "layer permutes its inputs; run `jaxlowprec dequantize` and load the result, or use decompress, then quantise"
    )


class Int4Groups(Scheme):
    """The common part of INT4 files, which are dataclasses with these fields.

    Attributes:
        group_size: elements along K that share a scale; -1: a whole row (channelwise).
        symmetric: whether all zero points are 8.
        scale_dtype: "bfloat16" or "float16": the dtype of the scales, in which the engine also computes.
    """

    scale_dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")
    repacked: ClassVar[bool] = True
    group_size: int
    symmetric: bool
    scale_dtype: str

    @property
    def format(self) -> Format:
        """Int4 under the rule that makes the trained weight the served one.

        Raises:
            ValueError: groups are whole rows, so the format is that of a shape: `of_shape(shape).format`.
        """
        if self.group_size == -1:
            raise ValueError(
                f"{self.name}.format: group_size=-1 is one group per row, whose size is K; use "
                "scheme.of_shape((N, K)).format"
            )
        return Int4(self.group_size, symmetric=self.symmetric, scale_dtype=self.scale_dtype)

    @property
    def has_tensor_scale(self) -> bool:
        """See `Scheme`."""
        return False

    def of_shape(self, shape: Sequence[int]) -> Scheme:
        """See `Scheme`."""
        if self.group_size != -1 or len(shape) != 2 or not shape[1]:
            return self
        return dataclasses.replace(self, group_size=int(shape[1]))  # type: ignore[call-arg]

    def compute_dtype(self, dtype: np.dtype) -> np.dtype:
        """See `Scheme`."""
        return as_dtype(self.scale_dtype)

    def check(self, shape: Sequence[int]) -> str | None:
        """See `Scheme`."""
        fixed = self.of_shape(shape)
        return super().check(shape) if fixed is self else fixed.check(shape)

    def groups_of(self, k: int) -> int:
        """How many groups a row of K elements has."""
        return 1 if self.group_size == -1 else k // self.group_size


@dataclasses.dataclass(frozen=True)
class PackedInt4(Int4Groups):
    """Compressed-tensors "pack-quantized" with symmetric groups.

    Arguments:
        group_size: elements along K that share a scale; -1: a whole row (channelwise).
        scale_dtype: "bfloat16" or "float16": the dtype of the scales, in which the engine also computes.
    """

    group_size: int = 128
    scale_dtype: str = "bfloat16"

    name: ClassVar[str] = "w4a16"
    family: ClassVar[str | None] = "compressed-tensors"
    optional: ClassVar[tuple[str, ...]] = ("weight_g_idx",)
    required: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "weight_shape")
    also_read = {"weight_shape": ("int32",)}  # noqa: RUF012
    symmetric: ClassVar[bool] = True  # type: ignore[misc]

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        n, k = shape
        return {
            "weight_packed": ("int32", (n, -(-k // 8))),
            "weight_scale": (self.scale_dtype, (n, self.groups_of(k))),
            "weight_shape": ("int64", (2,)),
        }

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if self.group_size == -1 else "group",
            "group_size": None if self.group_size == -1 else self.group_size,
        }
        return config_of("pack-quantized", weights, ignore)

    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        shape = tensors["weight_shape"]
        if shape.shape != (2,) or shape.dtype.kind != "i":
            raise ValueError(
                f"{self.name}: weight_shape is {shape.dtype.name} {list(shape.shape)}; needs int64 [2], N and K"
            )
        n, k = (int(size) for size in shape)
        return n, k

    def _zeros(self, tensors: Tensors, shape: tuple[int, int]) -> np.ndarray | None:
        """uint8 [N, K/g], or None."""
        return None

    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        codes, zeros = unpack_words(tensors["weight_packed"], shape[1]), self._zeros(tensors, shape)
        scale, groups = tensors["weight_scale"], self._scattered(tensors, shape[1])
        if groups is not None:
            zeros, scale = None if zeros is None else zeros[:, groups], scale[:, groups]
        return decode(codes, zeros, scale, self.scale_dtype, dtype)

    def _scattered(self, tensors: Tensors, k: int) -> np.ndarray | None:
        """The group of each k, or None where groups are consecutive."""
        if (g_idx := tensors.get("weight_g_idx")) is None:
            return None
        if g_idx.shape != (k,) or g_idx.dtype.name not in ("int32", "int64"):
            raise ValueError(
                f"{self.name}: weight_g_idx is {g_idx.dtype.name} {list(g_idx.shape)}; needs int32 or int64 [{k}]"
            )
        return scattered(f"{self.name}: weight_g_idx", g_idx, self.group_size)

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        k = shape[1]
        if self._scattered(tensors, k) is not None:
            raise not_loadable(self.name, "weight_g_idx")
        data, zeros = bytes_of_words(tensors["weight_packed"], k), self._zeros(tensors, shape)
        if k % 2:  # a QuantizedArray fills the last nibble with the code of zero
            last = SYMMETRIC_ZERO if zeros is None else zeros[:, -1]
            data = data.copy()
            data[:, -1] = data[:, -1] & 15 | last << 4
        scale, zero_point = as_array(tensors["weight_scale"]), None if zeros is None else as_array(zeros)
        return QuantizedArray(as_array(data), scale, None, zero_point, self.format, shape, dtype, -1, None)

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        data = np.asarray(q.data)
        if q.matrix_shape[1] % 2:
            data = data.copy()
            data[:, -1] &= 15  # compressed-tensors fills the rest of a word with 0
        return {
            "weight_packed": words_of_bytes(data),
            "weight_scale": np.asarray(q.scale),
            "weight_shape": np.asarray(q.matrix_shape, np.int64),
        }


@dataclasses.dataclass(frozen=True)
class PackedInt4Asymmetric(PackedInt4):
    """Compressed-tensors "pack-quantized" with a zero point per group; eight rows of zero points share a word.

    Arguments:
        zero_point_order: "compressed-tensors", or "slime" to read (not write) the files of slime's converter:
            [K/g, N/8] with AWQ's order of nibbles.
    """

    zero_point_order: Literal["compressed-tensors", "slime"] = "compressed-tensors"

    name: ClassVar[str] = "w4a16_asym"
    required: ClassVar[tuple[str, ...]] = (*PackedInt4.required, "weight_zero_point")
    symmetric: ClassVar[bool] = False  # type: ignore[misc]

    def __post_init__(self):
        if self.zero_point_order not in ("compressed-tensors", "slime"):
            raise ValueError(
                f'{self.name}: zero_point_order={self.zero_point_order!r}; needs "compressed-tensors" or "slime"'
            )

    def check(self, shape: Sequence[int]) -> str | None:
        """See `Scheme`."""
        if (reason := super().check(shape)) or self.zero_point_order != "slime":
            return reason
        return f"its {shape[0]} rows are not a multiple of 8, which slime's zero points need" if shape[0] % 8 else None

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        n, groups = shape[0], self.groups_of(shape[1])
        slime = self.zero_point_order == "slime"
        packed = (groups, n // 8) if slime else (-(-n // 8), groups)
        return {**super().output_specs(shape, dtype), "weight_zero_point": ("int32", packed)}

    def _zeros(self, tensors: Tensors, shape: tuple[int, int]) -> np.ndarray | None:
        words, n = tensors["weight_zero_point"], shape[0]
        if self.zero_point_order == "slime":
            return np.ascontiguousarray(unpack_words(words, n, AWQ_ORDER).T)
        return np.ascontiguousarray(unpack_words(words.T, n).T)

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        if self.zero_point_order == "slime":
            raise ValueError(
                f"{self.name}.store: slime's order of zero points is only read, since no field of a checkpoint names "
                'it; store with by_name("w4a16_asym")'
            )
        zeros = np.ascontiguousarray(pack_words(np.asarray(q.zero_point).T).T)
        return {**super()._write(q), "weight_zero_point": zeros}
