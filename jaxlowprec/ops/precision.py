"""`precision=` of products: JAX's argument, and what it means where the operands are quantised."""

from __future__ import annotations

from typing import Any

import jax

from jaxlowprec.arguments import shown

_ALGORITHMS = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)


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


def wants_float32_sums(precision: Any) -> bool:
    """Whether a checked precision asks for float32 sums where the operands are quantised (numerics.md 9).

    HIGH and HIGHEST do, for either operand. An algorithm is about operands in high precision and changes nothing here.
    Neither does `jax.default_matmul_precision`, which programs set to keep TF32 out of float32 products.
    """
    if precision is None or isinstance(precision, _ALGORITHMS):
        return False
    values = precision if isinstance(precision, tuple) else (precision,)
    return any(value in (jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST) for value in values)
