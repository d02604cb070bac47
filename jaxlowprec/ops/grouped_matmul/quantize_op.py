"""The ops that quantise rows in groups and find the amax of each group, before the products of `op`."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import BLOCK
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.amax.op import largest_over
from jaxlowprec.ops.grouped_matmul import reference, tiled
from jaxlowprec.ops.grouped_matmul.groups import count
from jaxlowprec.ops.implementation import Implementation, choose
from jaxlowprec.ops.quantize.eden import FIRST_STREAM
from jaxlowprec.ops.quantize.philox import Draws


def over_batches(function: Callable) -> Callable:
    """Maps a function of arrays without batch axes over those of its second argument, the sizes [..., E]; the arguments
    after it that `shared` lists have no batch axes."""

    def run(x, sizes, *rest, shared=()):
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
    """

    format: Any
    rowwise: bool
    columnwise: bool
    hadamard: Hadamard | None
    stochastic: bool
    ragged_columns: bool
    eden: bool = False
    encode_scale_given: bool = False

    @property
    def directions(self) -> int:
        """The number of wanted directions."""
        return self.rowwise + self.columnwise

    @property
    def tensors(self) -> int:
        """The number of operands with a number per group: one per direction if the format has a tensor scale."""
        return self.directions if self.format.has_tensor_scale else 0


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
    operands = [f"... t {column}", "... e", *["... e"] * spec.tensors, *["... e w"] * spec.stochastic]
    results = []
    if spec.rowwise:
        operands += ["t", sixteens] * spec.stochastic
        results += [f"... t {codes}", "... e" if per_group else f"... t {blocks}"]
    if spec.columnwise:
        operands += [column, "tsixteens"] * spec.stochastic
        results += [
            f"... {column} {'tcodes' if fmt.packed else 't'}",
            "... e" if per_group else f"... {column} tblocks",
        ]
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    used = set(re.findall(r"\w+", text))
    return wiring.ShardingRule(
        text, whole=[f for f in dict.fromkeys(whole) if f in used], **{f: n for f, n in sizes.items() if f in used}
    )


@functools.cache
def grouped_quantize_op(spec: GroupedQuantizeSpec, implementation: Implementation):
    """x [..., T, C], sizes [..., E], an amax [..., E] (or encode scale) per direction for formats with a tensor scale,
    then if stochastic keys [..., E, 2] and indices of lines and sixteens per direction -> codes and scales per
    direction.

    Indices along T are counted from each group's first row.
    """
    fmt = spec.format

    def outputs(x, sizes, *_):
        *batch, rows, columns = x.shape
        shapes = []
        for wanted, columnwise in ((spec.rowwise, False), (spec.columnwise, True)):
            if not wanted:
                continue
            line = columns if columnwise else rows
            blocks = count(rows, sizes.shape[-1], fmt.length) if columnwise else -(-columns // fmt.length)
            codes = blocks * fmt.length // 2 if fmt.packed else rows if columnwise else columns
            scales = sizes.shape if fmt.scaling == "tensor" else (*batch, line, blocks)
            shapes += [((*batch, line, codes), fmt.data_dtype), (scales, fmt.scale_dtype)]
        return shapes

    def one_batch(x, sizes, *operands):
        tensors, random = operands[: spec.tensors], operands[spec.tensors :]
        out: list[jax.Array] = []
        for i in range(spec.directions):
            tensor = tensors[i] if tensors else None
            columnwise = i == 1 or not spec.rowwise
            stream = columnwise + (FIRST_STREAM if spec.eden else 0)
            draws = Draws(random[0], *random[1 + 2 * i : 3 + 2 * i], stream) if random else None
            options: Any = {"draws": draws, "eden": spec.eden, "encode_scale_given": spec.encode_scale_given}
            if columnwise:
                out += reference.quantize_columnwise(x, sizes, fmt, spec.hadamard, tensor, **options)
            else:
                out += reference.quantize_rowwise(x, sizes, fmt, tensor, **options)
        return out

    def run_reference(x, sizes, *operands):
        if x.size == 0:
            return [_nothing(shape, dtype, fmt) for shape, dtype in outputs(x, sizes)]
        first_index = spec.tensors + spec.stochastic
        return over_batches(one_batch)(x, sizes, *operands, shared=range(first_index, len(operands)))

    def run_native(x, sizes, *operands):
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs(x, sizes)]
        return jax.ffi.ffi_call("jaxlowprec_grouped_quantize", results)(
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

    def run_on_gpu(x, sizes, *operands):
        if x.size == 0:
            return run_reference(x, sizes, *operands)
        shared = range(spec.tensors + spec.stochastic, len(operands))
        return over_batches(functools.partial(tiled.quantize, spec))(x, sizes, *operands, shared=shared)

    return wiring.define(
        "jaxlowprec_grouped_quantize",
        rule=_rule(spec),
        outputs=outputs,
        reference=run_reference,
        native={"cpu": run_native, "cuda": run_on_gpu},
        **choose("grouped_matmul", implementation),
    )


def _nothing(shape: tuple[int, ...], dtype: Any, fmt: Any) -> jax.Array:
    """Codes or scales of an array without elements."""
    if jnp.dtype(dtype).itemsize == 1:
        return jax.lax.bitcast_convert_type(jnp.zeros(shape, jnp.uint8), dtype)
    return jnp.full(shape, 1.0 if fmt.scaling == "tensor" else 0.0, dtype)


@functools.cache
def grouped_amax_op(plain: bool, hadamard: Hadamard | None, implementation: Implementation):
    """x [..., T, C], sizes [..., E] -> float32 [..., E]: `plain`, then after the rotation along T in each group."""
    number = int(plain) + int(hadamard is not None)

    def outputs(_, sizes):
        return [(sizes.shape, jnp.float32)] * number

    def one_batch(x, sizes):
        return reference.amax(x, sizes, plain, hadamard)

    def run_native(x, sizes):
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs(x, sizes)]
        call = jax.ffi.ffi_call("jaxlowprec_grouped_amax", results)
        return call(x, sizes, plain=plain, rotated=hadamard is not None, sign_mask=_mask(hadamard))

    def run_on_gpu(x, sizes):
        by = one_batch if x.size == 0 else functools.partial(tiled.amax, plain, hadamard)
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
