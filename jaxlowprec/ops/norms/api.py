"""Norms with defined bits, whose backward pass keeps their input and one or two numbers of each row."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arguments import a_flag, shown
from jaxlowprec.ops.amax import NO_AMAXES
from jaxlowprec.ops.checks import Implementation, check_implementation, float_array, no_derivative
from jaxlowprec.ops.norms.op import NormSpec, norm_gradient_op, norm_op
from jaxlowprec.ops.norms.reference import weights
from jaxlowprec.ops.rounding import widened
from jaxlowprec.wiring.sharding_rule import resharded, sharding_of


class NormOptions(TypedDict, total=False):
    """Options of `rms_norm` and `layer_norm`."""

    epsilon: float
    zero_centered_gamma: bool
    implementation: Implementation


@overload
def rms_norm(
    x: Float[Array, "*B C"], gamma: Float[Array, "C"], residual: None = None, **options: Unpack[NormOptions]
) -> Float[Array, "*B C"]: ...


@overload
def rms_norm(
    x: Float[Array, "*B C"], gamma: Float[Array, "C"], residual: Float[Array, "*B C"], **options: Unpack[NormOptions]
) -> tuple[Float[Array, "*B C"], Float[Array, "*B C"]]: ...


def rms_norm(
    x: Float[Array, "*B C"],
    gamma: Float[Array, "C"],
    residual: Float[Array, "*B C"] | None = None,
    *,
    epsilon: float = 1e-6,
    zero_centered_gamma: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "*B C"] | tuple[Float[Array, "*B C"], Float[Array, "*B C"]]:
    """`x / sqrt(mean(x^2) + epsilon) * gamma` of each row.

    Computed in float32 and rounded once to x's dtype. The sum of a row has a fixed order, so that the result does not
    depend on the mesh. The backward pass keeps x and one float32 number of each row.

    Arguments:
        x: bfloat16, float16 or float32.
        gamma: any of those dtypes; its gradient has its dtype.
        residual: of x's shape and dtype: added to x before, in float32, and the sum is rounded to x's dtype.
        epsilon: not negative.
        zero_centered_gamma: rows are multiplied by 1 + gamma.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.

    Returns:
        [..., C] in x's dtype; with `residual` a pair: the normed sum, and the sum, for the next residual.

    Raises:
        TypeError: an operand is no float array, or the residual has another dtype than x.
        ValueError: shapes do not fit, or epsilon is no number of that range.
        NotImplementedError: a second derivative; `implementation="ffi"` where there is no kernel.

    Source: numerics.md 12; arXiv 1910.07467.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.rms_norm(jnp.array([[3.0, 4.0, 0.0, 0.0]]), jnp.ones(4))
    Array([[1.1999999, 1.5999999, 0.       , 0.       ]], dtype=float32)
    """
    return _norm("rms", (x, residual, gamma, None), epsilon, zero_centered_gamma, implementation)


@overload
def layer_norm(
    x: Float[Array, "*B C"],
    gamma: Float[Array, "C"],
    beta: Float[Array, "C"] | None = None,
    residual: None = None,
    **options: Unpack[NormOptions],
) -> Float[Array, "*B C"]: ...


@overload
def layer_norm(
    x: Float[Array, "*B C"],
    gamma: Float[Array, "C"],
    beta: Float[Array, "C"] | None,
    residual: Float[Array, "*B C"],
    **options: Unpack[NormOptions],
) -> tuple[Float[Array, "*B C"], Float[Array, "*B C"]]: ...


@overload
def layer_norm(
    x: Float[Array, "*B C"],
    gamma: Float[Array, "C"],
    beta: Float[Array, "C"] | None = None,
    *,
    residual: Float[Array, "*B C"],
    **options: Unpack[NormOptions],
) -> tuple[Float[Array, "*B C"], Float[Array, "*B C"]]: ...


def layer_norm(
    x: Float[Array, "*B C"],
    gamma: Float[Array, "C"],
    beta: Float[Array, "C"] | None = None,
    residual: Float[Array, "*B C"] | None = None,
    *,
    epsilon: float = 1e-6,
    zero_centered_gamma: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "*B C"] | tuple[Float[Array, "*B C"], Float[Array, "*B C"]]:
    """`(x - mean(x)) / sqrt(var(x) + epsilon) * gamma + beta` of each row.

    Computed in float32 and rounded once to x's dtype; the variance is that of the centred row. The sums of a row have a
    fixed order, so that the result does not depend on the mesh. The backward pass keeps x and two float32 numbers of
    each row.

    Arguments:
        x, gamma, residual, epsilon, zero_centered_gamma, implementation: see `rms_norm`.
        beta: as gamma; None: nothing is added.

    Returns:
        As `rms_norm`.

    Raises:
        TypeError, ValueError, NotImplementedError: see `rms_norm`.

    Source: numerics.md 12; arXiv 1607.06450.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.layer_norm(jnp.array([[3.0, 4.0, 0.0, 1.0]]), jnp.ones(4), jnp.ones(4))
    Array([[ 1.6324553 ,  2.2649107 , -0.26491082,  0.3675446 ]], dtype=float32)
    """
    return _norm("layer", (x, residual, gamma, beta), epsilon, zero_centered_gamma, implementation)


class Norm(NamedTuple):
    """A norm whose operands are checked.

    Attributes:
        spec: without amaxes.
        x, residual: [..., C], of one dtype; residual may be None.
        weight, beta: float32 [C], see `reference.weights`; beta may be None.
    """

    spec: NormSpec
    x: jax.Array
    residual: jax.Array | None
    weight: jax.Array
    beta: jax.Array | None

    def alone(self) -> tuple[jax.Array, jax.Array | None]:
        """The normed rows, and the sum of x and the residual, or None."""
        rows = jnp.atleast_2d(self.x), None if self.residual is None else jnp.atleast_2d(self.residual)
        aligned = wiring.align_varying(*rows, self.weight, self.beta)
        y, *total = _normed(self.spec, tuple(map(sharding_of, aligned)), *aligned)
        return y.reshape(self.x.shape), total[0].reshape(self.x.shape) if total else None

    def result(self) -> jax.Array | tuple[jax.Array, jax.Array]:
        """The result of `rms_norm` and `layer_norm`: the normed rows; with a residual a pair of them and the sum."""
        y, total = self.alone()
        return y if total is None else (y, total)


def _norm(
    kind: Any, operands: tuple[Any, ...], epsilon: Any, zero_centered: bool, implementation: Any
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The norm of operands: x, residual, gamma and beta."""
    return checked_norm(kind, operands, epsilon, zero_centered, implementation).result()


