"""The adapter for vLLM's HTTP calls against a live server, which generates meanwhile."""

import threading
import time

import numpy as np
import pytest
from flax import nnx

from jaxlowprec import checkpoints
from jaxlowprec.checkpoints.conversion.presets import DEFAULTS
from jaxlowprec.checkpoints.conversion.rules import Rules
from jaxlowprec.checkpoints.decoders.folders import mapping_of
from jaxlowprec.weight_sync import VLLM, Refused, WeightSource, push
from tests.engines import live_vllm, models

pytestmark = pytest.mark.slow

BOUND = 0.1
"""The largest difference of a log-probability of the prompt; see test_vllm_logits. Other weights: more than 1."""

SCHEME = checkpoints.schemes.by_name("w4a16")
GENERATED = 1500
ENDS = {"wait": ("length", GENERATED), "keep": ("length", GENERATED), "abort": ("abort", None)}


def close(a, b):
    return np.abs(a - b).max() < BOUND


def of_prompt(folder):
    """Our log-probabilities of the prompt's tokens."""
    ours = models.log_probabilities(models.decoder(folder), models.TOKENS)
    return ours[range(len(ours)), models.TOKENS[1:]]


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """[(a folder of float weights, what our decoder makes of their export)], of two models."""
    live_vllm.interpreter()
    place = tmp_path_factory.mktemp("exports")
    made = []
    for seed in (0, 1):
        plain = models.folder(place / f"plain{seed}", seed)
        checkpoints.convert(plain, place / f"codes{seed}", SCHEME)
        made.append((plain, place / f"codes{seed}", of_prompt(place / f"codes{seed}")))
    assert np.abs(made[0][2] - made[1][2]).max() > 10 * BOUND
    return made


def source(plain):
    """Float weights, as a trainer has them."""
    decoder = models.decoder(plain)
    weights = nnx.state(decoder, nnx.Param)
    return WeightSource(weights, mapping_of(decoder.config), SCHEME, "bfloat16", quantize=Rules(defaults=DEFAULTS))


def test_weights_change_while_it_generates(exports, tmp_path):
    (_, served, before), _ = exports
    with live_vllm.serving(served, tmp_path) as server:
        assert close(server.log_probabilities(models.TOKENS), before)
        for version, (mode, end) in enumerate(ENDS.items(), 1):
            plain, _, expected = exports[version % 2]
            transport = VLLM(server.url, tmp_path / "weights", mode=mode, files=[served / "config.json"])
            said = []
            generating = threading.Thread(target=lambda said=said: said.append(server.generate([1, 2], GENERATED)))
            generating.start()
            time.sleep(0.5)
            assert generating.is_alive()
            assert push(source(plain), transport, timeout=60) == version == transport.version(10)
            assert server.call("/is_paused") == {"is_paused": False}
            generating.join(60)
            reason, tokens = said[0]
            assert reason == end[0] and len(tokens) == (end[1] or len(tokens))
            assert close(server.log_probabilities(models.TOKENS), expected)
            transport.close()


def test_a_load_that_fails_leaves_the_old_weights(exports, tmp_path):
    (_, served, before), (plain, _, after) = exports
    with live_vllm.serving(served, tmp_path) as server:
        transport = VLLM(server.url, tmp_path / "weights", files=[served / "config.json"])
        push(source(plain), transport, timeout=60)
        assert close(server.log_probabilities(models.TOKENS), after)
        wrong = VLLM(server.url, tmp_path / "weights", engine_path=tmp_path / "nowhere", files=[served / "config.json"])
        with pytest.raises(Refused, match="status 500"):
            push(source(exports[0][0]), wrong, timeout=60)
        assert server.call("/is_paused") == {"is_paused": False}
        assert close(server.log_probabilities(models.TOKENS), after)
