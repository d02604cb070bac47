"""Engines that load versions from a disk over HTTP: the calls they get, and what becomes of each failure."""

import socket
import threading
import time

import pytest

from jaxlowprec.weight_sync.engines.http import HttpEngine
from jaxlowprec.weight_sync.engines.sglang import SGLang
from jaxlowprec.weight_sync.engines.vllm import VLLM
from jaxlowprec.weight_sync.errors import PeerLost, PeerTimeout, Refused
from jaxlowprec.weight_sync.transports.transport import Transport
from tests.weight_sync.engines.engine_stubs import SGLangStub, VLLMStub, serving
from tests.weight_sync.syncing import is_whole, model, packed, require_refused_shape, sync

ENGINES = {"sglang": (SGLang, SGLangStub), "vllm": (VLLM, VLLMStub)}
PAUSE = {"sglang": "/pause_generation", "vllm": "/pause"}
LOAD = {"sglang": "/update_weights_from_disk", "vllm": "/collective_rpc"}
RESUME = {"sglang": "/continue_generation", "vllm": "/resume"}


@pytest.fixture(params=ENGINES)
def engine(request, tmp_path):
    """(its name, a transport to a stub of it, the stub)."""
    kind, stub = ENGINES[request.param]
    stub = stub()
    with serving(stub) as url:
        yield request.param, kind(url, tmp_path / "weights"), stub


def test_versions_reach_the_engine_and_it_says_which(engine):
    _, transport, stub = engine
    assert isinstance(transport, Transport)
    assert transport.version(60) == 0
    for version in (1, 2, 5):
        sync(transport, version)
        assert transport.version(60) == version and stub.weight_version == str(version)
        assert is_whole(stub.weights, version) and not stub.paused
    assert not stub.errors


@pytest.mark.parametrize(
    ("name", "mode", "calls"),
    [
        ("sglang", "abort", ["/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"]),
        (
            "sglang",
            "retract",
            ["/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"],
        ),
        ("sglang", "in_place", ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]),
        ("vllm", "abort", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]),
        ("vllm", "wait", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]),
        ("vllm", "keep", ["/pause", "/collective_rpc", "/update_weight_version", "/resume"]),
    ],
)
def test_the_calls_of_a_sync_are_these_in_this_order(name, mode, calls, tmp_path):
    kind, stub = ENGINES[name]
    stub = stub()
    with serving(stub) as url:
        sync(kind(url, tmp_path, mode=mode), 1)
    assert stub.calls == calls and not stub.errors
    assert is_whole(stub.weights, 1)


def test_the_engine_serves_while_a_version_is_written(engine):
    _, transport, stub = engine
    manifest, buckets = packed(model(1), 1)
    transport.pause(60)
    transport.begin(1, manifest, 60)
    transport.send(buckets[0], 60)
    transport.abort("changed its mind", 60)
    transport.resume(60)
    assert stub.calls == []


FAULTS = [
    ((500, {"error": "out of memory"}), Refused, "status 500: out of memory"),
    ((400, {"success": False, "message": "it cannot"}), Refused, "status 400: it cannot"),
    ((200, {"success": False, "message": "it could not"}), Refused, "status 200: it could not"),
    ((503, "<html>busy</html>"), Refused, "status 503: <html>busy"),
    (("closed", ""), PeerLost, "is the engine up"),
    (("silent", ""), PeerTimeout, "no answer within 0.5 s"),
    (("cut", {"success": False, "message": "it could not"}), PeerLost, "an incomplete answer, 22 of 45 bytes"),
    (("slow", {"message": "a long, long answer"}), PeerTimeout, "no answer within 0.5 s"),
]


@pytest.mark.parametrize(("fault", "error", "message"), FAULTS)
@pytest.mark.parametrize("call", ["pause", "load"])
def test_each_failure_leaves_the_old_version(engine, call, fault, error, message):
    name, transport, stub = engine
    sync(transport, 1)
    stub.calls.clear()
    stub.failures[(PAUSE if call == "pause" else LOAD)[name]] = [fault]
    started = time.monotonic()
    with pytest.raises(error, match=message) as raised:
        sync(transport, 2, timeout=0.5)
    assert time.monotonic() - started < 60
    assert is_whole(stub.weights, 1) and not stub.paused and not stub.errors
    assert stub.calls[-1] == RESUME[name]
    assert stub.calls.count(LOAD[name]) == (2 if call == "load" else 0)  # the second one is the version before
    assert not getattr(raised.value, "__notes__", [])
    sync(transport, 3)
    assert is_whole(stub.weights, 3) and stub.weight_version == "3"


