"""The ops of products of rows in groups: quantised rows by quantised weights, quantised columns by columns (wgrad)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.ops.checks import Implementation, choose
from jaxlowprec.ops.grouped_matmul import chunks, ragged, reference
from jaxlowprec.ops.grouped_matmul.groups import Groups
from jaxlowprec.ops.grouped_matmul.quantize_op import over_batches
from jaxlowprec.ops.rounding import rounded, widened
from jaxlowprec.ops.scaled_matmul.op import sizes_in
from jaxlowprec.ops.scaled_matmul.reference import alpha, apply_amaxes, apply_line_scales, integer_dot, products


@dataclasses.dataclass(frozen=True)
class GroupedMatmulSpec:
    """One variant of either op.

    Attributes:
        a_format, b_format: of the operands. Only the weights of the product of rows may have square tiles.
        ragged_columns: N is not a multiple of such tiles.
        ragged_depth: K, as stored, is not a multiple of the block.
        bias: whether there is one.
        out_dtype: of the result.
        float32_sums: see `MatmulSpec`.
        accumulate: whether there is something to add the result to; only of wgrad.
    """

    a_format: Any
    b_format: Any
    ragged_columns: bool
    ragged_depth: bool
    bias: bool
    out_dtype: jax.typing.DTypeLike
    float32_sums: bool = False
    accumulate: bool = False

    @property
    def two_level(self) -> bool:
        """Whether the operands have amaxes."""
        return self.a_format.scaling == "two_level"

    @property
    def by_lines(self) -> bool:
        """Whether each line of a has a scale, and of b, unless that has groups of elements."""
        return self.a_format.scaling == "rows"

    @property
    def integers(self) -> bool:
        """Whether both operands are 8-bit integers, whose sums are exact."""
        return self.a_format.element == self.b_format.element == "int8"

    @property
    def per_group(self) -> bool:
        """Whether a scale is one number for each group."""
        return self.a_format.scaling == "tensor"


def _rule(spec: GroupedMatmulSpec) -> wiring.ShardingRule:
    """a is [..., T, K], b [..., E, N, K]. N splits (with tiles in whole ones), K in whole blocks; T and E do not."""
    length = max(spec.a_format.length, spec.b_format.length)
    whole, n, scale_n = ["t", "e"], "n", "n"
    if spec.b_format.tiles and spec.ragged_columns:
        scale_n = "nblocks"
        whole += [n, scale_n]
    elif spec.b_format.tiles:
        n = f"(n {'b' if spec.b_format.length == length else 'tile'})"
    if spec.per_group:
        operands = ["... t k", "... e", f"... e {n} k", "... e"]
    else:
        formats = spec.a_format, spec.b_format
        codes = ["k" if length == 1 else f"(k {'h' if f.packed else 'b'})" for f in formats]
        if spec.ragged_depth:
            codes = ["kbytes" if f.packed else "kcodes" for f in formats]
            whole += [*dict.fromkeys(codes), "kblocks", "kparts"]
        names = ("kblocks", "kparts") if spec.ragged_depth else ("k", "(k p)")
        blocks = ["one" if f.scaling == "rows" else names[f.length < length] for f in formats]
        operands = [f"... t {codes[0]}", f"... t {blocks[0]}", f"... e {n} {codes[1]}", f"... e {scale_n} {blocks[1]}"]
        whole += ["one"] * spec.by_lines
    operands += ["... e", *["... e"] * 2 * spec.two_level, *[f"... e {n}"] * spec.bias]
    text = f"{', '.join(operands)} -> ... t {n}"
    sizes = sizes_in(text, length, spec.b_format)
    return wiring.ShardingRule(text, reductions=() if spec.ragged_depth else ("k",), whole=whole, **sizes)


@functools.cache
def grouped_matmul_op(spec: GroupedMatmulSpec, implementation: Implementation) -> wiring.Op:
    """a [..., T, K] in groups and b [..., E, N, K], each as data and scale; sizes [..., E]; both amaxes [..., E] where
    there are, and the bias float32 [..., E, N] -> [..., T, N]."""
    first_extra = 5 + 2 * spec.two_level

    def outputs(a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, *_: jax.Array) -> wiring.Shapes:
        return [((*a_data.shape[:-1], b_data.shape[-2]), spec.out_dtype)]

    def one_batch(
        a_data: jax.Array, sizes: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array, *rest: jax.Array
    ) -> jax.Array:
        data_of = reference.chunk_of(a_data)
        scale_of = None if spec.per_group else reference.chunk_of(wiring.as_bytes(a_scale))

        def multiply(row: jax.Array, group: jax.Array) -> jax.Array:
            scale = a_scale[group] if scale_of is None else wiring.from_bytes([scale_of(row)], [a_scale.dtype])[0]
            y = products(data_of(row), scale, spec.a_format, b_data[group], b_scale[group], spec.b_format)
            if spec.two_level:
                y = apply_amaxes(y, *(amax[group] for amax in rest[:2]))
            return y + rest[-1][group] if spec.bias else y

        return reference.by_chunks(sizes, a_data.shape[0], b_data.shape[-2], spec.out_dtype, multiply)

    def run_reference(
        a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array, sizes: jax.Array, *rest: jax.Array
    ) -> Sequence[jax.Array]:
        return [over_batches(one_batch)(a_data, sizes, a_scale, b_data, b_scale, *rest)]

    def run_native(*operands: jax.Array) -> Sequence[jax.Array]:
        ((shape, dtype),) = outputs(*operands)
        call = jax.ffi.ffi_call("jaxlowprec_grouped_matmul", jax.ShapeDtypeStruct(shape, dtype))
        formats = {"a_format": spec.a_format.attributes, "b_format": spec.b_format.attributes}
        return [call(*operands, **formats, bias=spec.bias)]

    def run_by_chunks(
        a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array, sizes: jax.Array, *rest: jax.Array
    ) -> Sequence[jax.Array]:
        multiply = over_batches(functools.partial(chunks.matmul, spec, implementation))
        return [multiply(a_data, sizes, a_scale, b_data, b_scale, *rest)]

    def run_on_tpu(
        a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array, sizes: jax.Array, *rest: jax.Array
    ) -> Sequence[jax.Array]:
        if spec.integers:  # sums of ragged_dot would be in float32
            return run_by_chunks(a_data, a_scale, b_data, b_scale, sizes, *rest)
        return [over_batches(functools.partial(ragged.matmul, spec))(a_data, sizes, a_scale, b_data, b_scale, *rest)]

    def integer_sums(a_data: jax.Array, sizes: jax.Array, b_data: jax.Array) -> jax.Array:
        rows_of = reference.chunk_of(a_data)

        def multiply(row: jax.Array, group: jax.Array) -> jax.Array:
            return integer_dot(rows_of(row), b_data[group])

        return reference.by_chunks(sizes, a_data.shape[0], b_data.shape[-2], jnp.int32, multiply)

    def when_reduced(add_up: wiring.AddUp, *operands: jax.Array) -> Sequence[jax.Array]:
        """If K is split, partial sums are added up before bias and cast: of integers exactly, and without scales; else
        with scales, in float32."""
        if spec.integers:
            a_data, a_scale, b_data, b_scale, sizes = operands[:5]
            total = add_up(over_batches(integer_sums)(a_data, sizes, b_data)).astype(jnp.float32)
            total = rounded(total * bias_of_rows(b_scale[..., 0].astype(jnp.float32), sizes, total.shape[-2]))
            total = apply_line_scales(total, a_scale)
        else:
            plain = dataclasses.replace(spec, bias=False, out_dtype=jnp.dtype("float32"))
            (partial,) = grouped_matmul_op(plain, implementation)(*operands[:first_extra])
            total = add_up(partial)
        if spec.bias:
            total = total + bias_of_rows(operands[first_extra], operands[4], total.shape[-2])
        return [total.astype(spec.out_dtype)]

    return wiring.define(
        "jaxlowprec_grouped_matmul",
        rule=_rule(spec),
        outputs=outputs,
        reference=run_reference,
        native={"cpu": run_native, "cuda": run_by_chunks},
        portable={None: run_by_chunks, "tpu": run_on_tpu},
        when_reduced=when_reduced,
        **choose("grouped_matmul", implementation),
    )


def bias_of_rows(bias: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
    """[..., E, N] -> [..., T, N]: the bias of each row's group, 0 for rows in no group."""

    def one_batch(bias: jax.Array, sizes: jax.Array) -> jax.Array:
        group = Groups.of(sizes, rows).of_rows()
        return jnp.take(bias, group, axis=0, mode="fill", fill_value=0)

    return over_batches(one_batch)(bias, sizes)


