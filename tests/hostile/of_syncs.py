"""Hostile peers of weight sync: what comes over a connection, from an engine's server, and from a shared folder."""

import contextlib
import json
import shutil
import socket
import threading

from jaxlowprec.weight_sync.bucket import BucketHeader
from jaxlowprec.weight_sync.engines.http import HttpEngine
from jaxlowprec.weight_sync.errors import SyncError
from jaxlowprec.weight_sync.folders.delta import DeltaTransport
from jaxlowprec.weight_sync.folders.layout import RECORD_FILE
from jaxlowprec.weight_sync.folders.layout import _checksum as checksum_of_record
from jaxlowprec.weight_sync.folders.pulling import pull
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports import protocol
from jaxlowprec.weight_sync.transports.protocol import Channel, Kind
from jaxlowprec.weight_sync.transports.receiving_end import Serving, Slot
from jaxlowprec.weight_sync.transports.security import PROTOCOL, admit
from jaxlowprec.weight_sync.transports.sockets import Deadline
from tests.hostile.of_checkpoints import change_file, made_in
from tests.hostile.target import Target
from tests.weight_sync.syncing import SECRET, is_whole, model, packed, sync

SILENCE = 0.2  # seconds
SERVED = 1  # the version that receivers have before a case


def served():
    """A receiver that serves a version."""
    receiver = Receiver()
    manifest, buckets = packed(model(SERVED), SERVED)
    receiver.pause(5.0)
    receiver.begin(SERVED, manifest)
    for bucket in buckets:
        receiver.receive(bucket)
    receiver.commit(SERVED, manifest.hash)
    receiver.resume()
    return receiver


def assert_serves_a_whole_version(receiver, newest=SERVED):
    version = receiver.version
    assert receiver.state == "serving", receiver.state
    assert SERVED <= version <= newest and is_whole(receiver.weights, version), f"version {version} is not whole"


@contextlib.contextmanager
def connected(serve):
    """A connection whose other end is served in a thread, which must end when the connection does."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    try:
        yield ours
    finally:
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_WR)
        thread.join(20 * SILENCE)
        assert not thread.is_alive(), "the receiver waits for a peer that has gone"
        ours.close()


def session(data, folder):
    """Frames of a trainer that holds the secret and says what it likes: [[kind, header, payload], ...]."""
    try:
        frames = json.loads(data)
    except (ValueError, RecursionError):
        return
    receiver = served()

    def serve(connection):
        Serving(Channel(connection), receiver, SILENCE, Slot()).run()

    with connected(serve) as connection:
        channel = Channel(connection)
        with contextlib.suppress(SyncError, ValueError, TypeError):
            for kind, header, payload in frames[:100]:
                text = header if isinstance(header, str) else json.dumps(header)
                content = text.encode(errors="surrogatepass")
                if Kind(kind) is Kind.BEGIN:
                    version, _, content = content.partition(b" ")
                    content = int(version).to_bytes(8, "big") + content
                channel.send(Kind(kind), content, [bytes.fromhex(payload)], deadline=Deadline(SILENCE, "room"))
                channel.receive(Deadline(SILENCE, "an answer"))
    assert_serves_a_whole_version(receiver, newest=2)


def session_seeds():
    manifest, buckets = packed(model(2), 2)
    begin = f"2 {manifest.to_json().decode()}"
    frames = [[Kind.VERSION, "", ""], [Kind.PAUSE, '{"timeout":1}', ""], [Kind.BEGIN, begin, ""]]
    frames += [[Kind.BUCKET, json.loads(b.header.to_json()), bytes(b.payload).hex()] for b in buckets]
    commit = protocol.write(version=2, manifest_hash=manifest.hash).decode()
    ends = [[Kind.COMMIT, commit, ""], [Kind.RESUME, "", ""]]
    aborted = [[Kind.ABORT, protocol.write(reason="enough").decode(), ""], [Kind.RESUME, "", ""]]
    return [json.dumps(frames + ends).encode(), json.dumps(frames + aborted).encode()]


def stream(data, folder):
    """Bytes of a stranger to a receiver, within TLS if there is TLS, from the first byte of the handshake."""
    receiver = served()

    def serve(connection):
        with contextlib.suppress(SyncError):
            admit(connection, SECRET, SILENCE)
            Serving(Channel(connection), receiver, SILENCE, Slot()).run()
        connection.close()

    with connected(serve) as connection, contextlib.suppress(OSError):
        connection.settimeout(SILENCE)
        connection.sendall(data)
    assert_serves_a_whole_version(receiver)


def frames(data, folder):
    """Bytes in the place of frames, after the handshake."""
    receiver = served()

    def serve(connection):
        Serving(Channel(connection), receiver, SILENCE, Slot()).run()

    with connected(serve) as connection, contextlib.suppress(OSError):
        connection.settimeout(SILENCE)
        connection.sendall(data)
    assert_serves_a_whole_version(receiver, newest=2)


def frames_seed():
    """A session as it travels."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    for kind, header, payload in json.loads(session_seeds()[0]):
        content = header.encode() if isinstance(header, str) else json.dumps(header).encode()
        if kind == Kind.BEGIN:
            content = (2).to_bytes(8, "big") + content.partition(b" ")[2]
        channel.send(Kind(kind), content, [bytes.fromhex(payload)], deadline=Deadline(5.0, "room"))
    channel.close()
    found = b""
    while piece := theirs.recv(1 << 16):
        found += piece
    theirs.close()
    return found


