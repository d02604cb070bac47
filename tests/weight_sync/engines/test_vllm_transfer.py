"""The backend of vLLM's weight transfer, without vLLM: a stub has its routes, and the worker's real inbox."""

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.weight_sync.engines.vllm import VLLMTransfer
from jaxlowprec.weight_sync.engines.vllm_worker import Inbox, Listen, Load, to_torch
from jaxlowprec.weight_sync.errors import PeerLost, Refused
from jaxlowprec.weight_sync.transports.transport import Transport
from tests.helpers import run_python
from tests.ports import free_port
from tests.weight_sync.engines.engine_stubs import VLLMStub, serving
from tests.weight_sync.syncing import is_whole, require_refused_shape, sync

UPDATE = [
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
]


class TransferStub(VLLMStub):
    """vLLM's calls for weight transfer, which two workers carry out."""

    routes = VLLMStub.routes | {
        ("POST", "/init_weight_transfer_engine"): ({"init_info": (dict, True)}, {}, "listen"),
        ("POST", "/start_weight_update"): ({}, {}, "start"),
        ("POST", "/update_weights"): ({"update_info": (dict, True)}, {}, "update"),
        ("POST", "/finish_weight_update"): ({"weight_version": (str, False)}, {}, "finish"),
    }

    def __init__(self):
        super().__init__()
        self.workers = [Inbox(), Inbox()]
        self.updating = False

    def listen(self, body, query):
        for i, worker in enumerate(self.workers):
            worker.listen(Listen(**body["init_info"]), i)
        return 200, {"message": "Weight transfer initialized"}

    def start(self, body, query):
        if self.updating or not self.paused:
            return self.error(500, "start_weight_update called while it generates, or twice")
        self.updating = True
        return 200, {"message": "Weight update started"}

    def update(self, body, query):
        if not self.updating:
            return self.error(500, "start_weight_update must be called before update_weights")
        try:
            self.loaded = [dict(worker.arrays(Load(**body["update_info"]).version)) for worker in self.workers]
        except ValueError as error:
            self.updating = False
            return 500, {"error": {"message": str(error), "type": "InternalServerError", "code": 500}}
        return 200, {"message": "Weights updated"}

    def finish(self, body, query):
        self.updating = False
        self.weight_version = body["weight_version"]
        return 200, {"message": "Weight update finished"}


@pytest.fixture
def stub():
    made = TransferStub()
    yield made
    for worker in made.workers:
        worker.close()


@pytest.fixture
def connect(stub, tmp_path):
    """Makes a transport to the stub."""
    (tmp_path / "secret").write_text("a secret of the tests, of 32 B ..\n")
    port = free_port()
    made = []
    with serving(stub) as url:

        def connected(**options):
            made.append(VLLMTransfer(url, port, tmp_path / "secret", workers=2, **options))
            return made[-1]

        yield connected
        for transport in made:
            transport.close()


def test_versions_reach_every_worker(connect, stub):
    transport = connect()
    assert isinstance(transport, Transport) and transport.version(60) == 0
    for version in (1, 2, 5):
        stub.calls.clear()
        sync(transport, version)
        assert stub.calls == UPDATE and not stub.paused and stub.weight_version == str(version)
        assert [is_whole(worker, version) for worker in stub.loaded] == [True, True]
        assert transport.version(60) == version
    assert not stub.errors


def test_the_engine_serves_until_the_workers_have_all(connect, stub):
    transport = connect(mode="keep")
    transport.pause(60)
    transport.abort("changed its mind", 60)
    transport.resume(60)
    assert stub.calls == ["/init_weight_transfer_engine"]
    sync(transport, 1)
    assert stub.calls[1:] == [call for call in UPDATE if call != "/reset_prefix_cache"]


def test_a_trainer_that_is_started_again_goes_on(connect, stub):
    first = connect()
    sync(first, 3)
    first.close()
    second = connect()
    assert second.version(60) == 3
    sync(second, 4)
    assert is_whole(stub.loaded[1], 4)


