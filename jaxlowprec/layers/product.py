"""A product of quantised operands and its gradients: the parts of which `quantized_matmul` and the MLP are made.

It multiplies all rows by one weight, or rows in groups by a weight for each; see `rows`.

    fprop   y  = x row-quantised            @ w            contracted over K
    dgrad   dx = dy row-quantised           @ w transposed contracted over N
    wgrad   dw = x column-quantised, transposed @ dy column-quantised   contracted over tokens

Each GEMM has its own pair of operands (numerics.md 3). The backward pass reads x columnwise and w, both quantised,
instead of x and w. They have the checkpoint names of `residuals`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.arrays import serialised
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers import delayed_scaling
from jaxlowprec.layers.measured import measured_backward, measured_forward
from jaxlowprec.layers.operands import FormOptions, Gemms, amaxes_of, role_of, sum_over_devices, weight_both_ways
from jaxlowprec.layers.residuals import (
    QUANTIZED_INPUT,
    QUANTIZED_WEIGHT,
    decoded,
    differentiated_once,
    dtype_marker,
    in_profiles,
    read,
    tag_residual,
)
from jaxlowprec.layers.rows import AllRows, RowsInGroups
from jaxlowprec.ops.amax import Amaxes
from jaxlowprec.ops.amax import amax as tensor_amax
from jaxlowprec.ops.quantize.random_bits import Randomness
from jaxlowprec.ops.sums.kinds import SumOverDevices
from jaxlowprec.recipes.fields import Sums
from jaxlowprec.recipes.roles import Role
from jaxlowprec.recipes.transformer_engine import DelayedScaling
from jaxlowprec.wiring.sharding_rule import ShardingLike


@serialised.register
@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("rowwise", "columnwise"), meta_fields=("weight_only",)
)
@dataclasses.dataclass(frozen=True)
class QuantizedKernel:
    """A kernel [..., K, N] quantised once, for every GEMM that reads it. It has one of the two forms, or both.

    Attributes:
        rowwise: blocks along N, for dgrad; None if dgrad is not quantised: it decodes `columnwise` where it has no
            other kernel.
        columnwise: blocks along K, for fprop; None if fprop is not quantised.
        weight_only: whether it is multiplied by inputs in high precision.
    """

    rowwise: QuantizedArray | None
    columnwise: QuantizedArray | None
    weight_only: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., K, N]."""
        form: Any = self.rowwise if self.columnwise is None else self.columnwise
        return form.shape


@dataclasses.dataclass(frozen=True)
class GemmSpec(Gemms):
    """The static description of a product's three GEMMs, captured in the forward pass.

    The backward pass never reads the context. It does not contain the layer's name, so equal layers are traced once.

    Attributes:
        sums, delayed: the recipe's.
        out_dtype: the dtype of the result.
        shardings: those of x, w and bias, which their gradients get, too; see `out_sharding.sharding_of`.
        out_sharding: the sharding of the result, in explicit mode.
        rows_split: x is [..., S, T, K] for a weight without S.
        precision: precision of all three GEMMs, checked.
        transposed: w is the transposition of a kernel that lies as [..., N, K], which is quantised as it lies. Its
            gradient is computed likewise if wgrad's operands may change places.
    """

    sums: Sums
    delayed: DelayedScaling | None
    out_dtype: jax.typing.DTypeLike
    shardings: tuple[Any, Any, Any]
    out_sharding: ShardingLike
    rows_split: bool
    precision: jax.lax.PrecisionLike = None
    transposed: bool = False

    def sum_over_devices(self, gemm: str, source: Randomness | None, operand: Any) -> SumOverDevices:
        """The sum over devices of a GEMM's partial results, see `sum_over_devices`. `operand`: its first one."""
        return sum_over_devices(self.sums, gemm, source, operand)


def rows_of(spec: GemmSpec, sizes: jax.Array | None) -> AllRows | RowsInGroups:
    """How a product's rows meet its weight. `sizes`: see `GemmOperands`."""
    return AllRows(spec.rows_split, spec.precision) if sizes is None else RowsInGroups(sizes, spec.precision)


