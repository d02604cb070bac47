"""Traces of the tensors that each layer of a function computed, and the differences of two traces: of two recipes,
programs or platforms."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import as_array, shown
from jaxlowprec.telemetry.scopes import entered
from jaxlowprec.telemetry.taps import COUNTS, LENGTH, TENSORS, Taps, sketch

_LOSS = ""  # the layer of the function's own result


@dataclasses.dataclass(frozen=True)
class Trace:
    """Sketches of the tensors that a function's layers computed, in the order of the calls.

    Attributes:
        layers: by name, float32 [3, 2, 1027]: of input, weight and result, and of their gradients, how many elements
            are infinite or NaN, in how many calls, of how many, and a sketch of the others (`telemetry.taps`).
        loss: the same of the function's first result, float32 [1027].
    """

    layers: Mapping[str, np.ndarray]
    loss: np.ndarray

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for `load`, on this machine or another one: 25 KB per layer."""
        names = np.array(list(self.layers), dtype=np.str_)
        values = np.stack([*self.layers.values()]) if self.layers else np.zeros((0, len(TENSORS), 2, self.loss.size))
        with pathlib.Path(path).open("wb") as file:
            np.savez(file, names=names, values=values.astype(np.float32), loss=self.loss)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """A trace that was saved.

        Raises:
            ValueError: the file is none.
        """
        try:
            with np.load(path) as file:
                found = cls(dict(zip(file["names"].tolist(), file["values"], strict=True)), file["loss"])
            if any(values.shape[-1:] != (LENGTH,) for values in (found.loss, *found.layers.values())):
                raise ValueError("an earlier version wrote it")
            return found
        except (ValueError, KeyError, EOFError) as error:
            raise ValueError(f"debug.Trace: {path} is no trace ({error}); needs a file that Trace.save wrote") from None


@dataclasses.dataclass(frozen=True)
class Difference:
    """How one tensor of a layer differs between two traces.

    Attributes:
        layer: its name; "" for the function's own result.
        tensor: "input", "weight", "result", with "gradient of the" before it for gradients; "loss".
        error: the norm of the difference over the reference's norm, to some 4 % of itself; infinite where the
            reference is zero.
        nonfinite, expected_nonfinite: how many elements are infinite or NaN, here and in the reference.
        calls: how often the layer was called, as in a loop or under `jax.vmap`. The numbers above are of all calls.
        nonfinite_calls: in how many of these elements are infinite or NaN.
    """

    layer: str
    tensor: str
    error: float
    nonfinite: int
    expected_nonfinite: int
    calls: int = 1
    nonfinite_calls: int = 0


def trace(fn: Callable[..., Any], *args: Any, high_precision: bool = False, **kwargs: Any) -> Trace:
    """Runs a function, and its gradient if its first result is a scalar, and returns what its layers computed.

    Layers are those of this library: of Flax, `linear`, `dot_general`, `einsum`, `grouped_matmul` and
    `quantize_matmuls`. They need names. Calls of a layer of the same name add up, but for those within
    `telemetry.stacked`.

    Arguments:
        fn: a function that `jax.jit` can compile.
        high_precision: computes without the layers' recipes. A weight that is quantised already stays so.
        args, kwargs: the function's.

    Raises:
        TypeError: fn is not a function.
        ValueError: it has no layers.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> def loss(w, x):
    ...     return jnp.square(jlp.linear(x, w, recipe=jlp.NVFP4BlockScaling(), name="up")).mean()
    >>> x, w = jax.random.normal(jax.random.key(0), (32, 64)), jnp.eye(64)
    >>> found = jlp.debug.trace(loss, w, x)
    >>> differences = jlp.debug.compare(found, jlp.debug.trace(loss, w, x, high_precision=True))
    >>> {d.tensor: d.error < 0.2 for d in differences if d.tensor in ("input", "result")}
    {'input': True, 'result': True}
    """
    return tracer(fn, high_precision)(*args, **kwargs)


