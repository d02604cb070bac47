"""dot_general and einsum under a recipe: drop-in replacements that are computed by `linear`'s three GEMMs.

The left operand has the input's role, the right operand the weight's, as in `nn.Dense(dot_general=jlp.dot_general)`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxlowprec.arguments import a_dtype
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.delayed_scaling import State
from jaxlowprec.layers.layer_call import LayerCall, layer_call
from jaxlowprec.layers.low_rank import Adapter, LoRAKernel, add_adapter, add_product, check_adapter, is_quantized
from jaxlowprec.layers.options import DotGeneralOptions, DotOptions, EinsumOptions, LayerSettings
from jaxlowprec.layers.product import QuantizedKernel
from jaxlowprec.layers.residuals import in_profiles, tag_product
from jaxlowprec.layers.subscripts import KernelAxes, contracted_names, kernel_axes, parse, reduce_alone
from jaxlowprec.layers.watched import watched
from jaxlowprec.ops.checks import (
    a_sharding,
    axis_from_the_front,
    dimension_numbers,
    float_array,
    float_dtype,
    not_quantized,
)
from jaxlowprec.recipes.autocast import FROM_CONTEXT
from jaxlowprec.recipes.roles import Recipe
from jaxlowprec.wiring.sharding_rule import ShardingLike, resharded

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


@overload
def dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."] | QuantizedArray | LoRAKernel | None,
    dimension_numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    state: None = None,
    **options: Unpack[DotGeneralOptions],
) -> Float[Array, "..."]: ...


@overload
def dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."] | QuantizedArray | LoRAKernel | None,
    dimension_numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    state: State,
    **options: Unpack[DotGeneralOptions],
) -> tuple[Float[Array, "..."], State]: ...


def dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."] | QuantizedArray | LoRAKernel | None,
    dimension_numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    key: jax.Array | None = None,
    quantized_kernel: QuantizedKernel | None = None,
    name: str = "",
    state: State | None = None,
) -> Float[Array, "..."] | tuple[Float[Array, "..."], State]:
    """`jax.lax.dot_general` with its three GEMMs quantised as the recipe says; without a recipe it is that function.

    Any contraction and batch dimensions work. Each slice of the batch dimensions is quantised with its own amax and
    random bits.

    Arguments:
        lhs: in the input's role.
        rhs: in the weight's role; None with `quantized_kernel`, for inference. Or a loaded QuantizedArray, which stands
            for the matrices [batch..., K, N] and is used as such (see `linear`). Or one of both with an adapter.
        dimension_numbers, out_sharding: as for `jax.lax.dot_general`: axes are counted from the front.
        precision: precision of the three GEMMs, as for `jax.lax.dot_general`; for quantised ones see `scaled_matmul`.
        preferred_element_type: the dtype of the result; default under a recipe: lhs's dtype, so that a float32 master
            weight can be passed without a cast.
        recipe, key, name, state: see `linear`.
        quantized_kernel: `quantize_kernel` of rhs as [batch..., K, N], with its dimensions in that order.

    Raises:
        TypeError, ValueError: as for `linear` and `jax.lax.dot_general`; or, under a recipe, a product that contracts
            nothing.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> x, w = jnp.ones((4, 8, 32)), jnp.ones((4, 32, 16))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     jlp.dot_general(x, w, (((2,), (1,)), ((0,), (0,)))).shape
    (4, 8, 16)
    """
    who = "dot_general"
    options: DotOptions = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    _check_options(who, preferred_element_type, out_sharding)
    settings: LayerSettings = {"recipe": recipe, "key": key, "name": name, "state": state, "precision": precision}
    if isinstance(rhs, LoRAKernel):
        again: Any = {**settings, **options, "quantized_kernel": quantized_kernel}
        y: Any = dot_general(lhs, rhs.kernel, dimension_numbers, **again)
        out_state: Any
        y, out_state = (y, None) if state is None else y
        y = add_product(y, *_adapted(who, lhs, rhs, dimension_numbers), name)
        return y if state is None else (y, out_state)
    rhs, call = layer_call(who, rhs, quantized_kernel, **settings)

    def macs() -> int:
        assert rhs is not None
        contract, batch = dimension_numbers[0][0], dimension_numbers[1][0]
        return lhs.size * rhs.size // math.prod(lhs.shape[axis] for axis in (*contract, *batch))

    compute = functools.partial(_dot_general, given=dimension_numbers, options=options)
    y, out_state = watched(call, lhs, rhs, compute, macs)
    return y if state is None else (y, out_state)


def _adapted(who: str, lhs: jax.Array, rhs: LoRAKernel, given: DimensionNumbers) -> tuple[jax.Array, Adapter]:
    """lhs as matrices, and the adapter that they are multiplied by."""
    check_adapter(who, rhs)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers(who, given, lhs.ndim, None)
    batch, _, x = _as_matrices(lhs, lhs_batch, lhs_contract, contracted_last=True)
    adapter, first = rhs.adapter, tuple(range(len(batch) + len(rhs_contract)))
    if not is_quantized(rhs) and rhs.ndim == len(batch) + 2 and rhs_contract == (rhs.ndim - 1,):  # x @ kernel.mT
        adapter, first = adapter.mT, (*rhs_batch, *rhs_contract)
    in_order = tuple(rhs_batch) == first[: len(batch)] and (is_quantized(rhs) or (*rhs_batch, *rhs_contract) == first)
    if not in_order or adapter.a.shape[:-1] != (*batch, x.shape[-1]):
        raise ValueError(
            f"{who}: a kernel of shape {rhs.shape} with an adapter {rhs.adapter.a.shape} by {rhs.adapter.b.shape} in "
            f"the product {given} with {lhs.shape}; needs a kernel [batch..., contracted..., free...] and the adapter "
            "of its matrices [batch..., K, N]"
        )
    return x, adapter


def _check_options(who: str, preferred_element_type: jax.typing.DTypeLike | None, out_sharding: ShardingLike) -> None:
    """Raises for options that JAX would refuse, too; without a recipe JAX also accepts dtypes other than floats."""
    a_sharding(who, "out_sharding", out_sharding)
    if preferred_element_type is not None:
        a_dtype(who, "preferred_element_type", preferred_element_type)


def _dot_general(
    call: LayerCall, lhs: jax.Array, rhs: jax.Array | None, given: DimensionNumbers, options: DotOptions
) -> tuple[jax.Array, State | None]:
    """The product, and the state of delayed scaling if there is one."""
    who, quantized_kernel = call.who, call.quantized
    if rhs is None and quantized_kernel is None:
        raise ValueError(f"{who}: rhs is None; without quantized_kernel= there is no second operand")
    if call.recipe is None and call.in_high_precision(rhs):
        not_quantized(who, "lhs", lhs)
        rhs = call.high_precision_weight(rhs)
        with in_profiles(call.name):
            return tag_product(jax.lax.dot_general(lhs, rhs, given, **options)), call.state
    lhs = float_array(who, "lhs", lhs)
    rhs = None if rhs is None else float_array(who, "rhs", rhs)
    if call.calibrates:
        rhs = call.high_precision_weight(rhs)
        y = tag_product(jax.lax.dot_general(lhs, rhs.astype(lhs.dtype), given, **options))
        return call.recorded(lhs, rhs, y)
    dims = dimension_numbers(who, given, lhs.ndim, None if rhs is None else rhs.ndim)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims
    if not lhs_contract:
        raise ValueError(f"{who}: {dims} contracts nothing: no GEMM to quantise; pass recipe=None")
    batch, lhs_free, x = _as_matrices(lhs, lhs_batch, lhs_contract, contracted_last=True)
    w: jax.Array | None = None
    rhs_free: tuple[int, ...] = ()
    if rhs is not None:
        as_matrices = functools.partial(_as_matrices, batch=rhs_batch, contract=rhs_contract, contracted_last=False)
        rhs_batch_shape, rhs_free, w = as_matrices(rhs)
        call = call.laid_out(lambda rhs: as_matrices(rhs)[-1], transposed=rhs_contract[-1] == rhs.ndim - 1)
        if rhs_batch_shape != batch or [lhs.shape[a] for a in lhs_contract] != [rhs.shape[a] for a in rhs_contract]:
            raise ValueError(f"{who}: lhs {lhs.shape} and rhs {rhs.shape} do not fit {dims}")
    elif quantized_kernel is not None:
        rhs_free = quantized_kernel.shape[len(batch) + 1 :]
        if quantized_kernel.shape[: len(batch) + 1] != (*batch, x.shape[-1]):
            raise ValueError(f"{who}: lhs {lhs.shape} and quantized_kernel {quantized_kernel.shape} do not fit {dims}")
    preferred = options["preferred_element_type"]
    out_dtype = float_dtype(who, "preferred_element_type", lhs.dtype if preferred is None else preferred)
    rows_split = x.ndim > len(batch) + 2
    y, out_state = call.matmul(x, w, None, out_dtype, rows_split=rows_split)
    return resharded(y.reshape(*batch, *lhs_free, *rhs_free), options["out_sharding"]), out_state


def axes_in_order(who: str, ndim: int, axes: Iterable[int]) -> tuple[int, ...]:
    """Axes counted from 0, ascending: the order in which Flax's layers lay out a kernel, however axes were listed."""
    return tuple(sorted(axis_from_the_front(who, axis, ndim) for axis in axes))


