"""Versions that reach SGLang as tensors: the calls, the payloads, and what becomes of each failure."""

import errno
import os
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.weight_sync import PeerLost, Refused, SGLang, SGLangTensors
from jaxlowprec.weight_sync.bucket import pack
from jaxlowprec.weight_sync.engines import torch_payload
from jaxlowprec.weight_sync.engines.http import HttpEngine
from jaxlowprec.weight_sync.engines.torch_payload import SharedBytes, in_shared_memory, remove_leftovers, with_bytes
from jaxlowprec.weight_sync.transports.transport import Transport
from tests.weight_sync.engines.engine_stubs import serving
from tests.weight_sync.engines.sglang.stub import TensorsStub, shared_files, tensors
from tests.weight_sync.syncing import is_whole, model, packed, sync

DTYPES = ("float32", "float16", "bfloat16", "int32", "uint8", "int64", "bool")
FLOAT8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
UPDATE = ["/begin_weight_update", *["/update_weights_from_tensor"] * 3, "/end_weight_update"]


@pytest.fixture(autouse=True)
def _own_memory(tmp_path, monkeypatch):
    """A folder in place of /dev/shm, so that tests that run at the same time do not see each other's files."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(torch_payload, "SHARED_MEMORY", tmp_path / "shm")


@pytest.fixture
def stub():
    return TensorsStub()


@pytest.fixture(params=["shared", "copied"])
def transport(request, stub):
    with serving(stub) as url:
        yield SGLangTensors(url, memory=request.param)


def arrays():
    """Arrays of many dtypes, a scalar and an empty one among them."""
    rng = np.random.default_rng(0)
    made = {name: rng.integers(0, 2, (3, 5)).astype(name) for name in DTYPES}
    made |= {dtype.__name__: rng.integers(0, 256, (7, 3)).astype(np.uint8).view(dtype) for dtype in FLOAT8}
    return made | {
        "scalar": np.float32(2.5).reshape(()),
        "empty": np.zeros((0, 4), np.int32),
        "ä.weight": made["uint8"],
    }


def same(found, expected):
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def test_versions_reach_the_engine(transport, stub):
    assert isinstance(transport, Transport) and transport.version(60) == 0
    for version in (1, 2, 5):
        stub.calls.clear()
        sync(transport, version)
        assert [call for call in stub.calls if call in UPDATE] == UPDATE
        assert is_whole(stub.weights, version) and not stub.paused and not stub.updating
        assert transport.version(60) == version == int(stub.weight_version)
    assert not stub.errors and not shared_files()


def test_every_dtype_arrives_with_its_bytes(transport, stub):
    sync(transport, 1, arrays())
    same(stub.weights, arrays())


def test_the_engine_is_paused_for_the_load_only(transport, stub):
    manifest, buckets = packed(model(1), 1)
    transport.pause(60)
    transport.begin(1, manifest, 60)
    for bucket in buckets:
        transport.send(bucket, 60)
    assert set(stub.calls) == {"/server_info", "/model_info"} and not stub.weights
    stub.calls.clear()
    transport.commit(1, manifest.hash, 60)
    assert stub.calls == ["/pause_generation", "/flush_cache", *UPDATE] and stub.paused
    transport.resume(60)
    assert stub.calls[-1] == "/continue_generation" and not stub.paused


def test_only_the_last_load_names_the_version(transport, stub):
    sync(transport, 4)
    assert [body.get("weight_version") for body in stub.bodies] == [None, None, "4"]
    assert [body["flush_cache"] for body in stub.bodies] == [False, False, True]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_the_mode_decides_about_the_cache(mode, stub):
    with serving(stub) as url:
        sync(SGLangTensors(url, mode=mode), 1)
    assert ("/flush_cache" in stub.calls) == (mode != "in_place") == stub.bodies[-1]["flush_cache"]
    assert stub.mode == mode and not stub.errors


@pytest.mark.parametrize("memory", ["shared", "copied"])
def test_each_rank_gets_a_payload(memory):
    stub = TensorsStub(ranks=4)
    with serving(stub) as url:
        sync(SGLangTensors(url, memory=memory), 1)
    assert is_whole(stub.weights, 1) and {len(body["serialized_named_tensors"]) for body in stub.bodies} == {4}


def test_shared_payloads_are_short_and_the_files_go(stub):
    big = {"w": np.arange(1 << 18, dtype=np.int32)}
    with serving(stub) as url:
        sync(SGLangTensors(url), 1, big, buckets=1)
    assert len(stub.bodies[0]["serialized_named_tensors"][0]) < 1000 and len(stub.held[0]) == 1
    same(stub.weights, big)
    assert not shared_files()


def test_a_bucket_without_bytes_is_not_sent(transport, stub):
    sync(transport, 1, {"w": np.ones(3, np.float32), "none": np.zeros((0, 2), np.float32)}, buckets=2)
    assert len(stub.bodies) == 1 and stub.weight_version == "1"
    with pytest.raises(Refused, match="version 2 has no bytes"):
        sync(transport, 2, {"none": np.zeros((0, 2), np.float32)}, buckets=1)


FAULTS = {
    "refused": ((400, {"success": False, "message": "no such tensor"}), Refused, "update_weights_from_tensor.*no such"),
    "broken": ((500, {"error": "Internal Server Error"}), Refused, "update_weights_from_tensor: status 500"),
    "cut off": (("cut", {"success": True, "message": "Success"}), PeerLost, "incomplete answer"),
    "gone": (("closed", {}), PeerLost, "is the engine up"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_load_that_fails_is_said_and_may_be_repeated(fault, transport, stub):
    answer, error, message = FAULTS[fault]
    sync(transport, 1)
    stub.failures["/update_weights_from_tensor"] = [None, answer]
    with pytest.raises(error, match=message) as raised:
        sync(transport, 2)
    assert raised.value.__notes__ == [
        "SGLang's model may hold parts of two versions: send another version, or restart it"
    ]
    assert not stub.updating and not stub.paused and not shared_files()
    sync(transport, 3)
    assert is_whole(stub.weights, 3) and stub.weight_version == "3"


@pytest.mark.parametrize("call", ["/begin_weight_update", "/end_weight_update", "/pause_generation", "/flush_cache"])
def test_every_call_that_fails_leaves_the_engine_running(call, transport, stub):
    stub.failures[call] = [(500, {"error": "no"})]
    with pytest.raises(Refused, match=f"{call}: status 500: no"):
        sync(transport, 1)
    assert not stub.paused
    sync(transport, 2)
    assert is_whole(stub.weights, 2) and not shared_files()


def test_an_update_that_a_killed_trainer_left_open_is_ended(transport, stub):
    stub.updating = True
    sync(transport, 1)
    assert stub.calls.count("/begin_weight_update") == 2 and stub.calls.count("/end_weight_update") == 2
    assert is_whole(stub.weights, 1)


@pytest.mark.parametrize("version", ["0.5.20", "0.4.9.post6", "unknown"])
def test_a_server_that_is_too_old_is_refused(version, transport, stub):
    stub.server["version"] = version
    with pytest.raises(Refused, match=rf"SGLang '{version}'; updates from tensors need 0\.5\.21 or newer: upgrade"):
        transport.pause(60)
    assert stub.calls == ["/server_info"]


def test_data_parallel_replicas_are_refused(transport, stub):
    stub.server["dp_size"] = 2
    with pytest.raises(Refused, match="dp_size 2; SGLang updates one data-parallel replica"):
        transport.pause(60)
    for ranks in (10**8, 0, -1, True):
        stub.server |= {"dp_size": 1, "tp_size": ranks}
        with pytest.raises(Refused, match=rf"tp_size {ranks}; needs the number of tensor-parallel ranks, at most 1024"):
            transport.pause(60)
    stub.server |= {"version": "0.5." + "9" * 5000, "tp_size": 1}
    with pytest.raises(Refused, match="the server is SGLang '0.5.999"):
        transport.pause(60)
    stub.server |= {"version": "0.5.23", "dp_size": 1, "tp_size": None}
    with pytest.raises(Refused, match="tp_size None"):
        transport.pause(60)


DENSE = "model.layers.0.self_attn.q_proj.weight_packed"
SHARED_EXPERT = "model.layers.0.mlp.shared_experts.up_proj.weight_packed"
GPTQ_EXPERT = "model.layers.0.mlp.experts.3.up_proj.qweight"
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight_packed"


ZEROS = "model.layers.0.mlp.experts.3.up_proj.weight_zero_point"
REFUSED = {name: "repacks INT4 weights once" for name in (DENSE, SHARED_EXPERT, GPTQ_EXPERT)}
REFUSED[ZEROS] = "takes zero points of experts to be in AWQ's order"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("by_disk", [False, True])
def test_int4_that_sglang_would_not_load_is_refused(name, by_disk, stub, tmp_path):
    words = {name: np.ones((4, 4), np.int32), "norm": np.ones(4, np.float32)}
    with serving(stub) as url:
        transport = SGLang(url, tmp_path / "weights") if by_disk else SGLangTensors(url)
        with pytest.raises(Refused, match=f"'{name}': SGLang '0.5.23' {REFUSED[name]}"):
            sync(transport, 1, words)
        assert "/pause_generation" not in stub.calls
        stub.server["version"] = "0.5.24"  # it may have learned it
        sync(transport, 2, words)
    assert stub.weight_version == "2"


@pytest.mark.parametrize("by_disk", [False, True])
def test_experts_in_int4_and_other_codes_are_sent(by_disk, stub, tmp_path):
    sent = {EXPERT: np.ones((4, 4), np.int32), DENSE: np.ones((4, 4), np.uint8)}  # NVFP4's codes are bytes
    with serving(stub) as url:
        sync(SGLang(url, tmp_path / "weights") if by_disk else SGLangTensors(url), 1, sent)
    assert "/server_info" not in stub.calls or not by_disk
    same(stub.weights, sent)


def test_calls_out_of_order_are_refused(transport):
    manifest, buckets = packed(model(3), 3)
    with pytest.raises(Refused, match="begin: no session is open"):
        transport.begin(3, manifest, 60)
    transport.pause(60)
    with pytest.raises(Refused, match="a session is open already"):
        transport.pause(60)
    with pytest.raises(Refused, match="send: no version is being collected"):
        transport.send(buckets[0], 60)
    transport.begin(3, manifest, 60)
    with pytest.raises(Refused, match="version 3 is being collected"):
        transport.begin(3, manifest, 60)
    with pytest.raises(Refused, match="out of order"):
        transport.send(buckets[1], 60)
    transport.send(buckets[0], 60)
    with pytest.raises(Refused, match="commit: version 4"):
        transport.commit(4, manifest.hash, 60)
    with pytest.raises(Refused, match="incomplete"):
        transport.commit(3, manifest.hash, 60)
    transport.abort("enough", 60)
    transport.resume(60)
    assert not shared_files()
    sync(transport, 3)
    with pytest.raises(Refused, match="version 3 is stale"):
        sync(transport, 3)


def test_memory_that_is_full_is_an_error_with_a_remedy(stub, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with serving(stub) as url:
        with pytest.raises(Refused, match=r"does not hold \d+ more bytes: No space left .*--shm-size.*memory='copied'"):
            sync(SGLangTensors(url), 1)
        assert not shared_files()
        sync(SGLangTensors(url, memory="copied"), 1)
    assert is_whole(stub.weights, 1)


def test_a_machine_without_such_memory_is_told_so(stub, monkeypatch, tmp_path):
    monkeypatch.setattr(torch_payload, "SHARED_MEMORY", tmp_path / "none")
    with serving(stub) as url, pytest.raises(Refused, match="none: No such file or directory; pass memory='copied'"):
        sync(SGLangTensors(url), 1)


@pytest.mark.slow
def test_files_of_a_killed_trainer_are_removed(stub):
    code = """
