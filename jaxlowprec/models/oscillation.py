"""OsciReset: weights whose codes flip back and forth while they hardly move are set to their quantised values."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import as_array, as_int, shown, whole_number
from jaxlowprec.layers.linear import kernel_matrices
from jaxlowprec.layers.weight_only import check_whole_blocks, quantize_weight
from jaxlowprec.models.kernels import chosen_weights, is_weight, is_whole, layer_name, listed
from jaxlowprec.ops.checks import axis_from_the_front
from jaxlowprec.recipes.fields import check_patterns, is_chosen
from jaxlowprec.recipes.qat import DEFAULT_EXCLUDE
from jaxlowprec.recipes.roles import Recipe, Role

_WHO = "OsciReset"
_LARGEST_TAU = 2.0**64  # keeps tau * D finite
_OUTSIDE, _BEGINS, _WATCHES, _ENDS = range(4)

_Axes = tuple[int, int] | tuple[tuple[int, ...], tuple[int, ...]]
"""Batch axes and contracted axes of a weight: how many there are in front, or which they are."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("previous", "moved", "moved_quantized"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class OscillationState:
    """The state of a window for each weight that is watched, by its layer's name: arrays of its shape.

    Attributes:
        previous: the weight after the previous step.
        moved: float32: how far it has moved in the window, |w_t - w_(t-1)| added up.
        moved_quantized: float32: how far the quantised weight has.
    """

    previous: dict[str, jax.Array]
    moved: dict[str, jax.Array]
    moved_quantized: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class OsciReset:
    """Resets oscillating weights: those whose quantised value moves much further than they themselves do.

    A weight near the boundary of two codes flips between them every few steps and never settles. Now and then a window
    of steps is watched, in which each weight moves by D in all and its quantised value by D_Q. At the window's end
    weights with D_Q >= tau * D and D > 0 become their quantised values: the centres of their codes.

        reset = jlp.OsciReset(recipe, start=6400)
        state = reset.init(params)
        for step in range(10_000):
            params, optimizer_state = train_step(params, optimizer_state, batch)
            params, state = reset.update(params, state, step)        # within jit, too: step may be a traced value

    The state has the size of three float32 copies of the watched weights. Made within a window, it watches the rest of
    it. So it need not be there between windows:

            if reset.watches(step):
                params, state = reset.update(params, state or reset.init(params), step)
            else:
                state = None

    Arguments:
        recipe: the recipe that is trained with. Its own weight quantiser counts: the format and blocks in which fprop
            reads the weight, with its tensor scale. Weights that are not quantised in fprop are not watched.
        every: a window begins at `start` and then every so many steps.
        window: how many steps it lasts; fewer than `every`.
        tau: D_Q / D from which on a weight oscillates.
        start: the step of the first window; the source starts at 64 % of a run.
        include, exclude: regular expressions, searched for in a layer's name: its weight's path in the tree, without a
            last "kernel", "w", "weight" or "embedding". Leave out what follows no recipe for other reasons than its
            name, such as Flax's own layers. By default embeddings, norms, routers and heads are left out
            (`DEFAULT_EXCLUDE`), as are biases and weights without two axes longer than 1.
        axes: says which axes of a weight are contracted, since its blocks lie along these: a dict, or pairs, from a
            regular expression that matches the whole name to the batch axes and the contracted axes. Either how many,
            if they come first in this order, as in `lora.init`: (0, 2) for [heads, head_dim, out]. Or which, in the
            order of the input's axes: ((), (1,)) for a matrix [out, in], as torch and Equinox have it, and ((0,), (2,))
            for a stack of these. Default: [..., in, out], as Flax has it.

    Raises:
        TypeError, ValueError: an argument is invalid, or the recipe has scales that depend on a layer's state.

    Source: TetraJet-v2, arXiv 2510.27527.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> reset = jlp.OsciReset(jlp.NVFP4BlockScaling(), every=4, window=2)
    >>> params = {"up": {"kernel": jnp.ones((16, 16)).at[0, 0].set(6.0), "bias": jnp.ones(16)}}
    >>> state = reset.init(params)
    >>> for step, value in enumerate((1.74, 1.76, 1.74)):  # between the codes 1.5 and 2
    ...     params["up"]["kernel"] = params["up"]["kernel"].at[0, 1].set(value)
    ...     params, state = reset.update(params, state, step)
    >>> float(params["up"]["kernel"][0, 1]), reset.watches(2), reset.watches(3)
    (1.5, True, False)
    """

    recipe: Recipe
    every: int = 200
    window: int = 50
    tau: float = 8.0
    start: int = 0
    include: tuple[str, ...] = (".*",)
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    axes: tuple[tuple[str, _Axes], ...] = ()

    def __post_init__(self):
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"{_WHO}: recipe={shown(self.recipe)}; needs a recipe such as NVFP4BlockScaling()")
        if self.recipe.delayed is not None:
            raise ValueError(
                f"{_WHO}: recipe={self.recipe}; needs a recipe whose scales are those of the weight itself, not of a "
                "layer's amax history, such as Float8CurrentScaling"
            )
        for field, least in (("every", 2), ("window", 1), ("start", 0)):
            object.__setattr__(self, field, whole_number(_WHO, field, getattr(self, field), least))
        if self.window >= self.every:
            raise ValueError(f"{_WHO}: window={self.window} and every={self.every}; needs a window shorter than that")
        if isinstance(self.tau, bool) or not isinstance(self.tau, int | float) or not 0 < self.tau <= _LARGEST_TAU:
            raise ValueError(f"{_WHO}: tau={shown(self.tau)}; needs a number above 0, up to {_LARGEST_TAU:g}")
        for field in ("include", "exclude"):
            object.__setattr__(self, field, check_patterns(_WHO, field, getattr(self, field)))
        object.__setattr__(self, "axes", _checked_axes(self.axes))

    def watches(self, step: int) -> bool:
        """Whether `update` does anything in this step, an int: from a window's begin to its end."""
        return self._part(whole_number(_WHO, "step", step, 0)) != _OUTSIDE

    def init(self, params: Any) -> OscillationState:
        """The state at the begin of a window, in new arrays placed as the weights are.

        Arguments:
            params: a tree of arrays: a dict, Linen's, an NNX state.

        Raises:
            ValueError: it has no weight that the recipe quantises in fprop, one does not fit `axes` or the format, or a
                pattern of `axes` matches none.
        """
        return _begun(self._weights(params))

    def update(self, params: Any, state: OscillationState, step: Any) -> tuple[Any, OscillationState]:
        """Watches, after an optimizer's step, how the weights moved; at a window's end resets those that oscillate.

        Outside of windows nothing is computed and nothing changes.

        Arguments:
            params: the tree as it is after the step.
            state: of `init`, or of the previous step.
            step: the number of the step, an int or a traced one.

        Raises:
            TypeError, ValueError: see `init`; or the state is not that of these parameters.
        """
        weights = self._weights(params)
        _check_state(weights, state)
        parts = {_BEGINS: self._began, _WATCHES: self._watched, _ENDS: self._ended}
        try:
            part = self._part(as_int(step))
        except TypeError:
            weights, state = _where(self._traced_part(step), list(parts.values()), (weights, state))
        else:
            weights, state = parts[part](weights, state) if part in parts else (weights, state)
        return _replaced(params, weights), state

    def _part(self, step: int) -> int:
        since = step - self.start
        at = since % self.every
        if since < 0 or at > self.window:
            return _OUTSIDE
        return _BEGINS if at == 0 else _ENDS if at == self.window else _WATCHES

    def _traced_part(self, step: Any) -> jax.Array:
        if not isinstance(step, jax.Array) or step.ndim or not jnp.issubdtype(step.dtype, jnp.integer):
            raise TypeError(f"{_WHO}: step={shown(step)}; needs an int, or a traced scalar of a dtype of ints")
        since = step - self.start
        at = since % self.every
        within = jnp.where(at == 0, _BEGINS, jnp.where(at == self.window, _ENDS, _WATCHES))
        return jnp.where((since < 0) | (at > self.window), _OUTSIDE, within)

    def _role(self, name: str) -> tuple[Role, str | None] | None:
        """How fprop reads the weight of a layer, and the dtype that it is rounded to before; None: unquantised."""
        recipe = self.recipe.at(name)
        if recipe is None or not is_chosen(name, self.include, self.exclude):
            return None
        roles = recipe.roles("linear", name)
        role = roles.forms("weight")[1]
        return None if role is None else (role, roles.served_dtype)

    def _weights(self, params: Any) -> dict[str, Any]:
        def chosen(name: str, leaf: Any) -> bool:
            return isinstance(leaf, jax.Array | np.ndarray) and self._role(name) is not None

        found = chosen_weights(_WHO, params, chosen, "the recipe's fprop, include and exclude")
        for pattern, _ in self.axes:
            if not any(re.fullmatch(pattern, name) for name in found):
                raise ValueError(f"{_WHO}: axes[{pattern!r}] matches none of the weights {listed(list(found))} whole")
        return {name: as_array(w) for name, w in found.items()}

    def _quantized(self, name: str, w: jax.Array) -> jax.Array:
        """The weight as fprop reads it, in its own dtype."""
        role, served_dtype = self._role(name) or (None, None)
        assert role is not None
        batch, contracted, features = self._axes(name, w.shape)
        order = (*batch, *contracted, *features)
        ordered = w.transpose(order)
        kernel = kernel_matrices(ordered, len(batch), len(contracted))
        check_whole_blocks(_WHO, name, kernel, role.format)
        quantized = quantize_weight(kernel, role.format, served_dtype).dequantize(w.dtype)
        return quantized.reshape(ordered.shape).transpose(np.argsort(order))

    def _axes(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The batch axes, the contracted axes and the others of a layer's weight."""
        given: Any = next((axes for pattern, axes in self.axes if re.fullmatch(pattern, name)), (len(shape) - 2, 1))
        first, second = given
        listed_axes = given if isinstance(first, tuple) else (range(first), range(first, first + second))
        batch, contracted = (
            tuple(axis_from_the_front(_WHO, axis, len(shape), f"the weight of {name!r}, {shape}") for axis in axes)
            for axes in listed_axes
        )
        features = tuple(axis for axis in range(len(shape)) if axis not in (*batch, *contracted))
        if not contracted or not features or len({*batch, *contracted}) < len((*batch, *contracted)):
            raise ValueError(
                f"{_WHO}: axes={given} for {name!r} of shape {shape}; needs contracted axes, other batch axes and at "
                "least one more"
            )
        return batch, contracted, features

    def _began(self, weights: dict[str, Any], state: OscillationState) -> tuple[dict[str, Any], OscillationState]:
        del state
        return weights, _begun(weights)

    def _watched(self, weights: dict[str, Any], state: OscillationState) -> tuple[dict[str, Any], OscillationState]:
        quantized = {name: self._quantized(name, w) for name, w in weights.items()}
        return weights, self._moved(weights, quantized, state)

    def _ended(self, weights: dict[str, Any], state: OscillationState) -> tuple[dict[str, Any], OscillationState]:
        quantized = {name: self._quantized(name, w) for name, w in weights.items()}
        state = self._moved(weights, quantized, state)

        def settled(name: str, w: jax.Array) -> jax.Array:
            moved, moved_quantized = state.moved[name], state.moved_quantized[name]
            oscillates = (moved_quantized >= jnp.float32(self.tau) * moved) & (moved > 0)
            return jnp.where(oscillates, quantized[name], w)

        return {name: settled(name, w) for name, w in weights.items()}, state

    def _moved(self, weights: Mapping[str, Any], quantized: Mapping[str, Any], state: OscillationState) -> Any:
        """The state with the step from the previous weights to these."""

        def added(sums: Mapping[str, Any], now: Mapping[str, Any], before: Any) -> dict[str, Any]:
            steps = {name: now[name].astype(jnp.float32) - before(name).astype(jnp.float32) for name in sums}
            return {name: total + jnp.abs(steps[name]) for name, total in sums.items()}

        moved = added(state.moved, weights, state.previous.__getitem__)
        of_codes = added(state.moved_quantized, quantized, lambda name: self._quantized(name, state.previous[name]))
        return OscillationState({name: jnp.array(w) for name, w in weights.items()}, moved, of_codes)


def _where(part: jax.Array, parts: list[Any], values: Any) -> Any:
    """Applies the part of that number, counted from 1, to the values; 0 returns the values themselves.

    A loop of no or one turn leaves buffers that are donated to it in place, where XLA's conditional copies them.
    """

    def turn(carry: Any) -> Any:
        part, values = carry
        return jnp.zeros_like(part), jax.lax.switch(part - 1, parts, *values)

    return jax.lax.while_loop(lambda carry: carry[0] > 0, turn, (part, values))[1]


def _begun(weights: Mapping[str, Any]) -> OscillationState:
    """Nothing has moved yet. The weights are copied: a step that is given them may reuse their buffers."""

    def zeros() -> dict[str, jax.Array]:
        return {name: jnp.zeros_like(w, jnp.float32) for name, w in weights.items()}

    return OscillationState({name: jnp.array(w) for name, w in weights.items()}, zeros(), zeros())


def _check_state(weights: Mapping[str, Any], state: Any) -> None:
    if not isinstance(state, OscillationState):
        raise TypeError(f"{_WHO}: state={shown(state)}; needs what init makes")
    shapes = {name: w.shape for name, w in weights.items()}
    found = {name: w.shape for name, w in state.previous.items()}
    if shapes != found:
        other = next(name for name in (shapes | found) if shapes.get(name) != found.get(name))
        raise ValueError(
            f"{_WHO}: the weight of layer {other!r} has shape {shapes.get(other)}, in the state {found.get(other)}; "
            "needs the state that init makes of these parameters"
        )


def _replaced(params: Any, weights: Mapping[str, Any]) -> Any:
    """The tree with these weights."""
    left = dict(weights)

    def one(path: Any, leaf: Any) -> Any:
        return left.pop(layer_name(path), leaf) if is_weight(leaf) else leaf

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_whole)


def _checked_axes(given: Any) -> tuple[tuple[str, _Axes], ...]:
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, tuple | list) or not all(isinstance(p, tuple | list) and len(p) == 2 for p in pairs):
        raise TypeError(f'{_WHO}: axes={shown(given)}; needs pairs such as ((".*/out", (0, 2)),)')
    check_patterns(_WHO, "axes", [pattern for pattern, _ in pairs])
    return tuple((pattern, _checked_numbers(pattern, numbers)) for pattern, numbers in pairs)


def _checked_numbers(pattern: str, given: Any) -> _Axes:
    """How many axes are batch axes and contracted, or which."""
    if isinstance(given, tuple | list) and len(given) == 2:
        if all(type(n) is int and n >= 0 for n in given):
            return given[0], given[1]
        if all(isinstance(n, tuple | list) and all(type(axis) is int for axis in n) for n in given):
            return tuple(given[0]), tuple(given[1])
    raise TypeError(
        f"{_WHO}: axes[{pattern!r}]={shown(given)}; needs two whole numbers, such as (0, 1), or two tuples of axes, "
        "such as ((), (1,))"
    )
