"""examples/train_lm.py as a user runs it: a few steps on a small text, the report, and a killed run that resumes."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
import train_lm

import jaxlowprec as jlp
from tests.distributed.running import PROGRAM
from tests.helpers import python_environment, run_python

pytestmark = pytest.mark.usefixtures("compiled_once")

SCRIPT = str(pathlib.Path(__file__).parents[2] / "examples" / "train_lm.py")


def command(text, out, *more):
    return [SCRIPT, "--text", text, "--out", str(out), "--batch", "2", "--size", "tiny", *more]


def report(out):
    return json.loads((out / "report.json").read_text())


@pytest.mark.slow
def test_the_report_has_losses_gaps_and_the_noise_floor(text, tmp_path):
    done = run_python(*command(text, tmp_path, "--steps", "6", "--recipe", "bf16,nvfp4"))
    found = report(tmp_path)
    assert [run["name"] for run in found["runs"]] == ["bf16", "bf16 perturbed", "nvfp4"]
    for run in found["runs"]:
        assert len(run["losses"]) == 6 and run["finite"] and run["losses"][-1] < run["losses"][0]
        assert (run["loss_gap_percent"] is None) == (run["name"] == "bf16")
        assert run["name"] in done.stdout
    bf16, perturbed, nvfp4 = found["runs"]
    assert found["noise_floor_percent"]["loss"] == abs(perturbed["loss_gap_percent"])
    assert nvfp4["loss_gap_percent"] == pytest.approx(100 * (nvfp4["loss"] / bf16["loss"] - 1))
    assert nvfp4["losses"] != bf16["losses"] and "NVFP4" in nvfp4["recipe"]
    assert nvfp4["saved_activation_bytes"] < bf16["saved_activation_bytes"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_telemetry_finds_nothing_wrong_with_a_healthy_run(text, tmp_path, seed):
    options = ("--steps", "60", "--telemetry", "5", "--recipe", "nvfp4", "--seed", str(seed))
    run_python(*command(text, tmp_path, *options))
    run = jlp.telemetry.load(tmp_path / "nvfp4")
    assert run.steps == [*range(0, 60, 5)]
    for end in range(1, 1 + len(run.records)):
        assert jlp.telemetry.findings(dataclasses.replace(run, records=run.records[:end])) == []


@pytest.mark.slow
def test_every_recipe_trains_and_saves_less_than_bf16(text, tmp_path):
    recipes = ["mxfp8", "fp8_block", "fp8_current", "fp8_delayed"]
    run_python(*command(text, tmp_path, "--steps", "6", "--no-noise-floor", "--recipe", ",".join(["bf16", *recipes])))
    bf16, *runs = report(tmp_path)["runs"]
    assert [run["name"] for run in runs] == recipes
    for run in runs:
        assert run["finite"] and run["losses"][-1] < run["losses"][0] and run["losses"] != bf16["losses"]
        assert abs(run["loss_gap_percent"]) < 5
        assert run["saved_activation_bytes"] < bf16["saved_activation_bytes"]
        assert run["parameters"] == bf16["parameters"]


@pytest.mark.slow
def test_experts_train_under_each_recipe_and_report_load(text, tmp_path):
    recipes = ["bf16", "nvfp4", "fp8_delayed", "int4_qat"]  # every recipe's experts: tests/moe
    options = ("--size", "demo", "--steps", "6", "--experts", "4", "--top-k", "2", "--no-noise-floor")
    done = run_python(*command(text, tmp_path, *options, "--recipe", ",".join(recipes)))
    found = report(tmp_path)
    assert found["settings"]["config"]["experts"] == 4 and "largest load" in done.stdout
    for name, run in zip(recipes, found["runs"], strict=True):
        assert run["name"] == name and run["finite"] and run["losses"][-1] < run["losses"][0]
        assert len(run["expert_loads"]) == 6 and all(1 <= load <= 4 for load in run["expert_loads"])
        assert (run["losses"] == found["runs"][0]["losses"]) == (name == "bf16")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_killed_run_resumes_where_its_checkpoint_was(text, tmp_path):
    """With experts, whose loads are logged beside the losses. Without: tests/distributed and test_mesh."""
    options = ("--steps", "12", "--checkpoint-every", "4", "--recipe", "nvfp4", "--experts", "4")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_python(*command(text, whole, *options))

    killed.mkdir()
    path = os.pathsep.join([str(pathlib.Path(SCRIPT).parent), python_environment()["PYTHONPATH"]])
    process = subprocess.Popen(
        [sys.executable, PROGRAM, *command(text, killed, *options)[1:]],
        env=python_environment(PYTHONPATH=path, WAIT_BEFORE="6", GO=str(killed / "go")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (killed / f"waits-{process.pid}").exists() or not (killed / "nvfp4" / "checkpoints" / "4").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (killed / "report.json").exists()
    log = killed / "nvfp4" / "losses.json"
    log.write_text(json.dumps([-1.0, *json.loads(log.read_text())[1:]]))  # a mark: a run from the start would lose it

    run_python(*command(text, killed, *options, "--resume"))
    resumed, expected = report(killed)["runs"][0], report(whole)["runs"][0]
    assert resumed["losses"] == [-1.0, *expected["losses"][1:]]
    assert resumed["validation_loss"] == expected["validation_loss"]
    assert resumed["expert_loads"] == expected["expert_loads"] and len(resumed["expert_loads"]) == 12
    assert json.loads((killed / "nvfp4" / "expert_loads.json").read_text()) == resumed["expert_loads"]


@pytest.mark.slow
def test_states_in_8_bits_train_as_float32_ones_and_resume(text, tmp_path):
    options = ("--steps", "6", "--checkpoint-every", "3", "--recipe", "nvfp4")
    ours = ("--states", "8-bit-masters-24")
    run_python(*command(text, tmp_path / "float32", *options))
    run_python(*command(text, tmp_path / "ours", *options, *ours))
    (expected,), (found,) = (report(tmp_path / name)["runs"] for name in ("float32", "ours"))
    assert found["losses"] != expected["losses"]  # kernels are quantised from bfloat16 parameters
    assert found["losses"] == pytest.approx(expected["losses"], rel=0.01)
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name / "nvfp4" / "checkpoints").rglob("*") if file.is_file())
        for name in ("float32", "ours")
    ]
    assert sizes[1] < 0.7 * sizes[0]
    run_python(*command(text, tmp_path / "ours", *options[2:], *ours, "--steps", "8", "--resume"))
    assert report(tmp_path / "ours")["runs"][0]["losses"][:6] == found["losses"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "fp3"), "--recipe fp3: needs one of bf16"),
        (("--recipe", "nvfp4:0.8"), "--recipe nvfp4:0.8: needs one of bf16, .* or several with the steps"),
        (("--recipe", "nvfp4:9:bf16", "--steps", "9"), "a phase begins at step 9 of 9 steps; needs an earlier step"),
        (("--recipe", "bf16:5:fp8_delayed", "--steps", "9"), "begin with it, or use Float8CurrentScaling"),
        (("--steps", "0"), "need 1 or more"),
        (("--states", "linear-int8"), "argument --states: invalid choice: 'linear-int8' .*8-bit-masters-24"),
        (("--text", "/no/such/folder"), "no such file or folder"),
        (("--experts", "4", "--top-k", "5"), "--experts 4 --top-k 5: needs 1 <= top-k <= experts"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path, refused_by, arguments, message):
    assert re.search(message, refused_by(train_lm.main, "--out", tmp_path, *arguments))
