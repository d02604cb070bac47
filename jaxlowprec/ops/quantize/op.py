"""The quantise op: rowwise, columnwise, or both in one pass; which variant an array needs, and its results."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import BLOCK, Format
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.arrays.quantized_array import QuantizedArray, arrays_of_lines
from jaxlowprec.ops import scale_order
from jaxlowprec.ops.checks import Implementation, choose, without_kernels
from jaxlowprec.ops.hadamard import rotate_padded
from jaxlowprec.ops.quantize import lines, reference, tpu
from jaxlowprec.ops.quantize.random_bits import Draws
from jaxlowprec.ops.quantize.reference import FIRST_STREAM
from jaxlowprec.ops.rounding import MAX_FINITE, flush, from_bits
from jaxlowprec.ops.split_rows import merged_rows, split_columns, split_rows


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """One variant of the op.

    Attributes:
        format: what to quantise to.
        rowwise, columnwise: the wanted directions.
        hadamard: a rotation of size 16 along axis -2 for the columnwise direction; only for NVFP4 1x16.
        stochastic: random bits round the codes, or the scales if `eden`.
        encode_scale_given: the tensor operand is the factor to multiply by, not an amax; only for Float8Tensor.
        ragged_rows, ragged_columns: R or C is not a multiple of `unit` along that axis.
        rows_split: x is [..., S, R, C], one tensor, and so are the results; see `ops.split_rows`.
        eden: scales are corrected and rounded stochastically, codes to nearest (numerics.md 14); only for NVFP4 1x16.
        amaxes_given: the amaxes of lines are operands, since lines go on elsewhere; only for scales of lines.
        offset: x is a part of the array that random bits are drawn for.
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
    eden: bool = False
    amaxes_given: bool = False
    offset: bool = False

    @property
    def by_lines(self) -> bool:
        """Whether each line along the quantised axis has a scale."""
        return self.format.scaling == "rows"

    @property
    def directions(self) -> int:
        """The number of wanted directions."""
        return self.rowwise + self.columnwise

    def attributes(self, column_major: bool = False) -> dict[str, Any]:
        """Attributes of a native call. `column_major`: it writes scales in that order."""
        return {
            "format": scale_order.attributes(self.format, column_major),
            "rowwise": self.rowwise,
            "columnwise": self.columnwise,
            "rotate_columns": self.hadamard is not None,
            "stochastic": self.stochastic,
            "encode_scale_given": self.encode_scale_given,
            "sign_mask": np.uint32(self.hadamard.mask if self.hadamard else 0).view(np.int32),
        }

    @property
    def tensors(self) -> int:
        """The number of operands with amaxes or factors: one per direction if the format has a tensor scale, or if
        amaxes of lines are given."""
        return self.directions if self.format.has_tensor_scale or self.amaxes_given else 0


def unit(fmt: Format, quantized: bool, stochastic: bool) -> int:
    """Elements along an axis that must stay together: a block, or a sixteen of random bytes.

    `quantized`: whether the axis is the quantised one of some direction.
    """
    return max(fmt.length if quantized or fmt.tiles else 1, BLOCK if quantized and stochastic else 1)


class ShardingParts(NamedTuple):
    """How a quantisation shards: the parts of its `wiring.ShardingRule`.

    Attributes:
        lines, columns: how x's axes [S,] R and C are named.
        operands, results: those of the op beside x.
        whole, sizes: see `wiring.ShardingRule`; among them may be factors that no array has.
    """

    lines: str
    columns: str
    operands: list[str]
    results: list[str]
    whole: list[str]
    sizes: dict[str, int]

    def of_op(
        self, operands: list[str], results: list[str], whole: Sequence[str] = (), reductions: Sequence[str] = ()
    ) -> wiring.ShardingRule:
        """The sharding rule of an op with these operands and results before those of the quantisation.

        `whole`, `reductions`: further ones.
        """
        text = f"{', '.join([*operands, *self.operands])} -> {', '.join([*results, *self.results])}"
        used = re.findall(r"\w+", text)
        sizes: dict[str, Any] = {f: n for f, n in self.sizes.items() if f in used}
        factors = dict.fromkeys([*self.whole, *whole])
        return wiring.ShardingRule(text, reductions, [f for f in factors if f in used], **sizes)


