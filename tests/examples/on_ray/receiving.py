"""Two actors that receive versions through Ray's object store. Run as a program; see test_transport.

It prints what happened, as JSON.
"""

import dataclasses
import json
import os
import pathlib

import numpy as np
from rl.on_ray import cluster

from jaxlowprec.weight_sync import PeerLost, Refused, Session, WeightSource
from jaxlowprec.weight_sync.bucket import Bucket

TREE = {"a": {"w": np.arange(60_000, dtype=np.int32)}, "b": {"w": np.arange(60_000, dtype=np.float32)}}
MAX_BYTES = 300_000  # of one array, not of two


class Actor:
    """Receives, and says how the last payload came."""

    def __init__(self):
        from rl.on_ray.transport import Inbox

        self._inbox, self._payload = Inbox(), None

    def sync(self, trainer, verb, *arguments):
        if verb == "send":
            self._payload = arguments[1]
        return self._inbox.carry_out(trainer, verb, *arguments)

    def served(self):
        weights = self._inbox.weights
        return weights.version, {name: np.asarray(array).tobytes() for name, array in weights.items()}

    def in_the_store(self):
        """Whether the payload is memory that the object store has mapped."""
        address = self._payload.__array_interface__["data"][0]
        maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
        ranges = [(line.split()[0].split("-"), line) for line in maps]
        (line,) = [line for (low, high), line in ranges if int(low, 16) <= address < int(high, 16)]
        return "plasma" in line and not self._payload.flags.writeable

    def end(self):
        os._exit(1)


def changed(bucket):
    """The bucket with one bit of its payload changed."""
    payload = np.array(ray.get(bucket.payload))
    payload[17] ^= 1
    return Bucket(bucket.header, payload)


def send(transport, published):
    with Session(transport, version=published.version) as session:
        session.send_buckets(published.manifest, published.buckets)


def main():
    puts, put = [], ray.put
    ray.put = lambda value: puts.append(value) or put(value)
    actors = [ray.remote(max_restarts=-1)(Actor).remote() for _ in range(2)]
    transports = [ObjectStoreTransport(actor, "a trainer") for actor in actors]
    whole = 7, {f"{name}.w": value["w"].tobytes() for name, value in TREE.items()}
    said, published = {}, publish(WeightSource(TREE), 7, MAX_BYTES)
    for transport in transports:
        send(transport, published)
    said["buckets"], said["puts"] = len(published.buckets), len(puts)
    said["whole"] = [ray.get(actor.served.remote()) == whole for actor in actors]
    said["in the store"] = [ray.get(actor.in_the_store.remote()) for actor in actors]

    published = publish(WeightSource(TREE), 8, MAX_BYTES)
    try:
        send(transports[0], dataclasses.replace(published, buckets=tuple(map(changed, published.buckets))))
    except Refused as error:
        said["damage"] = str(error)
    said["whole after damage"] = ray.get(actors[0].served.remote()) == whole

    actors[1].end.remote()
    try:
        while True:
            transports[1].version(timeout=30)
    except PeerLost as error:
        said["death"] = str(error)
    try:
        transports[1].begin(8, published.manifest, timeout=30)
    except PeerLost as error:
        said["after the death"] = str(error)
    print(json.dumps(said))


if __name__ == "__main__":
    with cluster.joined(None, 2):
        import ray  # after the variables that it reads are set
        from rl.on_ray.transport import ObjectStoreTransport, publish

        main()
