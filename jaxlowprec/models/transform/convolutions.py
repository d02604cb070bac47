"""Convolutions by a parameter that are matrix products, and their products of patches under a recipe."""

from __future__ import annotations

from typing import Any

from jaxlowprec.layers.convolution import Windows
from jaxlowprec.layers.dot_general import dot_general
from jaxlowprec.models.transform.weights import Weight


def windows_of(eqn: Any) -> Windows:
    """How the equation of a convolution reads its input."""
    params, (lhs, rhs) = eqn.params, (v.aval for v in eqn.invars)
    of_lhs, of_rhs, _ = params["dimension_numbers"]
    return Windows(
        sizes=tuple(rhs.shape[axis] for axis in of_rhs[2:]),
        strides=tuple(params["window_strides"]),
        padding=tuple((low, high) for low, high in params["padding"]),
        input_dilation=tuple(params["lhs_dilation"]),
        kernel_dilation=tuple(params["rhs_dilation"]),
        features=lhs.shape[of_lhs[1]],
        groups=params["feature_group_count"],
        batch_groups=params["batch_group_count"],
        extents=tuple(lhs.shape[axis] for axis in of_lhs[2:]),
    )


def why_no_product(eqn: Any, weights: list[Weight | None]) -> str:
    """Why a convolution by a parameter stays in high precision, or ""."""
    if all(weights):
        return "both operands are parameters"
    if weights[1] is None:
        return "the parameter is the input of a convolution"
    if reason := windows_of(eqn).reason:
        return reason
    if weights[1].packed:
        return "a convolution takes the parameter as an array"
    features_out = eqn.params["dimension_numbers"].rhs_spec[0]
    if eqn.invars[1].aval.shape[features_out] == 1:
        return "the parameter is contracted whole: no matrix"
    return ""


def convolve(eqn: Any, x: Any, kernel: Any, options: dict[str, Any]) -> Any:
    """The convolution as a product of patches, and the state of delayed scaling if the options have one.

    Contracted axes are the spatial ones in the order of the dimension numbers, then the features.

    Arguments:
        options: of `dot_general`, `out_sharding` that of its result [batch, spatial..., features].
    """
    of_lhs, of_rhs, _ = eqn.params["dimension_numbers"]
    patches = windows_of(eqn).patches(x.transpose(of_lhs[0], *of_lhs[2:], of_lhs[1]))
    contracted = range(patches.ndim - len(of_rhs) + 1, patches.ndim), (*of_rhs[2:], of_rhs[1])
    return dot_general(patches, kernel, ((tuple(contracted[0]), contracted[1]), ((), ())), **options)


def to_the_equations_order(eqn: Any) -> tuple[int, ...]:
    """The transposition from [batch, spatial..., features] to the layout of the equation's result."""
    batch, features, *spatial = eqn.params["dimension_numbers"].out_spec
    given = [batch, *spatial, features]
    return tuple(given.index(axis) for axis in range(len(given)))
