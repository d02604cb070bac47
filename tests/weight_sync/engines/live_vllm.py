"""vLLM in an environment of its own, whose interpreter JAXLOWPREC_VLLM_PYTHON names; scripts/vllm.sh makes one."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time
import tomllib
import urllib.error
import urllib.request

import numpy as np
import pytest

import jaxlowprec
import jaxlowprec_command
from tests.weight_sync.engines import models
from tests.weight_sync.syncing import free_port

VARIABLE = "JAXLOWPREC_VLLM_PYTHON"
ROOT = pathlib.Path(__file__).parents[3]
PROGRAM = pathlib.Path(__file__).with_name("live_vllm_process.py")
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
    """The variables of a process of vLLM: without those that are about this library's own environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_", "VIRTUAL_ENV"))}
    return kept | QUIET | added


def ask(folders, tokens, generated, place):
    """[(log-probabilities of each token of the prompt but the first [tokens - 1, vocabulary], greedy tokens)]."""
    question, answer = place / "question.json", place / "answer.npz"
    question.write_text(json.dumps({"folders": list(map(str, folders)), "tokens": tokens, "generated": generated}))
    command = [interpreter(), str(PROGRAM), str(question), str(answer)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    with np.load(answer) as said:
        return [(said[f"prompt_{i}"], said[f"greedy_{i}"]) for i in range(len(folders))]


class Server:
    """A server of one folder."""

    def __init__(self, url, log):
        self.url, self._log = url, log

    def call(self, path, body=None, timeout=120):
        """The object that it answers to a POST, or a GET without a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read() or b"null")

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

    def output(self):
        """The end of what it wrote."""
        return self._log.read_text()[-4000:]


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
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env=environment(VLLM_SERVER_DEV_MODE="1", **variables),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        _wait(server, process)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def _wait(server, process, seconds=300):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert process.poll() is None, server.output()
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(server.url + "/health", timeout=5).close()
            return
        time.sleep(0.5)
    raise AssertionError(f"vLLM did not start within {seconds} s: {server.output()}")
