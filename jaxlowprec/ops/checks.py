"""Arguments that ops share, checked: every message says who, what was given and what is needed.

`implementation=` chooses what computes an op, `precision=` is JAX's argument of products, and `no_derivative` stops
autodiff where it would compute a wrong derivative.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlowprec.arguments import a_dtype, array, as_int, one_of, shown
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.wiring import Elsewhere, native, varying_axes

Implementation = Literal["ffi", "portable", "reference"] | None

FLOATS = (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32"))
Axes = tuple[int, ...]
_ALGORITHMS = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)


def check_implementation(who: str, implementation: Any) -> None:
    """Raises ValueError unless it is None, "ffi", "portable" or "reference"."""
    one_of(who, "implementation", implementation, None, "ffi", "portable", "reference")


def check_whole(who: str, x: jax.Array) -> None:
    """Raises ValueError if x is a shard, within `jax.shard_map`: places in the whole array are not known there."""
    if axes := varying_axes(x):
        raise ValueError(
            f"{who}: an array of shape {x.shape} differs along the mesh axes {sorted(axes)} of a shard_map; stochastic "
            "rounding draws by places in the whole array: update outside of jax.shard_map"
        )


class Platforms(TypedDict, total=False):
    """The arguments of `wiring.define` that say where an op is native."""

    platforms: tuple[str, ...]
    elsewhere: Elsewhere
    by_reference: tuple[str, ...]
    missing: Mapping[str, str]


def default_implementation() -> Implementation:
    """The implementation that None stands for: $JAXLOWPREC_IMPLEMENTATION, or None. Each op asks once."""
    value: Any = os.environ.get("JAXLOWPREC_IMPLEMENTATION") or None
    one_of("$JAXLOWPREC_IMPLEMENTATION", "value", value, None, "ffi", "portable", "reference")
    return value


def choose(who: str, implementation: Implementation) -> Platforms:
    """The arguments of `wiring.define` for an implementation.

    None is the native kernel where there is one, else the portable lowering, and on CPUs the reference, whose bytes are
    the kernels'. "ffi" demands the kernel; "portable" and "reference" are pure JAX.
    """
    check_implementation(who, implementation)
    if implementation is None:
        implementation = default_implementation()
    platforms = native.platforms()
    if implementation is None:
        return {"platforms": platforms, "elsewhere": "portable", "by_reference": ("cpu",)}
    if implementation != "ffi":
        return {"platforms": (), "elsewhere": implementation}
    if not platforms:
        raise NotImplementedError(f'{who}: implementation="ffi": {native.library().reason}')
    return {"platforms": platforms, "elsewhere": "refused", "missing": native.library().missing}


def without_kernels(chosen: Platforms, what: str, *platforms: str) -> Platforms:
    """`choose`'s arguments for an op that has no kernel of `what` on these platforms."""
    own: Platforms = {"platforms": tuple(p for p in chosen["platforms"] if p not in platforms)}
    if "missing" in chosen:
        reason = f"{what}: there is no kernel yet; leave implementation= out"
        own["missing"] = {**chosen["missing"], **dict.fromkeys(platforms, reason)}
    return {**chosen, **own}


def float_array(who: str, name: str, x: Any) -> jax.Array:
    """`x` as an array of one of the three float types the kernels take."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        x = array(who, name, x)
    not_quantized(who, name, x)
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{who}: {name} has dtype {x.dtype}; needs bfloat16, float16 or float32: cast it with .astype(...) first"
        )
    return array(who, name, x)


def not_quantized(who: str, name: str, x: Any) -> None:
    """Raises TypeError for a QuantizedArray, which has a shape and a dtype but is not a JAX array."""
    if isinstance(x, QuantizedArray):
        raise TypeError(f"{who}: {name} is quantised, {x!r}; needs an array: pass its .dequantize()")


def layer_inputs(who: str, inputs: Any) -> jax.Array:
    """The inputs of a layer as an array that has features."""
    inputs = array(who, "inputs", inputs)
    if inputs.ndim < 1:
        raise ValueError(f"{who}: inputs is a scalar; needs [..., features]")
    return inputs


def float_dtype(who: str, name: str, dtype: Any) -> jnp.dtype:
    """The dtype of a result, one of the three float types."""
    dtype = a_dtype(who, name, dtype)
    if dtype not in FLOATS:
        raise TypeError(f"{who}: {name}={dtype.name}; needs bfloat16, float16 or float32")
    return dtype


def wider_dtype(a: Any, b: Any) -> jnp.dtype:
    """The dtype that the operands of a product are promoted to, also under the caller's strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def axis_from_the_front(who: str, axis: Any, ndim: int, of: str = "") -> int:
    """An axis counted from the front, 0 or more; `of` describes the array in the message."""
    try:
        number = as_int(axis)
    except TypeError:
        raise TypeError(f"{who}: axis={shown(axis)}; needs an int") from None
    if not -ndim <= number < ndim:
        raise ValueError(f"{who}: axis={axis} is out of range for {of or f'an array of {ndim} dimensions'}")
    return number % ndim