def _encode_scale(spec: GemmSpec, state: Any, tensor: str) -> jax.Array | None:
    """The encode scale of delayed scaling, if the spec has it."""
    if spec.delayed is None:
        return None
    return delayed_scaling.encode_scale(spec.delayed, state, tensor, _maximum(spec.delayed, tensor))


def recorded(delayed: DelayedScaling, state: Any, tensor: str, amax: jax.Array) -> delayed_scaling.State:
    """The state with the tensor's new history and scale."""
    return state | delayed_scaling.updated(delayed, state, tensor, _maximum(delayed, tensor), amax)


def _maximum(delayed: DelayedScaling, tensor: str) -> float:
    roles: Any = delayed.roles()
    return {"input": roles.input, "kernel": roles.weight, "output_grad": roles.gradient}[tensor].format.maximum


Specs = tuple[GemmSpec, ...]


class GemmOperands(NamedTuple):
    """The operands of a product's GEMMs beside its input. All but w may be None; w, too, if there is a QuantizedKernel.

    Attributes:
        w: the kernel [..., K, N].
        bias: [N]; of rows in groups [..., E, N].
        randomness: the source of the random bits of its gradient.
        quantized: the kernel, quantised before.
        total: float32 [..., K, N]: the kernel's gradient is added to it, and the sum is its own gradient. The kernel
            itself gets none.
        sizes: int32 [..., E], if the input's rows lie in groups, each for its own matrix of the kernel [..., E, K, N].
        signs: the source of the signs with which wgrad's operands are rotated, if they are drawn. Products that share
            their input use the first one's.
        of_weight: the source of what the kernel draws, see `weight_both_ways`.
        of_sums: the source of what sums over devices draw, see `GemmSpec.sum_over_devices`.
    """

    w: Any
    bias: Any
    randomness: Randomness | None
    quantized: QuantizedKernel | None
    total: Any = None
    sizes: Any = None
    signs: Randomness | None = None
    of_weight: Randomness | None = None
    of_sums: Randomness | None = None


States = tuple[delayed_scaling.State | None, Any]
"""The state of delayed scaling, and telemetry's Probe, of a product; or None."""


class QuantizedInput(NamedTuple):
    """The input [..., T, K] of products, and its quantised forms; None where it is not needed."""

    x: Any
    rowwise: Any
    columnwise: Any


class SavedForBackward(NamedTuple):
    """Residuals of one product for its backward pass, beside those of its input.

    Attributes:
        w: the kernel as dgrad reads it.
        dtype_markers: those of the kernel and of the bias, see `dtype_marker`.
        randomness, total, sizes, signs, of_sums: see `GemmOperands`.
        state: of delayed scaling after the forward pass, or None.
        telemetry: the `ForwardMeasurements`, or None.
    """

    w: Any
    dtype_markers: tuple[Any, Any]
    randomness: Randomness | None
    total: Any
    sizes: Any
    state: Any
    telemetry: Any
    signs: Randomness | None
    of_sums: Randomness | None


def roles_of_input(spec: GemmSpec, *, forward: bool = True, backward: bool = False) -> tuple[Role | None, Role | None]:
    """The roles of the input rowwise and columnwise; see `quantized_input`."""
    rowwise = forward or (backward and (spec.decodes("wgrad") or spec.requantizes("input")))
    return role_of(spec.fprop, 0, rowwise), role_of(spec.wgrad, 0, backward)


