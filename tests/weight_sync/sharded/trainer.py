"""A trainer of several processes, each with two devices: sends version after version of `model` until it is ended.

    python -m tests.weight_sync.sharded.trainer COORDINATOR PROCESSES PROCESS KIND VERSIONS FIRST ADDRESS

VERSIONS: how many versions to send; 0: no end. FIRST: the number of the first. ADDRESS: of this process's part, a port
(tcp), a socket's path (shared) or a folder (directory); or names and ports of many receivers (fan_out), as "a=1,b=2".
Prints each version that is served, and by whom if they are many.
"""

import functools
import itertools
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.weight_sync import (
    DirectoryTransport,
    FanOut,
    SharedMemoryTransport,
    TcpTransport,
    WeightSource,
    push_shards,
)
from tests.weight_sync.syncing import SECRET

ROWS, COLUMNS = 64, 128
SPECS = {
    "rows": P("d"),
    "columns": P(None, "d"),
    "both": P("e", "f"),
    "everywhere": P(),
    "step": P(),
    "empty": P("d"),
    "quantized": P("d"),
}


def model(version):
    """Arrays that tell their version, unsharded."""
    ramp = jnp.arange(ROWS * COLUMNS, dtype=jnp.float32).reshape(ROWS, COLUMNS) + version
    return {
        "rows": ramp,
        "columns": ramp.astype(jnp.bfloat16) * version,
        "both": ramp.astype(jnp.int32) - version,
        "everywhere": jnp.full(7, version, jnp.float32),
        "step": jnp.int32(version),
        "empty": jnp.zeros((0, COLUMNS), jnp.bfloat16),
        "quantized": jlp.quantize(ramp, jlp.NVFP4(), axis=-1),
    }


def sharded(version):
    """`model` over all devices of all processes, and an array that each process has for itself."""
    devices = np.asarray(jax.devices())
    flat, square = Mesh(devices, ("d",)), Mesh(devices.reshape(2, -1), ("e", "f"))
    tree = {}
    for name, array in model(version).items():
        sharding = NamedSharding(square if name == "both" else flat, SPECS[name])
        tree[name] = jax.tree.map(functools.partial(over, sharding), array)
    return {**tree, "own": np.full(3, version, np.int64)}


def over(sharding, array):
    """A global array, of which each process makes its shards."""
    host = np.asarray(array)
    if host.ndim < len(sharding.spec):
        sharding = NamedSharding(sharding.mesh, P())
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def expected(version):
    """The tensors of a version, by their names."""
    return dict(WeightSource({**model(version), "own": np.full(3, version, np.int64)}).arrays())


def tcp(address):
    return TcpTransport("127.0.0.1", int(address), SECRET, timeout=60)


def fan_out(address):
    receivers = dict(receiver.split("=") for receiver in address.split(","))
    return FanOut({name: tcp(port) for name, port in receivers.items()})


TRANSPORTS = {
    "tcp": tcp,
    "fan_out": fan_out,
    "shared": lambda address: SharedMemoryTransport(address, SECRET),
    "directory": DirectoryTransport,
}


def main(coordinator, processes, process, kind, versions, first, address):
    jax.distributed.initialize(coordinator, int(processes), int(process), heartbeat_timeout_seconds=10)
    transport = TRANSPORTS[kind](address)
    for version in itertools.count(int(first)):
        if int(versions) and version == int(first) + int(versions):
            return
        try:
            found = push_shards(sharded(version), transport, version=version, timeout=60)
        except Exception:
            traceback.print_exc()
            multihost_utils.sync_global_devices("each has said why")  # the first one to end would end the others
            raise
        if kind == "fan_out":
            failed = sorted((name, str(error)) for name, error in found.failed.items())
            print(found.version, *found.served, failed, transport.receivers, flush=True)
        else:
            assert found == version
            print(version, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
