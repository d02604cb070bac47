"""Rules over module names, read as engines read them: which modules are quantised, and to which scheme.

A rule is a module's exact name, or "re:" and a regular expression that is matched from the name's start (`re.match`).
compressed-tensors, transformers and vLLM read the `ignore` entries of a checkpoint's config in this way. slime compares
the same entries with tensor names, where a plain name is a prefix; `disagreements` says where that changes the result.

The default rules name weights that stay in high precision, as published models call them. Every expression ends in
`(\\.|$)` or may end anywhere. So it matches a module's name, the name of its weight and the names inside the module,
and programs that compare rules with tensor names decide in the same way.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.schemes.base import Scheme, require_scheme
from jaxlowprec.checkpoints.schemes.mixed import ConfigGroup, Mixed, why_not_together

HEADS = r"re:(.*\.)?(lm_head|output_layer|embed_out|shared_head\.head|score|classifier|v_head)(\.|$)"
EMBEDDINGS = r"re:(.*\.)?([^.]*embed[^.]*|wte|wpe)(\.|$)"
NORMS = r"re:(.*\.)?([^.]*norm[^.]*|ln_[^.]*)(\.|$)"
ROUTERS = r"re:(.*\.)?(gate|router|wg)(\.|$)"
SHARED_EXPERT_GATES = r"re:.*\.shared_experts?_gate(\.|$)"
VISION = (
    r"re:(.*\.)?(visual|vision_[^.]+|vit|image_newline|mm_projector|multi_modal_projector|multimodal_projector|mlp1"
    r"|audio_[^.]+|aligner)(\.|$)"
)
LINEAR_ATTENTION = r"re:(.*\.)?(linear_attn|conv1d|mamba)(\.|$)"
MULTI_TOKEN_PREDICTION = r"re:(.*\.)?(eh_proj|mtp\.fc)(\.|$)"
INDEXERS = r"re:.*\.indexer(\.|$)"  # DeepSeek-V3.2's sparse attention: it only chooses tokens

KINDS = {
    HEADS: "heads",
    EMBEDDINGS: "embeddings",
    NORMS: "norms",
    ROUTERS: "routers",
    SHARED_EXPERT_GATES: "shared experts' gates",
    VISION: "vision and audio",
    LINEAR_ATTENTION: "linear attention",
    MULTI_TOKEN_PREDICTION: "multi-token prediction's projections",
    INDEXERS: "sparse attention's indexers",
}
"""The kind of modules that each default rule is for."""

DEFAULTS = tuple(KINDS)
"""For Llama, Qwen, Mixtral, DeepSeek and GLM models, with vision and multi-token prediction, and similar names."""


FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Projections that engines hold as one matrix, by that matrix's name: all of them are quantised, or none."""

_FUSED_OF = {part: parts for parts in FUSED.values() for part in parts}
_EXPERT = re.compile(r"(?s)(.*\.experts)\.[0-9]+(\..+)")


@dataclasses.dataclass(frozen=True)
class Rules:
    """Rules that say which modules are left alone.

    Attributes:
        ignore: rules from the user: modules that match are left alone.
        include: rules from the user: modules that match are quantised although `defaults` would leave them alone.
        defaults: rules of `presets`; both others override them.
    """

    ignore: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()

    def __post_init__(self):
        for rule in (*self.ignore, *self.include, *self.defaults):
            check_rule(rule)

    def why_left_alone(self, module: str) -> str | None:
        """The first rule that leaves a module alone, or None if it is to be quantised."""
        if rule := matching(module, self.ignore):
            return rule
        return None if matching(module, self.include) else matching(module, self.defaults)


def check_rule(rule: str) -> None:
    """Raises CheckpointError unless the text is a valid rule."""
    if not rule or rule == "re:":
        raise CheckpointError(f'rule {rule!r} is empty; needs the name of a module, or "re:" and a regular expression')
    try:
        rule.encode()  # as it is written to the config
    except UnicodeEncodeError:
        raise CheckpointError(f"rule {rule!r} is not text in UTF-8, as the names of modules are") from None
    if rule.startswith("re:"):
        try:
            _pattern(rule)
        except re.error as error:
            raise CheckpointError(f"rule {rule!r} is not a valid regular expression: {error}") from None
    elif rule.endswith(".weight"):
        raise CheckpointError(f"rule {rule!r} names a tensor; rules name modules: {rule.removesuffix('.weight')!r}")


