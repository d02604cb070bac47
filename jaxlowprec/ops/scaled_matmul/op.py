"""The op of the GEMM of two quantised operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import Format
from jaxlowprec.ops.checks import Implementation, choose
from jaxlowprec.ops.epilogue import Epilogue
from jaxlowprec.ops.scaled_matmul import cuda, portable, reference
from jaxlowprec.ops.split_rows import merged_columns, merged_rows, split_rows
from jaxlowprec.ops.sums.kinds import SumKind, adder_of


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """One variant of the op.

    Attributes:
        a_format, b_format: of the operands; alike, or 8-bit integers by rows and a 4-bit weight in groups, or FP8
            blocks and MXFP4.
        ragged_rows, ragged_columns: M or N is not a multiple of the operand's square tiles.
        ragged_depth: K, as stored, is not a multiple of the block.
        epilogue: the operations after the sums.
        rows_split: which rows are split (see `ops.split_rows`): "a": those of a and of the result, [..., S, M, ...];
            "both": those of a and b, which are contracted: the products of the parts are summed.
        float32_sums: GPUs use no tensor cores that may add up in fewer bits, and no platform multiplies FP8 codes as
            they are.
        sums: how the partial sums of a split K are added up; if it draws, the last operand is random words.
    """

    a_format: Any
    b_format: Any
    ragged_rows: bool
    ragged_columns: bool
    ragged_depth: bool
    epilogue: Epilogue
    rows_split: Literal["a", "both"] | None = None
    float32_sums: bool = False
    sums: SumKind = "float32"

    @property
    def by_lines(self) -> bool:
        """Whether each line of a has a scale, and of b, unless that has groups."""
        return self.a_format.scaling == "rows"

    @property
    def length(self) -> int:
        """Elements along K that cannot be split."""
        return max(self.a_format.length, self.b_format.length)

    @property
    def two_level(self) -> bool:
        """Whether the operands have amaxes."""
        return self.a_format.scaling == "two_level"


def sizes_in(text: str, length: int, weight: Format) -> dict[str, Any]:
    """The sizes of a rule's factors: b, the `length` elements along K that cannot be split; h, their bytes as 4-bit
    codes; p, their scales in a weight of shorter blocks; tile, the rows of such a weight's tiles."""
    sizes = {"b": length, "h": length // 2, "p": length // weight.length, "tile": weight.length}
    return {factor: size for factor, size in sizes.items() if f" {factor})" in text}


def _rule(spec: MatmulSpec) -> wiring.ShardingRule:
    """M and N split (into whole tiles, if there are tiles); K splits into whole blocks and is then summed over."""
    whole: list[str] = []
    length = spec.length

    def operand(factor: str, fmt: Format, ragged: bool, s: str) -> tuple[str, list[str]]:
        """The name of the operand's lines, and its data and scale, in a rule."""
        line = scale_line = factor
        longest = fmt.length == length
        if fmt.tiles and ragged:
            scale_line = f"{factor}blocks"
            whole.extend((line, scale_line))
        elif fmt.tiles:
            line = f"({factor} {'b' if longest else 'tile'})"
        if fmt.scaling == "tensor":
            return line, [f"... {s}{line} k", "..."]
        if fmt.scaling == "rows":
            whole.append("one")
            code = "k" if length == 1 else "kcodes" if spec.ragged_depth else "(k b)"
            whole.extend(["kcodes"] * (code == "kcodes"))
            return line, [f"... {s}{line} {code}", f"... {'' if spec.rows_split == 'both' else s}{line} one"]
        if spec.ragged_depth:
            code, blocks = "kbytes" if fmt.packed else "kcodes", "kblocks" if longest else "kparts"
            whole.extend((code, blocks))
        else:
            code, blocks = f"(k {'h' if fmt.packed else 'b'})", "k" if longest else "(k p)"
        return line, [f"... {s}{line} {code}", f"... {s}{scale_line} {blocks}"]

    m, a = operand("m", spec.a_format, spec.ragged_rows, "s " if spec.rows_split else "")
    n, b = operand("n", spec.b_format, spec.ragged_columns, "s " if spec.rows_split == "both" else "")
    m = f"s {m}" if spec.rows_split == "a" else m
    operands = a + b + ["..."] * 2 * spec.two_level + spec.epilogue.operands(m, n)
    results = spec.epilogue.results(m, n)
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    sizes = sizes_in(text, length, spec.b_format)
    reductions = ("s",) * (spec.rows_split == "both") + ("k",) * (not spec.ragged_depth)
    return wiring.ShardingRule(text, reductions=reductions, whole=tuple(dict.fromkeys(whole)), **sizes)


def _merging(spec: MatmulSpec, multiply: Callable) -> Callable:
    """A function that multiplies matrices, wrapped to take and return split rows where the spec says so."""

    def multiply_parts(
        a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array, *rest: jax.Array, **how: bool
    ) -> Sequence[jax.Array]:
        amaxes, both = 2 * spec.two_level, spec.rows_split == "both"
        merge = merged_columns if both else merged_rows
        shared = spec.a_format.scaling == "tensor" or (spec.by_lines and both)  # scales, by all parts
        a_merged = merge(a_data), a_scale if shared else merge(a_scale)
        if both:
            return multiply(*a_merged, merge(b_data), b_scale if shared else merge(b_scale), *rest, **how)
        rest = (*rest[:amaxes], *_merged_extras(spec, rest[amaxes:]))
        return [split_rows(y, *a_data.shape[-3:-1]) for y in multiply(*a_merged, b_data, b_scale, *rest, **how)]

    return multiply_parts if spec.rows_split else multiply


def _integer_sums(spec: MatmulSpec, a: jax.Array, b: jax.Array) -> jax.Array:
    """The sums of products of 8-bit integers, int32, laid out as the result: devices add them up exactly."""
    if spec.rows_split == "both":
        a, b = merged_columns(a), merged_columns(b)
    sums = reference.integer_dot(merged_rows(a) if spec.rows_split == "a" else a, b)
    return split_rows(sums, *a.shape[-3:-1]) if spec.rows_split == "a" else sums


def _with_line_scales(spec: MatmulSpec, total: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
    """Sums, laid out as the result, times the scales of both operands' lines."""
    b_scale = b_scale[..., None, :, :] if spec.rows_split == "a" else b_scale
    return reference.apply_line_scales(total, a_scale, b_scale)


def _merged_extras(spec: MatmulSpec, extras: Sequence[jax.Array]) -> list[jax.Array]:
    """The epilogue's operands: all except the bias are laid out as the result is."""
    bias = int(spec.epilogue.bias)
    return [*extras[:bias], *map(merged_rows, extras[bias:])]


@functools.cache
def matmul_op(spec: MatmulSpec, implementation: Implementation) -> wiring.Op:
    """a and b as data and scale; then, where the spec has them, both amaxes, bias float32 [..., N], accumulate
    [..., M, N] and the activation's input [..., M, N]; and words uint32 [..., 2] for sums that draw -> [..., M, N], and
    the pre-activation. M may be S, M."""

    def outputs(a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, *_: jax.Array) -> wiring.Shapes:
        *batch, rows = a_data.shape[:-1]
        batch = batch[:-1] if spec.rows_split == "both" else batch
        return spec.epilogue.outputs((*batch, rows, b_data.shape[-2]))

    amaxes = 2 * spec.two_level

    def multiply_by_reference(
        a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array, *rest: jax.Array
    ) -> Sequence[jax.Array]:
        y = reference.products(a_data, a_scale, spec.a_format, b_data, b_scale, spec.b_format)
        y = reference.apply_amaxes(y, *rest[:2]) if spec.two_level else y
        return spec.epilogue.finish(y, rest[amaxes:])

    def multiply_portably(
        a_data: jax.Array,
        a_scale: jax.Array,
        b_data: jax.Array,
        b_scale: jax.Array,
        *rest: jax.Array,
        float8: bool,
        on_one_tpu: bool = False,
    ) -> Sequence[jax.Array]:
        operands = a_data, a_scale, spec.a_format, b_data, b_scale, spec.b_format
        y = portable.products(*operands, float8=float8, on_one_tpu=on_one_tpu)
        if spec.a_format.scaling == "tensor":
            y = reference.apply_tensor_scales(y, a_scale, b_scale)
        if spec.by_lines:
            y = reference.apply_line_scales(y, a_scale, b_scale if spec.b_format.scaling == "rows" else None)
        y = reference.apply_amaxes(y, *rest[:2]) if spec.two_level else y
        return spec.epilogue.finish(y, rest[amaxes:])

    def multiply_natively(*operands: jax.Array) -> Sequence[jax.Array]:
        a_data, _, b_data, *_ = operands
        shapes = spec.epilogue.outputs((*a_data.shape[:-1], b_data.shape[-2]))
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        sums = 4 + amaxes + spec.epilogue.bias  # what is accumulated onto: the result can take its place
        in_place = spec.epilogue.accumulate and operands[sums].dtype == spec.epilogue.out_dtype
        aliases = {sums: 0} if in_place else {}
        return jax.ffi.ffi_call("jaxlowprec_scaled_matmul", results, input_output_aliases=aliases)(
            *operands,
            a_format=spec.a_format.attributes,
            b_format=spec.b_format.attributes,
            **spec.epilogue.attributes,
        )

    def multiply_on_gpu(*operands: jax.Array) -> Sequence[jax.Array]:
        a_data, _, b_data, *_ = operands
        if 0 in (*a_data.shape, *b_data.shape):
            return multiply_by_reference(*operands)  # nothing to multiply
        if problem := cuda.why_not(spec, a_data, b_data):
            if implementation == "ffi":
                raise NotImplementedError(f'scaled_matmul: implementation="ffi": {problem}')
            return multiply_portably(*operands, float8=float8)
        return cuda.matmul(spec, *operands)

    def when_reduced(add_up: wiring.AddUp, *operands: jax.Array) -> Sequence[jax.Array]:
        """If K is split, partial sums (scales applied) are added up before the rest of the epilogue."""
        if spec.a_format.element == spec.b_format.element == "int8" and spec.sums == "float32":
            total = add_up(_integer_sums(spec, operands[0], operands[2]))
            total = _with_line_scales(spec, total.astype(jnp.float32), operands[1], operands[3])
        else:
            plain = dataclasses.replace(spec, epilogue=spec.epilogue.accumulators_only, sums="float32")
            (partial,) = matmul_op(plain, implementation)(*operands[: 4 + amaxes])
            total = add_up(partial)
        extras = operands[4 + amaxes :]
        if spec.rows_split != "a":
            return spec.epilogue.finish(total, extras)
        results = spec.epilogue.finish(merged_rows(total), _merged_extras(spec, extras))
        return [split_rows(y, *total.shape[-3:-1]) for y in results]

    merging, float8 = functools.partial(_merging, spec), not spec.float32_sums
    return wiring.define(
        "jaxlowprec_scaled_matmul",
        inline=True,
        rule=_rule(spec),
        outputs=outputs,
        reference=merging(multiply_by_reference),
        portable=portable.by_platform(merging(multiply_portably), float8=float8),
        on_one_device={"tpu": functools.partial(merging(multiply_portably), float8=float8, on_one_tpu=True)},
        native={"cpu": merging(multiply_natively), "cuda": merging(multiply_on_gpu)},
        when_reduced=when_reduced,
        out_spec=spec.epilogue.out_spec,
        adder=adder_of(spec.sums),
        **choose("scaled_matmul", implementation),
    )
