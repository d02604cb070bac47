"""A server that takes tensors as SGLang 0.5.23 does, and a numpy reading of its payloads, without torch."""

import base64
import collections
import io
import mmap
import pickle
import struct

import numpy as np

from jaxlowprec.checkpoints.files.dtypes import BITS, numpy_dtype
from jaxlowprec.weight_sync.engines import torch_payload
from tests.weight_sync.engines.engine_stubs import SGLangStub

DTYPES = {np.dtype(dtype).name: np.dtype(dtype) for dtype in map(numpy_dtype, BITS) if dtype is not None}
Metadata = collections.namedtuple("Metadata", "name shape dtype start_idx end_idx numel")


def mapped(kind, manager, handle, nbytes):
    """The bytes of a file of shared memory, as torch maps them: with 64 bytes before, which count its holders."""
    assert (kind, manager) == ("torch.UntypedStorage", b"") and handle.startswith(b"/")
    with (torch_payload.SHARED_MEMORY / handle.decode()[1:]).open("r+b") as file:
        whole = np.frombuffer(mmap.mmap(file.fileno(), 64 + nbytes), np.uint8)
    assert whole[:4].view(np.int32)[0] > 1000  # torch removes the file when it is 0
    return whole[64:]


def saved(data):
    """The bytes of a storage that was saved by value."""
    file = io.BytesIO(data)
    header = [pickle.load(file) for _ in range(3)]
    assert header[:2] == [0x1950A86A20F9469CFC6C, 1001] and header[2]["little_endian"]
    unpickler = Unpickler(file)
    unpickler.persistent_load = lambda place: place
    kind, storage, key, device, count, view = unpickler.load()
    assert (kind, storage, device, view) == ("storage", "torch.ByteStorage", "cpu", None)
    assert pickle.load(file) == [key] and struct.unpack("<q", file.read(8)) == (count,)
    content = file.read()
    assert len(content) == count
    return np.frombuffer(content, np.uint8)


def strided(storage, offset, shape, strides, gradient, hooks=None):
    assert (offset, shape, strides, gradient) == (0, storage.shape, (1,), False)
    return storage


CALLS = {
    "torch.multiprocessing.reductions.rebuild_storage_filename": mapped,
    "torch.multiprocessing.reductions.rebuild_typed_storage": lambda storage, dtype: storage.view(dtype),
    "torch.multiprocessing.reductions.rebuild_tensor": lambda kind, storage, layout: strided(storage, *layout),
    "torch.storage._load_from_bytes": saved,
    "torch._utils._rebuild_tensor_v2": strided,
    "torch.Size": tuple,
    "collections.OrderedDict": collections.OrderedDict,
    "sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata": Metadata,
}


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        path = f"{module}.{name}"
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        return CALLS.get(path, path)


def tensors(payload):
    """The tensors of a payload, by their names, as copies."""
    content = Unpickler(io.BytesIO(payload)).load()
    flat = content["flattened_tensor"]
    assert set(content) == {"flattened_tensor", "metadata"} and flat.dtype == np.uint8
    found = {}
    for one in content["metadata"]:
        assert one.end_idx - one.start_idx == one.numel and one.start_idx % 16 == 0
        found[one.name] = flat[one.start_idx : one.end_idx].view(one.dtype).reshape(one.shape).copy()
    return found


class TensorsStub(SGLangStub):
    """Strict where SGLang ends or goes on silently: too few payloads, a load outside of an update, or while it runs."""

    routes = SGLangStub.routes | {
        ("GET", "/server_info"): ({}, {}, "server_info"),
        ("POST", "/begin_weight_update"): ({"selector": (str, False)}, {}, "begin_update"),
        ("POST", "/end_weight_update"): ({}, {}, "end_update"),
        ("POST", "/update_weights_from_tensor"): (
            {
                "serialized_named_tensors": (list, True),
                "load_format": ((str, type(None)), False),
                "flush_cache": (bool, False),
                "abort_all_requests": (bool, False),
                "weight_version": ((str, type(None)), False),
                "selector": (str, False),
                "torch_empty_cache": (bool, False),
            },
            {},
            "take",
        ),
    }

    def __init__(self, ranks=1):
        super().__init__()
        self.server = {"version": "0.5.23", "tp_size": ranks, "dp_size": 1}
        self.updating = False
        self.bodies = []
        self.held = []  # of shared memory, the names that there were during the loads
        self.read = tensors

    def server_info(self, body, query):
        return 200, self.server

    def begin_update(self, body, query):
        if not self.paused:
            return self.error(400, "it generates")
        if self.updating:
            message = "a weight-update session is already open; call end_weight_update() first"
            return 400, {"success": False, "message": message}
        self.updating = True
        return 200, {"success": True, "message": "Success"}

    def end_update(self, body, query):
        if not self.updating:
            return 400, {"success": False, "message": "no weight-update session is open"}
        self.updating = False
        return 200, {"success": True, "message": "Success"}

    def take(self, body, query):
        if not self.updating or not self.paused:
            return 400, {"success": False, "message": "update_weights_from_tensor must run between begin and end"}
        payloads = [base64.b64decode(text, validate=True) for text in body["serialized_named_tensors"]]
        if len(payloads) != self.server["tp_size"] or body["load_format"] != "flattened_bucket":
            return self.error(500, f"{len(payloads)} payloads, {body['load_format']}")
        if body["flush_cache"] and self.mode == "in_place":
            return self.error(400, "the weights were updated, the cache could not be flushed")
        self.bodies.append(body)
        self.held.append(shared_files())
        for payload in payloads:  # each rank maps its own
            self.weights |= self.read(payload)
        self.weight_version = body.get("weight_version") or self.weight_version
        return 200, {"success": True, "message": "Success"}


def shared_files():
    """The names of this library's files of shared memory."""
    return {path.name for path in torch_payload.SHARED_MEMORY.glob("jaxlowprec-sglang-*")}
