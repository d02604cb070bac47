"""Says whether a recipe runs on a platform, and what computes it there: for `supported` and for `jaxlowprec info`.

The answers are the library's own: its table of kernels, the checks that a call would meet, and the plan by which GPUs'
GEMMs are chosen (`ops/scaled_matmul/cuda.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import one_of
from jaxlowprec.arrays.formats import Format
from jaxlowprec.layers.delayed_scaling import init_state
from jaxlowprec.layers.grouped_matmul import grouped_matmul
from jaxlowprec.layers.linear import linear
from jaxlowprec.layers.operands import Gemms
from jaxlowprec.ops.checks import default_implementation
from jaxlowprec.ops.scaled_matmul import cuda, portable
from jaxlowprec.recipes.autocast import resolve
from jaxlowprec.recipes.composed import PerLayer
from jaxlowprec.recipes.qat import QAT
from jaxlowprec.recipes.roles import GEMMS, Recipe, Roles
from jaxlowprec.recipes.transformer_engine import Calibrating
from jaxlowprec.wiring import native

PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")

_OPS = ("quantize", "dequantize", "fake_quantize", "hadamard_transform", "scaled_matmul", "grouped_matmul")

_LEAST_CAPABILITY = 8.0  # of the GPUs that the kernels are compiled for

_TARGETS = {  # the op's FFI target; of Int4 the op's own
    "quantize": ("jaxlowprec_quantize", "jaxlowprec_int4_quantize"),
    "amax": ("jaxlowprec_amax",) * 2,
    "dequantize": ("jaxlowprec_dequantize", "jaxlowprec_int4_dequantize"),
    "fake_quantize": ("jaxlowprec_quantize", "jaxlowprec_int4_fake_quantize"),
    "hadamard_transform": ("jaxlowprec_hadamard",) * 2,
    "activation": ("jaxlowprec_activation",) * 2,
    "norm": ("jaxlowprec_norm",) * 2,
    "statistics": ("jaxlowprec_sums",) * 2,
}
_PRODUCT_TARGETS = {  # of two quantised operands; of one in high precision
    "scaled_matmul": ("jaxlowprec_scaled_matmul", "jaxlowprec_weight_only_matmul"),
    "grouped_matmul": ("jaxlowprec_grouped_matmul", "jaxlowprec_grouped_weight_only"),
}


class Supported(NamedTuple):
    """The answer of `supported`.

    Attributes:
        supported: whether it runs.
        reason: what computes it; or why it does not run, and the remedy.
    """

    supported: bool
    reason: str


class Runs(NamedTuple):
    """How one operation runs on a platform.

    Attributes:
        how: by the platform's kernels ("native"), by kernels that stand in for instructions which only other platforms
            have ("emulated"), by XLA as on any platform without kernels ("portable"), in pure JAX that defines the
            bytes ("reference"), or not at all ("not").
        why: what computes it, or why no kernel does.
    """

    how: Literal["native", "emulated", "portable", "reference", "not"]
    why: str


def supported(recipe: Recipe | None, *, platform: str | None = None, op: str | None = None) -> Supported:
    """Whether a recipe runs on a platform of this process, and what computes it there.

    It compiles and runs nothing. What has no kernel on a platform runs in pure JAX, which counts as supported, and the
    reason says so: the result is the same within the documented bounds, but slower. `jaxlowprec verify` tells whether a
    device keeps to them.

    Arguments:
        recipe: None: high precision. Of `PerLayer` the recipe of every rule is asked, of `Int4QAT` and `WeightQAT`
            that of the layers that they choose, of `Custom` that of a layer without a name.
        platform: "cpu", "cuda" or "gpu", "rocm", "tpu"; default: JAX's default backend.
        op: only one part of the recipe: "quantize", "dequantize", "fake_quantize", "hadamard_transform",
            "scaled_matmul" or "grouped_matmul". None: the quantisations and the GEMMs of `linear`.

    Returns:
        A pair: whether it runs, and the reason.

    Raises:
        TypeError: the recipe is not a recipe.
        ValueError: the platform or the op is none of those.

    >>> import jaxlowprec as jlp
    >>> ok, why = jlp.supported(jlp.NVFP4BlockScaling())
    >>> ok
    True
    >>> tiles = jlp.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)  # would lie on two groups
    >>> jlp.supported(tiles, op="grouped_matmul").supported
    False
    """
    who = "supported"
    recipe = resolve(who, recipe)
    one_of(who, "platform", platform, None, *PLATFORMS)
    one_of(who, "op", op, None, *_OPS)
    platform = _named(platform or jax.default_backend())
    if absent := _why_absent(platform):
        return Supported(False, absent)
    found = {own: _one(own, platform, op) for own in _recipes(recipe)}
    refused = {own: answer for own, answer in found.items() if not answer.supported}
    named = isinstance(recipe, PerLayer)
    reasons = [f"{type(own).__name__}: " * named + reason for own, (_, reason) in (refused or found).items()]
    where = platform if platform != "cuda" else f"GPU of compute capability {native.compute_capability()}"
    return Supported(not refused, f"{where}: " + ". ".join(reasons))


def runs(
    op: str,
    platform: str,
    formats: tuple[Format, ...] = (),
    capability: float | None = None,
) -> Runs:
    """How an op runs.

    Arguments:
        op: one of those of `supported`, "amax", "activation", "norm", or "statistics": what telemetry counts.
        platform: "cpu", "cuda", or another one of JAX's.
        formats: the format of an array; of a product, of both operands, or of a weight by an array in high precision.
        capability: of the GPU; default: that of this process's.
    """
    chosen = default_implementation()
    why_not = native.why_not(platform)
    if chosen in ("portable", "reference"):
        why_not = f"JAXLOWPREC_IMPLEMENTATION is {chosen}"
    if why_not is not None:
        if chosen == "reference" or (platform == "cpu" and chosen != "portable"):
            return Runs("reference", why_not)
        return Runs("portable", f"{_portable(op, platform, formats)}, because {why_not}")
    if op == "statistics" and any(f.scaling == "rows" for f in formats):
        return Runs("reference", "what scales of rows did is counted in pure JAX: there is no kernel yet")
    if op in ("quantize", "fake_quantize") and (rules := [f.without_kernel for f in formats if f.without_kernel]):
        why = f"{_portable(op, platform, formats)}: {rules[0]} has no kernel"
        return Runs("reference" if platform == "cpu" else "portable", why)
    targets = _TARGETS.get(op) or _PRODUCT_TARGETS[op]
    weight_only = len(formats) == 1 and formats[0].weight_only if op in _TARGETS else len(formats) == 1
    if platform == "cuda":
        capability = capability or native.compute_capability()
        return _on_cuda(op, formats, capability)
    if (target := targets[weight_only]) not in native.library().module.cpu_handlers():  # type: ignore[union-attr]
        return Runs("reference", f"the compiled library has no {target}")
    kernels = f"{native.isa()} kernels"
    if op in _TARGETS or weight_only:
        return Runs("native", kernels)
    if formats[0].element == "int8":
        return Runs("native", f"{kernels}, exact integer dot products")
    if formats[0].packed and formats[1].packed:
        return Runs("emulated", f"{kernels}, exact integer dot products instead of FP4 tensor cores")
    return Runs("emulated", f"{kernels}, codes decoded to float32 instead of FP8 tensor cores")


def _portable(op: str, platform: str, formats: tuple[Format, ...]) -> str:
    """How an op runs where there are no kernels."""
    if op in _TARGETS:
        reference = "the reference in pure JAX, compiled by XLA"
        if platform == "tpu" and op == "quantize" and all(map(_has_kernel_for_tpus, formats)):
            return f"a Pallas kernel on one device and in shard_map, else {reference}"
        return reference
    if len(formats) == 1:
        exact = formats[0].served_dtype or ("bfloat16" if portable.is_exact_in_bfloat16(formats[0]) else "float32")
        product = f"XLA's product with the weight decoded to {exact}"
    elif not all(map(portable.is_exact_in_bfloat16, formats)):
        product = "XLA's product of float32 at the highest precision"
    elif formats[0].element == "int8":
        product = "XLA's product of 8-bit integers, exact sums in int32"
    elif formats[0].scaling in ("tensor", "rows") and platform in portable.FLOAT8_DOTS:
        product = "XLA's product of FP8 codes"
    else:
        product = "XLA's product of operands decoded to bfloat16"
    if op != "grouped_matmul":
        return product
    by_chunks = platform != "tpu" or all(fmt.element == "int8" for fmt in formats)
    return product + (", a chunk of each group's rows at a time" if by_chunks else ", by ragged_dot")


def _has_kernel_for_tpus(fmt: Format) -> bool:
    """Whether the kernels that quantise on TPUs serve a format."""
    if fmt.weight_only:
        return fmt.scale_dtype == "bfloat16" and fmt.length in (16, 32, 64, 128)
    return not fmt.chooses_scales and fmt.scaling != "rows"


def _on_cuda(op: str, formats: tuple[Format, ...], capability: float | None) -> Runs:
    """How an op runs on GPUs of that compute capability."""
    if capability is None or capability < _LEAST_CAPABILITY:
        return Runs(
            "not",
            f"the CUDA kernels need {_LEAST_CAPABILITY} or newer; use such a GPU, or set JAXLOWPREC_DISABLE_NATIVE=1 "
            "to run pure JAX",
        )
    if op in _TARGETS:
        return Runs("native", "CUDA kernels")
    if len(formats) == 1:
        return Runs(
            "native",
            "up to 16 rows of bfloat16 by NVFP4 or Int4: codes decoded in registers; others: XLA's GEMM of the decoded "
            "weight",
        )
    problem, route = cuda.route(formats[0], formats[1], round(10 * capability))
    if problem:
        return Runs("portable", f"{_portable(op, 'cuda', formats)}, because {problem}")
    own = formats[0].element == "int8" and formats[1].packed
    return Runs("native", route if own else f"{route}, by cuBLASLt")


def _named(platform: str) -> str:
    """The platform; "gpu" is the kind of GPU that is here, NVIDIA's if there is none."""
    if platform != "gpu" or native.compute_capability() is not None:
        return "cuda" if platform == "gpu" else platform
    return "rocm" if _why_absent("rocm") is None else "cuda"


