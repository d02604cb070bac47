"""Names the state of the library's sources, with or without git: results of one state are not mixed with another's."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = ("CMakeLists.txt", "cmake", "jaxlowprec", "xla_ffi")
SUFFIXES = ("", ".cc", ".cmake", ".cpp", ".cu", ".cuh", ".h", ".in", ".inc", ".py", ".txt")


def commit() -> str:
    """What git says, but of results, or JAXLOWPREC_COMMIT where the sources were copied without their repository."""
    if given := os.environ.get("JAXLOWPREC_COMMIT"):
        return given
    try:
        head = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, cwd=ROOT, check=True)
        changed = subprocess.run(
            ["git", "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"], cwd=ROOT, check=False
        )
        return head.stdout.strip() + ("-dirty" if changed.returncode else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def digest() -> str:
    """Of the files that the library is built from."""
    whole = hashlib.sha256()
    for part in LIBRARY:
        for file in sorted((ROOT / part).rglob("*")) if (ROOT / part).is_dir() else [ROOT / part]:
            if file.is_file() and file.suffix in SUFFIXES and "__pycache__" not in file.parts:
                whole.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return whole.hexdigest()[:12]


if __name__ == "__main__":
    print(digest())
