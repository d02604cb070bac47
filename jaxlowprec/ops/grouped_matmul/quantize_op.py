"""The ops that quantise rows in groups and find the amax of each group, before the products of `op`.

NVIDIA GPUs quantise rows by the kernels that quantise a matrix in tiles of 128 rows:

    rows --gather--> [S, 128, C], a matrix per slot --kernel--> results per slot --gather--> the layout of `reference`

A slot has the amax, the key and the indices of its group. Where columns have scales, the amaxes of a group are the
largest of its slots'. The copy of x, up to 128 * E rows larger than x, lives until the kernel has run; so do the
kernel's results. Rows with scales of their own, to nearest, are quantised where they are. Group sizes stay on the
device. There are no batch axes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import BLOCK, Format
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops import amax as amax_op
from jaxlowprec.ops.amax import Amaxes, largest_over
from jaxlowprec.ops.checks import Implementation, choose, without_kernels
from jaxlowprec.ops.grouped_matmul import reference
from jaxlowprec.ops.grouped_matmul.groups import Groups, Slots, count
from jaxlowprec.ops.grouped_matmul.reference import largest_of, where_else_zero
from jaxlowprec.ops.quantize import lines
from jaxlowprec.ops.quantize import op as quantize_op
from jaxlowprec.ops.quantize.random_bits import Draws
from jaxlowprec.ops.quantize.reference import FIRST_STREAM
from jaxlowprec.ops.rounding import from_bits

TILE = 128  # rows of a kernel's tile; a multiple of every block


def over_batches(function: Callable) -> Callable:
    """Maps a function of arrays without batch axes over those of its second argument, the sizes [..., E]; the arguments
    after it that `shared` lists have no batch axes."""

    def run(x: jax.Array, sizes: jax.Array, *rest: jax.Array, shared: Sequence[int] = ()) -> Any:
        mapped = function
        for _ in range(sizes.ndim - 1):
            mapped = jax.vmap(mapped, in_axes=(0, 0, *(None if i in shared else 0 for i in range(len(rest)))))
        return mapped(x, sizes, *rest)

    return run


@dataclasses.dataclass(frozen=True)
class GroupedQuantizeSpec:
    """One variant of the op.

    Attributes:
        format: what to quantise to; no square tiles.
        rowwise, columnwise: the wanted directions.
        hadamard: a rotation of size 16 along the rows of each group for the columnwise direction; only for NVFP4.
        stochastic: random bits round the codes, or the scales if `eden`.
        ragged_columns: C is not a multiple of the elements that must stay together along it.
        eden, encode_scale_given: see `QuantizeSpec`.
        amaxes_given: the amaxes of rows are an operand, since rows go on elsewhere; only for scales of lines.
    """

    format: Any
    rowwise: bool
    columnwise: bool
    hadamard: Hadamard | None
    stochastic: bool
    ragged_columns: bool
    eden: bool = False
    encode_scale_given: bool = False
    amaxes_given: bool = False

    @property
    def by_lines(self) -> bool:
        """Whether each row has a scale, or each column in each group."""
        return self.format.scaling == "rows"

    @property
    def directions(self) -> int:
        """The number of wanted directions."""
        return self.rowwise + self.columnwise

    @property
    def tensors(self) -> int:
        """The number of operands with a number per group: one per direction if the format has a tensor scale; or, if
        they are given, the amaxes of rows."""
        return self.directions if self.format.has_tensor_scale else int(self.amaxes_given)


def _rule(spec: GroupedQuantizeSpec) -> wiring.ShardingRule:
    """x is [..., T, C] and sizes [..., E], whole along T and E; C splits, into whole blocks where it is quantised."""
    fmt = spec.format
    size = max(fmt.length, BLOCK if spec.stochastic else 1) if spec.rowwise else 1
    column = codes = blocks = sixteens = "c"
    whole = ["t", "e", "tblocks", "tcodes", "tsixteens"]
    sizes: dict[str, Any] = {"w": 2}
    if spec.ragged_columns and size > 1:
        codes, blocks, sixteens = "cbytes" if fmt.packed else "c", "cblocks", "csixteens"
        whole += ["c", codes, blocks, sixteens]
    elif size > 1:
        sizes |= {"k": size, "h": size // 2, "g": size // BLOCK}
        column, codes = "(c k)", f"(c {'h' if fmt.packed else 'k'})"
        sixteens = "(c g)" if size > BLOCK else "c"
    per_group = fmt.scaling == "tensor"
    tensor = "... t" if spec.amaxes_given else "... e"
    operands = [f"... t {column}", "... e", *[tensor] * spec.tensors, *["... e w"] * spec.stochastic]
    results = []
    row_scales, column_scales = f"... t {blocks}", f"... {column} tblocks"
    if spec.by_lines:
        row_scales, column_scales = "... t one", f"... e {column} one"
        whole += ["one"]
    if spec.rowwise:
        operands += ["t", sixteens] * spec.stochastic
        results += [f"... t {codes}", "... e" if per_group else row_scales]
    if spec.columnwise:
        operands += [column, "tsixteens"] * spec.stochastic
        results += [
            f"... {column} {'tcodes' if fmt.packed else 't'}",
            "... e" if per_group else column_scales,
        ]
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    used = set(re.findall(r"\w+", text))
    reductions = ["c"] if spec.by_lines and spec.rowwise and not spec.amaxes_given and "c" not in whole else []
    sizes = {f: n for f, n in sizes.items() if f in used}
    return wiring.ShardingRule(text, reductions, [f for f in dict.fromkeys(whole) if f in used], **sizes)


@functools.cache
def grouped_quantize_op(spec: GroupedQuantizeSpec, implementation: Implementation) -> wiring.Op:
    """x [..., T, C], sizes [..., E], an amax [..., E] (or encode scale) per direction for formats with a tensor scale,
    or the amaxes of rows [..., T] if they are given, then if stochastic keys [..., E, 2] and indices of lines and
    sixteens per direction -> codes and scales per direction.

    Indices along T are counted from each group's first row.
    """
    fmt, chosen = spec.format, choose("grouped_matmul", implementation)
    if fmt.without_kernel:
        chosen = without_kernels(chosen, fmt.without_kernel, "cpu", "cuda")

    def outputs(x: jax.Array, sizes: jax.Array, *_: jax.Array) -> wiring.Shapes:
        *batch, rows, columns = x.shape
        shapes = []
        for wanted, columnwise in ((spec.rowwise, False), (spec.columnwise, True)):
            if not wanted:
                continue
            line = columns if columnwise else rows
            if spec.by_lines:
                scales = (*(sizes.shape if columnwise else batch), line, 1)
                shapes += [((*batch, line, rows if columnwise else columns), fmt.data_dtype), (scales, fmt.scale_dtype)]
                continue
            blocks = count(rows, sizes.shape[-1], fmt.length) if columnwise else -(-columns // fmt.length)
            codes = blocks * fmt.length // 2 if fmt.packed else rows if columnwise else columns
            scales = sizes.shape if fmt.scaling == "tensor" else (*batch, line, blocks)
            shapes += [((*batch, line, codes), fmt.data_dtype), (scales, fmt.scale_dtype)]
        return shapes

    def one_batch(x: jax.Array, sizes: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        tensors, random = operands[: spec.tensors], operands[spec.tensors :]
        out: list[jax.Array] = []
        for i in range(spec.directions):
            tensor = tensors[i] if i < len(tensors) else None
            columnwise = i == 1 or not spec.rowwise
            stream = columnwise + (FIRST_STREAM if spec.eden else 0)
            draws = Draws(random[0], random[1 + 2 * i], random[2 + 2 * i], stream) if random else None
            options: Any = {"draws": draws, "eden": spec.eden, "encode_scale_given": spec.encode_scale_given}
            if columnwise:
                out += reference.quantize_columnwise(x, sizes, fmt, spec.hadamard, tensor, **options)
            else:
                out += reference.quantize_rowwise(x, sizes, fmt, tensor, **options)
        return out

    def run_reference(x: jax.Array, sizes: jax.Array, *operands: jax.Array) -> Sequence[jax.Array]:
        if x.size == 0:
            return [_nothing(shape, dtype, fmt) for shape, dtype in outputs(x, sizes)]
        first_index = spec.tensors + spec.stochastic
        return over_batches(one_batch)(x, sizes, *operands, shared=range(first_index, len(operands)))

    def run_native(x: jax.Array, sizes: jax.Array, *operands: jax.Array) -> Sequence[jax.Array]:
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs(x, sizes)]
        if spec.by_lines and spec.columnwise:  # all rows come before the first code
            operands = (*_native_amaxes_of_lines(spec, x, sizes, operands[: spec.tensors]), *operands[spec.tensors :])
        call = jax.ffi.ffi_call("jaxlowprec_grouped_quantize", results)
        found = call(
            x,
            sizes,
            *operands,
            format=fmt.attributes,
            rowwise=spec.rowwise,
            columnwise=spec.columnwise,
            rotate_columns=spec.hadamard is not None,
            stochastic=spec.stochastic,
            encode_scale_given=spec.encode_scale_given,
            eden=spec.eden,
            sign_mask=_mask(spec.hadamard),
        )
        if spec.by_lines and spec.columnwise:
            of_zeros = lines.stored_scales(jnp.zeros(()), fmt)
            empty = over_batches(_is_empty)(x, sizes)[..., None, None]
            found = [*found[:-1], jnp.where(empty, of_zeros, found[-1])]
        return found

    def run_on_gpu(x: jax.Array, sizes: jax.Array, *operands: jax.Array) -> Sequence[jax.Array]:
        if x.size == 0:
            return run_reference(x, sizes, *operands)
        shared = range(spec.tensors + spec.stochastic, len(operands))
        return over_batches(functools.partial(quantize, spec))(x, sizes, *operands, shared=shared)

    def when_split(axes: Mapping[str, Any], x: jax.Array, *operands: jax.Array) -> Sequence[jax.Array]:
        """The amaxes of rows that are split come first, and then the codes of each part."""
        amaxes = from_bits(jax.lax.pmax(lines.amax_bits(x), axes["c"]))
        given = dataclasses.replace(spec, amaxes_given=True)
        return grouped_quantize_op(given, implementation)(x, operands[0], amaxes, *operands[1:])

    return wiring.define(
        "jaxlowprec_grouped_quantize",
        rule=_rule(spec),
        outputs=outputs,
        reference=run_reference,
        native={"cpu": run_native, "cuda": run_on_gpu},
        fenced=True,
        when_split=when_split if spec.by_lines else None,
        **chosen,
    )


def _is_empty(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Whether each group has no rows, [E]."""
    return Groups.of(sizes, x.shape[0]).count == 0


