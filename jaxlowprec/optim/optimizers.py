"""`adamw` and `lion`, whose every operation is defined (numerics.md 19), in one pass over each array.

optax's are float32 arithmetic that XLA may contract in one program and not in another. These call an operation for each
parameter, which takes moments and weights as `quantized_state` and `master_weights` keep them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import finite_number, shown
from jaxlowprec.ops.optimizer_update import Rule, optimizer_update
from jaxlowprec.ops.rounding import rounded
from jaxlowprec.optim import wrapping
from jaxlowprec.optim.leafwise import HeldMoment, HeldWeight, Leafwise, no_signs
from jaxlowprec.optim.rules import path_of

_U32 = jnp.uint32
_DTYPES = ("float32", "bfloat16")


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
    _check_numbers("adamw", learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    import optax  # a dependency of training programs, not of this library

    plain = optax.adamw(learning_rate, b1, b2, eps, mu_dtype=jnp.float32, weight_decay=weight_decay, mask=mask)
    scalars = functools.partial(_scalars_of_adamw, b1=b1, b2=b2, eps=eps)
    moments = {"mu": "signed", "nu": "unsigned"}
    return _Optimizer("adamw", plain, moments, learning_rate, weight_decay, mask, scalars).transformation()


def lion(learning_rate: Any, b1: Any = 0.9, b2: Any = 0.99, weight_decay: Any = 1e-3, mask: Any = None) -> Any:
    """Lion whose bits are defined, and which updates each array in one pass.

    Arguments, defaults and the state's structure are those of `optax.lion`, so each goes on from a state of the other.
    It has one moment, float32, or signed codes within `quantized_state`. All that is said of `adamw` holds of it.

    Arguments:
        learning_rate: a number, an array [], or a schedule, a function of the step count. It is the size of a step.
        b1: how much of the step's direction is the moment, from 0 to below 1; the rest is the gradient.
        b2: the decay of the moment, from 0 to below 1.
        weight_decay: a number or an array []; the learning rate multiplies it, too.
        mask: a tree of True and False, or a function of the gradients that returns one: which parameters decay.

    Returns:
        An `optax.GradientTransformationExtraArgs`. It updates float32 and bfloat16 parameters of any shape.

    Raises:
        TypeError: an argument is none of these, or a parameter is of another dtype.
        ValueError: a number is out of range; no parameters were given to `update`; or the state was made for others.

    Source: numerics.md 19; Chen et al., arXiv 2302.06675.

    >>> import jax.numpy as jnp, optax, jaxlowprec as jlp
    >>> tx = jlp.optim.lion(0.5, weight_decay=0.0)
    >>> params = jnp.array([1.0, 2.0])
    >>> updates, state = tx.update(jnp.array([3.0, -0.1]), tx.init(params), params)
    >>> updates.tolist(), type(state[0]).__name__
    ([-0.5, 0.5], 'ScaleByLionState')
    """
    _check_numbers("lion", learning_rate, b1=b1, b2=b2, weight_decay=weight_decay)
    import optax

    plain = optax.lion(learning_rate, b1, b2, mu_dtype=jnp.float32, weight_decay=weight_decay, mask=mask)
    scalars = functools.partial(_scalars_of_lion, b1=b1, b2=b2)
    return _Optimizer("lion", plain, {"mu": "signed"}, learning_rate, weight_decay, mask, scalars).transformation()


@dataclasses.dataclass(frozen=True)
class _Optimizer:
    """An optimizer whose state is that of optax's: of the moments, the weight decay and the learning rate.

    Attributes:
        rule: of the operation; the name of the optimizer.
        plain: optax's transformation.
        moments: the signs of the moments, by the names of the first state's fields, in the operation's order.
        learning_rate, weight_decay, mask: as optax takes them.
        scalars: a function of the step's number from 1, the learning rate and the decay of a parameter.
    """

    rule: Rule
    plain: Any
    moments: Mapping[str, str]
    learning_rate: Any
    weight_decay: Any
    mask: Any
    scalars: Callable[[Any, Any, Any], jax.Array]

    def transformation(self) -> Any:
        return wrapping.transformation(self.init, Leafwise(self.one_pass, self.signs))

    def init(self, params: Any) -> Any:
        for path, p in jax.tree_util.tree_leaves_with_path(params):
            if (found := str(getattr(p, "dtype", type(p).__name__))) not in _DTYPES:
                raise TypeError(
                    f"{self.rule}: the parameter {path_of(path)!r} is {found}; needs float32 or bfloat16 arrays: leave "
                    "it to another transformation with optax.multi_transform"
                )
        _decays(self.rule, self.mask, params)
        first, *others = self.plain.init(params)
        return (self._mapped(first, lambda _, x: x.astype(jnp.float32)), *others)

    def signs(self, state: Any) -> Any:
        first, *others = no_signs(state)
        return (self._mapped(first, lambda name, _: self.moments[name]), *others)

    def one_pass(self, gradients: Any, state: Any, params: Any, result: str, readable: Any) -> tuple[Any, Any]:
        first, decay_state, rate_state = self._checked(state, params)
        tree: Any
        paths, tree = jax.tree_util.tree_flatten_with_path(params)
        words = "the gradients are of other parameters", "needs one for each parameter"
        given = wrapping.leaves_of(self.rule, tree, gradients, *words)
        moments = [wrapping.leaves_of(self.rule, tree, getattr(first, name)) for name in self.moments]
        count = _next(first.count)
        rate = self.learning_rate(rate_state.count) if callable(self.learning_rate) else self.learning_rate
        decays = _decays(self.rule, self.mask, gradients)
        scalars = {
            decayed: jnp.where(readable, self.scalars(count, rate, self.weight_decay if decayed else 0.0), jnp.nan)
            for decayed in sorted(set(decays))
        }
        updated = [
            self._update_leaf(path_of(path), g, p, old, scalars[decayed], result)
            for (path, p), g, decayed, *old in zip(paths, given, decays, *moments, strict=True)
        ]
        out, *new = (tree.unflatten([leaf[i] for leaf in updated]) for i in range(1 + len(moments)))
        if callable(self.learning_rate):
            rate_state = rate_state._replace(count=_next(rate_state.count))
        return out, (first._replace(count=count, **dict(zip(self.moments, new, strict=True))), decay_state, rate_state)

    def _mapped(self, first: Any, function: Callable[[str, Any], Any]) -> Any:
        """The first state, with what a function of its name returns in place of each moment's leaf."""
        fields = {name: jax.tree.map(lambda x, n=name: function(n, x), getattr(first, name)) for name in self.moments}
        return first._replace(**fields)

    def _update_leaf(self, path: str, g: Any, p: Any, old: list[Any], scalars: Any, result: Any) -> tuple[Any, ...]:
        """The new parameter or the update, and the new moments, in the forms that were given."""
        for name, given in zip(self.moments, old, strict=True):
            if not isinstance(given, HeldMoment):
                wrapping.check_leaf(self.rule, wrapping.within(f"0/{name}", path), given, p.shape, jnp.float32)
        if getattr(g, "shape", None) != p.shape:
            raise ValueError(
                f"{self.rule}: the gradient of {path!r} is {shown(g)}; the parameter has the shape {p.shape}"
            )
        if str(g.dtype) not in _DTYPES:
            raise TypeError(f"{self.rule}: the gradient of {path!r} is {g.dtype}; needs float32 or bfloat16")
        weight = p if isinstance(p, HeldWeight) else HeldWeight(p, None, None, None)
        m, v = [*(x if isinstance(x, HeldMoment) else HeldMoment(x, None, None) for x in old), _NO_MOMENT][:2]
        words = [m.words if v.words is None else v.words, weight.words]  # those of both moments are the same
        drawn = [jnp.zeros(2, _U32) if w is None else w for w in words]
        new = optimizer_update(
            g,
            weight.parameter,
            weight.rest,
            m.coded,
            v.coded,
            scalars,
            None if all(w is None for w in words) else jnp.stack(drawn),
            rule=self.rule,
            codes=(m.rounding, v.rounding),
            bits=weight.bits,
            result=result,
        )
        after: tuple[Any, ...] = (new.mu, new.nu)
        return (
            dataclasses.replace(p, parameter=new.parameter, rest=new.rest) if p is weight else new.parameter,
            *(
                dataclasses.replace(x, coded=made) if isinstance(x, HeldMoment) else made
                for x, made in zip(old, after, strict=False)
            ),
        )

    def _checked(self, state: Any, params: Any) -> tuple[Any, Any, Any]:
        """The parts of a state."""
        import optax

        if params is None:
            raise ValueError(f"{self.rule}: update was called without params; needs update(gradients, state, params)")
        kind = {"adamw": optax.ScaleByAdamState, "lion": optax.ScaleByLionState}[self.rule]
        if not (isinstance(state, tuple) and len(state) == 3 and isinstance(state[0], kind)):
            raise TypeError(
                f"{self.rule}: the state is a {type(state).__name__}; needs that which init(params) of this "
                f"transformation, or of optax.{self.rule}, returned"
            )
        if callable(self.learning_rate) and not isinstance(state[2], optax.ScaleByScheduleState):
            raise ValueError(
                f"{self.rule}: the state has no step count of a schedule; it was made with a number as learning_rate: "
                "start from init(params), or pass a number"
            )
        return state


