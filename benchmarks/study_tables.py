"""The tables of what training loses under each recipe."""

from __future__ import annotations

from cells import markdown
from recorded import load, where

_WAYS = {  # of quantising bfloat16 to NVFP4 in rows: where recipes have it, and its kernel
    "nearest": ("every recipe", "1, false"),
    "stochastic": ("gradients of `NVFP4BlockScaling`", "1, true"),
    'scale_rule="four_over_six"': ("`nvfp4_4over6`", "3, false"),
    'scale_rule="four_over_six_mse"': ("`NVFP4Eden` in fprop", "4, false"),
    'scale_rule="search"': ('`NVFP4Eden(scale_rule="search")` in fprop', "5, false"),
    'eden, scale_rule="six"': ("torchao's V2", "2, true"),
    'eden, scale_rule="four_over_six_mse"': ("`NVFP4Eden` in dgrad and wgrad", "4, true"),
    'eden, scale_rule="search"': ('`NVFP4Eden(scale_rule="search")` in dgrad and wgrad', "5, true"),
}
_KEPT = {"last": "the last block", "first": "the first block", "none": "no block"}


def study() -> str:
    """Gaps against bf16, per seed."""
    result = load("training_study")
    return _gaps(result, "last block in bf16")


def policy_study() -> str:
    """The same of a policy that was found, and of the last block in bf16."""
    result = load("policy_study")
    return _gaps(result, f"{result['cost']:.0%} of the multiply-adds in bf16, but for nvfp4")


def saved_study() -> str:
    """The same of what an MLP keeps of its hidden layer."""
    return _gaps(load("saved_study"), "no block in bf16")


def eight_bit_study() -> str:
    """The same of 8 bits by rows."""
    return _gaps(load("eight_bit_study"), "no block in bf16")


def optimizer_study() -> str:
    """Gaps of optimizer states in 8 bits against those in float32, and whether they are within the bound."""
    return _gaps_of_states(load("optimizer_study"))


def optimizer_study_demo() -> str:
    """The same of a larger model."""
    return _gaps_of_states(load("optimizer_study_demo"))


def optimizer_study_small() -> str:
    """The same of the largest model, with few bytes per step."""
    return _gaps_of_states(load("optimizer_study_small"))


def _gaps_of_states(result: dict) -> str:
    steps = f"{result['summary'][0]['steps']} steps"
    rows = [("optimizer", "b2", "recipe", "states", "loss gap", "by seed", "validation gap", "bound", "within")]
    for s in result["summary"]:
        loss, validation = s["loss_gap_percent"], s["validation_loss_gap_percent"]
        seeds = ", ".join(f"{gap:+.3f}" for gap in loss["by_seed"])
        gaps = (_with_error(loss, 3), seeds, _with_error(validation, 3), f"{s['bound_percent']:.2f} %")
        rows.append((s["optimizer"], str(s["b2"]), s["recipe"], s["run"], *gaps, "yes" if s["within"] else "**no**"))
    return f"{markdown(rows)}\n\n{_about(result, steps, 'no block in bf16')}"


def kv_formats() -> str:
    """What the formats of caches cost."""
    result = load("kv_formats")
    medians = result["medians"]
    first = next(iter(medians.values()))["k3"]
    rows = [("a cache of", "k3", "by that of FP8 per token and head", "largest difference of a log-probability")]
    for name, found in medians.items():
        rows.append((name, f"{found['k3']:.1e}", f"{found['k3'] / first:.2f}", f"{found['largest']:.2f}"))
    settings = result["settings"]
    count = settings["held_out_rows"] * (settings["context"] - 1)
    about = (
        f"Medians of {settings['seeds']} models after {settings['steps']} steps; {count:,} log-probabilities of each."
    )
    return f"{markdown(rows)}\n\n{about} {where(result)}"


def kv_speed() -> str:
    """Steps of generation by cache."""
    result = load("kv_speed")
    rows = [("tokens in the cache", "cache", "speed by that of bfloat16", "target", "ms for a token")]
    for case in result["cases"]:
        ms = f"{1e3 * case['seconds'][case['cache']]:.1f}"
        rows.append((str(case["tokens"]), f"`{case['cache']}`", f"{case['ratio']:.2f}x", f"{case['target']}x", ms))
    about = f"TinyLlama's widths, {result['layers']} layers, INT4 kernels, one sequence."
    return f"{markdown(rows)}\n\n{about} {where(result)}"


