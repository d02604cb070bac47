"""Both ways to change the weights of a live vLLM server, which generates meanwhile: a disk, and its weight transfer."""

import contextlib
import json
import secrets
import threading
import time

import numpy as np
import pytest
from flax import nnx

from jaxlowprec import checkpoints
from jaxlowprec.checkpoints.conversion.rules import DEFAULTS, Rules
from jaxlowprec.checkpoints.decoders import mapping_of
from jaxlowprec.weight_sync import VLLM, Refused, VLLMTransfer, WeightSource, push
from tests.ports import free_port
from tests.weight_sync.engines import live_vllm, models

pytestmark = pytest.mark.slow

BOUND = 0.1
"""The largest difference of a log-probability of the prompt; see test_vllm_logits. Other weights: more than 1."""

SCHEME = checkpoints.schemes.by_name("w4a16")
MODES = {"wait": 1000, "keep": 3000, "abort": 3000}
"""How many tokens a text has that is generated during a sync."""


def close(a, b):
    return np.abs(a - b).max() < BOUND


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """[(a folder of float weights, what our decoder makes of their export)], of two models."""
    live_vllm.interpreter()
    place = tmp_path_factory.mktemp("exports")
    made = []
    for seed in (0, 1):
        plain = models.folder(place / f"plain{seed}", seed)
        checkpoints.convert(plain, place / f"codes{seed}", SCHEME)
        made.append((plain, place / f"codes{seed}", models.of_prompt(place / f"codes{seed}")))
    assert np.abs(made[0][2] - made[1][2]).max() > 10 * BOUND
    return made


def source(plain):
    """Float weights, as a trainer has them."""
    decoder = models.decoder(plain)
    weights = nnx.state(decoder, nnx.Param)
    return WeightSource(weights, mapping_of(decoder.config), SCHEME, "bfloat16", quantize=Rules(defaults=DEFAULTS))


@pytest.fixture(scope="module")
def server(exports, tmp_path_factory):
    """One that serves the first export."""
    config, library = (
        json.dumps({"backend": "jaxlowprec"}),
        live_vllm.with_this_library(tmp_path_factory.mktemp("path")),
    )
    place = tmp_path_factory.mktemp("vllm")
    with live_vllm.serving(exports[0][1], place, "--weight-transfer-config", config, PYTHONPATH=str(library)) as live:
        yield live


@pytest.fixture(params=["disk", "transfer"])
def connect(request, exports, server, tmp_path):
    """Makes a transport to the server."""
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(32))
    made = []

    def connected(mode="wait"):
        if request.param == "disk":
            transport = VLLM(server.url, tmp_path / "weights", mode=mode, files=[exports[0][1] / "config.json"])
        else:
            transport = VLLMTransfer(server.url, free_port(), secret, mode=mode)
        made.append(transport)
        return transport

    yield connected
    for transport in made:
        transport.close()


@contextlib.contextmanager
def texts(server, count):
    """Generates one text after the other until the block ends, two at a time: gives (why it ended, tokens) of each."""
    said, enough = [], threading.Event()

    def generate():
        while not enough.is_set():
            said.append(server.generate([1, 2], count))

    threads = [threading.Thread(target=generate) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)  # until they are at work
        yield said
    finally:
        enough.set()
        for thread in threads:
            thread.join()
    assert len(said) >= len(threads)


@pytest.mark.parametrize("mode", MODES)
def test_weights_change_while_it_generates(mode, exports, server, connect):
    transport, count = connect(mode), MODES[mode]
    for plain, _, expected in reversed(exports):
        weights = source(plain)
        with texts(server, count) as said:
            version = push(weights, transport, timeout=600)
            assert version == transport.version(10) and server.call("/is_paused") == {"is_paused": False}
        ended = {reason: [tokens for why, tokens in said if why == reason] for reason, _ in said}
        assert ("abort" in ended) == (mode == "abort") and ended.keys() <= {"length", "abort"}
        assert all(len(tokens) == count for tokens in ended.get("length", ()))
        assert all(len(tokens) < count for tokens in ended.get("abort", ()))
        assert close(server.log_probabilities(models.TOKENS), expected)


def test_a_load_that_fails_is_followed_by_the_old_version(exports, server, tmp_path):
    """vLLM itself computes nothing useful after a load that failed, until another succeeds."""
    written, seen = tmp_path / "weights", tmp_path / "seen"
    transport = VLLM(server.url, written, engine_path=seen, files=[exports[0][1] / "config.json"])
    seen.symlink_to(written)
    push(source(exports[1][0]), transport, timeout=600)
    seen.unlink()
    seen.mkdir()
    for version in written.glob("*"):
        (seen / version.name).symlink_to(version)  # the engine does not see the next one
    with pytest.raises(Refused, match="status 500") as raised:
        push(source(exports[0][0]), transport, timeout=600)
    assert not getattr(raised.value, "__notes__", [])
    assert server.call("/is_paused") == {"is_paused": False}
    assert close(server.log_probabilities(models.TOKENS), exports[1][2])
