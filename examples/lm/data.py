"""Real text that every machine has: the sources of Python's standard library, or of all installed packages."""

from __future__ import annotations

import hashlib
import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np

MOST_BYTES = 16 << 20
MOST_INSTALLED_BYTES = 256 << 20
VALIDATION_SHARE = 0.05


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


def installed_text() -> tuple[np.ndarray, int]:
    """The Python sources of all installed packages and of the standard library, and where those for validation begin.

    Files of the same content are taken once, in the order of their digests, which also say whether a file is for
    validation: a twentieth of them are. Machines with other packages have other texts.
    """
    paths = sysconfig.get_paths()
    roots = {pathlib.Path(paths[name]) for name in ("stdlib", "purelib", "platlib")}
    sources: dict[bytes, bytes] = {}
    for file in {file for root in roots for file in root.rglob("*.py")}:
        if file.is_file():
            content = file.read_bytes()
            sources[hashlib.blake2b(content, digest_size=16).digest()] = content
    validates = {digest: digest[-1] < 256 * VALIDATION_SHARE for digest in sources}
    parts: list[list[np.ndarray]] = [[], []]
    size = 0
    for digest in sorted(sources):
        if size < MOST_INSTALLED_BYTES:
            parts[validates[digest]].append(np.frombuffer(sources[digest], np.uint8))
            size += parts[validates[digest]][-1].size
    training, validation = map(np.concatenate, parts)
    return np.concatenate([training, validation]), training.size


class Batches:
    """Windows of the text at random places, fixed by seed and step. The last 5 % of the text are for validation."""

    def __init__(
        self,
        text: np.ndarray,
        batch: int,
        context: int,
        seed: int,
        rows: np.ndarray | None = None,
        split: int | None = None,
    ):
        """`rows`: the windows of a batch to load; default: all. `split`: where the text for validation begins."""
        split = int(text.size * (1 - VALIDATION_SHARE)) if split is None else split
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
