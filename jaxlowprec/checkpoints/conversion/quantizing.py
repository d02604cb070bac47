"""The plan that quantises a checkpoint."""

from __future__ import annotations

import bisect
import functools
import re
from collections import Counter
from collections.abc import Mapping

import numpy as np

from jaxlowprec.checkpoints.conversion.modules import naming
from jaxlowprec.checkpoints.conversion.plan import Arrays, Job, Left, Plan, copy_job, output_specs, require_distinct
from jaxlowprec.checkpoints.conversion.presets import KINDS
from jaxlowprec.checkpoints.conversion.rules import (
    Rules,
    config_ignore,
    disagreements,
    fused_siblings,
    matching,
    splits,
)
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.config import quantization_of, with_quantization
from jaxlowprec.checkpoints.files.dtypes import HIGH_PRECISION, QUANTISED, numpy_dtype
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.schemes.base import Scheme
from jaxlowprec.checkpoints.schemes.magnitudes import amax

_QUANTISED_NAMES = re.compile(
    r".*(\.(weight_packed|weight_scale|weight_scale_inv|weight_scale_2|weight_zero_point|qweight|qzeros)|_blocks|_scale_inv)"
)
_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.[^.]+")


def plan_quantization(source: CheckpointFolder, scheme: Scheme, rules: Rules, leave_unfit: bool = False) -> Plan:
    """The plan that quantises a checkpoint.

    Every matrix `<module>.weight` of bfloat16, float16 or float32 that no rule leaves alone is quantised.

    Arguments:
        source: a checkpoint in high precision.
        scheme: the format of the new weights.
        rules: which weights are left alone.
        leave_unfit: leave weights alone that the scheme cannot hold, instead of raising an error.

    Raises:
        CheckpointError: the source is quantised already, a weight does not fit, nothing is left to quantise, a
            projection that engines fuse with others is left alone without them, or a tensor has the name of another's
            codes or scales.
    """
    config = source.config()
    _require_high_precision(source, config)
    kinds = {name: _kind(name, source.spec(name), rules) for name in source.shard_of}
    chosen = {name.removesuffix(".weight"): name for name, kind in kinds.items() if kind is None}
    left = [Left(_module(name), kind) for name, kind in kinds.items() if kind]
    unfit = {m: why for m, name in chosen.items() if (why := scheme.check(source.spec(name).shape))}
    if unfit and not leave_unfit:
        raise CheckpointError(_unfit_message(scheme, unfit))
    left += [Left(module, why) for module, why in unfit.items()]
    quantised = {m: name for m, name in chosen.items() if m not in unfit}
    if not quantised:
        raise CheckpointError(f"{source.path}: nothing to quantise: every matrix is left alone, {_reasons(left)}")
    left_modules = {entry.module for entry in left}
    _require_whole(left_modules, set(quantised))
    ignore = _ignore(rules, left_modules, set(quantised)) if scheme.regex_ignores else sorted(left_modules)
    modules = {**{m: f"{m}.weight" for m in left_modules if f"{m}.weight" in kinds}, **quantised}
    return Plan(
        shards=_shards(source, scheme, quantised),
        config=with_quantization(config, scheme.quantization_config(ignore)),
        changed=sorted(quantised),
        left=sorted(left, key=lambda entry: entry.module),
        warnings=_warnings(rules, ignore, modules, left),
        ignore=ignore,
    )


def _shards(source: CheckpointFolder, scheme: Scheme, quantised: Mapping[str, str]) -> dict[str, list[Job]]:
    amaxes = _Amaxes(source, quantised)
    module_of = {name: module for module, name in quantised.items()}

    def job(name: str) -> Job:
        spec, module = source.spec(name), module_of.get(name)
        if module is None:
            return copy_job(name, spec)
        make = functools.partial(_compress, source, scheme, module, name, amaxes)
        decode = functools.partial(_decompress, scheme, module, spec.dtype)
        return Job(module, output_specs(scheme, module, spec), spec.nbytes, make, decode)

    shards = {shard: [job(name) for name in file.header.tensors] for shard, file in source.shards.items()}
    require_distinct(source.path, shards)
    return shards


def _compress(source: CheckpointFolder, scheme: Scheme, module: str, name: str, amaxes: _Amaxes) -> Arrays:
    amax = None
    if scheme.format.has_tensor_scale:
        amax = amaxes.shared(module) if scheme.shares_global_scale else amaxes.own(module)
    try:
        with naming(source, module):
            made = scheme.compress(source.read(name), amax=amax)
    except CheckpointError:
        amaxes.own(module)  # raises if the weight is not finite, which no scale can hold
        raise
    return {f"{module}.{suffix}": array for suffix, array in made.items()}


def _decompress(scheme: Scheme, module: str, dtype: str, tensors: Arrays) -> np.ndarray:
    suffixed = {name.removeprefix(f"{module}."): tensor for name, tensor in tensors.items()}
    return scheme.decompress(suffixed, scheme.compute_dtype(np.dtype(numpy_dtype(dtype))))


