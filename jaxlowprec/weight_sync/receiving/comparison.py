"""Compares the served weights with those that were sent."""

from __future__ import annotations

import numpy as np

from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.receiving.weights import Weights
from jaxlowprec.weight_sync.sending.source import WeightSource


def differences(source: WeightSource, receiver: Receiver | Weights) -> list[str]:
    """Names of tensors that differ in a byte, a dtype or a shape, or that one side lacks.

    >>> from jaxlowprec.weight_sync.transports.in_process import InProcess
    >>> from jaxlowprec.weight_sync.sending.session import push
    >>> receiver = Receiver()
    >>> _ = push(WeightSource({"a": np.ones(2), "b": np.ones(2)}), InProcess(receiver))
    >>> differences(WeightSource({"a": np.ones(2), "b": np.zeros(2), "c": np.ones(1)}), receiver)
    ['b', 'c']
    """
    live = receiver.dump()
    differ = []
    for name, sent in source.arrays():
        served = live.pop(name, None)
        if served is None or not _same(sent, served):
            differ.append(name)
    return differ + list(live)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = f"u{one.dtype.itemsize}"
    return np.array_equal(one.view(bits), other.view(bits))