def quantized_input(
    spec: GemmSpec,
    x: jax.Array,
    state: Any,
    *,
    sizes: jax.Array | None = None,
    randomness: Randomness | None = None,
    signs: Randomness | None = None,
    forward: bool = True,
    backward: bool = False,
    amaxes: Any = None,
) -> QuantizedInput:
    """x in the forms that fprop reads (`forward`), and those that the backward pass reads of it (`backward`).

    Products that share it have equal specs as far as it is concerned. `sizes`: those of the products. `randomness`,
    `signs`: those of the first. `amaxes`: of x rowwise and columnwise.
    """
    row, column = roles_of_input(spec, forward=forward, backward=backward)
    rows = rows_of(spec, sizes)
    with in_profiles("quantize input"):
        encode = _encode_scale(spec, state, "input")
        words, key = None, None
        if column is not None and column.rounding != "nearest":
            assert randomness is not None
            words = randomness.words_of_input(lambda: rows.amax(x) if amaxes is None else amaxes[0])
        if column is not None and signs is not None:
            key = signs.words_for(lambda: rows.amax(x))
        given: FormOptions = {"words": words, "encode": encode, "sign_key": key}
        if row is None or column is None or not spec.requantizes("input"):
            in_one_pass: FormOptions = {**given, "amax": amaxes}
            return QuantizedInput(x, *rows.both_ways(x, row, column, **in_one_pass))
        x_row = rows.both_ways(x, row, None, amax=amaxes, encode=encode)[0]
        return QuantizedInput(x, x_row, rows.both_ways(decoded(x_row, jnp.bfloat16), None, column, **given)[1])


def read_by_wgrad(spec: GemmSpec, given: QuantizedInput) -> Any:
    """The input as wgrad reads it."""
    if spec.wgrad:
        return given.columnwise
    return given.rowwise if spec.decodes("wgrad") else given.x


def products_differentiated_once(products: Sequence[GemmOperands]) -> tuple[GemmOperands, ...]:
    """`differentiated_once` of the kernels and biases."""
    learn = differentiated_once([(p.w, p.bias) for p in products])
    return tuple(p._replace(w=w, bias=bias) for p, (w, bias) in zip(products, learn, strict=True))


def fprop(
    spec: GemmSpec, given: QuantizedInput, product: GemmOperands, state: Any, *, keep: bool = False
) -> tuple[jax.Array, QuantizedKernel]:
    """The result, and the kernel quantised row- and columnwise as far as that is needed now or has to be kept."""
    rows = rows_of(spec, product.sizes)
    w: Any = product.w
    w_row: Any = None
    w_column: Any = None
    if product.quantized is not None:
        w_row, w_column = product.quantized.rowwise, product.quantized.columnwise
    else:
        with in_profiles("quantize weight"):
            encode = _encode_scale(spec, state, "kernel")
            row, column = role_of(spec.dgrad, 1, keep), role_of(spec.fprop, 1)
            options: Any = {"encode": encode, "randomness": product.of_weight, "served_dtype": spec.roles.served_dtype}
            options |= {"requantized": spec.requantizes("weight"), "transposed": spec.transposed}
            w_row, w_column = weight_both_ways(w, row, column, **options)
    with in_profiles("fprop"):
        if spec.fprop:
            sums = spec.sum_over_devices("fprop", product.of_sums, given.rowwise)
            y = rows.by_weight(given.rowwise, w_column.mT, product.bias, spec.out_dtype, spec.out_sharding, sums)
        else:
            w = (w if w is not None else w_column.dequantize()).astype(given.x.dtype)
            y = rows.plain_by_weight(given.x, w, jnp.float32, spec.out_sharding)
            y = rows.biased(y, product.bias).astype(spec.out_dtype)
    return y, QuantizedKernel(w_row, w_column)


def forward(
    spec: GemmSpec, given: QuantizedInput, product: GemmOperands, states: States
) -> tuple[jax.Array, SavedForBackward, QuantizedKernel]:
    """The result of a product whose input is quantised, what is kept, and the kernel quantised both ways."""
    state, probe = states
    w = product.w
    y, kernel = fprop(spec, given, product, state, keep=True)
    kept_w = kernel.rowwise if spec.dgrad else kernel.columnwise if spec.decodes("dgrad") or w is None else w
    if spec.delayed is not None:
        state = recorded(spec.delayed, state, "input", rows_of(spec, product.sizes).amax(given.x))
        state = state if w is None else recorded(spec.delayed, state, "kernel", tensor_amax(w, True, None)[0])
    found = None
    if probe is not None:
        forms = given[1:], (kernel.rowwise, kernel.columnwise)
        found = measured_forward(probe, given.x, w, *forms, spec.rows_split, product.sizes)
    markers = dtype_marker(w), dtype_marker(product.bias)
    kept_w = tag_residual(kept_w, QUANTIZED_WEIGHT)
    of_product = product.randomness, product.total, product.sizes
    kept = SavedForBackward(kept_w, markers, *of_product, state, found, product.signs, product.of_sums)
    return y, kept, kernel


