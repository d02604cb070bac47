import jax
import pytest
from hypothesis import HealthCheck, settings

from jaxlowprec import native

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
settings.register_profile("default", deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
settings.load_profile("default")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="slow; run with --slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_functions():
    """A module's shapes are its own; kept compiled, the suite would need gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(params=native.available_isas() or ["no native library"])
def isa(request):
    """Every instruction set that this machine can run, one after the other."""
    if not native.available_isas():
        pytest.fail(f"the native library is missing: {native.library().reason}")
    before = native.isa()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(before)
