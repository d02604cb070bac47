"""The plan that quantises a checkpoint."""

from __future__ import annotations

import bisect
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.conversion.heads import (
    LM_HEAD,
    NOT_LOOKED_UP,
    is_embedding,
    is_head,
    only_copy,
    reading_warnings,
    with_true_tie,
)
from jaxlowprec.checkpoints.conversion.modules import (
    ARRAY,
    GPT_OSS,
    GPTQ_FILE,
    MODELOPT_FILE,
    Weight,
    holds_codes,
    is_quantised,
    is_transposed,
    model_types,
    naming,
    weights_of,
)
from jaxlowprec.checkpoints.conversion.plan import (
    Arrays,
    Job,
    LeftModule,
    Plan,
    copy_job,
    output_specs,
    require_distinct,
)
from jaxlowprec.checkpoints.conversion.rules import (
    KINDS,
    Choice,
    Rules,
    config_ignore,
    config_scheme,
    disagreements,
    experts_of,
    fused_siblings,
    matching,
    require_one_scheme_in_a_unit,
    splits,
)
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.config import quantization_of, with_quantization
from jaxlowprec.checkpoints.files.dtypes import HIGH_PRECISION, amax, numpy_dtype
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.schemes.base import Scheme

ARRAYS = "all experts' weights in one array"
_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.[^.]+")


def plan_quantization(
    source: CheckpointFolder, choice: Choice, rules: Rules, leave_unfit: bool = False, *, for_llama_cpp: bool = False
) -> Plan:
    """The plan that quantises a checkpoint.

    Every matrix `<module>.weight` of bfloat16, float16 or float32 that no rule leaves alone is quantised, and so are
    the experts in arrays that hold all experts of a layer, if the config's model type says how.

    Arguments:
        source: a checkpoint in high precision.
        choice: the format of each new weight.
        rules: which weights are left alone.
        leave_unfit: leave weights alone that their scheme cannot hold, instead of raising an error.
        for_llama_cpp: the result is read by llama.cpp, which decodes embeddings and heads as it does all matrices.

    Raises:
        CheckpointError: the source is quantised already, a weight does not fit, nothing is left to quantise, a rule
            includes an embedding or the only tensor of embedding and head, which no reader would decode, a
            projection that engines fuse with others is left alone without them or has another scheme, or a tensor has
            the name of another's codes or scales.
    """
    config = source.config()
    _require_high_precision(source, config)
    chosen, left = _weights(source, config, choice, rules)
    if not for_llama_cpp:
        left += _embeddings_left(chosen, rules)
    unfit = {m: why for m, weight in chosen.items() if (why := choice.of(m).check(weight.spec.shape))}
    if unfit and not leave_unfit:
        raise CheckpointError(_unfit_message(choice, unfit))
    left += [LeftModule(module, why) for module, why in unfit.items()]
    quantised = {m: weight for m, weight in chosen.items() if m not in unfit}
    if not quantised:
        raise CheckpointError(f"{source.path}: nothing to quantise: every matrix is left alone, {_reasons(left)}")
    left_modules = {entry.module for entry in left}
    _require_whole(left_modules, set(quantised))
    schemes = {module: choice.of(module) for module in quantised}
    require_one_scheme_in_a_unit(schemes)
    ignore = _ignore(rules, left_modules, set(quantised)) if _regexes(choice) else _named(source, left_modules, choice)
    ignore += _untensored_head(set(quantised), ignore, LM_HEAD if _regexes(choice) else "lm_head")
    config, warnings = _config(source, config, config_scheme(schemes).quantization_config(ignore), quantised)
    warnings = [] if for_llama_cpp else warnings + reading_warnings(quantised)
    modules = {m: f"{m}.weight" for m in left_modules if f"{m}.weight" in source.shard_of}
    modules |= {m: weight.tensor if weight.part is None else f"{m}.weight" for m, weight in quantised.items()}
    return Plan(
        shards=_shards(source, schemes, quantised),
        config=config,
        changed=sorted(quantised),
        formats={module: scheme.name for module, scheme in schemes.items()},
        left=sorted(left, key=lambda entry: entry.module),
        warnings=_warnings(rules, choice, ignore, modules, left) + warnings,
        ignore=ignore,
    )


