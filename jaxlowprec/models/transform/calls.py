"""Equations that contain jaxprs (jit, scan, remat, ...): how parameters pass through them, and how they are built anew.

A rebuilt call gets the masters of cast and of loaded parameters as further operands, and hands out those of results.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.models.transform.weights import (
    TracedValue,
    Weight,
    Weights,
    arrays_of,
    masters_of,
    part_of_stack,
    traced,
)

Through = Callable[[Any, Weights], Any]
"""(an open jaxpr, the parameters that its arguments are) -> parameter_trace.Flow."""
Evaluate = Callable[[Any, Any, list[TracedValue]], list[TracedValue]]
"""(an open jaxpr, its constants, its arguments) -> its results, with products changed."""


def of(eqn: Any) -> _Call | None:
    """The call that an equation is; None if it is none, or one that must stay as it is."""
    kind = _KINDS.get(eqn.primitive.name)
    if kind is None or (kind is _Remat and eqn.params["differentiated"]):  # a backward pass: its products are gradients
        return None
    return kind(eqn)


def _open(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr without its constants, and these. JAX has one class for both kinds, or two."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _values(operands: list[TracedValue]) -> list[Any]:
    return [t.value for t in operands]


class _Call:
    """A call of one jaxpr whose operands and results are the equation's."""

    def __init__(self, eqn: Any):
        self.eqn, self.params = eqn, eqn.params
        self.jaxpr, self.constants = _open(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))

    def accepted(self, given: list[Weight | None]) -> list[Weight | None]:
        """The parameters among the operands that are followed through it, without loaded ones where it takes none."""
        return given

    def flow(self, through: Through, given: list[Weight | None]) -> tuple[Weights, bool]:
        """The parameters that the results are, and whether products change."""
        flow = through(self.jaxpr, tuple(self.inside(given)))
        return flow.results, flow.changes

    def inside(self, given: list[Weight | None]) -> list[Weight | None]:
        """The parameters that the arguments of the jaxpr are."""
        return given

    def rebuilt(self, run: Evaluate, operands: list[TracedValue], results: Weights) -> list[TracedValue]:
        """The results of the call with its products changed."""
        weights = self.inside([t.weight for t in operands])

        def body(values: list[Any], masters: list[Any]) -> tuple[list[Any], list[Any]]:
            out = run(self.jaxpr, self.constants, traced(values, weights, masters))
            return _values(out), masters_of(out)

        values, masters = self.wrapped(body, weights, results)(_values(operands), masters_of(operands))
        return traced(values, results, masters)

    def wrapped(self, body: Any, weights: list[Weight | None], results: Weights) -> Any:
        """The function, called in the equation's way."""
        return body


def _with_masters(of_values: Any, weights: Any) -> tuple[list[Any], list[Any]]:
    """One item for each value, and again those of the weights that have a master."""
    return list(of_values), [v for v, w in zip(of_values, weights, strict=True) if w is not None and w.has_master]


def _without_loaded(given: list[Weight | None]) -> list[Weight | None]:
    """The weights, with None for loaded ones, which enter the call as arrays."""
    return [None if w is not None and w.loaded else w for w in given]


class _Jit(_Call):
    def wrapped(self, body, weights, results):
        body.__name__ = self.params["name"]
        return jax.jit(
            body,
            in_shardings=_with_masters(self.params["in_shardings"], weights),
            out_shardings=_with_masters(self.params["out_shardings"], results),
            inline=self.params["inline"],
            compiler_options=dict(self.params["compiler_options_kvs"]) or None,
        )


class _Remat(_Call):
    def wrapped(self, body, weights, results):
        return jax.checkpoint(body, prevent_cse=self.params["prevent_cse"], policy=self.params["policy"])


class _ShardMap(_Call):
    def accepted(self, given):
        return _without_loaded(given)

    def inside(self, given):
        sizes = zip(self.eqn.invars, self.jaxpr.invars, strict=True)
        parts = [outer.aval.size != inner.aval.size for outer, inner in sizes]
        return [dataclasses.replace(w, shard=True) if w and part else w for w, part in zip(given, parts, strict=True)]

    def flow(self, through, given):
        results, changes = super().flow(through, given)
        return tuple(None if w is None else dataclasses.replace(w, shard=False) for w in results), changes

    def wrapped(self, body, weights, results):
        return jax.shard_map(
            body,
            mesh=self.params["mesh"],
            in_specs=_with_masters(self.params["in_specs"], weights),
            out_specs=_with_masters(self.params["out_specs"], results),
            axis_names=set(self.params["newly_manual_axes"]),
            check_vma=self.params["check_vma"],
        )