def _native_amaxes_of_lines(
    spec: GroupedQuantizeSpec, x: jax.Array, sizes: jax.Array, given: Sequence[jax.Array]
) -> list[jax.Array]:
    """The amaxes of rows [..., T], if the spec wants them, and of each group's columns [..., E, C]."""
    rows = spec.rowwise and not given
    shapes = [x.shape[:-1]] * rows + [(*sizes.shape, x.shape[-1])]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return [*given, *jax.ffi.ffi_call("jaxlowprec_grouped_line_amaxes", results)(x, sizes, rows=rows)]


def _nothing(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, fmt: Format) -> jax.Array:
    """Codes or scales of an array without elements."""
    if jnp.dtype(dtype).itemsize == 1:
        return jax.lax.bitcast_convert_type(jnp.zeros(shape, jnp.uint8), dtype)
    if fmt.scaling == "rows":
        return jnp.broadcast_to(lines.stored_scales(jnp.zeros(()), fmt), shape)
    return jnp.full(shape, 1.0 if fmt.scaling == "tensor" else 0.0, dtype)


@functools.cache
def grouped_amax_op(plain: bool, hadamard: Hadamard | None, implementation: Implementation) -> wiring.Op:
    """x [..., T, C], sizes [..., E] -> float32 [..., E]: `plain`, then after the rotation along T in each group."""
    number = int(plain) + int(hadamard is not None)

    def outputs(_: jax.Array, sizes: jax.Array) -> wiring.Shapes:
        return [(sizes.shape, jnp.float32)] * number

    def one_batch(x: jax.Array, sizes: jax.Array) -> list[jax.Array]:
        return reference.amax(x, sizes, plain, hadamard)

    def run_native(x: jax.Array, sizes: jax.Array) -> Sequence[jax.Array]:
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs(x, sizes)]
        call = jax.ffi.ffi_call("jaxlowprec_grouped_amax", results)
        return call(x, sizes, plain=plain, rotated=hadamard is not None, sign_mask=_mask(hadamard))

    def run_on_gpu(x: jax.Array, sizes: jax.Array) -> Sequence[jax.Array]:
        by = one_batch if x.size == 0 else functools.partial(amax, plain, hadamard)
        return over_batches(by)(x, sizes)

    return wiring.define(
        "jaxlowprec_grouped_amax",
        rule=wiring.ShardingRule(
            f"... t c, ... e -> {', '.join(['... e'] * number)}", reductions=("c",), whole=("t", "e")
        ),
        outputs=outputs,
        reference=over_batches(one_batch),
        native={"cpu": run_native, "cuda": run_on_gpu},
        collective=largest_over,
        **choose("grouped_matmul", implementation),
    )


