"""Tables of what benchmarks/peers.py measured, on every machine where it was run."""

from __future__ import annotations

from cells import markdown, milliseconds, share
from recorded import RESULTS, load, where

_HEADING = ("operation", "ours", "against", "speed", "ours, ms", "theirs, ms", "error: ours, theirs", "the same")


def peers_quantizers() -> str:
    """Casts."""
    return _part("quantizers")


def peers_products() -> str:
    """GEMMs."""
    return _part("products")


def peers_decoding() -> str:
    """One row."""
    return _part("decoding")


def _part(part: str) -> str:
    results = [load(file.stem) for file in sorted(RESULTS.glob("peers_*.json"))]
    return "\n\n".join(tables(results, part))


def tables(results: list[dict], part: str) -> list[str]:
    """One for each result that has the part, and where it was measured. A row of a peer that failed is left out if
    another result, of a version of JAX that can, has it."""
    ran = {_name(c) for result in results for cases in result["cases"].values() for c in cases if "failure" not in c}
    found = []
    for result in results:
        for isa, cases in result["cases"].items():
            rows = [row(c) for c in cases if c["part"] == part and ("failure" not in c or _name(c) not in ran)]
            if rows:
                found += [markdown([_HEADING, *rows]), f"{where(result)} Instruction set: {isa}."]
    return found


def _name(case: dict) -> tuple[str, ...]:
    return case["case"], case["side"], case["against"]


def row(case: dict) -> tuple[str, ...]:
    """A case's cells."""
    names = case["case"], f"`{case['side']}`" if case["part"] == "quantizers" else case["side"], case["against"]
    if "failure" in case:
        return (*names, case["failure"], "", "", "", "")
    times = (milliseconds(case[side]["median"]) for side in ("ours", "theirs"))
    errors = "{ours:.2g}, {theirs:.2g}".format(**case["error"])
    same = ", ".join(f"{share(value)} of the {name}" for name, value in case["same"].items())
    return (*names, f"{case['ratio']['median']:.2f}x", *times, errors, same)


TABLES = (peers_quantizers, peers_products, peers_decoding)
