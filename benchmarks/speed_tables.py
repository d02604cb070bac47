"""Tables of speed and of the training study."""

from __future__ import annotations

from cells import markdown, mebibytes, milliseconds
from gpu_file import reached
from recorded import RESULTS, load, recorded_on, where


def speed(kind: str = "cpu_kernels", operands: str = "4096x4096 bf16, ") -> str:
    """The kernels, one table per instruction set."""
    parts = []
    for name in recorded_on(kind):
        result = load(name)
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


def rows() -> str:
    """Scales of rows: INT8, FP8, and 4-bit weights by INT8."""
    return speed("rows", "")


def grouped() -> str:
    """Groups of rows, each group by its own weight."""
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


def convert_7b() -> str:
    """The conversion of a checkpoint of Llama 2 7B's shapes, with its memory."""
    result = load("convert_7b")
    rows = [("scheme", "ours, s", "`cp -r`, s", "speed", "memory, GiB")]
    for c in result["cases"]:
        memory = f"{c['memory_bytes'] / 2**30:.2f}"
        rows.append((c["scheme"], f"{c['ours']:.1f}", f"{c['copy']:.1f}", f"{c['ratio']:.2f}x", memory))
    targets = f"Targets: {result['target']}x, and {result['most_memory_bytes'] / 2**30:.0f} GiB."
    return f"{markdown(rows)}\n\n{targets} Rounds: {result['rounds']}. {where(result)}"


def weight_sync() -> str:
    """New versions of the weights, each transport against copying the same bytes."""
    parts = []
    for file in sorted(RESULTS.glob("weight_sync*.json")):
        result = load(file.stem)
        rows = [("a sync", "against", "speed", "target", "ours, ms", "theirs, ms")]
        for c in result["cases"]:
            rows.append(
                (
                    f"{c['case']}, {mebibytes(c['bytes'])} MiB",
                    c["against"],
                    f"{c['ratio']['median']:.2f}x",
                    "" if c["target"] is None else f"{c['target']}x",
                    milliseconds(c["ours"]["median"]),
                    milliseconds(c["theirs"]["median"]),
                )
            )
        parts += [markdown(rows), where(result)]
    return "\n\n".join(parts)


def generation() -> str:
    """Tokens of one sequence that `jaxlowprec.decoder` writes, one after the other."""
    result = load("generation")
    rivals = ("tokens per second", "of llama.cpp's Q4_0", "of the read bandwidth: products", "step", "target")
    rows = [("format", *rivals)]
    for c in result["cases"]:
        shares = (c["of_llama_cpp"], c["products_of_bandwidth"], c["step_of_bandwidth"], c["target"])
        rows.append((c["format"], f"{c['tokens_per_second']:.1f}", *(f"{share:.2f}" for share in shares)))
    shape = f"{result['layers']} layers of TinyLlama's widths and its head, one sequence"
    return f"{markdown(rows)}\n\n{shape}; {where(result)}"


