"""Charts of whole programs: training steps, meshes, checkpoints on their way."""

from __future__ import annotations

from recorded import load

from charts.bars import Bar, BarChart, Panel, Row
from charts.chosen import ABOUT, ONLY_AVX512, bar, measured_on, single


def conversion() -> BarChart:
    """A checkpoint's conversion."""
    cases = load("convert")["cases"]
    panels = (
        Panel(
            "cp -r of the checkpoint", tuple(Row(c["scheme"], (Bar(c["ratio_to_copy"], c["target"]),)) for c in cases)
        ),
        Panel("cp -r, then sync", tuple(Row(c["scheme"], (Bar(c["ratio_to_copy_to_disk"]),)) for c in cases)),
    )
    size = cases[0]["source_bytes"] / 2**20
    about = f"Converting {size:.0f} MiB of bfloat16 weights. {ABOUT} AVX2 only: AVX-512 was not recorded."
    return BarChart("Converting a checkpoint", about, ("AVX2",), panels, measured_on("convert"))


def step(size: str, recipe: str, dtype: str) -> Bar:
    """The example's training step of one size, against plain Flax in a dtype."""
    cases = [c | {"case": c["recipe"]} for c in load("train_step")["cases"] if c["size"] == size]
    return bar(cases, recipe, f"plain Flax, {dtype}")


RECIPES = ("NVFP4", "MXFP8", "FP8 block", "FP8 current", "FP8 delayed")


def training_step() -> BarChart:
    """The example's step; its two sizes are the two series."""
    sizes = ("demo", "small")

    panels = tuple(
        Panel(f"plain Flax in {dtype}", tuple(Row(r, tuple(step(size, r, dtype) for size in sizes)) for r in RECIPES))
        for dtype in ("bfloat16", "float32")
    )
    return BarChart(
        "A training step",
        f"The example's model, optimizer included. {ABOUT} {ONLY_AVX512}",
        tuple(f"{size} model" for size in sizes),
        panels,
        measured_on("train_step"),
    )


def weight_sync() -> BarChart:
    """Versions of the weights on their way."""
    copies = {
        "in process, device to device": "in process",
        "in process, packed and checksummed": "in process, packed, checksums",
        "shared memory": "shared memory",
    }
    on_the_way = {"w4a16 on the way, a wire as fast as quantising": "w4a16 while sending"}
    tcp = {
        "TCP on loopback, buckets made beforehand": "TCP, packed beforehand",
        "TCP on loopback, push, packed and checksummed": "TCP, packed, checksums",
        "TCP on loopback, buckets made beforehand, 4 streams": "TCP, packed beforehand, 4 streams",
    }
    panels = (
        Panel("a copy in memory", single("weight_sync", "a copy in memory", copies)),
        Panel("a plain socket copy", single("weight_sync_tcp", "a plain socket copy", tcp)),
        Panel("quantising all, then sending", single("weight_sync", "quantising all", on_the_way)),
    )
    return BarChart(
        "Weight sync",
        f"A new version of about 500 MiB of weights. {ABOUT} {ONLY_AVX512}",
        ("AVX-512",),
        panels,
        measured_on("weight_sync", "weight_sync_tcp"),
    )


def traffic() -> BarChart:
    """What devices send in a training step, against plain bfloat16."""
    result = load("traffic")
    sent = {(r["placement"], r["recipe"], r["kind_of_sums"]): r["operands"] + r["sums"] for r in result["results"]}
    recipes, kinds = ("FP8 block", "NVFP4"), ("float32", "bfloat16", "quantized")

    def row(placement: str, kind: str) -> Row:
        plain = sent[placement, "bfloat16", "bfloat16"]
        return Row(f"{kind} sums", tuple(Bar(sent[placement, recipe, kind] / plain) for recipe in recipes))

    panels = tuple(
        Panel(f"plain bfloat16, {placement}", tuple(row(placement, kind) for kind in kinds))
        for placement in dict.fromkeys(placement for placement, *_ in sent)
    )
    about = (
        "Bytes that each of eight H100s sends in a training step of a feed-forward layer of Llama 3 8B, over those of "
        "plain bfloat16 on the same mesh: less is better. Counted in compiled programs; no GPU has run them."
    )
    environment = result["environment"]
    compiled = f"Compiled by jax {environment['versions']['jax']}, commit {environment['commit']}."
    return BarChart("Bytes on the wire", about, recipes, panels, compiled)


def mesh() -> BarChart:
    """What sharding itself costs."""
    step = "linear, forward and backward"
    ours = {
        "quantize rowwise, by rows": "quantize, rows split",
        "quantize_both, RHT columnwise, by both": "quantize_both, both axes split",
        "scaled_matmul, by rows": "scaled_matmul, rows split",
        f"{step}, data parallel": "linear, data parallel",
        f"{step}, FSDP": "linear, FSDP",
        f"{step}, data 2 by tensor 4": "linear, data 2, tensor 4",
        f"{step}, data 2 by tensor 4, sequence parallel": "the same, sequence parallel",
    }
    theirs = {
        "XLA's 2 * x, by rows": "XLA's 2 * x, rows split",
        "XLA's max(x), by rows": "XLA's max(x), rows split",
        "XLA's bfloat16 linear, data 2 by tensor 4": "XLA's linear, data 2, tensor 4",
    }
    return BarChart(
        "What a mesh costs",
        "NVFP4 on eight virtual devices of one CPU: the time of one device over that of eight. AVX-512 only.",
        ("AVX-512",),
        (Panel("one device, the same work", single("mesh_overhead", "one device", ours | theirs)),),
        measured_on("mesh_overhead"),
    )
