"""What `make wheel` refuses: sdists and wheels that lack something, or have what is not for them."""

import subprocess
import tarfile
import zipfile

import pytest

from tests.scripts.stand_ins import SOURCE

SCRIPTS = SOURCE / "scripts"
pytestmark = pytest.mark.skipif(not (SCRIPTS / "check_sdist.sh").exists(), reason="not in the source tree")
NEEDED = (
    *("pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "xla_ffi/bindings/module.cc"),
    *("cmake/FindJaxlowprecCuda.cmake", "jaxlowprec/__init__.py", "jaxlowprec/py.typed"),
)


def check(script, *arguments):
    return subprocess.run([SCRIPTS / script, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def sdist(tmp_path):
    def make(*names):
        path = tmp_path / "jaxlowprec-1.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(f"jaxlowprec-1/{name}"))
        return path

    return make


def test_an_sdist_with_all_that_a_build_needs_is_taken(sdist):
    assert check("check_sdist.sh", sdist(*NEEDED)).returncode == 0


@pytest.mark.parametrize("missing", NEEDED)
def test_an_sdist_that_lacks_what_a_build_needs_is_refused(sdist, missing):
    done = check("check_sdist.sh", sdist(*(name for name in NEEDED if name != missing)))
    assert done.returncode == 1 and f"lacks {missing}" in done.stderr


@pytest.mark.parametrize(
    "extra", ["tests/cpp/CMakeLists.txt", ".github/workflows/release.yml", "jaxlowprec/_native.abi3.so"]
)
def test_an_sdist_with_what_only_the_repository_needs_is_refused(sdist, extra):
    done = check("check_sdist.sh", sdist(*NEEDED, extra))
    assert done.returncode == 1 and extra in done.stdout


def test_a_wheel_for_one_newer_python_only_is_refused(tmp_path):
    path = tmp_path / "jaxlowprec-1-cp312-cp312-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("jaxlowprec/_native.cpython-312-x86_64-linux-gnu.so", b"")
    done = check("check_wheel.sh", path, "--without-gpu-kernels")
    assert done.returncode == 1 and "not built for the stable ABI" in done.stderr


@pytest.mark.parametrize("tag, suffix", [("cp312-abi3", "abi3"), ("cp311-cp311", "cpython-311-x86_64-linux-gnu")])
@pytest.mark.parametrize("arguments, code", [((), 1), (("--without-gpu-kernels",), 0)])
def test_a_wheel_without_gpu_kernels_needs_permission(tmp_path, arguments, code, tag, suffix):
    compiler = subprocess.run(["g++", "-shared", "-x", "c++", "-", "-o", tmp_path / "m.so"], input=b"", check=False)
    if compiler.returncode:
        pytest.skip("needs g++")
    path = tmp_path / f"jaxlowprec-1-{tag}-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "m.so", f"jaxlowprec/_native.{suffix}.so")
    assert check("check_wheel.sh", path, *arguments).returncode == code
