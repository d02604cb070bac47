"""The op of an optimizer's update: operands, results, sharding rule and native call."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.ops.checks import Implementation, choose
from jaxlowprec.ops.optimizer_states import BLOCK, REMAINDERS, Coded
from jaxlowprec.ops.optimizer_update import reference


class UpdateSpec(NamedTuple):
    """One variant of the op.

    Attributes:
        rule: how moments and weights change.
        axes: of the arrays, 2 or more; those before them are batch axes of `jax.vmap`.
        coded: whether each moment is; Lion has one.
        stochastic: whether its codes are.
        bits: of the weights, or None.
        is_update: the first result is the update of the parameter.
        ragged: rows do not end with a whole block.
    """

    rule: reference.Rule
    axes: int
    coded: tuple[bool, ...]
    stochastic: tuple[bool, bool]
    bits: int | None
    is_update: bool
    ragged: bool

    @property
    def draws(self) -> bool:
        """Whether anything is drawn."""
        return self.bits == 16 or any(self.stochastic)

    @property
    def remains(self) -> bool:
        """Whether weights have remainders."""
        return self.bits in REMAINDERS


def rule_of(spec: UpdateSpec) -> wiring.ShardingRule:
    """Rows are split in any way, and columns into whole blocks where anything has blocks."""
    rows = " ".join(f"r{i}" for i in range(spec.axes - 1))
    columns, blocks = ("columns", "blocks") if spec.ragged else ("(c k)", "c")
    if not (any(spec.coded) or spec.draws):
        columns = blocks = "c"
    array = f"... {rows} {columns}"
    moments = [part for coded in spec.coded for part in ([array, f"... {rows} {blocks}"] if coded else [array])]
    kept = [array] * spec.remains + moments
    operands = [array, array, "... numbers", *kept, *["... kinds two", rows, blocks] * spec.draws]
    whole = ["numbers", *["kinds", "two"] * spec.draws, *["columns"] * (columns == "columns")]
    whole += ["blocks"] * (blocks == "blocks" and "blocks" in " ".join(operands))
    sizes: dict[str, Any] = {"k": BLOCK} if columns == "(c k)" else {}
    return wiring.ShardingRule(f"{', '.join(operands)} -> {', '.join([array, *kept])}", whole=whole, **sizes)


class Operands(NamedTuple):
    """The op's operands by their names; None where the variant has none."""

    g: Any
    p: Any
    scalars: Any
    rest: Any
    mu: Any
    nu: Any
    places: Any


def by_name(spec: UpdateSpec, operands: Sequence[Any]) -> Operands:
    """The operands, which `flat` put into a list."""
    g, p, scalars, *others = operands
    left = iter(others)
    rest = next(left) if spec.remains else None
    mu, *nu = (Coded(next(left), next(left)) if coded else next(left) for coded in spec.coded)
    return Operands(g, p, scalars, rest, mu, nu[0] if nu else None, reference.Places(*left) if spec.draws else None)


def flat(*values: Any) -> Iterator[Any]:
    """The arrays of values that are arrays, tuples of them, or None."""
    for value in values:
        if isinstance(value, tuple):
            yield from value
        elif value is not None:
            yield value


def outputs(spec: UpdateSpec, *operands: Any) -> wiring.Shapes:
    """Shapes and dtypes of the results: of the parameter or its update, and of what was kept of it."""
    given = by_name(spec, operands)
    first = jnp.float32 if spec.is_update else given.p.dtype
    return [(given.p.shape, first), *((x.shape, x.dtype) for x in flat(given.rest, given.mu, given.nu))]


@functools.cache
def update_op(spec: UpdateSpec, implementation: Implementation) -> wiring.Op:
    """g, p, scalars, then remainders, moments and places as the variant has them -> the results of `outputs`."""

    def by_reference(*operands: jax.Array) -> Sequence[jax.Array]:
        made = reference.optimizer_update(
            *by_name(spec, operands),
            rule=spec.rule,
            stochastic=spec.stochastic,
            bits=spec.bits,
            is_update=spec.is_update,
        )
        return [*flat(*made)]

    return wiring.define(
        "jaxlowprec_optimizer_update",
        rule=rule_of(spec),
        outputs=functools.partial(outputs, spec),
        reference=by_reference,
        native=functools.partial(native_call, spec),
        **choose("optimizer_update", implementation),
    )


def native_call(spec: UpdateSpec, *operands: jax.Array, vmap_method: str | None = None) -> Sequence[jax.Array]:
    """Calls the kernel. What is kept from step to step is written where it was read, if its buffer may be."""
    results = [jax.ShapeDtypeStruct(*result) for result in outputs(spec, *operands)]
    kept = {3 + i: 1 + i for i in range(len(results) - 1)}
    return jax.ffi.ffi_call(
        "jaxlowprec_optimizer_update",
        results,
        input_output_aliases=kept if spec.is_update else {1: 0, **kept},
        vmap_method=vmap_method,
    )(
        *operands,
        rule=np.int32(list(reference.SCALARS).index(spec.rule)),
        bits=np.int32(spec.bits or 0),
        stochastic_mu=spec.stochastic[0],
        stochastic_nu=spec.stochastic[1],
        is_update=spec.is_update,
    )
