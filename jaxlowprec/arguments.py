"""Checks of plain arguments, of functions and of fields. Every message says who, what was given, what is needed."""

from __future__ import annotations

import math
import operator
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LARGEST = 10**40


class _Repr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print an int of thousands of digits."""
        return super().repr_int(x, level) if abs(x) < _LARGEST else f"an int of {x.bit_length()} bits"


_REPR = _Repr()
_REPR.maxtuple = _REPR.maxlist = 20
_REPR.maxstring, _REPR.maxother = 80, 120


def shown(value: Any) -> str:
    """A value as messages show it: in a line, however large it is."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and shape and dtype is not None:
        return f"{type(value).__name__} of {dtype}{list(shape)}"
    return " ".join(_REPR.repr(value).split())


def cut(text: str, length: int) -> str:
    """The beginning and the end of a text that is too long: names in files may have megabytes.

    >>> cut("a" * 40, 8)
    'aaaaaa ... 32 characters left out ... aa'
    """
    if len(text) <= length:
        return text
    end = length // 4
    return f"{text[: length - end]} ... {len(text) - length} characters left out ... {text[-end:]}"


def finite_number(value: Any) -> float | None:
    """A finite number as a float; None for any other value, a whole number beyond float64 included.

    >>> [finite_number(value) for value in (2, 0.5, 10**400, float("nan"), True, "1")]
    [2.0, 0.5, None, None, None, None]
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether a value is one of those, and of its kind: 1 is not True, and an array of 1 is not 1."""
    return any(value is a or _is(value, a) for a in allowed)


def _is(value: Any, wanted: Any) -> bool:
    kind = type(wanted)
    if kind is tuple:
        return isinstance(value, tuple) and len(value) == len(wanted) and all(map(_is, value, wanted))
    if type(value) is kind:
        return bool(value == wanted)
    if kind is int:
        try:
            return as_int(value) == wanted
        except TypeError:
            return False
    return kind is str and isinstance(value, str) and value == wanted


def one_of(who: str, name: str, value: Any, *allowed: Any) -> None:
    """Raises ValueError unless the value is one of those."""
    if not is_one_of(value, allowed):
        words = [f'"{a}"' if isinstance(a, str) else str(a) for a in allowed]
        raise ValueError(f"{who}: {name}={shown(value)}; needs {', '.join(words[:-1])} or {words[-1]}")


def a_flag(who: str, **flags: Any) -> None:
    """Raises TypeError unless all are True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{who}: {name}={shown(value)}; needs True or False")


def a_text(who: str, **texts: Any) -> None:
    """Raises TypeError unless all are strings."""
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{who}: {name}={shown(value)}; needs a string")


def whole_number(who: str, name: str, value: Any, least: int = -(2**31), most: int = 2**31 - 1) -> int:
    """The value as an int.

    Raises:
        TypeError: it is none.
        ValueError: it is out of range.
    """
    needs = "an int" if least < 0 else f"an int from {least} on"
    try:
        number = as_int(value)
    except TypeError:
        raise TypeError(f"{who}: {name}={shown(value)}; needs {needs}") from None
    if not least <= number <= most:
        raise ValueError(f"{who}: {name}={shown(number)}; needs {needs if number < least else f'at most {most}'}")
    return number


def as_int(value: Any) -> int:
    """An int from any spelling of one (NumPy's, an array of no dimensions); TypeError for anything else, and a bool."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool":
        raise TypeError
    return operator.index(value)


def as_array(x: Any) -> jax.Array:
    """`x` as a JAX array, a copy of NumPy arrays, which their owner may change.

    `jnp.asarray` compiles a program for each shape and dtype of NumPy arrays (JAX 0.10 to 0.12); but where a mesh is
    set, it places an array on all devices.
    """
    if isinstance(x, np.ndarray | np.generic | int | float) and jax.sharding.get_abstract_mesh().empty:
        return jax.device_put(x.copy() if isinstance(x, np.ndarray) else x)
    return jnp.asarray(x)


def array(who: str, name: str, x: Any) -> jax.Array:
    """`x` as an array of any dtype."""
    try:
        return as_array(x)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{who}: {name}={shown(x)}; needs an array") from None


def a_dtype(who: str, name: str, dtype: Any) -> jnp.dtype:
    """A dtype from any spelling of one."""
    try:
        if isinstance(dtype, jax.Array | np.ndarray | np.generic):
            raise TypeError  # an array has one, and is none
        return jnp.dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(f"{who}: {name}={shown(dtype)}; needs a dtype such as bfloat16") from None


FLOATS = ("bfloat16", "float16", "float32", "float64")
"""The dtypes that parameters in high precision have."""


def float_dtype_or_none(who: str, dtype: Any) -> jnp.dtype | None:
    """A dtype of `FLOATS` from any spelling of one; None: each leaf's own."""
    if dtype is None:
        return None
    if (found := a_dtype(who, "dtype", dtype)).name not in FLOATS:
        raise ValueError(f"{who}: dtype={found.name}; needs {', '.join(FLOATS)}, or None: each leaf's own")
    return found