_ISA = "avx512_bf16"  # of the summary's rows on a CPU
_FP8_BLOCK = "Float8Block E4M3 1x128 by Float8Block E4M3 128x128"
_SUMMARY = (  # a result, the beginning of the first of its cases to show, what the summary calls it, and its section
    ("cpu_kernels", "quantize rowwise, nearest", "quantise, NVFP4 along rows", "quantisers"),
    ("cpu_kernels", "quantize_both, RHT", "quantise, NVFP4 both ways, rotated", "quantisers"),
    ("formats", "quantize MXFP8 E4M3 1x32, rowwise", "quantise, MXFP8 along rows", "quantisers"),
    ("cpu_kernels", "scaled_matmul 1024x4096x4096, 1x16 by 16x16", "GEMM, NVFP4", "block-scaled-gemms"),
    ("formats", "scaled_matmul 1024x4096x4096, MXFP8", "GEMM, MXFP8", "block-scaled-gemms"),
    ("formats", f"scaled_matmul 1024x4096x4096, {_FP8_BLOCK}", "GEMM, FP8 in blocks", "block-scaled-gemms"),
    ("weight_only_matmul", "scaled_matmul 1x4096x4096, bfloat16 by Int4", "1 row of bf16 by INT4", "weight-only-gemms"),
    (
        "weight_only_matmul",
        "scaled_matmul 1024x4096x4096, bfloat16 by Int4",
        "1024 rows of bf16 by INT4",
        "weight-only-gemms",
    ),
    ("grouped_matmul", "32 groups, 64 rows each (uneven)", "GEMM of 32 experts, NVFP4", "experts-grouped-gemms"),
)
_SUMMARY_GPU = (
    ("quantize NVFP4 1x16, rowwise", "quantise, NVFP4 along rows"),
    ("scaled_matmul NVFP4 8192", "GEMM, NVFP4"),
    ("scaled_matmul FP8 block 8192", "GEMM, FP8 in blocks"),
    ("weight-only Int4, few rows 1x", "1 row of bf16 by INT4"),
    ("a training step of a Llama block, 4096 wide, 8192 tokens, NVFP4", "training step of a Llama block, NVFP4"),
    (
        "a training step of a Llama block, 4096 wide, 8192 tokens, FP8 block",
        "training step of a Llama block, FP8 in blocks",
    ),
)


def speed_summary() -> str:
    """A row or two of each section of the page."""
    rows = [("on", "operation", "against", "speed", "target")]

    def add(place: str, text: str, section: str, against: str, speed: float, target: float | None) -> None:
        other = against.partition(" (")[0]
        rows.append((place, f"[{text}](#{section})", other, f"{speed:.2f}x", "" if target is None else f"{target}x"))

    for kind, beginning, text, section in _SUMMARY:
        c = next(c for c in load(f"{kind}_{_ISA}")["cases"][_ISA] if c["case"].startswith(beginning))
        add("CPU", text, section, c["against"], c["ratio"]["median"], c["target"])
    for c in load("train_step")["cases"]:
        if c["size"] == "small" and c["recipe"] in ("NVFP4", "MXFP8") and "bfloat16" in c["against"]:
            text = f"training step of a small model, {c['recipe']}"
            add("CPU", text, "a-training-step", c["against"], c["ratio"]["median"], c["target"])
    c = next(c for c in load("generation")["cases"] if c["format"] == "INT4")
    add(
        "CPU",
        "tokens of one sequence, INT4",
        "generation-of-one-sequence",
        "llama.cpp, Q4_0",
        c["of_llama_cpp"],
        c["target"],
    )
    c = next(c for c in load("weight_sync_tcp")["cases"] if c["case"].endswith("streams"))
    add("CPU", "weights over TCP, TLS, 4 streams", "weight-sync", c["against"], c["ratio"]["median"], c["target"])
    measured = load("gpu")["cases"]
    for beginning, text in _SUMMARY_GPU:
        c = next(c for c in measured if c["case"].startswith(beginning))
        add("H200", text, "gpus", c["against"], reached(c), c["target"])
    kept = load(f"cpu_kernels_{_ISA}")["saved_by_linear"]
    return f"{markdown(rows)}\n\nA linear under NVFP4 keeps {kept:.2f} of its bfloat16 input for the backward pass."


def train_step() -> str:
    """The example's training step."""
    result = load("train_step")
    rows = [("model", "recipe", "against", "speed", "target", "ours, ms", "theirs, ms")]
    for c in result["cases"]:
        ours, theirs = (milliseconds(c[k]["median"]) for k in ("ours", "theirs"))
        target = "" if c["target"] is None else f"{c['target']}x"
        rows.append((c["size"], c["recipe"], c["against"], f"{c['ratio']['median']:.2f}x", target, ours, theirs))
    return markdown(rows) + "\n\n" + where(result)


