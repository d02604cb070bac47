"""Carries out a plan: converts tensor by tensor from one folder's files to another's, and compares the result."""

from __future__ import annotations

import concurrent.futures
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.conversion.plan import Arrays, Job, Plan
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.dtypes import all_finite
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.files.open_files import memory
from jaxlowprec.checkpoints.files.safetensors_file import METADATA, SafetensorsFile, SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import layout_header

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
    plan: Plan, source: CheckpointFolder | None, destination: pathlib.Path, workers: int, progress: Progress | None
) -> list[str]:
    """Writes the files of a plan that are not finished yet; returns the names of those that were.

    At most `workers` tensors are in memory at a time: what a worker has computed is written to its place at once.
    Without a source every job computes its tensors, as those of a GGUF file do.
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
    plan: Plan, shard: str, source: CheckpointFolder | None, destination: pathlib.Path, workers: int, counter: Counter
) -> SafetensorsWriter:
    """The writer of a file after all its tensors were written, ready to be committed."""
    writer = SafetensorsWriter(destination / shard, plan.specs(shard))

    def write(job: Job) -> None:
        if not job.computes:
            assert source is not None
            writer.copy(job.module, source.file_of(job.module), job.module)
        elif job.parts is not None:
            writer.write_parts(job.outputs, job.parts())
        else:
            for made in job.made():
                for name, array in made.items():
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
    plan: Plan, source: CheckpointFolder | None, destination: CheckpointFolder, workers: int, progress: Progress | None
) -> int:
    """Computes every tensor of a plan again and compares it with the files; returns how many were compared.

    Raises:
        CheckpointError: a tensor differs in a bit, is missing, or is infinite or NaN although its source is finite.
    """
    counter = Counter(plan.source_bytes, "verifying", progress)
    if destination.shard_of != plan.shard_of:
        raise CheckpointError(f"{destination.path}: does not hold the tensors that were written")

    def compare(job: Job) -> None:
        if name := _differing(job, source, destination):
            raise CheckpointError(f"{destination.path}: tensor {name!r} differs from the source's; convert again")
        _require_finite(job, destination)
        counter.add(job.source_bytes)

    in_parallel(compare, [job for jobs in plan.shards.values() for job in jobs], workers)
    return len(plan.shard_of)


def _require_finite(job: Job, destination: CheckpointFolder) -> None:
    """Raises CheckpointError if what was written for a finite weight decodes to infinity or NaN."""
    if job.decode is None:
        return
    for tensors in _written_pieces(job, destination):
        with np.errstate(over="ignore", invalid="ignore"):
            decoded = job.decode(tensors)
        if not all_finite(decoded):
            raise CheckpointError(
                f"{destination.path}: module {job.module!r} is infinite or NaN there, but finite in the source"
            )


def _written_pieces(job: Job, destination: CheckpointFolder) -> Iterator[Arrays]:
    """A job's tensors as they were written, whole or piece by piece, as the job makes them."""
    if job.parts is None:
        yield {name: destination.read(name) for name in job.outputs}
        return
    (count,) = {spec.shape[0] for spec in job.outputs.values()}
    for index in range(count):
        yield {name: destination.file_of(name).read_at(name, index)[None] for name in job.outputs}


def _differing(job: Job, source: CheckpointFolder | None, destination: CheckpointFolder) -> str | None:
    """The name of a tensor that is not what the job makes; None: there is none."""
    compared = dict.fromkeys(job.outputs, 0)
    for name, data in _expected(job, source):
        begin, spec = compared[name], job.outputs[name]
        if destination.spec(name) != spec or begin + data.size > spec.nbytes:
            return name
        written = memory(data.size)
        destination.file_of(name).read_into(name, written, begin)
        if not np.array_equal(written, data):
            return name
        compared[name] += data.size
    return next((name for name, count in compared.items() if count != destination.spec(name).nbytes), None)


def _expected(job: Job, source: CheckpointFolder | None) -> Iterator[tuple[str, np.ndarray]]:
    """The bytes of a job's tensors, a few at a time, in order for each tensor."""
    if not job.computes:
        assert source is not None
        for piece in source.file_of(job.module).pieces(job.module, _COMPARED_AT_ONCE):
            yield job.module, piece
    for made in job.made():
        for name, array in made.items():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for begin in range(0, data.size, _COMPARED_AT_ONCE):
                yield name, data[begin : begin + _COMPARED_AT_ONCE]


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