def linear_general(
    who: str,
    inputs: Float[Array, "..."],
    kernel: Float[Array, "..."] | QuantizedArray | None,
    bias: Float[Array, "..."] | None,
    axis: Iterable[int],
    batch: Iterable[int],
    features: Sequence[int],
    *,
    state: State | None = None,
    **options: Any,
) -> Any:
    """Flax's linear over several axes of the inputs, with a kernel [batch..., contracted..., features...].

    A kernel that is quantised, or None with `quantized_kernel=`, stands for matrices [batch..., K, N].

    Arguments:
        axis, batch: contracted and batch axes of the inputs, in any order; negative ones count from the end.
        state, options: of `dot_general`, which also says what is returned.
    """
    contract_dims, batch_dims = (axes_in_order(who, inputs.ndim, axes) for axes in (axis, batch))
    kernel_batch = tuple(range(len(batch_dims)))
    kernel_contract = tuple(range(len(batch_dims), len(batch_dims) + len(contract_dims)))
    dims = ((contract_dims, kernel_contract), (batch_dims, kernel_batch))
    y: Any = dot_general(inputs, kernel, dims, state=state, **options)
    y, out_state = (y, None) if state is None else y
    y = y.reshape(*y.shape[: inputs.ndim - len(contract_dims)], *features)
    if bias is not None:
        kept = [inputs.shape[a] if a in batch_dims else 1 for a in range(inputs.ndim) if a not in contract_dims]
        y = y + bias.reshape(*kept, *features)
    return y if state is None else (y, out_state)


