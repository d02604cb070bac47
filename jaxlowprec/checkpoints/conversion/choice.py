"""Which scheme a weight is converted to, and how a config names the modules of several schemes."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping

from jaxlowprec.checkpoints.conversion.rules import check_rule, experts_of, fused_units, matching
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.schemes.base import Scheme
from jaxlowprec.checkpoints.schemes.mixed import ConfigGroup, Mixed, why_not_together


@dataclasses.dataclass(frozen=True)
class Choice:
    """A scheme, and other schemes for the modules that rules match. The first rule that matches is followed.

    Attributes:
        default: the scheme of all other modules.
        overrides: rules, as in `Rules`, and their schemes.

    Raises:
        CheckpointError: a rule that is not valid, or schemes that no configuration names together.
    """

    default: Scheme
    overrides: tuple[tuple[str, Scheme], ...] = ()

    def __post_init__(self):
        for rule, _ in self.overrides:
            check_rule(rule)
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
