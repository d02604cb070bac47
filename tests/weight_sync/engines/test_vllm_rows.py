"""vLLM's CPU operators compute INT8 by rows to the bit as ours: a layer that is trained as W8A8 is the layer served."""

import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.checkpoints import schemes
from tests.helpers import random_array
from tests.weight_sync.engines import live_vllm

pytestmark = pytest.mark.slow
PROGRAM = live_vllm.PROGRAM.with_name("live_vllm_rows.py")
SCHEME = schemes.by_name("int8_channel")


def test_a_layer_of_w8a8_has_the_bits_of_vllm(tmp_path):
    x, w = random_array((48, 1024), "bfloat16", 1), random_array((512, 1024), "bfloat16", 2)
    stored = SCHEME.compress(np.asarray(w))
    given = {"x": np.asarray(x).view(np.int16), "codes": stored["weight"]}
    np.savez(tmp_path / "question.npz", **given, scales=stored["weight_scale"].astype(np.float32))
    command = [
        live_vllm.interpreter(),
        str(PROGRAM),
        *(str(tmp_path / f"{name}.npz") for name in ("question", "answer")),
    ]
    done = subprocess.run(command, env=live_vllm.environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    a, b = jlp.quantize(x, jlp.Int8Rows()), SCHEME.load(stored)
    with np.load(tmp_path / "answer.npz") as answer:
        np.testing.assert_array_equal(answer["scales"], np.asarray(a.scale))
        # Its kernel for CPUs multiplies by 1 / scale, that for GPUs by 127 / amax, as we do: few codes differ by one.
        apart = answer["codes"].astype(int) - np.asarray(a.data)
        assert np.abs(apart).max() <= 1 and (apart != 0).mean() < 1e-3
        theirs = jlp.QuantizedArray(
            jnp.asarray(answer["codes"]), a.scale, None, None, a.format, a.shape, a.dtype, -1, None
        )
        expected = np.asarray(jlp.scaled_matmul(theirs, b)).view(np.int16)
        np.testing.assert_array_equal(answer["result"], expected)
