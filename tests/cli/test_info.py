"""`jaxlowprec info`: what runs here, how, and why not otherwise."""

import json
import pathlib
import shutil
import subprocess

import jax
import pytest

from jaxlowprec.cli import info as info_module
from jaxlowprec.cli.info import VERIFIED_ON_GPUS
from jaxlowprec.cli.main import main
from jaxlowprec.wiring import native
from tests.helpers import run_python

EMULATED = {"scaled_matmul, 4-bit", "scaled_matmul, 8-bit", "scaled_matmul, FP8 by rows"}
INT4 = {f"{operation}, Int4" for operation in ("quantize", "dequantize", "fake_quantize")}
NATIVE = {"quantize", "amax", "dequantize", "hadamard_transform", "telemetry.statistics", "scaled_matmul, weight-only"}
NATIVE |= {"activations", "norms", "scaled_matmul, INT8 by rows"}
OPERATIONS = NATIVE | INT4 | EMULATED


def info(capsys, *arguments):
    assert main(["info", *arguments]) == 0
    return capsys.readouterr().out


def test_json_says_what_runs_how(capsys, isa):
    found = json.loads(info(capsys, "--json"))
    assert found["versions"]["jax"] == jax.__version__
    assert found["native_library"]["loaded"] and found["native_library"]["reason"] is None
    assert found["native_library"]["instruction_set"] == isa
    assert found["native_library"]["instruction_sets_available"] == list(native.available_isas())
    runs = {operation["operation"]: operation["platforms"]["cpu"] for operation in found["operations"]}
    assert set(runs) == OPERATIONS
    for name, how in runs.items():
        assert how["runs"] == ("emulated" if name in EMULATED else "native"), name
        assert how["why"]


def test_the_table_has_the_same_facts(capsys):
    found, text = json.loads(info(capsys, "--json")), info(capsys)
    for package, version in found["versions"].items():
        assert version is None or version in text, package
    assert found["native_library"]["instruction_set"] in text
    for operation in found["operations"]:
        rows = [line for line in text.splitlines() if line.startswith(operation["operation"] + " ")]
        for row, (platform, how) in zip(rows, operation["platforms"].items(), strict=True):
            assert platform in row and how["runs"] in row and how["why"] in row


@pytest.mark.slow
def test_without_the_library_info_says_reference_and_why():
    out = run_python("-m", "jaxlowprec.cli.main", "info", "--json", JAXLOWPREC_DISABLE_NATIVE="1").stdout
    found = json.loads(out)
    assert not found["native_library"]["loaded"]
    for operation in found["operations"]:
        cpu = operation["platforms"]["cpu"]
        assert cpu == {"runs": "reference", "why": "JAXLOWPREC_DISABLE_NATIVE is set"}


@pytest.mark.slow
def test_what_is_portable_is_said():
    out = run_python("-m", "jaxlowprec.cli.main", "info", JAXLOWPREC_IMPLEMENTATION="portable").stdout
    assert "NVFP4: XLA's product of operands decoded to bfloat16, because JAXLOWPREC_IMPLEMENTATION" in out
    assert "Float8Block: XLA's product of operands decoded to bfloat16" in out and "`jaxlowprec verify` compares" in out


class TestCuda:
    """What is said of GPUs, whatever the build and the machine have."""

    def test_the_build(self, capsys):
        found, module = json.loads(info(capsys, "--json"))["cuda"], native.library().module
        assert found["built"] == (not module.no_cuda)
        assert found["architectures"] == (module.cuda_architectures.split() if found["built"] else [])
        assert found["reason"] == native.why_not("cuda")
        text = info(capsys)
        for fact in (found["compiler"], *found["architectures"]) if found["built"] else (module.no_cuda,):
            assert fact in text

    def test_operations_on_a_gpu(self, monkeypatch, capsys):
        """As on a machine with a GPU of each generation."""
        module = native.library().module
        if module.no_cuda:
            pytest.skip("built without GPU kernels")
        library = native.Library(module, None, ("cpu", "cuda"))
        monkeypatch.setattr(native, "library", lambda: library)
        said = {}
        for capability in (None, 8.0, 9.0, 10.0):
            monkeypatch.setattr(native, "compute_capability", lambda c=capability: c)
            found = json.loads(info(capsys, "--json"))
            said[capability] = {o["operation"]: o["platforms"]["cuda"] for o in found["operations"]}
            assert all(how["runs"] == "native" for how in said[capability].values())
            verified = capability in VERIFIED_ON_GPUS
            assert all(("never verified" in how["why"]) != verified for how in said[capability].values())
        assert "Float8Block: FP8 tensor cores" in said[9.0]["scaled_matmul, 8-bit"]["why"]
        assert "NVFP4: codes decoded to bfloat16" in said[9.0]["scaled_matmul, 4-bit"]["why"]
        assert "MXFP4: 4-bit codes re-based to FP8" in said[9.0]["scaled_matmul, 4-bit"]["why"]
        assert "NVFP4: FP4 tensor cores" in said[10.0]["scaled_matmul, 4-bit"]["why"]
        assert "FP8 tensor cores" not in said[8.0]["scaled_matmul, 8-bit"]["why"]

    def test_verified_is_what_was_measured(self):
        results = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
        if not results.exists():
            pytest.skip("not in the source tree")
        assert bool(VERIFIED_ON_GPUS) == (results / "gpu.json").exists()

    def test_no_cublaslt(self):
        if "libcublasLt" not in pathlib.Path("/proc/self/maps").read_text():
            assert info_module._cublaslt() is None

    @pytest.mark.slow
    @pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
    def test_the_version_of_a_cublaslt_that_is_loaded(self, tmp_path):
        library = tmp_path / "libcublasLt.so.13"
        source = tmp_path / "version.c"
        source.write_text("unsigned long cublasLtGetVersion(void) { return 130204; }")
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
        code = f"import ctypes; ctypes.CDLL({str(library)!r}); from jaxlowprec.cli import info; print(info._cublaslt())"
        assert run_python("-c", code).stdout.strip() == f"13.2.4, {library}"


def test_without_a_command_it_explains_itself(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "info" in capsys.readouterr().err