def test_other_shapes_than_those_that_were_loaded_are_refused(engine):
    _, transport, stub = engine
    sync(transport, 1)
    stub.calls.clear()
    require_refused_shape(transport)
    assert stub.weight_version == "1" and not stub.paused and not any("load" in call for call in stub.calls)
    sync(transport, 3)
    assert is_whole(stub.weights, 3)


def test_an_old_version_that_cannot_be_reloaded_is_said(engine):
    name, transport, stub = engine
    sync(transport, 1)
    stub.failures[LOAD[name]] = [(500, {"error": "first"}), (500, {"error": "second"})]
    with pytest.raises(Refused, match="first") as raised:
        sync(transport, 2)
    assert "did not load version 1 again" in raised.value.__notes__[0] and "restart it" in raised.value.__notes__[0]
    assert not stub.paused


def test_a_failed_first_version_says_none_came_before(engine):
    name, transport, stub = engine
    stub.failures[LOAD[name]] = [(500, {"error": "first"})]
    with pytest.raises(Refused, match="first") as raised:
        sync(transport, 1)
    assert "no earlier version" in raised.value.__notes__[0]


def test_a_resume_that_fails_is_sent_again_by_the_next(engine):
    name, transport, stub = engine
    stub.failures[RESUME[name]] = [(500, {"error": "not now"})]
    with pytest.raises(Refused, match="not now"):
        sync(transport, 1)
    assert stub.paused
    transport.resume(60)
    assert not stub.paused
    sync(transport, 2)
    assert is_whole(stub.weights, 2)


def test_an_engine_that_was_restarted_loads_the_newest_version(engine):
    name, transport, stub = engine
    assert transport.reload(5) == 0 and stub.calls == []
    sync(transport, 3)
    stub.weights, stub.weight_version = {}, "default"
    assert transport.reload(5) == 3
    assert is_whole(stub.weights, 3) and stub.weight_version == "3" and not stub.paused and not stub.errors
    stub.failures[LOAD[name]] = [(500, {"error": "no memory"})]
    with pytest.raises(Refused, match="no memory"):
        transport.reload(5)
    assert not stub.paused
    sync(transport, 4)
    assert is_whole(stub.weights, 4)


def test_the_engine_may_see_the_folder_under_another_path(tmp_path):
    (tmp_path / "seen").symlink_to(tmp_path / "weights")
    stub = SGLangStub()
    with serving(stub) as url:
        sync(SGLang(url, tmp_path / "weights", engine_path=tmp_path / "seen"), 1)
    assert is_whole(stub.weights, 1)


def test_an_api_key_is_sent_where_one_is_given(tmp_path):
    stub = VLLMStub()
    with serving(stub, api_key="key") as url:
        with pytest.raises(Refused, match="status 401: Unauthorized"):
            VLLM(url, tmp_path).version(60)
        sync(VLLM(url, tmp_path, api_key="key"), 1)
    assert is_whole(stub.weights, 1)


def test_an_engine_that_is_down_is_an_error_that_says_where(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PeerLost, match=f"http://127.0.0.1:{port}/model_info: .*refused.*is the engine up"):
        SGLang(f"http://127.0.0.1:{port}", tmp_path).version(60)


@pytest.mark.parametrize(
    "answer",
    [b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\nabc"],
)
def test_a_chunk_of_an_impossible_size_is_an_error_of_the_peer(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\n" + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises((PeerLost, PeerTimeout)):
            HttpEngine(f"http://127.0.0.1:{listener.getsockname()[1]}").call("GET", "/x", timeout=5)
        thread.join()


def test_an_endless_answer_is_not_read_to_its_end():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def endless():
            connection = server.accept()[0]
            try:
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    connection.sendall(bytes(1 << 16))
            except OSError:
                connection.close()

        thread = threading.Thread(target=endless)
        thread.start()
        assert HttpEngine(f"http://127.0.0.1:{server.getsockname()[1]}").call("GET", "/", timeout=10) == {}
        thread.join(60)
        assert not thread.is_alive()


def test_the_stubs_refuse_what_they_should():
    """The checks of the tests above can fail."""
    stub = SGLangStub()
    with serving(stub) as url:
        engine = HttpEngine(url)
        for path, body in (
            ("/update_weights_from_disk", {}),
            ("/update_weights_from_disk", {"model_path": 3}),
            ("/update_weights_from_disk", {"model_path": "x", "unknown": 1}),
            ("/update_weights_from_disk", {"model_path": "x"}),
            ("/pause_generation", {"mode": "stop"}),
            ("/nowhere", {}),
        ):
            with pytest.raises(Refused):
                engine.call("POST", path, body, timeout=5)
    assert len(stub.errors) == 6