def calibration() -> str:
    """Perplexities of one model after conversions."""
    result = load("calibration")
    rows = [("format", "chosen by", "perplexity", "mean relative error of layers")]
    for row in result["rows"]:
        error = "" if row.get("layer_error") is None else f"{row['layer_error']:.4f}"
        rows.append((row["scheme"], row["way"], f"{row['perplexity']:.4f}", error))
    model, settings = result["model"], result["settings"]
    text = f"{settings['batch']} rows of {settings['context']} bytes of the pages of docs/"
    about = (
        f"A Llama-like model of bytes with {model['num_hidden_layers']} layers of width {model['hidden_size']}, "
        f"trained for {settings['steps']} steps of {text}, calibrated by {settings['calibration_rows']} rows. "
        f"The perplexity is that of {result['held_out_tokens']} bytes that were neither trained on nor calibrated by."
    )
    return f"{markdown(rows)}\n\n{about} {where(result)}"


def _gaps(result: dict, kept: str) -> str:
    """A study's gaps. `kept`: what stays in bf16."""
    rows = [("steps", "run", "loss gap, mean", "by seed", "validation gap, mean", "by seed")]
    for s in result["summary"]:
        cells = []
        for key in ("loss_gap_percent", "validation_loss_gap_percent"):
            cells += [f"{s[key]['mean']:+.2f} %", ", ".join(f"{g:+.2f}" for g in s[key]["by_seed"])]
        rows.append((str(s["steps"]), s["run"], *cells))
    return f"{markdown(rows)}\n\n{_about(result, kept)}"


def _about(result: dict, *kept: str) -> str:
    """What a study was made with. `kept`: what stays in bf16."""
    settings = result["settings"]
    counts = sorted({len(s["loss_gap_percent"]["by_seed"]) for s in result["summary"]})
    seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' * (counts[0] > 1)}"
    step_bytes = settings["batch"] * settings["config"]["context"]
    about = (
        f"{settings['parameters']:,} parameters, {step_bytes} bytes per step, peak learning rate "
        f"{settings['learning_rate']}, {seeds}"
    )
    commits = [settings["commit"]] if "commit" in settings else dict.fromkeys(s["commit"] for s in result["summary"])
    made = f"jax {settings['jax']} on {settings['platform']}, commit {' and '.join(commits)}"
    return f"{', '.join([about, *kept])}; {made}."


def frontier_study() -> str:
    """The recipes beyond the default NVFP4 recipe, by the block that stays in bf16."""
    return _frontier(load("frontier_study"))


def frontier_small() -> str:
    """The same of a larger model."""
    return _frontier(load("frontier_small"))


def _frontier(result: dict) -> str:
    less = "less than `nvfp4`"
    rows = [("in bf16", "steps", "run", "loss gap", "by seed", less, "validation gap", less)]
    for s in result["summary"]:
        rows.append((_KEPT[s["kept"]], f"{s['steps']:,}", s["run"], *_paired(s)))
    return f"{markdown(rows)}\n\n{_about(result)}"


def sums_study() -> str:
    """The default recipe by how sums over devices travel."""
    result = load("sums_study")
    less = "less than `nvfp4`"
    rows = [("mesh", "run", "loss gap", "by seed", less, "validation gap", less)]
    for s in result["summary"]:
        rows.append((s["mesh"], s["run"], *_paired(s)))
    return f"{markdown(rows)}\n\n{_about(result, 'last block in bf16')}"


