"""The job files in examples/jobs: their schedulers' schemas accept them, and their commands are those of train_lm.py.

No scheduler ran them. JobSet's and Kubernetes' types are those of Kubeflow's API models; SkyPilot's schema is its own;
Slurm has none: its options are compared with those of sbatch's manual. tests/distributed/test_slurm.py runs Slurm's.
"""

import importlib.metadata
import importlib.util
import json
import math
import pathlib
import re
import subprocess
import sys
import types

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
    def test_its_types_accept_every_field(self):
        module = "kubeflow_trainer_api.models.jobset_v1alpha2_job_set"
        types = pytest.importorskip(
            module, reason="kubeflow-trainer-api is not installed: pip install jaxlowprec[jobs]"
        )

        def accepted(job_set):
            return types.JobsetV1alpha2JobSet.from_dict(job_set).to_dict() == job_set  # it drops what it does not know

        job_set, _, job, container = jobset()
        assert accepted(job_set)
        for holder in (job_set["spec"]["failurePolicy"], job, container):  # JobSet's own, a Job's, a pod's
            holder["maxRestart"] = 1
            assert not accepted(job_set)
            del holder["maxRestart"]
        job_set["spec"]["failurePolicy"]["maxRestarts"] = "10"
        with pytest.raises(ValueError, match="maxRestarts"):
            accepted(job_set)

    def test_a_preempted_run_restarts_however_often(self):
        job_set, name, job, container = jobset()
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


class TestSkyPilot:
    @pytest.fixture
    def schemas(self, monkeypatch):
        """SkyPilot's module of schemas by itself: the package imports sixty others.

        Those would give it the values of `autostop` and the section `config`; a job with either is refused here.
        """
        found = importlib.util.find_spec("sky")
        if found is None:
            pytest.skip("skypilot is not installed: pip install --no-deps skypilot==0.14.1")
        [folder] = found.submodule_search_locations
        modules = {
            name: types.ModuleType(name) for name in ("sky", "sky.skylet", "sky.utils", "sky.skylet.autostop_lib")
        }
        for name, module in modules.items():
            module.__path__ = [str(pathlib.Path(folder).parent / name.replace(".", "/"))]
            monkeypatch.setitem(sys.modules, name, module)
        modules["sky"].__version__ = importlib.metadata.version("skypilot")
        modules["sky.skylet"].autostop_lib = modules["sky.skylet.autostop_lib"]
        modules["sky.skylet"].autostop_lib.AutostopWaitFor = types.SimpleNamespace(supported_modes=list)
        schemas = importlib.import_module("sky.utils.schemas")
        monkeypatch.setattr(schemas, "_task_config_schema", lambda: False)
        yield schemas
        for name in [name for name in sys.modules if name.startswith("sky.")]:
            del sys.modules[name]

    def test_its_schema_accepts_every_field(self, schemas):
        jsonschema = pytest.importorskip(
            "jsonschema", reason="jsonschema is not installed: pip install jaxlowprec[jobs]"
        )

        def refused(task):
            of_task, of_resources = schemas.get_task_schema(), schemas.get_resources_schema()
            recovery = of_resources["properties"]["job_recovery"]["anyOf"][1]
            recovery["additionalProperties"] = False  # plugins of a server may have more
            validator = jsonschema.Draft7Validator
            errors = [*validator(of_task).iter_errors(task), *validator(of_resources).iter_errors(task["resources"])]
            return [error.message for error in errors]

        task = read("skypilot.yaml")
        assert refused(task) == []
        for holder in (task, task["resources"], task["resources"]["job_recovery"]):
            holder["retries"] = 1
            assert len(refused(task)) == 1
            del holder["retries"]
        assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [PREEMPTED]
