"""The file that benchmarks/gpu.py writes row by row: what it holds already, its worst rows, its table. Needs no JAX.

python benchmarks/gpu_file.py FILE             # the table
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

UNFINISHED = "the run ended while this row was measured"


def identity(environment: dict[str, Any]) -> tuple:
    """What two measurements must have in common to stand in one file."""
    return tuple(environment.get(k) for k in ("device", "driver", "versions", "sources", "divide"))


def key(case: dict) -> tuple[str, str]:
    """A row's name."""
    return case["case"], case["against"]


class Results:
    """The rows of one device and one state of the sources, written after every change.

    Arguments:
        path: of the file, or None to keep the rows in memory only.
        environment: of this run. A file of another device or other sources is renamed to NAME-before.json.
        again: measure all rows again.
    """

    def __init__(self, path: pathlib.Path | None, environment: dict[str, Any], again: bool = False):
        self.path, self.environment, self.cases = path, environment, []
        if path and path.exists():
            found = load(path)
            if identity(found["environment"]) != identity(environment):
                path.replace(path.with_name(f"{path.stem}-before.json"))
            elif not again:
                self.environment, self.cases = found["environment"], found["cases"]

    def find(self, name: tuple[str, str]) -> dict | None:
        """A row's last result, if it has one."""
        return next((c for c in self.cases if key(c) == name), None)

    def measured(self, name: tuple[str, str]) -> bool:
        """Whether a row has a result that is not an error."""
        case = self.find(name)
        return case is not None and "error" not in case

    def failed(self, name: tuple[str, str]) -> bool:
        """Whether a row was tried and failed, or ended its run."""
        case = self.find(name)
        return case is not None and "error" in case

    def put(self, case: dict) -> None:
        """Adds a row, or replaces it."""
        self.cases = [c for c in self.cases if key(c) != key(case)] + [case]
        self.write()

    def write(self) -> None:
        """Writes the file whole, beside the old one and then over it: a run may end at any moment."""
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps({"environment": self.environment, "cases": self.cases}, indent=1) + "\n")
            new.replace(self.path)


def load(path: pathlib.Path) -> dict[str, Any]:
    """A file's content."""
    return json.loads(path.read_text())


def reached(case: dict) -> float:
    """The ratio that a row's target is compared with: that of the kernels alone, or, where there is none, of calls."""
    return case.get("kernel_ratio", case["ratio"]["median"])


def worst(cases: list[dict], count: int) -> list[dict]:
    """The measured rows that are the furthest below their targets, the worst first; each case once."""
    judged = [c for c in cases if "error" not in c and c["target"]]
    found: dict[str, dict] = {}
    for c in sorted(judged, key=lambda c: reached(c) / c["target"]):
        found.setdefault(c["case"], c)
    return list(found.values())[:count]


def table(result: dict[str, Any]) -> str:
    """A file's rows with their targets, and how many were met."""
    e = result["environment"]
    lines = [f"{e['device']}, driver {e['driver']}, {e['cuda']}, jax {e['versions']['jax']}, commit {e['commit']}"]
    met = judged = failed = 0
    for c in result["cases"]:
        if "error" in c:
            failed += 1
            lines.append(f"{c['case']:66} FAILED: {c['error'][:100]}")
            continue
        ratio, target = reached(c), c["target"]
        verdict = ""
        if target is not None:
            judged, met = judged + 1, met + (ratio >= target)
            verdict = f"target {target}: {'met' if ratio >= target else 'MISSED'}"
        by = "kernels" if "kernel_ratio" in c else "calls"
        lines.append(f"{c['case']:66} {c['against']:38} {ratio:6.2f}x by {by:7}  {verdict}".rstrip())
    lines.append(f"{len(result['cases'])} of {e['rows']} rows: {met} of {judged} targets met, {failed} rows failed")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(load(pathlib.Path(sys.argv[1]))))
