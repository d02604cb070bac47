"""Cases out of the result files, as rows of a chart.

A case that the results do not have is an error: no chart leaves out what it names.
"""

from __future__ import annotations

from collections.abc import Iterable

from recorded import load

from charts.bars import Bar, Row

Labels = dict[str, str]  # what the results call a case -> what the chart calls it
ISAS = {"AVX2": "avx2", "AVX-512": "avx512_bf16"}  # the series of most charts -> the files' endings
ABOUT = "Longer is faster: the other side's time over ours."
ONLY_AVX512 = "AVX-512 only: AVX2 was not recorded."


def bar(cases: Iterable[dict], name: str, against: str) -> Bar:
    """The one case of this name whose baseline begins so.

    Raises:
        ValueError: the results have no such case, or several.
    """
    found = [c for c in cases if c["case"] == name and c["against"].startswith(against)]
    if len(found) != 1:
        raise ValueError(f"the results have {len(found)} cases {name!r} against {against!r}; a chart needs one")
    return Bar(found[0]["ratio"]["median"], found[0].get("target"))


def rows(kind: str, against: str, labels: Labels) -> tuple[Row, ...]:
    """Cases of one benchmark, one bar per instruction set."""
    files = [load(f"{kind}_{isa}")["cases"][isa] for isa in ISAS.values()]
    return tuple(Row(label, tuple(bar(cases, name, against) for cases in files)) for name, label in labels.items())


def single(kind: str, against: str, labels: Labels) -> tuple[Row, ...]:
    """Cases of a benchmark that was run with the best instruction set only."""
    cases = load(kind)["cases"]
    return tuple(Row(label, (bar(cases, name, against),)) for name, label in labels.items())


def measured_on(*names: str) -> str:
    """The machines of these result files, each named once."""
    found: dict[tuple, list[str]] = {}
    for name in names:
        e = load(name)["environment"]
        best = "AVX-512" if e["instruction_sets"][0].startswith("avx512") else "AVX2"
        found.setdefault((best, e["device"], e["cores"], e["versions"]["jax"]), []).append(e["commit"])
    return " ".join(
        f"{best}: {device}, {cores} cores, jax {jax}, commit {', '.join(dict.fromkeys(commits))}."
        for (best, device, cores, jax), commits in found.items()
    )


def measured_on_both(*kinds: str) -> str:
    """The machines of benchmarks that have a file per instruction set."""
    return measured_on(*(f"{kind}_{isa}" for isa in ISAS.values() for kind in kinds))
