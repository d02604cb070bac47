"""Weight sync against copying the same bytes: what a new version costs between trainer and receiver.

    python benchmarks/weight_sync.py [--mebibytes 512] [--rounds 9] [--save]

The model is a Llama-like one of random bfloat16 weights. A sync is everything from `pause` to `resume`: the manifest,
buckets, checksums where bytes travel, the receiver's own copy, the commit. The other side copies the same bytes once,
with `numpy.copyto`, into memory that is there already.
"""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import jax
import ml_dtypes
import numpy as np
from timing import alternate, save

from jaxlowprec.checkpoints.conversion.rules import Rules
from jaxlowprec.checkpoints.schemes import by_name
from jaxlowprec.checkpoints.trees.mapping import Rule, TreeMapping
from jaxlowprec.weight_sync import InProcess, Receiver, WeightSource, push
from jaxlowprec.weight_sync.transports.shared_memory import SharedMemoryReceiver, SharedMemoryTransport

HIDDEN, INNER, VOCABULARY = 2048, 8192, 8192
BUCKET_BYTES = 64 << 20

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A way for weights to travel.

    Attributes:
        name: of the case.
        against: what the other side does.
        target: the least ratio of speeds, ours to theirs, where there is one.
        sides: gives, for a tree of numpy arrays, the two sides as functions, as a context.
    """

    name: str
    against: str
    target: float | None
    sides: Callable[[Tree], Any]


def model(mebibytes: int) -> Tree:
    """A tree of about a size."""
    shapes = {f"{p}_proj": (HIDDEN, HIDDEN if p in "qo" else HIDDEN // 4) for p in "qkvo"}
    shapes |= {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}
    layers = max(1, (mebibytes << 20) // (2 * sum(n * k for n, k in shapes.values())))
    random = np.random.default_rng(0)

    def made(*shape: int) -> np.ndarray:
        return random.integers(0, 1 << 14, shape, np.uint16).view(ml_dtypes.bfloat16)

    return {
        "embed": {"kernel": made(VOCABULARY, HIDDEN)},
        "layers": [{name: {"kernel": made(*shape)} for name, shape in shapes.items()} for _ in range(layers)],
    }


def pushed(transport: Any, tree: Tree) -> Callable[[], object]:
    """A sync of the next version."""
    source = WeightSource(tree)
    return lambda: push(source, transport, max_bytes=BUCKET_BYTES)


def memory_copy(tree: Tree) -> Callable[[], object]:
    """Copies every array into memory that is there already."""
    arrays = [array.view(np.uint16) for array in jax.tree.leaves(tree)]
    copies = [np.zeros_like(array) for array in arrays]
    return lambda: [np.copyto(copy, array) for copy, array in zip(copies, arrays, strict=True)] and None


class AsBytes(InProcess):
    """Buckets packed and checksummed as for a wire, then copied."""

    takes_arrays = False


@contextmanager
def in_process(tree: Tree) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """JAX arrays, from device to device."""
    yield pushed(InProcess(Receiver()), jax.tree.map(jax.device_put, tree)), memory_copy(tree)


@contextmanager
def as_bytes(tree: Tree) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """Numpy arrays, packed."""
    yield pushed(AsBytes(Receiver()), tree), memory_copy(tree)


@contextmanager
def shared_memory(tree: Tree) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """Numpy arrays, to a receiver behind shared memory (here of this process)."""
    secret = secrets.token_bytes(32)
    with (
        tempfile.TemporaryDirectory() as folder,
        SharedMemoryReceiver(Receiver(), secret, f"{folder}/socket"),
        closing(SharedMemoryTransport(f"{folder}/socket", secret)) as transport,
    ):
        yield pushed(transport, tree), memory_copy(tree)


@contextmanager
def quantised(tree: Tree) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """Kernels quantised and packed on the way; or all of them first, and then sent."""
    rules = (Rule(f"layers.{{i}}.{m}.kernel", f"layers.{{i}}.{m}.weight") for m in tree["layers"][0])
    mapping = TreeMapping(tuple(rules))
    source = WeightSource({"layers": tree["layers"]}, mapping, by_name("w4a16"), quantize=Rules())
    made = dict(source.arrays())  # compiles, too
    started, made = time.perf_counter(), dict(source.arrays())
    transport = Throttled(Receiver(), (time.perf_counter() - started) / sum(array.nbytes for array in made.values()))

    def one_after_the_other() -> None:
        made = {name: array.copy() for name, array in source.arrays()}
        push(WeightSource(made), transport, max_bytes=BUCKET_BYTES // 8)

    yield lambda: push(source, transport, max_bytes=BUCKET_BYTES // 8), one_after_the_other


class Throttled(AsBytes):
    """A wire of some speed, which leaves the processor alone."""

    def __init__(self, receiver: Receiver, seconds_a_byte: float):
        super().__init__(receiver)
        self._seconds_a_byte = seconds_a_byte

    def send(self, bucket: Any, timeout: float) -> None:
        time.sleep(bucket.header.nbytes * self._seconds_a_byte)
        super().send(bucket, timeout)


CASES = (
    Case("in process, device to device", "a copy in memory", 0.5, in_process),
    Case("in process, packed and checksummed", "a copy in memory", None, as_bytes),
    Case("shared memory", "a copy in memory", None, shared_memory),
    Case("w4a16 on the way, a wire as fast as quantising", "quantising all, then sending", None, quantised),
)


def main() -> None:
    """Measures and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    tree = model(options.mebibytes)
    nbytes = sum(array.nbytes for array in jax.tree.leaves(tree))
    found = []
    for case in CASES:
        with case.sides(tree) as (ours, theirs):
            seconds = alternate({"ours": ours, "theirs": theirs}, options.rounds)
        ratio = {k: seconds["theirs"][k] / seconds["ours"][k] for k in ("median", "min")}
        speed = {side: nbytes / 2**30 / seconds[side]["median"] for side in seconds}
        entry = {"case": case.name, "against": case.against, "target": case.target, "bytes": nbytes}
        found.append({**entry, "ratio": ratio, **seconds})
        print(
            f"{case.name:47} {nbytes / 2**20:.0f} MiB  {speed['ours']:5.2f} GiB/s, {case.against} "
            f"{speed['theirs']:5.2f} GiB/s: {ratio['median']:.2f}x (target {case.target})",
            flush=True,
        )
    if options.save:
        save("weight_sync", {"cases": found})


if __name__ == "__main__":
    main()