class _Loop(_Call):
    """A call of a body with constants, carries and slices. A carry is a parameter only if the body never changes it."""

    carries: int
    first: int  # the number of the first carry among the body's arguments

    def accepted(self, given):
        return _without_loaded(given)

    def _constant(self) -> list[bool]:
        """Whether the body returns each carry as it got it."""
        inner = self.jaxpr
        return [inner.invars[self.first + i] is inner.outvars[i] for i in range(self.carries)]

    def _arguments(self, given: list[Any], changed: Callable[[Any], Any]) -> list[Any]:
        """The body's arguments in every round: carries that it changes are `changed`."""
        arguments = list(given)
        for i, constant in enumerate(self._constant(), start=self.first):
            arguments[i] = arguments[i] if constant else changed(arguments[i])
        return arguments

    def _results(self, carries: list[Any], operands: list[TracedValue], others: list[Any]) -> list[TracedValue]:
        given = operands[self.first : self.first + self.carries]
        kept = [
            TracedValue(value, t.weight, t.master) if constant else TracedValue(value)
            for value, t, constant in zip(carries, given, self._constant(), strict=True)
        ]
        return [*kept, *map(TracedValue, others)]

    def flow(self, through, given):
        arguments = self._arguments(self._of_body(given), lambda _: None)
        flow = through(self.jaxpr, tuple(arguments))
        carried = arguments[self.first : self.first + self.carries]
        return (*carried, *[None] * (len(flow.results) - self.carries)), flow.changes

    def _of_body(self, operands: list[Any]) -> list[Any]:
        """The operands that the body gets."""
        return operands


class _Scan(_Loop):
    """Slices and stacked results have one axis more outside; their numbers' names differ between versions of JAX.

    A stack whose layers do not all follow the same recipe is run in pieces, one scan each: one some of whose first and
    last layers stay in high precision, or one that the function made of parameters with different recipes.
    """

    def __init__(self, eqn: Any):
        super().__init__(eqn)
        slices = sum(v.aval.shape != i.aval.shape for v, i in zip(eqn.invars, self.jaxpr.invars, strict=True))
        outer_and_inner = zip(eqn.outvars, self.jaxpr.outvars, strict=True)
        self.carries = sum(v.aval.shape == i.aval.shape for v, i in outer_and_inner)
        self.first = len(eqn.invars) - slices - self.carries
        self.sliced = self.first + self.carries  # the number of the first slice

    def accepted(self, given):
        carried = _without_loaded(given[self.first : self.sliced])
        return [*given[: self.first], *carried, *given[self.sliced :]]

    def _pieces(self, given: list[Weight | None]) -> list[tuple[int, int, list[Weight | None]]]:
        """The first round of each piece, the round after its last, and the parameters that the body's arguments are."""
        length = self.params["length"]
        ends = [(w.ends[0], max(length - w.ends[1], 0)) for w in given[self.sliced :] if w is not None and w.ends]
        stacks = [w.cuts for w in given[self.sliced :] if w is not None and w.cuts]
        cuts = sorted({0, length, *(min(n, length) for numbers in (*ends, *stacks) for n in numbers)})
        pieces = []
        for start, stop in itertools.pairwise(cuts):
            weights = self._arguments(given, lambda _: None)
            for i, w in enumerate(weights[self.sliced :], start=self.sliced):
                if w is not None and w.ends:
                    quantised = w.ends[0] <= start and stop <= length - w.ends[1]
                    weights[i] = dataclasses.replace(w, ends=None) if quantised else None
                elif w is not None and w.cuts:
                    part = part_of_stack(w, start, stop)
                    weights[i] = dataclasses.replace(part, cuts=None, in_turn=True) if stop - start > 1 else part
            pieces.append((start, stop, weights))
        return pieces or [(0, 0, self._arguments(given, lambda _: None))]

    def flow(self, through, given):
        flows = [through(self.jaxpr, tuple(weights)) for *_, weights in self._pieces(given)]
        carried = self._arguments(given, lambda _: None)[self.first : self.sliced]
        results = (*carried, *[None] * (len(self.jaxpr.outvars) - self.carries))
        return results, any(flow.changes for flow in flows)

    def rebuilt(self, run, operands, results):
        pieces = self._pieces([t.weight for t in operands])
        parts = self._parts(operands[self.sliced :], [stop - start for start, stop, _ in pieces])
        carries = _values(operands[self.first : self.sliced])
        stacks: list[Any] = [None] * len(pieces)
        bodies: dict[Weights, Any] = {}  # JAX traces and derives each once, though the ends are two loops
        order = [*enumerate(pieces)]
        for number, (start, stop, weights) in reversed(order) if self.params["reverse"] else order:
            values = _values(operands)
            values[self.first : self.sliced] = carries
            masters = [t.master for t in operands]
            values[self.sliced :], masters[self.sliced :] = parts[number]
            given = zip(values, weights, masters, strict=True)
            arguments = [TracedValue(v, w, m if w is not None else None) for v, w, m in given]
            body = bodies.setdefault(tuple(weights), self._body(run, arguments))
            sliced = arguments[self.sliced :]
            slices = _values(sliced), masters_of(sliced)
            options = {name: self.params[name] for name in ("reverse", "unroll")}
            carries, stacks[number] = jax.lax.scan(body, carries, slices, stop - start, **options)
        joined = [jnp.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*stacks, strict=True)]
        return self._results(carries, operands, joined)

    def _parts(self, stacks: list[TracedValue], lengths: list[int]) -> list[tuple[list[Any], list[Any]]]:
        """The values and the masters of stacks, for each piece of these lengths. Each stack is split once, so that its
        gradient is joined once."""
        given = _values(stacks), [t.master for t in stacks]
        if len(lengths) == 1:
            return [given]
        leaves, structure = jax.tree.flatten(given)
        split = [jax.lax.split(leaf, lengths) for leaf in leaves]
        return [jax.tree.unflatten(structure, parts) for parts in zip(*split, strict=True)]

    def _body(self, run: Evaluate, arguments: list[TracedValue]) -> Any:
        """A round of the loop: (carries, slices) -> (carries, results)."""
        constants, carried = arguments[: self.first], arguments[self.first : self.sliced]
        weights = [t.weight for t in arguments[self.sliced :]]

        def body(carries: list[Any], slices: Any) -> Any:
            now = [TracedValue(v, t.weight, t.master) for v, t in zip(carries, carried, strict=True)]
            out = run(self.jaxpr, self.constants, [*constants, *now, *traced(slices[0], weights, slices[1])])
            arrays = arrays_of(out, self.jaxpr.outvars)
            return arrays[: self.carries], arrays[self.carries :]

        return body


