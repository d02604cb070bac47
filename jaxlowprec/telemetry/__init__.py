"""Telemetry: the effect of quantisation on tensors while a model trains, measured, recorded and shown."""

from jaxlowprec.telemetry.limits import Finding, Limits, findings
from jaxlowprec.telemetry.measures import Statistics, statistics
from jaxlowprec.telemetry.probes import TENSORS, collecting, init, read, value_and_grad
from jaxlowprec.telemetry.recording import Record, Recorder, Run, load
from jaxlowprec.telemetry.scopes import stacked

__all__ = [
    "TENSORS",
    "Finding",
    "Limits",
    "Record",
    "Recorder",
    "Run",
    "Statistics",
    "collecting",
    "findings",
    "init",
    "load",
    "read",
    "stacked",
    "statistics",
    "value_and_grad",
]
