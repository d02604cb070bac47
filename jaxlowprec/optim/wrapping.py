"""Parts that both wrappers share: checks of the wrapped transformation and of a state, and how they explain themselves.

`explain_state` and `convert_state` trace `init` of any transformation. A wrapper within it then answers with an
`Explained`, so what stands around the wrapper need not be known.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import cut, shown

VERSION = 1
"""The version of the states' bytes: it grows when codes, exponents or remainders change their meaning."""


class Note(NamedTuple):
    """The code of one leaf, and why it stays as it is, in words; and whether it is updated in one pass."""

    code: str
    why: str
    one_pass: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Conversion:
    """Opens a wrapper's state to that of the transformation within, and closes one. Both take parameters by their path.

    Attributes:
        opened: a state and parameters to the inner state and parameters; of master weights, float32 ones.
        closed: an inner state and parameters to a state and parameters; of master weights, bfloat16 ones.
    """

    opened: Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]
    closed: Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]


@jax.tree_util.register_pytree_with_keys_class
class Explained:
    """The state of a wrapper and what it says of it; only `explain_state` and `convert_state` see one.

    Arguments:
        state: the state.
        notes: on leaves of its two trees, by their path in the state.
        conversion: how it is opened and closed.
    """

    def __init__(self, state: Any, notes: tuple[tuple[str, Note], ...], conversion: Conversion):
        self.state, self.notes, self.conversion = state, notes, conversion

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], Any]:
        """The state and its key; the rest."""
        return ((jax.tree_util.GetAttrKey("state"), self.state),), (self.notes, self.conversion)

    @classmethod
    def tree_unflatten(cls, rest: Any, children: Any) -> Explained:
        """The inverse."""
        return cls(children[0], *rest)


_asked = contextvars.ContextVar("jaxlowprec.optim.explain_state", default=False)


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Within it, `init` of wrappers returns an `Explained`."""
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def explained(state: Any, notes: Callable[[], Iterator[tuple[str, Note]]], conversion: Callable[[], Conversion]) -> Any:
    """The state; within `explaining` with the notes and the conversion that the functions return."""
    return Explained(state, tuple(notes()), conversion()) if _asked.get() else state


def described(tx: Any, params: Any) -> Any:
    """The shapes of a transformation's state, in which an `Explained` stands for that of each wrapper."""
    with explaining():
        return jax.eval_shape(lambda params: tx.init(params), params)  # a function that no trace is cached of


def shapes_of(params: Any) -> Any:
    """The tree of shapes and dtypes: what a wrapper may keep of traced parameters."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p), jnp.result_type(p)), params)


def checked_shapes(who: str, name: str, tree: Any) -> Any:
    """`shapes_of` a tree. Raises TypeError if it has anything but arrays and shapes."""

    def shape_of(path: Any, leaf: Any) -> Any:
        with contextlib.suppress(TypeError, ValueError):  # JAX's, of dtypes that it does not have
            if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
                return shapes_of(leaf)
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        raise TypeError(f"{who}: {name} has {shown(leaf)} at {where!r}; needs arrays or their shapes")

    return jax.tree_util.tree_map_with_path(shape_of, tree)


def check_transformation(who: str, name: str, tx: Any) -> None:
    """Raises TypeError unless an argument of that name is a transformation."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"{who}: {name}={shown(tx)}; needs an optax.GradientTransformation such as optax.adamw(1e-3)")


def with_extra_arguments(who: str, inner: Any) -> Any:
    """The transformation that is wrapped, taking further arguments of `update`.

    Raises:
        TypeError: it is none.
    """
    check_transformation(who, "inner", inner)
    import optax  # a dependency of training programs, not of this library

    return optax.with_extra_args_support(inner)


def transformation(init: Any, update: Any) -> Any:
    """An `optax.GradientTransformationExtraArgs`."""
    import optax

    return optax.GradientTransformationExtraArgs(init, update)


def within(tree: str, path: str) -> str:
    """The path in a wrapper's state of a leaf at that path in one of its trees."""
    return f"{tree}/{path}" if path else tree


def version() -> jax.Array:
    """The leaf of a state that tells its version."""
    return jnp.asarray(VERSION, jnp.int32)


def is_readable(who: str, state: Any, kind: type) -> jax.Array:
    """Whether a state has the version of this library: bool [], for states that only the running program knows.

    Raises:
        TypeError: it is not of that kind.
        ValueError: it is known, and has another version.
    """
    if not isinstance(state, kind):
        raise TypeError(
            f"{who}: the state is a {type(state).__name__}; needs the {kind.__name__} that init(params) of this "
            "transformation returned"
        )
    given = getattr(state, "version", None)
    known = isinstance(given, int | np.ndarray | np.generic | jax.Array) and not isinstance(given, jax.core.Tracer)
    if known and getattr(given, "is_fully_addressable", True) and np.any(np.asarray(given) != VERSION):
        raise ValueError(
            f"{who}: the state has version {np.asarray(given).tolist()}; this jaxlowprec reads version {VERSION}: "
            "start from init(params), or use the version of jaxlowprec that made the state"
        )
    return jnp.asarray(given) == VERSION


def leaves_of(
    who: str,
    tree: Any,
    given: Any,
    fault: str = "the state was made for other parameters or by another transformation",
    remedy: str = "start from init(params)",
) -> list[Any]:
    """The leaves of a tree that has the structure of another one.

    Raises:
        ValueError: it has not; `fault` and `remedy` are words of the message.
    """
    try:
        return tree.flatten_up_to(given)
    except ValueError as error:
        found = in_a_line(error)
        raise ValueError(f"{who}: {fault} than {cut(str(tree), 300)} says ({found}): {remedy}") from None


def in_a_line(error: ValueError) -> str:
    """The message of an error of JAX, which may show whole arrays, in a line of readable length."""
    return cut(" ".join(str(error).split()), 300)


def check_leaf(who: str, path: str, given: Any, shape: tuple[int, ...] | None, dtype: Any) -> None:
    """Raises ValueError unless a stored leaf has that shape and dtype; None: there is none."""
    found = (getattr(given, "shape", None), None if given is None else str(getattr(given, "dtype", "")))
    needed = (shape, None if shape is None else str(jax.ShapeDtypeStruct((), dtype).dtype))  # keys have one, too
    if found != needed:
        words = ["nothing" if s is None else f"{d}{list(s)}" for s, d in (found, needed)]
        raise ValueError(
            f"{who}: the state has {words[0]} at {path!r}; these parameters and arguments need {words[1]}: use the "
            "arguments that the state was made with, or start from init(params)"
        )
