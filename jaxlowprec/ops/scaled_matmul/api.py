"""GEMM of two quantised operands."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.arrays.quantized_array import QuantizedArray, by_tensor, check_quantized
from jaxlowprec.ops.checks import Implementation, check_implementation, checked_precision, wants_float32_sums
from jaxlowprec.ops.epilogue import Activation, Epilogue, EpilogueOptions, checked_epilogue
from jaxlowprec.ops.rounding import flush, rounded
from jaxlowprec.ops.scaled_matmul.op import MatmulSpec, matmul_op
from jaxlowprec.ops.sums.kinds import IN_FLOAT32, SumOverDevices
from jaxlowprec.ops.weight_only_matmul.api import weight_only_matmul
from jaxlowprec.wiring.sharding_rule import resharded


class ScaledMatmulOptions(TypedDict, total=False):
    """Options of `scaled_matmul` that do not change what it returns."""

    activation: Activation
    accumulate: Float[Array, "*B M N"] | None
    preferred_element_type: jax.typing.DTypeLike
    implementation: Implementation
    activation_input: Float[Array, "*B M N"] | None
    out_sharding: NamedSharding | PartitionSpec | None
    precision: jax.lax.PrecisionLike


@overload
def scaled_matmul(
    lhs: QuantizedArray | Float[Array, "*B M K"],
    rhs: QuantizedArray,
    bias: Float[Array, "*B N"] | None = None,
    *,
    return_pre_activation: Literal[False] = False,
    **options: Unpack[ScaledMatmulOptions],
) -> Float[Array, "*B M N"]: ...


@overload
def scaled_matmul(
    lhs: QuantizedArray | Float[Array, "*B M K"],
    rhs: QuantizedArray,
    bias: Float[Array, "*B N"] | None = None,
    *,
    return_pre_activation: Literal[True],
    **options: Unpack[ScaledMatmulOptions],
) -> tuple[Float[Array, "*B M N"], Float[Array, "*B M N"]]: ...


@overload
def scaled_matmul(
    lhs: QuantizedArray | Float[Array, "*B M K"],
    rhs: QuantizedArray,
    bias: Float[Array, "*B N"] | None = None,
    *,
    return_pre_activation: bool,
    **options: Unpack[ScaledMatmulOptions],
) -> Float[Array, "*B M N"] | tuple[Float[Array, "*B M N"], Float[Array, "*B M N"]]: ...


def scaled_matmul(
    lhs: QuantizedArray | Float[Array, "*B M K"],
    rhs: QuantizedArray,
    bias: Float[Array, "*B N"] | None = None,
    *,
    activation: Activation = None,
    accumulate: Float[Array, "*B M N"] | None = None,
    preferred_element_type: jax.typing.DTypeLike = jnp.bfloat16,
    implementation: Implementation = None,
    return_pre_activation: bool = False,
    activation_input: Float[Array, "*B M N"] | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B M N"] | tuple[Float[Array, "*B M N"], Float[Array, "*B M N"]]:
    """`lhs @ rhs.mT`, contracted over the quantised axis of both, accumulated in float32.

    acc -> * tensor scales -> + bias -> activation -> + accumulate -> one cast to `preferred_element_type`, each in
    float32. A row of the result depends neither on the other rows nor on the number of threads. On the CPU the bytes
    are those of every instruction set: between 4-bit operands exact within a block, sequential over blocks, by
    reference too; with 8-bit ones a chain of multiply-adds along K, for Float8Block along each block. Not
    differentiable: `jaxlowprec.linear` is.

    | lhs x rhs | blocks |
    |---|---|
    | NVFP4 x NVFP4 | 1x16 and 16x16 on either side, either one row-scaled |
    | MXFP8 x MXFP8, MXFP4 x MXFP4, and one of each | 1x32 and 32x32 on either side |
    | Float8Block x Float8Block | 1x128 and 128x128, not 128x128 on both |
    | Float8Block x MXFP4 | 1x128 by 1x32 or 32x32 |
    | Float8Tensor x Float8Tensor | |
    | Float8Rows x Float8Rows, Int8Rows x Int8Rows | a scale for each line |
    | Int8Rows x Int4 (symmetric), Int8Rows x MXFP4 (W4A8) | rhs in groups of 32 to 256 |

    E4M3 can be multiplied by E5M2, on either side; E5M2 by E5M2 cannot.

    A plain `lhs` meets any quantised `rhs` (weight-only: W4A16, W8A16). rhs is decoded exactly, block scales included;
    the tensor scale of NVFP4 and Float8Tensor follows the sum. Lane j of 16 sums k = j, j + 16, ... in order, by
    multiply-adds from 0, and the lanes are added as a tree: j with j + 8, then + 4, + 2, + 1. So the bytes are the same
    for every M, instruction set and number of threads, and for a bfloat16 or float16 `lhs` those of the reference.

    Arguments:
        lhs: [..., M, K], quantised along its last axis; or a plain bfloat16, float16 or float32 array.
        rhs: [..., N, K], quantised along its last axis. A columnwise result of `quantize_both` is one as `.mT`. With a
            plain `lhs` also [N, K]: one for all batch axes.
        bias: [N] or [..., N], any float dtype.
        activation: None; "gelu" (tanh form); "dgelu": times its derivative at `activation_input`, for the backward pass
            of a linear followed by GELU.
        accumulate: [..., M, N], bfloat16, float16 or float32.
        preferred_element_type: dtype of the result: bfloat16, float16 or float32.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.
        return_pre_activation: also return what the activation was applied to, in the result's dtype.
        activation_input: [..., M, N], for "dgelu": the pre-activation of the forward pass.
        out_sharding: of the result, in JAX's explicit-sharding mode, as for `jnp.matmul`. None: M and N are split as
            the operands are, `lhs` first; if K is split, the sum is replicated.
        precision: as for `jax.lax.dot`. None and DEFAULT: the fastest. HIGH and HIGHEST: no FP8 or FP4 tensor cores on
            NVIDIA GPUs, of which some add up in fewer bits than float32; both operands are decoded to bfloat16 instead,
            which is exact and slower (docs/explanation/exact_sums.md). The CPU's bytes do not depend on it.

    Returns:
        [..., M, N]; with `return_pre_activation` a pair of it and the pre-activation.

    Raises:
        TypeError: a `rhs` that is not quantised, or a dtype that does not fit.
        ValueError: operands whose arrays are not those of their format and shape, quantised along another axis, of
            different length or batch, one by powers of two alone, or rotated differently; an activation without its
            input, or the reverse.
        NotImplementedError: a pair of formats without a GEMM, `implementation="ffi"` where there is no kernel (or none
            of this precision: of Float8Block without power-of-two scales), or a derivative with respect to a plain
            `lhs`.

    Source: numerics.md 9.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> x, w = jnp.ones((32, 64)), jnp.ones((48, 64))
    >>> jlp.scaled_matmul(jlp.quantize(x, jlp.NVFP4()), jlp.quantize(w, jlp.NVFP4((16, 16)))).shape
    (32, 48)
    """
    who = "scaled_matmul"
    options: EpilogueOptions = {
        "bias": bias,
        "activation": activation,
        "accumulate": accumulate,
        "preferred_element_type": preferred_element_type,
        "return_pre_activation": return_pre_activation,
        "activation_input": activation_input,
        "out_sharding": out_sharding,
    }
    precision = checked_precision(who, precision)
    check_implementation(who, implementation)
    if not isinstance(rhs, QuantizedArray):
        raise TypeError(f"{who}: rhs is a {type(rhs).__name__}; needs a QuantizedArray: quantise it first")
    check_quantized(who, "rhs", rhs)
    if not isinstance(lhs, QuantizedArray):
        return _results(weight_only_matmul(who, lhs, rhs, options, implementation), out_sharding)
    check_quantized(who, "lhs", lhs)
    _check_operands(who, lhs, rhs)
    epilogue, extras = checked_epilogue(who, (*lhs.shape[:-1], rhs.matrix_shape[0]), **options)
    out = _run(lhs, rhs, epilogue, extras, _Way(None, precision, implementation))
    return _results(out, out_sharding)


def scaled_matmul_of_rows(
    a: QuantizedArray,
    b: QuantizedArray,
    bias: Float[Array, "*B N"] | None,
    *,
    rows_split: bool,
    accumulate: Float[Array, "*B M N"] | None = None,
    preferred_element_type: jax.typing.DTypeLike,
    out_sharding: NamedSharding | PartitionSpec | None,
    precision: jax.lax.PrecisionLike = None,
    sums: SumOverDevices = IN_FLOAT32,
) -> Float[Array, "*B ..."]:
    """`scaled_matmul` whose rows may be split, and which says how devices add up their partial sums.

    Arguments:
        a, b: its lhs and rhs.
        bias, preferred_element_type, out_sharding, precision: see `scaled_matmul`.
        rows_split: the rows of `a` are split, [..., S, M, K], as `quantize(rows_split=True)` splits them: they are
            those of the matrix [..., S * M, K] where b is [..., N, K]. Where the rows of b are split too, [..., S, N,
            K], its columns are: M and N are lines, and the contraction is over S * K.
        accumulate: see `scaled_matmul`; with split rows only where both are split.
        sums: see `SumOverDevices`.

    Returns:
        [..., M, N]; with split rows [..., S, M, N], where both are split [..., M, N].
    """
    who = "scaled_matmul"
    both = rows_split and b.ndim == a.ndim
    split: Any = None if not rows_split else "both" if both else "a"
    lines = a.shape[:-1]
    if rows_split:
        batch = a.shape[:-3] if both else b.shape[:-2]
        lines = (*batch, a.matrix_shape[0] if both else math.prod(a.shape[-3:-1]))
        a, b = _of_one_tensor(a, both), _of_one_tensor(b, both) if both else b
    else:
        _check_operands(who, a, b)
    options: Any = {"accumulate": accumulate, "out_sharding": out_sharding}
    options["preferred_element_type"] = preferred_element_type
    epilogue, extras = checked_epilogue(who, (*lines, b.matrix_shape[0]), bias=bias, **options)
    out = _run(a, b, epilogue, extras, _Way(split, checked_precision(who, precision), None, sums))
    return resharded(out[0], out_sharding)


def _of_one_tensor(q: QuantizedArray, contracted: bool) -> QuantizedArray:
    """Slices with what they share once; rows with amaxes of their own share none. `contracted`: the split rows are, so
    that the slices share the scales of lines."""
    if q.format.row_scaled:
        return q
    scale = q.scale[..., 0] if q.format.scaling == "tensor" else q.scale
    scale = scale[..., 0, :, :] if q.format.scaling == "rows" and contracted else scale
    return dataclasses.replace(q, scale=scale, amax=None if q.amax is None else q.amax[..., 0])


MOST_INTEGERS = 131_072
"""Products of two 8-bit integers whose sum int32 always holds."""


class _Way(NamedTuple):
    """How operands are multiplied.

    Attributes:
        rows_split: see `MatmulSpec`.
        precision, implementation: see `scaled_matmul`.
        sums: see `SumOverDevices`.
    """

    rows_split: Any
    precision: jax.lax.PrecisionLike
    implementation: Implementation
    sums: SumOverDevices = IN_FLOAT32


def _run(
    a: QuantizedArray, b: QuantizedArray, epilogue: Epilogue, extras: list[jax.Array], way: _Way
) -> list[jax.Array]:
    if a.format.row_scaled or b.format.row_scaled:
        return _run_lines(a, b, epilogue, extras, way)
    depth = a.data.shape[-1] * (a.data.shape[-3] if way.rows_split == "both" else 1)
    if a.format.element == "int8":
        check_integers("scaled_matmul", depth)
    if way.rows_split == "both" and a.format.scaling != b.format.scaling:
        raise NotImplementedError(
            f"scaled_matmul: the contracted rows of {a.format} by {b.format} are split; {b.format} is for weights"
        )
    unpacked = next((q for q in (a, b) if not q.format.packed), None)
    length = max(a.format.length, b.format.length)
    spec = MatmulSpec(
        a.format,
        b.format,
        a.format.tiles and a.matrix_shape[0] % a.format.length != 0,
        b.format.tiles and b.matrix_shape[0] % b.format.length != 0,
        unpacked is not None and unpacked.data.shape[-1] % length != 0,
        epilogue,
        way.rows_split,
        wants_float32_sums(way.precision),
        way.sums.kind,
    )
    amaxes = (a.amax, b.amax) if spec.two_level else ()
    words = way.sums.operands(a.data.shape[: -3 if way.rows_split else -2])
    return _multiply((a.data, a.scale, b.data, b.scale, *amaxes, *extras, *words), spec, way.implementation)


def _run_lines(
    a: QuantizedArray, b: QuantizedArray, epilogue: Epilogue, extras: list[jax.Array], way: _Way
) -> list[jax.Array]:
    """`_run` where lines of an operand have amaxes of their own, which multiply the sums before the epilogue."""
    if way.rows_split == "both":
        raise NotImplementedError(
            "scaled_matmul: the contracted rows are split, and each part of a row-scaled operand has amaxes of its "
            "own; multiply the parts and add the products up, or quantise the whole array"
        )
    split = way.rows_split == "a"
    (accumulators,) = _run(_without_amax(a, split), _without_amax(b), epilogue.accumulators_only, [], way)
    amaxes = tuple(_amax_of_lines(q) for q in (a, b))
    both = a.format.row_scaled and b.format.row_scaled
    return _finished(accumulators, amaxes, extras, epilogue, both, split)


def _without_amax(q: QuantizedArray, split: bool = False) -> QuantizedArray:
    """The array with an amax of 1 for each tensor. `split`: its rows are split."""
    amax = jnp.ones(q.shape[: -3 if split else -2], jnp.float32)
    return dataclasses.replace(q, format=by_tensor(q.format), amax=amax)


def _amax_of_lines(q: QuantizedArray) -> jax.Array:
    """[..., M] of a row-scaled array, else [..., 1]."""
    amax: Any = q.amax
    return amax if q.format.row_scaled else amax[..., None]


@functools.partial(jax.jit, static_argnames=("epilogue", "both", "split"))
def _finished(
    accumulators: jax.Array,
    amaxes: tuple[jax.Array, jax.Array],
    extras: Sequence[jax.Array],
    epilogue: Epilogue,
    both: bool,
    split: bool,
) -> list[jax.Array]:
    """The epilogue of accumulators [..., M, N] that lack the amaxes of a, [..., M or 1], and of b, [..., N or 1].

    `both`: both operands are row-scaled. `split`: a and the accumulators have split rows, [..., S, M, N].
    """
    of_a, of_b = jax.lax.stop_gradient(amaxes)
    of_a, of_b = of_a[..., :, None], of_b[..., None, None, :] if split else of_b[..., None, :]
    for factor in (of_a, of_b) if both else (flush(of_a * of_b),):
        accumulators = rounded(accumulators * factor)
    if split and epilogue.bias:
        extras = [extras[0][..., None, :], *extras[1:]]
    return epilogue.finish(accumulators, extras)


def _results(out: list[jax.Array], out_sharding: Any) -> Any:
    """The result, or it and the pre-activation."""
    y, *pre_activation = (resharded(y, out_sharding) for y in out)
    return (y, *pre_activation) if pre_activation else y


@functools.partial(jax.jit, static_argnames=("spec", "implementation"))
def _multiply(
    operands: tuple[jax.Array, ...], spec: MatmulSpec, implementation: Implementation
) -> tuple[jax.Array, ...]:
    return matmul_op(spec, implementation)(*jax.lax.stop_gradient(operands))


def check_integers(who: str, depth: int) -> None:
    """Raises ValueError unless int32 holds the sums of so many products of 8-bit integers."""
    if depth > MOST_INTEGERS:
        raise ValueError(
            f"{who}: the contracted axis has {depth} elements; int32 holds the sums of {MOST_INTEGERS} products of "
            "8-bit integers: multiply parts of it and add the products up, or keep this product in high precision"
        )


def check_pair(who: str, a: Format, b: Format) -> None:
    """Raises unless there is a GEMM for operands of these formats."""
    if a.element == "int8" and b.packed:
        _check_integers_by_weight(who, a, b)
        return
    if a.scaling == "float32" and b.packed and b.scaling == "e8m0":
        if a.tiles:
            raise NotImplementedError(
                f"{who}: lhs is {a} and rhs is {b}; such weights meet FP8 blocks of 1x128: quantise lhs by "
                "Float8Block()"
            )
        return
    if a.scaling != b.scaling:
        raise NotImplementedError(
            f"{who}: lhs is {a} and rhs is {b}; there is no GEMM of formats scaled differently: quantise both alike, "
            "or dequantise them and multiply in high precision"
        )
    if a.weight_only:
        raise NotImplementedError(
            f"{who}: both operands are {a.element}; there is no GEMM of integers: dequantise the activations"
        )
    if (a.element == "int8") != (b.element == "int8"):
        raise NotImplementedError(
            f"{who}: lhs is {a} and rhs is {b}; there is no GEMM of integers with floats: quantise both to Int8Rows, "
            "or both to Float8Rows"
        )
    if a.scale_rule == "w4afp8":
        raise NotImplementedError(
            f"{who}: lhs is {a}, the rule of weights that are served in 4 bits; quantise lhs by Float8Rows()"
        )
    if a.element == "int8" and a.scale_rule == "compressed-tensors":
        raise NotImplementedError(
            f"{who}: lhs is {a}, which has codes of -128; only rhs may: quantise lhs by Int8Rows()"
        )
    if a.element == b.element and not a.numbers.meets_itself:
        name = a.element.upper()
        raise NotImplementedError(
            f"{who}: both operands have {name} elements; no GEMM takes {name} x {name}: quantise one of them to E4M3"
        )
    if a.scaling == "float32" and a.tiles and b.tiles:
        raise NotImplementedError(
            f"{who}: both operands have 128x128 blocks (2D x 2D); no GEMM takes that: quantise one in 1x128 blocks"
        )
    if a.scaling == "float32" and a.power_of_two != b.power_of_two:
        raise ValueError(
            f"{who}: lhs has power_of_two={a.power_of_two} and rhs has {b.power_of_two}; quantise both by the same "
            "scale rule"
        )


def _check_integers_by_weight(who: str, a: Format, b: Format) -> None:
    """Raises unless there is a GEMM of 8-bit integers by rows with this 4-bit weight."""
    groups = [size for size in (32, 64, 128, 256) if b.length == size]
    if a.scale_rule == "compressed-tensors" or b.scaling not in ("e8m0", "float16") or b.has_zero_point or not groups:
        raise NotImplementedError(
            f"{who}: lhs is {a} and rhs is {b}; Int8Rows() meets MXFP4() and symmetric Int4 in groups of 32, 64, 128 "
            "or 256: quantise the weight to one of these, or leave lhs in high precision"
        )


def check_rotations(who: str, a: Hadamard | None, b: Hadamard | None) -> None:
    """Raises unless both operands are rotated alike."""
    if a != b:
        raise ValueError(
            f"{who}: lhs has hadamard={a} and rhs has {b}; a rotation cancels only if both operands have it, with the "
            "same signs"
        )


def _check_operands(who: str, a: QuantizedArray, b: QuantizedArray) -> None:
    for name, q in (("lhs", a), ("rhs", b)):
        if len(q.matrix_shape) != 2:
            raise ValueError(f"{who}: {name} has shape {q.shape}; needs two dimensions or more")
        if q.axis != -1:
            raise ValueError(
                f"{who}: {name} of shape {q.shape} is quantised along axis {q.axis}, but the last axis is contracted: "
                f"quantise it with axis=-1, or pass {name}.mT to contract over its axis of {q.matrix_shape[-2]}"
            )
    check_pair(who, a.format, b.format)
    if a.matrix_shape[-1] != b.matrix_shape[-1]:
        sizes = f"{a.matrix_shape[-1]} and {b.matrix_shape[-1]}"
        raise ValueError(f"{who}: lhs {a.shape} and rhs {b.shape} differ in the contracted last axis: {sizes}")
    if a.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            f"{who}: lhs {a.shape} and rhs {b.shape} differ in their batch axes; broadcast them before quantising"
        )
    check_rotations(who, a.hadamard, b.hadamard)
