"""Measurements of a layer's product, on the steps that are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.statistics.finish import LENGTH
from jaxlowprec.recipes.roles import GEMMS, Roles
from jaxlowprec.telemetry.counting import Quantized, measured, source
from jaxlowprec.telemetry.probes import AS_TRAINED, GEMM_ERRORS, TENSORS, WEIGHT_CODES, Probe
from jaxlowprec.telemetry.sampling import Gemm, RowsByWeights, WithinGroups, codes, lines


class SampledLines(NamedTuple):
    """Lines of the forward pass that the GEMMs of the backward pass measure: columns of x and rows of w, or None."""

    x: jax.Array | None
    w: jax.Array | None


class PassTensors(NamedTuple):
    """Tensors and GEMMs of one pass that telemetry measures.

    Attributes:
        tensors: by name (see `TENSORS`), an array and what it was quantised to, or None.
        gemms: the operands of GEMMs, by name.
        weight: quantised, of which codes are taken.
        lines: arrays whose lines the backward pass needs.
    """

    tensors: dict[str, tuple[jax.Array, Quantized | None]]
    gemms: dict[str, Gemm | RowsByWeights | WithinGroups]
    weight: QuantizedArray | None = None
    lines: SampledLines = SampledLines(None, None)


def measure(
    probe: Probe,
    given: PassTensors,
    requantize: Callable[[Roles, str, jax.Array], Quantized | None],
    sizes: jax.Array | None = None,
) -> tuple[dict[str, jax.Array], SampledLines]:
    """The statistics of a layer, by label, and the lines for the backward pass; zeros on steps that are not measured.

    All of it is in one conditional: between measured steps it costs what that costs.

    Arguments:
        requantize: quantises a tensor, given by its name, as other roles say.
        sizes: of the groups of rows of inputs and gradients; None: they are not in groups.
    """

    def taken(given: PassTensors) -> tuple[dict[str, jax.Array], SampledLines]:
        given = jax.lax.optimization_barrier(given)  # without it XLA computes both branches on a GPU
        found = _counted(probe, given.tensors, requantize, sizes) | _sampled(probe, given.gemms, given.weight)
        return found, _lines(given.lines)

    def nothing(given: PassTensors) -> tuple[dict[str, jax.Array], SampledLines]:
        made = jax.tree.map(lambda line: jnp.zeros(line.shape, line.dtype), jax.eval_shape(_lines, given.lines))
        return jax.tree.map(jnp.zeros_like, probe.state), wiring.align_varying(given.lines, made)[1]

    return jax.lax.cond(probe.on, taken, nothing, given)


def _counted(probe: Probe, tensors: Any, requantize: Callable[..., Any], sizes: Any) -> dict[str, jax.Array]:
    """The statistics of tensors: by label, float32 [len(TENSORS), LENGTH], zeros for the others."""
    forms = {AS_TRAINED: {name: q for name, (_, q) in tensors.items()}}
    for label, roles in probe.what_if:
        forms[label] = {name: requantize(roles, name, x) for name, (x, _) in tensors.items()}
    axes = {name: wiring.further_axes(x, probe.state[AS_TRAINED]) for name, (x, _) in tensors.items()}
    known = {}
    for name, (x, _) in tensors.items():
        known[name.split()[0]] = source(x, axes[name], None if name.startswith("weight") else sizes)
    found = {}
    for label, quantized in forms.items():
        there = {name: (tensors[name][0], q) for name, q in quantized.items() if q is not None}
        rows = jnp.zeros((len(TENSORS), LENGTH), jnp.float32)
        if there:
            sources = [known[name.split()[0]] for name in there]
            vectors = measured(sources, list(there.values()), axes[next(iter(there))])
            rows = rows.at[np.array([TENSORS.index(name) for name in there])].set(vectors)
        found[label] = wiring.align_varying(rows, probe.state[label])[0]
    return found


def _sampled(probe: Probe, gemms: Any, weight: QuantizedArray | None) -> dict[str, jax.Array]:
    """Samples of a layer's GEMMs (their errors) and of its quantised weight (its codes), by label; zeros for others."""
    errors, sampled = (jnp.zeros_like(probe.state[label]) for label in (GEMM_ERRORS, WEIGHT_CODES))
    for name, gemm in gemms.items():
        found = jnp.stack([jnp.float32(1), gemm.error(wiring.further_axes(gemm.a.x, errors))])
        errors = errors.at[list(GEMMS).index(name)].set(wiring.align_varying(found, errors)[0])
    if weight is not None:
        found = jnp.concatenate([jnp.ones(1), codes(weight, wiring.further_axes(weight.data, sampled))])
        sampled = wiring.align_varying(found, sampled)[0]
    return {GEMM_ERRORS: errors, WEIGHT_CODES: sampled}


def _lines(arrays: SampledLines) -> SampledLines:
    x, w = arrays
    return SampledLines(None if x is None else lines(x, -2), None if w is None else lines(w, -1))
