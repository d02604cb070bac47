"""Writes the measured tables and the study's picture into the documents, from the files in benchmarks/results.

python benchmarks/tables.py            # rewrites what stands between <!-- table: NAME --> and <!-- end -->
python benchmarks/tables.py --check    # fails where a document differs from the results
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    "README.md",
    "docs/benchmarks/speed.md",
    "docs/benchmarks/training.md",
    "docs/explanation/scaling.md",
    "docs/how-to/weight_sync.md",
)


def load(name: str) -> dict:
    """A result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(rows: Iterable[Iterable[str]]) -> str:
    """The first row is the heading."""
    heading, *others = [list(row) for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heading, ["---"] * len(heading), *others])


def milliseconds(seconds: float) -> str:
    """Three digits or more."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.3g}"


def where(result: dict) -> str:
    """What a table was measured on."""
    e = result["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in e["versions"].items() if k != "jaxlib")
    return f"{e['device']}, {e['cores']} cores, {versions}, Python {e['python']}, commit {e['commit']}."


def speed(kind: str = "cpu_kernels", operands: str = "4096x4096 bf16, ") -> str:
    """The kernels, one table an instruction set."""
    parts = []
    for file in sorted(RESULTS.glob(f"{kind}_*.json")):
        result = load(file.stem)
        for isa, cases in result["cases"].items():
            rows = [(operands + isa, "against", "speed", "target", "ours, ms", "theirs, ms")]
            for c in cases:
                rows.append(
                    (
                        c["case"],
                        c["against"],
                        f"{c['ratio']['median']:.2f}x",
                        "" if c["target"] is None else f"{c['target']}x",
                        milliseconds(c["ours"]["median"]),
                        milliseconds(c["theirs"]["median"]),
                    )
                )
            parts.append(markdown(rows))
        parts.append(where(result))
    return "\n\n".join(parts)


def formats() -> str:
    """The kernels of all other formats."""
    return speed("formats")


def weight_only() -> str:
    """Activations in high precision by a quantised weight."""
    return speed("weight_only_matmul", "")


def grouped() -> str:
    """Rows in groups by a weight for each."""
    return speed("grouped_matmul", "")


def int4() -> str:
    """Int4 to decoded values, to codes and back."""
    return speed("int4", "4096x4096, ")


def convert() -> str:
    """A checkpoint's conversion."""
    result = load("convert")
    rows = [("scheme", "MiB", "ours, s", "`cp -r`, s", "speed", "target", "`cp -r` and `sync`, s", "speed")]
    for c in result["cases"]:
        sides = (c["ours"], c["copy"], c["ratio_to_copy"], c["target"], c["copy_to_disk"], c["ratio_to_copy_to_disk"])
        ours, copy, ratio, target, disk, ratio_disk = (f"{number:.2f}" for number in sides)
        mebibytes = f"{c['source_bytes'] / 2**20:.0f}"
        rows.append((c["scheme"], mebibytes, ours, copy, f"{ratio}x", f"{target}x", disk, f"{ratio_disk}x"))
    return markdown(rows) + "\n\n" + where(result)


def weight_sync() -> str:
    """Versions of the weights, each way against copying the same bytes."""
    parts = []
    for file in sorted(RESULTS.glob("weight_sync*.json")):
        result = load(file.stem)
        rows = [("a sync", "against", "speed", "target", "ours, ms", "theirs, ms")]
        for c in result["cases"]:
            rows.append(
                (
                    f"{c['case']}, {_mebibytes(c['bytes'])} MiB",
                    c["against"],
                    f"{c['ratio']['median']:.2f}x",
                    "" if c["target"] is None else f"{c['target']}x",
                    milliseconds(c["ours"]["median"]),
                    milliseconds(c["theirs"]["median"]),
                )
            )
        parts += [markdown(rows), where(result)]
    return "\n\n".join(parts)


def brief(case: dict) -> tuple[str, str, str]:
    """A measured case as a row of the README."""
    return case["case"], case["against"], f"{case['ratio']['median']:.2f}x"


_SHOWN = ("Int4 1x128 of bfloat16, axis -1", "bfloat16 by Int4 1x128")  # of INT4, in the README


