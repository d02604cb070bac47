"""What was measured: the files in benchmarks/results."""

from __future__ import annotations

import json
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict:
    """A result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def recorded_on(kind: str) -> list[str]:
    """The results of a benchmark that has a file for each instruction set."""
    return sorted(file.stem for file in RESULTS.glob(f"{kind}_*.json"))


def where(result: dict) -> str:
    """The machine, the versions and the commit of a result."""
    e = result["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in e["versions"].items() if k != "jaxlib")
    return f"{e['device']}, {e['cores']} cores, {versions}, Python {e['python']}, commit {e['commit']}."