_NO_MOMENT = HeldMoment(cast(Any, None), None, None)


def _scalars_of_adamw(count: Any, rate: Any, weight_decay: Any, b1: Any, b2: Any, eps: Any) -> jax.Array:
    """float32 [9]: b1, c1, b2, c2, k1, k2, eps, weight_decay, -rate, for the step of that count."""
    return _with_corrections(count, _stack(b1, _rest(b1), b2, _rest(b2), eps, weight_decay, _minus(rate)))


def _scalars_of_lion(count: Any, rate: Any, weight_decay: Any, b1: Any, b2: Any) -> jax.Array:
    """float32 [6]: b1, c1, b2, c2, weight_decay, -rate."""
    return _stack(b1, _rest(b1), b2, _rest(b2), weight_decay, _minus(rate))


def _rest(b: Any) -> Any:
    """1 - b: a number's in float64, rounded once."""
    return np.float32(1 - b) if isinstance(b, int | float) else 1 - jnp.asarray(b, jnp.float32)


def _minus(rate: Any) -> jax.Array:
    return -jnp.asarray(rate, jnp.float32)


def _stack(*numbers: Any) -> jax.Array:
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in numbers])


@jax.jit
def _with_corrections(count: jax.Array, given: jax.Array) -> jax.Array:
    """float32 [9] of the seven that are given: k = 1 - b^count is added, its power by squares (numerics.md 19)."""
    factor = given[0:4:2]
    power = jnp.ones_like(factor)
    for bit in range(31):
        power = jnp.where((count >> bit) & 1 == 1, power * factor, power)
        factor = factor * factor
    return jnp.concatenate([given[:4], 1 - rounded(power), given[4:]])


