"""What is wrong with a run, in words: statistics beyond a limit, and what to do about them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from jaxlowprec.recipes.roles import GEMMS
from jaxlowprec.telemetry.measures import Statistics
from jaxlowprec.telemetry.recording import Record, Run


@dataclasses.dataclass(frozen=True)
class Limits:
    """From where on a statistic is a finding. The defaults leave a healthy run in 4 bits without one.

    Attributes:
        underflow: most of the elements that may become zero. Of a normal distribution a tenth does in 4 bits, and of
            gradients, whose magnitudes differ more, a quarter.
        saturation: most of the elements that may be cut off. Scales that are rounded down cut off some hundredths.
        floor: most of the blocks that may have the smallest scale.
        sqnr: least of a tensor, in decibels.
        gemm_sqnr: least of a GEMM's result, which has the errors of both operands.
        bias: largest magnitude.
        worse: decibels by which the SQNR may fall below its median over the run. That of a GEMM's result may also be
            far above what its operands' errors let expect, as of gradients of rank one early in training, where it says
            nothing of the quantisation: it may fall to as much below that.
        jump: octaves by which the root mean square may change from one record to the next, and stay changed.
    """

    underflow: float = 0.4
    saturation: float = 0.1
    floor: float = 0.02
    sqnr: float = 12.0
    gemm_sqnr: float = 6.0
    bias: float = 0.05
    worse: float = 6.0
    jump: float = 8.0


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
        where = f"{self.tensor} of {self.layer}: " if self.layer else ""
        return f"{where}{self.problem} since step {self.since}{'; ' if self.remedy else ''}{self.remedy}"

    @property
    def severity(self) -> int:
        """2: numbers are lost for good; 1: a statistic is beyond its limit."""
        return 2 if self.statistic in ("nonfinite", "poisoned", "loss") else 1


def findings(run: Run, limits: Limits | None = None) -> list[Finding]:
    """What is beyond its limit in the latest record of a run, the worst first."""
    limits = Limits() if limits is None else limits
    if not run.records:
        return []
    found = list(_of_scalars(run))
    latest = run.records[-1]
    for layer, tensors in latest.layers.items():
        for tensor in tensors:
            if ", " not in tensor:
                found += _beyond(run, layer, tensor, limits)
                found += _jump(run, layer, tensor, limits)
    return sorted(found, key=lambda f: (-f.severity, f.since, f.layer, f.tensor))


def _of_scalars(run: Run) -> Iterator[Finding]:
    for name, value in run.records[-1].scalars.items():
        if not math.isfinite(value):
            since = _since(run, lambda record, name=name: not math.isfinite(record.scalars.get(name, 0.0)))
            yield Finding("", "", name, value, since, f"{name} is {value}")


def _beyond(run: Run, layer: str, tensor: str, limits: Limits) -> Iterator[Finding]:
    """What is beyond its limit, of a tensor or of a GEMM's result."""
    usual = _usual_sqnr(run, layer, tensor)
    for name, (beyond, text) in (_GEMM_CHECKS if tensor in GEMMS else _CHECKS).items():

        def is_beyond(record: Record, beyond=beyond) -> bool:
            tensors = record.layers.get(layer, {})
            return tensor in tensors and beyond(tensors[tensor], limits, min(usual, _expected(tensors, tensor)))

        if not is_beyond(run.records[-1]):
            continue
        statistics = run.records[-1].layers[layer][tensor]

        value, since = float(getattr(statistics, name)), _since(run, is_beyond)
        words = text.format(value=value, percent=100 * value, limit=limits, usual=usual)
        remedy = _remedy(name, tensor, run.records[-1].layers[layer])
        yield Finding(layer, tensor, name, value, since, words, remedy)


def _jump(run: Run, layer: str, tensor: str, limits: Limits) -> Iterator[Finding]:
    """The latest change of a tensor's magnitude by orders of magnitude, if it lasts."""
    seen = [(step, v) for step, v in zip(run.steps, run.series(layer, tensor, "rms"), strict=True) if v > 0]
    for (_, before), (step, after) in reversed(list(itertools.pairwise(seen))):
        if abs(math.log2(after / before)) < limits.jump:
            continue
        if min(abs(math.log2(seen[-1][1] / usual)) for usual in (before, seen[0][1])) >= limits.jump:
            change = f"{'fell' if after < before else 'rose'} by 2^{abs(math.log2(after / before)):.0f}"
            problem = f"its root mean square {change}, to {after:.2g},"
            yield Finding(layer, tensor, "rms", seen[-1][1], step, problem, _REMEDIES["jump"])
        return


_OPERANDS = {
    "fprop": ("input rowwise", "weight columnwise"),
    "dgrad": ("gradient rowwise", "weight rowwise"),
    "wgrad": ("input columnwise", "gradient columnwise"),
}

_CHECKS = {
    "nonfinite": (lambda s, limit, usual: s.nonfinite > 0, "{percent:.2g} % of the elements are infinite or NaN"),
    "poisoned": (
        lambda s, limit, usual: s.poisoned > 0,
        "{percent:.2g} % of the elements are lost to an infinite or NaN neighbour",
    ),
    "underflow": (lambda s, limit, usual: s.underflow > limit.underflow, "{percent:.0f} % underflow"),
    "saturation": (lambda s, limit, usual: s.saturation > limit.saturation, "{percent:.0f} % are cut off"),
    "floor": (lambda s, limit, usual: s.floor > limit.floor, "{percent:.0f} % of the blocks have the smallest scale"),
    "sqnr": (
        lambda s, limit, usual: s.sqnr < limit.sqnr or s.sqnr < usual - limit.worse,
        "the SQNR is {value:.1f} dB, over the run {usual:.1f} dB",
    ),
    "bias": (lambda s, limit, usual: abs(s.bias) > limit.bias, "rounding shifts the sum by {percent:.0f} %"),
}

_GEMM_CHECKS = {
    "sqnr": (
        lambda s, limit, usual: s.sqnr < limit.gemm_sqnr or s.sqnr < usual - limit.worse,
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
    """What to do; what `what_if=` measured says so first."""
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


def _usual_sqnr(run: Run, layer: str, tensor: str) -> float:
    """The median over the run; infinite values, of tensors of zeros, left out."""
    values = sorted(v for v in run.series(layer, tensor, "sqnr") if math.isfinite(v))
    return values[len(values) // 2] if values else -math.inf


def _expected(tensors: dict[str, Statistics], gemm: str) -> float:
    """The SQNR of a GEMM's result if the errors of its operands are independent of each other and of the operands;
    infinite for other tensors, and where no operand was measured."""
    errors = [float(tensors[name].square_error) for name in _OPERANDS.get(gemm, ()) if name in tensors]
    return -10 * math.log10(sum(errors)) if sum(errors) > 0 else math.inf


def _since(run: Run, beyond) -> int:
    """The first step of the unbroken records up to the latest one for which this holds."""
    since = run.records[-1].step
    for record in reversed(run.records):
        if not beyond(record):
            break
        since = record.step
    return since
