"""Buckets as SGLang's `/update_weights_from_tensor` reads them ("flattened_bucket"), written without torch.

A payload is a pickle of

    {"flattened_tensor": uint8 [nbytes], "metadata": [FlattenedTensorMetadata(name, shape, dtype, begin, end, nbytes)]}

in which the tensor is a file of shared memory that torch maps, or has its bytes with it. SGLang's unpickler knows the
few functions that are named here, and refuses others. torch's own pickles of CPU tensors hold a descriptor that only
the processes of one program can exchange. A file of shared memory has a name instead, so that a process of another
program on the same machine, and of the same user, can open it.

Source: SGLang 0.5.23 (srt/weight_sync/tensor_bucket.py, srt/utils/common.py), torch 2.13 and 2.14
(multiprocessing/reductions.py, serialization.py, ATen's MapAllocator, libshm).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pathlib
import pickle
import secrets
import struct
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.files.dtypes import numpy_dtype
from jaxlowprec.locks import locked
from jaxlowprec.weight_sync.bucket import BucketEntry, BucketHeader
from jaxlowprec.weight_sync.errors import Refused

_LEGACY = (0x1950A86A20F9469CFC6C, 1001)  # torch's mark of a saved storage, and the version of that format
_SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def in_shared_memory(header: BucketHeader, name: str) -> bytes:
    """The payload of a bucket in shared memory. Engines on this machine may read it any number of times.

    Arguments:
        header: of at least one byte.
        name: the name of a `SharedBytes` that has them, until the engine has read them.
    """
    storage = _call(
        "torch.multiprocessing.reductions.rebuild_storage_filename",
        _global("torch.UntypedStorage"),
        _plain(b""),  # the engine's own process that watches over shared memory
        _plain(f"/{name}".encode()),
        _plain(header.nbytes),
    )
    typed = _call("torch.multiprocessing.reductions.rebuild_typed_storage", storage, _global("torch.uint8"))
    layout = _plain((0, (header.nbytes,), (1,), False))  # offset, shape, strides, whether it has a gradient
    tensor = _call("torch.multiprocessing.reductions.rebuild_tensor", _global("torch.Tensor"), typed, layout)
    return _bucket(header, tensor)


def with_bytes(header: BucketHeader, payload: Any) -> bytes:
    """The payload of a bucket that holds the bytes, uint8 [nbytes]."""
    saved = _saved_storage(bytes(payload))
    storage = _call("torch.storage._load_from_bytes", b"\x8e" + struct.pack("<Q", len(saved)) + saved)
    hooks = _call("collections.OrderedDict")
    parts = [_plain(part) for part in (0, (header.nbytes,), (1,), False)]
    return _bucket(header, _call("torch._utils._rebuild_tensor_v2", storage, *parts, hooks))


def _bucket(header: BucketHeader, tensor: bytes) -> bytes:
    metadata = b"(" + b"".join(map(_metadata, header.entries)) + b"l"
    content = b"(" + _plain("flattened_tensor") + tensor + _plain("metadata") + metadata + b"d"
    return b"\x80\x04" + content + b"."


def _metadata(placed: BucketEntry) -> bytes:
    entry = placed.entry
    dtype = numpy_dtype(entry.dtype)
    assert dtype is not None  # Entry refuses dtypes without one
    return _call(
        "sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata",
        _plain(entry.name),
        _call("torch.Size", _plain(entry.shape)),
        _global(f"torch.{dtype.name}"),
        *map(_plain, (placed.offset, placed.end, entry.nbytes)),
    )


def _saved_storage(data: bytes) -> bytes:
    """A storage in the format of `torch.save` without a zip archive."""
    key = "0"
    place = (_plain(part) for part in (key, "cpu", len(data), None))  # the last: it is not a view
    storage = b"(" + _plain("storage") + _global("torch.ByteStorage") + b"".join(place) + b"tQ"
    before = b"".join(pickle.dumps(part, 2) for part in (*_LEGACY, _SYSTEM))
    return before + b"\x80\x02" + storage + b"." + pickle.dumps([key], 2) + struct.pack("<q", len(data)) + data


def _call(function: str, *arguments: bytes) -> bytes:
    """The pickle of a call of a function, whose arguments are pickles."""
    return _global(function) + b"(" + b"".join(arguments) + b"tR"


def _global(path: str) -> bytes:
    module, _, name = path.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def _plain(value: Any) -> bytes:
    """The pickle of a number, a text, bytes or a tuple, without its first mark and its end."""
    return pickle.dumps(value, 3)[2:-1]


SHARED_MEMORY = pathlib.Path("/dev/shm")
"""The folder of POSIX shared memory, where torch looks for names."""

_PREFIX = "jaxlowprec-sglang-"
_BEFORE = 64  # bytes before the tensor, which begin with the number of torch's holders, an int32
_HOLDERS = 1 << 30  # torch removes the file when the number is 0: `SharedBytes` removes it
_LOCKED = 1.0  # seconds that another trainer may look at a new file


class SharedBytes:
    """A file of shared memory that torch maps as a tensor uint8 [nbytes].

    Arguments:
        nbytes: at least 1.

    Attributes:
        name: the file's name in `SHARED_MEMORY`.
        array: its bytes, uint8 [nbytes], aligned to 64 bytes.

    Raises:
        Refused: there is no such memory, or not enough.

    >>> held = SharedBytes(3)
    >>> held.array[:] = 7
    >>> (SHARED_MEMORY / held.name).read_bytes()[-4:]
    b'\\x00\\x07\\x07\\x07'
    >>> held.close()
    >>> (SHARED_MEMORY / held.name).exists()
    False
    """

    def __init__(self, nbytes: int):
        try:
            self._descriptor, self.name = _new_file()
        except OSError as error:
            raise Refused(f"send: {SHARED_MEMORY}: {error.strerror}; pass memory='copied'") from error
        try:
            os.posix_fallocate(self._descriptor, 0, _BEFORE + nbytes)  # a hole would end the process with SIGBUS
            whole = np.frombuffer(mmap.mmap(self._descriptor, _BEFORE + nbytes), np.uint8)
        except OSError as error:
            self.close()
            raise Refused(
                f"send: {SHARED_MEMORY} does not hold {nbytes} more bytes: {error.strerror}; make it larger (Docker: "
                "--shm-size, or --ipc=host), or pass memory='copied'"
            ) from error
        whole[:_BEFORE].view(np.int32)[0] = _HOLDERS
        self.array = whole[_BEFORE:]

    def close(self) -> None:
        """Removes the file. Memory that is mapped stays until it is not."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            (SHARED_MEMORY / self.name).unlink(missing_ok=True)
            os.close(descriptor)


def remove_leftovers() -> None:
    """Removes the files of trainers that were killed: those that nobody has locked."""
    for path in SHARED_MEMORY.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # it is gone, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:  # a trainer has it
            pass
        finally:
            os.close(descriptor)


def _new_file() -> tuple[int, str]:
    """A new file, which is locked: (descriptor, name)."""
    while True:
        name = _PREFIX + secrets.token_hex(16)
        descriptor = os.open(SHARED_MEMORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if locked(descriptor, _LOCKED) and os.fstat(descriptor).st_nlink:
            return descriptor, name
        os.close(descriptor)  # another trainer took it for a leftover before it was locked