def _as_matrices(
    x: jax.Array, batch: Sequence[int], contract: Sequence[int], contracted_last: bool
) -> tuple[tuple[int, ...], tuple[int, ...], jax.Array]:
    """The batch and free shapes, and x as [batch..., free, contracted] or [batch..., contracted, free].

    If several free axes come first, the last one stays separate: [batch..., S, free, contracted], its rows split.
    """
    free = [d for d in range(x.ndim) if d not in (*batch, *contract)]
    order = [*batch, *free, *contract] if contracted_last else [*batch, *contract, *free]
    batch_shape, free_shape, contract_shape = (tuple(x.shape[d] for d in dims) for dims in (batch, free, contract))
    contracted = math.prod(contract_shape)
    if not contracted_last:
        sizes = [contracted, math.prod(free_shape)]
    elif len(free_shape) > 1:
        sizes = [math.prod(free_shape[:-1]), free_shape[-1], contracted]
    else:
        sizes = [math.prod(free_shape), contracted]
    x = x if order == list(range(x.ndim)) else x.transpose(order)
    return batch_shape, free_shape, x.reshape(*batch_shape, *sizes)


@overload
def einsum(
    subscripts: str,
    *operands: Float[Array, "..."] | QuantizedArray | LoRAKernel,
    state: None = None,
    **options: Unpack[EinsumOptions],
) -> Float[Array, "..."]: ...