def texts(data, folder):
    """The messages beside manifests and buckets; the first byte chooses one."""
    readers = (protocol.read_version, protocol.read_timeout, protocol.read_commit, protocol.read_reason)
    reader = (*readers, protocol.read_begin, protocol.read_error)[data[0] % 6 if data else 0]
    reader(data[1:])


def text_seeds():
    begin = protocol.write_begin(2, packed(model(2), 2)[0])
    fields = ({"version": 2}, {"timeout": 2.5}, {"version": 2, "manifest_hash": "ab"}, {"reason": "the trainer stops"})
    said = [protocol.write(**of_one) for of_one in fields]
    said += [begin, protocol.write_error(OSError("no space left"))]
    return [bytes([i]) + text for i, text in enumerate(said)]


def published(path):
    """Version 1, complete, and version 2, a change of it."""
    shutil.rmtree(path, ignore_errors=True)
    transport = DeltaTransport(path, full_every=3)
    for version in (1, 2):
        sync(transport, version)
    return path


def pulled(path):
    receiver = Receiver()
    try:
        pull(path, receiver)
    finally:
        assert receiver.state == "serving"
        assert receiver.version == 0 or is_whole(receiver.weights, receiver.version)


def from_folder(version, file):
    """A folder of versions one file of which is the case."""

    def run(data, folder):
        path = folder / f"published {version} {file}"
        if not path.exists():
            published(path)
        (path / version / file).write_bytes(data)
        pulled(path)

    def seeds():
        return [made_in(lambda path: (published(path) / version / file).read_bytes())]

    return run, seeds


def change_record(mutator, data):
    """A record's JSON, with the checksum that belongs to it."""
    changed = mutator.document(data)
    try:
        content = json.loads(changed)
        content.pop("checksum")
        return json.dumps({**content, "checksum": checksum_of_record(content)}).encode()
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return changed


def answer(data, folder):
    """What an engine's server says to a call."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection = listener.accept()[0]
        with contextlib.suppress(OSError):
            connection.settimeout(SILENCE)
            connection.recv(1 << 16)
            connection.sendall(data)
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        said = HttpEngine(f"http://127.0.0.1:{listener.getsockname()[1]}").call("POST", "/pause", {}, timeout=1.0)
        assert isinstance(said, dict) and said.get("success", True) is not False
    finally:
        thread.join()
        listener.close()


def answer_seeds():
    bodies = (b'{"success": true, "message": "ok"}', b"{}")
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return [head % len(body) + body for body in bodies]


def from_json(cls):
    return lambda data, folder: cls.from_json(data)


RECORD, DELTA, WHOLE = (
    from_folder(version, file)
    for version, file in (
        ("v000002-delta", RECORD_FILE),
        ("v000002-delta", "delta-00000.safetensors"),
        ("v000001", "model.safetensors"),
    )
)

TARGETS = {
    "manifest": Target(from_json(Manifest), lambda: [packed(model(2), 2)[0].to_json()], (ValueError,)),
    "bucket": Target(
        from_json(BucketHeader), lambda: [b.header.to_json() for b in packed(model(2), 2)[1]], (ValueError,)
    ),
    "messages": Target(texts, text_seeds, (ValueError,), lambda mutator, data: data[:1] + mutator.document(data[1:])),
    "session": Target(session, session_seeds, ()),
    "handshake": Target(
        stream, lambda: [b"JLPSYNC" + bytes([PROTOCOL]) + bytes(64)], (), lambda mutator, data: mutator.bytes(data)
    ),
    "frames": Target(frames, lambda: [frames_seed()], (), lambda mutator, data: mutator.bytes(data)),
    "record": Target(*RECORD, (SyncError,), change_record),
    "delta": Target(*DELTA, (SyncError,), change_file),
    "version": Target(*WHOLE, (SyncError,), change_file),
    "answer": Target(answer, answer_seeds, (SyncError,), lambda mutator, data: mutator.bytes(data)),
}
