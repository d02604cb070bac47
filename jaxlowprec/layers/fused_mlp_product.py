"""The quantised MLP with its custom_vjp: one for all of its products, so that it decides what is kept between them.

Of all rows, or of rows in groups, each with kernels of its own; see `GemmOperands.sizes`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Required, TypedDict

import jax

from jaxlowprec.arguments import shown
from jaxlowprec.arrays.formats import MXFP8
from jaxlowprec.layers.operands import for_both_ways
from jaxlowprec.layers.producers import (
    NormedInput,
    input_dtype_marker,
    input_gradients,
    inputs_of,
    quantized_gradients,
    quantized_hidden,
)
from jaxlowprec.layers.product import (
    GemmOperands,
    GemmSpec,
    QuantizedInput,
    QuantizedKernel,
    SavedForBackward,
    Specs,
    States,
    amaxes_of_gradient,
    amaxes_of_input,
    backward,
    backward_of_all,
    for_each,
    forward,
    forward_of_all,
    fprop,
    products_differentiated_once,
    quantized_input,
    read_by_wgrad,
    rows_of,
)
from jaxlowprec.layers.residuals import (
    QUANTIZED_INPUT,
    QUANTIZED_WEIGHT,
    differentiated_once,
    dtype_marker,
    in_profiles,
    read,
    tag_product,
    tag_residual,
)
from jaxlowprec.layers.rows import AllRows, RowsInGroups
from jaxlowprec.ops.activations import api as ops
from jaxlowprec.ops.activations.reference import NAMED_ACTIVATIONS
from jaxlowprec.ops.amax import Amaxes
from jaxlowprec.ops.quantize.api import quantize
from jaxlowprec.wiring.sharding_rule import resharded, sharding_of

Saved = Literal["quantized", "8bit", "recompute"]
"""The form in which an MLP saves its hidden layer for the backward pass; see `mlp`."""

Activation = str | Callable[..., jax.Array]
"""The name of an activation with defined bits, or a function of the hidden layer's operands."""


_ALL = AllRows(split=False, precision=None)


@dataclasses.dataclass(frozen=True)
class MlpSpec:
    """The static description of an MLP. It does not contain names of layers: equal MLPs are traced once.

    Attributes:
        activation: of the results of the `hidden` products.
        hidden: the products that read the MLP's input: gate and up, or up alone.
        down: the product that gives its result.
        saved: what is kept of the hidden layer.
    """

    activation: Activation
    hidden: Specs
    down: GemmSpec
    saved: Saved


def activated(
    activation: Activation,
    operands: Sequence[jax.Array],
    wanted: Amaxes | None = None,
    rows: AllRows | RowsInGroups = _ALL,
) -> tuple[jax.Array, Any]:
    """The hidden layer [..., T, F] from its operands of that shape, and its amaxes as `both_ways` takes them."""
    with in_profiles("activation"):
        if not callable(activation) and isinstance(rows, AllRows):
            a, found = ops.activated(activation, operands, wanted)
            return a, for_both_ways(found)
        if not callable(activation):
            a, _ = ops.activated(activation, operands, None)
        else:
            a = called(activation, *operands, who="mlp" if isinstance(rows, AllRows) else "grouped_mlp")
        return a, rows.amaxes(a, wanted)


def called(activation: Callable[..., Any], *operands: jax.Array, who: str = "mlp") -> jax.Array:
    """Calls the user's activation. Raises ValueError unless the result has the operands' shape and dtype."""
    a = activation(*operands)
    found, needed = jax.typeof(a), jax.typeof(operands[0])
    if (found.shape, found.dtype) != (needed.shape, needed.dtype):
        raise ValueError(
            f"{who}: activation={shown(activation)} gives {found.dtype} {found.shape}; needs {needed.dtype} "
            f"{needed.shape}, as its operands: cast the result, or compute it elementwise"
        )
    return a


class HiddenGradients(TypedDict, total=False):
    """The gradients of the hidden layer's operands, as arguments of `backward_of_all`: one element for each."""

    dys: Required[Sequence[jax.Array | None]]
    amaxes: Sequence[Any]
    quantized: Sequence[Any]
    row_sums: Sequence[jax.Array] | None