def _config(
    source: CheckpointFolder, config: dict[str, Any], entry: dict[str, Any], quantised: Mapping[str, Weight]
) -> tuple[dict[str, Any], list[str]]:
    """The new config, which says what is true of the new file's head, and warnings."""
    if head := only_copy(source, config, quantised):
        raise CheckpointError(
            f"{source.path}: {head} is the only tensor of the embedding and the head, which are tied: no reader looks "
            "up rows of a quantised one; leave it alone with --ignore"
        )
    config, warnings = with_true_tie(source, config, quantised)
    if "lm_head" in entry:  # of GPTQ's configurations
        entry["lm_head"] = any(is_head(module) for module in quantised)
    return with_quantization(config, entry), warnings


def _embeddings_left(chosen: dict[str, Weight], rules: Rules) -> list[LeftModule]:
    """Takes embeddings out of the chosen weights. Raises CheckpointError if a rule of the user asks for one."""
    found = sorted(module for module in chosen if is_embedding(module))
    for module in found:
        if rule := matching(module, rules.include):
            raise CheckpointError(
                f"rule {rule!r} includes {module}, {NOT_LOOKED_UP}: no reader decodes it; take the rule out, or leave "
                f"the embedding alone with --ignore {module}"
            )
        del chosen[module]
    return [LeftModule(module, NOT_LOOKED_UP) for module in found]


def _untensored_head(quantised: set[str], ignore: list[str], entry: str) -> list[str]:
    """The entry that names a head without a tensor, as that of tied embeddings: readers would look for its codes."""
    named = matching("lm_head", ignore) or any(matching(module, [LM_HEAD]) for module in {*quantised, *ignore})
    return [] if named else [entry]


def _regexes(choice: Choice) -> bool:
    return all(scheme.regex_ignores for scheme in choice.schemes)


def _named(source: CheckpointFolder, left: set[str], choice: Choice) -> list[str]:
    """The config's entry where only names are read. Beside arrays of experts, only modules are named."""
    of_arrays = choice.default.of_expert_arrays
    return sorted(module for module in left if not of_arrays or f"{module}.weight" in source.shard_of)


def _shards(
    source: CheckpointFolder, schemes: Mapping[str, Scheme], quantised: Mapping[str, Weight]
) -> dict[str, list[Job]]:
    amaxes = _Amaxes(source, quantised)
    held: dict[str, list[Weight]] = {}
    for weight in quantised.values():
        held.setdefault(weight.tensor, []).append(weight)

    def job(weight: Weight) -> Job:
        scheme, module = schemes[weight.module], weight.module
        make = None if scheme.of_expert_arrays else functools.partial(_compress, source, scheme, weight, amaxes)
        parts = functools.partial(_by_expert, source, scheme, weight, amaxes) if scheme.of_expert_arrays else None
        decode = functools.partial(_decompress, scheme, module, weight.spec.dtype)
        amax = functools.partial(_amax, scheme, module, amaxes) if scheme.has_tensor_scale else None
        outputs = output_specs(scheme, module, weight.spec)
        return Job(module, outputs, weight.spec.nbytes, make, decode, scheme, weight.spec.shape, amax, parts)

    shards = {}
    for shard, file in source.shards.items():
        shards[shard] = [
            each
            for name in file.header.tensors
            for each in ([job(w) for w in held[name]] if name in held else [copy_job(name, source.spec(name))])
        ]
    require_distinct(source.path, shards)
    return shards


def _compress(source: CheckpointFolder, scheme: Scheme, weight: Weight, amaxes: _Amaxes) -> Arrays:
    amax = _amax(scheme, weight.module, amaxes) if scheme.has_tensor_scale else None
    return _compressed(source, scheme, weight, amaxes, weight.read(source), amax)