def telemetry() -> str:
    """What a step with telemetry takes, in steps without."""
    parts = []
    for name in recorded_on("telemetry"):
        result = load(name)
        rows = [("recipe", "width", "without, ms", "not recorded", "target", "recorded", "target")]
        for c in result["cases"]:
            without = milliseconds(c["seconds"]["without"]["median"])
            found = [
                text
                for side, target in c["targets"].items()
                for text in (f"{c['ratio'][side]['median']:.3f}", f"at most {target}")
            ]
            rows.append((c["recipe"], str(c["width"]), without, *found))
        isa = name.removeprefix("telemetry_")
        parts += [markdown(rows), f"{where(result)} Instruction set: {isa}."]
    return "\n\n".join(parts)


def scaling() -> str:
    """Time per element and memory, from the smallest to the largest array."""
    result = load("scaling")
    sizes = sorted({c["elements"] for c in result["cases"]})
    rows = [("ns per element (MiB beyond inputs and results)", *(f"{n >> 20} M elements" for n in sizes))]
    for name in dict.fromkeys(c["operation"] for c in result["cases"]):
        mine = {c["elements"]: c for c in result["cases"] if c["operation"] == name}
        times = (mine[n]["nanoseconds_per_element"] for n in sizes)
        held = (max(0, mine[n]["bytes_beyond_inputs_and_results"]) / 2**20 for n in sizes)
        cells = (f"{ns:.2f} ({mib:.1f})" for ns, mib in zip(times, held, strict=True))
        rows.append((name, *cells))
    return markdown(rows) + "\n\n" + where(result)


def gpu() -> str:
    """What was measured on a GPU, if anything was."""
    if not (RESULTS / "gpu.json").exists():
        return "No benchmark and no test has run on a GPU yet: every statement about GPUs is unverified."
    result = load("gpu")
    rows = [("on the GPU", "against", "speed", "target")]
    for c in result["cases"]:
        speed_up = "failed" if "error" in c else f"{reached(c):.2f}x"
        rows.append((c["case"], c["against"], speed_up, "" if c["target"] is None else f"{c['target']}x"))
    e = result["environment"]
    return markdown(rows) + f"\n\nDriver {e['driver']}, {e['cuda']}, {where(result)}"


def _tracing_rows(result: dict, stages: tuple[str, ...]) -> tuple[list[tuple[str, ...]], str]:
    """A header and a file's models, with the plain ones' seconds and their multiples under recipes; and its origin."""
    settings, results = result["settings"], result["results"]
    recipes = [recipe for recipe in next(iter(results.values())) if recipe != "plain"]
    names = {"nvfp4": "NVFP4", "mxfp8": "MXFP8"}
    heads = [f"{names[r]} {stage}" for r in recipes for stage in stages]
    rows = [("model", *(f"plain {stage}, s" for stage in stages), *heads)]
    for model, found in results.items():
        plain = found["plain"]
        times = [f"{found[r][stage] / plain[stage]:.2f}x" for r in recipes for stage in stages]
        rows.append((model, *(f"{plain[stage]:.2f}" for stage in stages), *times))
    rounds = f"{settings['rounds']} rounds" if settings["rounds"] > 1 else "one round"
    return rows, f"{settings['layers']} layers, {rounds}; {where(result)}"


def tracing() -> str:
    """Seconds to trace and to compile the gradient of models, and the multiples under recipes."""
    rows, origin = _tracing_rows(load("tracing_1"), ("trace", "lower", "compile"))
    return markdown(rows) + "\n\n" + origin


def tracing_trainers() -> str:
    """The same of trainers' models, which were measured in environments of their own, and of a call."""
    found = [_tracing_rows(load(name), ("trace", "compile", "call")) for name in sorted(recorded_on("tracing_trainer"))]
    rows = found[0][0][:1] + [row for rows, _ in found for row in rows[1:]]
    return markdown(rows) + "\n\n" + "\n".join(dict.fromkeys(origin for _, origin in found))
