"""vLLM in an environment of its own, whose interpreter JAXLOWPREC_VLLM_PYTHON names; scripts/vllm.sh makes one."""

import contextlib
import json
import os
import pathlib
import subprocess
import tomllib

import numpy as np
import pytest

import jaxlowprec
import jaxlowprec_command
from tests.ports import free_port
from tests.weight_sync.engines import live_server, models
from tests.weight_sync.engines.live_server import LiveServer

VARIABLE = "JAXLOWPREC_VLLM_PYTHON"
ROOT = pathlib.Path(__file__).parents[3]
PROGRAM = pathlib.Path(__file__).with_name("live_vllm_process.py")
WITHOUT_AMX = pathlib.Path(__file__).with_name("avx512")
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def interpreter():
    """The interpreter of vLLM's environment; skips the test where vLLM cannot run."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} names no interpreter that has vLLM: see scripts/vllm.sh")
    cpu = pathlib.Path("/proc/cpuinfo")
    if not cpu.exists() or "avx512f" not in cpu.read_text().split():
        pytest.skip("vLLM's kernels for 4-bit weights on CPUs need AVX-512, which this processor lacks")
    return os.environ[VARIABLE]


def environment(**added):
    """The variables of a process of vLLM."""
    path = os.pathsep.join([str(WITHOUT_AMX), *filter(None, [added.pop("PYTHONPATH", "")])])
    return live_server.environment(**(QUIET | added), PYTHONPATH=path)


def ask(folders, tokens, generated, place):
    """[(log-probabilities of each token of the prompt but the first [tokens - 1, vocabulary], greedy tokens)].

    `folders`: of models, or pairs of a model's and its adapter's.
    """
    question, answer = place / "question.json", place / "answer.npz"
    bases, adapters = zip(*(f if isinstance(f, tuple) else (f, None) for f in folders), strict=True)
    said = {"folders": bases, "adapters": adapters, "tokens": tokens, "generated": generated}
    question.write_text(json.dumps(said, default=str))
    command = [interpreter(), str(PROGRAM), str(question), str(answer)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    with np.load(answer) as said:
        return [(said[f"prompt_{i}"], said[f"greedy_{i}"]) for i in range(len(bases))]


class Server(LiveServer):
    """A server of one folder."""

    def log_probabilities(self, tokens):
        """Those of each token of a prompt but the first [tokens - 1]."""
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        rows = self.call("/v1/completions", body)["choices"][0]["prompt_logprobs"][1:]
        return np.array([row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)])

    def generate(self, tokens, count):
        """(why it ended, the tokens)."""
        body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        choice = self.call("/v1/completions", body)["choices"][0]
        return choice["finish_reason"], choice["token_ids"]


def with_this_library(place):
    """A folder for PYTHONPATH: this library and its entry points, without the packages that are installed beside it."""
    for package in (jaxlowprec, jaxlowprec_command):
        (place / package.__name__).symlink_to(pathlib.Path(package.__file__).parent)
    described = place / "jaxlowprec-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxlowprec\nVersion: 0\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in points.items()]
    (described / "entry_points.txt").write_text("\n".join(lines))
    return place


@contextlib.contextmanager
def serving(folder, place, *arguments, **variables):
    """A `Server` on loopback, with the calls that change weights."""
    port, log = free_port(), place / "server.log"
    command = [interpreter(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += [
        "--skip-tokenizer-init",
        "--enforce-eager",
        "--max-model-len",
        str(models.LONGEST),
        "--max-num-seqs",
        "4",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    variables = environment(VLLM_SERVER_DEV_MODE="1", **variables)
    with live_server.running(command, variables, Server(f"http://127.0.0.1:{port}", log)) as server:
        yield server