def _why_absent(platform: str) -> str | None:
    """Why this process has no such device, and the remedy; None if it has one."""
    if platform == "cuda":
        if native.compute_capability() is not None:
            return None
        wanted = jax.config.jax_platforms  # type: ignore[attr-defined]
        here = f" (JAX_PLATFORMS={wanted})" if wanted else ""
        kernels = native.why_not("cuda")
        return (
            f"cuda: JAX finds no NVIDIA GPU in this process{here}; needs a GPU, its driver, and JAX's CUDA plugin: pip "
            'install "jax[cuda13]"' + (f". And {kernels}" if kernels else "")
        )
    try:
        jax.local_devices(backend=platform)
    except native.NO_PLATFORM as error:
        return f"{platform}: {native.why_no_platform(error)}; choose another platform, or install JAX's backend for it"
    return None


def _recipes(recipe: Recipe | None) -> Iterator[Recipe | None]:
    """The recipes that layers follow, each once."""
    if not isinstance(recipe, PerLayer):
        yield dataclasses.replace(recipe, include=(".*",), exclude=()) if isinstance(recipe, QAT) else recipe  # type: ignore[type-var]
        return
    rules = (own for of_rule in (*(own for _, own in recipe.rules), recipe.default) for own in _recipes(of_rule))
    yield from (own for own in dict.fromkeys(rules) if own is not None)


