"""Real text that every machine has: by default the sources of Python's standard library."""

from __future__ import annotations

import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np

MOST_BYTES = 16 << 20


def read_text(path: str | None) -> np.ndarray:
    """The bytes of a file, of all files below a folder, or of the standard library's sources, in a fixed order."""
    root = pathlib.Path(path or sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise SystemExit(f"--text {root}: no such file or folder")
    if root.is_file():
        files = [root]
    else:
        pattern = "*" if path else "*.py"
        skipped = {"site-packages", "test", "tests", "__pycache__"}
        files = sorted(f for f in root.rglob(pattern) if f.is_file() and (path or not skipped & set(f.parts)))
    chunks, size = [], 0
    for file in files:
        chunks.append(np.frombuffer(file.read_bytes(), np.uint8))
        size += chunks[-1].size
        if size >= MOST_BYTES:
            break
    text = np.concatenate(chunks) if chunks else np.zeros(0, np.uint8)
    if text.size < 1 << 16:
        raise SystemExit(f"--text {root}: {text.size} bytes of text; needs at least 64 KiB")
    return text[:MOST_BYTES]


class Batches:
    """Windows of the text at random places, fixed by seed and step. The last 5 % of the text are for validation."""

    def __init__(self, text: np.ndarray, batch: int, context: int, seed: int, rows: np.ndarray | None = None):
        """`rows`: the windows of a batch to load; default: all."""
        split = int(text.size * 0.95)
        self.training, self.validation = text[:split], text[split:]
        self.batch, self.context, self.seed = batch, context, seed
        self.rows = np.arange(batch) if rows is None else rows

    def _windows(self, text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        starts = rng.integers(0, text.size - self.context - 1, self.batch)
        return np.stack([text[s : s + self.context + 1] for s in starts[self.rows]]).astype(np.int32)

    def train(self, step: int) -> np.ndarray:
        """The windows for a training step, int32 [rows, context + 1]."""
        return self._windows(self.training, np.random.default_rng((self.seed, step)))

    def validate(self, count: int) -> Iterator[np.ndarray]:
        """The first `count` validation batches: the same for every run and seed."""
        for i in range(count):
            yield self._windows(self.validation, np.random.default_rng((0, 1 << 40, i)))
