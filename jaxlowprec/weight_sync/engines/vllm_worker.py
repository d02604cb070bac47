"""The backend "jaxlowprec" of vLLM's weight transfer: each worker receives versions over TCP and loads them.

vLLM finds it by an entry point (see `jaxlowprec_command.vllm_plugin`) where both packages are installed, and makes a
`TransferEngine` in each worker. That class is made when it is first asked for, since its base class is vLLM's.

Before it is given to the model, a version is complete in the worker's host memory and its checksums are verified. It
stays there until the next one comes: each worker needs host memory for a whole checkpoint, two during a sync.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver


@dataclasses.dataclass(frozen=True)
class Listen:
    """The address on which the workers listen: the body of vLLM's `/init_weight_transfer_engine`.

    Attributes:
        port: the port of worker 0; worker i listens at `port + i`.
        secret_file: a file on the workers' machine with the secret that trainers have to hold, too.
        host, timeout: see `TcpReceiver`.
    """

    port: int
    secret_file: str
    host: str = "127.0.0.1"
    timeout: float = 600.0


@dataclasses.dataclass(frozen=True)
class Load:
    """The version to load: the body of vLLM's `/update_weights`."""

    version: int


class Inbox:
    """The versions that a worker has received. It listens from `listen` to `close`.

    >>> Inbox().arrays(3)
    Traceback (most recent call last):
    ValueError: Inbox: version 3 is to be loaded; 0 has been received: send it before /update_weights
    """

    def __init__(self) -> None:
        self._receiver = Receiver()
        self._listening: TcpReceiver | None = None

    def listen(self, at: Listen, worker: int) -> None:
        """Listens for a trainer, in place of the one before. What was received stays.

        Raises:
            OSError: the address is taken, or the file of the secret cannot be read. ValueError: the secret is short.
        """
        self.close()
        secret = read_secret(at.secret_file)
        self._listening = TcpReceiver(self._receiver, secret, at.host, at.port + worker, timeout=at.timeout)

    def arrays(self, version: int) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of the version that was received last, by their names in the checkpoint. Raises ValueError."""
        weights = self._receiver.weights
        if not version or weights.version != version:
            raise ValueError(
                f"Inbox: version {version} is to be loaded; {weights.version} has been received: send it before "
                "/update_weights"
            )
        return iter(weights.items())

    def close(self) -> None:
        """Stops listening."""
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.close()


def read_secret(path: str | pathlib.Path) -> bytes:
    """The secret in a file, without white space around it. Raises OSError if the file cannot be read."""
    try:
        return pathlib.Path(path).read_bytes().strip()
    except OSError as error:
        needs = "needs a file with the secret, the same for the trainer and vLLM's workers"
        raise type(error)(error.errno, f"{error.strerror}; {needs}", str(path)) from None


def to_torch(array: np.ndarray) -> Any:
    """A tensor of an array's own bytes, on the CPU; nobody may write to it.

    Raises:
        ValueError: torch has no such dtype.
    """
    import torch

    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"to_torch: torch has no dtype {array.dtype.name}")
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if not flat.flags.writeable:  # torch warns of read-only memory, whose address says the same
        flat = np.asarray(_Readable(flat))
    return torch.from_numpy(flat).view(dtype).reshape(array.shape)


class _Readable:
    """Memory of a read-only array as numpy's array interface, which says that it may be written to."""

    def __init__(self, flat: np.ndarray):
        self._flat = flat
        self.__array_interface__ = flat.__array_interface__ | {"data": (flat.ctypes.data, False)}


def __getattr__(name: str) -> Any:
    if name == "TransferEngine":
        return _transfer_engine()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _transfer_engine() -> type:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class TransferEngine(WeightTransferEngine):
        """vLLM's engine for one worker. vLLM calls its methods in this order; the last three once per version."""

        init_info_cls, update_info_cls = Listen, Load

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._inbox = Inbox()

        def init_transfer_engine(self, init_info: Listen) -> None:
            parallel = self.parallel_config
            self._inbox.listen(init_info, parallel.data_parallel_index * parallel.world_size + parallel.rank)

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Load) -> None:
            arrays = self._inbox.arrays(update_info.version)
            self.model.load_weights((name, to_torch(array)) for name, array in arrays)

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            self._inbox.close()

    return TransferEngine
