"""Runs of several processes that SIGTERM or SIGKILL ends, and that other numbers of processes continue.

The recipe changes on the way from one with a state to one without; a run that loses any of its state has other losses.
On a mesh whose sums have two addends each, the losses are those of an undisturbed run bit for bit, whatever processes
hold the devices: see test_train_lm.py.
"""

import json
import signal

import pytest

from tests.distributed.running import EVERY, Processes

pytestmark = pytest.mark.usefixtures("compiled_once")

STEPS, RECIPE, MESH = 18, "fp8_delayed:9:nvfp4", "fsdp=2,tensor=2"


def start(text, out, count, mesh=MESH, *more, **options):
    return Processes(text, out, count, mesh, "--steps", STEPS, "--resume", *more, recipe=RECIPE, **options)


def preempted(processes, step, *which, code=0, times=1):
    """Sends SIGTERM to some or all while all wait before a step. They end after that step, and it is saved."""
    before = max(processes.saved(), default=0)
    processes.wait_until_all_wait()
    for _ in range(times):
        processes.signal(signal.SIGTERM, *which)
    processes.proceed()
    assert processes.wait() == [code] * len(processes.running), processes.output(0)[-2000:]
    assert before < step < STEPS and processes.saved() == [step + 1]
    assert f"preempted: {processes.recipe} after {step + 1} of" in processes.output(0)
    assert list(processes.checkpoints.glob("*tmp*")) == [] and not (processes.out / "report.json").exists()
    assert len(json.loads((processes.checkpoints.parent / "losses.json").read_text())) == step + 1


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    """The run in one process that nothing ends before its time."""
    return start(text, tmp_path_factory.mktemp("undisturbed"), 1).report()


@pytest.mark.slow
def test_four_processes_then_one_then_two_bit_for_bit(text, undisturbed, tmp_path):
    """SIGTERM to one of four, and twice to the only one."""
    preempted(start(text, tmp_path, 4, wait_before=5), 5, 2)
    preempted(start(text, tmp_path, 1, wait_before=10), 10, times=2)
    run = start(text, tmp_path, 2).report()
    assert run["losses"] == undisturbed["losses"] and len(run["losses"]) == STEPS
    assert run["validation_loss"] == undisturbed["validation_loss"]


@pytest.mark.slow
def test_other_meshes_continue_within_rounding(text, undisturbed, tmp_path):
    """SIGTERM to all, as Slurm and Kubernetes send it. Sums on other meshes are added in other orders."""
    four = start(text, tmp_path, 4, "data=2,fsdp=2", "--preempted-exit-code", 75, wait_before=5)
    preempted(four, 5, code=75)
    preempted(start(text, tmp_path, 1, "data=1", wait_before=10), 10)
    run = start(text, tmp_path, 2, "tensor=2").report()
    differences = [abs(a / b - 1) for a, b in zip(run["losses"], undisturbed["losses"], strict=True)]
    assert 0 < max(differences) < 0.03, differences  # one device alone: 0.009


@pytest.mark.slow
@pytest.mark.parametrize("killed", [(1,), (0, 1, 2, 3)], ids=str)
def test_killed_while_they_save_they_resume_bit_for_bit(text, undisturbed, tmp_path, killed):
    processes = start(text, tmp_path, 4, dying=killed)
    assert 0 not in processes.wait()
    assert processes.saved() in ([], [EVERY])
    run = start(text, tmp_path, 2).report()
    assert run["losses"] == undisturbed["losses"] and run["validation_loss"] == undisturbed["validation_loss"]
    assert processes.saved() == [STEPS] and list(processes.checkpoints.glob("*tmp*")) == []
