"""A run's record: whole lines whatever happens, and the numbers that were measured."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.statistics.finish import LENGTH
from jaxlowprec.telemetry import recording
from jaxlowprec.telemetry.probes import AS_TRAINED
from tests.helpers import python_environment
from tests.package.test_readme import ROOT

TENSORS = jlp.telemetry.TENSORS


def found(seed, layers=("up", "down")):
    """The gradient of a telemetry state, made up: one use of each tensor."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(0.01, 1, (len(layers), len(TENSORS), LENGTH)).astype(np.float32)
    values[..., 0], values[..., -5:] = 1, 0
    return {layer: {AS_TRAINED: jnp.asarray(v)} for layer, v in zip(layers, values, strict=True)}


def recorded(path, steps, **options):
    with jlp.telemetry.Recorder(path, **options) as recorder:
        for step in steps:
            recorder.record(step, found(step), loss=1 / (step + 1))
    return path


class TestRecorder:
    def test_what_is_read_is_what_was_measured(self, tmp_path):
        run = jlp.telemetry.load(recorded(tmp_path / "runs" / "telemetry.jsonl", range(5), recipe="nvfp4", width=8))
        assert run.steps == [0, 1, 2, 3, 4]
        assert run.about == {"recipe": "nvfp4", "width": 8}
        for step, record in enumerate(run.records):
            expected = jlp.telemetry.read(found(step))
            assert {k: list(v) for k, v in record.layers.items()} == {k: list(v) for k, v in expected.items()}
            for layer, tensors in expected.items():
                for tensor, statistics in tensors.items():
                    actual = record.layers[layer][tensor].values
                    np.testing.assert_allclose(actual, statistics.values, rtol=1e-4)
            assert record.scalars == {"loss": 1 / (step + 1)}
        series = run.series("up", "input rowwise", "underflow")
        np.testing.assert_allclose(series, [float(r.layers["up"]["input rowwise"].underflow) for r in run.records])
        assert math.isnan(run.series("no such layer", "input rowwise", "underflow")[0])

    def test_a_folder_stands_for_its_file(self, tmp_path):
        recorded(tmp_path / "telemetry.jsonl", [1])
        assert jlp.telemetry.load(tmp_path).steps == [1]

    def test_only_due_steps_are_recorded_and_fetched(self, tmp_path):
        with jlp.telemetry.Recorder(tmp_path / "t.jsonl", every=10) as recorder:
            assert recorder.due(20) and not recorder.due(21)
            assert bool(jax.jit(recorder.due)(20)) and not bool(jax.jit(recorder.due)(21))
            recorder.record(21, {"up": "never looked at"})
            recorder.record(20, found(0))
        assert jlp.telemetry.load(tmp_path / "t.jsonl").steps == [20]

    def test_a_step_without_measurements_has_its_numbers(self, tmp_path):
        with jlp.telemetry.Recorder(tmp_path / "t.jsonl") as recorder:
            recorder.record(1, loss=jnp.float32(jnp.nan), rate=0.5)
        (record,) = jlp.telemetry.load(tmp_path / "t.jsonl").records
        assert math.isnan(record.scalars["loss"]) and record.scalars["rate"] == 0.5 and record.layers == {}

    def test_names_of_a_flat_record_are_stable(self, tmp_path):
        (record,) = jlp.telemetry.load(recorded(tmp_path / "t.jsonl", [3])).records
        flat = record.flat()
        assert flat["loss"] == 0.25
        assert flat["up/gradient columnwise/underflow"] == float(record.layers["up"]["gradient columnwise"].underflow)

    @pytest.mark.parametrize(
        ("step", "found", "scalars", "message"),
        [
            (float("inf"), None, {}, "step=inf; needs a whole number"),
            ("x", None, {}, "step='x'; needs a whole number"),
            (1, None, {"loss": 10**400}, "loss=an int of 1329 bits; needs a number of float64"),
            (1, None, {"loss": [1]}, "loss=.*; needs a number of float64"),
            (1, {"a": 1}, {}, "found has 1 at 'a'; needs statistics by label"),
        ],
    )
    def test_what_no_record_has(self, tmp_path, step, found, scalars, message):
        with jlp.telemetry.Recorder(tmp_path / "t.jsonl") as recorder:
            with pytest.raises((TypeError, ValueError), match=message):
                recorder.record(step, found, **scalars)
            recorder.record(2, None, loss=1.0)
        assert jlp.telemetry.load(tmp_path / "t.jsonl").steps == [2]

    def test_bad_arguments(self, tmp_path):
        with pytest.raises(ValueError, match="telemetry.Recorder: every=0; needs a positive int"):
            jlp.telemetry.Recorder(tmp_path / "t.jsonl", every=0)
        with pytest.raises(TypeError, match="telemetry.Recorder: recipe=NVFP4"):
            jlp.telemetry.Recorder(tmp_path / "t.jsonl", recipe=jlp.NVFP4BlockScaling())
        with pytest.raises(FileNotFoundError):
            jlp.telemetry.load(tmp_path / "none.jsonl")