@overload
def einsum(
    subscripts: str,
    *operands: Float[Array, "..."] | QuantizedArray | LoRAKernel,
    state: State,
    **options: Unpack[EinsumOptions],
) -> tuple[Float[Array, "..."], State]: ...


def einsum(
    subscripts: str,
    *operands: Float[Array, "..."] | QuantizedArray | LoRAKernel,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    key: jax.Array | None = None,
    name: str = "",
    state: State | None = None,
) -> Float[Array, "..."] | tuple[Float[Array, "..."], State]:
    """`jnp.einsum` of two operands, its three GEMMs quantised as the recipe says; without a recipe it is that function.

    A product that contracts nothing is not a GEMM and stays in high precision.

    Arguments:
        subscripts: as for `jnp.einsum`, "..." and the implicit form included.
        operands: under a recipe two: the first in the input's role, the second in the weight's. The second may be a
            loaded QuantizedArray [batch..., K, N] (see `linear`), its axes in this order; or one of both with an
            adapter, whose product has the elements of that operand.
        precision, preferred_element_type, out_sharding, recipe, key, name, state: see `dot_general`.

    Raises:
        ValueError: other than two operands under a recipe, or subscripts that do not fit.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     jlp.einsum("btd,dhk->bthk", jnp.ones((2, 8, 32)), jnp.ones((32, 4, 16))).shape
    (2, 8, 4, 16)
    """
    who = "einsum"
    options: DotOptions = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    _check_options(who, preferred_element_type, out_sharding)
    settings: LayerSettings = {"recipe": recipe, "key": key, "name": name, "state": state, "precision": precision}
    return _einsum_call(subscripts, operands, None, options, settings)


def einsum_of_layer(
    subscripts: str,
    x: jax.Array,
    kernel: Any,
    kernel_shape: Sequence[int],
    *,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: ShardingLike = None,
    precision: jax.lax.PrecisionLike = None,
    **settings: Any,
) -> Any:
    """`einsum` of a layer that knows the shape of its kernel: one that is quantised stands for that kernel's matrices.

    An adapter is that of these matrices, [batch..., K, N] (see `subscripts`), of an array as of a quantised kernel.

    Arguments:
        kernel_shape: that of the kernel as an array.
    """
    options: DotOptions = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    _check_options("einsum", preferred_element_type, out_sharding)
    of_call: Any = settings | {"precision": precision}
    return _einsum_call(subscripts, (x, kernel), tuple(kernel_shape), options, of_call)


def _einsum_call(
    subscripts: str, operands: tuple[Any, ...], shape: Any, options: DotOptions, settings: LayerSettings
) -> Any:
    """The einsum, and the state for the layer's next call if there is one.

    Arguments:
        shape: that of a layer's kernel, or None.
    """
    who, state = "einsum", settings["state"]
    if len(operands) == 2 and isinstance(operands[1], LoRAKernel):
        x, kernel = operands
        without: DotOptions = {**options, "out_sharding": None}
        y = _einsum_call(subscripts, (x, kernel.kernel), shape, without, settings)
        y, out_state = (y, None) if state is None else y
        y = resharded(add_adapter(y, subscripts, x, kernel, shape, settings["name"]), options["out_sharding"])
        return y if state is None else (y, out_state)
    is_loaded = len(operands) == 2 and isinstance(operands[1], QuantizedArray)
    _, call = layer_call(who, operands[1] if len(operands) == 2 else None, None, **settings)
    if is_loaded:
        y, out_state = _einsum_of_loaded(call, subscripts, operands, shape, options)
        return y if state is None else (y, out_state)
    if len(operands) != 2:
        y, out_state = _einsum(call, subscripts, operands, options)
        return y if state is None else (y, out_state)

    def macs() -> int:
        x, w = operands
        (x_names, w_names), _ = parse(who, subscripts, x.ndim, w.ndim)
        return math.prod(dict(zip([*x_names, *w_names], [*x.shape, *w.shape], strict=True)).values())

    def compute(call: LayerCall, x: Any, w: Any) -> tuple[jax.Array, State | None]:
        return _einsum(call, subscripts, (x, w), options)

    y, out_state = watched(call, *operands, compute, macs)
    return y if state is None else (y, out_state)


