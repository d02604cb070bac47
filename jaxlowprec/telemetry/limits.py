"""Findings in words: statistics of a run that are beyond a limit, and what to do about them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jaxlowprec.arguments import cut, shown
from jaxlowprec.recipes.roles import GEMMS
from jaxlowprec.telemetry.measures import Statistics
from jaxlowprec.telemetry.recording import Record, Run

LONGEST_NAME = 200
"""Characters of a name that tables and findings show."""

Names = list[tuple[str, str]]  # layers and tensors
Checks = Mapping[str, tuple[Callable[[Statistics, "Limits", np.ndarray], np.ndarray], str]]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits from which on a statistic is a finding. The defaults leave a healthy run in 4 bits without one.

    Attributes:
        underflow: most of the elements that may become zero. Of a normal distribution a tenth does in 4 bits, and of
            gradients, whose magnitudes differ more, a quarter.
        saturation: most of the elements that may be cut off. Scales that are rounded down cut off some hundredths.
        floor: most of the blocks that may have the smallest scale. Of gradients with an outlier, as healthy runs have
            them, up to a third do, and their elements are far too small to matter.
        sqnr: least of a tensor, in decibels.
        gemm_sqnr: least of a GEMM's result, which has the errors of both operands.
        bias: largest magnitude.
        worse: decibels by which the SQNR may fall below its median over the run. That of a GEMM's result may also be
            far above what its operands' errors let expect, as of gradients of rank one early in training, where it says
            nothing of the quantisation: it may fall to as much below that.
        jump: octaves by which the root mean square may change from one record to the next, and stay changed.
        gradient_fall: the same of a gradient that falls: in the first steps those of all layers do, by 6 to 8 octaves.
    """

    underflow: float = 0.4
    saturation: float = 0.1
    floor: float = 0.5
    sqnr: float = 12.0
    gemm_sqnr: float = 6.0
    bias: float = 0.05
    worse: float = 6.0
    jump: float = 8.0
    gradient_fall: float = 12.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """One statistic beyond its limit.

    Attributes:
        layer, tensor: where; "" for a number of the whole run, such as the loss.
        statistic: its name.
        value: its latest value.
        since: the first step of the records up to the latest one in which it was beyond the limit without a break.
        problem: what is wrong, in words.
        remedy: what to do; "" if that depends on the rest.
    """

    layer: str
    tensor: str
    statistic: str
    value: float
    since: int
    problem: str
    remedy: str = ""

    @property
    def text(self) -> str:
        """The finding in one line."""
        where = f"{cut(self.tensor, LONGEST_NAME)} of {cut(self.layer, LONGEST_NAME)}: " if self.layer else ""
        return f"{where}{self.problem} since step {self.since}{'; ' if self.remedy else ''}{self.remedy}"

    @property
    def severity(self) -> int:
        """2: numbers are lost for good; 1: a statistic is beyond its limit."""
        return 2 if self.statistic in ("nonfinite", "poisoned", "loss") else 1


def findings(run: Run, limits: Limits | None = None) -> list[Finding]:
    """The statistics beyond their limits in the latest record of a run, the worst first."""
    if not isinstance(run, Run):
        raise TypeError(f"telemetry.findings: run={shown(run)}; needs what telemetry.load returns")
    limits = Limits() if limits is None else limits
    if not run.records:
        return []
    found = list(_of_scalars(run))
    for gemms, checks in ((False, _CHECKS), (True, _GEMM_CHECKS)):
        names = [name for name in run.records[-1].names if ", " not in name[1] and (name[1] in GEMMS) == gemms]
        if names:
            seen = [record.of(names) for record in run.records]
            found += _beyond(run, names, seen, checks, limits)
            found += _jumps(run.steps, names, seen, limits)
    return sorted(found, key=lambda f: (-f.severity, f.since, f.layer, f.tensor))


def _of_scalars(run: Run) -> Iterator[Finding]:
    for name, value in run.records[-1].scalars.items():
        if not math.isfinite(value):
            since = _since(run, lambda record, name=name: not math.isfinite(record.scalars.get(name, 0.0)))
            yield Finding("", "", name, value, since, f"{cut(name, LONGEST_NAME)} is {value}")


def _beyond(run: Run, names: Names, seen: list[Statistics], checks: Checks, limits: Limits) -> Iterator[Finding]:
    """The findings about tensors or GEMMs' results. `seen`: their statistics in each record."""
    usual = _usual(np.array([statistics.sqnr for statistics in seen]))
    gemms = names[0][1] in _OPERANDS
    expected = [_expected(record, names) if gemms else math.inf for record in run.records]
    for statistic, (check, text) in checks.items():
        beyond = np.array([check(s, limits, np.minimum(usual, e)) for s, e in zip(seen, expected, strict=True)])
        values = getattr(seen[-1], statistic)
        for i in np.flatnonzero(beyond[-1]):
            layer, tensor = names[i]
            within = np.flatnonzero(~beyond[:, i])
            since = run.records[within[-1] + 1 if within.size else 0].step
            words = text.format(value=values[i], percent=100 * values[i], limit=limits, usual=usual[i])
            remedy = _remedy(statistic, tensor, run.records[-1].layers[layer])
            yield Finding(layer, tensor, statistic, float(values[i]), since, words, remedy)