class _Amaxes:
    """The largest magnitudes of weights. Each is computed once."""

    def __init__(self, source: CheckpointFolder, quantised: Mapping[str, str]):
        self._source, self._quantised = source, quantised
        self._known: dict[str, float] = {}

    def own(self, module: str) -> float:
        """The amax of a module's weight. Raises CheckpointError for NaN and infinity, which no scale can hold."""
        if module not in self._known:
            name = self._quantised[module]
            found = amax(self._source.read(name))
            if not np.isfinite(found):
                raise CheckpointError(
                    f"{self._source.path}: tensor {name!r} holds NaN or infinity, which no scale can hold"
                )
            self._known[module] = found
        return self._known[module]

    def shared(self, module: str) -> float:
        """The largest amax of the projections that an engine fuses with this one: they all scale by it."""
        return max(self.own(sibling) for sibling in fused_siblings(module, self._quantised))


def _kind(name: str, spec: TensorSpec, rules: Rules) -> str | None:
    """Why a tensor is left alone; "" if it is not a matrix; None if it is to be quantised."""
    if len(spec.shape) < 2:
        return ""
    if not name.endswith(".weight"):
        if len(spec.shape) == 3 and _FUSED_EXPERTS.fullmatch(name):
            return "all experts' weights in one array"
        return "not the weight of a module"
    if rule := rules.why_left_alone(name.removesuffix(".weight")):
        return f"default: {KINDS[rule]}" if rule in KINDS else f"rule {rule}"
    if len(spec.shape) > 2:
        return f"{len(spec.shape)} dimensions"
    return None if spec.dtype in HIGH_PRECISION else f"dtype {spec.dtype}"


def _module(name: str) -> str:
    """A tensor's module; a tensor that is not the weight of a module is called by its own name."""
    return name.removesuffix(".weight")


def _ignore(rules: Rules, left: set[str], quantised: set[str]) -> list[str]:
    """The config's entry. It also names the head of a model with tied embeddings, which has no tensor."""
    ignore = config_ignore(rules, left, quantised)
    head = ["lm_head"] if rules.why_left_alone("lm_head") and not matching("lm_head", ignore) else []
    experts = _experts_to_ignore(left, ignore)
    ignore = [rule for rule in ignore if not _lies_in(rule, experts)]
    return ignore + [rf"re:{re.escape(parent)}(\.|$)" for parent in sorted(experts)] + head


def _experts_to_ignore(left: set[str], ignore: list[str]) -> list[str]:
    """Parents of experts that are held in one array and that no rule names yet; none lies inside another."""
    names, expressions = set(ignore), [rule for rule in ignore if rule.startswith("re:")]
    found: list[str] = []
    for parent in sorted({f[1] for m in left if (f := _FUSED_EXPERTS.fullmatch(m))}, key=lambda name: f"{name}."):
        asked = f"{parent}.0.gate_proj"
        if asked not in names and not _lies_in(asked, found) and not matching(asked, expressions):
            found.append(parent)
    return found


def _lies_in(module: str, parents: list[str]) -> bool:
    """Whether a module lies in one of these, which are sorted as in `_experts_to_ignore`: only one can hold it."""
    at = bisect.bisect_right(parents, module, key=lambda parent: f"{parent}.")
    return at > 0 and module.startswith(f"{parents[at - 1]}.")


def _require_high_precision(source: CheckpointFolder, config: dict) -> None:
    remedy = "; start from the checkpoint in high precision, or run `jaxlowprec dequantize` first"
    if entry := quantization_of(config):
        method = entry.get("quant_method") or entry.get("quant_algo")
        raise CheckpointError(f"{source.path}: is quantised already: its config says {method!r}{remedy}")
    for name in source.shard_of:
        dtype = source.spec(name).dtype
        if _QUANTISED_NAMES.fullmatch(name) or dtype in QUANTISED:
            raise CheckpointError(f"{source.path}: is quantised already: it holds {name!r} of {dtype}{remedy}")


def _require_whole(left: set[str], quantised: set[str]) -> None:
    """Raises CheckpointError if only some of the weights that engines hold as one matrix are quantised."""
    pairs = splits(left, quantised)
    if pairs:
        alone, other = pairs[0]
        more = f" ({len(pairs)} such pairs)" if len(pairs) > 1 else ""
        raise CheckpointError(
            f"{alone} would be left alone and {other} quantised, but engines hold them as one weight{more}; "
            f"leave both alone or neither: --ignore or --include rules must match both"
        )


def _unfit_message(scheme: Scheme, unfit: Mapping[str, str]) -> str:
    names = sorted(unfit)
    listed = "; ".join(f"{name}: {unfit[name]}" for name in names[:8])
    more = f"; and {len(names) - 8} more" if len(names) > 8 else ""
    return (
        f"{scheme.name} cannot hold {len(names)} weights ({listed}{more}); leave them in high precision with "
        "--leave-unfit or --ignore, or choose another --group-size"
    )


def _reasons(left: list[Left]) -> str:
    return ", ".join(f"{count} for {reason}" for reason, count in Counter(e.reason for e in left).most_common())


def _warnings(rules: Rules, ignore: list[str], modules: Mapping[str, str], left: list[Left]) -> list[str]:
    found = [
        f"rule {rule!r} matches no weight"
        for rule in (*rules.ignore, *rules.include)
        if not any(matching(module, [rule]) for module in modules)
    ]
    asked = {*rules.ignore, *rules.defaults}  # all programs read expressions for experts' arrays alike
    found += disagreements([rule for rule in ignore if rule in asked or not rule.startswith("re:")], modules)
    if fused := [entry.module for entry in left if entry.reason.startswith("all experts")]:
        found.append(
            f"{len(fused)} arrays that hold all experts of a layer are left alone, such as {fused[0]}: only weights of "
            "single experts are quantised"
        )
    return found
