"""SGLang in an environment of its own, made by scripts/sglang.sh: JAXLOWPREC_SGLANG_PYTHON names its interpreter."""

import contextlib
import os
import pathlib
import subprocess

import numpy as np
import pytest

from tests.ports import free_port
from tests.weight_sync.engines import live_server

VARIABLE = "JAXLOWPREC_SGLANG_PYTHON"
HERE = pathlib.Path(__file__).parent
QUIET = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
CPU = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--max-total-tokens": "20000",
    "--mem-fraction-static": "0.1",
    "--log-level": "warning",
}


def interpreter():
    """The interpreter of SGLang's environment; skips the test where there is none."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} names no interpreter that has SGLang: see scripts/sglang.sh")
    return os.environ[VARIABLE]


def environment(**added):
    """The variables of a process of SGLang."""
    return live_server.environment(**(QUIET | added))


def run(program, *arguments):
    """What a program of this folder prints in SGLang's environment."""
    command = [interpreter(), str(HERE / program), *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


class Server(live_server.LiveServer):
    """A server of one folder."""

    def generate(self, tokens, count, **more):
        """The answer to a prompt of tokens, greedy."""
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        return self.call("/generate", {"input_ids": tokens, "sampling_params": sampling, **more})

    def log_probabilities(self, tokens):
        """Those of each token of a prompt but the first [tokens - 1]."""
        answer = self.generate(tokens, 1, return_logprob=True, logprob_start_len=0)
        return np.array([row[0] for row in answer["meta_info"]["input_token_logprobs"][1:]])


@contextlib.contextmanager
def serving(folder, place, *arguments):
    """A `Server` on loopback."""
    port = free_port()
    (place / "path" / "vllm").mkdir(parents=True)
    (place / "path" / "vllm" / "__init__.py").touch()
    (place / "path" / "vllm" / "_custom_ops.py").symlink_to(HERE / "rotary.py")
    command = [interpreter(), "-m", "sglang.launch_server", "--model-path", str(folder), "--skip-tokenizer-init"]
    command += [word for pair in CPU.items() for word in pair]
    command += ["--skip-server-warmup", "--host", "127.0.0.1", "--port", str(port), *arguments]
    server = Server(f"http://127.0.0.1:{port}", place / "server.log")
    with live_server.running(command, environment(PYTHONPATH=str(place / "path")), server):
        yield server