_COUNTED = (  # what is said of a kernel, the kernel to nearest, and the one that rounds stochastically
    ("amax", "amax_plain<BF16>", None),
    ("amax of the rotated columns, and of the elements", "amax_rotated<BF16>", None),
    ("NVFP4, rowwise", "quantize_rows<BF16, E2M1, 1, false>", "quantize_rows<BF16, E2M1, 1, true>"),
    ("NVFP4, both ways", "quantize_nvfp4_tiles<false, false>", "quantize_nvfp4_tiles<true, false>"),
    (
        "NVFP4, both ways, columns rotated",
        "quantize_nvfp4_tiles<false, true>",
        "quantize_nvfp4_tiles<true, true>",
    ),
    ("MXFP4, rowwise", "quantize_pow2_rows<E2M1, 32>", "quantize_rows<BF16, E2M1, 0, true>"),
    ("MXFP4, both ways", "quantize_pow2_tiles<E2M1, 32>", "quantize_tiles<BF16, E2M1, 0, true, false>"),
    ("MXFP8, rowwise", "quantize_pow2_rows<E4M3, 32>", "quantize_rows<BF16, E4M3, 0, true>"),
    ("MXFP8, both ways", "quantize_pow2_tiles<E4M3, 32>", "quantize_tiles<BF16, E4M3, 0, true, false>"),
    ("`Float8Block`, rowwise", "quantize_pow2_rows<E4M3, 128>", None),
    ("`Float8Block`, both ways", "quantize_pow2_tiles<E4M3, 128>", None),
    ("`Float8Tensor`, rowwise", "quantize_rows<BF16, E4M3, 0, false>", None),
    ("`Float8Tensor`, both ways", "quantize_tiles<BF16, E4M3, 0, false, false>", None),
    ("Int4, rowwise", "int4_symmetric_rows<0, 0, 8, true>", None),
    ("Int4, `fake_quantize`", "int4_symmetric_rows<0, 0, 8, false>", None),
    ("NVFP4 decoded to bfloat16 before a GEMM", "decode_sixteens<E2M1>", None),
    ("MXFP8 decoded to bfloat16 before a GEMM", "decode_sixteens<E4M3>", None),
    ("product of at most 8 rows by Int4, a weight of a lane", "weight_stream_kernel<1, false, 1, 4, 12>", None),
    ("product of at most 8 rows by NVFP4, a weight of a lane", "weight_stream_kernel<0, false, 1, 4, 12>", None),
    ("the same, of rows in NVFP4 codes", "weight_stream_kernel<0, true, 1, 4, 12>", None),
    ("MXFP4 re-based to FP8 before a GEMM", "rebase_kernel", None),
    ("AdamW, moments in 8 bits, weights of 32", None, "optimizer_update<AdamW, 4, 0, true>"),
    ("Lion, a moment in 8 bits, weights of 32", None, "optimizer_update<Lion, 4, 0, true>"),
)


def instructions() -> str:
    """What the GPU kernels issue for an element, in the machine code for two architectures."""
    counted = load("instructions")
    rows = [("kernel", "sm_90a", "sm_100f", "stochastic rounding, sm_90a", "sm_100f")]
    for name, nearest, stochastic in _COUNTED:
        counts = [counted["kernels"][kernel] if kernel else {} for kernel in (nearest, stochastic)]
        rows.append((name, *(f"{of[a]:.1f}" if of else "" for of in counts for a in ("sm_90a", "sm_100"))))
    return f"{markdown(rows)}\n\nCounted in machine code, commit {counted['environment']['commit']}."


def frontier_cost() -> str:
    """What the ways of quantising take on GPUs, in instructions."""
    counted = load("instructions")
    architectures = ("sm_90a", "sm_100")
    rows = [("rows to NVFP4", "in", "instructions per element, sm_90a", "instructions per element, sm_100f")]
    for name, (where_used, variant) in _WAYS.items():
        counts = counted["kernels"][f"quantize_rows<BF16, E2M1, {variant}>"]
        rows.append(
            (
                f"`{name}`" if "=" in name and "," not in name else name,
                where_used,
                *(f"{counts[a]:.0f}" for a in architectures),
            )
        )
    commit = counted["environment"]["commit"]
    return f"{markdown(rows)}\n\nCounted in machine code, commit {commit}; no GPU has run it."


def _paired(entry: dict) -> tuple[str, ...]:
    """The gaps of a run, of the training and of the validation loss, and how far they are from the default recipe's."""
    loss, validation = entry["loss_gap_percent"], entry["validation_loss_gap_percent"]
    seeds = ", ".join(f"{g:+.2f}" for g in loss["by_seed"])
    return _with_error(loss), seeds, *_less(entry, loss), _with_error(validation), *_less(entry, validation)


def _with_error(values: dict, digits: int = 2) -> str:
    """A mean of the seeds and its standard error."""
    error = values["standard_error"]
    return f"{values['mean']:+.{digits}f}{'' if error is None else f' ± {error:.{digits}f}'} %"


def _less(entry: dict, gap: dict) -> list[str]:
    """The paired difference from the default recipe."""
    return [""] if entry["run"] in ("nvfp4", "bf16 perturbed") else [_with_error(gap["less_than_default"])]