def _mask(hadamard: Hadamard | None) -> np.int32:
    return np.uint32(hadamard.mask if hadamard else 0).view(np.int32)


def amax(plain: bool, hadamard: Hadamard | None, x: jax.Array, sizes: jax.Array) -> list[jax.Array]:
    """The amaxes of each group's rows, as `reference.amax` gives them, by the kernel."""
    slots = Slots.of(Groups.of(sizes, x.shape[0]), TILE)
    found = amax_op.native_call(Amaxes(plain, hadamard), slots.take(x, TILE), vmap_method="expand_dims")
    return [largest_of(of_slots, slots.group, sizes.shape[0]) for of_slots in found]


def quantize(spec: GroupedQuantizeSpec, x: jax.Array, sizes: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """The op of `grouped_quantize_op`, on the operands that it documents."""
    groups = Groups.of(sizes, x.shape[0])
    slots = Slots.of(groups, TILE)
    tensors, random = operands[: spec.tensors], operands[spec.tensors :]
    options = {"encode_scale_given": spec.encode_scale_given, "ragged_rows": False, "ragged_columns": False}
    directions = spec.rowwise, spec.columnwise
    matrices = quantize_op.QuantizeSpec(
        spec.format, *directions, spec.hadamard, spec.stochastic, **options, eden=spec.eden
    )
    amaxes_given = spec.amaxes_given or (spec.by_lines and spec.columnwise)
    matrices = dataclasses.replace(matrices, amaxes_given=amaxes_given)
    if spec.by_lines and not (spec.columnwise or spec.stochastic):
        there = (groups.of_rows() < sizes.shape[0])[:, None]
        found = quantize_op.native_call(matrices, x, *tensors, vmap_method="expand_dims")
        return [where_else_zero(there, a) for a in found]
    taken, of_columns = slots.take(x, TILE), None
    if spec.by_lines:
        of_slots, of_columns = _amaxes_in_slots(spec, slots, taken, tensors, sizes.shape[0])
    else:
        of_slots = [amax[slots.group] for amax in tensors]
    of_slots += _random(spec, slots, random)
    found = quantize_op.native_call(matrices, taken, *of_slots, vmap_method="expand_dims")
    if of_columns is not None:  # those of empty groups, too
        found = [*found[:-1], lines.stored_scales(of_columns, spec.format)]
    results: list[jax.Array] = []
    for i in range(spec.directions):
        lay_out = _rows if i == 0 and spec.rowwise else _columns
        data, scale = found[2 * i : 2 * i + 2]
        results += lay_out(groups, spec.format, data, scale)
    return results


def _amaxes_in_slots(
    spec: GroupedQuantizeSpec, slots: Slots, taken: jax.Array, given: Sequence[jax.Array], groups: int
) -> tuple[list[jax.Array], jax.Array | None]:
    """The amaxes of lines that the kernel is given, by slots, and those of each group's columns [E, C], or None.

    `taken`: x in slots; `given`: the amaxes of rows [T], or nothing.
    """
    rows = [slots.take(amax[:, None], TILE)[..., 0] for amax in given]
    if not spec.columnwise:
        return rows, None
    found = quantize_op.native_amaxes_of_lines(taken, spec.rowwise and not rows, True, "expand_dims")
    of_columns = largest_of(found[-1], slots.group, groups)
    return [*rows, *found[:-1], of_columns[slots.group]], of_columns


def _random(spec: GroupedQuantizeSpec, slots: Slots, random: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Keys and indices of lines and sixteens of each slot; along the rows they are counted within its group."""
    if not spec.stochastic:
        return []

    def along_rows(
        ids: jax.Array, length: int
    ) -> jax.Array:  # [T / length] -> [S, TILE / length]; the indices of padding do not matter
        count = TILE // length
        return ids[jnp.minimum(slots.within[:, None] * count + jnp.arange(count), ids.shape[0] - 1)]

    words, *ids = random
    found = [words[slots.group]]
    if spec.rowwise:
        found += [along_rows(ids[0], 1), ids[1]]
    if spec.columnwise:
        found += [ids[-2], along_rows(ids[-1], BLOCK)]
    return found


def _places_of_rows(groups: Groups) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[T]: the slot of each row, its place in the slot, and whether it is in a group."""
    group = groups.of_rows()
    there, group = group < groups.start.shape[0], jnp.minimum(group, groups.start.shape[0] - 1)
    local = jnp.arange(groups.rows, dtype=jnp.int32) - groups.start[group]
    return groups.first_slots(TILE)[group] + local // TILE, local % TILE, there


def _rows(groups: Groups, fmt: Format, data: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Codes [S, TILE, bytes] and scales, of rows -> as `reference.quantize_rowwise`."""
    slot, row, there = _places_of_rows(groups)

    def of_rows(a: jax.Array) -> jax.Array:
        return where_else_zero(there[:, None], a[slot, row])

    return [of_rows(data), _tensor_scales(groups, scale) if fmt.scaling == "tensor" else of_rows(scale)]


def _columns(groups: Groups, fmt: Format, data: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Codes [S, C, bytes] and scales, of columns -> as `reference.quantize_columnwise`; of lines, they are so."""
    blocks = Slots.of(groups, max(fmt.length, BLOCK))
    used, in_slot = blocks.valid > 0, TILE // max(fmt.length, BLOCK)
    slot = jnp.minimum(groups.first_slots(TILE)[blocks.group] + blocks.within // in_slot, data.shape[0] - 1)

    def of_blocks(a: jax.Array) -> jax.Array:  # [S, C, in_slot * n] -> [C, blocks, n]
        pieces = a.reshape(*a.shape[:2], in_slot, a.shape[-1] // in_slot)[slot, :, blocks.within % in_slot]
        return jnp.swapaxes(where_else_zero(used[:, None, None], pieces), 0, 1)

    if fmt.packed:
        codes = of_blocks(data)
        codes = codes.reshape(data.shape[1], codes.shape[-2] * codes.shape[-1])
    else:
        slot_of_row, row, there = _places_of_rows(groups)
        codes = where_else_zero(there[:, None], data[slot_of_row, :, row]).T
    if fmt.scaling == "tensor":
        return [codes, _tensor_scales(groups, scale)]
    return [codes, scale if fmt.scaling == "rows" else of_blocks(scale)[..., 0]]


def _tensor_scales(groups: Groups, scale: jax.Array) -> jax.Array:
    """Scales of the slots [S] -> one per group, 1 where the group is empty."""
    first = jnp.minimum(groups.first_slots(TILE), scale.shape[0] - 1)
    return jnp.where(groups.count > 0, scale[first], 1.0)