def amaxes_of_input(spec: GemmSpec, backward: bool = True) -> Amaxes | None:
    """The amaxes by which the input is quantised in the forward pass, and in the backward pass if it follows.

    None under delayed scaling, and if the formats have no tensor scale.
    """
    if spec.delayed is not None:
        return None
    return amaxes_of(
        role_of(spec.fprop, 0), role_of(spec.wgrad, 0, backward and not spec.requantizes("input")), spec.rows_split
    )


def amaxes_of_gradient(spec: GemmSpec) -> Amaxes | None:
    """The amaxes by which the gradient of the result is quantised; None as in `amaxes_of_input`."""
    if spec.delayed is not None:
        return None
    return amaxes_of(role_of(spec.dgrad, 0), role_of(spec.wgrad, 1), spec.rows_split)


def _quantized_gradient(
    spec: GemmSpec, kept: SavedForBackward, x: Any, w: Any, dy: jax.Array, amaxes: Any
) -> tuple[Any, Any]:
    """The gradient of the result row- and columnwise, as dgrad and wgrad need it. w and x, which these read, have the
    signs of their rotations if they are drawn."""
    rows, weight_learns = rows_of(spec, kept.sizes), kept.dtype_markers[0] is not None
    row, column = role_of(spec.dgrad, 0), role_of(spec.wgrad, 1, weight_learns)
    amaxes = amaxes or rows.amaxes(dy, amaxes_of_gradient(spec))
    words = None
    if kept.randomness is not None:
        words = kept.randomness.words_for(lambda: rows.amax(dy) if amaxes is None else amaxes[0])
    encode = _encode_scale(spec, kept.state, "output_grad")
    signs = x.signs if isinstance(x, QuantizedArray) and column is not None else None
    row_signs = w.signs if isinstance(w, QuantizedArray) and row is not None else None
    of_gradient: FormOptions = {"words": words, "amax": amaxes, "encode": encode}
    return rows.both_ways(dy, row, column, **(of_gradient | {"sign_key": signs, "row_sign_key": row_signs}))


def backward(
    spec: GemmSpec,
    x: Any,
    kept: SavedForBackward,
    dy: Any,
    dx_dtype: Any,
    *,
    amaxes: Any = None,
    quantized: tuple[Any, Any] | None = None,
    row_sums: jax.Array | None = None,
) -> tuple[jax.Array, GemmOperands, States]:
    """The gradients of the input and of the product's arguments, and what goes to its states.

    Arguments:
        x: what `read_by_wgrad` gave in the forward pass.
        dx_dtype: the dtype of the input's gradient.
        amaxes: those of `amaxes_of_gradient`, if they are known.
        quantized: dy row- and columnwise, if nothing else is read of it; dy then is None.
        row_sums: of dy, float32, if they are known.
    """
    w, (w_marker, bias_marker), _, total, sizes, state, found, _, of_sums = kept
    x, w = read((x, w))
    x_sharding, w_sharding, bias_sharding = spec.shardings
    rows = rows_of(spec, sizes)
    dy_row: Any = None
    dy_column: Any = None
    if spec.dgrad or spec.wgrad:
        with in_profiles("quantize gradient"):
            dy_row, dy_column = quantized or _quantized_gradient(spec, kept, x, w, dy, amaxes)
    # JAX does not check these dtypes: they must be those of the primals.
    with in_profiles("dgrad"):
        if spec.dgrad:
            dx = rows.by_weight(dy_row, w, None, dx_dtype, x_sharding, spec.sum_over_devices("dgrad", of_sums, dy_row))
        else:
            dx = rows.plain_by_weight(dy, jnp.swapaxes(decoded(w, dy.dtype), -1, -2), dx_dtype, x_sharding)
    dw = None
    with in_profiles("wgrad"):
        dtype: Any = None if w_marker is None else w_marker.dtype if total is None else jnp.float32
        if w_marker is not None and spec.wgrad:
            sums = spec.sum_over_devices("wgrad", of_sums, dy_column)
            if spec.transposed and spec.wgrad_commutes:
                dw = rows.wgrad(dy_column, x, dtype, None, None if total is None else total.mT, sums).mT
            else:
                dw = rows.wgrad(x, dy_column, dtype, w_sharding, total, sums)
        elif w_marker is not None:
            dw = rows.plain_wgrad(x, dy, dtype, w_sharding)
            dw = dw if total is None else total + dw
    if spec.delayed is not None:
        state = recorded(spec.delayed, state, "output_grad", rows.amax(dy))
    if found is not None:
        found = measured_backward(found, (x, w), dy, (dy_row, dy_column), spec.rows_split, sizes)
    dbias = rows.bias_gradient(dy, bias_marker, bias_sharding, row_sums)
    gradients = GemmOperands(dw, dbias, None, None) if total is None else GemmOperands(None, dbias, None, None, dw)
    return dx, gradients, (state, found)


