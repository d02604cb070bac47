"""The pytest plugin that records results: what ends a process ends no other test, and one lost line loses no other."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.scripts.stand_ins import SCRIPTS, needs_scripts

pytestmark = needs_scripts

LOSES_THE_CONTEXT = """
import pytest

STATE = []

def test_before():
    pass

def test_breaks_the_device():
    STATE.append("lost")
    raise RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")

@pytest.mark.parametrize("i", range(3))
def test_after(i):
    assert not STATE  # a process that has lost its context fails every later test
"""


def run(folder, *arguments):
    variables = {"PYTHONPATH": str(SCRIPTS / "gpu_check"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    file = folder / "tests.jsonl"
    before = folder / "before.jsonl"
    if file.exists():
        before.write_bytes(file.read_bytes())
    given = [f"--results={file}", f"--before={before}", "--key=a device", "--run=one", "--rootdir=.", *arguments]
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "no:cacheprovider", "-p", "results", *given]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=600, check=False
    )
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return done, {r["test"].split("::")[-1]: r for r in records if r.get("outcome") not in (None, "started")}


def count(folder, name="one"):
    command = [sys.executable, SCRIPTS / "gpu_check" / "results.py", "count", folder / "tests.jsonl", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout


def test_a_worker_that_has_lost_its_context_is_replaced(tmp_path):
    (tmp_path / "test_all.py").write_text(LOSES_THE_CONTEXT)
    done, results = run(tmp_path, "-n", "1")
    assert done.returncode == 1, done.stdout
    wrong = [name for name, r in results.items() if r["outcome"] == "failed"]
    assert wrong == ["test_breaks_the_device"]
    assert len(results) == 5
    status, said = count(tmp_path)
    assert status == 1
    assert said.splitlines()[0] == "4 passed, 1 failed"


def test_a_process_without_context_stops_and_another_resumes(tmp_path):
    (tmp_path / "test_all.py").write_text(LOSES_THE_CONTEXT)
    done, results = run(tmp_path)
    assert done.returncode == 2
    assert "has lost its CUDA context" in done.stdout
    assert list(results) == ["test_before", "test_breaks_the_device"]
    assert "3 not reached" in count(tmp_path)[1]
    _, results = run(tmp_path)
    assert [r["outcome"] for r in results.values()] == ["passed", "failed", *["passed"] * 3]


@pytest.mark.parametrize(("body", "outcomes"), [("assert request", []), ("raise ValueError", ["failed", "failed"])])
def test_fixtures_that_fail_are_failures(tmp_path, body, outcomes):
    (tmp_path / "test_all.py").write_text(
        f"import pytest\n@pytest.fixture\ndef before(request):\n    {body}\n    yield\n"
        f"@pytest.fixture\ndef after(request):\n    yield\n    {body}\n"
        "def test_before(before): pass\ndef test_after(after): pass\n"
    )
    done, results = run(tmp_path)
    assert [r["outcome"] for r in results.values() if r["outcome"] == "failed"] == outcomes
    assert done.returncode == bool(outcomes)
    assert bool(re.search("failed: test_all.py::test_after", count(tmp_path)[1])) == bool(outcomes)


def test_another_key_or_another_test_file_runs_again(tmp_path):
    file = tmp_path / "test_all.py"
    file.write_text("def test_one():\n    pass\n")
    run(tmp_path)
    assert "1 deselected" in run(tmp_path)[0].stdout
    assert "1 passed" in run(tmp_path, "--key=another device")[0].stdout
    file.write_text("def test_one():\n    assert True\n")
    assert "1 passed" in run(tmp_path)[0].stdout