def best_speed() -> str:
    """The best instruction set's rows, for the README."""
    isas = ("avx512_bf16", "avx512")  # the best first
    file = min(RESULTS.glob("cpu_kernels_*.json"), key=lambda f: [not f.stem.endswith(isa) for isa in isas])
    result = load(file.stem)
    isa, cases = next(iter(result["cases"].items()))
    rows = [("4096x4096 bf16", "against", "speed")]
    rows += map(brief, cases)
    other = load(f"formats_{isa}")["cases"][isa]
    rows += [brief(c) for c in other if "matmul" in c["case"]]
    for kind in ("int4", "weight_only_matmul"):
        shown = load(f"{kind}_{isa}")["cases"][isa]
        rows += [brief(c) for c in shown if c["case"].endswith(_SHOWN)]
    rows += [
        (f"converting a checkpoint, {c['scheme']}", "`cp -r` of it", f"{c['ratio_to_copy']:.2f}x")
        for c in load("convert")["cases"]
    ]
    rows += [
        (f"a training step of the {c['size']} example, {c['recipe']}", c["against"], f"{c['ratio']['median']:.2f}x")
        for c in load("train_step")["cases"]
        if "bfloat16" in c["against"]
    ]
    rows.append(
        (
            "activations that `linear` keeps for its backward",
            "its bf16 input",
            f"{result['saved_by_linear']:.2f} of the bytes",
        )
    )
    about = f"{where(result)} Conversion was measured on another machine, see docs/benchmarks/speed.md."
    return markdown(rows) + f"\n\n{about} Instruction set: {isa}."


def train_step() -> str:
    """The example's step."""
    result = load("train_step")
    rows = [("model", "recipe", "against", "speed", "ours, ms", "theirs, ms")]
    for c in result["cases"]:
        ours, theirs = (milliseconds(c[k]["median"]) for k in ("ours", "theirs"))
        rows.append((c["size"], c["recipe"], c["against"], f"{c['ratio']['median']:.2f}x", ours, theirs))
    return markdown(rows) + "\n\n" + where(result)


def scaling() -> str:
    """Time an element and memory from 1 M to 64 M elements."""
    result = load("scaling")
    sizes = sorted({c["elements"] for c in result["cases"]})
    rows = [("ns an element (MiB beyond in- and output)", *(f"{n >> 20} M elements" for n in sizes))]
    for name in dict.fromkeys(c["operation"] for c in result["cases"]):
        mine = {c["elements"]: c for c in result["cases"] if c["operation"] == name}
        times = (mine[n]["nanoseconds_per_element"] for n in sizes)
        held = (max(0, mine[n]["bytes_beyond_inputs_and_results"]) / 2**20 for n in sizes)
        cells = (f"{ns:.2f} ({mib:.1f})" for ns, mib in zip(times, held, strict=True))
        rows.append((name, *cells))
    return markdown(rows) + "\n\n" + where(result)


def study() -> str:
    """Gaps against bf16, by seed."""
    result = load("training_study")
    rows = [("steps", "run", "loss gap, mean", "by seed", "validation gap, mean", "by seed")]
    for s in result["summary"]:
        cells = []
        for key in ("loss_gap_percent", "validation_loss_gap_percent"):
            cells += [f"{s[key]['mean']:+.2f} %", ", ".join(f"{g:+.2f}" for g in s[key]["by_seed"])]
        rows.append((str(s["steps"]), s["run"], *cells))
    settings = result["settings"]
    step_bytes = settings["batch"] * settings["config"]["context"]
    about = (
        f"{settings['parameters']:,} parameters, {step_bytes} bytes a step, peak learning "
        f"rate {settings['learning_rate']}, {settings['seeds']} seeds, last block in bf16; "
        f"jax {settings['jax']} on {settings['platform']}, commit {settings['commit']}."
    )
    return markdown(rows) + "\n\n" + about


def gpu() -> str:
    """What was measured on a GPU, if anything was."""
    if not (RESULTS / "gpu.json").exists():
        return "Nothing was measured on a GPU yet, and no test was run on one: all that is said of GPUs is unverified."
    result = load("gpu")
    rows = [("on the GPU", "against", "speed", "target")]
    for c in result["cases"]:
        speed_up = "failed" if "error" in c else f"{c['ratio']['median']:.2f}x"
        rows.append((c["case"], c["against"], speed_up, "" if c["target"] is None else f"{c['target']}x"))
    e = result["environment"]
    return markdown(rows) + f"\n\nDriver {e['driver']}, {e['cuda']}, {where(result)}"


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:,.1f}"


