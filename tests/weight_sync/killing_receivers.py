"""Of eight receivers kills two and stops one in the middle of a version. Run as a program; see test_kill_receivers.

    python -m tests.weight_sync.killing_receivers tcp|shared ROUNDS FOLDER

This process forks the receivers before it starts a thread. It prints what it saw, as JSON.
"""

import json
import os
import pathlib
import random
import signal
import sys
import threading
import time

from jaxlowprec.weight_sync import FanOut, SharedMemoryTransport, TcpTransport, WeightSource
from tests.weight_sync.killing import SECRET, SIZE, Engine, kill, tree

TIMEOUT = 10.0  # a receiver that is alive answers in time where others use the processors


def main(kind, rounds, folder):
    random.seed(11)
    saw = {"seconds": [], "served": [], "failed": [], "torn": 0, "stopped": []}
    for turn in range(rounds):
        engines, transports = [], {}
        for i in range(8):
            place = folder / f"{turn}.{i}"
            place.mkdir()
            engines.append(Engine(kind, place))
            transports[str(i)] = (
                TcpTransport("127.0.0.1", int((place / "port").read_text()), SECRET, timeout=60)
                if kind == "tcp"
                else SharedMemoryTransport(place / "engine", SECRET)
            )
        fan_out = FanOut(transports, max_bytes=4 * SIZE, timeout=TIMEOUT)
        fan_out.push(WeightSource(tree(1)))
        wait = random.uniform(0, 0.03)

        def strike(engines=engines, wait=wait):
            time.sleep(wait)
            for dead in engines[:2]:
                os.kill(dead.child, signal.SIGKILL)
            os.kill(engines[2].child, signal.SIGSTOP)

        striking = threading.Thread(target=strike)
        striking.start()
        for version in (2, 3, 4):
            started = time.monotonic()
            delivery = fan_out.push(WeightSource(tree(version)))
            saw["seconds"].append(time.monotonic() - started)
            for engine in engines[3:]:
                said = engine.ask()
                saw["torn"] += not (said["whole"] and said["version"] == version and said["state"] == "serving")
            if version == 2:
                striking.join()
        saw["served"].append(sorted(delivery.served))
        saw["failed"].append(sorted(fan_out.receivers))
        os.kill(engines[2].child, signal.SIGCONT)
        until = time.monotonic() + 60
        while (said := engines[2].ask())["state"] != "serving" and time.monotonic() < until:
            time.sleep(0.01)
        saw["torn"] += not said["whole"]
        saw["stopped"].append([said["state"], said["version"]])
        for transport in transports.values():
            transport.close()
        for engine in engines[:2]:
            os.waitpid(engine.child, 0)
        for engine in engines[2:]:
            kill(engine.child)
    print(json.dumps(saw))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]))