def _activation_gradients(
    activation: Activation,
    operands: Sequence[jax.Array],
    dy: jax.Array,
    wanted: Amaxes | None = None,
    row_sums: bool = False,
) -> HiddenGradients:
    """The gradient of each operand, its amaxes as `both_ways` takes them, and its sum over rows if that is wanted: what
    `backward_of_all` takes of products that gave the operands. None: not known."""
    with in_profiles("activation gradient"):
        if callable(activation):
            return {"dys": jax.vjp(activation, *operands)[1](dy)}
        gradients, amaxes, found = ops.activation_gradients(activation, dy, operands, wanted, row_sums=row_sums)
        gradients = [resharded(g, sharding_of(x)) for g, x in zip(gradients, operands, strict=True)]
        return {"dys": gradients, "amaxes": list(map(for_both_ways, amaxes)), "row_sums": found or None}


def operands_of(activation: str) -> int:
    """How many operands a named activation has."""
    return 2 if NAMED_ACTIVATIONS[activation].gated else 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    spec: MlpSpec, x: jax.Array | NormedInput, products: tuple[GemmOperands, ...], states: tuple[States, ...]
) -> tuple[jax.Array, list[jax.Array]]:
    inputs, further, _ = inputs_of(spec.hidden, x, states[:-1], first=products[0])
    of_scaling = [state for state, _ in states]
    each = zip(spec.hidden, for_each(spec.hidden, inputs), products, of_scaling, strict=False)
    hidden = [fprop(*arguments)[0] for arguments in each]
    given, _ = _input_of_down(spec, hidden, states[-1], products[-1], amaxes_of_input(spec.down, backward=False))
    return fprop(spec.down, given, products[-1], of_scaling[-1])[0], further


def _input_of_down(
    spec: MlpSpec,
    hidden: Sequence[jax.Array],
    states: States,
    down: GemmOperands | SavedForBackward,
    find: Amaxes | None = None,
    amaxes: Any = None,
    **wanted: bool,
) -> tuple[QuantizedInput, Any]:
    """The activation as the GEMMs of `down` read it, and its amaxes: those that are given, or those to `find`.

    `wanted`: see `quantized_input`.
    """
    sizes, randomness = down.sizes, down.randomness
    given = quantized_hidden(spec.activation, spec.down, hidden, states, sizes, **wanted)
    if given is not None:
        return given, None
    a, found = activated(spec.activation, hidden, find, rows_of(spec.down, sizes))
    amaxes = amaxes or found
    options: Any = {"sizes": sizes, "randomness": randomness, "signs": down.signs, "amaxes": amaxes}
    options |= wanted
    return quantized_input(spec.down, a, states[0], **options), amaxes


def _forward(
    spec: MlpSpec, x: jax.Array | NormedInput, products: tuple[GemmOperands, ...], states: tuple[States, ...]
) -> tuple[tuple[jax.Array, list[jax.Array]], Any]:
    x, products = differentiated_once(x), products_differentiated_once(products)
    state, probe = states[-1]
    inputs, further, made_from = inputs_of(spec.hidden, x, states[:-1], first=products[0], backward=True)
    hidden, kept, kernels, kept_inputs = forward_of_all(spec.hidden, inputs, products[:-1], states[:-1])
    hidden = tuple(map(tag_product, hidden))

    find, watched = amaxes_of_input(spec.down), probe is not None
    given, amaxes = _input_of_down(spec, hidden, states[-1], products[-1], find, backward=watched)
    y, kept_down, _ = forward(spec.down, given, products[-1], states[-1])

    of_hidden: Any = hidden
    if spec.saved == "recompute":
        of_hidden = _recomputable(spec, inputs, products, kernels), [state for state, _ in states[:-1]]
    elif spec.saved == "8bit":
        of_hidden = tuple(tag_residual(quantize(h, MXFP8()), QUANTIZED_INPUT) for h in hidden)
    # Eight bits give another hidden layer in the backward pass, and so another amax.
    amaxes = None if spec.saved == "8bit" else amaxes
    residuals = kept_inputs, made_from, kept, of_hidden, (amaxes, state, kept_down)
    return (tag_product(y), further), residuals


def _recomputable(
    spec: MlpSpec,
    inputs: Sequence[QuantizedInput],
    products: Sequence[GemmOperands],
    kernels: Sequence[QuantizedKernel],
) -> tuple[list[QuantizedInput], list[GemmOperands]]:
    """Residuals from which the hidden layer's forward GEMMs are computed again: only the operands that these read."""
    of_input = zip(spec.hidden, inputs, strict=False)
    inputs = [
        QuantizedInput(None, each.rowwise, None) if own.fprop else QuantizedInput(each.x, None, None)
        for own, each in of_input
    ]
    of_kernels = [
        GemmOperands(None, p.bias, None, QuantizedKernel(None, tag_residual(kernel.columnwise, QUANTIZED_WEIGHT)))
        if own.fprop
        else GemmOperands(p.w, p.bias, None, p.quantized)
        for own, p, kernel in zip(spec.hidden, products[:-1], kernels, strict=True)
    ]
    of_kernels = [
        again._replace(sizes=p.sizes, of_sums=p.of_sums) for again, p in zip(of_kernels, products, strict=False)
    ]
    return [tag_residual(each, QUANTIZED_INPUT) for each in inputs], of_kernels


