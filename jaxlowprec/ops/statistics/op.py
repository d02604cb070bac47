"""The ops that count what quantisation did to an array."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import Format
from jaxlowprec.ops.checks import Implementation, choose
from jaxlowprec.ops.statistics import finish, reference
from jaxlowprec.wiring import native


def _native(name: str, outputs: Callable, **attributes: Any) -> Callable:
    """The kernel's call."""

    def run(*args: jax.Array) -> Sequence[jax.Array]:
        results = [jax.ShapeDtypeStruct(*result) for result in outputs(*args)]
        return jax.ffi.ffi_call(name, results)(*args, **attributes)

    return run


def _native_with_workspace(index: int, name: str, outputs: Callable, **attributes: Any) -> dict[str, Callable]:
    """The kernels' calls by platform: on GPUs parts of a matrix leave what they find in one result more.

    Arguments:
        index: of the op's sizes in `cuda_statistics_workspaces`.
    """

    def with_workspace(x: jax.Array, *args: jax.Array) -> Sequence[jax.Array]:
        one, each = native.library().module.cuda_statistics_workspaces()[index]  # type: ignore[union-attr]
        size = one + each * (math.prod(x.shape[:-2]) - 1)
        *results, _ = _native(name, lambda *args: [*outputs(*args), ((size,), jnp.uint8)], **attributes)(x, *args)
        return results

    return {"cpu": _native(name, outputs, **attributes), "cuda": with_workspace}


def _over_shards(moments: jax.Array, axes: Any) -> jax.Array:
    """Moments of shards as those of the whole; no square overflows."""
    largest = jax.lax.pmax(moments, axes)
    unit = reference.inverse_power(largest[..., 1])
    rms = jnp.sqrt(jax.lax.pmean(jnp.square(moments[..., 1] * unit), axes)) / unit
    return jnp.stack([largest[..., 0], rms], axis=-1)


@functools.cache
def moments_op(implementation: Implementation = None) -> wiring.Op:
    """x [..., R, C] -> float32 [..., 2]; see `reference.moments`."""

    def outputs(x: jax.Array) -> wiring.Shapes:
        return [((*x.shape[:-2], 2), jnp.float32)]

    return wiring.define(
        "jaxlowprec_moments",
        rule=wiring.ShardingRule("... r c -> ... m", reductions=("r", "c"), whole=("m",)),
        outputs=outputs,
        reference=lambda x: [reference.moments(x)],
        native=_native_with_workspace(0, "jaxlowprec_moments", outputs),
        collective=_over_shards,
        **choose("statistics", implementation),
    )


@functools.cache
def outliers_op(implementation: Implementation = None) -> wiring.Op:
    """x [..., R, C], threshold [...] -> int32 [..., C]; see `reference.outliers`."""

    def outputs(x: jax.Array, _: jax.Array) -> wiring.Shapes:
        return [((*x.shape[:-2], x.shape[-1]), jnp.int32)]

    return wiring.define(
        "jaxlowprec_outliers",
        rule=wiring.ShardingRule("... r c, ... -> ... c", reductions=("r",)),
        outputs=outputs,
        reference=lambda x, threshold: [reference.outliers(x, threshold)],
        native=_native("jaxlowprec_outliers", outputs),
        **choose("statistics", implementation),
    )


def _together(fmt: Format) -> tuple[int, int]:
    """How many lines, and how many elements of a line, have to stay on one device."""
    return fmt.length if fmt.tiles else reference.EVERY, reference.run_length(fmt)


def ragged_of(fmt: Format, shape: tuple[int, ...], columnwise: bool) -> tuple[bool, bool]:
    """The argument of `sums_op` for an array of this shape."""
    lines, elements = shape[-2:][:: -1 if columnwise else 1]
    lines_together, together = _together(fmt)
    return lines % lines_together != 0, elements % together != 0


@functools.cache
def sums_op(
    fmt: Format, columnwise: bool, ragged: tuple[bool, bool], implementation: Implementation = None
) -> wiring.Op:
    """x [..., R, C], unit [...], data, scale and, for two-level formats, amax [...] -> [..., LENGTH]; see `reference`.

    Arguments:
        columnwise: codes are those of x's columns, K-major.
        ragged: whether lines are no multiple of what has to stay together, and whether elements of a line are not; of
            `ragged_of`.
    """
    if fmt.scaling == "rows":
        if implementation == "ffi":
            raise NotImplementedError("statistics: scales of rows are counted in pure JAX: there is no kernel yet")
        implementation = "reference"
    lines_together, together = _together(fmt)
    sizes: dict[str, int] = {}
    whole = []
    line, scale_line, element, code, block = f"(l {'k' if fmt.tiles else 'm'})", "l", "(e k)", "(e k)", "e"
    if fmt.packed:
        code = "(e h)"
    if ragged[0]:
        line, scale_line = "l", "lblocks" if fmt.tiles else "l"
    elif not fmt.tiles:
        scale_line = line
    if ragged[1]:
        element, code, block = "e", "ebytes" if fmt.packed else "e", "eblocks"
    x = f"... {element} {line}" if columnwise else f"... {line} {element}"
    scale = "..." if fmt.scaling == "tensor" else f"... {scale_line} {block}"
    if fmt.scaling == "rows":
        scale = f"... {line} one"
        whole.append("one")
    amax = ", ..." if fmt.scaling == "two_level" else ""
    text = f"{x}, ..., ... {line} {code}, {scale}{amax} -> ... s"
    words = set(text.replace("(", " ").replace(")", " ").replace(",", " ").split())
    for factor, size in {"k": together, "h": together // 2, "m": lines_together}.items():
        if f" {factor})" in text:
            sizes[factor] = size
    for factor, is_ragged in zip("le", ragged, strict=True):
        if is_ragged:
            whole += [name for name in (factor, f"{factor}blocks", f"{factor}bytes") if name in words]
    reductions = [factor for factor in "le" if factor not in whole]

    def rows(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, -1, -2) if columnwise else x

    def run_reference(
        x: jax.Array, unit: jax.Array, data: jax.Array, scale: jax.Array, amax: jax.Array | None = None
    ) -> Sequence[jax.Array]:
        return [reference.sums(rows(x), unit, data, scale, amax, fmt)]

    def outputs(x: jax.Array, *_: jax.Array) -> wiring.Shapes:
        return [((*x.shape[:-2], reference.LENGTH), jnp.float32)]

    return wiring.define(
        "jaxlowprec_sums",
        rule=wiring.ShardingRule(text, reductions=reductions, whole=[*whole, "s"], **sizes),
        outputs=outputs,
        reference=run_reference,
        native=_native_with_workspace(1, "jaxlowprec_sums", outputs, format=fmt.attributes, columnwise=columnwise),
        **choose("statistics", implementation),
    )


@functools.cache
def statistics_op(scalings: tuple[str, ...], implementation: Implementation = None) -> wiring.Op:
    """Sums [..., n, LENGTH] and what is known of the n tensors -> their vectors; see `finish.finished`."""

    def outputs(_: jax.Array, amax: jax.Array, *__: jax.Array) -> wiring.Shapes:
        return [((*amax.shape, finish.LENGTH), jnp.float32)]

    return wiring.define(
        "jaxlowprec_statistics",
        rule=wiring.ShardingRule("... n s, ... n, ... n, ... n, ... n c -> ... n v", whole=tuple("nscv")),
        outputs=outputs,
        reference=lambda *args: [finish.finished(args, scalings)],
        native=_native("jaxlowprec_statistics", outputs, scalings=" ".join(scalings)),
        **choose("statistics", implementation),
    )