def _by_expert(source: CheckpointFolder, scheme: Scheme, weight: Weight, amaxes: _Amaxes) -> Iterator[Arrays]:
    """The tensors of an array of experts, one expert's in memory at a time."""
    for matrix in weight.experts(source):
        yield _compressed(source, scheme, weight, amaxes, matrix[None])


def _compressed(
    source: CheckpointFolder,
    scheme: Scheme,
    weight: Weight,
    amaxes: _Amaxes,
    numbers: np.ndarray,
    amax: float | None = None,
) -> Arrays:
    """The tensors of a weight, or of one expert's part of it."""
    module = weight.module
    try:
        with naming(source, module):
            made = scheme.compress(numbers, amax=amax)
    except CheckpointError:
        amaxes.own(module)  # raises if the weight is not finite, which no scale can hold
        raise
    return {f"{module}{scheme.joint}{suffix}": array for suffix, array in made.items()}


def _amax(scheme: Scheme, module: str, amaxes: _Amaxes) -> float:
    return amaxes.shared(module) if scheme.shares_global_scale else amaxes.own(module)


def _decompress(scheme: Scheme, module: str, dtype: str, tensors: Arrays) -> np.ndarray:
    suffixed = {name.removeprefix(f"{module}{scheme.joint}"): tensor for name, tensor in tensors.items()}
    return scheme.decompress(suffixed, scheme.compute_dtype(np.dtype(numpy_dtype(dtype))))


class _Amaxes:
    """The largest magnitudes of weights. Each is computed once."""

    def __init__(self, source: CheckpointFolder, quantised: Mapping[str, Weight]):
        self._source, self._quantised = source, quantised
        self._known: dict[str, float] = {}

    def own(self, module: str) -> float:
        """The amax of a module's weight. Raises CheckpointError for NaN and infinity, which no scale can hold."""
        if module not in self._known:
            weight = self._quantised[module]
            found = amax(weight.read(self._source))
            if not np.isfinite(found):
                raise CheckpointError(
                    f"{self._source.path}: tensor {weight.tensor!r} holds NaN or infinity, which no scale can hold"
                )
            self._known[module] = found
        return self._known[module]

    def shared(self, module: str) -> float:
        """The largest amax of the projections that an engine fuses with this one: they all scale by it."""
        return max(self.own(sibling) for sibling in fused_siblings(module, self._quantised))


def _weights(
    source: CheckpointFolder, config: dict[str, Any], choice: Choice, rules: Rules
) -> tuple[dict[str, Weight], list[LeftModule]]:
    """The weights to quantise by their modules, and the matrices that are left alone."""
    transposed = is_transposed(config)
    chosen: dict[str, Weight] = {}
    left: list[LeftModule] = []
    for name in source.shard_of:
        spec, of_arrays = source.spec(name), choice.default.of_expert_arrays
        if len(spec.shape) < 2:
            continue
        found = {_module(name): Weight(_module(name), name, spec)}
        if ARRAY.fullmatch(name) and not of_arrays and transposed is not None:
            found = weights_of(name, spec, transposed) or found
        reasons = {module: _why_left_alone(w, rules, of_arrays, config) for module, w in found.items()}
        if all(reasons.values()):
            left.append(LeftModule(_module(name), next(iter(reasons.values())) or ""))
        else:
            left += [LeftModule(module, why) for module, why in reasons.items() if why]
            chosen |= {module: found[module] for module, why in reasons.items() if not why}
    return chosen, left


