"""What a layer's product measures of itself on the steps that are recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.statistics.finish import LENGTH
from jaxlowprec.recipes.roles import GEMMS, Roles
from jaxlowprec.telemetry.counting import Quantized, measured, source
from jaxlowprec.telemetry.group_sampling import RowsByWeights, WithinGroups
from jaxlowprec.telemetry.probes import AS_TRAINED, GEMM_ERRORS, TENSORS, WEIGHT_CODES, Probe
from jaxlowprec.telemetry.sampling import Gemm, codes, lines


def measure(
    probe: Probe,
    tensors: Mapping[str, tuple[jax.Array, Quantized | None]],
    requantize: Callable[[Roles, str, jax.Array], Quantized | None],
    sizes: jax.Array | None,
) -> dict[str, jax.Array]:
    """What quantisation did to tensors of a layer: by label, float32 [len(TENSORS), LENGTH], zeros for the others.

    Arguments:
        tensors: by name (see `TENSORS`), an array and what it was quantised to, or None.
        requantize: quantises a tensor, given by its name, as other roles say.
        sizes: of the groups of rows of inputs and gradients; None: they are not in groups.
    """

    def counted(tensors: dict[str, Any]) -> dict[str, jax.Array]:
        # Without a barrier XLA computes both branches on a GPU.
        tensors = jax.lax.optimization_barrier(tensors)
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

    def nothing(_: Any) -> dict[str, jax.Array]:
        labels = (AS_TRAINED, *(label for label, _ in probe.what_if))
        return {label: jnp.zeros_like(probe.state[label]) for label in labels}

    return jax.lax.cond(probe.on, counted, nothing, dict(tensors))


def sample(
    probe: Probe, gemms: Mapping[str, Gemm | RowsByWeights | WithinGroups], weight: QuantizedArray | None
) -> dict[str, jax.Array]:
    """What samples of a layer's GEMMs and of its quantised weight show, by label; zeros for the other GEMMs."""
    state = {label: probe.state[label] for label in (GEMM_ERRORS, WEIGHT_CODES)}

    def taken(operands: Any) -> dict[str, jax.Array]:
        gemms, weight = jax.lax.optimization_barrier(operands)
        errors, sampled = (jnp.zeros_like(leaf) for leaf in state.values())
        for name, gemm in gemms.items():
            found = jnp.stack([jnp.float32(1), gemm.error(wiring.further_axes(gemm.a.x, errors))])
            errors = errors.at[list(GEMMS).index(name)].set(wiring.align_varying(found, errors)[0])
        if weight is not None:
            found = jnp.concatenate([jnp.ones(1), codes(weight, wiring.further_axes(weight.data, sampled))])
            sampled = wiring.align_varying(found, sampled)[0]
        return {GEMM_ERRORS: errors, WEIGHT_CODES: sampled}

    return jax.lax.cond(probe.on, taken, lambda _: jax.tree.map(jnp.zeros_like, state), (dict(gemms), weight))


def kept_lines(probe: Probe, x: jax.Array | None, w: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Columns of x and rows of w, as lines, for the GEMMs of the backward pass; zeros if nothing is measured."""

    def taken(operands: Any) -> Any:
        x, w = jax.lax.optimization_barrier(operands)
        return None if x is None else lines(x, -2), None if w is None else lines(w, -1)

    def nothing(operands: Any) -> Any:
        made = [jnp.zeros(found.shape, found.dtype) for found in jax.tree.leaves(shapes)]
        return jax.tree.unflatten(jax.tree.structure(shapes), wiring.align_varying(operands, made)[1])

    shapes = jax.eval_shape(taken, (x, w))
    return jax.lax.cond(probe.on, taken, nothing, (x, w))
