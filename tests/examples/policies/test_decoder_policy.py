"""examples/rl_loop.py with the library's decoder: a rollout with a cache, importance weights, and their measures."""

import dataclasses
import json
import os
import types

import jax.numpy as jnp
import numpy as np
import pytest
import rl_loop
from flax import nnx
from rl import grpo
from rl.engine import Answers, RolloutLost
from rl.learning import replay
from rl.policies import STATIC, calibrate, made
from rl.policy import RECIPE, Config, of_next, scores
from rl.rollout import Writer
from rl.served import served
from rl.task import Task

import jaxlowprec as jlp
from jaxlowprec.weight_sync import WeightSource
from tests.examples.test_rl_loop import SCRIPT
from tests.examples.test_rl_parts import experience
from tests.helpers import run_python

pytestmark = pytest.mark.usefixtures("compiled_once")

TINY = Config(layers=1, width=32, length=5, kind="qwen3_moe")
SMALL = ("--policy", "qwen3_moe", "--layers", "1", "--width", "32", "--digits", "2", "--learning-rate", "5e-3")
TINY_RUN = (*SMALL, "--prompts", "4", "--answers", "4", "--updates", "1", "--cache", "float8_e4m3fn")
WEIGHTED = ("--importance", "masked", "--importance-per", "sequence_mean")


def outcome(out, *options):
    done = run_python(SCRIPT, "--out", str(out), *options)
    return done.stdout, json.loads((out / "report.json").read_text())["iterations"]


def answered(config, policy, prompts):
    """What a rollout with a cache writes after weight sync, and the trainer's log-probabilities with its experts."""
    writer = Writer()
    writer.load(served(config, dict(WeightSource(jlp.quantize_params(policy, RECIPE)).arrays())))
    answers = Answers(1, **writer.write(prompts, seed=0, version=1))
    return answers, np.asarray(replay(policy, answers)[1])[:, prompts.shape[1] - 1 :]


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "bound"), [("float32", 1e-5), ("int8", 1e-3), (STATIC, 1e-2)])  # a code may flip
def test_a_rollout_with_a_cache_scores_what_the_trainer_does(cache, bound):
    config = dataclasses.replace(TINY, cache=cache)
    policy = made(config, nnx.Rngs(0))
    head = policy.decoder.lm_head.kernel
    head.set_value(20 * head.get_value())  # so that answers have log-probabilities that differ
    calibrate(policy, prompts := Task(2).prompts(8, seed=0, iteration=1))
    answers, found = answered(config, policy, prompts)
    written = answers.log_probabilities[:, 2:]
    np.testing.assert_allclose(found, written, atol=bound, rtol=0)
    with jlp.autocast(RECIPE):  # as it was before the trainer read what the cache keeps
        tape = jlp.moe.RoutingTape.from_routed_experts(list(answers.routed_experts), num_layers=1, k=2, num_experts=4)
        plain = of_next(scores(policy, answers.tokens, tape)[0], jnp.asarray(answers.tokens))[:, 2:]
    assert np.ptp(written) > 0.5 and (np.abs(plain - written).max() > 1e-3) == (cache != "float32")
    assert answers.routed_experts.shape == (8, 4, 1, 2) and (answers.tokens[:, 3:] < 11).all()


def test_weights_scale_the_losses_of_tokens():
    given = experience()
    new = given.old + 0.1
    one = jnp.ones(given.old.shape)
    halved = dataclasses.replace(given, weights=one / 2)
    np.testing.assert_allclose(
        grpo.surrogate(new, halved, grpo.Settings()), grpo.surrogate(new, given, grpo.Settings()) / 2, rtol=1e-6
    )
    trainer, engine = np.float32([[-1.0, -1.0]]), np.float32([[-1.0, -9.0]])
    mask = np.ones((1, 2), bool)
    for kind, expected in (("truncated", [[1, 2]]), ("masked", [[1, 0]])):
        weights = grpo.importance(trainer, engine, mask, grpo.Settings(importance=kind))
        np.testing.assert_array_equal(weights, expected)
    assert grpo.importance(trainer, engine, mask, grpo.Settings()) is None


@pytest.mark.parametrize("given", ["", "--xla_dump_to=x", "--xla_allow_excess_precision=true"])
def test_excess_precision_is_forbidden_unless_given(given, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", given)
    rl_loop.forbid_excess_precision()
    flags = os.environ["XLA_FLAGS"].split()
    assert flags == (given.split() if "excess" in given else [*given.split(), "--xla_allow_excess_precision=false"])


def test_a_cache_needs_the_decoder(tmp_path, refused_by):
    said = refused_by(rl_loop.arguments, "--out", tmp_path, "--cache", "int8")
    assert "--cache int8: needs --policy qwen3_moe" in said


@pytest.mark.slow
def test_the_decoder_learns_from_its_reward_alone(tmp_path):
    options = ("--iterations", "28", "--cache", "int8", "--importance", "truncated")
    said, iterations = outcome(tmp_path, *SMALL, *options)
    rewards = [i["reward"] for i in iterations]
    assert np.mean(rewards[:3]) < 0.2 and np.mean(rewards[-5:]) > 0.6
    means = [i["mismatch"]["summary"] for i in iterations]
    assert all(abs(m["k3"]) < 1e-6 and m["effective_sample_size"] > 0.999 and m["nonfinite"] == 0 for m in means)
    assert np.mean([i["plain_cache_mismatch"]["k3"] for i in iterations]) > 100 * np.mean([m["k3"] for m in means])
    assert sum(i["beyond_float32"] for i in iterations) < 0.05 * sum(i["compared"] for i in iterations)
    assert "differences: " in said and (tmp_path / "mismatch.png").stat().st_size > 10_000


class Near:
    """A rollout in this process, which is lost when `lost` is asked for."""

    lost = None

    def __init__(self, config, *_):
        self.config, self.writer, self.process, self.address = config, Writer(), types.SimpleNamespace(pid=0), "here"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def push(self, policy, version):
        self.sent = dict(WeightSource(jlp.quantize_params(policy, RECIPE)).arrays())
        self.writer.load(served(self.config, self.sent))
        return 1, 0.0

    def generate(self, prompts, seed, version):
        if version == self.lost:
            raise RolloutLost("as it was to be")
        return Answers(version, **self.writer.write(prompts, seed, version))

    def differing_weights(self, policy):
        ours = dict(WeightSource(jlp.quantize_params(policy, RECIPE)).arrays())
        return [name for name, array in ours.items() if (array != self.sent[name]).any()]


@pytest.mark.slow
def test_a_lost_run_goes_on_to_the_same_rewards(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rl_loop, "Rollout", Near)
    options = (*TINY_RUN, *WEIGHTED, "--iterations", "5", "--checkpoint-every", "2")

    def iterations(out, *more):
        monkeypatch.setattr("sys.argv", ["rl_loop.py", "--out", str(out), *options, *more])
        rl_loop.run(rl_loop.arguments())
        return json.loads((out / "report.json").read_text())["iterations"]

    expected = iterations(tmp_path / "whole")
    monkeypatch.setattr(Near, "lost", 4)
    with pytest.raises(RolloutLost):
        iterations(tmp_path / "lost")
    monkeypatch.setattr(Near, "lost", None)
    with pytest.raises(SystemExit, match="has checkpoints; --resume goes on from them"):
        iterations(tmp_path / "lost")
    found = iterations(tmp_path / "lost", "--resume")
    assert "going on after iteration 2" in capsys.readouterr().out
    for name in ("reward", "loss", "kept", "mismatch"):
        assert [i[name] for i in found] == [i[name] for i in expected]
