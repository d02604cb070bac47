"""Activations in high precision times one quantised weight or several: `scaled_matmul` with a plain first operand.

Products with several weights are one op. On CPUs it is one call, whose products share a start and its threads: with one
row a product takes some 100 us, waking a thread a third of that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxlowprec import wiring
from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.checks import Implementation, check_implementation, choose, float_array, no_derivative
from jaxlowprec.ops.epilogue import EpilogueOptions, checked_epilogue
from jaxlowprec.ops.weight_only_matmul.op import WeightOnlySpec, by_cuda, by_reference, weight_factors, weight_only_op


def weight_only_matmul(
    who: str, x: Any, q: QuantizedArray, epilogue_options: EpilogueOptions, implementation: Implementation
) -> list[jax.Array]:
    """The results of `scaled_matmul` for a plain x [..., M, K] and q [..., N, K], or q [N, K] for all batch axes."""
    check_implementation(who, implementation)
    x = float_array(who, "lhs", x)
    spec, weight, extras = _prepared(who, x, q, epilogue_options)
    x, extras = _without_derivative((x, extras))
    return _multiply((x, *weight, *extras), spec, implementation)


def weight_only_matmuls(
    who: str,
    x: Any,
    weights: Sequence[QuantizedArray],
    biases: Sequence[jax.Array | None],
    out_dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, ...]:
    """`weight_only_matmul` of x [..., M, K] by each q [N, K] with its bias [N] or None, with the same bytes.

    Weights of one format that all have biases, or none of which has one, are one call on CPUs.
    """
    x = float_array(who, "lhs", x)
    options: list[EpilogueOptions] = [
        {"bias": bias, "preferred_element_type": out_dtype, "out_sharding": None} for bias in biases
    ]
    specs, arrays, extras = zip(
        *[_prepared(who, x, q, own) for q, own in zip(weights, options, strict=True)], strict=True
    )
    x, extras = _without_derivative((x, extras))
    own = [(*weight, *of_epilogue) for weight, of_epilogue in zip(arrays, extras, strict=True)]
    if len(set(specs)) == 1 and specs[0].shared:
        return _multiply_together((x, *[leaf for leaves in own for leaf in leaves]), specs[0], len(specs))
    return tuple(_multiply((x, *leaves), spec, None)[0] for leaves, spec in zip(own, specs, strict=True))


def _prepared(
    who: str, x: jax.Array, q: QuantizedArray, epilogue_options: EpilogueOptions
) -> tuple[WeightOnlySpec, list[jax.Array], list[jax.Array]]:
    """The checked op, the weight's arrays, and the epilogue's operands."""
    _check_operands(who, x, q)
    shared, rows = q.ndim == 2, x.shape[:-1]
    columns, depth = q.matrix_shape
    epilogue, extras = checked_epilogue(who, (*rows, columns), **epilogue_options)
    if shared and epilogue.bias:
        if (given := jnp.shape(epilogue_options["bias"])) != (columns,):
            raise ValueError(f"{who}: bias has shape {given} and rhs {q.shape} no batch axes; needs {(columns,)}")
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
    "multiply by jaxlowprec.dequantize(rhs)"
)


def _check_operands(who: str, x: jax.Array, q: QuantizedArray) -> None:
    for name, value in (("lhs", x), ("rhs", q)):
        if value.ndim < 2 or (name == "rhs" and len(q.matrix_shape) != 2):
            raise ValueError(f"{who}: {name} has shape {value.shape}; needs two dimensions or more")
    if q.axis != -1:
        raise ValueError(
            f"{who}: rhs of shape {q.shape} is quantised along axis {q.axis}, but the last axis is contracted: "
            f"quantise it with axis=-1, or pass rhs.mT to contract over its axis of {q.matrix_shape[-2]}"
        )
    if q.format.row_scaled:
        raise NotImplementedError(
            f"{who}: rhs is {q.format} and lhs is not quantised; there is no weight-only GEMM of row-scaled weights: "
            "quantise rhs without row_scaled="
        )
    if q.hadamard is not None:
        raise ValueError(
            f"{who}: rhs has hadamard={q.hadamard} and lhs is not quantised; a rotation cancels only if both operands "
            "have it: quantise the weight without hadamard=, or quantise lhs with the same"
        )
    if x.shape[-1] != q.matrix_shape[-1]:
        sizes = f"{x.shape[-1]} and {q.matrix_shape[-1]}"
        raise ValueError(f"{who}: lhs {x.shape} and rhs {q.shape} differ in the contracted last axis: {sizes}")
    if q.ndim > 2 and x.shape[:-2] != q.shape[:-2]:
        raise ValueError(
            f"{who}: lhs {x.shape} and rhs {q.shape} differ in their batch axes; broadcast lhs, or pass one weight "
            "[N, K] for all of them"
        )


def _rule(spec: WeightOnlySpec, count: int) -> wiring.ShardingRule:
    """The sharding rule of `weight_only_op` with shared weights, for several weights; each has an N of its own."""
    columns = [f"n{i}" for i in range(count)]
    weights = [weight_factors(spec.format, spec.ragged_columns, spec.ragged_depth, "", n) for n in columns]
    operands = [operand for w in weights for operand in (*w.operands, *[w.n] * spec.epilogue.bias)]
    text = f"{', '.join([f'... m {weights[0].k}', *operands])} -> {', '.join(f'... m {w.n}' for w in weights)}"
    whole = dict.fromkeys(factor for w in weights for factor in w.whole)
    reductions = ("k",) if weights[0].depth_splits else ()
    rule = wiring.ShardingRule(text, reductions=reductions, whole=[*whole], **weights[0].sizes)
    return rule.with_alike(columns)


@functools.cache
def weight_only_together_op(spec: WeightOnlySpec, count: int, implementation: Implementation) -> wiring.Op:
    """x [..., M, K]; then `count` times a weight as data [N, bytes], scale and, where its format has them, amax and
    zero points, and its bias [N] where the epilogue has one -> a [..., M, N] of each weight.

    The bytes are those of `weight_only_op` with each of them. `spec` says that weights are shared, and its epilogue
    takes no operand but a bias.
    """
    alone, each = weight_only_op(spec, implementation), spec.weights + spec.epilogue.bias

    def of_each(operands: Sequence[Any]) -> list[Sequence[Any]]:
        return [operands[at : at + each] for at in range(0, count * each, each)]

    def outputs(x: jax.Array, *operands: jax.Array) -> wiring.Shapes:
        return [((*x.shape[:-1], data.shape[-2]), spec.epilogue.out_dtype) for data, *_ in of_each(operands)]

    def one_by_one(body: wiring.Body) -> wiring.Body:
        return lambda x, *operands: [body(spec, x, *own)[0] for own in of_each(operands)]

    def run_native(x: jax.Array, *operands: jax.Array) -> Sequence[jax.Array]:
        lead = x.shape[:-1]
        x = x.reshape(math.prod(lead), x.shape[-1])
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs(x, *operands)]
        attributes: dict[str, Any] = {"format": spec.format.attributes, "asymmetric": spec.format.has_zero_point}
        out = jax.ffi.ffi_call("jaxlowprec_weight_only_matmuls", results)(
            x, *operands, bias=spec.epilogue.bias, **attributes
        )
        return [y.reshape(*lead, y.shape[-1]) for y in out]

    def when_reduced(add_up: wiring.AddUp, x: jax.Array, *operands: jax.Array) -> Sequence[jax.Array]:
        """Adds up float32 sums over the devices that split K, then applies each epilogue."""
        plain = dataclasses.replace(spec, epilogue=spec.epilogue.accumulators_only)
        weights = [own[: spec.weights] for own in of_each(operands)]
        partial = weight_only_together_op(plain, count, implementation)(x, *[leaf for w in weights for leaf in w])
        extras = [own[spec.weights :] for own in of_each(operands)]
        return [spec.epilogue.finish(add_up(y), e)[0] for y, e in zip(partial, extras, strict=True)]

    wired = wiring.define(
        "jaxlowprec_weight_only_matmuls",
        rule=_rule(spec, count),
        outputs=outputs,
        reference=one_by_one(by_reference),
        native={"cpu": run_native, "cuda": one_by_one(lambda spec, *own: by_cuda(spec, implementation, *own))},
        when_reduced=when_reduced,
        **choose("scaled_matmul", implementation),
    )
    op = custom_vmap(lambda *operands: wired(*operands))

    @op.def_vmap
    def _(
        size: int, batched: Sequence[bool], x: jax.Array, *operands: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        """A mapped axis of x alone holds more rows; mapped weights are multiplied one by one."""
        if not any(batched[1:]):
            out = op(x, *operands)
        else:
            axes = [0 if mapped else None for mapped in batched]
            own = zip(of_each(operands), of_each(axes[1:]), strict=True)
            out = tuple(jax.vmap(alone, (axes[0], *at), axis_size=size)(x, *values)[0] for values, at in own)
        return out, (True,) * count

    return op
