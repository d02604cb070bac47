"""Delayed scaling: per-tensor FP8 scaled by the amaxes of earlier steps, and the state that holds them.

The state of a layer is six float32 arrays, named as Flax's `fp8_ops` names them: for `input`, `kernel` and
`output_grad` a `<name>_amax_history` [L] and a `<name>_scale` [1]. Slot 0 of a history is the latest step's amax. A
layer of E experts has them for each expert, [E, L] and [E, 1]; an expert without rows in a step has seen the amaxes 0,
and that of its kernel. As in Flax, the state travels with the parameters: **its gradient is its new value**, which
replaces the old one. So one backward pass shifts every history once, and values that a layer saw in several places are
combined by max. A layer that gives no new value in a step, because it does not run or its result gets no gradient, has
a gradient of zeros, which no new value has: its state stays.

* In an optimizer: `overwrite_with_gradient(optax.adamw(...))`. Flax's `TrainState` overwrites on its own, also by the
  zeros, which the layer's next call takes for an error: give it `keep_unused(gradients, state.params)`.
* Adding up the gradients of microbatches: `add_gradients(a, b)`.
* A layer reached more than once through transformations that broadcast its state (`nn.scan`, `nn.remat` twice,
  `jax.lax.scan` over a closure) or through several `apply`: differentiate `combined_by_max(loss)`, or autodiff adds
  the new values up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from jaxlowprec import wiring
from jaxlowprec.arguments import array, shown, whole_number
from jaxlowprec.ops.amax import largest_over
from jaxlowprec.ops.exact import quotient_by_integers
from jaxlowprec.recipes.transformer_engine import DelayedScaling
from jaxlowprec.wiring import native
from jaxlowprec.wiring.defining import varying_axes
from jaxlowprec.wiring.sharding_rule import resharded, sharding_of

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""The name of the Flax collection, or NNX attribute, of leaves whose gradient is their new value."""

TENSORS = ("input", "kernel", "output_grad")
"""The tensors of a layer that have a history and a scale, as the state's names begin."""

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126  # limits that keep reciprocals normal

State = dict[str, Any]

_CHANGED = (
    "an amax or a scale below 0, or a scale of 0, says that a transformation has changed a layer's state, whose "
    "gradient is its new value; make jaxlowprec.delayed_scaling.overwrite_with_gradient the outermost transformation "
    "of the optimizer, or with Flax's TrainState apply keep_unused(gradients, state.params), leave the gradients of "
    "states as they are, and start from a state that is intact"
)


def init_state(recipe: DelayedScaling, *, num_experts: int | None = None) -> State:
    """A layer's state before its first step: empty histories and scales of 1.

    Arguments:
        recipe: the recipe whose `amax_history_len` is used.
        num_experts: for `grouped_matmul`: each expert has histories and scales of its own, [E, L] and [E, 1]. None: the
            state of `linear`, [L] and [1].

    Raises:
        TypeError, ValueError: the recipe is another one, or the number is none.

    >>> import jaxlowprec as jlp
    >>> state = jlp.delayed_scaling.init_state(jlp.DelayedScaling(amax_history_len=16))
    >>> state["input_amax_history"].shape, state["input_scale"].shape
    ((16,), (1,))
    >>> jlp.delayed_scaling.init_state(jlp.DelayedScaling(amax_history_len=16), num_experts=8)["kernel_scale"].shape
    (8, 1)
    """
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(f"init_state: recipe={shown(recipe)}; needs a DelayedScaling")
    if num_experts is not None:
        num_experts = whole_number("init_state", "num_experts", num_experts, 1)
    state = {}
    for tensor in TENSORS:
        of_history, of_scale = _shapes(recipe, num_experts)
        state[f"{tensor}_amax_history"] = jnp.zeros(of_history, jnp.float32)
        state[f"{tensor}_scale"] = jnp.ones(of_scale, jnp.float32)
    return state


