"""The Int4 ops, and Int4 in the public `quantize`, `dequantize` and `fake_quantize`.

The ops quantise and pack, unpack and decode, or do both at once without writing codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import Int4
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.checks import Implementation, Platforms, choose
from jaxlowprec.ops.int4 import reference, tpu


class _Axis(NamedTuple):
    """Names of the quantised axis in a rule: of its elements, its bytes and its blocks."""

    elements: str
    bytes: str
    blocks: str
    whole: tuple[str, ...]
    sizes: dict[str, int]


def _quantized_axis(fmt: Int4, ragged: bool) -> _Axis:
    """The axis splits into whole blocks; not at all where the last block is not full or a byte may be of two blocks."""
    size = fmt.group_size
    if ragged or size % 2:
        return _Axis("k", "kbytes", "kblocks", ("k", "kbytes", "kblocks"), {})
    return _Axis("(k g)", "(k h)" if size > 2 else "k", "k", (), {"g": size, "h": size // 2} if size > 2 else {"g": 2})


def _rule(operands: list[str], results: list[str], axis: _Axis) -> wiring.ShardingRule:
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    words = text.replace("(", " ").replace(")", " ").replace(",", " ").split()
    sizes: dict[str, Any] = {factor: size for factor, size in axis.sizes.items() if factor in words}
    return wiring.ShardingRule(text, whole=[factor for factor in axis.whole if factor in words], **sizes)


def _across(function: Callable, columnwise: bool) -> Callable:
    """A function of rows; if `columnwise`, applied to columns by transposing its argument."""
    return (lambda x: function(jnp.swapaxes(x, -1, -2))) if columnwise else function


def _implemented(who: str, fmt: Int4, implementation: Implementation) -> Platforms:
    """The arguments of `wiring.define`. Published rules are for comparison and have no kernels."""
    chosen = choose(who, implementation)
    if fmt.rule == "deploy":
        return chosen
    if implementation == "ffi":
        raise NotImplementedError(
            f'{who}: implementation="ffi": there are no kernels for Int4(rule="{fmt.rule}"), which is for comparison; '
            'use rule="deploy", or implementation=None'
        )
    return choose(who, "reference")


def _call(target: str, results: Any, fmt: Int4, columnwise: bool, *operands: jax.Array, **attributes: Any) -> Any:
    """The native kernel of an op."""
    call = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results])
    block, symmetric = np.int64(fmt.group_size), fmt.symmetric
    return call(*operands, group=block, symmetric=symmetric, columnwise=columnwise, **attributes)


@functools.cache
def fake_quantize_op(fmt: Int4, columnwise: bool, ragged: bool, implementation: Implementation) -> wiring.Op:
    """x [..., R, C] -> the same shape and dtype. `ragged`: the quantised axis does not end with a whole block."""
    axis = _quantized_axis(fmt, ragged)
    x = f"... {axis.elements} c" if columnwise else f"... r {axis.elements}"

    def run_reference(x: jax.Array) -> Sequence[jax.Array]:
        values = _across(lambda rows: reference.fake_quantize(rows, fmt), columnwise)(x)
        return [jnp.swapaxes(values, -1, -2) if columnwise else values]

    def run_native(x: jax.Array) -> Sequence[jax.Array]:
        results = [(x.shape, x.dtype)]
        return _call("jaxlowprec_int4_fake_quantize", results, fmt, columnwise, x, scale_dtype=fmt.scale_dtype)

    return wiring.define(
        "jaxlowprec_int4_fake_quantize",
        rule=_rule([x], [x], axis),
        outputs=lambda x: [(x.shape, x.dtype)],
        reference=run_reference,
        native=run_native,
        **_implemented("fake_quantize", fmt, implementation),
    )


@functools.cache
def quantize_op(fmt: Int4, columnwise: bool, ragged: bool, implementation: Implementation) -> wiring.Op:
    """x [..., R, C] -> data [..., R, bytes], scale [..., R, blocks] and, where asymmetric, zero points like it.

    Columnwise: the results of the transposed array, [..., C, bytes].
    """
    axis = _quantized_axis(fmt, ragged)
    x = f"... {axis.elements} r" if columnwise else f"... r {axis.elements}"
    results = [f"... r {axis.bytes}", *[f"... r {axis.blocks}"] * (1 if fmt.symmetric else 2)]

    def outputs(x: jax.Array) -> wiring.Shapes:
        *batch, rows, length = (*x.shape[:-2], x.shape[-1], x.shape[-2]) if columnwise else x.shape
        blocks = -(-length // fmt.group_size)
        scales = (*batch, rows, blocks)
        zeros = [] if fmt.symmetric else [(scales, jnp.uint8)]
        return [((*batch, rows, -(-blocks * fmt.group_size // 2)), jnp.uint8), (scales, fmt.scale_dtype), *zeros]

    run_reference = _across(lambda rows: reference.quantize(rows, fmt), columnwise)

    def run_on_tpu(x: jax.Array) -> Sequence[jax.Array]:
        return tpu.quantize(fmt, columnwise, x) if tpu.serves(fmt, x) else run_reference(x)

    return wiring.define(
        "jaxlowprec_int4_quantize",
        rule=_rule([x], results, axis),
        outputs=outputs,
        reference=run_reference,
        on_one_device={"tpu": run_on_tpu},
        native=lambda x: _call("jaxlowprec_int4_quantize", outputs(x), fmt, columnwise, x),
        fenced=True,
        **_implemented("quantize", fmt, implementation),
    )


@functools.cache
def dequantize_op(
    fmt: Int4, columnwise: bool, ragged_length: int | None, dtype: jnp.dtype, implementation: Implementation
) -> wiring.Op:
    """The inverse of `quantize_op`. `ragged_length`: the length of a quantised axis that does not end with a
    whole block, else None."""
    axis = _quantized_axis(fmt, ragged_length is not None)
    operands = [f"... r {axis.bytes}", *[f"... r {axis.blocks}"] * (1 if fmt.symmetric else 2)]
    result = f"... {axis.elements} r" if columnwise else f"... r {axis.elements}"

    def length(scale: jax.Array) -> int:
        return scale.shape[-1] * fmt.group_size if ragged_length is None else ragged_length

    def outputs(data: jax.Array, scale: jax.Array, *_: jax.Array) -> wiring.Shapes:
        *batch, rows = data.shape[:-1]
        return [((*batch, length(scale), rows) if columnwise else (*batch, rows, length(scale)), dtype)]

    def run_reference(data: jax.Array, scale: jax.Array, zero: jax.Array | None = None) -> Sequence[jax.Array]:
        values = reference.dequantize(data, scale, zero, fmt, length(scale), dtype)
        return [jnp.swapaxes(values, -1, -2) if columnwise else values]

    def run_native(*arrays: jax.Array) -> Sequence[jax.Array]:
        return _call("jaxlowprec_int4_dequantize", outputs(*arrays), fmt, columnwise, *arrays)

    return wiring.define(
        "jaxlowprec_int4_dequantize",
        rule=_rule(operands, [result], axis),
        outputs=outputs,
        reference=run_reference,
        native=run_native,
        **_implemented("dequantize", fmt, implementation),
    )


@functools.partial(jax.jit, static_argnames=("fmt", "axis", "implementation"))
def quantize_int4(x: jax.Array, fmt: Int4, axis: int, implementation: Implementation) -> QuantizedArray:
    """Quantises x [..., M, K] or [K]."""
    rows = jax.lax.stop_gradient(x if x.ndim > 1 else x[None])
    op = quantize_op(fmt, axis == -2, x.shape[axis] % fmt.group_size != 0, implementation)
    data, scale, *zero = (a if x.ndim > 1 else a[0] for a in op(rows))
    return QuantizedArray(data, scale, None, zero[0] if zero else None, fmt, x.shape[-2:], x.dtype, axis, None)


@functools.partial(jax.jit, static_argnames=("dtype", "implementation"))
def dequantize_int4(q: QuantizedArray, dtype: jax.typing.DTypeLike, implementation: Implementation) -> jax.Array:
    """The array that q approximates."""
    vector, fmt, length = len(q.matrix_shape) == 1, q.format, q.matrix_shape[q.axis]
    arrays = jax.lax.stop_gradient([a for a in (q.data, q.scale, q.zero_point) if a is not None])
    ragged_length = length if length % fmt.group_size else None
    op = dequantize_op(fmt, q.axis == -2, ragged_length, jnp.dtype(dtype), implementation)
    (values,) = op(*[a[..., None, :] for a in arrays] if vector else arrays)
    return values[..., 0, :] if vector else values


def fake_quantize_int4(x: jax.Array, fmt: Int4, axis: int, implementation: Implementation) -> jax.Array:
    """x quantised and decoded, in one pass."""
    op = fake_quantize_op(fmt, axis == -2, x.shape[axis] % fmt.group_size != 0, implementation)
    return op(x)[0] if x.ndim > 1 else op(x[None])[0][0]


def clipped_int4(x: jax.Array, fmt: Int4, axis: int) -> jax.Array:
    """Mask of the elements of x that the code range clips; all False where the scale covers the largest magnitude."""
    if fmt.symmetric and fmt.rule == "deploy":
        return jnp.zeros(x.shape, bool)
    if axis == -1:
        return reference.clipped(x, fmt)
    return jnp.swapaxes(reference.clipped(jnp.swapaxes(x, -1, -2), fmt), -1, -2)
