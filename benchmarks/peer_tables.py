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
    tables = []
    for file in sorted(RESULTS.glob("peers_*.json")):  # one for each instruction set
        result = load(file.stem)
        for isa, cases in result["cases"].items():
            tables += [markdown([_HEADING, *(row(c) for c in cases if c["part"] == part)])]
            tables += [f"{where(result)} Instruction set: {isa}."]
    return "\n\n".join(tables)


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
