"""The quantise op: rowwise, columnwise, or both in one pass."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import BLOCK, Format
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.arrays.quantized_array import arrays_of_lines
from jaxlowprec.ops.hadamard.reference import rotate_padded
from jaxlowprec.ops.implementation import Implementation, choose
from jaxlowprec.ops.quantize import reference
from jaxlowprec.ops.quantize.philox import Draws
from jaxlowprec.ops.split_rows import merged_rows, split_columns, split_rows


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """One variant of the op.

    Attributes:
        format: what to quantise to.
        rowwise, columnwise: the wanted directions.
        hadamard: a rotation of size 16 along axis -2 for the columnwise direction; only for NVFP4 1x16.
        stochastic: rounding of the codes.
        encode_scale_given: the tensor operand is the factor to multiply by, not an amax; only for Float8Tensor.
        ragged_rows, ragged_columns: R or C is not a multiple of `unit` along that axis.
        rows_split: x is [..., S, R, C], one tensor, and so are the results; see `ops.split_rows`.
    """

    format: Any
    rowwise: bool
    columnwise: bool
    hadamard: Hadamard | None
    stochastic: bool
    encode_scale_given: bool
    ragged_rows: bool
    ragged_columns: bool
    rows_split: bool = False

    @property
    def directions(self) -> int:
        """The number of wanted directions."""
        return self.rowwise + self.columnwise

    @property
    def tensors(self) -> int:
        """The number of operands with a number per tensor: one per direction if the format has a tensor scale."""
        return self.directions if self.format.has_tensor_scale else 0


def unit(fmt: Format, quantized: bool, stochastic: bool) -> int:
    """Elements along an axis that must stay together: a block, or a sixteen of random bytes.

    `quantized`: whether the axis is the quantised one of some direction.
    """
    return max(fmt.length if quantized or fmt.tiles else 1, BLOCK if quantized and stochastic else 1)


def _rule(spec: QuantizeSpec) -> wiring.ShardingRule:
    """x is [..., R, C]. An axis that blocks run along splits into whole blocks, or not at all where it is ragged."""
    fmt = spec.format
    whole: list[str] = []
    sizes: dict[str, Any] = {}
    names: dict[str, tuple[str, str, str, str]] = {}  # of an axis: elements, codes, blocks, sixteens
    for axis, quantized, ragged in (
        ("r", spec.columnwise, spec.ragged_rows),
        ("c", spec.rowwise, spec.ragged_columns),
    ):
        size = unit(fmt, quantized, spec.stochastic)
        if size == 1:
            names[axis] = (axis, axis, axis, axis)
        elif ragged:
            codes = f"{axis}bytes" if fmt.packed else axis
            names[axis] = (axis, codes, f"{axis}blocks", f"{axis}sixteens")
            whole += names[axis]
        else:
            sizes |= {"k": size, "h": size // 2, "g": size // BLOCK}
            sixteens = f"({axis} g)" if size > BLOCK else axis
            names[axis] = (f"({axis} k)", f"({axis} {'h' if fmt.packed else 'k'})", axis, sixteens)
    (row, row_codes, row_blocks, row_sixteens), (column, column_codes, column_blocks, column_sixteens) = (
        names["r"],
        names["c"],
    )
    s = "s " if spec.rows_split else ""
    operands, results = [f"... {s}{row} {column}"], []
    operands += ["..."] * spec.tensors + ["... w"] * spec.stochastic

    def scales(line, line_blocks, blocks):
        return "..." if fmt.scaling == "tensor" else f"... {s}{line_blocks if fmt.tiles else line} {blocks}"

    if spec.rowwise:
        operands += [f"{s}{row}", column_sixteens] * spec.stochastic
        results += [f"... {s}{row} {column_codes}", scales(row, row_blocks, column_blocks)]
    if spec.columnwise:
        operands += [column, f"{s}{row_sixteens}"] * spec.stochastic
        results += [f"... {s}{column} {row_codes}", scales(column, column_blocks, row_blocks)]
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    used = re.findall(r"\w+", text)
    sizes = {f: n for f, n in (sizes | {"w": 2}).items() if f in used}
    return wiring.ShardingRule(text, whole=[f for f in dict.fromkeys(whole) if f in used], **sizes)


@functools.cache
def quantize_op(spec: QuantizeSpec, implementation: Implementation):
    """x, an amax [...] (or encode scale) per direction for formats with a tensor scale, then if stochastic key words
    [..., 2] and indices of lines and sixteens per direction -> codes and scales per direction."""
    outputs, run_reference, run_native = _bodies(spec)
    if spec.rows_split:
        outputs, run_reference, run_native = _of_split_rows(spec)
    return wiring.define(
        "jaxlowprec_quantize",
        rule=_rule(spec),
        outputs=outputs,
        reference=run_reference,
        native=run_native,
        **choose("quantize", implementation),
    )


def _shapes(spec: QuantizeSpec, x: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of the results; x [..., R, C] has a matrix per index of its batch axes."""
    *batch, rows, columns = x.shape
    lines = [(rows, columns)] * spec.rowwise + [(columns, rows)] * spec.columnwise
    shapes = [array for line in lines for array in arrays_of_lines(spec.format, *line)]
    return [((*batch, *shape), dtype) for shape, dtype in shapes]


