"""examples/rl_ray.py: what its workers serve, and what becomes of a run whose processes are killed."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.weight_sync import Bucketizer, Refused, WeightSource
from tests.helpers import python_environment, refused, run_python

pytest.importorskip("ray", reason="Ray is not installed: pip install jaxlowprec[ray]")
import rl_ray  # noqa: E402
from rl.policy import RECIPE, Config, Policy  # noqa: E402
from rl.served import digests  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_once")
EXAMPLES = pathlib.Path(rl_ray.__file__).parent
SMALL = ("--layers", "1", "--width", "32", "--digits", "2", "--prompts", "4", "--answers", "4", "--updates", "1")
LAST = 20
OPTIONS = (*SMALL, "--iterations", str(LAST), "--checkpoint-every", "4", "--timeout", "400")
VARYING = ("sync_ms", "generate_ms", "learn_ms", "answered_by")  # times, and who answered


class TestWorker:
    """Of a worker in this process, without Ray."""

    CONFIG = Config(layers=1, width=32, length=5)

    def version(self, number, seed):
        """A version, its buckets, and the digests of the weights that it consists of."""
        exported = jlp.quantize_params(Policy(self.CONFIG, nnx.Rngs(seed)), RECIPE)
        source = WeightSource(exported)
        with Bucketizer(max_bytes=8 << 10).buckets(source, number) as buckets:
            copies = [dataclasses.replace(bucket, payload=bucket.payload.copy()) for bucket in buckets]
        assert len(copies) > 1
        return rl_ray.Version(number, source.manifest, "first"), copies, digests(exported)

    def test_only_whole_versions_are_served(self):
        worker = rl_ray.Worker(self.CONFIG)
        version, buckets, first = self.version(5, seed=0)
        worker.receive(version, *buckets)
        assert digests(worker._writer.model) == first

        version, buckets, second = self.version(6, seed=1)
        assert second != first
        changed = dataclasses.replace(buckets[-1], payload=buckets[-1].payload ^ np.uint8(1))
        for fault, sent in (("checksum", [*buckets[:-1], changed]), ("tensor", buckets[:-1])):
            with pytest.raises(Refused, match=fault):
                worker.receive(version, *sent)
            assert digests(worker._writer.model) == first and worker._receiver.state == "serving"
        worker.receive(version, *buckets)
        assert digests(worker._writer.model) == second

    def test_only_a_restarted_trainer_may_go_back(self):
        worker = rl_ray.Worker(self.CONFIG)
        version, buckets, _ = self.version(5, seed=0)
        older, others, expected = self.version(4, seed=1)
        worker.receive(version, *buckets)
        with pytest.raises(Refused, match="version 4 is stale; 5 is served"):
            worker.receive(older, *others)
        worker.receive(dataclasses.replace(older, trainer="second"), *others)
        assert digests(worker._writer.model) == expected


class Run:
    """The program in a process of its own. A context manager: at the end of its block it is dead.

    Attributes:
        said: the lines that it has printed.
    """

    def __init__(self, out, *options):
        path = os.pathsep.join([str(EXAMPLES), python_environment()["PYTHONPATH"]])
        settings = {"RAY_worker_register_timeout_seconds": "600"}  # for workers that start slowly on a busy machine
        settings |= {"RAY_DEDUP_LOGS": "0"}  # each worker's line at once: a stopped program would not print it later
        environment = python_environment(PYTHONPATH=path, **settings)
        command = [sys.executable, "-u", str(EXAMPLES / "rl_ray.py"), "--out", str(out), *OPTIONS, *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        for _ in range(9):  # Ray gives itself 30 seconds to start, which a busy machine may not have for it
            self.said = []
            self.process = subprocess.Popen(command, env=environment, **pipes)
            self._reader = threading.Thread(target=self.said.extend, args=(self.process.stdout,))
            self._reader.start()
            while self.process.poll() is None and "trainer: process" not in self.text:
                time.sleep(0.01)
            if self.process.poll() is not None:
                self._reader.join(60)
            if "timed out during startup" not in self.text:
                break

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.wait()

    @property
    def text(self):
        return "".join(self.said)

    def wait(self):
        code = self.process.wait(600)
        self._reader.join(60)
        return code

    def found(self, pattern, count=1):
        """The first `count` matches of a line with a group, once the program has printed them."""
        until = time.monotonic() + 600
        while len(found := re.findall(pattern, self.text)) < count:
            assert self.process.poll() is None and time.monotonic() < until, self.text
            time.sleep(0.01)
        return found

    def latest(self, role, count=1):
        """The id of an actor's process, after so many have been started."""
        return int(self.found(rf"{role}: process (\d+)", count)[-1])

    @contextlib.contextmanager
    def held(self, iteration):
        """After an iteration, the program asks for no further one within the block."""
        self.found(rf"(iteration {iteration}/)")
        self.process.send_signal(signal.SIGSTOP)
        yield
        self.process.send_signal(signal.SIGCONT)


def numbers(out):
    """The records of a run, without what differs from run to run."""
    records = json.loads((out / "report.json").read_text())["iterations"]
    return [{name: value for name, value in record.items() if name not in VARYING} for record in records]