def mesh_axes(who: str, axis_name: Any) -> None:
    """Raises unless these are axes of a mesh that the caller is mapped over."""
    try:
        jax.lax.axis_size(axis_name), hash(axis_name)
    except (NameError, TypeError, ValueError):
        raise ValueError(
            f"{who}: axis_name={shown(axis_name)}; needs an axis of the mesh, or a tuple of them, within jax.shard_map"
        ) from None


def a_sharding(who: str, name: str, sharding: Any) -> None:
    """Raises TypeError unless it is a sharding or None."""
    if sharding is not None and not isinstance(sharding, NamedSharding | PartitionSpec):
        raise TypeError(f"{who}: {name}={shown(sharding)}; needs a NamedSharding, a PartitionSpec or None")


def last_axis(who: str, axis: Any, ndim: int) -> int:
    """-1 or -2, for the last or second last axis however it is counted."""
    normal = axis_from_the_front(who, axis, ndim) - ndim
    if normal < -2:
        raise ValueError(
            f"{who}: axis={axis} of {ndim} dimensions is a batch axis; needs the last or second last: "
            "move it there with jnp.moveaxis"
        )
    return normal


def _listed(values: Any) -> Any:
    if not isinstance(values, tuple | list | range | np.ndarray):
        raise TypeError
    return values


def dimension_numbers(who: str, given: Any, *ndims: int | None) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
    """Checked `dimension_numbers` of `jax.lax.dot_general`, for operands of `ndims` dimensions (None: unknown).

    Raises TypeError where JAX does: an axis counts from the front, exists, and is named once.
    """
    try:
        contract, batch = (
            tuple(tuple(map(as_int, _listed(axes))) for axes in _listed(pair)) for pair in _listed(given)
        )
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = contract, batch
    except (TypeError, ValueError):
        raise TypeError(
            f"{who}: dimension_numbers={shown(given)}; needs ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)), "
            "sequences of ints"
        ) from None
    for name, contracted, mapped, ndim in zip(("lhs", "rhs"), contract, batch, ndims, strict=True):
        axes = (*contracted, *mapped)
        if len(set(axes)) != len(axes) or any(a < 0 or (ndim is not None and a >= ndim) for a in axes):
            raise TypeError(
                f"{who}: dimension_numbers contract {list(contracted)} of {name} and batch {list(mapped)}; needs "
                f"different axes, counted from 0 on{'' if ndim is None else f' and below {ndim}'}"
            )
    if len(lhs_contract) != len(rhs_contract) or len(lhs_batch) != len(rhs_batch):
        raise TypeError(
            f"{who}: dimension_numbers={given!r}; needs as many contracted axes of lhs as of rhs, and batch axes too"
        )
    return (lhs_contract, rhs_contract), (lhs_batch, rhs_batch)


def checked_precision(who: str, precision: Any) -> Any:
    """The `precision=` of `jax.lax.dot` in hashable form: None, a Precision, a pair of them, or an algorithm.

    Raises:
        ValueError: anything else.
    """
    if precision is None or isinstance(precision, _ALGORITHMS):
        return precision
    if isinstance(precision, str) and precision in jax.lax.DotAlgorithmPreset.__members__:
        return jax.lax.DotAlgorithmPreset[precision]
    pair = isinstance(precision, list | tuple)
    values = tuple(precision) if pair else (precision,)
    try:
        if (pair and len(values) != 2) or not all(isinstance(v, str | jax.lax.Precision) for v in values):
            raise ValueError
        found = tuple(jax.lax.Precision(value) for value in values)
    except ValueError:
        raise ValueError(
            f'{who}: precision={shown(precision)}; needs None, a jax.lax.Precision or its name such as "highest", a '
            "pair of these, or a jax.lax.DotAlgorithmPreset"
        ) from None
    return found if pair else found[0]


def wants_float32_sums(precision: jax.lax.PrecisionLike) -> bool:
    """Whether a checked precision asks for float32 sums where the operands are quantised (numerics.md 9).

    HIGH and HIGHEST do, for either operand. An algorithm is about operands in high precision and changes nothing here.
    Neither does `jax.default_matmul_precision`, which programs set to keep TF32 out of float32 products.
    """
    if precision is None or isinstance(precision, _ALGORITHMS):
        return False
    values = precision if isinstance(precision, tuple) else (precision,)
    return any(value in (jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST) for value in values)


def no_derivative(message: str) -> Callable[[Any], Any]:
    """A function that returns its argument, any tree of arrays; its derivative raises NotImplementedError(message)."""

    @jax.custom_jvp
    def identity(arrays: Any) -> Any:
        return arrays

    @identity.defjvp
    def _derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        raise NotImplementedError(message)

    return identity