def tracer(fn: Callable[..., Any], high_precision: bool = False) -> Callable[..., Trace]:
    """A function that traces fn, compiled once for all arguments of the same shapes."""
    if not callable(fn):
        raise TypeError(f"debug.trace: fn={shown(fn)}; needs a function")
    orders: dict[frozenset[str], list[tuple[str, int | None]]] = {}

    @jax.jit
    def run(*args: Any, **kwargs: Any) -> tuple[Any, jax.Array]:
        search = Taps(None, high_precision)
        with entered(search):
            jax.eval_shape(lambda: (fn(*args, **kwargs), None)[1])
        if not search.shapes:
            raise ValueError(
                "debug.trace: the function calls no layer of this library; transform it with quantize_matmuls, or use "
                "linear, dot_general, einsum or this library's Flax layers"
            )
        orders[frozenset(search.shapes)] = search.order()
        state = {name: jnp.zeros(shape, jnp.float32) for name, shape in search.shapes.items()}

        def watched(state: Any) -> Any:
            with entered(Taps(state, high_precision)):
                return fn(*args, **kwargs)

        result, backward = jax.vjp(watched, state)
        first, *others = (as_array(leaf) for leaf in jax.tree.leaves(result))
        one = [_cotangent(first, 1.0 if first.ndim == 0 else 0.0), *(_cotangent(leaf, 0.0) for leaf in others)]
        (found,) = backward(jax.tree.unflatten(jax.tree.structure(result), one))
        return found, sketch(first)

    def call(*args: Any, **kwargs: Any) -> Trace:
        found, loss = jax.device_get(run(*args, **kwargs))
        order = orders[frozenset(found)]
        return Trace({n if i is None else f"{n}[{i}]": found[n] if i is None else found[n][i] for n, i in order}, loss)

    return call


def _cotangent(leaf: jax.Array, value: float) -> Any:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return np.zeros(leaf.shape, jax.dtypes.float0)
    return jnp.full(leaf.shape, value, leaf.dtype)


def compare(found: Trace, reference: Trace) -> list[Difference]:
    """How the tensors of two traces differ, in the order in which they were computed: forward, then backward.

    Raises:
        TypeError: an argument is no trace.
        ValueError: the traces are of different layers.
    """
    for name, trace in (("found", found), ("reference", reference)):
        if not isinstance(trace, Trace):
            raise TypeError(f"debug.compare: {name}={shown(trace)}; needs what a function of debug.trace returns")
    if found.layers.keys() != reference.layers.keys():
        only = sorted(found.layers.keys() ^ reference.layers.keys())
        raise ValueError(
            f"debug.compare: {', '.join(only[:8])} in one of the traces only; needs traces of the same layers"
        )
    names = list(found.layers)
    differences = [
        _difference(name, tensor, found.layers[name][i, 0], reference.layers[name][i, 0])
        for name in names
        for i, tensor in enumerate(TENSORS)
    ]
    differences.append(_difference(_LOSS, "loss", found.loss, reference.loss))
    backward = [(len(TENSORS) - 1, "result"), (0, "input"), (1, "weight")]
    differences += [
        _difference(name, f"gradient of the {tensor}", found.layers[name][i, 1], reference.layers[name][i, 1])
        for name in reversed(names)
        for i, tensor in backward
    ]
    return differences


def _difference(layer: str, tensor: str, found: np.ndarray, reference: np.ndarray) -> Difference:
    ours, theirs = (np.float64(seen[COUNTS:]) for seen in (found, reference))
    norm, off = np.linalg.norm(theirs), np.linalg.norm(ours - theirs)
    error = float(off / norm) if norm else (math.inf if off else 0.0)
    nonfinite, nonfinite_calls, calls = map(int, found[:COUNTS])
    return Difference(layer, tensor, error, nonfinite, int(reference[0]), calls, nonfinite_calls)