def _usual(sqnr: np.ndarray) -> np.ndarray:
    """The median of each column, [records, tensors] -> [tensors]; infinite values, of tensors of zeros, left out."""
    finite = np.isfinite(sqnr)
    ascending = np.sort(np.where(finite, sqnr, np.inf), axis=0)
    count, columns = finite.sum(axis=0), np.arange(sqnr.shape[1])
    lower, upper = ascending[np.maximum(count - 1, 0) // 2, columns], ascending[count // 2, columns]
    return np.where(count > 0, np.where(count % 2 > 0, upper, (lower + upper) / 2), -np.inf)


def _expected(record: Record, names: Names) -> np.ndarray:
    """The SQNR of GEMMs' results if the errors of their operands are independent of each other and of the operands;
    infinite where no operand was measured."""
    errors = np.zeros(len(names))
    for i in (0, 1):
        operands = [(layer, _OPERANDS[gemm][i]) for layer, gemm in names]
        errors += np.nan_to_num(record.of(operands).square_error)
    return np.where(errors > 0, -10 * np.log10(np.where(errors > 0, errors, 1)), np.inf)


def _jumps(steps: list[int], names: Names, seen: list[Statistics], limits: Limits) -> Iterator[Finding]:
    """The latest change of a tensor's magnitude by orders of magnitude, if it lasts."""
    rms = np.array([statistics.rms for statistics in seen])
    least, most = (np.where(rms > 0, rms, other) for other in (np.inf, 0.0))
    for i in np.flatnonzero(most.max(axis=0) >= 2.0**limits.jump * least.min(axis=0)):
        yield from _jump(names[i], [(s, v) for s, v in zip(steps, rms[:, i], strict=True) if v > 0], limits)


def _jump(name: tuple[str, str], seen: list[tuple[int, float]], limits: Limits) -> Iterator[Finding]:
    """The latest lasting change of one tensor's magnitude, from its steps and root mean squares."""

    def beyond(after: float, before: float) -> bool:
        falls = name[1].startswith("gradient") and after < before
        return abs(math.log2(after / before)) >= (limits.gradient_fall if falls else limits.jump)

    for (_, before), (step, after) in reversed(list(itertools.pairwise(seen))):
        if not beyond(after, before):
            continue
        if all(beyond(seen[-1][1], usual) for usual in (before, seen[0][1])):
            change = f"{'fell' if after < before else 'rose'} by 2^{abs(math.log2(after / before)):.0f}"
            problem = f"its root mean square {change}, to {after:.2g},"
            yield Finding(*name, "rms", float(seen[-1][1]), step, problem, _REMEDIES["jump"])
        return


_OPERANDS = {
    "fprop": ("input rowwise", "weight columnwise"),
    "dgrad": ("gradient rowwise", "weight rowwise"),
    "wgrad": ("input columnwise", "gradient columnwise"),
}

_CHECKS: Checks = {
    "nonfinite": (lambda s, limit, usual: s.nonfinite > 0, "{percent:.2g} % of the elements are infinite or NaN"),
    "poisoned": (
        lambda s, limit, usual: s.poisoned > 0,
        "{percent:.2g} % of the elements are lost to an infinite or NaN neighbour",
    ),
    "underflow": (lambda s, limit, usual: s.underflow > limit.underflow, "{percent:.0f} % underflow"),
    "saturation": (lambda s, limit, usual: s.saturation > limit.saturation, "{percent:.0f} % are cut off"),
    "floor": (lambda s, limit, usual: s.floor > limit.floor, "{percent:.0f} % of the blocks have the smallest scale"),
    "sqnr": (
        lambda s, limit, usual: (s.sqnr < limit.sqnr) | (s.sqnr < usual - limit.worse),
        "the SQNR is {value:.1f} dB, over the run {usual:.1f} dB",
    ),
    "bias": (lambda s, limit, usual: abs(s.bias) > limit.bias, "rounding shifts the sum by {percent:.0f} %"),
}

_GEMM_CHECKS: Checks = {
    "sqnr": (
        lambda s, limit, usual: (s.sqnr < limit.gemm_sqnr) | (s.sqnr < usual - limit.worse),
        "the SQNR of the result is {value:.1f} dB, over the run {usual:.1f} dB",
    ),
}

_REMEDIES = {
    "nonfinite": "find the layer where they enter first; lower the learning rate or skip such steps",
    "poisoned": "find where the infinite or NaN elements enter",
    "underflow": "rotate it, give it more bits, or keep the layer in high precision",
    "saturation": "its scale is too small: raise margin= of DelayedScaling, or use current scaling; in NVFP4 look for "
    "the outlier that sets the tensor's scale",
    "floor": "an outlier sets the tensor's scale; rotate it, or use a format whose blocks have scales of their own",
    "sqnr": "give it more bits, or keep the layer in high precision",
    "bias": "round it stochastically",
    "jump": "look at what changed then: a rescaled weight, a schedule, a bad batch",
}


def _remedy(statistic: str, tensor: str, tensors: dict[str, Statistics]) -> str:
    """The advice on a finding; a recipe of `what_if=` that measures better comes first."""
    better = {
        name.removeprefix(f"{tensor}, "): float(getattr(found, statistic))
        for name, found in tensors.items()
        if name.startswith(f"{tensor}, ")
    }
    now = float(getattr(tensors[tensor], statistic))
    sign = -1 if statistic == "sqnr" else 1
    helps = {label: value for label, value in better.items() if sign * abs(value) < sign * abs(now)}
    if helps and statistic not in ("nonfinite", "poisoned"):
        label = min(helps, key=lambda label: sign * abs(helps[label]))
        becomes = f"{helps[label]:.1f} dB" if statistic == "sqnr" else f"{100 * helps[label]:.0f} %"
        return f"{label} would bring it to {becomes}"
    return _REMEDIES[statistic]


def _since(run: Run, beyond) -> int:
    """The first step of the unbroken records up to the latest one for which this holds."""
    since = run.records[-1].step
    for record in reversed(run.records):
        if not beyond(record):
            break
        since = record.step
    return since
