"""vLLM's server. Verified against vLLM 0.32.0 on a CPU."""

from __future__ import annotations

import os
from typing import Any, Literal, get_args

from jaxlowprec.weight_sync.engines.disk import DiskEngine

WITHOUT = "needs a vLLM server that was started with VLLM_SERVER_DEV_MODE=1, and its URL without a path such as /v1"
Mode = Literal["abort", "wait", "keep"]
"""What happens to running requests while weights change."""


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
