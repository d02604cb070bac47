import gc
import os
import re
import sys

import jax
import pytest
from hypothesis import HealthCheck, settings

from jaxlowprec.wiring import native
from tests.helpers import FAST_COMPILATION
from tests.on_gpu import why_only_on_the_cpu
from tests.which_cases import choose, leave_out

ON_GPU = os.environ.get("JAXLOWPREC_TESTS_ON") == "cuda"  # the whole suite, as far as it is not about the CPU

jax.config.update("jax_num_cpu_devices", 8)
settings.register_profile("default", deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
settings.load_profile("default")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--every-case", action="store_true", help="with --slow: no case is left out")
    parser.addoption("--optimized", action="store_true", help="compile as users do, in twice the time")


def pytest_configure(config):
    # The suite is on the CPU, whatever else is there. `-m gpu` compares a GPU with the CPU, and so needs both.
    both = re.search(r"(?<!not )\bgpu\b", config.option.markexpr) is not None
    jax.config.update("jax_platforms", "cuda,cpu" if ON_GPU else None if both else "cpu")
    # Half of the suite's time goes into XLA's compiler. CI runs what matters most as users run their programs.
    if not config.getoption("--optimized"):
        given = os.environ.get("XLA_FLAGS", "").split()
        known = {flag.partition("=")[0] for flag in given}
        added = [flag for flag in FAST_COMPILATION if flag.partition("=")[0] not in known]
        os.environ["XLA_FLAGS"] = " ".join([*given, *added])


def pytest_report_header(config):
    if not config.getoption("--slow"):
        return "slow tests, and most combinations of parameters, are left out: --slow runs them"
    return None


@pytest.hookimpl(trylast=True)  # when all marks and fixtures have given their values
def pytest_generate_tests(metafunc):
    choose(metafunc)


def pytest_collection_modifyitems(config, items):
    for item in items if ON_GPU else ():
        if why := why_only_on_the_cpu(item):
            item.add_marker(pytest.mark.skip(reason=why))
    leave_out(config, items)


def pytest_collection_finish():
    """The garbage collector passes over what lives as long as the process: thousands of tests, and all modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_functions():
    """A module's shapes are its own; kept compiled, the suite would need gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture
def refused_by(monkeypatch, capsys):
    """What a function of a script says on the standard error of wrong arguments, before it ends the process."""

    def run(function, *arguments):
        monkeypatch.setattr(sys, "argv", [function.__module__, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            function()
        said = capsys.readouterr().err
        assert ended.value.code not in (0, None)
        return said if isinstance(ended.value.code, int) else said + ended.value.code

    return run


@pytest.fixture
def isa():
    """The instruction set in use, the best that this machine can run; or the GPU's kernels. tests/cpp holds all
    instruction sets to one set of bytes."""
    if not ON_GPU and not native.available_isas():
        pytest.fail(f"the native library is missing: {native.library().reason}")
    return "cuda" if ON_GPU else native.isa()