def _backward(
    spec: MlpSpec, residuals: Any, gradients: Any
) -> tuple[Any, tuple[GemmOperands, ...], tuple[States, ...]]:
    kept_inputs, made_from, kept, of_hidden, (amaxes, state, kept_down) = residuals
    dy, of_further = differentiated_once(gradients)
    # The barrier keeps XLA from taking what is computed again here from the forward pass, which would have to keep it.
    of_hidden, dy = jax.lax.optimization_barrier((of_hidden, dy))
    hidden = _hidden_again(spec, of_hidden)
    states = state, kept_down.telemetry
    given, _ = _input_of_down(spec, hidden, states, kept_down, amaxes=amaxes, forward=False, backward=True)
    a = read_by_wgrad(spec.down, given)
    da, of_down, down_states = backward(spec.down, a, kept_down, dy, hidden[0].dtype)
    of_each = _gradients_of_hidden(spec, kept, hidden, da)
    x_marker = input_dtype_marker(made_from)
    dx, of_products, new_states = backward_of_all(spec.hidden, kept_inputs, kept, x_marker=x_marker, **of_each)
    return input_gradients(made_from, dx, of_further), (*of_products, of_down), (*new_states, down_states)


def _gradients_of_hidden(
    spec: MlpSpec, kept: Sequence[SavedForBackward], hidden: Sequence[jax.Array], da: jax.Array
) -> HiddenGradients:
    """The gradients of the hidden layer, as keyword arguments of `backward_of_all`."""
    found = quantized_gradients(spec.activation, spec.hidden, kept, hidden, da)
    if found is not None:
        return {"dys": [None] * len(found), "quantized": found}
    if kept[0].sizes is not None:  # `backward` finds the amaxes and sums of each group
        return {"dys": _activation_gradients(spec.activation, hidden, da)["dys"]}
    first, biased = spec.hidden[0], any(product.dtype_markers[1] is not None for product in kept)
    wanted = amaxes_of_gradient(first) or Amaxes(plain=False, rows_split=first.rows_split)
    return _activation_gradients(spec.activation, hidden, da, wanted, row_sums=biased)


def _hidden_again(spec: MlpSpec, of_hidden: Any) -> Sequence[jax.Array]:
    """The operands of the activation in the backward pass."""
    of_hidden = read(of_hidden)
    if spec.saved == "8bit":
        return [h.dequantize() for h in of_hidden]
    if spec.saved == "quantized":
        return of_hidden
    (inputs, kernels), states = of_hidden
    with in_profiles("recompute"):
        again = zip(spec.hidden, for_each(spec.hidden, inputs), kernels, states, strict=True)
        return [fprop(*each)[0] for each in again]


_mlp.defvjp(_forward, _backward)
quantized_mlp = jax.jit(_mlp, static_argnums=0)  # MLPs with equal specs are traced once, whatever their names
"""MlpSpec, x [..., T, K], a GemmOperands and States for each kernel, that of `down` last -> [..., T, N].

x may be a NormedInput. A list of further results comes second, see `normed_input.inputs_of`.
"""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activated_from_8bit(activation: Activation, operands: tuple[jax.Array, ...]) -> jax.Array:
    """`activated`, whose backward pass keeps the operands as MXFP8."""
    return activated(activation, operands)[0]


def _forward_8bit(activation: Activation, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
    operands = differentiated_once(operands)
    kept = [tag_residual(quantize(x, MXFP8()), QUANTIZED_INPUT) for x in operands]
    return activated(activation, operands)[0], (kept, [dtype_marker(x) for x in operands])


def _backward_8bit(activation: Activation, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    kept, markers = residuals
    operands = [x.dequantize(marker.dtype) for x, marker in zip(read(kept), markers, strict=True)]
    return (tuple(_activation_gradients(activation, operands, differentiated_once(dy))["dys"]),)


activated_from_8bit.defvjp(_forward_8bit, _backward_8bit)
