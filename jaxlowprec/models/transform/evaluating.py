"""Computes a jaxpr with those products changed that follow a recipe; every other equation runs as it is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import DebugInfo, Jaxpr

from jaxlowprec.models.transform import calls
from jaxlowprec.models.transform.following import Following
from jaxlowprec.models.transform.products import multiply
from jaxlowprec.models.transform.weights import Traced, moved_master, source

States = Mapping[str, Any]
_DEBUG_INFO = DebugInfo("quantize_matmuls", "an equation", None, None)


def evaluate(following: Following, states: States, jaxpr: Any, constants: Any, arguments: list[Traced]) -> list[Traced]:
    """The results of an open jaxpr.

    Arguments:
        states: the states of delayed scaling, by the layers' names.
    """
    flow = following.through(jaxpr, tuple(t.weight for t in arguments))
    known: dict[Any, Traced] = dict(zip(jaxpr.constvars, map(Traced, constants), strict=True))
    known |= zip(jaxpr.invars, arguments, strict=True)

    def read(atom: Any) -> Traced:
        return Traced(atom.val) if hasattr(atom, "val") else known[atom]

    for number, eqn in enumerate(jaxpr.eqns):
        operands = [read(v) for v in eqn.invars]
        values = [t.value for t in operands]
        step = flow.steps.get(number)
        call = calls.of(eqn)
        if step is None:
            results = [*map(Traced, _as_it_is(eqn, values))]
        elif step.product is not None:
            master, name = operands[step.product.side].master, step.product.weight.name
            recipe: Any = following.recipe_at(name)
            with _scope_of(eqn):
                results = [Traced(multiply(eqn, step.product, values, master, recipe, states.get(name)))]
        elif call is not None and (step.changes or any(w is not None and w.cast for w in step.results)):
            with _scope_of(eqn):
                results = call.rebuilt(functools.partial(evaluate, following, states), operands, step.results)
        else:
            results = _moved(eqn, operands, step.results)
        known |= zip(eqn.outvars, results, strict=True)
    return [read(v) for v in jaxpr.outvars]


def _moved(eqn: Any, operands: list[Traced], weights: Any) -> list[Traced]:
    """The results of an equation without a changed product, with their masters."""
    values = [t.value for t in operands]
    results = []
    for number, (value, weight) in enumerate(zip(_as_it_is(eqn, values), weights, strict=True)):
        master = None
        if weight is not None:
            master = moved_master(eqn, number, operands[source(eqn, number)].master, values) if weight.cast else value
        results.append(Traced(value, weight, master))
    return results


def _as_it_is(eqn: Any, values: list[Any]) -> list[Any]:
    """The results of an equation with its own names, context, rules and effects, whatever its primitive is."""
    given = {v: value for v, value in zip(eqn.invars, values, strict=True) if not hasattr(v, "val")}
    jaxpr = Jaxpr((), list(given), eqn.outvars, [eqn], eqn.effects, _DEBUG_INFO)
    return jax.core.eval_jaxpr(jaxpr, (), *given.values())


def _scope_of(eqn: Any) -> Any:
    """The names under which the function's code ran."""
    names = str(getattr(eqn.source_info, "name_stack", ""))
    return jax.named_scope(names) if names else contextlib.nullcontext()