def _next(count: jax.Array) -> jax.Array:
    """The count of the next step; the largest one stays."""
    return jnp.where(count < jnp.iinfo(count.dtype).max, count + 1, count)


def _decays(who: str, mask: Any, gradients: Any) -> list[bool]:
    """Whether each parameter decays."""
    if mask is None:
        return [True] * len(jax.tree.leaves(gradients))
    chosen = mask(gradients) if callable(mask) else mask
    try:
        spread = jax.tree.map(lambda decays, part: jax.tree.map(lambda _: bool(decays), part), chosen, gradients)
    except (TypeError, ValueError):
        raise ValueError(f"{who}: mask={shown(chosen)}; needs a tree of True and False like that of params") from None
    return jax.tree.leaves(spread)


def _check_numbers(who: str, learning_rate: Any, **numbers: Any) -> None:
    """Checks the arguments of an optimizer that are numbers or arrays []; the learning rate may be a function."""
    for name, value in numbers.items():
        _check_number(who, name, value)
    if not callable(learning_rate):
        _check_number(who, "learning_rate", learning_rate)


def _check_number(who: str, name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless it is a number in range, or an array [] of any value."""
    least, below = {"b1": (0.0, 1.0), "b2": (0.0, 1.0), "eps": (0.0, None)}.get(name, (None, None))
    number = finite_number(value)
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic) and value.shape == ()
    if number is None and is_array and jnp.issubdtype(value.dtype, jnp.number):
        return
    needs = "a number" + ("" if least is None else f" from {least:g}" + (f" to below {below:g}" if below else " on"))
    needs += ", an array [], or a function of the step" if name == "learning_rate" else " or an array []"
    if number is None and not isinstance(value, float):
        raise TypeError(f"{who}: {name}={shown(value)}; needs {needs}")
    if number is None or (least is not None and number < least) or (below is not None and number >= below):
        raise ValueError(f"{who}: {name}={shown(value)}; needs {needs}")
