"""kill -9 of the trainer and of workers, at random moments of one run."""

import collections
import contextlib
import itertools
import json
import random
import re
import subprocess
import sys
import threading
import time

import pytest

from tests.examples.on_ray.runs import EXAMPLES, Run, records_of
from tests.helpers import python_environment

pytest.importorskip("ray", reason="Ray is not installed: pip install jaxlowprec[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


@contextlib.contextmanager
def watched(folder):
    """Gives the list to which another process adds what the workers of a run serve; whole after the block."""
    environment = python_environment()
    environment["PYTHONPATH"] += f":{EXAMPLES}"
    command = [sys.executable, "-m", "tests.examples.on_ray.watching", str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    watcher = subprocess.Popen(command, env=environment, cwd=EXAMPLES.parent, text=True, **pipes)
    lines, errors, seen = [], [], []
    readers = [
        threading.Thread(target=to.extend, args=(pipe,))
        for to, pipe in ((lines, watcher.stdout), (errors, watcher.stderr))
    ]
    for reader in readers:
        reader.start()
    try:
        yield seen
        assert watcher.poll() is None, "".join(errors)
        watcher.stdin.close()
        assert watcher.wait(60) == 0, "".join(errors)
    finally:
        watcher.kill()
        for reader in readers:
            reader.join(30)
        seen.extend(map(json.loads, lines))


def kill(run, draw, *roles):
    """Kills a process of one of these roles, once one lives. Returns the process."""
    killed = False
    while not killed:
        run.wait_for(lambda: run.of(*roles))
        with contextlib.suppress(IndexError):  # of none, if it has just died
            victim = draw.choice(sorted(run.of(*roles), key=lambda process: process.pid))
            killed = victim.kill()
    return victim


def kills(run, draw):
    """Kills while iterations run: a worker, any actor, the trainer, others while it restarts, and again without end."""
    for roles in itertools.cycle([("worker",), ("worker", "trainer"), ("trainer",)]):
        before = run.iterations
        run.wait_for(lambda before=before: run.iterations > before)  # so the run goes on after each of these kills
        before, began = run.iterations, time.monotonic()
        run.wait_for(lambda before=before: run.iterations > before)
        time.sleep(draw.uniform(0, time.monotonic() - began))  # any moment of an iteration, on a machine of any speed
        yield (victim := kill(run, draw, *roles))
        for _ in range(2 if victim.role == "trainer" else 0):
            before, until = run.iterations, time.monotonic() + draw.uniform(0, 3)
            run.wait_for(lambda before=before, until=until: time.monotonic() > until or run.iterations > before)
            yield kill(run, draw, "worker", "trainer")


@pytest.mark.parametrize(("count", "rollouts"), [(8, 2), pytest.param(40, 3, marks=pytest.mark.every_case)])
def test_no_kill_at_any_moment_leaves_half_a_version(tmp_path, count, rollouts):
    """Most of the time goes into restarts of trainers."""
    draw = random.Random(25)
    iterations = 6 * count  # more than there are between the kills, also where the killer gets its turn seldom
    options = ("--iterations", str(iterations), "--rollouts", str(rollouts), "--checkpoint-every", "2")
    with Run(tmp_path, *options) as run:
        run.wait_for(lambda: run.iterations)
        with watched(run.folder) as seen:
            killed = list(itertools.islice(kills(run, draw), count))
        assert run.wait() == 0, run.text
        assert run.survivors() == []

    assert len(set(killed)) == count  # so all but four of them had been restarted
    assert {process.role for process in killed} == {"worker", "trainer"}
    assert sum(process.does == "step" for process in killed) >= count // 20
    lost = collections.Counter(re.findall(r"rollout \d was lost while (\w+)", run.text))
    assert min(lost["receiving"], lost["answering"]) >= count // 40, lost

    records = records_of(tmp_path)
    assert [record["version"] for record in records] == list(range(1, iterations + 1))
    assert all(record["train_rollout_logprob_abs_diff"] == 0 for record in records)
    published = {record["version"]: record["published_digest"] for record in records}
    assert len(set(published.values())) == iterations
    for record in records:
        assert {part["weights_digest"] for part in record["answered_by"]} == {published[record["version"]]}

    states = collections.Counter(one["state"] for one in seen)
    assert states["receiving"] >= count // 10, states  # they had parts of a version, and served the one before it
    assert len({one["version"] for one in seen}) >= count // 5
    assert [one for one in seen if one["digest"] != published[one["version"]]] == []
