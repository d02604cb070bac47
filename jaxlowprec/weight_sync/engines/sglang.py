"""SGLang's server, which loads versions from a shared disk; and what all transports to SGLang share."""

from __future__ import annotations

import os
import re
from typing import Any, Literal, get_args

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.checkpoints.schemes import NAMES, by_name
from jaxlowprec.weight_sync.engines.disk import DiskEngine
from jaxlowprec.weight_sync.engines.http import HttpEngine
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.manifest import Entry, Manifest

WITHOUT = "needs an SGLang server, and its URL without a path such as /v1"
Mode = Literal["abort", "retract", "in_place"]

NEWEST_READ = (0, 5, 23)
"""The newest SGLang whose source was read, for what `check_int4` refuses."""

_REPACKED = {scheme.required[0] for scheme in map(by_name, NAMES) if scheme.repacked}
_RESTORED = by_name("w4a16").required[0]
_ZERO_POINTS = by_name("w4a16_asym").required[-1]
_NOT_RESTORED = (
    "repacks INT4 weights once and restores only those of experts in w4a16: it cannot load others again. Leave them "
    "unquantised, or start a server with the version"
)
_OTHER_ORDER = (
    "takes zero points of experts to be in AWQ's order, which compressed-tensors' are not: its weights would be wrong. "
    "Use w4a16, which has none"
)


class SGLang(DiskEngine):
    """Makes an SGLang server load versions from a shared disk. See `Transport` and `DiskEngine` for the rest.

    Verified against SGLang 0.5.23 on a CPU. The calls: `/pause_generation`, `/flush_cache`,
    `/update_weights_from_disk`, `/continue_generation`, `/model_info`. SGLang itself restores repacked weights of
    experts before it loads, and repacks them afterwards. `SGLangTensors` needs no disk.

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

    without = WITHOUT

    def __init__(
        self,
        url: str,
        path: str | os.PathLike[str],
        *,
        mode: Mode = "retract",
        **options: Any,
    ):
        check_mode("SGLang", mode)
        super().__init__(url, path, **options)
        self._mode = mode

    def begin(self, version: int, manifest: Manifest, timeout: float) -> None:
        """Starts a new version. Raises Refused for weights that the server cannot load again, see `check_int4`."""
        check_int4(self._engine, manifest, timeout)
        super().begin(version, manifest, timeout)

    def _pause(self, timeout: float) -> None:
        pause(self._engine, self._mode, timeout)

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
        go_on(self._engine, timeout)

    def _served(self, timeout: float) -> str:
        return served(self._engine, timeout)


def check_mode(who: str, mode: str) -> None:
    """Raises ValueError unless SGLang knows the mode."""
    if mode not in get_args(Mode):
        raise ValueError(f'{who}: mode is {mode!r}; needs "abort", "retract" or "in_place"')


def pause(engine: HttpEngine, mode: Mode, timeout: float) -> None:
    """Pauses generation, and drops the key-value cache of the old weights."""
    engine.call("POST", "/pause_generation", {"mode": mode}, timeout=timeout)
    if mode == "abort":  # the scheduler goes on, to end what is aborted
        engine.call("POST", "/flush_cache", timeout=timeout, query=f"timeout={timeout:g}")
    elif mode == "retract":  # it has stopped: with a timeout it would wait for the requests that wait for it
        engine.call("POST", "/flush_cache", timeout=timeout)


def go_on(engine: HttpEngine, timeout: float) -> None:
    """Lets generation go on."""
    engine.call("POST", "/continue_generation", {}, timeout=timeout)


def served(engine: HttpEngine, timeout: float) -> str:
    """The version of the weights, as the engine calls it."""
    return str(engine.call("GET", "/model_info", timeout=timeout).get("weight_version", ""))


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of an SGLang version; () for a text without them.

    >>> numbers("0.5.10.post1")
    (0, 5, 10)
    """
    found = re.match(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})(?![0-9])", version)
    return () if found is None else tuple(map(int, found.groups()))


def check_int4(engine: HttpEngine, manifest: Manifest, timeout: float) -> None:
    """Raises Refused for INT4 weights that SGLang cannot load a second time, or would read wrongly.

    Its dense INT4 layers replace their parameters by repacked ones that have no loader, and have no hook that restores
    them; an exception while it loads ends the server. Experts in compressed-tensors' format have the hook.
    """
    found = ((entry.name, why) for entry in manifest.entries if (why := _why_not(entry)))
    name, why = next(found, ("", ""))
    if not why:
        return
    said = str(engine.call("GET", "/server_info", timeout=timeout, needs="version")["version"])
    if numbers(said) <= NEWEST_READ:
        raise Refused(f"begin: {brief(name)}: SGLang {brief(said)} {why}")


def _why_not(entry: Entry) -> str | None:
    module, _, part = entry.name.rpartition(".")
    of_experts = ".experts." in f".{module}."
    if entry.dtype != "I32":
        return None
    if part == _ZERO_POINTS and of_experts:
        return _OTHER_ORDER
    return _NOT_RESTORED if part in _REPACKED and not (part == _RESTORED and of_experts) else None
