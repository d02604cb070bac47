"""Carries out a plan: converts tensor by tensor from one folder's files to another's, and compares the result."""

from __future__ import annotations

import concurrent.futures
import itertools
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.conversion.plan import Job, Plan
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.files.safetensors_file import METADATA, SafetensorsFile, SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import layout_header
from jaxlowprec.checkpoints.schemes.magnitudes import all_finite

Progress = Callable[[int, int, str], None]
"""Called with the bytes done, the bytes in all, and the name of what is being converted."""

_COMPARED_AT_ONCE = 1 << 22


class Counter:
    """Adds up the bytes that workers have done and reports them."""

    def __init__(self, total: int, label: str, progress: Progress | None):
        self._total, self._label, self._progress = total, label, progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Adds bytes and reports the sum."""
        with self._lock:
            self._done += count
            if self._progress:
                self._progress(self._done, self._total, self._label)


def write_shards(
    plan: Plan, source: CheckpointFolder, destination: pathlib.Path, workers: int, progress: Progress | None
) -> list[str]:
    """Writes the files of a plan that are not finished yet; returns the names of those that were.

    At most `workers` tensors are in memory at a time: what a worker has computed is written to its place at once.
    """
    there = {shard: is_finished(plan, shard, destination) for shard in plan.shards}
    finished = [shard for shard in plan.shards if there[shard]]
    missing = [shard for shard in plan.shards if not there[shard]]
    _require_space(plan, missing, destination)
    counter = Counter(plan.source_bytes, "converting", progress)
    counter.add(sum(job.source_bytes for shard in finished for job in plan.shards[shard]))
    with concurrent.futures.ThreadPoolExecutor(1) as closer:  # the disk takes one file while the next is computed
        closed: concurrent.futures.Future[None] | None = None
        for shard in missing:
            writer = _written(plan, shard, source, destination, workers, counter)
            try:
                before, closed = closed, _submitted(closer, writer.commit)
            except CheckpointError:
                writer.abandon()
                raise
            if before:
                before.result()
        if closed:
            closed.result()
    return finished


def _written(
    plan: Plan, shard: str, source: CheckpointFolder, destination: pathlib.Path, workers: int, counter: Counter
) -> SafetensorsWriter:
    """The writer of a file after all its tensors were written, ready to be committed."""
    writer = SafetensorsWriter(destination / shard, plan.specs(shard))

    def write(job: Job) -> None:
        if job.make is None:
            writer.copy(job.module, source.file_of(job.module), job.module)
        else:
            for name, array in job.make().items():
                writer.write(name, array)
        counter.add(job.source_bytes)

    try:
        in_parallel(write, plan.shards[shard], workers)
    except BaseException:
        writer.abandon()
        raise
    return writer


def is_finished(plan: Plan, shard: str, destination: pathlib.Path) -> bool:
    """Whether a file is there, is complete, and holds the tensors that the plan says."""
    path = destination / shard
    if not path.exists():
        return False
    with SafetensorsFile(path) as file:
        return file.header == layout_header(str(path), plan.specs(shard), METADATA)[1]


def compare_shards(
    plan: Plan, source: CheckpointFolder, destination: CheckpointFolder, workers: int, progress: Progress | None
) -> int:
    """Computes every tensor of a plan again and compares it with the files; returns how many were compared.

    Raises:
        CheckpointError: a tensor differs in a bit, is missing, or is infinite or NaN although its source is finite.
    """
    counter = Counter(plan.source_bytes, "verifying", progress)
    if destination.shard_of != plan.shard_of:
        raise CheckpointError(f"{destination.path}: does not hold the tensors that were written")

    def compare(job: Job) -> None:
        for name, given in _expected(job, source).items():
            written = destination.file_of(name).pieces(name, _COMPARED_AT_ONCE)
            if destination.spec(name) != job.outputs[name] or not same(given, written):
                raise CheckpointError(f"{destination.path}: tensor {name!r} differs from the source's; convert again")
        _require_finite(job, destination)
        counter.add(job.source_bytes)

    in_parallel(compare, [job for jobs in plan.shards.values() for job in jobs], workers)
    return len(plan.shard_of)


def _require_finite(job: Job, destination: CheckpointFolder) -> None:
    """Raises CheckpointError if what was written for a finite weight decodes to infinity or NaN."""
    if job.decode is None:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        decoded = job.decode({name: destination.read(name) for name in job.outputs})
    if not all_finite(decoded):
        raise CheckpointError(
            f"{destination.path}: module {job.module!r} is infinite or NaN there, but finite in the source"
        )


def _expected(job: Job, source: CheckpointFolder) -> dict[str, Iterator[np.ndarray]]:
    """The bytes of a job's tensors, a few at a time."""
    if job.make is None:
        return {job.module: source.file_of(job.module).pieces(job.module, _COMPARED_AT_ONCE)}
    return {name: _pieces(array) for name, array in job.make().items()}


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return (data[begin : begin + _COMPARED_AT_ONCE] for begin in range(0, data.size, _COMPARED_AT_ONCE))


def same(a: Iterable[np.ndarray], b: Iterable[np.ndarray]) -> bool:
    """Whether two sequences of pieces hold equal bytes; all pieces have one size, except the last."""
    return all(x is not None and y is not None and np.array_equal(x, y) for x, y in itertools.zip_longest(a, b))


def in_parallel(work: Callable[[Any], None], items: Iterable[Any], workers: int) -> None:
    """Does some work for each item in several threads. The first error ends it and is raised.

    Raises:
        CheckpointError: the system cannot start more threads.
    """
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            for future in concurrent.futures.as_completed([_submitted(pool, work, item) for item in items]):
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _submitted(
    pool: concurrent.futures.Executor, work: Callable[..., Any], *given: Any
) -> concurrent.futures.Future[Any]:
    try:
        return pool.submit(work, *given)
    except RuntimeError as error:  # raised by threading
        raise CheckpointError(f"{error}; give fewer workers, or raise the limit of processes (ulimit -u)") from None


def _require_space(plan: Plan, shards: list[str], destination: pathlib.Path) -> None:
    needed = sum(spec.nbytes for shard in shards for spec in plan.specs(shard).values())
    free = shutil.disk_usage(destination).free
    if needed > free:
        raise CheckpointError(
            f"{destination}: needs {needed} bytes, only {free} are free on its disk; free some, or use another disk"
        )
