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

        of = {}
        for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"):
            for r in rows(device):
                if r.group == "grouped":  # two rows a case, without a target
                    assert r.target is None
                else:
                    of.setdefault(r.case, []).append(r.target)
        assert all(len(targets) == 3 for targets in of.values())
        quantisers = [n for n in of if n.split()[0] in ("quantize", "fake_quantize")]
        assert len(quantisers) == 28
        along_rows = [n for n in quantisers if "both" not in n]
        expected = {
            n: [0.9] * 3 if n in along_rows else [0.85] * 3 for n in quantisers if "NVFP4" not in n or n in along_rows
        }
        for shape in ("8192x8192", "16384x4096"):
            expected[f"quantize NVFP4 1x16, both, {shape}"] = [0.75] * 3
            expected[f"quantize NVFP4, both, RHT columnwise, {shape}"] = [0.68, 0.62, 0.68]
            expected[f"quantize NVFP4, both, RHT columnwise, stochastic, {shape}"] = [0.53, 0.48, 0.53]
        assert {n: of[n] for n in quantisers} == expected
        for rows_of_x, target in ((1, 2.5), (8, 2.5), (16, 2.3)):
            assert of[f"weight-only Int4, few rows {rows_of_x}x8192x8192"] == [target] * 3
        assert of["scaled_matmul FP8 block 4096x24576x1536"] == [1.25] * 3
        assert of["a training step of a Llama block, 4096 wide, 8192 tokens, FP8 block"] == [1.25] * 3
        itself = [r.case for r in rows("NVIDIA H200") if r.against == "itself"]
        assert len(itself) == 2
        assert all(of[n] == [None] * 3 for n in itself)

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
        assert "'trainings' is no row's name: needs one of training, few-rows, gemms, grouped, memory" in done.stderr


class TestTrace:
    """Two sides in one trace: kernels are given to calls by their order."""

    def events(self, monkeypatch, lost=0):
        import gpu_trace

        now, traces = [0.0], []

        def call(*durations):
            for duration in durations:
                now[0] += 1.0  # between two kernels
                traces[-1].append(gpu_trace.Event(now[0], duration, "kernel"))
                now[0] += duration

        def events(run):
            traces.append([])
            run()
            return traces[-1][lost if len(traces) > 2 else 0 :]  # the first two count each side's kernels

        monkeypatch.setattr(gpu_trace, "events", events)
        monkeypatch.setattr(gpu_trace, "WARM_SECONDS", 0.0)
        return gpu_trace.in_turn(lambda: call(2.0, 3.0), lambda: call(7.0)), traces

    def test_has_the_kernels_and_the_span_of_each_side(self, monkeypatch):
        found, traces = self.events(monkeypatch)
        assert found == {"kernels": {"ours": 5.0, "theirs": 7.0}, "span": {"ours": 6.0, "theirs": 7.0}}
        durations = [event.duration for event in traces[2]]
        assert durations[:6] == [2.0, 3.0, 7.0, 7.0, 2.0, 3.0]  # ours, theirs, theirs, ours
        assert len(durations) == 60

    def test_of_other_kernels_than_expected_is_not_measured(self, monkeypatch, capsys):
        assert self.events(monkeypatch, lost=1)[0] == {}
        assert "a trace of 40 calls has 59 kernels, not 60: not measured" in capsys.readouterr().out

    def test_on_a_cpu_has_none(self):
        from gpu_trace import in_turn

        assert in_turn(lambda: 1, lambda: 2) == {}

    def test_clocks_are_medians_of_what_nvidia_smi_says(self, monkeypatch, tmp_path):
        from gpu_trace import Clocks

        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\nprintf '1980, 600.5\\n1500, 700.5\\n1965, 650.5\\n'\nexec sleep 60\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with Clocks() as clocks:
            clocks._process.stdout.readline()  # it has begun
        assert clocks.found == {"sm_megahertz": 1732.5, "watts": 675.5}
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
        with Clocks() as clocks:
            pass
        assert clocks.found == {}


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
