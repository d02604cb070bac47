"""An engine's answer counts if all of it is there: cut off at whichever byte, it is never taken for a success."""

import contextlib
import socket
import threading

import pytest

from jaxlowprec.weight_sync.engines.http import MAX_BYTES, HttpEngine
from jaxlowprec.weight_sync.engines.sglang import SGLang
from jaxlowprec.weight_sync.engines.vllm import VLLM
from jaxlowprec.weight_sync.errors import PeerLost, PeerTimeout, Refused

GOOD = b'{"success": true, "message": "it did"}'
BAD = b'{"success": false, "message": "it did not"}'
TEXT = b"Cache flushed.\n"

FRAMINGS = {
    "length": lambda body: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body),
    "chunks": lambda body: (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n"
        % (body[:5], len(body) - 5, body[5:])
    ),
    "to the end of the connection": lambda body: b"HTTP/1.1 200 OK\r\n\r\n" + body,
}


@contextlib.contextmanager
def answering(answers):
    """The URL of a server that gives each connection one of some answers and ends it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            for answer in answers:
                with contextlib.suppress(OSError), server.accept()[0] as connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.close()
        thread.join(60)


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize(("body", "needs"), [(GOOD, None), (GOOD, "success"), (BAD, None)])
def test_an_answer_cut_off_anywhere_is_an_error(framing, body, needs):
    whole = FRAMINGS[framing](body)
    ends = range(len(whole))
    if framing == "chunks":
        ends = range(whole.rindex(b"0\r\n") + 1)  # from there on all of the body is there
    with answering([whole[:end] for end in ends]) as url:
        engine = HttpEngine(url)
        for _ in ends:
            with pytest.raises(PeerLost) as raised:
                engine.call("POST", "/load", {}, timeout=5, needs=needs)
            assert not isinstance(raised.value, PeerTimeout)


@pytest.mark.parametrize("framing", FRAMINGS)
def test_whole_answers_are_taken_for_what_they_say(framing):
    with answering([FRAMINGS[framing](body) for body in (GOOD, BAD, TEXT)]) as url:
        engine = HttpEngine(url)
        assert engine.call("POST", "/load", timeout=5, needs="success") == {"success": True, "message": "it did"}
        with pytest.raises(Refused, match="it did not"):
            engine.call("POST", "/load", timeout=5)
        assert engine.call("POST", "/flush", timeout=5) == {}


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_text_cut_off_is_an_error_where_length_is_known(framing):
    whole = FRAMINGS[framing](TEXT)
    ends = range(whole.index(b"\r\n\r\n") + 4, whole.rindex(TEXT[5:]) + len(TEXT) - 5)
    with answering([whole[:end] for end in ends]) as url:
        for _ in ends:
            with pytest.raises(PeerLost, match="incomplete answer"):
                HttpEngine(url).call("POST", "/flush", timeout=5)


def test_an_answer_without_a_body_is_one_if_it_says_so():
    with answering([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]) as url:
        assert HttpEngine(url).call("POST", "/resume", timeout=5) == {}


@pytest.mark.parametrize("success", [b"0", b'"false"', b"null", b'"true"', b"1"])
def test_a_success_that_is_not_true_is_none(success):
    with (
        answering([FRAMINGS["length"](b'{"success": %s}' % success)]) as url,
        pytest.raises(Refused, match="status 200"),
    ):
        HttpEngine(url).call("POST", "/load", timeout=5)


def test_an_answer_of_more_than_is_read_is_no_success():
    answer = FRAMINGS["length"](b'{"success": true, "message": "%s"}' % (b"x" * MAX_BYTES))
    with answering([answer]) as url, pytest.raises(PeerLost, match="breaks off after 1048576 bytes"):
        HttpEngine(url).call("POST", "/load", timeout=5)


@pytest.mark.parametrize(("kind", "needs"), [(SGLang, "success"), (VLLM, "results")])
def test_a_load_needs_an_answer_that_says_that_it_loaded(kind, needs, tmp_path):
    answer = FRAMINGS["length"](b'{"message": "hello"}')
    with answering([answer]) as url, pytest.raises(PeerLost, match=f"it has no '{needs}'"):
        kind(url, tmp_path)._load("v000001", 1, timeout=5)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://", "http://engine:port", "http://engine:99999", "http://engine:0", None, 8000]
)
def test_what_is_no_url_is_named_when_the_transport_is_made(url):
    with pytest.raises(ValueError, match=f"HttpEngine: url is {url!r}; needs http://host:port"):
        HttpEngine(url)


def test_an_error_within_an_error_is_said_without_its_frame():
    body = b'{"error": {"message": "the worker failed", "type": "InternalServerError", "param": null, "code": 500}}'
    with (
        answering([b"HTTP/1.1 500 Error\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)]) as url,
        pytest.raises(Refused, match="/load: status 500: the worker failed$"),
    ):
        HttpEngine(url).call("POST", "/load", timeout=5)


@pytest.mark.parametrize(("engine", "needs"), [(VLLM, "VLLM_SERVER_DEV_MODE=1"), (SGLang, "an SGLang server")])
def test_a_server_without_the_calls_is_told_from_one_that_fails(engine, needs, tmp_path):
    body = b'{"detail": "Not Found"}'
    with (
        answering([b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)]) as url,
        pytest.raises(Refused, match=f"status 404: Not Found; needs .*{needs}"),
    ):
        engine(url, tmp_path).version(timeout=60)
