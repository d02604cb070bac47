"""The same computation on two devices."""

import jax
import numpy as np

from tests.gpu.conftest import DEVICE
from tests.helpers import assert_same_bytes, assert_same_numbers

ON_A_GPU = DEVICE == "cuda"


def run_on(device, function, *args):
    """A function, jitted, on one device; its results in the host's memory."""
    with jax.default_device(device):
        return jax.tree.map(np.asarray, jax.jit(function)(*jax.device_put(args, device)))


def assert_same_bytes_on(devices, function, *args, same=assert_same_bytes):
    """Every byte of the results agrees between devices."""
    first, *others = (run_on(device, function, *args) for device in devices)
    for other in others:
        same(other, first)


def assert_same_numbers_on(devices, function, *args):
    """The same, except that a NaN may be any NaN: arithmetic gives each device's own."""
    assert_same_bytes_on(devices, function, *args, same=assert_same_numbers)


def environment(**variables):
    """For a process that has the same device in the GPU's place."""
    return (
        {"JAX_PLATFORMS": "cuda,cpu" if ON_A_GPU else "cpu", "JAXLOWPREC_GPU_TESTS_ON": DEVICE}
        | variables
        | ({} if ON_A_GPU else {"JAX_NUM_CPU_DEVICES": "8"})
    )
