"""Numbers of leaves that differ from the file's by a factor or an offset, without a rounding that nobody asked for."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.checkpoints.schemes.base import FLOATS
from jaxlowprec.checkpoints.trees.rule import Rule


def differ(rule: Rule) -> bool:
    """Whether the rule's leaves have other numbers than the file."""
    return rule.factor != 1 or rule.offset != 0


def of_file(path: str, array: Any, rule: Rule, dtype: np.dtype | None) -> Any:
    """The file's numbers for those of a leaf.

    Arguments:
        path: the leaf's path.
        array: the leaf, or part of it.
        rule: its rule.
        dtype: the dtype that they will be rounded to. None: the leaf's own, in which they need to be exact.

    Raises:
        ValueError: `dtype` is None, and what is read back would differ from the leaf.

    >>> of_file("norm.scale", np.float32([1.5, 0.25]), Rule("norm.scale", "norm.weight", offset=1.0), None)
    array([ 0.5 , -0.75], dtype=float32)
    """
    if not differ(rule):
        return array
    given = np.asarray(array)
    made = (given.astype(np.float64) - rule.offset) / rule.factor
    if dtype is None:
        own = made.astype(given.dtype)
        _require_same(path, given, _leaf(own, rule, given.dtype), rule, "pass dtype=, which says what to round to")
        made = own
    made = made.astype(dtype or given.dtype)
    return as_array(made) if isinstance(array, jax.Array) else made


def of_leaf(path: str, array: np.ndarray, rule: Rule, dtype: np.dtype) -> np.ndarray:
    """The leaf's numbers for those of the file: the inverse of `of_file`.

    Raises:
        ValueError: the file's numbers could not be had back.
    """
    if not differ(rule) or array.dtype.name not in FLOATS:
        return array
    made = _leaf(array, rule, dtype)
    back = ((made.astype(np.float64) - rule.offset) / rule.factor).astype(array.dtype)
    remedy = "make the leaf float32, or keep the file's numbers in the tree"
    _require_same(path, array, back, rule, remedy)
    return made


def _leaf(array: np.ndarray, rule: Rule, dtype: np.dtype) -> np.ndarray:
    return (array.astype(np.float64) * rule.factor + rule.offset).astype(dtype)


def _require_same(path: str, given: np.ndarray, back: np.ndarray, rule: Rule, remedy: str) -> None:
    same = (given == back) | (np.isnan(given) & np.isnan(back))
    if not same.all():
        number = given[~same].flat[0]
        raise ValueError(
            f"{path}: {given.dtype.name} cannot hold {number} after the factor {rule.factor:g} and the offset "
            f"{rule.offset:g} between file and tree, so that it could not be had back; {remedy}"
        )