def quantized_inputs(specs: Specs, x: jax.Array, states: Sequence[States], **wanted: Any) -> tuple[QuantizedInput, ...]:
    """`quantized_input` of products that share x: one for all, or one for each that has its own delayed scaling."""
    if specs[0].delayed is None:
        return (quantized_input(specs[0], x, None, **wanted),)
    return tuple(quantized_input(spec, x, state, **wanted) for spec, (state, _) in zip(specs, states, strict=True))


def for_each(specs: Specs, inputs: Sequence[Any]) -> Sequence[Any]:
    """One input, or its residual, for each product: those of `quantized_inputs`, or the one that all share."""
    return inputs if len(inputs) == len(specs) else [inputs[0]] * len(specs)


def forward_of_all(
    specs: Specs, inputs: Sequence[QuantizedInput], products: Sequence[GemmOperands], states: Sequence[States]
) -> tuple[tuple[jax.Array, ...], tuple[SavedForBackward, ...], tuple[QuantizedKernel, ...], list[Any]]:
    """`forward` of products that share their input: their results, what is kept, and kernels; and the inputs kept."""
    kept_inputs = [tag_residual(read_by_wgrad(*each), QUANTIZED_INPUT) for each in zip(specs, inputs, strict=False)]
    found = [forward(*each) for each in zip(specs, for_each(specs, inputs), products, states, strict=True)]
    ys, kept, kernels = zip(*found, strict=True)
    return ys, kept, kernels, kept_inputs


def backward_of_all(
    specs: Specs,
    xs: Sequence[Any],
    kept: Sequence[SavedForBackward],
    dys: Sequence[jax.Array | None],
    x_marker: Any,
    **known: Any,
) -> tuple[jax.Array, tuple[GemmOperands, ...], tuple[States, ...]]:
    """`backward` of products that share their input, of which `xs` was kept.

    The gradient of the input is summed in float32 and rounded once.

    Arguments:
        known: what is known of the gradients: `amaxes`, `quantized`, `row_sums`, see `backward`; for each, or None.
    """
    dtype = x_marker.dtype if len(specs) == 1 else jnp.float32
    own = [{name: values[i] for name, values in known.items() if values is not None} for i in range(len(specs))]
    each = zip(specs, for_each(specs, xs), kept, dys, own, strict=True)
    found = [backward(spec, x, k, dy, dtype, **options) for spec, x, k, dy, options in each]
    dx, *further = (dx for dx, _, _ in found)
    for other in further:
        dx = dx + other
    return dx.astype(x_marker.dtype), tuple(g for _, g, _ in found), tuple(states for _, _, states in found)
