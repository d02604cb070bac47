"""Ops whose results are defined to the byte: what is run, and the digests of what must come out (`expected.json`)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arrays.formats import MXFP4, MXFP8, NVFP4, Float8Block, Float8Tensor, Format, Int4
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.arrays.row_formats import LEAST_SCALE_SERVED, Float8Rows, Int8Rows
from jaxlowprec.diagnostics.verify import inputs
from jaxlowprec.ops.amax import amax
from jaxlowprec.ops.checks import Implementation
from jaxlowprec.ops.dequantize import dequantize
from jaxlowprec.ops.fake_quantize import fake_quantize
from jaxlowprec.ops.grouped_matmul.api import GroupedQuantizedArray, quantize_groups
from jaxlowprec.ops.hadamard import hadamard_transform
from jaxlowprec.ops.quantize.api import quantize, quantize_both
from jaxlowprec.ops.scaled_matmul.api import scaled_matmul

EXPECTED = pathlib.Path(__file__).with_name("expected.json")

Arrays = dict[str, np.ndarray]
"""Results by name, as `comparable` makes them."""


class Item(NamedTuple):
    """Results that are computed and compared as one.

    Attributes:
        name: of it.
        run: (device, implementation) -> results.
    """

    name: str
    run: Callable[[jax.Device, Implementation], Arrays]


SQUARE = NVFP4((16, 16))
FORMATS: tuple[Format, ...] = (
    NVFP4(),
    SQUARE,
    *(NVFP4(scale_rule=rule) for rule in ("four_over_six", "four_over_six_mse", "search")),  # type: ignore[arg-type]
    NVFP4((16, 16), "four_over_six"),
    NVFP4(row_scaled=True),
    *(MXFP8(scale_rule=rule) for rule in ("up", "floor", "even")),  # type: ignore[arg-type]
    MXFP8("e5m2"),
    MXFP8(block=(32, 32)),
    *(MXFP4(scale_rule=rule) for rule in ("up", "floor", "even")),  # type: ignore[arg-type]
    MXFP4((32, 32)),
    Float8Block(),
    Float8Block("e5m2"),
    Float8Block(block=(128, 128)),
    Float8Block(power_of_two=False),
    Float8Block(block=(128, 128), power_of_two=False),
    Float8Tensor(),
    Float8Tensor("e5m2"),
    Float8Tensor(power_of_two=True),
    Float8Rows(),
    Float8Rows("e5m2"),
    Float8Rows(scale_dtype="bfloat16"),
    Float8Rows(least_scale=LEAST_SCALE_SERVED),
    Int8Rows(),
    Int8Rows(scale_dtype="bfloat16"),
    Int8Rows(rule="compressed-tensors"),
    Int4(),
    Int4(32, symmetric=False),
    Int4(scale_dtype="float16"),
)


def name_of(fmt: Format) -> str:
    """A format in words, with all fields that are not as by default."""
    said, shown = str(fmt), ("element", "block", "group_size", "row_scaled", "symmetric")
    fields = [f for f in dataclasses.fields(fmt) if f.name not in shown]  # type: ignore[arg-type]
    values = [(f.name, getattr(fmt, f.name), f.default) for f in fields]
    return " ".join([said, *(f"{k}={v}" for k, v, default in values if v != default and str(v) not in said)])


def comparable(name: str, x: Any) -> Arrays:
    """An array, or those of a quantised one, with one byte for each code and the same bits for every NaN."""
    if isinstance(x, QuantizedArray | GroupedQuantizedArray):
        named = {"codes": x.data, "scales": x.scale, "amaxes": x.amax, "zero points": getattr(x, "zero_point", None)}
        found: Arrays = {}
        for field, array in named.items():
            if array is not None:
                found |= comparable(f"{name} {field}", array)
        if x.format.packed:
            data = found[f"{name} codes"]
            codes = np.stack([data & 15, data >> 4], axis=-1)
            found[f"{name} codes"] = codes.reshape(*data.shape[:-1], 2 * data.shape[-1])
        return found
    array = np.asarray(x)
    if array.dtype.itemsize == 1:
        return {name: array.view(np.uint8)}
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return {name: array}


def digest(x: np.ndarray) -> str:
    """The first 16 hex digits of SHA-256 over shape, dtype and bytes."""
    little = x.astype(x.dtype.newbyteorder("<")) if x.dtype.kind in "fiu" else x
    told = f"{x.shape} {x.dtype.name}".encode()
    return hashlib.sha256(told + np.ascontiguousarray(little).tobytes()).hexdigest()[:16]


@functools.cache
def expected() -> Mapping[str, Mapping[str, str]]:
    """Digests of the results of every item."""
    return json.loads(EXPECTED.read_text())


def _collected(**results: Any) -> Arrays:
    found: Arrays = {}
    for name, value in results.items():
        found |= comparable(name.replace("_", " ").strip(), value)
    return found


def _numbers(device: jax.Device) -> tuple[jax.Array, jax.Array]:
    return jax.device_put((inputs.bfloat16_numbers(), inputs.float32_numbers()), device)


def _nearest(fmt: Format, rotated: bool, device: jax.Device, implementation: Implementation) -> Arrays:
    x, y = _numbers(device)
    options: Any = {"implementation": implementation}
    row, column = quantize_both(x, fmt, hadamard_columnwise=rotated, **options)
    found: dict[str, Any] = {"bfloat16_rowwise": row, "bfloat16_columnwise": column}
    found["float32_rowwise"] = q = quantize(y, fmt, hadamard=rotated, **options)
    found["float32_dequantize"] = dequantize(q, **options)
    if not rotated and fmt.served_dtype != "float16":  # bfloat16 does not hold those numbers
        found["bfloat16_fake_quantize_of_columns"] = fake_quantize(x, fmt, axis=-2, **options)
    return _collected(**found)


def _drawn(fmt: Format, rotated: bool, device: jax.Device, implementation: Implementation) -> Arrays:
    x, y = _numbers(device)
    options: Any = {"rounding": "stochastic", "key": inputs.KEY, "implementation": implementation}
    row, column = quantize_both(x, fmt, hadamard_columnwise=rotated, **options)
    columnwise = quantize(y, fmt, axis=-2, hadamard=rotated, **options)
    return _collected(bfloat16_rowwise=row, bfloat16_columnwise=column, float32_columnwise=columnwise)


def _eden(device: jax.Device, implementation: Implementation) -> Arrays:
    x, y = _numbers(device)
    options: Any = {"hadamard": True, "rounding": "eden", "key": inputs.KEY, "implementation": implementation}
    rowwise = quantize(x, NVFP4(), **options)
    return _collected(bfloat16_rowwise=rowwise, float32_columnwise=quantize(y, NVFP4(), axis=-2, **options))


def _in_a_program(fmt: Format, device: jax.Device, implementation: Implementation) -> Arrays:
    """A float32 result rounded to bfloat16 and quantised in the program that makes it: the bytes are those of the
    rounded numbers, though a compiler may want to spare the rounding."""
    x = jax.device_put(inputs.normal((512, 512), 90), device)

    @jax.jit
    def program(x: jax.Array) -> Any:
        rounded = (x * 4).astype(jnp.bfloat16)
        row, column = quantize_both(rounded, fmt, implementation=implementation)
        return row, column, dequantize(row, dtype=jnp.float32, implementation=implementation)

    row, column, values = program(x)
    return _collected(rowwise=row, columnwise=column, dequantize=values)


def _rotations(device: jax.Device, implementation: Implementation) -> Arrays:
    x, y = _numbers(device)
    y = y[jnp.array([0, 1, 2, 5])]
    options: Any = {"implementation": implementation}
    return _collected(
        bfloat16_16=hadamard_transform(x, **options),
        bfloat16_128_of_columns=hadamard_transform(x, axis=-2, size=128, **options),
        float32_16_inverse=hadamard_transform(y, inverse=True, **options),
        float32_32_drawn=hadamard_transform(y, size=32, signs="drawn", sign_key=jnp.asarray(inputs.KEY), **options),
    )


def _amaxes(device: jax.Device, implementation: Implementation) -> Arrays:
    found = [amax(x, True, Hadamard(), implementation) for x in _numbers(device)]
    return _collected(
        bfloat16=found[0][0], bfloat16_rotated=found[0][1], float32=found[1][0], float32_rotated=found[1][1]
    )


def _groups(fmt: Format, device: jax.Device, implementation: Implementation) -> Arrays:
    x = jax.device_put(inputs.bfloat16_numbers()[1], device)
    sizes = jnp.array([100, 0, 300, 80], jnp.int32, device=device)
    rotation = Hadamard() if fmt == NVFP4() else None
    options: Any = {"rowwise": True, "columnwise": True, "hadamard": rotation, "implementation": implementation}
    row, column = quantize_groups(x, sizes, fmt, **options)
    return _collected(rowwise=row, columnwise=column)


def _integers(device: jax.Device, implementation: Implementation) -> Arrays:
    """GEMMs of 8-bit integers, whose sums are exact."""
    x, _ = _numbers(device)
    options: Any = {"implementation": implementation}
    a, b = quantize(x[1], Int8Rows(), **options), quantize(x[0], Int8Rows(scale_dtype="bfloat16"), **options)
    return _collected(
        float32=scaled_matmul(a, b, preferred_element_type=jnp.float32, **options),
        bfloat16=scaled_matmul(a, b, bias=x[0, 0], preferred_element_type=jnp.bfloat16, **options),
    )


def items() -> Iterator[Item]:
    """All of them."""
    for fmt in FORMATS:
        yield Item(f"quantize {name_of(fmt)}, nearest", functools.partial(_nearest, fmt, False))
        if not (fmt.chooses_scales or fmt.nearest_only):
            yield Item(f"quantize {name_of(fmt)}, stochastic", functools.partial(_drawn, fmt, False))
    yield Item("quantize NVFP4 1x16 rotated, nearest", functools.partial(_nearest, NVFP4(), True))
    yield Item("quantize NVFP4 1x16 rotated, stochastic", functools.partial(_drawn, NVFP4(), True))
    yield Item("quantize NVFP4 1x16 rotated, eden", _eden)
    for fmt in (NVFP4(), MXFP8(), Float8Tensor()):
        yield Item(f"quantize {name_of(fmt)} in the program that rounds to it", functools.partial(_in_a_program, fmt))
    for fmt in (NVFP4(), MXFP8(), Float8Block(), Float8Tensor(), Float8Rows(), Int8Rows()):
        yield Item(f"quantize {name_of(fmt)} of groups", functools.partial(_groups, fmt))
    yield Item("scaled_matmul Int8Rows x Int8Rows", _integers)
    yield Item("hadamard_transform", _rotations)
    yield Item("amax", _amaxes)
