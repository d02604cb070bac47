"""benchmarks/gpu.py on a CPU, its file, and what is made of Nsight Compute's."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import run_python
from tests.scripts.stand_ins import NCU_CSV, SOURCE

BENCHMARKS = SOURCE / "benchmarks"
pytestmark = pytest.mark.skipif(not (BENCHMARKS / "gpu.py").exists(), reason="not in the source tree")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def environment(**changes):
    fixed = {"device": "NVIDIA H200", "driver": "1", "versions": {"jax": "0"}, "sources": "s", "commit": "c", "rows": 9}
    return fixed | {"cuda": ""} | changes


def row(name, ratio=None, target=1.0, against="theirs"):
    result = {"error": "broken"} if ratio is None else {"ratio": {"median": ratio}}
    return {"case": name, "against": against, "target": target} | result


class TestFile:
    def test_is_continued_for_the_same_device_and_library_only(self, tmp_path):
        from gpu_file import Results

        file = tmp_path / "gpu.json"
        first = Results(file, environment())
        first.put(row("a", 0.5))
        first.put(row("b"))
        later = Results(file, environment(commit="later", cuda="x"))
        assert later.measured(("a", "theirs"))
        assert later.failed(("b", "theirs"))
        assert not later.measured(("a", "others"))
        later.put(row("b", 0.7))
        assert [c["case"] for c in json.loads(file.read_text())["cases"]] == ["a", "b"]
        assert not Results(file, environment(), again=True).measured(("a", "theirs"))
        for change in ({"device": "NVIDIA H100"}, {"sources": "t"}, {"divide": 32}, {"versions": {"jax": "1"}}):
            file.write_text(json.dumps({"environment": environment(), "cases": [row("a", 0.5)]}))
            assert not Results(file, environment(**change)).cases
            assert json.loads((tmp_path / "gpu-before.json").read_text())["cases"]

    def test_worst_rows_are_the_furthest_below_their_targets(self):
        from gpu_file import table, worst

        cases = [row("a", 2.0, 2.5), row("b", 0.7), row("c", 0.1, None), row("d"), row("e", 0.9), row("b", 0.6)]
        assert [(c["case"], c["ratio"]["median"]) for c in worst(cases, 3)] == [("b", 0.6), ("a", 2.0), ("e", 0.9)]
        text = table({"environment": environment(), "cases": [*cases, row("f", 1.5)]})
        assert text.splitlines()[-1] == "7 of 9 rows: 1 of 5 targets met, 1 rows failed"


class TestRows:
    def test_targets_by_the_devices_name(self):
        from gpu_rows import rows

        found = {}
        for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"):
            for r in rows(device):
                found.setdefault((r.case, r.against), []).append(r.target)
        of = {name: targets for (name, against), targets in found.items() if "suggestions" not in against}
        quantisers = [n for n in of if n.split()[0] in ("quantize", "fake_quantize") and "RHT" not in n]
        assert len(quantisers) == 24
        assert all(of[n] == [0.85, 0.80, 0.85] for n in quantisers)
        for part, target in (("RHT columnwise, stoch", 0.55), ("RHT columnwise, 8", 0.75), ("few rows", 2.5)):
            assert {tuple(of[n]) for n in of if part in n} == {(target,) * 3}
        assert {tuple(t) for (_, against), t in found.items() if "suggestions" in against} == {(0.97,) * 3}
        assert of["a training step of a Llama block, 4096 wide, 8192 tokens, FP8 block"] == [1.2] * 3

    def test_names_are_unique_and_training_and_few_rows_come_first(self):
        from gpu_rows import GROUPS, rows

        found = rows("NVIDIA H200")
        assert len({r.name for r in found}) == len(found)
        assert {r.group for r in found} == set(GROUPS)
        first = [r.group for r in found][:20]
        assert set(first) == {"training", "few-rows"}
        assert "Llama block" in found[0].case

    @pytest.mark.slow
    def test_a_later_run_measures_only_what_is_left(self, tmp_path):
        file = tmp_path / "gpu.json"
        options = ["--divide", "64", "--rounds", "1", "--save", str(file)]
        few = ["weight-only NVFP4, few rows 1x*", "hadamard_transform, size 16, 8192x8192"]
        run_python(BENCHMARKS / "gpu.py", *options, "--only", few[0])
        printed = run_python(BENCHMARKS / "gpu.py", *options, "--only", *few, PATH=str(tmp_path)).stdout
        assert "1 of 2 rows are in" in printed
        assert "weight-only" not in printed.replace(str(file), "")
        result = json.loads(file.read_text())
        assert [c["case"].split(",")[0] for c in result["cases"]] == ["weight-only NVFP4", "hadamard_transform"]
        assert all(c["ratio"]["median"] > 0 for c in result["cases"])
        assert result["environment"]["device"] == "cpu"
        assert result["environment"]["copy_bytes_per_second"] > 0

    @pytest.mark.slow
    def test_a_step_of_a_small_llama_block(self, tmp_path):
        file = tmp_path / "gpu.json"
        options = ["--divide", "32", "--rounds", "1", "--save", file, "--only", "*Llama*FP8 block"]
        run_python(BENCHMARKS / "gpu.py", *options)
        (case,) = json.loads(file.read_text())["cases"]
        assert case["ratio"]["median"] > 0

    @pytest.mark.slow
    def test_a_pattern_without_a_row_lists_the_rows(self):
        command = [sys.executable, BENCHMARKS / "gpu.py", "--only", "trainings"]
        variables = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 2
        assert "'trainings' is no row's name: needs one of training, few-rows, gemms, memory" in done.stderr


class TestProfile:
    def test_launches_of_a_kernel_are_averaged_and_stalls_sorted(self):
        from gpu_profile import parse

        quantize, amax = parse(NCU_CSV)
        assert amax["kernel"] == "jaxlowprec::amax(float)"
        assert amax["launches"] == 2
        assert amax["seconds"] == pytest.approx(3e-6)
        assert amax["bytes_per_second"] == pytest.approx(2e12)
        assert amax["memory_percent"] == pytest.approx(42)
        assert (amax["occupancy_percent"], amax["possible_occupancy_percent"]) == (50, 75)
        assert amax["stalls"] == {"long_scoreboard": 12.0, "wait": 1.0}
        assert quantize["registers"] == 40
        assert parse("==ERROR== no permission\n") == []

    def test_a_table_of_what_ncu_says(self):
        from gpu_profile import parse, table

        found = row("quantize", 0.4) | {"by": "ncu", "kernels": parse(NCU_CSV)}
        lines = table(found).splitlines()
        assert lines[0] == "quantize: 0.40x, target 1.0, by ncu"
        cells = "jaxlowprec::quantize(float) 1 90.0 3,500 73 88 of 100 40 long_scoreboard 3.0, wait 2.0"
        assert " ".join(lines[2].split()) == cells

    def test_a_file_that_is_missing_is_named(self, tmp_path):
        command = [sys.executable, BENCHMARKS / "gpu_profile.py", tmp_path / "gpu.json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 1
        assert "gpu.json does not exist: needs the rows that benchmarks/gpu.py --save writes" in done.stdout


def test_a_commit_without_git_or_a_repository(monkeypatch, tmp_path):
    import sources

    monkeypatch.delenv("JAXLOWPREC_COMMIT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sources.commit() == "unknown"
    monkeypatch.setenv("JAXLOWPREC_COMMIT", "abc")
    assert sources.commit() == "abc"


def test_the_digest_is_that_of_the_librarys_files(monkeypatch, tmp_path):
    import sources

    monkeypatch.setattr(sources, "ROOT", tmp_path)
    (tmp_path / "xla_ffi" / "cuda").mkdir(parents=True)
    kernel = tmp_path / "xla_ffi" / "cuda" / "amax.cuh"
    kernel.write_text("1")
    first = sources.digest()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("text")
    (tmp_path / "xla_ffi" / "library.so").write_text("compiled")
    assert sources.digest() == first
    kernel.write_text("2")
    assert sources.digest() != first
