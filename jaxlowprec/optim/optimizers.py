"""`adamw`: AdamW whose every operation is defined (numerics.md 19), in one pass over each array.

optax's AdamW is float32 arithmetic that XLA may contract in one program and not in another. This one calls an operation
for each parameter, which takes moments and weights as `quantized_state` and `master_weights` keep them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import finite_number, shown
from jaxlowprec.ops.adamw_update import adamw_update
from jaxlowprec.ops.rounding import rounded
from jaxlowprec.optim import wrapping
from jaxlowprec.optim.leafwise import HeldMoment, HeldWeight, Leafwise, no_signs
from jaxlowprec.optim.rules import path_of

_WHO = "adamw"
_U32 = jnp.uint32


def adamw(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 1e-4,
    mask: Any = None,
) -> Any:
    """AdamW whose bits are defined, and which updates each array in one pass.

    Arguments, defaults and the state's structure are those of `optax.adamw`, so each goes on from a state of the other.
    Moments are float32. Within `quantized_state`, `master_weights` or both, the operation reads and writes codes and
    remainders, and no float32 array stands between; so put nothing between them. `apply_gradients` also writes the new
    parameter in that pass. Between other transformations the bytes are the same.

    Arguments:
        learning_rate: a number, an array [], or a schedule, a function of the step count.
        b1, b2: the decays of the moments, from 0 to below 1.
        eps: what is added to the root of the second moment.
        weight_decay: a number or an array []; the learning rate multiplies it, too.
        mask: a tree of True and False, or a function of the gradients that returns one: which parameters decay.

    Returns:
        An `optax.GradientTransformationExtraArgs`. It updates float32 and bfloat16 parameters of any shape.

    Raises:
        TypeError: an argument is none of these, or a parameter is of another dtype.
        ValueError: a number is out of range; no parameters were given to `update`; or the state was made for others.

    Source: numerics.md 19; Loshchilov and Hutter, arXiv 1711.05101.

    >>> import jax.numpy as jnp, optax, jaxlowprec as jlp
    >>> tx = jlp.optim.adamw(0.5, weight_decay=0.0)
    >>> params = jnp.array([1.0, 2.0])
    >>> updates, state = tx.update(jnp.array([3.0, -3.0]), tx.init(params), params)
    >>> updates.round(4).tolist(), type(state[0]).__name__
    ([-0.5, 0.5], 'ScaleByAdamState')
    """
    schedule = learning_rate if callable(learning_rate) else None
    numbers = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    if schedule is None:
        numbers["learning_rate"] = learning_rate
    for name, value in numbers.items():
        _check_number(name, value)
    import optax  # a dependency of training programs, not of this library

    plain = optax.adamw(learning_rate, b1, b2, eps, mu_dtype=jnp.float32, weight_decay=weight_decay, mask=mask)

    def init(params: Any) -> Any:
        for path, p in jax.tree_util.tree_leaves_with_path(params):
            if (found := str(getattr(p, "dtype", type(p).__name__))) not in ("float32", "bfloat16"):
                raise TypeError(
                    f"{_WHO}: the parameter {path_of(path)!r} is {found}; needs float32 or bfloat16 arrays: leave it "
                    "to another transformation with optax.multi_transform"
                )
        adam, *others = plain.init(params)
        nu = jax.tree.map(lambda v: v if v.dtype == jnp.float32 else jnp.zeros_like(v, jnp.float32), adam.nu)
        return (adam._replace(nu=nu), *others)

    def one_pass(gradients: Any, state: Any, params: Any, result: str, readable: Any) -> tuple[Any, Any]:
        adam, decay_state, rate_state = _checked(state, params, schedule is not None)
        tree: Any
        paths, tree = jax.tree_util.tree_flatten_with_path(params)
        each = [wrapping.leaves_of(_WHO, tree, gradients, "the gradients are of")]
        each += [wrapping.leaves_of(_WHO, tree, moments) for moments in (adam.mu, adam.nu)]
        count = _next(adam.count)
        rate = learning_rate if schedule is None else schedule(rate_state.count)
        decays = _decays(mask, gradients)
        scalars = {
            decayed: jnp.where(readable, _scalars(count, rate, b1, b2, eps, weight_decay if decayed else 0.0), jnp.nan)
            for decayed in sorted(set(decays))
        }
        updated = [
            _update_leaf(path_of(path), g, p, m, v, scalars[decayed], result)
            for (path, p), g, m, v, decayed in zip(paths, *each, decays, strict=True)
        ]
        out, mu, nu = (tree.unflatten([leaf[i] for leaf in updated]) for i in range(3))
        if schedule is not None:
            rate_state = rate_state._replace(count=_next(rate_state.count))
        return out, (adam._replace(count=count, mu=mu, nu=nu), decay_state, rate_state)

    def signs(state: Any) -> Any:
        adam, *others = no_signs(state)
        mu, nu = (jax.tree.map(lambda _, s=s: s, t) for s, t in (("signed", adam.mu), ("unsigned", adam.nu)))
        return (adam._replace(mu=mu, nu=nu), *others)

    return wrapping.transformation(init, Leafwise(one_pass, signs))


def _update_leaf(path: str, g: Any, p: Any, mu: Any, nu: Any, scalars: Any, result: Any) -> tuple[Any, Any, Any]:
    """The new parameter or the update, and the new moments, in the forms that were given."""
    for name, given in (("0/mu", mu), ("0/nu", nu)):
        if not isinstance(given, HeldMoment):
            wrapping.check_leaf(_WHO, wrapping.within(name, path), given, p.shape, jnp.float32)
    if getattr(g, "shape", None) != p.shape:
        raise ValueError(f"{_WHO}: the gradient of {path!r} is {shown(g)}; the parameter has the shape {p.shape}")
    weight = p if isinstance(p, HeldWeight) else HeldWeight(p, None, None, None)
    m, v = (x if isinstance(x, HeldMoment) else HeldMoment(x, None, None) for x in (mu, nu))
    words = [m.words if v.words is None else v.words, weight.words]  # those of both moments are the same
    new = adamw_update(
        g,
        weight.parameter,
        weight.rest,
        m.coded,
        v.coded,
        scalars,
        None if all(w is None for w in words) else jnp.stack([jnp.zeros(2, _U32) if w is None else w for w in words]),
        codes=(m.rounding, v.rounding),
        bits=weight.bits,
        result=result,
    )
    return (
        dataclasses.replace(p, parameter=new.parameter, rest=new.rest) if p is weight else new.parameter,
        dataclasses.replace(m, coded=new.mu) if m is mu else new.mu,
        dataclasses.replace(v, coded=new.nu) if v is nu else new.nu,
    )


def _scalars(count: Any, rate: Any, b1: Any, b2: Any, eps: Any, weight_decay: Any) -> jax.Array:
    """float32 [9]: b1, c1, b2, c2, k1, k2, eps, weight_decay, -rate, for the step of that count."""
    rest = lambda b: np.float32(1 - b) if isinstance(b, int | float) else 1 - jnp.asarray(b, jnp.float32)  # noqa: E731
    given = (b1, rest(b1), b2, rest(b2), eps, weight_decay, rate)
    return _with_corrections(count, jnp.stack([jnp.asarray(x, jnp.float32) for x in given]))


@jax.jit
def _with_corrections(count: jax.Array, given: jax.Array) -> jax.Array:
    """float32 [9] of the seven that are given: k = 1 - b^count is added, its power by squares (numerics.md 19)."""
    factor = given[0:4:2]
    power = jnp.ones_like(factor)
    for bit in range(31):
        power = jnp.where((count >> bit) & 1 == 1, power * factor, power)
        factor = factor * factor
    return jnp.concatenate([given[:4], 1 - rounded(power), given[4:6], -given[6:]])


def _next(count: jax.Array) -> jax.Array:
    """The count of the next step; the largest one stays."""
    return jnp.where(count < jnp.iinfo(count.dtype).max, count + 1, count)


def _decays(mask: Any, gradients: Any) -> list[bool]:
    """Whether each parameter decays."""
    if mask is None:
        return [True] * len(jax.tree.leaves(gradients))
    chosen = mask(gradients) if callable(mask) else mask
    spread = jax.tree.map(lambda decays, part: jax.tree.map(lambda _: bool(decays), part), chosen, gradients)
    return jax.tree.leaves(spread)


def _checked(state: Any, params: Any, has_schedule: bool) -> tuple[Any, Any, Any]:
    """The parts of a state: of Adam, of the weight decay, of the learning rate."""
    import optax

    if params is None:
        raise ValueError(f"{_WHO}: update was called without params; needs update(gradients, state, params)")
    if not (isinstance(state, tuple) and len(state) == 3 and isinstance(state[0], optax.ScaleByAdamState)):
        raise TypeError(
            f"{_WHO}: the state is a {type(state).__name__}; needs that which init(params) of this transformation, or "
            "of optax.adamw, returned"
        )
    if has_schedule and not isinstance(state[2], optax.ScaleByScheduleState):
        raise ValueError(
            f"{_WHO}: the state has no step count of a schedule; it was made with a number as learning_rate: start "
            "from init(params), or pass a number"
        )
    return state


def _check_number(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless it is a number in range, or an array [] of any value."""
    least, below = {"b1": (0.0, 1.0), "b2": (0.0, 1.0), "eps": (0.0, None)}.get(name, (None, None))
    number = finite_number(value)
    if number is None and isinstance(value, jax.Array | np.ndarray | np.generic) and value.shape == ():
        return
    needs = "a number" + ("" if least is None else f" from {least:g}" + (f" to below {below:g}" if below else " on"))
    needs += ", an array [], or a function of the step" if name == "learning_rate" else " or an array []"
    if number is None and not isinstance(value, float):
        raise TypeError(f"{_WHO}: {name}={shown(value)}; needs {needs}")
    if number is None or (least is not None and number < least) or (below is not None and number >= below):
        raise ValueError(f"{_WHO}: {name}={shown(value)}; needs {needs}")