def _why_left_alone(weight: Weight, rules: Rules, of_arrays: bool, config: dict[str, Any]) -> str | None:
    """Why a matrix is left alone; None if it is to be quantised."""
    name, shape = weight.tensor, weight.spec.shape
    is_array = len(shape) == 3 and bool(_FUSED_EXPERTS.fullmatch(name))
    if weight.part is None and not name.endswith(".weight") and not (of_arrays and is_array):
        if not is_array:
            return "not the weight of a module"
        interleaved = any(kind in GPT_OSS for kind in model_types(config))
        return ARRAYS + (" with gate and up in turns, which gpt_oss_mxfp4 holds" if interleaved else "")
    if rule := rules.why_left_alone(weight.module):
        return f"default: {KINDS[rule]}" if rule in KINDS else f"rule {rule}"
    if of_arrays and not is_array:
        return "not an array of experts"
    if len(shape) > 2 and not of_arrays:
        return f"{len(shape)} dimensions"
    return None if weight.spec.dtype in HIGH_PRECISION else f"dtype {weight.spec.dtype}"


def _module(name: str) -> str:
    """A tensor's module; a tensor that is not the weight of a module is called by its own name."""
    return name.removesuffix(".weight")


def _ignore(rules: Rules, left: set[str], quantised: set[str]) -> list[str]:
    """The config's entry."""
    ignore = config_ignore(rules, left, quantised)
    experts = _experts_to_ignore(left, quantised, ignore)
    ignore = [rule for rule in ignore if not _lies_in(rule, experts)]
    return ignore + [rf"re:{re.escape(parent)}(\.|$)" for parent in sorted(experts)]


def _experts_to_ignore(left: set[str], quantised: set[str], ignore: list[str]) -> list[str]:
    """Parents of experts that are held in one array and that no rule names yet; none lies inside another."""
    names, expressions = set(ignore), [rule for rule in ignore if rule.startswith("re:")]
    found: list[str] = []
    parents = {f[1] for m in left if (f := _FUSED_EXPERTS.fullmatch(m))}
    parents -= {parent for module in quantised if (parent := experts_of(module))}
    for parent in sorted(parents, key=lambda name: f"{name}."):
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
    if is_quantised(source):
        entry = quantization_of(config) or {}
        if entry.get("config_groups") == {}:
            remedy = ", though none of its weights are; take quantization_config out of config.json"
        if not entry and not (source.path / MODELOPT_FILE).is_file():
            raise CheckpointError(f"{source.path}: is quantised already: it has {GPTQ_FILE}{remedy}")
        method = entry.get("quant_method") or entry.get("quant_algo") or "modelopt"
        raise CheckpointError(f"{source.path}: is quantised already: its config says {method!r}{remedy}")
    for name in source.shard_of:
        spec = source.spec(name)
        if holds_codes(name, spec):
            raise CheckpointError(f"{source.path}: is quantised already: it holds {name!r} of {spec.dtype}{remedy}")


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


def _unfit_message(choice: Choice, unfit: Mapping[str, str]) -> str:
    names = sorted(unfit)
    who = " and ".join(sorted({choice.of(name).name for name in names}))
    listed = "; ".join(f"{name}: {unfit[name]}" for name in names[:8])
    more = f"; and {len(names) - 8} more" if len(names) > 8 else ""
    return (
        f"{who} cannot hold {len(names)} weights ({listed}{more}); leave them in high precision with "
        "--leave-unfit or --ignore, or choose another --group-size"
    )


def _reasons(left: list[LeftModule]) -> str:
    return ", ".join(f"{count} for {reason}" for reason, count in Counter(e.reason for e in left).most_common())


def _warnings(
    rules: Rules, choice: Choice, ignore: list[str], modules: Mapping[str, str], left: list[LeftModule]
) -> list[str]:
    found = [
        f"rule {rule!r} matches no weight"
        for rule in (*rules.ignore, *rules.include, *(rule for rule, _ in choice.overrides))
        if not any(matching(module, [rule]) for module in modules)
    ]
    asked = {*rules.ignore, *rules.defaults}  # all programs read expressions for experts' arrays alike
    found += disagreements([rule for rule in ignore if rule in asked or not rule.startswith("re:")], modules)
    if fused := [entry.module for entry in left if entry.reason.startswith(ARRAYS)]:
        found.append(
            f"{len(fused)} arrays that hold all experts of a layer are left alone, such as {fused[0]}: the config's "
            "model type does not say how gate and up, inputs and outputs are ordered in them"
        )
    return found