def matching(module: str, rules: Iterable[str]) -> str | None:
    """The first rule that matches a module's name, or None."""
    return next((r for r in rules if (_pattern(r).match(module) if r.startswith("re:") else r == module)), None)


@functools.cache
def _pattern(rule: str) -> re.Pattern[str]:
    return re.compile(rule.removeprefix("re:"))


def config_ignore(rules: Rules, left: Collection[str], quantised: Collection[str]) -> list[str]:
    """The `ignore` entry of a config under which exactly the modules of `left` are left alone.

    A rule is kept unchanged if it matches none of the quantised modules, because engines may call modules by other
    names than the checkpoint does. Modules that no such rule covers are written by their exact names.
    """
    written = [
        rule
        for rule in dict.fromkeys((*rules.ignore, *rules.defaults))
        if any(matching(m, [rule]) for m in left) and not any(matching(m, [rule]) for m in quantised)
    ]
    return written + [module for module in sorted(left) if not matching(module, written)]


def splits(left: Collection[str], quantised: Collection[str]) -> list[tuple[str, str]]:
    """Pairs of a module left alone and a quantised one that an engine holds as one matrix.

    These are the projections of `FUSED` that have the same parent, and the experts of one layer.
    """
    parts: dict[str, list[str]] = defaultdict(list)
    for module in sorted(left):
        for unit in fused_units(module):
            parts[unit].append(module)
    found: dict[str, tuple[str, str]] = {}
    for module in sorted(quantised):
        for unit in fused_units(module):
            if unit in parts:
                found.setdefault(unit, (parts[unit][0], module))
    return list(dict.fromkeys(found[unit] for unit in sorted(found)))


def fused_units(module: str) -> list[str]:
    """Names of the units in which an engine holds a module's weight together with others: none, one or two."""
    units = []
    parent, _, last = module.rpartition(".")
    if last in _FUSED_OF:
        units.append(f"{parent}.{'+'.join(_FUSED_OF[last])}")
    if experts := experts_of(module):
        units.append(experts)
    return units


def experts_of(module: str) -> str | None:
    """The name of what holds all experts of a layer, if a module is in one expert.

    >>> experts_of("model.layers.3.mlp.experts.7.up_proj")
    'model.layers.3.mlp.experts'
    """
    expert = _EXPERT.fullmatch(module)
    return expert[1] if expert else None


def fused_siblings(module: str, modules: Collection[str]) -> list[str]:
    """The modules, itself included, whose projections an engine fuses with this one's."""
    parent, dot, last = module.rpartition(".")
    names = [f"{parent}{dot}{part}" for part in _FUSED_OF.get(last, (last,))]
    return [name for name in names if name in modules]


def disagreements(ignore: Sequence[str], modules: Mapping[str, str]) -> list[str]:
    """Sentences that say where other programs read an `ignore` entry differently.

    Arguments:
        ignore: the entries, as in the config.
        modules: maps each module with a weight to the name of its weight's tensor.
    """
    found = []
    slime = _SlimesReading(modules)
    for rule in ignore:
        for named, verb in slime.differs(rule):
            more = f" and {named[1] - 1} more" if named[1] > 1 else ""
            found.append(
                f"rule {rule!r}: slime, which compares it with tensor names, {verb} {named[0]}{more}, "
                "against the rule's meaning for modules"
            )
        if (last := rule.rpartition(".")[2]) in FUSED and rule not in modules:
            found.append(
                f"rule {rule!r}: vLLM leaves the fused {last} alone; the checkpoint has its parts, which are not"
            )
    return found


