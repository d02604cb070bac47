"""SGLang's server. Unverified against a real engine: tested against a stub with the request models of SGLang 0.5.23."""

from __future__ import annotations

import os
from typing import Any, Literal

from jaxlowprec.weight_sync.engines.disk import DiskEngine


class SGLang(DiskEngine):
    """Makes an SGLang server load versions from a shared disk. See `Transport` and `DiskEngine` for the rest.

    Unverified against a real engine. The calls are those of SGLang 0.5.23: `/pause_generation`, `/flush_cache`,
    `/update_weights_from_disk`, `/continue_generation`, `/model_info`. Tensors are not sent over HTTP, because SGLang
    unpickles them.

    Arguments:
        url: "http://host:30000".
        path: the folder of versions.
        mode: what happens to running requests: "abort" ends them, "retract" runs them again from their prompts and the
            tokens that they have, "in_place" keeps them and their key-value cache of the old weights.
        options: see `DiskEngine`.

    >>> transport = SGLang("http://localhost:30000", "/shared/weights", mode="retract")
    >>> SGLang("http://localhost:30000", "/shared/weights", mode="stop")
    Traceback (most recent call last):
    ValueError: SGLang: mode is 'stop'; needs "abort", "retract" or "in_place"
    """

    def __init__(
        self,
        url: str,
        path: str | os.PathLike[str],
        *,
        mode: Literal["abort", "retract", "in_place"] = "retract",
        **options: Any,
    ):
        if mode not in ("abort", "retract", "in_place"):
            raise ValueError(f'SGLang: mode is {mode!r}; needs "abort", "retract" or "in_place"')
        super().__init__(url, path, **options)
        self._mode = mode

    def _pause(self, timeout: float) -> None:
        self._engine.call("POST", "/pause_generation", {"mode": self._mode}, timeout=timeout)
        if self._mode != "in_place":  # this mode keeps the cache
            self._engine.call("POST", "/flush_cache", timeout=timeout, query=f"timeout={timeout:g}")

    def _load(self, folder: str, version: int, timeout: float) -> None:
        body = {
            "model_path": folder,
            "load_format": "safetensors",
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": self._mode != "in_place",
        }
        self._engine.call("POST", "/update_weights_from_disk", body, timeout=timeout, needs="success")

    def _go_on(self, timeout: float) -> None:
        self._engine.call("POST", "/continue_generation", {}, timeout=timeout)

    def _served(self, timeout: float) -> str:
        return str(self._engine.call("GET", "/model_info", timeout=timeout).get("weight_version", ""))
