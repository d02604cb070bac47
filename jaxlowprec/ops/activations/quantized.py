"""Activations and their gradients that are quantised and not stored: for linears, which call this inside of their own
derivatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops import scale_order
from jaxlowprec.ops.activations import reference
from jaxlowprec.ops.activations.reference import NAMED_ACTIVATIONS
from jaxlowprec.ops.checks import Implementation, choose
from jaxlowprec.ops.quantize import op as quantize
from jaxlowprec.ops.quantize.op import QuantizeSpec, quantized_arrays, random_operands, spec_of
from jaxlowprec.ops.split_rows import merged_rows

BothWays = tuple[QuantizedArray | None, QuantizedArray | None]
"""An array quantised rowwise and columnwise; None where it is not wanted."""


def quantized_activation(
    kind: str,
    fmt: Format,
    operands: Sequence[jax.Array],
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    words: jax.Array | None = None,
    rows_split: bool = False,
    implementation: Implementation = None,
) -> BothWays:
    """The activation, quantised in one pass; bytes are those of `activated` and then `quantize` or `quantize_both`.

    A pass moves, of each element in 16 bits, 2 bytes of each operand and what it writes; `activated` and
    `quantize_both` move 4 more.

    Arguments:
        kind, operands: see `activated`; arrays are [..., S, R, C] with `rows_split`.
        fmt: with `scaled_by_blocks_alone`.
        rowwise, columnwise: the wanted directions, one at least.
        words: for stochastic rounding: of the key, uint32 [..., 2], with the operands' batch axes.
        rows_split: see `quantize`.
    """
    first, *_ = operands = wiring.align_varying(*operands)
    quantized = spec_of(first, fmt, (rowwise, columnwise), None, words is not None, rows_split=rows_split)
    op = activation_quantize_op(kind, quantized, implementation)
    return _both_ways(op(*operands, *random_operands(quantized, first, words)), quantized, first)


def quantized_activation_gradients(
    kind: str,
    fmt: Format,
    dy: jax.Array,
    operands: Sequence[jax.Array],
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    rows_split: bool = False,
    implementation: Implementation = None,
) -> list[BothWays]:
    """The gradient of each operand, quantised to nearest in one pass; bytes are those of `activation_gradients` and
    then `quantize` or `quantize_both`.

    A pass moves, of each element in 16 bits, 2 bytes of dy and of each operand, and what it writes; separate ones move
    4 more for each operand. GPUs take a pass for each of two operands in float32.

    Arguments:
        dy: the activation's gradient.
        kind, fmt, operands, rowwise, columnwise, rows_split: see `quantized_activation`.
    """
    dy, *operands = wiring.align_varying(dy, *operands)
    quantized = spec_of(dy, fmt, (rowwise, columnwise), None, False, rows_split=rows_split)
    results = activation_gradient_quantize_op(kind, quantized, implementation)(dy, *operands)
    each = 2 * quantized.directions
    return [_both_ways(results[i * each : (i + 1) * each], quantized, x) for i, x in enumerate(operands)]


def _both_ways(results: Sequence[jax.Array], quantized: QuantizeSpec, like: jax.Array) -> BothWays:
    found = quantized_arrays(results, [], quantized, like=like)
    return found[0] if quantized.rowwise else None, found[-1] if quantized.columnwise else None


@functools.cache
def activation_quantize_op(kind: str, quantized: QuantizeSpec, implementation: Implementation = None) -> wiring.Op:
    """The operands of `activation_op`, and those of `quantize_op` beside its x -> the results of `quantize_op` for the
    activation. `quantized` is of a format without a tensor scale."""

    def run_reference(*operands: jax.Array) -> Sequence[jax.Array]:
        return [reference.activation(kind, *operands)]

    counts = 1 + NAMED_ACTIVATIONS[kind].gated, 1
    return _define("jaxlowprec_activation_quantize", kind, quantized, counts, run_reference, implementation)


@functools.cache
def activation_gradient_quantize_op(
    kind: str, quantized: QuantizeSpec, implementation: Implementation = None
) -> wiring.Op:
    """The operands of `activation_gradient_op` -> the results of `quantize_op` for the gradient of x and, if it is
    gated, for that of up. `quantized` is of a format without a tensor scale, and to nearest."""
    run_reference = functools.partial(reference.activation_gradient, kind)
    counts = 2 + NAMED_ACTIVATIONS[kind].gated, 1 + NAMED_ACTIVATIONS[kind].gated
    name = "jaxlowprec_activation_gradient_quantize"
    return _define(name, kind, quantized, counts, run_reference, implementation)


def _define(
    name: str,
    kind: str,
    quantized: QuantizeSpec,
    counts: tuple[int, int],
    make: Callable[..., Sequence[jax.Array]],
    implementation: Implementation,
) -> Callable[..., tuple[jax.Array, ...]]:
    """The op that makes arrays and quantises each.

    Arguments:
        counts: of the arrays that they are made of, and of those that are made.
        make: makes them, in pure JAX.
    """
    operands, results = counts
    rule = quantize.rule_of(quantized)
    rows = f"{rule.lines} {rule.columns}"
    of_matrix = dataclasses.replace(quantized, rows_split=False)

    def on_matrices(body: wiring.Body) -> wiring.Body:
        """The body, which takes matrices, on tensors whose rows may be split."""

        def run(x: jax.Array, *rest: jax.Array) -> Sequence[jax.Array]:
            if not quantized.rows_split:
                return body(x, *rest)
            merged, *random = quantize.merged(quantized, x, *rest[operands - 1 :])
            found = body(merged, *map(merged_rows, rest[: operands - 1]), *random)
            each = len(found) // results
            parts = [quantize.in_parts(quantized, x, found[i * each : (i + 1) * each]) for i in range(results)]
            return [array for part in parts for array in part]

        return run

    def run_reference(*args: jax.Array, quantize_by: Callable = quantize.reference_call) -> Sequence[jax.Array]:
        # Between barriers: XLA would store float32 numbers that other ops of the operands, or the results, share.
        made = make(*jax.lax.optimization_barrier(args[:operands]))
        made = jax.lax.optimization_barrier(tuple(made))
        return [array for y in made for array in quantize_by(of_matrix, y, *args[operands:])]

    def run_native(x: jax.Array, *rest: jax.Array, column_major: bool = False) -> Sequence[jax.Array]:
        found = [jax.ShapeDtypeStruct(*result) for result in quantize.shapes(of_matrix, x)] * results
        layouts = scale_order.layouts(found, column_major)
        attributes = {
            "kind": NAMED_ACTIVATIONS[kind].name,
            "gated": NAMED_ACTIVATIONS[kind].gated,
            **quantized.attributes(column_major),
        }
        return jax.ffi.ffi_call(name, found, output_layouts=layouts)(x, *rest, **attributes)

    def run_on_gpu(*args: jax.Array) -> Sequence[jax.Array]:
        return run_native(*args, column_major=scale_order.is_column_major(quantized.format))

    return wiring.define(
        name,
        rule=rule.of_op([rows] * operands, rule.results * (results - 1)),
        outputs=lambda x, *_: quantize.shapes(quantized, x) * results,
        reference=on_matrices(run_reference),
        native={"cpu": on_matrices(run_native), "cuda": on_matrices(run_on_gpu)},
        on_one_device={"tpu": on_matrices(functools.partial(run_reference, quantize_by=quantize.tpu_call))},
        fenced=True,
        **choose("activation", implementation),
    )