class _SlimesReading:
    """Modules for which slime reads a rule differently (`slime_matches`).

    A config may name every module. Modules whose tensors begin with a name are neighbours in sorted order, so not all
    modules have to be searched for each rule.
    """

    def __init__(self, modules: Mapping[str, str]):
        self._modules = modules
        self._sorted = sorted((tensor, module) for module, tensor in modules.items())

    def differs(self, rule: str) -> list[tuple[tuple[str, int], str]]:
        """The first module that slime leaves alone, or quantises, against the rule; their number; the verb."""
        if not rule.startswith("re:"):
            apart = self._begin_with(rule)
            return [(apart, "leaves alone")] if apart else []
        here = {m for m in self._modules if matching(m, [rule])}
        there = {m for m, tensor in self._modules.items() if slime_matches(tensor, rule)}
        both = ((there - here, "leaves alone"), (here - there, "quantises"))
        return [((min(apart), len(apart)), verb) for apart, verb in both if apart]

    def _begin_with(self, name: str) -> tuple[str, int] | None:
        """The modules except `name` whose tensors' names begin with it: the first of them, and how many there are."""
        begin = bisect.bisect_left(self._sorted, (name, ""))
        end = bisect.bisect_left(self._sorted, True, begin, key=lambda pair: not pair[0].startswith(name))
        count = end - begin - (name in self._modules)
        if not count:
            return None
        first = next(module for _, module in self._sorted[begin : begin + 2] if module != name)
        return first, count


def slime_matches(tensor: str, rule: str) -> bool:
    """Whether slime's converter and weight synchronisation read a rule as naming this tensor (int4_qat.md 2.3)."""
    if rule.startswith("re:"):
        return bool(_pattern(rule).match(tensor))
    return tensor.startswith(rule)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A scheme, and other schemes for the modules that rules match. The first rule that matches is followed.

    Attributes:
        default: the scheme of all other modules.
        overrides: rules, as in `Rules`, and their schemes.

    Raises:
        TypeError: a scheme that is none.
        CheckpointError: a rule that is not valid, or schemes that no configuration names together.
    """

    default: Scheme
    overrides: tuple[tuple[str, Scheme], ...] = ()

    def __post_init__(self):
        require_scheme("convert", self.default, or_none=False)
        for rule, scheme in self.overrides:
            check_rule(rule)
            require_scheme("convert", scheme, or_none=False)
        if mixed := [scheme for scheme in self.schemes if isinstance(scheme, Mixed)]:
            names = ", ".join(scheme.name for scheme in mixed[0].schemes)
            raise CheckpointError(f"scheme is a Mixed ({names}); give one of its schemes, and the others as overrides")
        if len(self.schemes) > 1 and (why := why_not_together(self.schemes)):
            raise CheckpointError(why)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All different schemes."""
        return tuple(dict.fromkeys((self.default, *(scheme for _, scheme in self.overrides))))

    def of(self, module: str) -> Scheme:
        """The scheme of a module."""
        return next((scheme for rule, scheme in self.overrides if matching(module, [rule])), self.default)


def config_scheme(chosen: Mapping[str, Scheme]) -> Scheme:
    """The scheme that writes the configuration: the only one, or a `Mixed` whose targets name the modules exactly.

    The experts of a layer are named by one expression, since a layer may have hundreds of them. All have one scheme.

    Arguments:
        chosen: the scheme of each quantised module.
    """
    of_scheme: dict[Scheme, dict[str, None]] = defaultdict(dict)
    for module, scheme in sorted(chosen.items()):
        experts = experts_of(module) if scheme.regex_ignores else None
        of_scheme[scheme][rf"re:{re.escape(experts)}\." if experts else module] = None
    if len(of_scheme) == 1:
        return next(iter(of_scheme))
    return Mixed(tuple(ConfigGroup(tuple(targets), scheme) for scheme, targets in of_scheme.items()))


def require_one_scheme_in_a_unit(chosen: Mapping[str, Scheme]) -> None:
    """Raises CheckpointError if weights that engines hold as one matrix have different schemes."""
    first: dict[str, str] = {}
    for module in sorted(chosen):
        for unit in fused_units(module):
            other = first.setdefault(unit, module)
            if chosen[other] != chosen[module]:
                raise CheckpointError(
                    f"{other} would be {chosen[other].name} and {module} {chosen[module].name}, but engines hold them "
                    "as one weight; give both one scheme: a --scheme-for rule must match both or neither"
                )