def native_call(
    spec: QuantizeSpec, x: jax.Array, *operands: jax.Array, vmap_method: str | None = None
) -> Sequence[Any]:
    """Calls the kernel on the op's operands. Indices of lines and sixteens may have x's batch axes.

    `vmap_method`: of `jax.ffi.ffi_call`.
    """
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in _shapes(spec, x)]
    return jax.ffi.ffi_call("jaxlowprec_quantize", results, vmap_method=vmap_method)(
        x,
        *operands,
        format=spec.format.attributes,
        rowwise=spec.rowwise,
        columnwise=spec.columnwise,
        rotate_columns=spec.hadamard is not None,
        stochastic=spec.stochastic,
        encode_scale_given=spec.encode_scale_given,
        sign_mask=np.uint32(spec.hadamard.mask if spec.hadamard else 0).view(np.int32),
    )


def _bodies(spec: QuantizeSpec) -> tuple[Callable, Callable, Callable]:
    """Result shapes, the reference and the native call, for x [..., R, C]."""
    fmt = spec.format

    def run_reference(x, *operands):
        tensors, random = operands[: spec.tensors], operands[spec.tensors :]
        out = []
        for i in range(spec.directions):
            columnwise = i == 1 or not spec.rowwise
            values = jnp.swapaxes(x, -1, -2) if columnwise else x
            if columnwise and spec.hadamard:
                values = rotate_padded(values, spec.hadamard)
            tensor = tensors[i] if tensors else None
            draws = Draws(random[0], *random[1 + 2 * i : 3 + 2 * i], int(columnwise)) if random else None
            out += reference.quantize_rows(values, fmt, tensor, spec.encode_scale_given, draws)
        return out

    return lambda x, *_: _shapes(spec, x), run_reference, functools.partial(native_call, spec)


def _of_split_rows(spec: QuantizeSpec) -> tuple[Callable, Callable, Callable]:
    """As `_bodies`, for x [..., S, R, C] with split rows: on the matrix of the merged rows."""
    outputs, *bodies = _bodies(dataclasses.replace(spec, rows_split=False))
    per_tensor = spec.format.scaling == "tensor"

    def outputs_of_parts(x, *_):
        *batch, s, rows, columns = x.shape
        shapes = outputs(jax.ShapeDtypeStruct((*batch, rows, columns), x.dtype))
        return [
            (shape if per_tensor and i % 2 else (*batch, s, *shape[-2:]), dtype)
            for i, (shape, dtype) in enumerate(shapes)
        ]

    cuts = [(split_rows, -2)] * spec.rowwise + [(split_columns, -1)] * spec.columnwise  # along which of its axes

    def of_parts(body):
        def run(x, *operands):
            parts, indices = x.shape[-3], len(operands) - 2 * spec.directions * spec.stochastic
            merged = body(merged_rows(x), *operands[:indices], *(ids.reshape(-1) for ids in operands[indices:]))
            shapes, out = outputs_of_parts(x), []
            for i, value in enumerate(merged):
                (cut, axis), (shape, _) = cuts[i // 2], shapes[i]
                out.append(value if per_tensor and i % 2 else cut(value, parts, shape[axis]))
            return out

        return run

    return outputs_of_parts, *map(of_parts, bodies)
