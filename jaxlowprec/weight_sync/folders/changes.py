"""The changed bytes of a tensor: runs, each a gap and a length of 16 bits, and the new bytes.

A run is (bytes to skip, bytes to write). Unchanged bytes between two changed ones are written, too, if that is shorter
than another run. A gap that is longer than 65535 becomes several runs with nothing to write. Applying runs twice has
the same result as applying them once.
"""

from __future__ import annotations

import numpy as np

_MERGE = 4  # bytes of a run: it costs as much as writing this many unchanged bytes
_CHUNK = 1 << 24  # bytes compared at once, which bounds memory
_RUNS = 1 << 16  # runs written at once
_MOST = 65535


def changed_runs(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The difference from one tensor's bytes to another's of the same length.

    Arguments:
        old, new: uint8 [n].

    Returns:
        Runs, uint16 [r, 2], and the bytes that they write, uint8 [m].

    >>> changed_runs(np.zeros(9, np.uint8), np.asarray([0, 0, 7, 0, 8, 0, 0, 0, 0], np.uint8))
    (array([[2, 3]], dtype=uint16), array([7, 0, 8], dtype=uint8))
    """
    runs, values = [np.zeros((0, 2), np.uint16)], [np.zeros(0, np.uint8)]
    done = 0  # where the last run ended
    for begin in range(0, old.size, _CHUNK):
        after = new[begin : begin + _CHUNK]
        changed = np.flatnonzero(old[begin : begin + _CHUNK] != after)
        if not changed.size:
            continue
        breaks = np.flatnonzero(np.diff(changed) > _MERGE + 1)
        starts, ends = changed[np.append(0, breaks + 1)], changed[np.append(breaks, changed.size - 1)] + 1
        steps = np.zeros(after.size + 1, np.int8)
        steps[starts] += 1
        steps[ends] -= 1
        values.append(after[np.cumsum(steps[:-1], dtype=np.int8).astype(bool)])
        runs.append(_encode(starts - np.append(done - begin, ends[:-1]), ends - starts))
        done = begin + int(ends[-1])
    return np.concatenate(runs), np.concatenate(values)


def changed_bytes(old: np.ndarray, new: np.ndarray) -> int:
    """How many bytes differ.

    >>> changed_bytes(np.zeros(9, np.uint8), np.arange(9, dtype=np.uint8))
    8
    """
    chunks = range(0, old.size, _CHUNK)
    return sum(int(np.count_nonzero(old[i : i + _CHUNK] != new[i : i + _CHUNK])) for i in chunks)


def _encode(gaps: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Runs of 16 bits: first those that only skip, then the gap's rest with the first bytes, then the other bytes."""
    skips = gaps // _MOST
    writes = np.maximum(-(-lengths // _MOST), 1)
    each = skips + writes
    place = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    skips, writes, gaps, lengths = (np.repeat(values, each) for values in (skips, writes, gaps, lengths))
    left = lengths - (place - skips) * _MOST
    runs = np.empty((place.size, 2), np.uint16)
    runs[:, 0] = np.where(place < skips, _MOST, np.where(place == skips, gaps % _MOST, 0))
    runs[:, 1] = np.where(place < skips, 0, np.minimum(left, _MOST))
    return runs


def apply_runs(tensor: np.ndarray, runs: np.ndarray, values: np.ndarray) -> None:
    """Applies changes to a tensor's bytes, uint8 [n].

    Raises:
        ValueError: the runs are longer than the tensor, or do not fit the bytes; nothing was written.

    >>> tensor = np.zeros(9, np.uint8)
    >>> apply_runs(tensor, np.asarray([[2, 3]], np.uint16), np.asarray([7, 0, 8], np.uint8))
    >>> tensor
    array([0, 0, 7, 0, 8, 0, 0, 0, 0], dtype=uint8)
    """
    gaps, written = (int(total) for total in runs.sum(0, dtype=np.int64))
    if gaps + written > tensor.size or written != values.size:
        raise ValueError(
            f"runs that end at {gaps + written} and write {written} bytes; the tensor has {tensor.size}, given are "
            f"{values.size}"
        )
    place = taken = 0
    for first in range(0, len(runs), _RUNS):
        some = runs[first : first + _RUNS].astype(np.int64)
        ends, count = place + np.cumsum(some.sum(1)), some[:, 1]
        if count.sum() > _CHUNK:  # the runs are few and long
            for end, length in zip(ends.tolist(), count.tolist(), strict=True):
                tensor[end - length : end] = values[taken : taken + length]
                taken += length
        else:
            before = np.cumsum(count) - count
            places = np.repeat(ends - count - before, count) + np.arange(count.sum())
            tensor[places] = values[taken : taken + places.size]
            taken += places.size
        place = int(ends[-1])
