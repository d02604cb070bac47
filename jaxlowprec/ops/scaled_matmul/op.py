"""The NVFP4 GEMM op."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.formats import BLOCK
from jaxlowprec.ops.implementation import Implementation, choose
from jaxlowprec.ops.scaled_matmul import reference


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """One variant of the op.

    Attributes:
        a_tiles, b_tiles: 16x16 blocks in an operand.
        ragged_rows, ragged_columns: M or N is no multiple of 16 (it matters for tiles).
        bias, accumulate: optional operands that are there.
        gelu: tanh-GELU after the bias.
        pre_activation: what GELU was applied to is a second result.
        out_dtype: of the results.
    """

    a_tiles: bool
    b_tiles: bool
    ragged_rows: bool
    ragged_columns: bool
    bias: bool
    accumulate: bool
    gelu: bool
    pre_activation: bool
    out_dtype: Any


def _rule(spec: MatmulSpec) -> wiring.Rule:
    """M and N split (with tiles in whole ones), K splits in whole blocks and is then summed over."""
    whole = []

    def lines(factor, tiles, ragged):
        if not tiles:
            return factor, factor
        if not ragged:
            return f"({factor} t)", factor
        whole.extend((factor, f"{factor}blocks"))
        return factor, f"{factor}blocks"

    (m, m_scale), (n, n_scale) = (
        lines("m", spec.a_tiles, spec.ragged_rows),
        lines("n", spec.b_tiles, spec.ragged_columns),
    )
    operands = [f"... {m} (k h)", f"... {m_scale} k", "...", f"... {n} (k h)", f"... {n_scale} k", "..."]
    operands += [f"... {n}"] * spec.bias + [f"... {m} {n}"] * spec.accumulate
    results = [f"... {m} {n}"] * (1 + spec.pre_activation)
    sizes = {"h": BLOCK // 2} | ({"t": BLOCK} if " t)" in m + n else {})
    return wiring.Rule(f"{', '.join(operands)} -> {', '.join(results)}", reductions=("k",), whole=whole, **sizes)


@functools.cache
def matmul_op(spec: MatmulSpec, implementation: Implementation):
    """a and b as data, scale and amax, then bias float32 [..., N] and accumulate [..., M, N] where the spec has them
    -> [..., M, N], and the pre-activation."""

    def outputs(a_data, a_scale, a_amax, b_data, *_):
        shape = (*a_data.shape[:-1], b_data.shape[-2])
        return [(shape, spec.out_dtype)] * (1 + spec.pre_activation)

    def extras(rest):
        rest = list(rest)
        return rest.pop(0) if spec.bias else None, rest.pop(0) if spec.accumulate else None

    def finish(y, rest):
        return reference.finish(y, *extras(rest), spec.gelu, spec.pre_activation, spec.out_dtype)

    def run_reference(a_data, a_scale, a_amax, b_data, b_scale, b_amax, *rest):
        y = reference.accumulate_blocks(a_data, a_scale, b_data, b_scale, spec.a_tiles, spec.b_tiles)
        return finish(reference.scale_products(y, a_amax, b_amax), rest)

    def run_native(*operands):
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs(*operands)]
        return jax.ffi.ffi_call("jaxlowprec_scaled_matmul", results)(
            *operands,
            a_tiles=spec.a_tiles,
            b_tiles=spec.b_tiles,
            bias=spec.bias,
            accumulate=spec.accumulate,
            gelu=spec.gelu,
        )

    def when_reduced(axes, a_data, a_scale, a_amax, b_data, b_scale, b_amax, *rest):
        """With K split, partial sums (their tensor scales applied) meet in float32 before the rest of the epilogue."""
        plain = dataclasses.replace(
            spec, bias=False, accumulate=False, gelu=False, pre_activation=False, out_dtype=jnp.dtype("float32")
        )
        (partial,) = matmul_op(plain, implementation)(a_data, a_scale, a_amax, b_data, b_scale, b_amax)
        return finish(jax.lax.psum(partial, axes), rest)

    return wiring.define(
        "jaxlowprec_scaled_matmul",
        rule=_rule(spec),
        outputs=outputs,
        reference=run_reference,
        native=run_native,
        when_reduced=when_reduced,
        **choose("scaled_matmul", implementation),
    )