class _While(_Loop):
    def __init__(self, eqn: Any):
        self.eqn, self.params = eqn, eqn.params
        self.jaxpr, self.constants = _open(eqn.params["body_jaxpr"])
        self.of_condition, self.first = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        self.carries = len(self.jaxpr.outvars)

    def _of_body(self, operands):
        return operands[self.of_condition :]

    def rebuilt(self, run, operands, results):
        condition, constants = _open(self.params["cond_jaxpr"])
        given = [TracedValue(t.value) for t in operands[: self.of_condition]]
        operands = self._arguments(self._of_body(operands), lambda t: TracedValue(t.value))
        carried = operands[self.first :]

        def go_on(carries: list[Any]) -> Any:
            return run(condition, constants, [*given, *map(TracedValue, carries)])[0].value

        def body(carries: list[Any]) -> list[Any]:
            carried_now = [TracedValue(v, t.weight, t.master) for v, t in zip(carries, carried, strict=True)]
            return _values(run(self.jaxpr, self.constants, [*operands[: self.first], *carried_now]))

        return self._results(jax.lax.while_loop(go_on, body, _values(carried)), operands, [])


class _Cond(_Call):
    """A choice among branches, by a number or by the platform; what leaves a branch is no longer a parameter."""

    def __init__(self, eqn: Any):
        self.eqn, self.params = eqn, eqn.params
        self.branches = [_open(branch) for branch in eqn.params["branches"]]

    def accepted(self, given):
        return _without_loaded(given)

    def flow(self, through, given):
        flows = [through(jaxpr, tuple(given[1:])) for jaxpr, _ in self.branches]
        return (None,) * len(self.eqn.outvars), any(flow.changes for flow in flows)

    def rebuilt(self, run, operands, results):
        index, *given = operands
        weights = [t.weight for t in given]

        def branch(jaxpr: Any, constants: Any) -> Any:
            return lambda values, masters: _values(run(jaxpr, constants, traced(values, weights, masters)))

        functions = [branch(*branch_) for branch_ in self.branches]
        arguments = _values(given), masters_of(given)
        platforms = self.params.get("branches_platforms")
        if platforms is None:
            return [*map(TracedValue, jax.lax.switch(index.value, functions, *arguments))]
        by_platform = {name: f for names, f in zip(platforms, functions, strict=True) for name in names or ("default",)}
        default = by_platform.pop("default", None)
        return [*map(TracedValue, jax.lax.platform_dependent(*arguments, default=default, **by_platform))]


_KINDS: dict[str, type[_Call]] = {
    "jit": _Jit,
    "pjit": _Jit,
    "closed_call": _Call,
    "core_call": _Call,
    "eval_jaxpr": _Call,
    "remat2": _Remat,
    "checkpoint": _Remat,
    "shard_map": _ShardMap,
    "scan": _Scan,
    "while": _While,
    "cond": _Cond,
}
