"""Buckets as SGLang's `/update_weights_from_tensor` reads them ("flattened_bucket"), written without torch.

A payload is a pickle of

    {"flattened_tensor": uint8 [nbytes], "metadata": [FlattenedTensorMetadata(name, shape, dtype, begin, end, nbytes)]}

in which the tensor is a file of shared memory that torch maps, or has its bytes with it. SGLang's unpickler knows the
few functions that are named here, and refuses others. torch's own pickles of CPU tensors hold a descriptor that only
the processes of one program can exchange.

Source: SGLang 0.5.23 (srt/weight_sync/tensor_bucket.py, srt/utils/common.py), torch 2.13 and 2.14
(multiprocessing/reductions.py, serialization.py, ATen's MapAllocator).
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

from jaxlowprec.checkpoints.files.dtypes import numpy_dtype
from jaxlowprec.weight_sync.bucket import BucketHeader, Placed

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


def _metadata(placed: Placed) -> bytes:
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
    """What `torch.save` makes of a storage in its format without a zip archive."""
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
