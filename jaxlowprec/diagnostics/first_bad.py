"""The first layer and tensor of a step that is wrong: not finite, or far from what a reference computes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from jaxlowprec.arguments import shown
from jaxlowprec.diagnostics.traces import Difference, compare, tracer

_WHERE = {
    "input": "before this layer, outside of the layers",
    "weight": "in the weight itself",
    "result": "in the layer's forward product",
    "loss": "behind the last layer, outside of the layers",
    "gradient of the result": "behind this layer in the backward pass, outside of the layers",
    "gradient of the input": "in the layer's product for the gradient of its input (dgrad)",
    "gradient of the weight": "in the layer's product for the gradient of its weight (wgrad)",
}


@dataclasses.dataclass(frozen=True)
class Bad:
    """The first bad tensor of a step. All that was computed before it is within the bound.

    Of layers that are called several times, as in a loop, the calls add up. There a bad weight comes first, then the
    tensor that is bad in most calls, since what is infinite or NaN stays so: a guess, and its text says so.

    Attributes:
        difference: which tensor of which layer, and how bad it is.
        bound: what was allowed.
        step: of `first_bad_step`; otherwise None.
    """

    difference: Difference
    bound: float
    step: int | None = None

    @property
    def layer(self) -> str:
        """The layer's name; "" for the loss."""
        return self.difference.layer

    @property
    def tensor(self) -> str:
        """See `Difference`."""
        return self.difference.tensor

    def __str__(self) -> str:
        """The fault, its place and its first step, in words."""
        found = self.difference
        what = f"{found.tensor} of {found.layer}" if found.layer else found.tensor
        if found.nonfinite:
            also = (
                "the reference has as many"
                if found.nonfinite == found.expected_nonfinite
                else (f"the reference has {found.expected_nonfinite}")
            )
            problem = f"{found.nonfinite} elements are infinite or NaN ({also})"
        else:
            problem = f"the relative error is {found.error:.2g}, beyond {self.bound:g}"
        step = "" if self.step is None else f"step {self.step}: "
        text = f"{step}{what}: {problem}; it enters {_WHERE[found.tensor]}"
        if found.calls <= 1 or found.tensor == "weight" or found.nonfinite_calls == found.calls:
            return text
        bad = f"{found.nonfinite_calls} of them bad" if found.nonfinite else "which add up"
        return (
            f"{text}, or at another layer of the same loop: the layer is called {found.calls} times, {bad}; "
            "telemetry.stacked in the loop's body tells the calls apart"
        )


def first_bad(
    fn: Callable[..., Any],
    *args: Any,
    reference: Callable[..., Any] | None = None,
    bound: float = 0.7,
    **kwargs: Any,
) -> Bad | None:
    """The first tensor of a step that is not finite, or differs from a reference by more than a bound; None if none.

    The step is computed twice: as it is, and by the reference. Their layers are compared in the order in which they
    compute: inputs, weights and results forward, then gradients backward. So what is found is where an error enters.

    Arguments:
        fn: a function that returns a loss, alone or before other results, such as the one that is trained by; see
            `trace` for what counts as a layer.
        args, kwargs: its arguments: the parameters and the batch of a step, of a checkpoint for example.
        reference: another function of the same arguments with layers of the same names. Default: fn itself in high
            precision, without its recipes.
        bound: of the relative error. In 4 bits errors of 0.1 to 0.3 are normal, and gradients of the first layers of a
            deep model have more. 0.7: half of the energy is error.

    Raises:
        TypeError, ValueError: see `trace` and `compare`; or bound is not a positive number.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> def loss(params, x):
    ...     hidden = jlp.linear(x, params["up"], name="up")
    ...     return jlp.linear(jnp.log(hidden), params["down"], name="down").mean()
    >>> params = {"up": -jnp.ones((32, 64)), "down": jnp.ones((64, 32))}
    >>> with jlp.autocast(jlp.MXFP8BlockScaling()):
    ...     bad = jlp.debug.first_bad(loss, params, jnp.ones((32, 32)))
    >>> bad.layer, bad.tensor
    ('down', 'input')
    """
    return _comparison(fn, reference, bound)(None, args, kwargs)


def first_bad_step(
    fn: Callable[..., Any],
    steps: Iterable[tuple[int, tuple[Any, ...]]],
    reference: Callable[..., Any] | None = None,
    *,
    bound: float = 0.7,
) -> Bad | None:
    """The first bad tensor of the first bad one of several steps.

    Arguments:
        steps: numbers of steps and fn's arguments in them, such as those of saved checkpoints, in order. They are
            taken one by one, until one is bad.
        fn, reference, bound: see `first_bad`.
    """
    compared = _comparison(fn, reference, bound)
    return next((bad for step, args in steps if (bad := compared(step, args, {})) is not None), None)


def _comparison(fn: Callable[..., Any], reference: Callable[..., Any] | None, bound: float) -> Callable[..., Any]:
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not bound > 0:
        raise ValueError(f"debug.first_bad: bound={shown(bound)}; needs a positive number, such as 0.7")
    actual = tracer(fn)
    expected = tracer(fn, high_precision=True) if reference is None else tracer(reference)

    def compared(step: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bad | None:
        differences = compare(actual(*args, **kwargs), expected(*args, **kwargs))
        first = _first(differences, bound)
        return None if first is None else Bad(first, float(bound), step)

    return compared


def _first(differences: list[Difference], bound: float) -> Difference | None:
    """The first one that is bad; of those in one loop, see `Bad`."""

    def bad(d: Difference) -> bool:
        return bool(d.nonfinite) or not d.error <= bound

    after = list(itertools.dropwhile(lambda d: not bad(d), differences))
    if not after or after[0].calls <= 1:
        return after[0] if after else None
    loop = [d for d in itertools.takewhile(lambda d: d.calls == after[0].calls, after) if bad(d)]
    return next((d for d in loop if d.tensor == "weight"), max(loop, key=lambda d: d.nonfinite_calls))