import pathlib, sys, time
from jaxlowprec.weight_sync.engines import torch_payload
torch_payload.SHARED_MEMORY = pathlib.Path(sys.argv[1])
held = torch_payload.SharedBytes(10)
print(held.name, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", code, str(torch_payload.SHARED_MEMORY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        name = other.stdout.readline().strip()
        remove_leftovers()
        assert shared_files() == {name}  # it lives
        other.send_signal(signal.SIGKILL)
        other.wait(10)
    with serving(stub) as url:
        sync(SGLangTensors(url), 1)
    assert not shared_files() and is_whole(stub.weights, 1)


def test_links_and_files_of_others_are_left_alone(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    (torch_payload.SHARED_MEMORY / "jaxlowprec-sglang-link").symlink_to(kept)
    (torch_payload.SHARED_MEMORY / "other").write_text("kept")
    remove_leftovers()
    assert kept.exists() and (torch_payload.SHARED_MEMORY / "other").exists()


def test_memory_counts_holders_and_is_aligned():
    held = SharedBytes(100)
    assert held.array.shape == (100,) and held.array.ctypes.data % 64 == 0
    assert (torch_payload.SHARED_MEMORY / held.name).stat().st_size == 164
    held.close()
    held.close()


def test_both_payloads_hold_the_same_tensors():
    bucket = pack(1, 0, True, arrays())
    held = SharedBytes(bucket.header.nbytes)
    held.array[:] = bucket.payload
    for payload in (in_shared_memory(bucket.header, held.name), with_bytes(bucket.header, bucket.payload)):
        same(tensors(payload), arrays())
    held.close()


def test_the_stub_refuses_what_it_should(stub):
    """The checks of the tests above can fail."""
    body = {"serialized_named_tensors": [], "load_format": "flattened_bucket", "flush_cache": False}
    with serving(stub) as url:
        engine = HttpEngine(url)
        for path, given in (
            ("/begin_weight_update", {}),
            ("/end_weight_update", {}),
            ("/update_weights_from_tensor", body),
            ("/update_weights_from_tensor", {}),
            ("/update_weights_from_tensor", body | {"unknown": 1}),
        ):
            with pytest.raises(Refused):
                engine.call("POST", path, given, timeout=5)
        stub.paused = stub.updating = True
        with pytest.raises(Refused, match="0 payloads"):
            engine.call("POST", "/update_weights_from_tensor", body, timeout=5)