def _shapes(recipe: DelayedScaling, experts: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of an amax history and of a scale."""
    lead = () if experts is None else (experts,)
    return (*lead, recipe.amax_history_len), (*lead, 1)


def check_mapping(who: str, state: Any) -> None:
    """Raises TypeError unless the state is a mapping."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{who}: state is a {type(state).__name__}; needs what jaxlowprec.delayed_scaling.init_state(recipe) makes"
        )


def _is_float(dtype: Any) -> bool:
    """Whether an array is a float, or Flax's fp8_ops.fm32."""
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jax.dtypes.extended)


def check_state(who: str, recipe: DelayedScaling, state: Any, experts: int | None = None) -> State:
    """Checks that the state fits this recipe, and returns it. `experts`: of a layer that has some."""
    if state is None:
        of_experts = "" if experts is None else f", num_experts={experts}"
        raise ValueError(
            f"{who}: DelayedScaling needs the layer's amax histories and there are none: initialise the model within "
            "autocast(recipe), call jaxlowprec.nnx.add_delayed_scaling(model, recipe), or pass "
            f"state=jaxlowprec.delayed_scaling.init_state(recipe{of_experts})"
        )
    check_mapping(who, state)
    of_history, of_scale = _shapes(recipe, experts)
    for tensor in TENSORS:
        for name, shape in ((f"{tensor}_amax_history", of_history), (f"{tensor}_scale", of_scale)):
            leaf = state.get(name)
            found, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
            if found == shape and not (_is_float(dtype) and isinstance(leaf, jax.Array | np.ndarray)):
                raise TypeError(f"{who}: state[{name!r}] is a {type(leaf).__name__} of {dtype}; needs a float32 array")
            if found != shape:
                of_experts = "" if experts is None else f" and {experts} experts"
                raise ValueError(
                    f"{who}: state[{name!r}] has shape {found}; {recipe} needs {shape}: make it anew for this recipe"
                    f"{of_experts}"
                )
        _check_unchanged(who, tensor, state)
    return dict(state)


def _check_unchanged(who: str, tensor: str, state: Mapping[str, Any]) -> None:
    """Raises ValueError if a tensor's numbers, as far as they are known, are none that a layer makes."""
    for name in (f"{tensor}_amax_history", f"{tensor}_scale"):
        leaf = state[name]
        traced = isinstance(leaf, jax.core.Tracer) or not getattr(leaf, "is_fully_addressable", True)
        if not traced and leaf.dtype == np.float32 and np.any(_is_changed(np.asarray(leaf), name.endswith("_scale"))):
            raise ValueError(f"{who}: state[{name!r}] is {np.asarray(leaf).tolist()}: {_CHANGED}")


def _is_changed(leaf: Any, is_scale: bool) -> Any:
    """Mask of the numbers that no layer makes: below 0, or a scale of 0, the gradient where there is no new value."""
    return (leaf <= 0) if is_scale else (leaf < 0)


# --- one step

_quotient = jax.jit(quotient_by_integers)  # one function of the lowered program, not a hundred lines for each scale


def encode_scale(recipe: DelayedScaling, state: State, tensor: str, maximum: float) -> jax.Array:
    """The encode scale of a tensor in this step: maximum * 2^-margin / amax of the history. [], or [E] of experts.

    The scale stays unchanged while the amax is zero or not finite. It is NaN, and so is what the layer computes, if the
    state has numbers that no layer makes, see `_CHANGED`; on CPUs the input's stop the program and say so.

    Arguments:
        tensor: "input", "kernel" or "output_grad".
        maximum: the largest element of its format.
    """
    history = _as_float32(state[f"{tensor}_amax_history"])
    stored = _as_float32(state[f"{tensor}_scale"])[..., 0]
    amax = history[..., 0] if recipe.amax_compute_algo == "most_recent" else history.max(axis=-1)
    numbers = jnp.concatenate([history, jnp.where(_is_changed(stored, True), -1.0, stored)[..., None]], axis=-1)
    intact = intact_state(numbers, says=tensor == "input")
    stored = jnp.where((stored > 0) & jnp.isfinite(stored), stored, 1.0)
    known = (amax > 0) & jnp.isfinite(amax)
    scale = _quotient(maximum * 2.0**-recipe.margin, jnp.where(known, amax, 1.0))
    return intact * jnp.clip(jnp.where(known, scale, _quotient(1.0, stored)), SMALLEST_SCALE, LARGEST_SCALE)


