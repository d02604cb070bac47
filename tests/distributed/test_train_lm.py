"""examples/train_lm.py in several processes: the bits of one process, and what happens when one of them is gone.

All on this machine's loopback. A mesh of two devices along an axis: a sum of two is the same in either order, whether
XLA adds within a process or gloo between processes. Longer sums meet in other orders.
"""

import functools
import json
import re
import signal

import pytest
import train_lm

from tests.distributed.running import EVERY, HEARTBEAT, SCRIPT, STEPS, Processes
from tests.helpers import refused

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def in_one_process(text, tmp_path_factory):
    """The undisturbed run on a mesh, in one process."""
    return functools.cache(lambda mesh: Processes(text, tmp_path_factory.mktemp("one"), 1, mesh).report())


def assert_same_run(run, expected):
    assert run["losses"] == expected["losses"] and len(run["losses"]) == STEPS
    assert run["validation_loss"] == expected["validation_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mesh"), [(2, "data=2"), (2, "fsdp=2,tensor=2")])
def test_the_losses_are_those_of_one_process_bit_for_bit(text, in_one_process, tmp_path, count, mesh):
    processes = Processes(text, tmp_path, count, mesh)
    assert_same_run(processes.report(), in_one_process(mesh))
    assert "report:" in processes.output(0)
    for i in range(1, count):  # the first process speaks for all
        # Threads may write gloo's message at once, and tear it.
        said = [line for line in processes.output(i).splitlines() if not re.search("Gloo|connected peer ranks", line)]
        assert said == []


def kill_one(processes, victim):
    """Kills one of two after the first checkpoint. The other ends at once, its connections broken, and says why."""
    processes.wait_for_checkpoint(EVERY)
    processes.wait_until_all_wait()
    processes.running[victim].kill()
    processes.proceed()
    survivor = 1 - victim
    assert processes.wait(survivor, seconds=0.9 * HEARTBEAT)[0] != 0
    said = processes.output(survivor)
    assert "another process most likely died" in said or "another task died" in said
    assert not (processes.out / "report.json").exists()


@pytest.mark.slow
def test_a_killed_coordinator_ends_the_others(text, tmp_path):
    kill_one(Processes(text, tmp_path, 2, "data=2", recipe="bf16", wait_before=EVERY + 1), victim=0)


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_the_run_resumes(text, in_one_process, tmp_path):
    kill_one(Processes(text, tmp_path, 2, "data=2", wait_before=EVERY + 1), victim=1)
    log = tmp_path / "nvfp4" / "losses.json"
    log.write_text(json.dumps([-1.0, *json.loads(log.read_text())[1:]]))  # a mark: a run from the start would lose it
    run = Processes(text, tmp_path, 2, "data=2", "--resume").report()
    assert run["losses"][0] == -1.0
    expected = in_one_process("data=2")
    assert_same_run(run | {"losses": [expected["losses"][0], *run["losses"][1:]]}, expected)


@pytest.mark.slow
def test_a_process_that_hangs_is_found_by_its_heartbeat(text, tmp_path):
    processes = Processes(text, tmp_path, 2, "data=2", recipe="bf16", wait_before=EVERY + 1, heartbeat=20)
    processes.wait_until_all_wait()
    processes.signal(signal.SIGSTOP, 1)
    processes.proceed()
    code = processes.wait(0)[0]
    processes.kill()
    assert code != 0
    _, _, named = processes.output(0).partition("unhealthy (stopped sending heartbeats):\n")
    assert named.startswith(("1\n", "/job:jax_worker/replica:0/task:1"))  # as JAX of this and of other versions says it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--processes", "2"), "--coordinator, --processes and --process go together"),
        (("--coordinator", "a:1", "--processes", "2", "--process", "2"), "--process 2: needs 0 to 1"),
        (("--coordinator", "a:1", "--processes", "2", "--process", "0"), "several processes need --mesh"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path, refused_by, arguments, message):
    assert message in refused_by(train_lm.main, "--out", tmp_path, *arguments)


@pytest.mark.slow
def test_a_cluster_that_jax_does_not_detect_is_named(tmp_path):
    message = "where JAX detects no cluster, give --coordinator"
    assert message in refused(str(SCRIPT), "--out", str(tmp_path), "--distributed", "--mesh", "data=2")
