"""Computes a jaxpr with those products changed that follow a recipe; every other equation runs as it is."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Container, Mapping
from typing import Any

import jax
from jax.extend.core import DebugInfo, Jaxpr

from jaxlowprec.models.transform import calls
from jaxlowprec.models.transform.parameter_trace import Flow, ParameterTrace
from jaxlowprec.models.transform.products import Product, loaded_kernel, multiply, with_transposition
from jaxlowprec.models.transform.repeated import runs_of
from jaxlowprec.models.transform.weights import TracedValue, array_of, arrays_of, is_loaded, moved_master

States = Mapping[str, Any]
_DEBUG_INFO = DebugInfo("quantize_matmuls", "an equation", None, None)


def evaluate(
    trace: ParameterTrace,
    states: States,
    jaxpr: Any,
    constants: Any,
    arguments: list[TracedValue],
    *,
    in_runs: bool = False,
) -> list[TracedValue]:
    """The results of an open jaxpr.

    Arguments:
        states: the states of delayed scaling, by the layers' names.
        in_runs: equations that repeat are run together, because JAX may differentiate each one as it is evaluated.
    """
    flow = trace.through(jaxpr, tuple(t.weight for t in arguments))
    merged = _merged(jaxpr, flow)
    runs = runs_of(jaxpr, {*flow.steps, *merged}) if in_runs else {}
    unread = _unread(jaxpr, flow, arguments)
    known: dict[Any, TracedValue] = dict(zip(jaxpr.constvars, map(TracedValue, constants), strict=True))
    known |= zip(jaxpr.invars, arguments, strict=True)

    def read(atom: Any) -> TracedValue:
        return TracedValue(atom.val) if hasattr(atom, "val") else known[atom]

    done = 0  # the equations before this one have been evaluated
    for number, eqn in enumerate(jaxpr.eqns):
        if (run := runs.get(number)) is not None:
            with _scope_of(eqn):
                results = [*map(TracedValue, run.call(*(read(v).value for v in run.inputs)))]
            known |= zip(run.outputs, results, strict=True)
            done = number + len(run.eqns)
        if number < done:
            continue
        step = flow.steps.get(number)
        if number in merged:
            if step is None:  # the transposition
                continue
            eqn, step = merged[number]
        operands = [read(v) for v in eqn.invars]
        call = calls.of(eqn)
        if step is None:
            results = [*map(TracedValue, _as_it_is(eqn, [t.value for t in operands]))]
        elif step.product is not None and (master := _master(eqn, step.product, operands)) is not None:
            name, values = step.product.weight.name, [t.value for t in operands]
            recipe = trace.recipe_at(name)
            with _scope_of(eqn):
                results = [TracedValue(multiply(eqn, step.product, values, master, recipe, states.get(name)))]
        elif call is not None and (step.changes or any(w is not None and w.has_master for w in step.results)):
            accepted = call.accepted([t.weight for t in operands])
            operands = [
                t if t.weight is None or w is not None else TracedValue(array_of(t, v))
                for t, w, v in zip(operands, accepted, eqn.invars, strict=True)
            ]
            with _scope_of(eqn):
                results = call.rebuilt(functools.partial(evaluate, trace, states), operands, step.results)
        else:
            results = _moved(eqn, operands, step.results, unread)
        known |= zip(eqn.outvars, results, strict=True)
    return [read(v) for v in jaxpr.outvars]


def _merged(jaxpr: Any, flow: Flow) -> dict[int, Any]:
    """Products whose results are only transposed, merged with their transpositions: see `with_transposition`.

    Returns:
        the merged equation and its step by a product's number, and None by its transposition's.
    """
    readers = collections.defaultdict[Any, list[int]](list)
    for number, eqn in enumerate(jaxpr.eqns):
        for v in eqn.invars:
            if not hasattr(v, "val"):
                readers[v].append(number)
    results = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    merged: dict[int, Any] = {}
    for number, step in flow.steps.items():
        if step.product is None:
            continue
        (result,) = jaxpr.eqns[number].outvars
        if result in results or len(readers[result]) != 1:
            continue
        (reader,) = readers[result]
        found = with_transposition(jaxpr.eqns[number], step.product, jaxpr.eqns[reader])
        if found is not None:
            merged |= {number: (found[0], dataclasses.replace(step, product=found[1])), reader: None}
    return merged


def _master(eqn: Any, product: Product, operands: list[TracedValue]) -> Any:
    """The parameter that a product is computed from under its recipe; None if the product takes it as an array."""
    master = operands[product.side].master
    return loaded_kernel(eqn, product, master) if is_loaded(master) else master


def _unread(jaxpr: Any, flow: Flow, arguments: list[TracedValue]) -> set[Any]:
    """The variables of cast parameters of which only the masters are read, such as a cast before a product."""
    weights = dict(zip(jaxpr.invars, (t.weight for t in arguments), strict=True))
    for number, step in flow.steps.items():
        weights |= zip(jaxpr.eqns[number].outvars, step.results, strict=True)
    unread = {v for v, weight in weights.items() if weight is not None and weight.has_master and not weight.loaded}
    unread.difference_update(v for v in jaxpr.outvars if not hasattr(v, "val"))
    for number, eqn in reversed([*enumerate(jaxpr.eqns)]):
        product = flow.steps[number].product if number in flow.steps else None
        if eqn.outvars and unread.issuperset(eqn.outvars) and calls.of(eqn) is None:
            continue  # its results' masters are made of masters
        by_master = None if product is None else product.side
        unread.difference_update(v for i, v in enumerate(eqn.invars) if i != by_master and not hasattr(v, "val"))
    return unread


def _moved(eqn: Any, operands: list[TracedValue], weights: Any, unread: Container[Any]) -> list[TracedValue]:
    """The results of an equation without a changed product, with their masters."""
    each = zip(eqn.outvars, weights, strict=True)
    if weights and all(weight is not None and (weight.loaded or v in unread) for v, weight in each):
        values, results = [t.value for t in operands], [None] * len(weights)
    else:
        values = arrays_of(operands, eqn.invars)
        results = _as_it_is(eqn, values)
    moved = []
    for number, (value, weight) in enumerate(zip(results, weights, strict=True)):
        master = value
        if weight is not None and weight.has_master:
            master = moved_master(eqn, number, operands, values)
        moved.append(TracedValue(value, weight, master if weight is not None else None))
    return moved


def _as_it_is(eqn: Any, values: list[Any]) -> list[Any]:
    """The results of an equation with its own names, context, rules and effects, whatever its primitive is."""
    given = {v: value for v, value in zip(eqn.invars, values, strict=True) if not hasattr(v, "val")}
    jaxpr = Jaxpr((), list(given), eqn.outvars, [eqn], eqn.effects, _DEBUG_INFO)
    return jax.core.eval_jaxpr(jaxpr, (), *given.values())


def _scope_of(eqn: Any) -> Any:
    """The names under which the function's code ran."""
    names = str(getattr(eqn.source_info, "name_stack", ""))
    return jax.named_scope(names) if names else contextlib.nullcontext()