def updated(recipe: DelayedScaling, state: State, tensor: str, maximum: float, amaxes: jax.Array) -> State:
    """The new history and scale of a tensor whose slices had these amaxes; [..., E] of experts. A state that is not
    intact stays."""
    name = f"{tensor}_amax_history"
    amax = _largest(amaxes, state[name])
    history = jnp.roll(_as_float32(state[name]), -1, axis=-1).at[..., 0].set(amax)
    scale = _quotient(1.0, encode_scale(recipe, state, tensor, maximum))[..., None]
    changed = jnp.isnan(scale)
    new = {name: history, f"{tensor}_scale": scale}
    new = {k: jnp.where(changed, _as_float32(state[k]), v) for k, v in new.items()}
    return {k: jax.lax.convert_element_type(v, state[k].dtype) for k, v in new.items()}


def _as_float32(leaf: jax.Array) -> jax.Array:
    """An array of Flax's fp8_ops.fm32, float32 that autodiff adds by max, as float32."""
    return jax.lax.convert_element_type(leaf, jnp.float32)


def _largest(amaxes: jax.Array, history: jax.Array) -> jax.Array:
    """The largest amax of those that share a history: over batch axes, and mesh axes that do not split the history."""
    amax = amaxes.max(axis=tuple(range(amaxes.ndim - history.ndim + 1)), initial=0.0)
    varying, own = (varying_axes(v) for v in (amax, history))
    if any(axis not in varying_axes(jax.lax.axis_index(axis)) for axis in jax.sharding.get_abstract_mesh().manual_axes):
        raise ValueError(
            "DelayedScaling: within jax.shard_map(check_vma=False) JAX does not know which amaxes differ between "
            "shards, and may add them up; leave check_vma=True"
        )
    if axes := tuple(sorted(varying - own)):
        amax = largest_over(amax, axes)
    slot = _as_float32(history)[..., 0]
    return _largest_mapped(resharded(amax, sharding_of(slot)), slot)


@custom_vmap
def _largest_mapped(amax: jax.Array, slot: jax.Array) -> jax.Array:
    """The amax; if vmap maps over the tensor but not over its history, the largest, as autodiff would add them up."""
    del slot
    return amax


@_largest_mapped.def_vmap
def _(size: int, batched: Sequence[bool], amax: jax.Array, slot: jax.Array) -> tuple[jax.Array, bool]:
    mapped, own = batched
    if own:
        amax = amax if mapped else jnp.broadcast_to(amax, (size, *amax.shape))
        return _largest_mapped(amax, slot), True
    return _largest_mapped(amax.max(axis=0) if mapped else amax, slot), False


# --- layers used more than once


@jax.custom_vjp
def used_and_handed_on(state: State) -> tuple[State, State]:
    """The state twice: for one call and for the next. The new values that come back are combined by max.

    Apart from the product, whose gradients vmap adds up over what examples share: this one must stay one for all.
    """
    return state, state


def _combined(_: None, cotangents: tuple[State, State]) -> tuple[State]:
    return (jax.tree.map(_larger, *cotangents),)