def rule_of(spec: QuantizeSpec) -> ShardingParts:
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
    tensors = ["..."] * spec.tensors
    if spec.amaxes_given:
        tensors = [f"... {s}{row}"] * spec.rowwise + [f"... {column}"] * spec.columnwise
    operands, results = tensors + ["... w"] * spec.stochastic, []

    def scales(line: str, line_blocks: str, blocks: str) -> str:
        if spec.by_lines:
            return f"... {s}{line} one"
        return "..." if fmt.scaling == "tensor" else f"... {s}{line_blocks if fmt.tiles else line} {blocks}"

    if spec.rowwise:
        operands += [f"{s}{row}", column_sixteens] * spec.stochastic
        results += [f"... {s}{row} {column_codes}", scales(row, row_blocks, column_blocks)]
    if spec.columnwise:
        operands += [column, f"{s}{row_sixteens}"] * spec.stochastic
        results += [f"... {s}{column} {row_codes}", scales(column, column_blocks, row_blocks)]
    whole += ["one"] * spec.by_lines
    return ShardingParts(f"... {s}{row}", column, operands, results, whole, sizes | {"w": 2})


def line_reductions(spec: QuantizeSpec) -> list[str]:
    """The axes, as `rule_of` names them, that amaxes of lines are taken over."""
    if not spec.by_lines or spec.amaxes_given:
        return []
    across = [] if spec.ragged_columns else ["c"]
    down = ["s"] * spec.rows_split + ([] if spec.ragged_rows else ["r"])
    return across * spec.rowwise + down * spec.columnwise


@functools.cache
def quantize_op(spec: QuantizeSpec, implementation: Implementation) -> wiring.Op:
    """x, an amax [...] (or encode scale) per direction for formats with a tensor scale, then if stochastic key words
    [..., 2] and indices of lines and sixteens per direction -> codes and scales per direction."""
    rule, chosen = rule_of(spec), choose("quantize", implementation)
    if what := spec.format.without_kernel:
        chosen = without_kernels(chosen, what, "cpu", "cuda")

    def on_matrix(body: wiring.Body) -> wiring.Body:
        if not spec.rows_split:
            return body
        return lambda x, *operands: in_parts(spec, x, body(*merged(spec, x, *operands)))

    def run_on_gpu(*operands: jax.Array) -> Sequence[jax.Array]:
        return native_call(spec, *operands, column_major=scale_order.is_column_major(spec.format))

    def when_split(axes: Mapping[str, Any], x: jax.Array, *operands: jax.Array) -> Sequence[jax.Array]:
        """The amaxes of lines that are split come first, and then the codes of each part."""
        given = dataclasses.replace(spec, amaxes_given=True, offset=True)
        return quantize_op(given, implementation)(x, *amaxes_of_lines(spec, axes, x), *operands)

    native: dict[str, wiring.Body] = {"cpu": functools.partial(native_call, spec), "cuda": run_on_gpu}
    alone = {at: counted(spec, native[at]) for at in chosen["platforms"]} | {"tpu": functools.partial(tpu_call, spec)}
    return wiring.define(
        "jaxlowprec_quantize",
        inline=True,
        rule=rule.of_op([f"{rule.lines} {rule.columns}"], [], reductions=line_reductions(spec)),
        outputs=lambda x, *_: shapes(spec, x),
        reference=on_matrix(functools.partial(reference_call, spec)),
        native={at: on_matrix(body) for at, body in native.items()},
        on_one_device={at: on_matrix(body) for at, body in alone.items()},
        fenced=True,
        when_split=when_split if spec.by_lines else None,
        **chosen,
    )


def counted(spec: QuantizeSpec, native: wiring.Body) -> wiring.Body:
    """A native body for one device, where indices are constants: XLA keeps one for all calls, but runs each iota.

    They have two axes: XLA makes an iota of a constant that counts along its only axis.
    """
    if not spec.stochastic or spec.offset:
        return native

    def body(x: jax.Array, *operands: jax.Array) -> Sequence[jax.Array]:
        first = len(operands) - 2 * spec.directions
        indices: Sequence[Any] = operands[first:]
        if all(isinstance(index.size, int) and index.size <= MOST_CONSTANTS for index in indices):
            indices = [np.arange(index.size, dtype=np.uint32)[None] for index in indices]
        return native(x, *operands[:first], *indices)

    return body


MOST_CONSTANTS = 1 << 16
"""Indices in a constant, 256 KiB; more are counted by the program."""


def amaxes_of_lines(spec: QuantizeSpec, axes: Mapping[str, Any], x: jax.Array) -> list[jax.Array]:
    """The amaxes of x's rows [..., S, R] and of its columns [..., C], as the spec wants them.

    x is [..., S, R, C] or [..., R, C]; `axes` has the mesh axes that split each of these.
    """
    bits = [(lines.amax_bits(x), axes.get("c", ()))] * spec.rowwise
    down: Any = (-3, -2) if spec.rows_split else -2
    bits += [(lines.amax_bits(x, down), (*axes.get("s", ()), *axes.get("r", ())))] * spec.columnwise
    return [from_bits(jax.lax.pmax(found, over) if over else found) for found, over in bits]