def checked_norm(
    kind: Any, operands: tuple[Any, ...], epsilon: Any, zero_centered: bool = False, implementation: Any = None
) -> Norm:
    """A norm of operands that are checked here: x, residual, gamma and beta; see `rms_norm`."""
    who, (x, residual, gamma, beta) = f"{kind}_norm", operands
    check_implementation(who, implementation)
    x, gamma = float_array(who, "x", x), float_array(who, "gamma", gamma)
    a_flag(who, zero_centered_gamma=zero_centered)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 <= epsilon < math.inf:
        raise ValueError(f"{who}: epsilon={shown(epsilon)}; needs a number that is not negative, such as 1e-6")
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(f"{who}: x has shape {x.shape}; needs [..., C] with one feature or more")
    beta = None if beta is None else float_array(who, "beta", beta)
    for name, parameter in (("gamma", gamma), ("beta", beta)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(f"{who}: {name} has shape {parameter.shape}; needs {x.shape[-1:]}, the features of x")
    if residual is not None:
        residual = float_array(who, "residual", residual)
        if residual.shape != x.shape:
            raise ValueError(f"{who}: residual has shape {residual.shape}; needs that of x, {x.shape}")
        if residual.dtype != x.dtype:
            raise TypeError(f"{who}: residual has dtype {residual.dtype}; needs that of x, {x.dtype}: cast one of them")
    spec = NormSpec(kind, float(epsilon), residual is not None, beta is not None, implementation)
    return Norm(spec, x, residual, weights(gamma, zero_centered), None if beta is None else widened(beta))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normed(
    spec: NormSpec,
    shardings: tuple[Any, ...],
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    beta: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """The normed rows, and the sum of x and the residual if there is one.

    `shardings`: those of the operands, which their gradients get, too; see `out_sharding.sharding_of`.
    """
    return _results(spec, x, residual, weight, beta)[0]


def _results(
    spec: NormSpec, x: jax.Array, residual: jax.Array | None, weight: jax.Array, beta: jax.Array | None
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The results, and the saved numbers."""
    found = normed(spec, x, weight, residual, beta)
    return (found.y,) if found.total is None else (found.y, found.total), found.saved


def _forward(
    spec: NormSpec,
    shardings: tuple[Any, ...],
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    beta: jax.Array | None,
) -> tuple[tuple[jax.Array, ...], Any]:
    x, residual, weight, beta = _differentiated_once((x, residual, weight, beta))
    results, saved = _results(spec, x, residual, weight, beta)
    return results, (results[-1] if spec.residual else x, weight, saved)


def _backward(
    spec: NormSpec, shardings: tuple[Any, ...], kept: Any, gradients: tuple[jax.Array, ...]
) -> tuple[Any, ...]:
    dy, *of_sum = _differentiated_once(gradients)
    return norm_gradients(spec, shardings, kept, dy, of_sum)


def norm_gradients(
    spec: NormSpec, shardings: tuple[Any, ...], kept: Any, dy: jax.Array, of_sum: Sequence[jax.Array]
) -> tuple[Any, ...]:
    """The gradients of x, residual, weight and beta; None for those that are not there.

    Arguments:
        shardings: those of the operands.
        kept: what was normed, the weight, and the saved numbers.
        of_sum: the gradient of the sum of x and the residual, if there is one.
    """
    x, weight, saved = kept
    rows_split = x.ndim > 2
    batch = x.shape[: -3 if rows_split else -2]
    each = jnp.broadcast_to(weight, (*batch, *weight.shape))
    dx, *sums = norm_gradient_op(spec, rows_split)(dy, *of_sum, x, each, *saved)
    dweight, dbeta = (*(of.sum(axis=tuple(range(len(batch)))) for of in sums), None)[:2]
    found = dx, dx if spec.residual else None, dweight, dbeta
    return tuple(None if g is None else resharded(g, s) for g, s in zip(found, shardings, strict=True))


_normed.defvjp(_forward, _backward)
_differentiated_once = no_derivative("rms_norm, layer_norm: there is no second derivative; write the norm in jax.numpy")


def normed(
    spec: NormSpec,
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    beta: jax.Array | None = None,
) -> NormResult:
    """The norm, and the amaxes of it that the spec wants, without a pass over it and without a derivative: for linears,
    which call this inside of their own.

    Arguments:
        x: [..., R, C]; with amaxes whose rows are split, [..., S, R, C]. Checked already, as all operands are.
        weight: float32 [C], see `reference.weights`.
        residual: as x, if the spec has one.
        beta: float32 [C], if the spec has one.
    """
    amaxes = (spec.amaxes or NO_AMAXES).of_rows(x.shape[-2])
    batch = x.shape[: -3 if amaxes.rows_split else -2]
    x, residual, weight, beta = wiring.align_varying(x, residual, weight, beta)
    parameters = [jnp.broadcast_to(p, (*batch, *p.shape)) for p in (weight, beta) if p is not None]
    rows = [x] if residual is None else [x, residual]
    results = norm_op(dataclasses.replace(spec, amaxes=amaxes))(*rows, *parameters)
    count = len(rows)
    total = None if residual is None else results[1]
    return NormResult(results[0], total, results[count : count + spec.saved], list(results[count + spec.saved :]))


class NormResult(NamedTuple):
    """The results of `normed`.

    Attributes:
        y: the normed rows.
        total: the sum of x and the residual, or None.
        saved: numbers of each row for `norm_gradient_op`, float32 [..., R] each.
        amaxes: as `ops.amax.amax` gives them: float32 [...] each.
    """

    y: jax.Array
    total: jax.Array | None
    saved: tuple[jax.Array, ...]
    amaxes: list[jax.Array]
