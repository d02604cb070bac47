"""Every test here is marked `gpu`, and compares a GPU with the CPU in one process.

JAXLOWPREC_GPU_TESTS_ON=cpu puts another of the CPU's devices in the GPU's place: it shows that the tests work.
"""

import os

import jax
import pytest

from jaxlowprec.wiring import native

DEVICE = os.environ.get("JAXLOWPREC_GPU_TESTS_ON", "cuda")


def pytest_collectstart(collector):
    """The mark is there before functions are multiplied by their parameters: tests for GPUs keep all cases."""
    if isinstance(collector, pytest.Module):
        collector.add_marker(pytest.mark.gpu)


def devices_in_place_of_gpus():
    """Those under test, or a skip that says why there are none."""
    try:
        return jax.devices("cpu")[1:] if DEVICE == "cpu" else jax.devices("cuda")
    except RuntimeError as error:
        pytest.skip(f"no CUDA device here: {error}")


@pytest.fixture
def cpu():
    return jax.devices("cpu")[0]


@pytest.fixture
def gpus():
    found = devices_in_place_of_gpus()
    if why := native.why_not(found[0].platform if DEVICE == "cpu" else "cuda"):
        pytest.fail(why)
    return found


@pytest.fixture
def gpu(gpus):
    return gpus[0]


@pytest.fixture(autouse=True)
def needs_a_gpu(gpus):
    """So that a test which runs processes of its own is skipped as well."""