def _one(recipe: Recipe | None, platform: str, op: str | None) -> Supported:
    """The answer for a recipe that all layers follow, without the platform."""
    grouped = op == "grouped_matmul"
    problem = None if recipe is None or isinstance(recipe, Calibrating) else _why_refused(recipe, grouped)
    if problem:
        return Supported(False, problem)
    roles = Roles(None, None, None) if recipe is None else recipe.roles("grouped_linear" if grouped else "linear")
    formats = roles.formats
    if recipe is None or not formats:
        return Supported(True, "nothing is quantised: XLA's products in high precision")
    asked: dict[str, Runs] = {}  # what is computed, in words
    if op not in _PRODUCT_TARGETS or grouped:
        name = op if op in _TARGETS else "quantize"
        asked |= {f"{name} {fmt}": runs(str(name), platform, (fmt,)) for fmt in formats}
    if op is None or op in _PRODUCT_TARGETS:
        for gemms, operands in _gemms(roles, recipe.backward_override).items():
            way = runs(op or "scaled_matmul", platform, operands) if operands else Runs("native", "XLA")
            named = ["high precision"] * (2 - len(operands)) + [str(fmt) for fmt in operands]
            asked[f"{gemms} {' by '.join(named)}" if operands else f"{gemms} in high precision"] = way
    possible = all(way.how != "not" for way in asked.values())
    said = dict.fromkeys(way for way in asked.values() if possible or way.how == "not")
    parts = (f"{', '.join(what for what, how in asked.items() if how == way)}: {_by(way)}" for way in said)
    return Supported(possible, "; ".join(parts))


def _by(way: Runs) -> str:
    return f"the reference in pure JAX, because {way.why}" if way.how == "reference" else way.why


def _gemms(roles: Roles, backward_override: Any) -> dict[str, tuple[Format, ...]]:
    """The three GEMMs, and the formats of their operands: one for a weight only, none in high precision."""
    gemms = Gemms(roles, backward_override)
    found: dict[str, tuple[Format, ...]] = {
        gemm: tuple(role.format for role in getattr(gemms, gemm) or ()) for gemm in GEMMS
    }
    if roles.ste is not None and roles.weight is not None:
        found["fprop"] = (roles.weight.format,)
    alike: dict[tuple[Format, ...], list[str]] = {}
    for gemm, operands in found.items():
        alike.setdefault(operands, []).append(gemm)
    return {" and ".join(names): operands for operands, names in alike.items()}


@functools.lru_cache(maxsize=64)
def _why_refused(recipe: Recipe, grouped: bool) -> str | None:
    """The error of a layer that cannot follow the recipe, or None: both passes are traced, not run."""
    roles = recipe.roles("grouped_linear" if grouped else "linear")
    n = math.lcm(128, *(fmt.length for fmt in roles.formats))
    x, w = jax.ShapeDtypeStruct((n, n), jnp.bfloat16), jax.ShapeDtypeStruct((n, n), jnp.float32)

    def layer(x, w):
        delayed, experts = recipe.delayed, 1 if grouped else None
        options = {"recipe": recipe, "state": None if delayed is None else init_state(delayed, num_experts=experts)}
        y = grouped_matmul(x, w[None], jnp.full(1, n, jnp.int32), **options) if grouped else linear(x, w, **options)
        return (y if delayed is None else y[0]).sum()

    try:
        jax.eval_shape(jax.grad(layer, argnums=(0, 1)), x, w)
    except (NotImplementedError, TypeError, ValueError) as error:
        return str(error)
    return None
