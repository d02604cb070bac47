"""Every way to change the weights of a live SGLang server, which generates meanwhile: a disk, and both of tensors.

The server runs on a CPU, where SGLang takes one kernel from vLLM: rotary.py stands in for it.
"""

import threading
import time

import numpy as np
import pytest
from flax import nnx

from jaxlowprec.checkpoints.decoders import mapping_of
from jaxlowprec.weight_sync import SGLang, SGLangTensors, WeightSource, push
from tests.weight_sync.engines import models
from tests.weight_sync.engines.sglang import live

pytestmark = pytest.mark.slow

BOUND = 0.1
"""The largest difference of a log-probability from ours in float32, measured: 0.024. Other weights: more than 1."""

MODES = {"retract": "length", "in_place": "length", "abort": "abort"}
"""Why the generation ends that runs during a sync."""

COUNT = 2000
"""The tokens that it was asked for."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """[(a folder of weights in bfloat16, our log-probabilities of the prompt's tokens)], of two models."""
    live.interpreter()
    place = tmp_path_factory.mktemp("models")
    made = []
    for seed in (0, 1):
        folder = models.folder(place / f"model{seed}", seed)
        made.append((folder, models.of_prompt(folder)))
    assert np.abs(made[0][1] - made[1][1]).max() > 10 * BOUND
    return made


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    """One that serves the first model."""
    with live.serving(folders[0][0], tmp_path_factory.mktemp("sglang")) as started:
        yield started


@pytest.fixture(params=["disk", "shared", "copied"])
def connect(request, folders, server, tmp_path):
    """Makes a transport to the server."""

    def connected(mode="retract"):
        if request.param == "disk":
            return SGLang(server.url, tmp_path / "weights", mode=mode, files=[folders[0][0] / "config.json"])
        return SGLangTensors(server.url, mode=mode, memory=request.param)

    return connected


def source(folder):
    """The weights, as a trainer has them."""
    decoder = models.decoder(folder)
    return WeightSource(nnx.state(decoder, nnx.Param), mapping_of(decoder.config), dtype="bfloat16")


def close(a, b):
    return np.abs(a - b).max() < BOUND


@pytest.mark.parametrize("mode", MODES)
def test_weights_change_while_it_generates(mode, folders, server, connect):
    transport = connect(mode)
    serves_first = close(server.log_probabilities(models.TOKENS), folders[0][1])
    folder, expected = folders[1 if serves_first else 0]
    weights, said = source(folder), []
    generating = threading.Thread(target=lambda: said.append(server.generate([1, 2], COUNT)))
    generating.start()
    time.sleep(0.5)
    assert generating.is_alive()
    version = push(weights, transport, max_bytes=1 << 20, timeout=60)
    assert generating.is_alive() or mode == "abort"
    assert version == transport.version(10)
    generating.join(120)
    answer = said[0]
    assert answer["meta_info"]["finish_reason"]["type"] == MODES[mode]
    assert (len(answer["output_ids"]) == COUNT) == (mode != "abort")
    assert close(server.log_probabilities(models.TOKENS), expected)


def test_an_update_that_a_killed_trainer_left_open_is_ended(folders, server):
    server.call("/begin_weight_update", {})
    push(source(folders[1][0]), SGLangTensors(server.url), timeout=60)
    assert close(server.log_probabilities(models.TOKENS), folders[1][1])
