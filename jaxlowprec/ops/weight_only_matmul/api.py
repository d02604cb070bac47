"""Activations in high precision times a quantised weight: `scaled_matmul` with a plain first operand."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.checks import float_array
from jaxlowprec.ops.epilogue import checked_epilogue
from jaxlowprec.ops.implementation import Implementation, check_implementation
from jaxlowprec.ops.no_derivative import no_derivative
from jaxlowprec.ops.weight_only_matmul.op import WeightOnlySpec, weight_only_op
from jaxlowprec.ops.weight_only_matmul.together import weight_only_together_op


def weight_only_matmul(
    who: str, x: Any, q: QuantizedArray, epilogue_options: dict[str, Any], implementation: Implementation
) -> list[jax.Array]:
    """The results of `scaled_matmul` for a plain x [..., M, K] and q [..., N, K], or q [N, K] for all batch axes."""
    check_implementation(who, implementation)
    x = float_array(who, "a", x)
    spec, weight, extras = _prepared(who, x, q, epilogue_options)
    x, extras = _without_derivative((x, extras))
    return _multiply((x, *weight, *extras), spec, implementation)


def weight_only_matmuls(
    who: str, x: Any, weights: Sequence[QuantizedArray], biases: Sequence[jax.Array | None], out_dtype: Any
) -> tuple[jax.Array, ...]:
    """`weight_only_matmul` of x [..., M, K] by each q [N, K] with its bias [N] or None, with the same bytes.

    Weights of one format that all have biases, or none of which has one, are one call on CPUs.
    """
    x = float_array(who, "a", x)
    options = [{"bias": bias, "out_dtype": out_dtype, "out_sharding": None} for bias in biases]
    specs, arrays, extras = zip(
        *[_prepared(who, x, q, own) for q, own in zip(weights, options, strict=True)], strict=True
    )
    x, extras = _without_derivative((x, extras))
    own = [(*weight, *of_epilogue) for weight, of_epilogue in zip(arrays, extras, strict=True)]
    if len(set(specs)) == 1 and specs[0].shared:
        return _multiply_together((x, *[leaf for leaves in own for leaf in leaves]), specs[0], len(specs))
    return tuple(_multiply((x, *leaves), spec, None)[0] for leaves, spec in zip(own, specs, strict=True))


def _prepared(
    who: str, x: jax.Array, q: QuantizedArray, epilogue_options: dict[str, Any]
) -> tuple[WeightOnlySpec, list[jax.Array], list[jax.Array]]:
    """The checked op, the weight's arrays, and the epilogue's operands."""
    _check_operands(who, x, q)
    shared, rows = q.ndim == 2, x.shape[:-1]
    columns, depth = q.matrix_shape
    epilogue, extras = checked_epilogue(who, (*rows, columns), **epilogue_options)
    if shared and epilogue.bias:
        if (given := jnp.shape(epilogue_options["bias"])) != (columns,):
            raise ValueError(f"{who}: bias has shape {given} and b {q.shape} no batch axes; needs {(columns,)}")
        extras[0] = as_array(epilogue_options["bias"]).astype(jnp.float32)
    fmt = q.format
    spec = WeightOnlySpec(
        fmt,
        fmt.tiles and columns % fmt.length != 0,
        depth % fmt.length != 0 or (fmt.packed and fmt.length % 2 != 0),
        shared,
        epilogue,
    )
    return spec, [leaf for leaf in (q.data, q.scale, q.amax, q.zero_point) if leaf is not None], extras


@functools.partial(jax.jit, static_argnames=("spec", "implementation"))
def _multiply(operands: tuple[jax.Array, ...], spec: WeightOnlySpec, implementation: Implementation) -> list[jax.Array]:
    return list(weight_only_op(spec, implementation)(*operands))


@functools.partial(jax.jit, static_argnames=("spec", "count"))
def _multiply_together(operands: tuple[jax.Array, ...], spec: WeightOnlySpec, count: int) -> tuple[jax.Array, ...]:
    return weight_only_together_op(spec, count, None)(*operands)


_without_derivative = no_derivative(
    "scaled_matmul: there is no derivative of a product with a quantised weight; jaxlowprec.linear has one, or "
    "multiply by jaxlowprec.dequantize(b)"
)


def _check_operands(who: str, x: jax.Array, q: QuantizedArray) -> None:
    for name, value in (("a", x), ("b", q)):
        if value.ndim < 2 or (name == "b" and len(q.matrix_shape) != 2):
            raise ValueError(f"{who}: {name} has shape {value.shape}; needs two dimensions or more")
    if q.axis != -1:
        raise ValueError(
            f"{who}: b of shape {q.shape} is quantised along axis {q.axis}, but the last axis is contracted: "
            f"quantise it with axis=-1, or pass b.mT to contract over its axis of {q.matrix_shape[-2]}"
        )
    if q.format.row_scaled:
        raise NotImplementedError(
            f"{who}: b is {q.format} and a is not quantised; there is no weight-only GEMM of row-scaled weights: "
            "quantise b without row_scaled="
        )
    if q.hadamard is not None:
        raise ValueError(
            f"{who}: b has hadamard={q.hadamard} and a is not quantised; a rotation cancels only if both operands have "
            "it: quantise the weight without hadamard=, or quantise a with the same"
        )
    if x.shape[-1] != q.matrix_shape[-1]:
        sizes = f"{x.shape[-1]} and {q.matrix_shape[-1]}"
        raise ValueError(f"{who}: a {x.shape} and b {q.shape} differ in the contracted last axis: {sizes}")
    if q.ndim > 2 and x.shape[:-2] != q.shape[:-2]:
        raise ValueError(
            f"{who}: a {x.shape} and b {q.shape} differ in their batch axes; broadcast a, or pass one weight [N, K] "
            "for all of them"
        )
