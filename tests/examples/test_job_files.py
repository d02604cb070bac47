"""The job files in examples/jobs: their commands are those of train_lm.py, and preempted jobs are started anew.

No scheduler ran them. Slurm's options are compared with those of sbatch's manual. tests/distributed/test_slurm.py runs
Slurm's file.
"""

import json
import math
import pathlib
import re
import subprocess
import sys

import pytest
import train_lm
import yaml
from lm import mesh

from tests.helpers import python_environment

JOBS = pathlib.Path(train_lm.__file__).parent / "jobs"
SLURM = (JOBS / "slurm.sbatch").read_text()
PREEMPTED = 75  # EX_TEMPFAIL

# Of sbatch's manual, those that a job file may need, with the form of their values.
NUMBER, NAME = r"\d+", r"[\w./%-]+"
SBATCH = {
    **dict.fromkeys(["nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "gpus-per-task"], NUMBER),
    **dict.fromkeys(["job-name", "output", "error", "partition", "account", "qos", "constraint"], NAME),
    "time": r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}",
    "signal": r"([RB]+:)?[A-Z]+[0-9]*(@\d+)?",
    "open-mode": "append|truncate",
    "requeue": None,
    "no-requeue": None,
    "exclusive": None,
}


def read(name):
    return yaml.safe_load((JOBS / name).read_text())


def jobset():
    """The JobSet, the only Job in it, and the container of its pods."""
    job_set = read("jobset.yaml")
    [replicated] = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    return job_set, replicated["name"], job, container


def command_of(name):
    """The shell's words that start a job's process, and the variables that its scheduler sets."""
    if name == "slurm.sbatch":
        return ["bash", "-c", SLURM], {"SLURM_JOB_ID": "1"}
    if name == "jobset.yaml":
        return jobset()[3]["command"], {"JOB_COMPLETION_INDEX": "3"}
    run = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    return ["bash", "-c", read(name)["run"]], run


def options_of(name, folder, monkeypatch):
    """The options that train_lm.py reads from a job's command, which runs with a stand-in for Python."""
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    (folder / "srun").write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    for file in (program, folder / "srun"):
        file.chmod(0o755)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(folder)
    command, variables = command_of(name)
    environment = python_environment(PATH=f"{folder}:/usr/bin:/bin", **variables)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=600)
    script, *arguments = json.loads(done.stdout)
    assert script == "examples/train_lm.py"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr(train_lm, "layout", lambda options: None)  # joins no processes
    return train_lm.arguments()


@pytest.mark.parametrize(
    ("name", "address", "processes", "devices"),
    [
        ("slurm.sbatch", None, None, 16),
        ("jobset.yaml", "train-workers-0-0.train:8476", (3, 4), 32),
        ("skypilot.yaml", "10.0.0.1:8476", (1, 2), 16),
    ],
)
def test_the_command_is_one_of_the_example(name, address, processes, devices, tmp_path, monkeypatch):
    options = options_of(name, tmp_path, monkeypatch)
    assert options.resume and options.preempted_exit_code == PREEMPTED
    assert options.distributed == (address is None) and options.coordinator == address
    assert (options.process, options.processes) == (processes or (None, None))
    sizes = mesh.parse(options.mesh)
    mesh.check(sizes, options.config, options.batch, False)
    assert math.prod(sizes.values()) == devices


def test_sbatch_knows_the_options():
    assert subprocess.run(["bash", "-n"], input=SLURM, text=True, check=False).returncode == 0
    given = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SLURM, re.MULTILINE))
    assert len(given) == SLURM.count("#SBATCH") > 8
    for option, value in given.items():
        form = SBATCH[option]
        assert re.fullmatch(form, value) if form else value == "", option
    assert {"requeue", "signal"} <= set(given) and f"$code == {PREEMPTED}" in SLURM
    first, _, _ = SLURM.partition("\ntrap")
    assert all(line.startswith("#") or not line for line in first.splitlines())  # sbatch stops reading at a command


class TestJobSet:
    def test_a_preempted_run_restarts_however_often(self):
        job_set, name, job, container = jobset()
        assert job_set["spec"]["failurePolicy"]["maxRestarts"] == 10
        [rule] = job_set["spec"]["failurePolicy"]["rules"]
        assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
        assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
        saved, lost = job["podFailurePolicy"]["rules"]
        assert saved["action"] == lost["action"] == "FailJob"  # for the reason PodFailurePolicy
        assert saved["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [PREEMPTED]}
        assert job["template"]["spec"]["restartPolicy"] == "Never"  # as a podFailurePolicy needs
        assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == 4
        first = job_set["metadata"]["name"]
        assert f"exec python examples/train_lm.py --coordinator {first}-{name}-0-0.{first}:" in container["command"][-1]


def test_a_preempted_skypilot_job_is_started_anew():
    task = read("skypilot.yaml")
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [PREEMPTED], "max_restarts_on_errors": 3}
    assert task["num_nodes"] == 2 and task["resources"]["use_spot"]
