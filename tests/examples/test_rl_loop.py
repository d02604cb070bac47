"""examples/rl_loop.py as a user runs it: two processes, and what becomes of one when the other is killed."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import rl_loop
from flax import nnx
from rl.engine import Rollout, RolloutLost, Stale
from rl.learning import replay
from rl.policy import Config, Policy
from rl.task import Task

from tests.helpers import often, python_environment, run_python

pytestmark = pytest.mark.usefixtures("compiled_once")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

SCRIPT = str(EXAMPLES / "rl_loop.py")
SMALL = ("--layers", "1", "--width", "32", "--digits", "2", "--prompts", "2", "--answers", "4", "--updates", "1")
TINY = Config(layers=1, width=32, length=5)


def outcome(out, *options):
    done = run_python(SCRIPT, "--out", str(out), *SMALL, *options)
    return done.stdout, json.loads((out / "report.json").read_text())["iterations"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("rl")
    return out, *outcome(out, "--iterations", "3")


@pytest.mark.slow
def test_every_iteration_agrees_to_the_bit(run):
    out, said, iterations = run
    assert [i["version"] for i in iterations] == [1, 2, 3]
    assert all(i["train_rollout_logprob_abs_diff"] == 0 and i["differing"] == 0 for i in iterations)
    assert all(i["compared"] == 2 * 4 * 2 and i["routing_same"] == 1 for i in iterations)
    assert all(i["unquantised_logprob_abs_diff"] > 0 for i in iterations)  # so the zero is no matter of course
    assert all(i["sync_bytes"] < 4 * 10_000 for i in iterations)  # float32 would be 100 KiB
    assert "train_rollout_logprob_abs_diff: 0 in 3 iterations, 48 log-probabilities" in said
    assert "iteration 3/3: reward" in said
    assert (out / "reward.png").stat().st_size > 0


@pytest.mark.slow
def test_a_second_run_has_the_same_rewards_and_losses(run, tmp_path):
    _, again = outcome(tmp_path, "--iterations", "3")
    for name in ("reward", "loss", "gradient_pass_logprob_abs_diff", "routing_same_after"):
        assert [i[name] for i in again] == [i[name] for i in run[2]]


@pytest.mark.slow
def test_one_changed_code_on_the_rollouts_side_ends_the_run(tmp_path):
    done = started(tmp_path, "--iterations", "3", "--damage-version", "1")
    said, error = done.communicate(timeout=600)
    assert done.returncode == 1 and "iteration 1/" not in said
    assert "version 1: train_rollout_logprob_abs_diff is not 0: " in error
    assert "weights that differ: blocks.0.qkv.kernel.data" in error and "Traceback" not in error
    assert not (tmp_path / "report.json").exists()


def started(out, *options):
    command = [sys.executable, SCRIPT, "--out", str(out), *SMALL, *options]
    return subprocess.Popen(
        command, env=python_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def rollout_of(trainer):
    """The process id that the trainer prints once it runs."""
    for line in trainer.stdout:
        if found := re.match(r"rollout: process (\d+), listening", line):
            return int(found[1])
    raise AssertionError(f"the trainer ended before its rollout ran: {trainer.stderr.read()}")


@pytest.fixture
def trainer(tmp_path):
    process = started(tmp_path, "--iterations", "100000")
    yield process
    process.kill()
    process.communicate(timeout=600)


@pytest.mark.slow
def test_a_killed_rollout_ends_the_trainer_with_a_message(trainer):
    os.kill(rollout_of(trainer), signal.SIGKILL)
    _, error = trainer.communicate(timeout=600)
    assert trainer.returncode == 1
    assert re.search(r"rl_loop: (syncing|generating).* its process was killed by signal 9", error)
    assert "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parametrize("how", often([signal.SIGKILL], [signal.SIGKILL, signal.SIGINT]))
def test_the_rollout_ends_when_the_trainer_does(trainer, how):
    """It shares the trainer's standard error, whose end is read only when both have ended."""
    rollout_of(trainer)
    trainer.send_signal(how)
    _, error = trainer.communicate(timeout=600)
    assert trainer.returncode == -how
    assert "rollout: the trainer has ended; ending as well" in error and "Traceback" not in error


@pytest.mark.slow
def test_stale_answers_are_refused_and_a_dead_rollout_named():
    policy, prompts = Policy(TINY, nnx.Rngs(0)), Task(2).prompts(8, seed=0, iteration=1)
    with Rollout(TINY, timeout=600.0) as engine:
        engine.push(policy, 4)
        answers = engine.generate(prompts, seed=0, version=4)
        assert answers.version == 4 and (answers.tokens[:, :3] == prompts).all()
        assert engine.differing_weights(policy) == []
        with pytest.raises(Stale, match="answered with version 4; needs 5"):
            engine.generate(prompts, seed=0, version=5)

        tape, found = replay(policy, answers)
        written = np.asarray(found)[:, 2:]
        assert (written.view(np.uint32) == answers.log_probabilities[:, 2:].view(np.uint32)).all()
        assert (np.asarray(tape.experts)[:, :, -1] == -1).all()  # the last token is never run
        answers.routed_experts[:] = (answers.routed_experts + 1) % TINY.experts
        assert (np.asarray(replay(policy, answers)[1])[:, 2:] != written).any()

        engine.process.send_signal(signal.SIGSTOP)
        engine._timeout = 1.0
        with pytest.raises(RolloutLost, match=r"said nothing for 1 s: its process runs, but does not answer"):
            engine.generate(prompts, seed=0, version=4)
        engine.process.kill()
        with pytest.raises(RolloutLost, match=r"generating: the rollout has ended: .* killed by signal 9"):
            engine.generate(prompts, seed=0, version=4)
        with pytest.raises(RolloutLost, match=r"syncing version 5: .* killed by signal 9"):
            engine.push(policy, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--width", "48"), "needs a multiple of 32"),
        (("--answers", "1"), "--answers and --experts need 2 or more"),
        (("--iterations", "0"), "--iterations needs 1 or more"),
        (("--damage-version", "121"), "--damage-version 121: needs 1 to --iterations, 120"),
        (("--out", __file__), "File exists; needs a folder that can be written"),
        (("--out", f"{__file__}/runs"), "Not a directory; needs a folder that can be written"),
        (("--rollout", "1"), "unrecognized arguments: --rollout 1"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path, refused_by, arguments, message):
    assert message in refused_by(rl_loop.arguments, "--out", tmp_path, *arguments)


@pytest.mark.slow
def test_the_rollout_is_not_started_by_hand():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--rollout"],
        env=python_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1 and "for the process that the trainer starts" in done.stderr


@pytest.mark.slow
@pytest.mark.every_case
def test_the_policy_learns_from_its_reward_alone(tmp_path):
    run_python(SCRIPT, "--out", str(tmp_path), "--iterations", "80", "--kl", "0.001")
    iterations = json.loads((tmp_path / "report.json").read_text())["iterations"]
    rewards = [i["reward"] for i in iterations]
    assert np.mean(rewards[:3]) < 0.15 and np.mean(rewards[-10:]) > 0.6
    assert all(i["train_rollout_logprob_abs_diff"] == 0 for i in iterations)
