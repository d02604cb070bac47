"""The order of scales in the memory of NVIDIA GPUs, where the GEMM that reads them wants one.

cuBLASLt reads the float32 scales of 1x128 blocks column by column: the first blocks of all rows, then the second ones.
So does the kernel that multiplies 8-bit integers by a 4-bit weight read the weight's scales, on every GPU.
An array of scales keeps its shape [..., rows, blocks]. The calls that write scales and the GEMM state the order as a
layout: XLA passes the bytes on where both do, and transposes them where another op writes or reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlowprec.arrays.formats import Format
from jaxlowprec.wiring import native

_HOPPER = 9.0  # other GPUs' GEMMs read no float32 scales


def is_column_major(fmt: Format) -> bool:
    """Whether a format's scales lie column by column on the GPUs of this process."""
    return fmt.scaling == "float32" and not fmt.tiles and native.compute_capability() == _HOPPER


def attributes(fmt: Format, column_major: bool) -> dict[str, Any]:
    """The format for a native call that reads or writes scales in this order."""
    return fmt.attributes | ({"column_major": True} if column_major else {})


def layouts(codes_and_scales: Sequence[Any], column_major: bool) -> list[tuple[int, ...] | None]:
    """The layouts of codes, scales, codes, scales and so on, for `jax.ffi.ffi_call`."""

    def layout(i: int, ndim: int) -> tuple[int, ...] | None:
        return (*range(ndim - 2), ndim - 1, ndim - 2) if column_major and i % 2 else None

    return [layout(i, len(array.shape)) for i, array in enumerate(codes_and_scales)]
