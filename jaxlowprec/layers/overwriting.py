"""How states of delayed scaling take their new values, in an optimizer or without one.

A new value rotates the histories of the old one. So it is known whether another transformation has changed it on its
way, by clipping, scaling or averaging, and whether it is one at all: a layer that gives none has a gradient of zeros.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import shown
from jaxlowprec.layers.delayed_scaling import is_state

_NEW, _KEPT = 1, 2  # no zeros: these are what other transformations make of updates that they drop
_CHANGED = -1.0  # no layer makes it: a layer with such a state says what has happened
_TOLERANCE = 2.0**-7  # for means over devices, and for gradients that travel as bfloat16
_HISTORY, _SCALE = "_amax_history", "_scale"


@jax.tree_util.register_pytree_node_class
class Overwrite:
    """An update that replaces what `optax.apply_updates` adds it to.

    A sum could not: the difference of two float32 numbers, added back, is not the second number.

    Arguments:
        value: the new value.
        kind: whether it is new, int8 [..., 1] of the numbers above; None: it is.
    """

    __array_ufunc__ = None  # makes numpy leave `array + Overwrite` to __radd__

    def __init__(self, value: Any, kind: Any = None):
        self.value, self.kind = value, kind

    def __radd__(self, old: Any) -> Any:
        if self.kind is None:
            return self.value
        value = jnp.where(self.kind == _KEPT, old, self.value)
        return jnp.where((self.kind == _NEW) | (self.kind == _KEPT), value, _CHANGED)

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        """The new value, and its kind."""
        return (self.value, self.kind), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, Any]) -> Overwrite:
        """The inverse."""
        return cls(*children)


def overwrite_with_gradient(inner: Any) -> Any:
    """An optax transformation for parameters and delayed-scaling states in one tree.

    Parameters go through `inner`. States take their gradient as their new value, and clipping, weight decay and moments
    do not see them. The state of a layer that gave no new value, because it did not run or its result got no gradient,
    stays as it is.

    Make it the outermost transformation, and apply its updates with `optax.apply_updates`, as Flax does. Within another
    one, such as `optax.chain` after clipping or `optax.MultiSteps`, it gets gradients that are no states any more, or
    its updates are changed. Where that shows, since histories do not follow from the earlier ones, the state becomes
    negative, and the layer's next call fails on CPUs and gives NaN elsewhere.

    Arguments:
        inner: an `optax.GradientTransformation`.

    >>> import jax.numpy as jnp, optax, jaxlowprec as jlp
    >>> key = jlp.delayed_scaling.OVERWRITE_WITH_GRADIENT
    >>> params = {"w": jnp.ones(2), key: {"scale": jnp.ones(1)}}
    >>> transformation = jlp.delayed_scaling.overwrite_with_gradient(optax.sgd(0.5))
    >>> gradients = {"w": jnp.ones(2), key: {"scale": jnp.full(1, 8.0)}}
    >>> updates, _ = transformation.update(gradients, transformation.init(params), params)
    >>> new = optax.apply_updates(params, updates)
    >>> new["w"][0].item(), new[key]["scale"][0].item()
    (0.5, 8.0)
    """
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(f"overwrite_with_gradient: inner={shown(inner)}; needs an optax.GradientTransformation")
    import optax  # a dependency of training programs, not of this library

    def parameters(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: not is_state(path), tree)

    masked = optax.masked(inner, parameters)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        overwrites = _overwrites(gradients, params)
        updates, state = masked.update(gradients, state, params, **extra)
        wrapped = jax.tree_util.tree_map_with_path(
            lambda path, u: overwrites(path, u) if is_state(path) else u, updates
        )
        return wrapped, state

    return optax.GradientTransformationExtraArgs(masked.init, update)


def keep_unused(gradients: Any, params: Any) -> Any:
    """The gradients, with the states in `params` of those layers that gave no new value.

    For what overwrites states without `overwrite_with_gradient`, such as Flax's `TrainState`:

        state = state.apply_gradients(grads=keep_unused(gradients, state.params))

    Arguments:
        gradients: of `params`; of microbatches after `add_gradients` of all.
        params: parameters and states in one tree.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> key = jlp.delayed_scaling.OVERWRITE_WITH_GRADIENT
    >>> state = jlp.delayed_scaling.init_state(jlp.DelayedScaling(amax_history_len=2))
    >>> unused = {name: jnp.zeros_like(value) for name, value in state.items()}
    >>> kept = jlp.delayed_scaling.keep_unused({"w": 1.0, key: unused}, {"w": 2.0, key: state})
    >>> kept["w"], kept[key]["input_scale"].item()
    (1.0, 1.0)
    """
    structures: list[Any] = [jax.tree.structure(tree) for tree in (gradients, params)]
    if structures[0] != structures[1]:
        first, second = map(shown, structures)
        raise ValueError(f"keep_unused: gradients {first} and params {second} differ; needs gradients of these params")
    overwrites = _overwrites(gradients, params)

    def one(path: Any, gradient: Any, old: Any) -> Any:
        return old + overwrites(path, gradient) if is_state(path) else gradient

    return jax.tree_util.tree_map_with_path(one, gradients, params)


def _overwrites(gradients: Any, params: Any) -> Any:
    """A function of a state's path and gradient that gives its Overwrite. `params`: may be None."""
    new, old = _tensors(gradients), {} if params is None else _tensors(params)
    kinds = {place: _kind(parts, old.get(place)) for place, parts in new.items() if parts.keys() == {_HISTORY, _SCALE}}

    def overwrite(path: Any, gradient: Any) -> Overwrite:
        place, _ = _place(path)
        return Overwrite(gradient, kinds.get(place))

    return overwrite


def _tensors(tree: Any) -> dict[Any, dict[str, Any]]:
    """The histories and scales in a tree, by the tensors that they are of."""
    found: dict[Any, dict[str, Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        place, part = _place(path)
        if place is not None and is_state(path):
            found.setdefault(place, {})[part] = jnp.asarray(leaf)
    return found


def _place(path: Any) -> tuple[Any, str]:
    """The path of a tensor's history and scale, and which of them a leaf is; (None, "") for other leaves."""
    names = [str(getattr(k, "key", getattr(k, "name", k))) for k in path]
    for i in reversed(range(len(names))):
        for part in (_HISTORY, _SCALE):
            if names[i].endswith(part):
                return (*names[:i], names[i].removesuffix(part), *names[i + 1 :]), part
    return None, ""


def _kind(new: dict[str, jax.Array], old: dict[str, jax.Array] | None) -> jax.Array:
    """int8 [..., 1]: whether the gradient of a tensor's history and scale is their new value; see `Overwrite`."""
    history, scale = new[_HISTORY], new[_SCALE]
    kind = jnp.where(scale == 0, _KEPT, _NEW)
    if old is not None:
        rotated = jnp.roll(old[_HISTORY], -1, axis=-1)
        follows = _alike(history[..., 1:], rotated[..., 1:]) | _alike(history, old[_HISTORY])
        # Without an amax in its history a tensor keeps its scale.
        unknown = ~jnp.any(old[_HISTORY] != 0, axis=-1, keepdims=True) & (old[_SCALE] > 0)
        follows &= ~unknown | _alike(scale, old[_SCALE])
        kind = jnp.where((kind == _NEW) & ~follows, 0, kind)
    return kind.astype(jnp.int8)


def _alike(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.isclose(a, b, rtol=_TOLERANCE, atol=0.0, equal_nan=True).all(axis=-1, keepdims=True)
