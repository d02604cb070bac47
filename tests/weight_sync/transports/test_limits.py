"""Memory and descriptors: bounded in a sync, and the same after hundreds."""

import json
import pathlib

import pytest

from tests.helpers import run_python

pytestmark = pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="measures with /proc")

MIB = 1 << 20
SLACK = 32 * MIB  # interpreter, threads, the allocator's own

HUNDREDS = """
import contextlib, gc, os, pathlib, sys, tempfile
import numpy as np
from jaxlowprec.weight_sync import InProcess, Receiver, WeightSource, push
from jaxlowprec.weight_sync.transports.shared_memory import SharedMemoryReceiver, SharedMemoryTransport
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver, TcpTransport

SECRET = b"a secret of the tests, of 32 B .."

def used():
    gc.collect()
    line = next(l for l in pathlib.Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS"))
    return int(line.split()[1]) << 10, len(os.listdir("/proc/self/fd"))

def numbers(version):
    if sys.argv[1] == "jax":
        import jax.numpy as jnp
        return jnp.full(50_000, version, jnp.float32)
    return np.full(50_000, version, np.float32)

with contextlib.ExitStack() as stack:
    receiver, kind = Receiver(), sys.argv[1]
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    transport = InProcess(receiver)
    if kind == "tcp":
        transport = TcpTransport(*stack.enter_context(TcpReceiver(receiver, SECRET)).address, SECRET, timeout=60)
    elif kind == "shared":
        stack.enter_context(SharedMemoryReceiver(receiver, SECRET, f"{folder}/socket"))
        transport = SharedMemoryTransport(f"{folder}/socket", SECRET)
    elif kind == "bytes":
        transport.takes_arrays = False
    for version in range(1, 301):
        tree = {f"m{i}": numbers(version) for i in range(4)}
        push(WeightSource(tree), transport, version=version, max_bytes=400_000, timeout=20)
        if version == 60:
            first = used()
    assert receiver.version == 300 and all((np.asarray(a) == 300).all() for a in receiver.weights.values())
    last = used()
    print(*(b - a for a, b in zip(first, last)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numpy", "jax", "bytes", "shared", "tcp"])
def test_hundreds_of_versions_leak_no_memory_and_no_descriptors(kind):
    grown, descriptors = map(int, run_python("-c", HUNDREDS, kind).stdout.split())
    assert grown < 8 * MIB  # ten versions; 240 were sent since
    assert descriptors <= 2  # a connection that is being closed


@pytest.mark.slow
@pytest.mark.parametrize(("mebibytes", "bucket"), [(256, 32), pytest.param(2048, 128, marks=pytest.mark.every_case)])
@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_a_model_syncs_in_two_buckets_of_extra_memory(kind, mebibytes, bucket, tmp_path):
    ran = run_python("-m", "tests.weight_sync.memory_use", kind, str(mebibytes), str(bucket), str(tmp_path))
    used = json.loads(ran.stdout.splitlines()[-1])
    trainer, receiver = used["trainer"], used["receiver"]
    assert receiver["differences"] == []
    assert trainer["peak"] - trainer["before"] <= 2 * bucket * MIB + SLACK
    staged = mebibytes * MIB
    assert receiver["before"] >= staged  # version 1 is served meanwhile
    assert receiver["peak"] - receiver["before"] - staged <= 2 * bucket * MIB + SLACK