class TestCuts:
    def test_a_file_cut_anywhere_is_read_up_to_its_last_whole_line(self, tmp_path):
        whole = recorded(tmp_path / "t.jsonl", range(3)).read_bytes()
        ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
        cut = tmp_path / "cut.jsonl"
        for length in sorted({*range(ends[0], len(whole), 97), *ends, *(end - 1 for end in ends[1:])}):
            cut.write_bytes(whole[:length])
            assert jlp.telemetry.load(cut).steps == list(range(sum(end <= length for end in ends) - 1))

    @pytest.mark.parametrize("at", [0, 5, 40, 200, -1])
    def test_a_cut_file_is_continued_after_its_last_whole_line(self, tmp_path, at):
        path = recorded(tmp_path / "t.jsonl", range(3))
        whole = path.read_bytes()
        path.write_bytes(whole[: at if at >= 0 else len(whole) + at])
        recorded(path, [7])
        assert jlp.telemetry.load(path).steps[-1] == 7
        assert path.read_bytes().endswith(b"\n")

    def test_a_step_recorded_again_replaces_the_first(self, tmp_path):
        path = recorded(tmp_path / "t.jsonl", range(4))
        with jlp.telemetry.Recorder(path) as recorder:
            recorder.record(2, found(99), loss=5.0)
        run = jlp.telemetry.load(path)
        assert run.steps == [0, 1, 2, 3] and run.records[2].scalars == {"loss": 5.0}

    def test_two_recorders_of_one_file_lose_nothing(self, tmp_path):
        """As when a restart overlaps with the process that it replaces."""
        path = recorded(tmp_path / "t.jsonl", [100])
        both = [jlp.telemetry.Recorder(path) for _ in range(2)]
        for step in range(10):
            both[step % 2].record(step, None, loss=1.0 if step % 2 else 22222.125)
        third = jlp.telemetry.Recorder(path)
        third.record(10, None)
        both[0].record(11, None)
        assert jlp.telemetry.load(path).steps == [*range(12), 100]
        for recorder in (*both, third):
            recorder.close()

    def test_a_killed_run_keeps_what_it_wrote(self, tmp_path):
        program = f"""
        import jaxlowprec as jlp
        from tests.telemetry.test_recording import found
        recorder = jlp.telemetry.Recorder({str(tmp_path / "t.jsonl")!r})
        for step in range(10**6):
            recorder.record(step, found(step), loss=1.0)
            print(step, flush=True)
        """
        run = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=python_environment(),
        )
        steps = [int(run.stdout.readline()) for _ in range(20)]
        time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        assert set(steps) <= set(jlp.telemetry.load(tmp_path / "t.jsonl").steps)


