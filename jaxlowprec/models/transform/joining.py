"""What parameters become together: stacked for a scan, concatenated for one product, masked, or computed from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxlowprec.models.transform.weights import Weight, is_matrix, joined

_WRITING = ("dynamic_update_slice", "scatter")  # what writes into an array, such as a cache: activations

Choices = Callable[[Weight], list[Any]]
"""The different things that a recipe says of the parameters of a value."""


class Origins:
    """Where the values of one jaxpr come from, as far as they can mask or scale a parameter."""

    def __init__(self) -> None:
        self._numbers: set[Any] = set()
        self._spread: set[Any] = set()

    def add(self, eqn: Any) -> None:
        """Notes what an equation makes."""
        if not eqn.invars or len(eqn.outvars) != 1:
            return
        given, result = eqn.invars[0], eqn.outvars[0]
        if eqn.primitive.name == "broadcast_in_dim" and result.aval.size > given.aval.size:
            self._spread.add(result)
            if given.aval.size == 1:
                self._numbers.add(result)
        elif eqn.primitive.name == "convert_element_type":
            for known in (self._numbers, self._spread):
                if not hasattr(given, "val") and given in known:
                    known.add(result)
            if given.aval.dtype == bool:
                self._spread.add(result)

    def is_number(self, atom: Any) -> bool:
        """Whether a value is one number, perhaps repeated."""
        return atom.aval.size == 1 or (not hasattr(atom, "val") and atom in self._numbers)

    def is_factor(self, atom: Any, shape: tuple[int, ...]) -> bool:
        """Whether a value has less in it than an array of this shape that it meets element by element: a number, a
        vector that was repeated, or a mask."""
        if (given := atom.aval.shape) != shape:
            return not given or (
                len(given) == len(shape) and all(n in (1, m) for n, m in zip(given, shape, strict=True))
            )
        return atom.aval.dtype == bool or (not hasattr(atom, "val") and atom in self._spread)


def joined_by(eqn: Any, weights: list[Weight | None], origins: Origins, choices: Choices) -> Weight | None:
    """The parameter that an equation joins its operands to, or masks; None if it does not."""
    name = eqn.primitive.name
    if name == "select_n":
        return _selected(eqn, weights, origins)
    if name not in ("stack", "concatenate"):
        return None
    parts = [w for w in weights if w is not None and not (w.packed or w.ends or w.computed)]
    if len(parts) < len(weights) or not all(is_matrix(v.aval) for v in eqn.invars):
        return None
    axis = eqn.params["axis" if name == "stack" else "dimension"]
    one = joined([dataclasses.replace(part, cuts=None) for part in parts])
    whole_parts = name == "stack" or all(v.aval.shape[0] == 1 for v in eqn.invars)
    if axis or not whole_parts:
        return one
    one = dataclasses.replace(one, parts=tuple(parts))
    said = [choices(part) for part in parts]
    begins = [n for n in range(1, len(said)) if said[n] != said[n - 1]]
    return dataclasses.replace(one, cuts=(0, *begins, len(said)))


def _selected(eqn: Any, weights: list[Weight | None], origins: Origins) -> Weight | None:
    """A parameter some of whose elements are replaced by a number or another parameter's."""
    cases = list(zip(eqn.invars[1:], weights[1:], strict=True))
    parts = [w for _, w in cases if w is not None]
    plain = all(w is not None or origins.is_number(v) for v, w in cases)
    if not parts or not plain or any(w.packed or w.ends or w.computed for w in parts):
        return None
    return joined(parts) if is_matrix(eqn.outvars[0].aval) else None


def computed(eqn: Any, weights: list[Weight | None], origins: Origins) -> Weight | None:
    """What an equation computes of parameters alone, such as one times a mask; None of any other equation."""
    if len(eqn.outvars) != 1 or not is_matrix(result := eqn.outvars[0].aval) or eqn.primitive.name.startswith(_WRITING):
        return None
    shape, parts = result.shape, []
    for variable, weight in zip(eqn.invars, weights, strict=True):
        if weight is not None and variable.aval.shape == shape:
            parts.append(weight)
        elif not origins.is_factor(variable, shape):
            return None
    if not parts:
        return None
    by = next((part.computed for part in parts if part.computed), eqn.primitive.name)
    parts = [dataclasses.replace(part, cuts=None, ends=None, cast=False, packed=False, computed=by) for part in parts]
    return dataclasses.replace(joined(parts), computed=by)