@functools.cache
def grouped_wgrad_op(spec: GroupedMatmulSpec, rows: int, implementation: Implementation) -> wiring.Op:
    """a [..., M, T] and b [..., N, T] columnwise in groups of T = `rows`, each as data and scale; sizes [..., E]; both
    amaxes [..., E] where there are, and what to accumulate onto [..., E, M, N] -> [..., E, M, N], contracted over the
    rows of each group."""
    formats = spec.a_format, spec.b_format
    codes = ["tcodes" if fmt.packed else "t" for fmt in formats]
    scale = "... e" if spec.per_group else "... e {} one" if spec.by_lines else "... {} tblocks"
    operands = [f"... m {codes[0]}", scale.format("m"), f"... n {codes[1]}", scale.format("n"), "... e"]
    operands += ["... e"] * 2 * spec.two_level + ["... e m n"] * spec.accumulate
    text = f"{', '.join(operands)} -> ... e m n"
    whole = [f for f in ("t", "tcodes", "tblocks", "e", "one") if f" {f}" in text]

    def outputs(
        a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array, sizes: jax.Array, *_: jax.Array
    ) -> wiring.Shapes:
        return [((*sizes.shape, a_data.shape[-2], b_data.shape[-2]), spec.out_dtype)]

    def one_batch(
        a_data: jax.Array, sizes: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array, *rest: jax.Array
    ) -> jax.Array:
        if spec.by_lines:
            sums = reference.sums_within_groups(a_data, b_data, sizes)
            return finished(apply_line_scales(sums.astype(jnp.float32), a_scale, b_scale), sizes, rest)
        a = reference.Columns(a_data, a_scale, formats[0])
        b = reference.Columns(b_data, b_scale, formats[1])
        y = reference.wgrad_terms(a, b, sizes, rows)
        if spec.per_group:
            y = rounded(rounded(y * a_scale[:, None, None]) * b_scale[:, None, None])
        if spec.two_level:
            y = rounded(y * alpha(*rest[:2])[:, None, None])
        return finished(y, sizes, rest)

    def finished(y: jax.Array, sizes: jax.Array, rest: Sequence[jax.Array]) -> jax.Array:
        empty = (Groups.of(sizes, rows).count == 0)[:, None, None]  # whatever its amaxes and scales are
        before = widened(rest[-1]) if spec.accumulate else jnp.zeros_like(y)
        return jnp.where(empty, before, y + before if spec.accumulate else y).astype(spec.out_dtype)

    def lines_by_chunks(
        a_data: jax.Array, sizes: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array, *rest: jax.Array
    ) -> jax.Array:
        sums = chunks.sums_of_columns(spec, implementation, sizes, a_data, b_data)
        return finished(apply_line_scales(sums.astype(jnp.float32), a_scale, b_scale), sizes, rest)

    def run_reference(
        a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array, sizes: jax.Array, *rest: jax.Array
    ) -> Sequence[jax.Array]:
        return [over_batches(one_batch)(a_data, sizes, a_scale, b_data, b_scale, *rest)]

    def run_native(*operands: jax.Array) -> Sequence[jax.Array]:
        ((shape, dtype),) = outputs(*operands)
        aliases = {len(operands) - 1: 0} if spec.accumulate else {}
        result = jax.ShapeDtypeStruct(shape, dtype)
        call = jax.ffi.ffi_call("jaxlowprec_grouped_wgrad", result, input_output_aliases=aliases)
        attributes = {"a_format": formats[0].attributes, "b_format": formats[1].attributes, "rows": rows}
        return [call(*operands, **attributes, accumulate=spec.accumulate)]

    def run_by_chunks(
        a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array, sizes: jax.Array, *rest: jax.Array
    ) -> Sequence[jax.Array]:
        by_chunks = lines_by_chunks if spec.by_lines else functools.partial(chunks.wgrad, spec, implementation, rows)
        multiply = over_batches(by_chunks)
        return [multiply(a_data, sizes, a_scale, b_data, b_scale, *rest)]

    return wiring.define(
        "jaxlowprec_grouped_wgrad",
        rule=wiring.ShardingRule(text, whole=whole),
        outputs=outputs,
        reference=run_reference,
        native={"cpu": run_native, "cuda": run_by_chunks},
        portable=run_by_chunks,
        **choose("grouped_matmul", implementation),
    )