def traffic() -> str:
    """What each device sends for a layer."""
    result = load("traffic")
    rows = [("mesh", "recipe", "operands, MiB", "sums, MiB", "operands against bfloat16")]
    for r in result["results"]:
        plain = next(
            o["operands"] for o in result["results"] if (o["placement"], o["recipe"]) == (r["placement"], "bfloat16")
        )
        ratio = f"{r['operands'] / plain:.2f}" if plain else ""
        rows.append((r["placement"], r["recipe"], _mebibytes(r["operands"]), _mebibytes(r["sums"]), ratio))
    e = result["environment"]
    compiled = f"compiled for {result['devices']} {result['compiled_for']}"
    return markdown(rows) + f"\n\n{compiled}, jax {e['versions']['jax']}, commit {e['commit']}."


NVLINK, INFINIBAND = 450e9, 50e9  # bytes a second that one H100 sends: NVLink 4, and one 400 Gb/s adapter for each


def projection() -> str:
    """Seconds on the wire for a layer on more devices, from the bytes on eight and the rates of the links."""
    measured = {(r["placement"], r["recipe"]): r for r in load("traffic")["results"]}
    recipes = dict.fromkeys(recipe for _, recipe in measured)
    rows = [("mesh", "recipe", "8 H100", "64 H100", "512 H100")]

    def seconds(count: float, rate: float) -> str:
        return f"{1e3 * count / rate:.2f} ms"

    for recipe in recipes:
        r = measured["FSDP", recipe]
        whole = (r["operands"] + r["sums"]) * 8 / 7  # what a device would send among very many
        flat = [seconds(whole * (n - 1) / n, NVLINK if n == 8 else INFINIBAND) for n in (8, 64, 512)]
        rows.append(("FSDP over all", recipe, *flat))
    for recipe in recipes:
        t, f = measured["tensor, sequence", recipe], measured["FSDP", recipe]
        within = (t["operands"] + t["sums"]) / NVLINK
        whole = (f["operands"] + f["sums"]) * 8 / 7 / 8  # each device of a node has an eighth of the weights
        both = [f"{1e3 * (within + whole * (n - 1) / n / INFINIBAND):.2f} ms" for n in (1, 8, 64)]
        rows.append(("tensor and sequence within a node, FSDP over nodes", recipe, *both))
    return markdown(rows)


def mesh_overhead() -> str:
    """What sharding itself costs."""
    result = load("mesh_overhead")
    rows = [("NVFP4, on eight virtual devices", "speed of one device", "target", "eight, ms", "one, ms")]
    for c in result["cases"]:
        ours, theirs = (milliseconds(c[k]["median"]) for k in ("ours", "theirs"))
        target = "" if c["target"] is None else f"{c['target']}x"
        rows.append((c["case"], f"{c['ratio']['median']:.2f}x", target, ours, theirs))
    return markdown(rows) + "\n\n" + where(result)


TABLES = {
    f.__name__: f
    for f in (
        *(
            speed,
            formats,
            int4,
            weight_only,
            grouped,
            convert,
            weight_sync,
            best_speed,
            train_step,
            scaling,
            study,
            gpu,
        ),
        *(traffic, projection, mesh_overhead),
    )
}


def picture(path: pathlib.Path) -> None:
    """The study's mean gap over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    summary = load("training_study")["summary"]
    lengths = sorted({s["steps"] for s in summary})
    figure, axes = plt.subplots(
        1, len(lengths), figsize=(5 * len(lengths), 4), layout="constrained", sharey=True, squeeze=False
    )
    for axis, steps in zip(axes[0], lengths, strict=True):
        for s in (s for s in summary if s["steps"] == steps):
            curve = s["gap_curve_percent"]
            style = {"color": "0.6", "linestyle": ":"} if s["run"] == "bf16 perturbed" else {}
            axis.plot([p["step"] for p in curve], [p["gap"] for p in curve], label=s["run"], **style)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set(title=f"{steps} steps", xlabel="step")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("training loss against bf16 (%)")
    axes[0][0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Rewrites, or checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = []
    for name in DOCUMENTS:
        document = ROOT / name
        text = document.read_text()
        new = re.sub(
            r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
            lambda m: m[1] + TABLES[m[2]]() + "\n" + m[3],
            text,
            flags=re.DOTALL,
        )
        if new != text and options.check:
            stale.append(name)
        elif new != text:
            document.write_text(new)
            print(f"{name}: tables written")
    if stale:
        sys.exit(f"{', '.join(stale)}: not what benchmarks/results say; run python benchmarks/tables.py")
    if not options.check:
        picture(ROOT / "docs" / "benchmarks" / "training_gap.png")


if __name__ == "__main__":
    main()