def _einsum(
    call: LayerCall, subscripts: str, operands: tuple[Any, ...], options: DotOptions
) -> tuple[jax.Array, State | None]:
    """The product, and the state of delayed scaling if there is one."""
    who, state = call.who, call.state
    if call.recipe is None:
        for i, operand in enumerate(operands):
            not_quantized(who, f"operand {i}", operand)
        with in_profiles(call.name):
            return tag_product(jnp.einsum(subscripts, *operands, **options)), state
    if len(operands) != 2:
        raise ValueError(
            f"{who}: {subscripts!r} has {len(operands)} operands; under a recipe it needs two: call it pair by pair"
        )
    x, w = float_array(who, "operand 0", operands[0]), float_array(who, "operand 1", operands[1])
    (x_names, w_names), out = parse(who, subscripts, x.ndim, w.ndim)
    shared = [n for n in dict.fromkeys(x_names) if n in w_names]
    batch, contract = [n for n in shared if n in out], contracted_names(x_names, w_names, out)
    if not contract:
        return jnp.einsum(subscripts, x, w, **options), state
    if call.calibrates:
        y = tag_product(jnp.einsum(subscripts, x, w.astype(x.dtype), **options))
        return call.recorded(x, w, y)
    x, x_names = reduce_alone(x, x_names, keep=set(w_names) | set(out))
    reduced = functools.partial(reduce_alone, names=w_names, keep=set(x_names) | set(out))
    call = call.laid_out(lambda w: reduced(w)[0])
    w, w_names = reduced(w)
    contract_dims, batch_dims = (
        ([x_names.index(n) for n in group], [w_names.index(n) for n in group]) for group in (contract, batch)
    )
    dims = (contract_dims, batch_dims)
    y, out_state = _dot_general(call, x, w, dims, options | {"out_sharding": None})
    names = batch + [n for n in x_names if n not in shared] + [n for n in w_names if n not in shared]
    return resharded(y.transpose([names.index(n) for n in out]), options["out_sharding"]), out_state


def _einsum_of_loaded(
    call: LayerCall, subscripts: str, operands: tuple[Any, ...], shape: Any, options: DotOptions
) -> tuple[jax.Array, State | None]:
    """The product with a weight that is quantised along its second last axis, and the unchanged state."""
    who, (x, q) = call.who, operands
    x = float_array(who, "operand 0", x)
    sizes = q.shape if shape is None else shape
    (x_names, w_names), out = parse(who, subscripts, x.ndim, len(sizes))
    axes = kernel_axes(who, subscripts, x.ndim, len(sizes))
    if shape is None and axes != KernelAxes.in_front(q.ndim - 2, 1, q.ndim):
        raise ValueError(
            f"{who}: {subscripts!r} with a quantised second operand of shape {q.shape}; it is quantised along its "
            "second last axis: contract only that axis, keep the last one free, and let the others be batch axes"
        )
    if not axes.contracted or q.shape != axes.sizes(sizes):
        raise ValueError(
            f"{who}: {subscripts!r} with a quantised kernel of shape {q.shape}, which stands for one of shape {sizes}; "
            f"needs its matrices [batch..., K, N], of shape {axes.sizes(sizes)}"
        )
    x, x_names = reduce_alone(x, x_names, keep=set(w_names) | set(out))
    batch, contracted, free = ([w_names[a] for a in part] for part in (axes.batch, axes.contracted, axes.free))
    in_x: Any = [[x_names.index(n) for n in part] for part in (contracted, batch)]
    in_front = KernelAxes.in_front(len(batch), len(contracted), len(sizes))
    dims = ((in_x[0], in_front.contracted), (in_x[1], in_front.batch))
    wanted, options = options["out_sharding"], options | {"out_sharding": None}
    y, state = _dot_general(call, x, None, dims, options)
    y = y.reshape(*y.shape[:-1], *(sizes[a] for a in axes.free))
    names = batch + [n for n in x_names if n not in w_names] + free
    return resharded(y.transpose([names.index(n) for n in out]), wanted), state
