"""Quantised arrays among the arguments and results of programs that `jax.export` writes to a file."""

from __future__ import annotations

import json
from typing import Any

import jax.export
import jax.numpy as jnp

from jaxlowprec.arguments import shown
from jaxlowprec.arrays import formats, row_formats
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.arrays.quantized_array import QuantizedArray, changed_fields

_OF_ROWS = (row_formats.Float8Rows, row_formats.Int8Rows)
_CLASSES: dict[str, Any] = {cls.__name__: cls for cls in (*formats.Format.__subclasses__(), *_OF_ROWS, Hadamard)}


def register(cls: Any) -> Any:
    """Makes a pytree whose static fields are JSON's values one that `jax.export` can write. Returns it: a decorator."""
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"jaxlowprec.{cls.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda data: _tuples(json.loads(bytes(data))),
    )
    return cls


def _static_to_bytes(static: tuple[Any, ...]) -> bytes:
    """The static fields of a QuantizedArray as JSON. Fields that have their defaults are left out.

    >>> _static_to_bytes((formats.NVFP4(), (32, 64), jnp.dtype("bfloat16"), -1, None))
    b'[["NVFP4", {}], [32, 64], "bfloat16", -1, null]'
    """
    fmt, matrix_shape, dtype, axis, hadamard = static
    if any(jax.export.is_symbolic_dim(size) for size in matrix_shape):
        raise ValueError(
            f"QuantizedArray: shape {matrix_shape} is symbolic; a result or an argument of an exported program needs "
            "sizes that are known: quantise within the program"
        )
    sizes = [int(size) for size in matrix_shape]
    return json.dumps([_described(fmt), sizes, jnp.dtype(dtype).name, axis, _described(hadamard)]).encode()


def _static_from_bytes(data: bytes) -> tuple[Any, ...]:
    """The inverse. Raises ValueError for what a newer version wrote."""
    fmt, matrix_shape, dtype, axis, hadamard = json.loads(bytes(data))
    return _made(fmt), tuple(matrix_shape), jnp.dtype(dtype), axis, _made(hadamard)


def _described(value: Any) -> Any:
    return None if value is None else (type(value).__name__, changed_fields(value))


def _made(described: Any) -> Any:
    if described is None:
        return None
    name, fields = described
    try:
        return _CLASSES[name](**{field: _tuples(value) for field, value in fields.items()})
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"QuantizedArray: {shown(described)} is not of this version ({error}); load the exported program with the "
            "version of jaxlowprec that wrote it, or a newer one"
        ) from None


def _tuples(value: Any) -> Any:
    """Lists as tuples, within each other too."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


jax.export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="jaxlowprec.QuantizedArray",
    serialize_auxdata=_static_to_bytes,
    deserialize_auxdata=_static_from_bytes,
)
