"""vLLM's server, which loads versions from a shared disk, or by the weight transfer backend "jaxlowprec" over TCP.

Verified against vLLM 0.32.0 on a CPU.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import urllib.parse
from typing import Any, Literal, get_args

from jaxlowprec.weight_sync.bucket import Bucket
from jaxlowprec.weight_sync.engines.disk import DiskEngine, LoadedShapes
from jaxlowprec.weight_sync.engines.http import HttpEngine
from jaxlowprec.weight_sync.engines.vllm_worker import Listen, read_secret
from jaxlowprec.weight_sync.errors import PeerLost, SyncError
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.transports.tcp import TcpTransport
from jaxlowprec.weight_sync.transports.transport import Closing
from jaxlowprec.weight_sync.versions import said_version

WITHOUT = "needs a vLLM server that was started with VLLM_SERVER_DEV_MODE=1, and its URL without a path such as /v1"
Mode = Literal["abort", "wait", "keep"]
"""The fate of running requests while weights change."""


class VLLM(DiskEngine):
    """Makes a vLLM server load versions from a shared disk. See `Transport` and `DiskEngine` for the rest.

    Verified against vLLM 0.32.0 on a CPU. The server has these calls only with VLLM_SERVER_DEV_MODE=1, which lets
    everybody who reaches it call any of its methods: keep it on a private network. The calls are `/pause`,
    `/collective_rpc` with `reload_weights`, `/reset_prefix_cache`, `/update_weight_version`, `/resume` and
    `/weight_info`; vLLM 0.33.0 has the same. `VLLMTransfer` needs no disk, but this library in vLLM's environment.

    Arguments:
        url: "http://host:8000".
        path: the folder of versions.
        mode: what happens to running requests: "abort" ends them, "wait" lets them finish, "keep" keeps them and their
            key-value cache of the old weights.
        options: see `DiskEngine`.

    >>> transport = VLLM("http://localhost:8000", "/shared/weights", mode="wait")
    >>> VLLM("http://localhost:8000", "/shared/weights", mode="stop")
    Traceback (most recent call last):
    ValueError: VLLM: mode is 'stop'; needs "abort", "wait" or "keep"
    """

    without = WITHOUT

    def __init__(
        self,
        url: str,
        path: str | os.PathLike[str],
        *,
        mode: Mode = "wait",
        **options: Any,
    ):
        check_mode("VLLM", mode)
        super().__init__(url, path, **options)
        self._mode = mode

    def _pause(self, timeout: float) -> None:
        self._engine.call("POST", "/pause", timeout=timeout, query=f"mode={self._mode}")

    def _load(self, folder: str, version: int, timeout: float) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}, "timeout": timeout}
        self._engine.call("POST", "/collective_rpc", body, timeout=timeout, needs="results")
        if self._mode != "keep":  # drops prefixes that were computed with the old weights
            self._engine.call("POST", "/reset_prefix_cache", timeout=timeout)
        self._engine.call("POST", "/update_weight_version", {"new_version": str(version)}, timeout=timeout)

    def _go_on(self, timeout: float) -> None:
        self._engine.call("POST", "/resume", timeout=timeout)

    def _served(self, timeout: float) -> str:
        return str(self._engine.call("GET", "/weight_info", timeout=timeout).get("weight_version", ""))


def check_mode(who: str, mode: str) -> None:
    """Raises ValueError unless vLLM knows the mode."""
    if mode not in get_args(Mode):
        raise ValueError(f'{who}: mode is {mode!r}; needs "abort", "wait" or "keep"')


class VLLMTransfer(Closing):
    """Sends versions to the memory of vLLM's workers, and makes the model load them. See `Transport`.

    vLLM serves the old version while the new one is sent, and is paused only while it loads, in `commit`. Where
    vLLM runs, jaxlowprec has to be installed, too, and the server needs VLLM_SERVER_DEV_MODE=1 and
    `--weight-transfer-config '{"backend": "jaxlowprec"}'`. Its development mode lets everybody who reaches the server
    call any of its methods: keep it on a private network.

    If loading fails, vLLM's model holds parts of two versions and computes nothing useful until the next version.

    Arguments:
        url: "http://host:8000". The workers are on that host.
        port: the first of the ports that the workers listen at, one after the other.
        secret_file: a file with a secret that trainer and workers share: at least 16 bytes that nobody can guess.
        engine_secret_file: that file's path where vLLM runs. None: the same path.
        workers: the number of workers: tensor, pipeline and data parallel together.
        mode: what happens to running requests, see `VLLM`.
        host: the address at which the workers listen. None: the URL's host.
        api_key: the key that the server asks for.

    >>> VLLMTransfer("http://localhost:8000", 5000, "/no/secret", workers=0)
    Traceback (most recent call last):
    ValueError: VLLMTransfer: workers is 0; needs at least 1
    """

    takes_arrays = False

    def __init__(
        self,
        url: str,
        port: int,
        secret_file: str | os.PathLike[str],
        *,
        engine_secret_file: str | os.PathLike[str] | None = None,
        workers: int = 1,
        mode: Mode = "wait",
        host: str | None = None,
        api_key: str | None = None,
    ):
        if type(workers) is not int or workers < 1:
            raise ValueError(f"VLLMTransfer: workers is {workers!r}; needs at least 1")
        if type(port) is not int or not 1 <= port <= 65536 - workers:
            raise ValueError(
                f"VLLMTransfer: port is {port!r}; needs a number from 1 to {65536 - workers}, the first of {workers}"
            )
        check_mode("VLLMTransfer", mode)
        self._engine, self._mode = HttpEngine(url, api_key, WITHOUT), mode
        host = host or urllib.parse.urlsplit(url).hostname or ""
        there = os.fspath(secret_file if engine_secret_file is None else engine_secret_file)
        self._listen = Listen(port, there, host)
        secret = read_secret(os.fspath(secret_file))
        self._workers = [TcpTransport(host, port + i, secret) for i in range(workers)]
        self._threads = concurrent.futures.ThreadPoolExecutor(workers)
        self._listening = self._paused = False
        self._loaded = LoadedShapes()

    def version(self, timeout: float) -> int:
        """The newest version that the engine says it serves or that a worker has received."""
        said = said_version(str(self._engine.call("GET", "/weight_info", timeout=timeout).get("weight_version", "")))
        self._connect(timeout)
        return max(said, *self._all("version", timeout))

    def pause(self, timeout: float) -> None:
        """Opens a session with the workers. The engine goes on until they have the version."""
        self._connect(timeout)
        try:
            self._all("pause", timeout)
        except BaseException:
            with contextlib.suppress(SyncError):
                self._all("resume", timeout)  # those that have a session open
            raise

    def begin(self, version: int, manifest: Manifest, timeout: float) -> None:
        """Starts a new version. Raises Refused if shapes are not those of the version that was loaded last."""
        self._loaded.begin(version, manifest)
        self._all("begin", version, manifest, timeout)

    def send(self, bucket: Bucket, timeout: float) -> None:
        """Sends the next bucket to all workers at the same time."""
        self._all("send", bucket, timeout)

    def commit(self, version: int, manifest_hash: str, timeout: float) -> None:
        """Pauses the engine and makes it load what the workers have; each call may take `timeout` s.

        Raises:
            Refused, PeerLost, PeerTimeout: a worker lacks the version, or the engine did not load it.
        """
        self._all("commit", version, manifest_hash, timeout)
        self._paused = True
        self._post("/pause", timeout, query=f"mode={self._mode}")
        self._post("/start_weight_update", timeout)
        try:
            self._post("/update_weights", timeout, {"update_info": {"version": version}})
            self._post("/finish_weight_update", timeout, {"weight_version": str(version)})
        except SyncError as error:
            error.add_note("vLLM's model may hold parts of two versions: send another version, or restart it")
            raise
        self._loaded.commit(version)
        if self._mode != "keep":  # drops prefixes that were computed with the old weights
            self._post("/reset_prefix_cache", timeout)

    def abort(self, reason: str, timeout: float) -> None:
        """The workers drop what they were sent since `begin`."""
        self._all("abort", reason, timeout)

    def resume(self, timeout: float) -> None:
        """Makes the engine go on, and ends the session with the workers."""
        try:
            if self._paused:
                self._post("/resume", timeout)
                self._paused = False
        finally:
            self._all("resume", timeout)

    def close(self) -> None:
        """Ends the connections. The workers listen on, for the next trainer."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()

    def _connect(self, timeout: float) -> None:
        """Makes the workers listen, once per transport."""
        if not self._listening:
            self._post("/init_weight_transfer_engine", timeout, {"init_info": dataclasses.asdict(self._listen)})
            self._listening = True

    def _post(self, path: str, timeout: float, body: dict[str, Any] | None = None, query: str = "") -> None:
        self._engine.call("POST", path, body, timeout=timeout, query=query)

    def _all(self, verb: str, *arguments: Any) -> list[Any]:
        """Calls a verb of all workers' transports, and raises one worker's error once all have answered."""
        calls = [self._threads.submit(getattr(worker, verb), *arguments) for worker in self._workers]
        concurrent.futures.wait(calls)
        try:
            return [call.result() for call in calls]
        except PeerLost as error:
            self._listening = False  # a server that was restarted does not listen: the next session tells it to
            if (workers := len(self._workers)) > 1:
                error.add_note(f"VLLMTransfer: workers is {workers}; vLLM has to have as many, and listen at each port")
            raise
