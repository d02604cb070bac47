"""Whether the build has GPU kernels: odd CUDA compilers never break the CPU's build, unless CUDA is demanded."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(__file__).parents[2]
CMAKE = shutil.which("cmake", path=os.pathsep.join([str(pathlib.Path(sys.prefix) / "bin"), os.environ["PATH"]]))
NO_COMPILER_KNOWS = "-DJAXLOWPREC_CUDA_ARCHS=1"  # so that what this machine has does not work either

pytestmark = pytest.mark.skipif(
    not CMAKE or not (SOURCE / "CMakeLists.txt").exists(), reason="needs cmake and the source tree"
)


def configure(folder, *options, **environment):
    """The exit status and the output."""
    variables = {k: v for k, v in os.environ.items() if k not in ("JAXLOWPREC_CUDA", "CUDA_HOME", "CUDA_PATH")}
    command = [CMAKE, "-S", SOURCE, "-B", folder, "-DJAXLOWPREC_MODULE=OFF", *options]
    done = subprocess.run(command, env=variables | environment, capture_output=True, text=True, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def compiler(folder, script):
    """A program that is called nvcc."""
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 1", "does not run"),
        ("echo 'Cuda compilation tools, release 11.8, V11.8.89'", "is of CUDA 11.8; 12.9 or newer is needed"),
        ("echo 'Cuda compilation tools, release 13.0, V13.0.88'", "has no cuda_runtime.h or no libcudart_static.a"),
    ],
)
def test_auto_goes_on_without_a_compiler_that_works(tmp_path, script, reason):
    nvcc = compiler(tmp_path, script)
    status, text = configure(tmp_path / "build", NO_COMPILER_KNOWS, CUDACXX=nvcc)
    assert status == 0, text
    assert "GPU kernels: none: no CUDA compiler (nvcc) was found that works" in text
    assert f"{nvcc} {reason}" in text


@pytest.mark.slow
def test_demanded_without_a_compiler_says_what_to_install(tmp_path):
    status, text = configure(tmp_path, NO_COMPILER_KNOWS, "-DJAXLOWPREC_CUDA=ON", CUDACXX="/nonexistent")
    assert status != 0
    assert "/nonexistent does not run" in text
    assert "nvidia-cuda-nvcc" in text


@pytest.mark.slow
def test_the_variable_chooses_where_the_option_does_not(tmp_path):
    status, text = configure(tmp_path / "off", JAXLOWPREC_CUDA="OFF")
    assert (status, "GPU kernels: none: built with JAXLOWPREC_CUDA=OFF" in text) == (0, True)
    status, text = configure(tmp_path / "odd", JAXLOWPREC_CUDA="maybe")
    assert status != 0
    assert 'JAXLOWPREC_CUDA is "maybe"; needs AUTO, ON or OFF' in text
    status, text = configure(tmp_path / "on", NO_COMPILER_KNOWS, "-DJAXLOWPREC_CUDA=ON", JAXLOWPREC_CUDA="OFF")
    assert status != 0
