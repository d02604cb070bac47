"""What is built: which of the CPU's instruction sets; and whether there are GPU kernels.

Odd CUDA compilers never break the CPU's build, unless CUDA is demanded.
"""

import os
import pathlib
import re
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


def sets_for(processor, *options):
    """What cmake/instruction_sets.cmake chooses for a kind of processor."""
    given = [f"-DCMAKE_SYSTEM_PROCESSOR={processor}", *options, "-P", SOURCE / "cmake" / "instruction_sets.cmake"]
    done = subprocess.run([CMAKE, *given], capture_output=True, text=True, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


EVERY_SET = "portable, avx2, avx512, avx512_amx, avx512_bf16"


@pytest.mark.parametrize(
    ("given", "built"),
    [
        ("all", EVERY_SET),
        ("", EVERY_SET),
        ("portable", "portable"),
        ("avx2", "portable, avx2"),
        ("avx512", "portable, avx512"),
        ("avx2,avx512_bf16", "portable, avx2, avx512, avx512_bf16"),
        ("avx512_amx", "portable, avx512, avx512_amx"),
        ("avx512 avx2", "portable, avx2, avx512"),
    ],
)
def test_the_instruction_sets_that_are_named_are_built(given, built):
    assert sets_for("x86_64", f"-DJAXLOWPREC_ISAS={given}") == (0, f"-- CPU kernels: {built} (JAXLOWPREC_ISAS={given})")
    assert sets_for("aarch64", f"-DJAXLOWPREC_ISAS={given}") == (
        0,
        f"-- CPU kernels: portable (JAXLOWPREC_ISAS={given})",
    )


def test_an_unknown_instruction_set_is_refused():
    for processor in ("x86_64", "aarch64"):
        status, text = sets_for(processor, "-DJAXLOWPREC_ISAS=avx2,mmx")
        assert status != 0
        assert 'JAXLOWPREC_ISAS is "avx2,mmx"; needs all, native, portable, or some of avx2, avx512, ' in text


@pytest.mark.parametrize(("processor", "built"), [("x86_64", EVERY_SET), ("AMD64", EVERY_SET), ("aarch64", "portable")])
def test_native_asks_no_processor_where_it_compiles_for_another(processor, built):
    status, text = sets_for(processor, "-DJAXLOWPREC_ISAS=native", "-DCMAKE_CROSSCOMPILING=ON")
    assert (status, f"CPU kernels: {built} (" in text) == (0, True), text


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/cpuinfo").exists(), reason="knows the processor from /proc/cpuinfo")
def test_native_is_this_processor_in_a_build_folder_of_another(tmp_path):
    facts = pathlib.Path("/proc/cpuinfo").read_text()
    has = set(re.search(r"^(?:flags|Features)\s*: (.*)", facts, re.M)[1].split()).issuperset
    built = "portable"
    if has({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}):
        fast = has({"avx512_bf16", "avx512vbmi"}) and "GenuineIntel" not in facts
        built += ", avx512"
        built += ", avx512_amx" if has({"amx_tile", "amx_int8"}) else ""
        built += ", avx512_bf16" if fast else ""
    elif has({"avx2", "fma", "f16c"}):
        built += ", avx2"
    (tmp_path / "CMakeCache.txt").write_text("jlp_status:STRING=0\njlp_compiled:BOOL=TRUE\n")
    _, text = configure(tmp_path, "-DJAXLOWPREC_CUDA=OFF", "-DJAXLOWPREC_ISAS=native")
    assert f"CPU kernels: {built} (" in text, text