def _larger(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.convert_element_type(jnp.maximum(_as_float32(a), _as_float32(b)), b.dtype)


used_and_handed_on.defvjp(lambda state: ((state, state), None), _combined)


def is_added_up(leaf: jax.Array) -> bool:
    """Whether autodiff may see this leaf of a state, so that it would add up the new values of several uses."""
    return isinstance(leaf, jax.core.Tracer) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def used_in_a_transformation(layer: str, counterparts: str) -> ValueError:
    """The error for a layer whose state cannot be handed on to its next use."""
    return ValueError(
        f"{layer}: its delayed-scaling state is used within a JAX transformation that does not hand it on, where "
        f"autodiff would add up amaxes: differentiate jaxlowprec.delayed_scaling.combined_by_max(loss), or, if the "
        f"transformation reaches the layer only once, use Flax's counterpart ({counterparts}, ...)"
    )


# --- trees that hold parameters and states


def is_state(path: tuple[Any, ...]) -> bool:
    """Whether a leaf with this key path is part of a delayed-scaling state."""
    return any(OVERWRITE_WITH_GRADIENT in (getattr(k, "key", None), getattr(k, "name", None)) for k in path)


def add_gradients(a: Any, b: Any) -> Any:
    """The sum of two gradient trees, for microbatches: new states are combined by max, everything else is added.

    >>> import jaxlowprec as jlp
    >>> key = jlp.delayed_scaling.OVERWRITE_WITH_GRADIENT
    >>> jlp.delayed_scaling.add_gradients({"w": 1.0, key: {"s": 2.0}}, {"w": 3.0, key: {"s": 1.5}})[key]["s"].item()
    2.0
    """
    structures: list[Any] = [jax.tree.structure(tree) for tree in (a, b)]
    if structures[0] != structures[1]:
        first, second = map(shown, structures)
        raise ValueError(f"add_gradients: trees {first} and {second} differ; needs gradients of one model")
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        where = jax.tree_util.keystr(path)
        leaves = [array("add_gradients", where, leaf) for leaf in (x, y)]
        shapes = [leaf.shape for leaf in leaves]
        if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves):
            raise TypeError(f"add_gradients: {where} is a key; needs numbers")
        if shapes[0] != shapes[1]:
            raise ValueError(f"add_gradients: {where} has shapes {shapes[0]} and {shapes[1]}; needs the same")
    return jax.tree_util.tree_map_with_path(lambda path, x, y: jnp.maximum(x, y) if is_state(path) else x + y, a, b)


def combined_by_max(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, the states in its first argument typed so that autodiff combines their new values by max.

    For `jax.grad` and `jax.value_and_grad`, within `jax.jit`, of what reaches a layer more than once; gradients keep
    their dtype. Flax's trick: a dtype that is added by max, which JAX knows only in traced functions.

    Arguments:
        function: of a tree of variables, and more.

    >>> import jax, jaxlowprec as jlp
    >>> loss = jlp.delayed_scaling.combined_by_max(lambda variables: variables["w"] ** 2)
    >>> jax.grad(loss)({"w": 3.0})["w"].item()
    6.0
    """
    if not callable(function):
        raise TypeError(f"combined_by_max: function={shown(function)}; needs a function of a tree of variables")
    from flax.linen.fp8_ops import fm32  # Flax's type; a gradient of it is added by max

    def typed(path: Any, leaf: Any) -> Any:
        return jax.lax.convert_element_type(leaf, fm32) if is_state(path) else leaf

    def call(variables: Any, *args: Any, **kwargs: Any) -> Any:
        return function(jax.tree_util.tree_map_with_path(typed, variables), *args, **kwargs)

    return call


def intact_state(numbers: jax.Array, says: bool) -> jax.Array:
    """float32 [..., n] -> float32 [...]: 1, or NaN where a number is below 0.

    Arguments:
        says: whether such a number is an error on platforms that can stop a program, which are CPUs.
    """
    return _op()(numbers)[0] if says else _by_nan(numbers)


def _by_nan(numbers: jax.Array) -> jax.Array:
    return jnp.where(jnp.any(numbers < 0, axis=-1), jnp.nan, jnp.float32(1))


@functools.cache
def _op() -> wiring.Op:
    def outputs(numbers: jax.Array) -> wiring.Shapes:
        return [(numbers.shape[:-1], jnp.float32)]

    def or_error(numbers: jax.Array) -> Sequence[jax.Array]:
        results = [jax.ShapeDtypeStruct(*result) for result in outputs(numbers)]
        return jax.ffi.ffi_call("jaxlowprec_intact_state", results)(numbers)

    return wiring.define(
        "jaxlowprec_intact_state",
        rule=wiring.ShardingRule("... n -> ...", whole=("n",)),
        outputs=outputs,
        reference=lambda numbers: [_by_nan(numbers)],
        native=or_error,
        platforms=[platform for platform in native.platforms() if platform == "cpu"],
    )