def answering(out):
    """The processes that wrote answers, in the order of their first ones."""
    records = json.loads((out / "report.json").read_text())["iterations"]
    return list(dict.fromkeys(process for record in records for process in record["answered_by"]))


def addresses(process):
    """The addresses on which a process listens for TCP connections, as /proc has them: hexadecimal, with ports."""
    links = [file.readlink() for file in pathlib.Path(f"/proc/{process}/fd").iterdir() if file.is_symlink()]
    sockets = {str(link) for link in links}
    lines = [line for kind in ("tcp", "tcp6") for line in pathlib.Path(f"/proc/net/{kind}").read_text().splitlines()]
    fields = [line.split() for line in lines]
    return {field[1] for field in fields if field[3] == "0A" and f"socket:[{field[9]}]" in sockets}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run with two workers, its text, and the addresses on which it listened."""
    out = tmp_path_factory.mktemp("rl")
    with Run(out, "--rollouts", "2") as run:
        actors = [run.latest("trainer"), run.latest("rollout", 2)]
        with run.held(1):
            raylet = next(p for p in pathlib.Path("/proc").glob("[0-9]*") if raylet_of(p, run.process.pid))
            processes = [run.process.pid, int(raylet.name), *actors]
            listening = set().union(*map(addresses, processes))
        assert run.wait() == 0, run.text
    return out, run.text, listening


def raylet_of(folder, parent):
    with contextlib.suppress(OSError):
        stat = (folder / "stat").read_text().rpartition(")")[2].split()
        return int(stat[1]) == parent and "/raylet/raylet" in (folder / "cmdline").read_text()
    return False


@pytest.mark.slow
class TestRun:
    def test_two_workers_answer_with_the_numbers_without_ray(self, whole, tmp_path):
        out, said, _ = whole
        assert len(answering(out)) == 2
        assert f"train_rollout_logprob_abs_diff: 0 in {LAST} iterations" in said
        run_python(str(EXAMPLES / "rl_loop.py"), "--out", str(tmp_path), *OPTIONS)
        assert numbers(out) == numbers(tmp_path)

    def test_it_listens_on_loopback_only(self, whole):
        assert len(whole[2]) >= 4
        loopback = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")
        assert [address for address in whole[2] if not address.startswith(loopback)] == []

    def test_killed_workers_and_trainers_come_back(self, whole, tmp_path):
        """At any moment of an iteration; the trainer to its checkpoint, whose version is older than the workers'."""
        with Run(tmp_path) as run:
            run.found("(iteration 3/)")
            os.kill(first := run.latest("rollout"), signal.SIGKILL)
            second = run.latest("rollout", 2)
            with run.held(6):
                os.kill(run.latest("trainer"), signal.SIGKILL)
            run.found("(iteration 10/)")
            os.kill(run.latest("trainer", 2), signal.SIGKILL)
            assert run.wait() == 0, run.text
        assert [int(n) for n in re.findall(r"continues after iteration (\d+)", run.text)][:2] == [0, 4]
        assert numbers(tmp_path) == numbers(whole[0])
        assert answering(tmp_path) == [first, second]

    def test_a_silent_worker_is_replaced(self, whole, tmp_path):
        with Run(tmp_path, "--timeout", "120") as run:
            run.found("(iteration 3/)")
            os.kill(first := run.latest("rollout"), signal.SIGSTOP)
            assert run.wait() == 0, run.text
        assert numbers(tmp_path) == numbers(whole[0])
        assert answering(tmp_path)[-2] == first  # and then the one that has replaced it

    def test_a_killed_program_takes_all_along_and_resumes(self, whole, tmp_path):
        with Run(tmp_path) as run, run.held(10):
            actors = [run.latest("trainer"), run.latest("rollout")]
            run.process.kill()
            until = time.monotonic() + 120
            while any(pathlib.Path(f"/proc/{actor}").exists() for actor in actors):
                assert time.monotonic() < until
                time.sleep(0.1)
        said = refused(str(EXAMPLES / "rl_ray.py"), "--out", str(tmp_path), *OPTIONS)
        assert "rl_ray: --out " in said and "has checkpoints; --resume goes on from them" in said
        with Run(tmp_path, "--resume") as run:
            assert run.wait() == 0, run.text
        assert "iteration 1/" not in run.text and numbers(tmp_path) == numbers(whole[0])

    def test_one_changed_code_on_a_workers_side_ends_the_run(self, tmp_path):
        with Run(tmp_path, "--damage-version", "2") as run:
            assert run.wait() == 1
        assert "rl_ray: version 2: rollout 0: weights that differ: blocks.0.qkv.kernel.data\n" in run.text
        assert "iteration 2/" not in run.text and "Traceback" not in run.text
        assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize("rollouts", ["0", "17"])
def test_a_worker_needs_a_prompt(tmp_path, refused_by, rollouts):
    said = refused_by(rl_ray.arguments, "--out", tmp_path, "--rollouts", rollouts)
    assert f"--rollouts {rollouts}: needs 1 to --prompts, 16" in said
