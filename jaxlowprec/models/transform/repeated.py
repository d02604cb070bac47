"""Runs of equations that equal layers repeat: as one function, JAX differentiates and transposes each of them once.

A jaxpr has bare equations where its function called `jax.numpy`, whose functions are jitted, and so are differentiated
once for each shape. Evaluated one by one, every equation of every layer would be differentiated anew.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Container, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import DebugInfo, Jaxpr, concrete_or_error

_DEBUG_INFO = DebugInfo("quantize_matmuls", "repeated equations", None, None)
_OFTEN = 3
"""Runs that occur so many times are functions; making one takes longer than to differentiate its equations once."""
_ONE_TERM = re.compile(
    "abs|add|broadcast_in_dim|concatenate|convert_element_type|cos|div|dot_general|dynamic_slice|erf|exp|exp2|expm1|gather"
    "|integer_pow|p?jit|log|log1p|logistic|max|min|mul|neg|pad|pow|reduce_max|reduce_sum|reshape|rev|rsqrt|select_n|sin"
    "|slice|split|sqrt|square|squeeze|stop_gradient|sub|transpose"
)
"""Primitives that add one term to the gradient of each operand."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Equations that follow each other in a jaxpr.

    Attributes:
        eqns: the equations, all under the same names.
        inputs: the variables that they read.
        outputs: the variables that they set and that are read later.
        call: computes these of those; one function for all equal runs.
    """

    eqns: list[Any]
    inputs: list[Any]
    outputs: list[Any]
    call: Callable[..., list[Any]]


def is_abstract(value: Any) -> bool:
    """Whether a value is not known while it is traced; one that `jax.grad` differentiates outside of `jax.jit` is."""
    try:
        concrete_or_error(None, value)
    except jax.errors.ConcretizationTypeError:
        return True
    return False


def runs_of(jaxpr: Any, others: Container[int]) -> dict[int, Run]:
    """The runs that occur often, by the numbers of their first equations.

    The terms of each gradient are added up in the order in which the equations alone would add them: a run has no
    second term of a variable that was set before it and is read after it.

    Arguments:
        jaxpr: an open jaxpr.
        others: the numbers of the equations that are in no run.
    """
    last = {v: number for number, eqn in enumerate(jaxpr.eqns) for v in _variables(eqn)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not hasattr(v, "val")}
    found = [
        (start, stop, *_described(jaxpr.eqns[start:stop], last, stop)) for start, stop in _cut(jaxpr, others, last)
    ]
    counts = collections.Counter(key for *_, key in found)
    calls: dict[Any, Callable[..., list[Any]]] = {}
    runs = {}
    for start, stop, inputs, outputs, key in found:
        if counts[key] >= _OFTEN:
            eqns = jaxpr.eqns[start:stop]
            call = calls.get(key) or calls.setdefault(key, _function(eqns, inputs, outputs))
            runs[start] = Run(eqns, inputs, outputs, call)
    return runs


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not hasattr(v, "val")]


def _cut(jaxpr: Any, others: Container[int], last: dict[Any, int]) -> Iterator[tuple[int, int]]:
    """The numbers of each run's first equation and of the one after its last. `last`: those of the last readers."""
    start, place, own, terms = 0, None, set[Any](), collections.Counter[Any]()
    for number, eqn in enumerate(jaxpr.eqns):
        added = collections.Counter(_variables(eqn) * (1 if _ONE_TERM.fullmatch(eqn.primitive.name) else 2))
        again = {v: n for v, n in added.items() if last[v] > number}
        here = str(eqn.source_info.name_stack), eqn.ctx
        plain = number not in others and _is_plain(eqn)
        if start < number and not (
            plain and here == place and all(v in own or terms[v] + again[v] == 1 for v in again)
        ):
            yield start, number
            start, own, terms = number, set(), collections.Counter()
        if plain and all(v in own or terms[v] + again[v] == 1 for v in again):
            place = here
            terms.update(added)
            own.update(eqn.outvars)
        else:
            start = number + 1
    if start < len(jaxpr.eqns):
        yield start, len(jaxpr.eqns)


def _is_plain(eqn: Any) -> bool:
    """Whether all that an equation does can be compared with another one."""
    literals = [v for v in eqn.invars if hasattr(v, "val")]
    try:
        hash(frozenset(eqn.params.items()))
    except TypeError:
        return False
    return not eqn.effects and not any(np.shape(v.val) for v in literals)


def _described(eqns: list[Any], last: dict[Any, int], stop: int) -> tuple[list[Any], list[Any], Any]:
    """The variables that equations read, those that they set for later ones, and a key that equal equations share."""
    numbers: dict[Any, int] = {}
    own: set[Any] = set()
    said = []
    for eqn in eqns:
        operands = [
            (repr(v.val), v.aval) if hasattr(v, "val") else (numbers.setdefault(v, len(numbers)), v.aval)
            for v in eqn.invars
        ]
        results = [(numbers.setdefault(v, len(numbers)), v.aval) for v in eqn.outvars]
        own.update(eqn.outvars)
        said.append((eqn.primitive, frozenset(eqn.params.items()), tuple(operands), tuple(results)))
    inputs = [v for v in numbers if v not in own]
    outputs = [v for v in numbers if v in own and last.get(v, -1) >= stop]
    return inputs, outputs, (tuple(said), eqns[0].ctx, tuple(numbers[v] for v in outputs))


def _function(eqns: list[Any], inputs: list[Any], outputs: list[Any]) -> Callable[..., list[Any]]:
    """The run as a function that JAX inlines; the names of its equations are those of where it is called."""
    unnamed = [eqn.source_info.replace(name_stack=type(eqn.source_info.name_stack)()) for eqn in eqns]
    eqns = [eqn.replace(source_info=source_info) for eqn, source_info in zip(eqns, unnamed, strict=True)]
    jaxpr = Jaxpr((), inputs, outputs, eqns, frozenset(), _DEBUG_INFO)

    def repeated(*values: Any) -> list[Any]:
        return jax.core.eval_jaxpr(jaxpr, (), *values)

    return jax.jit(repeated, inline=True)
