"""What a sync takes of each process's memory. Run as a program; see test_limits. Prints JSON, in bytes.

python -m tests.weight_sync.memory_use tcp|shared MEBIBYTES BUCKET_MEBIBYTES FOLDER
"""

import json
import os
import pathlib
import sys
import time

import numpy as np

from jaxlowprec.weight_sync import Receiver, WeightSource, push
from jaxlowprec.weight_sync.transports.shared_memory import SharedMemoryReceiver, SharedMemoryTransport
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver, TcpTransport

SECRET = b"a secret of the tests, of 32 B .."
ARRAY_BYTES = 32 << 20


def status(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def forget_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def receiving(kind, folder, answers):
    """Serves until it has version 2; then says what the second sync took."""
    receiver = Receiver()
    if kind == "tcp":
        listening = TcpReceiver(receiver, SECRET)
        (folder / "new").write_text(str(listening.address[1]))
        (folder / "new").replace(folder / "port")
    else:
        SharedMemoryReceiver(receiver, SECRET, folder / "engine")
    os.write(answers, b".")
    while receiver.version < 1 or receiver.state != "serving":
        time.sleep(0.001)
    forget_peak()
    before = status("VmRSS")
    os.write(answers, b".")
    while receiver.version < 2 or receiver.state != "serving":
        time.sleep(0.001)
    peak = status("VmHWM")
    differ = [name for name, array in tree(len(receiver.weights), 2) if not (receiver.weights[name] == array).all()]
    said = {"before": before, "peak": peak, "differences": differ}
    os.write(answers, json.dumps(said).encode() + b"\n")
    os._exit(0)


def tree(count, version):
    return ((f"a{i}", np.full(ARRAY_BYTES // 4, version * 1000 + i, np.int32)) for i in range(count))


def main(kind, mebibytes, bucket_mebibytes, folder):
    answered, answers = os.pipe()
    if os.fork() == 0:
        try:
            receiving(kind, folder, answers)
        finally:
            os._exit(1)
    os.close(answers)
    assert os.read(answered, 1) == b"."
    transport = (
        TcpTransport("127.0.0.1", int((folder / "port").read_text()), SECRET, timeout=60)
        if kind == "tcp"
        else SharedMemoryTransport(folder / "engine", SECRET)
    )
    arrays = dict(tree((mebibytes << 20) // ARRAY_BYTES, 1))
    forget_peak()
    before = status("VmRSS")
    push(WeightSource(arrays), transport, version=1, max_bytes=bucket_mebibytes << 20, timeout=100)
    assert os.read(answered, 1) == b"."
    for array in arrays.values():
        array += 1000
    push(WeightSource(arrays), transport, version=2, max_bytes=bucket_mebibytes << 20, timeout=100)
    peak = status("VmHWM")
    said = b""
    while not said.endswith(b"\n"):
        said += os.read(answered, 4096)
    print(json.dumps({"trainer": {"before": before, "peak": peak}, "receiver": json.loads(said)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]))
