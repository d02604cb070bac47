"""Norms that are quantised and not stored: for linears, which call this inside of their own derivatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops import scale_order
from jaxlowprec.ops.checks import choose
from jaxlowprec.ops.norms import op as norm
from jaxlowprec.ops.norms.op import NormSpec
from jaxlowprec.ops.quantize import op as quantize
from jaxlowprec.ops.quantize.op import QuantizeSpec, quantized_arrays, random_operands, spec_of
from jaxlowprec.ops.split_rows import merged_rows


class QuantizedNorm(NamedTuple):
    """The results of `quantized_norm`.

    Attributes:
        rowwise, columnwise: the norm, quantised; None where it is not wanted.
        total: the sum of x and the residual, or None.
        saved: numbers of each row for `norm_gradient_op`, float32 [..., R] each.
    """

    rowwise: QuantizedArray | None
    columnwise: QuantizedArray | None
    total: jax.Array | None
    saved: tuple[jax.Array, ...]


def quantized_norm(
    spec: NormSpec,
    fmt: Format,
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    beta: jax.Array | None = None,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    words: jax.Array | None = None,
    rows_split: bool = False,
) -> QuantizedNorm:
    """The norm, quantised and not stored; bytes are those of `normed` and then `quantize` or `quantize_both`.

    On CPUs the normed rows stay in the cache: one pass moves, of each element in 16 bits, 2 bytes of x, what it writes,
    and 4 more with a residual; `normed` and `quantize_both` move 4 more. GPUs read x, or the sum, twice: once for the
    numbers of the rows, and once to normalise and quantise it. `normed` and `quantize_both` move 2 more there.

    Arguments:
        spec: without amaxes.
        fmt: with `scaled_by_blocks_alone`.
        x, weight, residual, beta: see `normed`; x is [..., S, R, C] with `rows_split`.
        rowwise, columnwise: the wanted directions, one at least.
        words: for stochastic rounding: of the key, uint32 [..., 2], with x's batch axes.
        rows_split: see `quantize`.
    """
    batch = x.shape[: -3 if rows_split else -2]
    x, residual, weight, beta = wiring.align_varying(x, residual, weight, beta)
    parameters = [jnp.broadcast_to(p, (*batch, *p.shape)) for p in (weight, beta) if p is not None]
    rows = [x] if residual is None else [x, residual]
    quantized = spec_of(x, fmt, (rowwise, columnwise), None, words is not None, rows_split=rows_split)
    op = norm_quantize_op(spec, quantized)
    results = op(*rows, *parameters, *random_operands(quantized, x, words))
    total, saved, codes = _parts(spec, results)
    found = quantized_arrays(codes, [], quantized, like=x)
    return QuantizedNorm(
        found[0] if rowwise else None, found[-1] if columnwise else None, total[0] if total else None, tuple(saved)
    )


def _parts(spec: NormSpec, results: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """The sum, the saved numbers, and codes and scales, of the op's results."""
    first, second = int(spec.residual), spec.residual + spec.saved
    return results[:first], results[first:second], results[second:]


@functools.cache
def norm_quantize_op(spec: NormSpec, quantized: QuantizeSpec) -> wiring.Op:
    """The operands of `norm_op`, and those of `quantize_op` beside its x -> the results of `norm_op` but the norm, and
    those of `quantize_op` for it. Without amaxes; `quantized` is of a format without a tensor scale."""
    operands = 1 + spec.residual + 1 + spec.beta
    split = quantized.rows_split
    rule = quantize.rule_of(quantized)
    rows = f"{rule.lines} {rule.columns}"
    of_norm = [rows] * (1 + spec.residual), [f"... {rule.columns}"] * (1 + spec.beta)

    def outputs(x: jax.Array, *_: jax.Array) -> wiring.Shapes:
        return norm.shapes(spec, x)[1:] + quantize.shapes(quantized, x)

    def on_matrix(body: wiring.Body) -> wiring.Body:
        """The body, which takes one matrix for each weight, on tensors whose rows may be split."""

        def run(*args: jax.Array) -> Sequence[jax.Array]:
            if not split:
                return body(*args)
            x, rest = args[0], args[operands:]
            _, *random = quantize.merged(quantized, x, *rest)
            arrays = map(merged_rows, args[: 1 + spec.residual])
            results = body(*arrays, *args[1 + spec.residual : operands], *random)
            total, saved, codes = _parts(spec, results)
            others = [r.reshape(s) for r, (s, _) in zip([*total, *saved], norm.shapes(spec, x)[1:], strict=True)]
            return [*others, *quantize.in_parts(quantized, x, codes)]

        return run

    def run_reference(*args: jax.Array, quantize_by: Callable = quantize.reference_call) -> Sequence[jax.Array]:
        y, *others = norm.reference_call(spec, *args[:operands])
        return [*others, *quantize_by(quantized, y, *args[operands:])]

    def run_native(x: jax.Array, *rest: jax.Array, column_major: bool = False) -> Sequence[jax.Array]:
        shapes = norm.shapes(spec, x)[1:] + quantize.shapes(dataclasses.replace(quantized, rows_split=False), x)
        results = [jax.ShapeDtypeStruct(*result) for result in shapes]
        total, saved, codes = _parts(spec, results)
        layouts = [*[None] * len([*total, *saved]), *scale_order.layouts(codes, column_major)]
        attributes = {**spec.attributes, **spec.parameters, **quantized.attributes(column_major)}
        return jax.ffi.ffi_call("jaxlowprec_norm_quantize", results, output_layouts=layouts)(x, *rest, **attributes)

    def run_on_gpu(*args: jax.Array) -> Sequence[jax.Array]:
        return run_native(*args, column_major=scale_order.is_column_major(quantized.format))

    return wiring.define(
        f"jaxlowprec_{spec.kind}_norm_quantize",
        rule=rule.of_op(
            [*of_norm[0], *of_norm[1]], [rows] * spec.residual + [rule.lines] * spec.saved, whole=_axis(rule)
        ),
        outputs=outputs,
        reference=on_matrix(run_reference),
        native={"cpu": on_matrix(run_native), "cuda": on_matrix(run_on_gpu)},
        on_one_device={"tpu": on_matrix(functools.partial(run_reference, quantize_by=quantize.tpu_call))},
        fenced=True,
        **choose("norm", spec.implementation),
    )


def _axis(rule: quantize.ShardingParts) -> list[str]:
    """The features: rows stay whole on one device."""
    return [rule.columns.strip("()").split()[0]]