def shapes(spec: QuantizeSpec, x: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of the results; x [..., R, C] has a matrix per index of its batch axes."""
    *batch, rows, columns = x.shape
    if spec.rows_split:
        batch, parts = batch[:-1], batch[-1:]
    else:
        parts = []
    lines = [(rows, columns)] * spec.rowwise + [(columns, rows)] * spec.columnwise
    arrays = [array for line in lines for array in arrays_of_lines(spec.format, *line)]
    return [((*batch, *(parts if shape else ()), *shape), dtype) for shape, dtype in arrays]


def native_call(
    spec: QuantizeSpec,
    x: jax.Array,
    *operands: jax.Array,
    column_major: bool = False,
    vmap_method: str | None = None,
) -> Sequence[Any]:
    """Calls the kernel on the op's operands. Indices of lines and sixteens may have x's batch axes.

    `column_major`: scales are written in that order. `vmap_method`: of `jax.ffi.ffi_call`.
    """
    if spec.by_lines and spec.columnwise and not spec.amaxes_given:  # all rows come before the first code
        operands = (*native_amaxes_of_lines(x, spec.rowwise, True, vmap_method), *operands)
        spec = dataclasses.replace(spec, amaxes_given=True)
    results = [jax.ShapeDtypeStruct(*result) for result in shapes(dataclasses.replace(spec, rows_split=False), x)]
    layouts = scale_order.layouts(results, column_major)
    call = jax.ffi.ffi_call("jaxlowprec_quantize", results, output_layouts=layouts, vmap_method=vmap_method)
    return call(x, *operands, **spec.attributes(column_major), eden=spec.eden)


def native_amaxes_of_lines(x: jax.Array, rowwise: bool, columnwise: bool, vmap_method: str | None) -> Sequence[Any]:
    """The amaxes of rows [..., R] and of columns [..., C], as they are wanted, by the kernel."""
    *batch, rows, columns = x.shape
    shapes = [(*batch, rows)] * rowwise + [(*batch, columns)] * columnwise
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    call = jax.ffi.ffi_call("jaxlowprec_line_amaxes", results, vmap_method=vmap_method)
    return call(x, rows=rowwise, columns=columnwise)


def reference_call(spec: QuantizeSpec, x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """The results of `native_call`, in pure JAX."""
    tensors, random = operands[: spec.tensors], operands[spec.tensors :]
    out: list[jax.Array] = []
    for i in range(spec.directions):
        columnwise = i == 1 or not spec.rowwise
        # stored transposed: XLA would share float32 numbers between the directions, and copy them
        values = jax.lax.optimization_barrier(jnp.swapaxes(x, -1, -2)) if columnwise else x
        if columnwise and spec.hadamard:
            values = rotate_padded(values, spec.hadamard)
        tensor = tensors[i] if tensors else None
        stream = columnwise + (FIRST_STREAM if spec.eden else 0)
        draws = Draws(random[0], random[1 + 2 * i], random[2 + 2 * i], stream) if random else None
        if spec.by_lines:
            out += lines.quantize_lines(values, spec.format, tensor, draws)
            continue
        options = spec.encode_scale_given, draws, columnwise, spec.eden
        out += reference.quantize_rows(values, spec.format, tensor, *options)
    return out


def tpu_call(spec: QuantizeSpec, x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """The results of `reference_call` by the kernel for TPUs, if that has the variant."""
    call = tpu.quantize if tpu.serves(spec, x) else reference_call
    return call(spec, x, *operands)


# --- x [..., S, R, C] with split rows, quantised as the matrix of the merged rows


def merged(spec: QuantizeSpec, x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """The op's operands for that matrix."""
    indices = len(operands) - 2 * spec.directions * spec.stochastic
    tensors = list(operands[:indices])
    if spec.amaxes_given and spec.rowwise:
        tensors[0] = tensors[0].reshape(*x.shape[:-3], -1)
    return [merged_rows(x), *tensors, *(ids.reshape(-1) for ids in operands[indices:])]


def in_parts(spec: QuantizeSpec, x: Any, results: Sequence[jax.Array]) -> list[jax.Array]:
    """Results for that matrix as those for x."""
    per_tensor = spec.format.scaling == "tensor"
    cuts = [(split_rows, -2)] * spec.rowwise + [(split_columns, -1)] * spec.columnwise  # along which of its axes
    out = []
    for i, (value, (shape, _)) in enumerate(zip(results, shapes(spec, x), strict=True)):
        cut, axis = cuts[i // 2]
        if spec.by_lines and i % 2 and axis == -1:  # each part has the scales of its columns
            value = jnp.broadcast_to(value[..., None, :, :], (*value.shape[:-2], x.shape[-3], *value.shape[-2:]))
        elif not (per_tensor and i % 2):
            value = cut(value, x.shape[-3], shape[axis])
        out.append(value)
    return out


def rotates_in_pass(fmt: Format, rotation: Hadamard) -> bool:
    """Whether the kernel rotates columns itself."""
    return fmt.scaling == "two_level" and not fmt.tiles and rotation.in_pass


def amax_field(fmt: Format, tensor: Any, eden: bool = False) -> Any:
    """The `amax` of a QuantizedArray whose tensor has that amax: more where scales have room: numerics.md 13, 14."""
    if not (fmt.chooses_scales or eden):
        return tensor
    return jnp.where(jnp.isfinite(tensor), jnp.minimum(flush(tensor) * 1.75, MAX_FINITE), tensor)


def spec_of(
    x: Any,
    fmt: Format,
    directions: tuple[bool, bool],
    hadamard: Hadamard | None,
    stochastic: bool,
    *,
    encode_scale_given: bool = False,
    rows_split: bool = False,
    eden: bool = False,
    offset: bool = False,
) -> QuantizeSpec:
    """The variant that quantises x [..., R, C] rowwise, columnwise or both; see `QuantizeSpec`."""
    rowwise, columnwise = directions
    rows, columns = x.shape[-2:]
    ragged = rows % unit(fmt, columnwise, stochastic) != 0, columns % unit(fmt, rowwise, stochastic) != 0
    options: Any = {"rows_split": rows_split, "eden": eden, "offset": offset}
    return QuantizeSpec(fmt, *directions, hadamard, stochastic, encode_scale_given, *ragged, **options)


def random_operands(
    spec: QuantizeSpec, x: Any, words: jax.Array | None, offset: tuple[Any, Any] | None = None
) -> list[jax.Array]:
    """The op's operands for random bits, made beside the op, so that they are split as x is.

    Arguments:
        words: of the key, uint32 [..., 2]; None: to nearest.
        offset: row and column of x's first element, uint32; None: x begins the array.
    """
    if words is None:
        return []
    rows, columns = x.shape[-2:]
    parts = x.shape[-3:-2] if spec.rows_split else ()
    row, column = offset or (None, None)
    row_sixteen, column_sixteen = (None if first is None else first // BLOCK for first in (row, column))

    def indices(first: Any, count: int, *lead: int) -> jax.Array:
        index = jax.lax.iota(jnp.uint32, math.prod((*lead, count)))
        index = index.reshape(*lead, count) if lead else index
        return index if first is None else index + first

    operands = [words]
    if spec.rowwise:
        operands += [indices(row, rows, *parts), indices(column_sixteen, -(-columns // BLOCK))]
    if spec.columnwise:
        operands += [indices(column, columns), indices(row_sixteen, -(-rows // BLOCK), *parts)]
    return operands


def quantized_array(
    codes_and_scale: Sequence[jax.Array],
    tensor: jax.Array | None,
    spec: QuantizeSpec,
    like: tuple[tuple[int, ...], Any],
    along: tuple[int, Hadamard | None, jax.Array | None],
) -> QuantizedArray:
    """The QuantizedArray of one direction, from the op's results; per-tensor numbers are broadcast to every slice.

    Arguments:
        tensor: its amax or encode scale, if there is one.
        like: shape and dtype of what was quantised.
        along: the quantised axis, the rotation along it, and its signs if they are drawn.
    """
    (data, scale), fmt, (shape, dtype) = codes_and_scale, spec.format, like

    def with_each(number: jax.Array) -> jax.Array:
        return jnp.broadcast_to(number[..., None], shape[:-2]) if spec.rows_split else number

    scale = with_each(scale) if fmt.scaling == "tensor" else scale
    amax = with_each(amax_field(fmt, tensor, spec.eden)) if fmt.scaling == "two_level" else None
    return QuantizedArray(data, scale, amax, None, fmt, shape[-2:], dtype, *along)


def quantized_arrays(
    results: Sequence[jax.Array], tensors: Sequence[jax.Array], spec: QuantizeSpec, like: Any
) -> list[QuantizedArray]:
    """The QuantizedArray of each direction that the spec wants, from all results of the op, rotated as the spec says.

    Arguments:
        tensors: an amax or encode scale for each of them, or none.
        like: what was quantised.
    """
    along: list[Any] = [(-1, None, None)] * spec.rowwise + [(-2, spec.hadamard, None)] * spec.columnwise
    of_each: Sequence[Any] = tensors or [None] * len(along)
    each = zip(results[0::2], results[1::2], of_each, along, strict=True)
    shape = like.shape, like.dtype
    return [quantized_array((data, scale), tensor, spec, shape, own) for data, scale, tensor, own in each]
