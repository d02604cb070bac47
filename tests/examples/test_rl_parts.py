"""The parts of examples/rl_loop.py, each alone."""

import doctest
import importlib
import pathlib
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rl import agreement, grpo, report
from rl.channel import MOST_BYTES, Channel, Ended
from rl.policy import RECIPE, Config, Policy, afresh, scores
from rl.served import digests, served
from rl.task import DIGITS, EQUALS, Task

import jaxlowprec as jlp
from jaxlowprec.weight_sync import WeightSource

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

TINY = Config(layers=1, width=32, length=5)


@pytest.mark.parametrize("name", sorted(path.stem for path in (EXAMPLES / "rl").glob("*.py") if path.stem[0] != "_"))
def test_docstrings_say_what_happens(name):
    assert doctest.testmod(importlib.import_module(f"rl.{name}")).failed == 0


def test_only_the_digits_in_order_are_worth_everything():
    task = Task(3)
    prompts = task.prompts(50, seed=1, iteration=2)
    assert (prompts == task.prompts(50, seed=1, iteration=2)).all()
    assert (prompts != task.prompts(50, seed=1, iteration=3)).any()
    assert (prompts[:, -1] == EQUALS).all() and prompts[:, :3].max() == DIGITS - 1
    right = np.sort(prompts[:, :3], axis=1)
    assert (task.reward(np.concatenate([prompts, right], axis=1)) == 1).all()
    wrong = right.copy()
    wrong[:, 1] = (wrong[:, 1] + 1) % DIGITS
    np.testing.assert_allclose(task.reward(np.concatenate([prompts, wrong], axis=1)), 2 / 3)


def test_advantages_compare_within_a_prompt_alone():
    rewards = np.asarray([0.0, 1.0, 10.0, 12.0, 5.0, 5.0])
    assert grpo.advantages(rewards, 2).tolist() == [-1, 1, -1, 1, 0, 0]


def tiny(seed=0):
    tokens = jax.random.randint(jax.random.key(seed), (8, TINY.length), 0, DIGITS)
    return Policy(TINY, nnx.Rngs(seed)), tokens, afresh(TINY, 8)


def experience(reference=None):
    old = -jnp.linspace(0.1, 2, 8 * 4).reshape(8, 4)
    answer = jnp.zeros(old.shape, bool).at[:, 2:].set(True)
    return grpo.Experience(None, answer, old, jax.device_put(np.float32([1.0, -1.0] * 4)), None, reference)


@pytest.mark.slow
def test_ratios_are_clipped_where_that_makes_the_objective_worse():
    given = experience(reference=-jnp.ones((8, 4)))
    new = given.old + jnp.linspace(-1, 1, 8 * 4).reshape(4, 8).T
    loss = grpo.surrogate(new, given, grpo.Settings(clip=0.2, kl=0.5))
    ratio, apart, worth = np.exp(new - given.old), np.asarray(-1 - new), np.asarray(given.advantages)[:, None]
    terms = -np.minimum(ratio * worth, np.clip(ratio, 0.8, 1.2) * worth) + 0.5 * (np.exp(apart) - apart - 1)
    np.testing.assert_allclose(loss, terms[:, 2:].mean(), rtol=1e-5)


@pytest.mark.slow
def test_the_first_step_is_the_policy_gradient():
    given = experience()
    gradient = jax.grad(grpo.surrogate)(given.old, given, grpo.Settings())
    expected = np.where(given.answer, -given.advantages[:, None], 0) / np.sum(given.answer)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.slow
