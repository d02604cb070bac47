"""examples/jobs/slurm.sbatch as Slurm runs it, with stand-ins for srun and scontrol: two tasks on this machine."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.distributed.running import EVERY, LONGEST, PROGRAM, SCRIPT, XLA_FLAGS
from tests.helpers import python_environment
from tests.ports import JOB_PORTS, free_job

JOB = SCRIPT.parent / "jobs" / "slurm.sbatch"
STEPS, MESH, LAST = 18, "data=2", 5  # the last step before SIGTERM takes effect
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
[[ "$1 $2" == "python examples/train_lm.py" ]] || exit 2
shift 2
for i in 0 1; do
  SLURM_PROCID=$i SLURM_LOCALID=$i python "$PROGRAM" "$@" &>"$STANDINS/said-$i.txt" &
done
jobs -p >"$STANDINS/tasks.txt"
code=0 # the largest of its tasks
for task in $(jobs -p); do
  wait "$task"
  each=$?
  ((each > code)) && code=$each
done
exit "$code"
"""
SCONTROL = '#!/bin/bash\necho "$@" >>"$STANDINS/scontrol.txt"\n'


@contextlib.contextmanager
def submitted(text, folder, out, **more):
    """The batch script's process, and its job's number. Nothing of it is left running."""
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    job = free_job()
    variables = {
        "PATH": f"{folder}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "STANDINS": folder,
        "SLURM_JOB_ID": job,
        "SLURM_NTASKS": 2,
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": 1,
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{JOB_PORTS[0] + job}",
        "JAX_NUM_CPU_DEVICES": 1,
        "XLA_FLAGS": XLA_FLAGS,
        "PROGRAM": PROGRAM,
        "PYTHONPATH": f"{SCRIPT.parent}:{python_environment()['PYTHONPATH']}",
    } | more
    options = ["--text", text, "--out", out, "--mesh", MESH, "--size", "tiny", "--batch", 8, "--recipe", "bf16"]
    options += ["--steps", STEPS, "--checkpoint-every", EVERY]
    command = ["bash", *map(str, [JOB, *options])]
    environment = python_environment(**{name: str(value) for name, value in variables.items()})
    script = subprocess.Popen(command, cwd=SCRIPT.parents[1], env=environment, start_new_session=True)
    try:
        yield script, job
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
            script.wait()


@pytest.mark.slow
def test_a_preempted_job_is_requeued_and_goes_on(text, tmp_path):
    standins, out = tmp_path / "standins", tmp_path / "out"
    standins.mkdir()
    said = standins / "said-0.txt"
    with submitted(text, standins, out, WAIT_BEFORE=LAST, GO=standins / "go") as (script, job):
        end = time.monotonic() + LONGEST
        while len(list(standins.glob("waits-*"))) < 2 and time.monotonic() < end:
            assert script.poll() is None, said.read_text()[-2000:]
            time.sleep(0.01)
        for process in (script.pid, *map(int, (standins / "tasks.txt").read_text().split())):
            os.kill(process, signal.SIGTERM)
        (standins / "go").touch()
        assert script.wait(LONGEST) == 75, said.read_text()[-2000:]
    assert (standins / "scontrol.txt").read_text() == f"requeue {job}\n"
    [saved] = [int(folder.name) for folder in (out / "bf16" / "checkpoints").iterdir()]
    assert EVERY <= saved == LAST + 1 < STEPS and not (out / "report.json").exists()
    before = json.loads((out / "bf16" / "losses.json").read_text())

    with submitted(text, standins, out) as (script, _):
        assert script.wait(LONGEST) == 0, said.read_text()[-2000:]
    assert (standins / "scontrol.txt").read_text() == f"requeue {job}\n"
    [run] = json.loads((out / "report.json").read_text())["runs"]
    assert run["losses"][:saved] == before and len(run["losses"]) == STEPS