class TestOtherFiles:
    @pytest.mark.parametrize("content", ["", "\n", "loss 1.0\n", '{"step": 1}\n', "[1]\n"])
    def test_what_is_no_record(self, tmp_path, content):
        path = tmp_path / "other.jsonl"
        path.write_text(content)
        with pytest.raises(ValueError, match="is no run's record"):
            jlp.telemetry.load(path)
        if content:
            with pytest.raises(ValueError, match="is no run's record"):
                jlp.telemetry.Recorder(path)
            assert path.read_text() == content

    def test_another_version(self, tmp_path):
        path = recorded(tmp_path / "t.jsonl", [1])
        header, *rest = path.read_text().splitlines(keepends=True)
        path.write_text("".join([json.dumps(json.loads(header) | {"version": 2}) + "\n", *rest]))
        with pytest.raises(ValueError, match="has version 2 of the format; this jaxlowprec reads 1"):
            jlp.telemetry.load(path)

    def test_a_damaged_line_is_named(self, tmp_path):
        path = recorded(tmp_path / "t.jsonl", range(3))
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines[:2], "{}\n", *lines[3:]]))
        with pytest.raises(ValueError, match=r"t.jsonl:3 is no record"):
            jlp.telemetry.load(path)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"version":1,', ""),
            ('"version":1', '"version":[[]]'),
            ('"about":{}', '"about":[]'),
            ('"about":{}', '"about":{"a":[]}'),
            (',"about":{}', ""),
            ('"step":1', '"step":Infinity'),
            ('"step":1', '"step":"x"'),
            ('"step":1', '"step":null'),
            ('"loss":0.5', f'"loss":{"9" * 400}'),
            ('"loss":0.5', f'"loss":{"9" * 5000}'),
            ('"loss":0.5', '"loss":[]'),
            ('"scalars":{"loss":0.5}', '"scalars":[]'),
            ('"layers":{', '"layers":5,"x":{'),
            ('{"format"', "[" * 100_000 + '{"format"'),
            ('{"step"', "[" * 100_000 + '{"step"'),
        ],
    )
    def test_a_damaged_file_is_an_error_in_a_sentence(self, tmp_path, old, new):
        path = recorded(tmp_path / "t.jsonl", [1])
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match="t.jsonl") as refused:
            jlp.telemetry.load(path)
        assert str(refused.value).startswith("telemetry: ") and len(str(refused.value)) < 500

    def test_a_pipe_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "t.jsonl")
        for reads in (jlp.telemetry.load, jlp.telemetry.Recorder):
            with pytest.raises(ValueError, match="is no run's record"):
                reads(tmp_path / "t.jsonl")

    def test_parquet(self, tmp_path):
        parquet = pytest.importorskip("pyarrow.parquet")
        run = jlp.telemetry.load(recorded(tmp_path / "t.jsonl", range(2)))
        run.records[1].changed["up"] = 0.25
        run.to_parquet(tmp_path / "t.parquet")
        rows = parquet.read_table(tmp_path / "t.parquet").to_pylist()
        assert len(rows) == sum(len(tensors) for record in run.records for tensors in record.layers.values())
        for row in rows:
            wanted = run.records[row["step"]].layers[row["layer"]][row["tensor"]].scalars()
            changed = 0.25 if (row["step"], row["layer"], row["tensor"][:6]) == (1, "up", "weight") else None
            assert wanted.items() <= row.items() and row["changed"] == changed

    def test_parquet_needs_pyarrow(self, tmp_path, monkeypatch):
        run = jlp.telemetry.load(recorded(tmp_path / "t.jsonl", range(2)))
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ImportError, match=r"needs pyarrow; pip install 'jaxlowprec\[parquet\]'"):
            run.to_parquet(tmp_path / "t.parquet")


class TestRecordFollower:
    def test_each_line_is_read_once_while_the_file_grows(self, tmp_path, monkeypatch):
        content = recorded(tmp_path / "whole.jsonl", range(6)).read_bytes()
        path, seen, read_one = tmp_path / "growing.jsonl", [], recording._record
        monkeypatch.setattr(recording, "_record", lambda line, where: seen.append(where) or read_one(line, where))
        ends = [content.index(b"\n") + 1, *range(len(content) // 7, len(content), len(content) // 7), len(content)]
        path.write_bytes(content[: ends[0]])
        following = recording.RecordFollower(path)
        for begin, end in itertools.pairwise(sorted(ends)):
            with path.open("ab") as file:
                file.write(content[begin:end])
            assert following.run().steps == list(range(content[:end].count(b"\n") - 1))
        assert seen == [f"{path}:{number}" for number in range(2, 8)]
        whole = jlp.telemetry.load(path)
        assert [record.flat() for record in following.run().records] == [record.flat() for record in whole.records]

    @pytest.mark.parametrize("how", ["replaced", "written anew"])
    def test_another_file_is_read_from_its_beginning(self, tmp_path, how):
        path = recorded(tmp_path / "run.jsonl", range(4), recipe="nvfp4")
        following = recording.RecordFollower(path)
        assert following.run().steps == [0, 1, 2, 3]
        other = recorded(tmp_path / "other.jsonl", [7], recipe="mxfp8")
        if how == "replaced":
            other.replace(path)
        else:
            path.write_bytes(other.read_bytes())
        run = following.run()
        assert (run.steps, run.about) == ([7], {"recipe": "mxfp8"})