def test_the_served_policy_has_the_bits_of_training():
    policy, tokens, tape = tiny()
    sent = dict(WeightSource(jlp.quantize_params(policy, RECIPE)).arrays())
    assert sent["blocks.0.moe.experts.up_proj.kernel.data"].shape == (4, 64, 16)  # two codes a byte
    assert not any(name.endswith("_proj.kernel") or name.endswith("qkv.kernel") for name in sent)
    model = served(TINY, sent)
    with jlp.autocast(RECIPE):
        expected, used = scores(policy, tokens, tape)
    actual, also = scores(model, tokens, tape)
    assert (np.asarray(actual).view(np.uint32) == np.asarray(expected).view(np.uint32)).all()
    assert (also.experts == used.experts).all()
    assert digests(model) == digests(jlp.quantize_params(policy, RECIPE))


def test_one_bit_and_the_sign_of_zero_are_differences():
    a = np.zeros((2, 3), np.float32)
    b = a.copy()
    b[1, 2] = -0.0
    everywhere = np.ones(a.shape, bool)
    found = agreement.compare(a, b, everywhere)
    assert (found.exact, found.differing, found.largest, found.first) == (False, 1, 0.0, (1, 3))
    everywhere[1, 2] = False
    assert agreement.compare(a, b, everywhere).exact
    nan = np.full_like(a, np.nan)
    assert np.isnan(agreement.compare(a, nan, everywhere).largest)
    assert agreement.compare(nan, nan, everywhere).differing == 5
    with pytest.raises(ValueError, match="nothing|False everywhere"):
        agreement.compare(a, b, np.zeros(a.shape, bool))


def channels():
    return tuple(Channel(end, "the other") for end in socket.socketpair())


def test_a_message_and_its_arrays_arrive_whole_and_in_order():
    ours, theirs = channels()
    arrays = {"x": np.arange(1000, dtype=np.int32).reshape(10, 100), "y": np.asarray([[np.nan, -0.0]], np.float32)}
    arrays["transposed"] = arrays["x"].T
    ours.send({"text": "line\nbreak"}, arrays, timeout=60)
    ours.send({"second": 2}, timeout=60)
    message, received = theirs.receive(timeout=60)
    assert message == {"text": "line\nbreak"} and received.keys() == arrays.keys()
    assert all(received[name].tobytes() == array.tobytes() for name, array in arrays.items())
    assert theirs.receive(timeout=60) == ({"second": 2}, {})


def test_waiting_ends():
    ours, theirs = channels()
    with pytest.raises(Ended, match=r"said nothing for 0.2 s"):
        ours.receive(timeout=0.2)
    with pytest.raises(Ended, match=r"did not read for 0.2 s"):
        ours.send({}, {"x": np.zeros(1 << 22)}, timeout=0.2)
    theirs.close()
    with pytest.raises(Ended, match="has ended"):
        ours.send({}, {"x": np.zeros(1 << 22)}, timeout=60)


@pytest.mark.parametrize(
    ("sent", "message"),
    [(b"x" * 70_000, "no message"), (b'{"message": {}, "bytes": %d}\n' % (MOST_BYTES + 1), "at most")],
)
def test_what_is_too_long_is_refused(sent, message):
    end, other = socket.socketpair()
    other.sendall(sent)
    with pytest.raises(Ended, match=message):
        Channel(end, "the other").receive(timeout=60)


def record(version, reward, difference=0.0):
    names = ("right", "loss", "gradient_pass_logprob_abs_diff", "unquantised_logprob_abs_diff", "routing_same")
    rest = ("routing_same_after", "sync_bytes", "sync_ms", "generate_ms", "learn_ms", "compared")
    figures = dict.fromkeys(names + rest, 0.5) | {"differing": int(difference > 0)}
    return figures | {"version": version, "reward": reward, "train_rollout_logprob_abs_diff": difference}


@pytest.mark.slow
def test_the_picture_is_drawn_from_one_iteration_on(tmp_path):
    report.picture([record(1, 0.1)], tmp_path / "one.png")
    report.picture([record(i, i / 9, 1e-3 * (i == 4)) for i in range(1, 9)], tmp_path / "more.png")
    for name in ("one", "more"):
        assert (tmp_path / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "log-prob difference 0.001," in report.line(record(4, 0.5, 1e-3))