@pytest.mark.parametrize("call", ["/update_weights", "/finish_weight_update"])
def test_a_load_that_fails_is_said_and_may_be_repeated(call, connect, stub):
    transport = connect()
    sync(transport, 1)
    stub.failures[call] = [(500, {"error": "out of memory"})]
    with pytest.raises(Refused, match="out of memory") as raised:
        sync(transport, 2)
    assert "parts of two versions" in raised.value.__notes__[0] and not stub.paused
    stub.updating = False  # as vLLM does after a failure of /update_weights
    sync(transport, transport.version(60) + 1)
    assert is_whole(stub.loaded[0], 3) and stub.weight_version == "3"


def test_a_worker_that_does_not_listen_stops_one_sync(connect, stub):
    transport = connect()
    sync(transport, 1)
    stub.workers[1].close()
    stub.calls.clear()
    with pytest.raises(PeerLost) as raised:
        sync(transport, 2)
    assert raised.value.__notes__ == ["VLLMTransfer: workers is 2; vLLM has to have as many, and listen at each port"]
    assert stub.calls == [] and stub.weight_version == "1"
    sync(transport, 3)  # listens again
    assert stub.calls[0] == "/init_weight_transfer_engine" and is_whole(stub.loaded[1], 3)


def test_other_shapes_than_those_that_were_loaded_are_refused(connect, stub):
    transport = connect()
    sync(transport, 1)
    stub.calls.clear()
    require_refused_shape(transport)
    assert stub.calls == [] and stub.weight_version == "1"
    sync(transport, 3)
    assert is_whole(stub.loaded[0], 3)


@pytest.mark.parametrize("port", ["5000", 0, 65535, 70000, 5000.0])
def test_a_port_that_is_none_is_named(port, tmp_path):
    with pytest.raises(ValueError, match=f"port is {port!r}; needs a number from 1 to 65534, the first of 2"):
        VLLMTransfer("http://localhost:8000", port, tmp_path / "secret", workers=2)


def test_a_secret_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="needs a file with the secret, .*: '.*/none'"):
        VLLMTransfer("http://localhost:8000", 5000, tmp_path / "none")


def test_tensors_are_the_bytes_that_were_received():
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
    for dtype in ("float32", "float16", "int32", "uint8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        array = np.arange(6).reshape(2, 3).astype(dtype)
        array.flags.writeable = False
        tensor = to_torch(array)
        assert tensor.shape == (2, 3) and str(tensor.dtype) == f"torch.{array.dtype.name}"
        assert torch.equal(tensor.float(), torch.arange(6.0).reshape(2, 3))
        assert tensor.data_ptr() == array.ctypes.data
    assert to_torch(np.float32(3)[()] * np.ones(())).shape == () and to_torch(np.ones((0, 3))).shape == (0, 3)
    with pytest.raises(ValueError, match="torch has no dtype float8_e3m4"):
        to_torch(np.zeros(2, ml_dtypes.float8_e3m4))


@pytest.mark.slow
def test_a_worker_starts_no_backend_of_jax():
    """JAX would otherwise take the accelerator's memory, which is vLLM's."""
    code = """
import pathlib, sys, tempfile
from tests.ports import free_port
from tests.weight_sync.syncing import SECRET, is_whole, sync
from jaxlowprec.weight_sync.engines.vllm_worker import Inbox, Listen
from jaxlowprec.weight_sync.transports.tcp import TcpTransport
inbox, port = Inbox(), free_port()
with tempfile.TemporaryDirectory() as folder:
    secret = pathlib.Path(folder, "secret")
    secret.write_bytes(SECRET)
    inbox.listen(Listen(port, str(secret)), 0)
sync(TcpTransport("127.0.0.1", port, SECRET, timeout=60), 1)
assert is_whole(dict(inbox.arrays(1)), 1)
inbox.close()
"""
    run_python("-c", code, JAX_PLATFORMS="nothing")
