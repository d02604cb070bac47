"""The tables of what a block keeps, what `jax.checkpoint` keeps and computes again, and what training and fine-tuning
keep between steps."""

from __future__ import annotations

from cells import markdown, milliseconds
from recorded import load, recorded_on, where


def checkpoint_policies() -> str:
    """By policy: what runs again, and what is kept under each recipe."""
    found = load("checkpoint_policies")
    results, recipes = found["results"], list(found["results"][0]["kept"])
    rows = [("policy", "again: quantisations", "GEMMs", *(f"kept per token, {r}" for r in recipes))]
    rows[0] += (f"kept of the weights, {recipes[0]}",)
    for result in results:
        name, kept = result["policy"], result["kept"]
        again = (str(result["again"][what]) for what in ("quantizations", "gemms"))
        tokens = (f"{kept[recipe]['tokens']:.1f}" for recipe in recipes)
        shown = name if " " in name else f"`{name}`"
        rows.append((shown, *again, *tokens, f"{kept[recipes[0]]['weights']:.2f}"))
    e = found["environment"]
    versions = f"programs of jax {e['versions']['jax']}, commit {e['commit']}"
    return f"{markdown(rows)}\n\nCounted by `benchmarks/checkpoint_policies.py` in {versions}."


def block() -> str:
    """By side: units kept, memory of a step, and its time."""
    parts = []
    for name in recorded_on("block"):
        found = load(name)
        rows = [("recipe and layers", "units kept", "per block, MiB", "each further block", "ms", "speed")]
        for case in found["cases"]:
            limit = "" if case["target"] is None else f" (at most {case['target']})"
            memory = (f"{count / 2**20:.0f}" for count in case["bytes"].values())
            took, speed = milliseconds(case["seconds"]["median"]), f"{case['speed']['median']:.2f}x"
            rows.append((case["side"], f"{sum(case['kept'].values()):.1f}{limit}", *memory, took, speed))
        size = f"{found['batch']} x {found['time']} tokens, {found['width']} wide"
        parts += [markdown(rows), f"{size}. {where(found)}"]
    return "\n\n".join(parts)


def accumulation() -> str:
    """By recipe and what it is compared with: speed, and memory in trees of gradients."""
    parts = []
    for name in recorded_on("accumulation"):
        found = load(name)
        rows = [("recipe", "against", "speed", "MiB", "theirs", "gradient trees less")]
        for case in found["cases"]:
            for other, speed in case["speed"].items():
                memory = (f"{case['bytes'][side] / 2**20:.0f}" for side in ("ours", other))
                limits = case["targets"] if other == "steps" else {}
                times = f"{speed:.2f}x" + (f" (at least {limits['speed']})" if limits else "")
                less = f"{case['gradient trees less'][other]:.2f}"
                less += f" (at least {limits['gradient trees']:g})" if limits else ""
                rows.append((case["recipe"], other, times, *memory, less))
        size = f"{found['microbatches']} microbatches of {found['tokens']} tokens, a block {found['width']} wide"
        parts += [markdown(rows), f"{size}. {where(found)}"]
    return "\n\n".join(parts)


def lora_memory() -> str:
    """By what is trained: GiB of parameters, gradients and optimizer state."""
    found = load("lora_memory")
    parts = ("frozen", "trained", "gradients", "optimizer")
    rows = [("trained", "frozen parameters", "trained parameters", "gradients", "Adam", "all, GiB")]
    for name, kept in found["results"].items():
        gib = [kept[part] / 2**30 for part in parts]
        rows.append((name, *(f"{one:.2f}" for one in gib), f"{sum(gib):.1f}"))
    return f"{markdown(rows)}\n\nCounted by `benchmarks/lora_memory.py`, commit {found['environment']['commit']}."


_TOKENS = 8192  # of a step on one device
_POLICIES = ("nothing_saveable", "save_quantized_and_products")


def optimizer_bytes() -> str:
    """By choice of states: bytes per parameter; a checkpoint has all but the gradient."""
    found = load("optimizer_memory")
    rows = [("states", "parameter", "gradient", "master", "moments", "checkpoint", "all")]
    for name, kept in found["results"].items():
        each = [count / found["model"]["elements"] for count in kept.values()]
        sums = sum(each) - kept["gradients"] / found["model"]["elements"], sum(each)
        rows.append((name, *(f"{one:.2f}".removesuffix(".00") for one in each), *(f"{one:.2f}" for one in sums)))
    return f"{markdown(rows)}\n\n{_of_llama(found)}"


def optimizer_memory() -> str:
    """By choice of states: GiB between steps, and of a step under NVFP4 by what `jax.checkpoint` keeps."""
    found, policies = load("optimizer_memory"), load("checkpoint_policies")["results"]
    model = found["model"]
    units = {result["policy"]: result["kept"]["NVFP4"] for result in policies}
    step = {
        name: units[name]["weights"] * model["kernels"]
        + units[name]["tokens"] * 2 * model["width"] * model["layers"] * _TOKENS
        for name in _POLICIES
    }
    rows = [("states", "parameters", "gradients", "masters and moments", "all, GiB")]
    rows[0] += tuple(f"and a step, `{name}`" for name in _POLICIES)
    for name, kept in found["results"].items():
        parts = kept["parameters"], kept["gradients"], kept["masters"] + kept["states"]
        sums = [sum(parts), *(sum(parts) + more for more in step.values())]
        rows.append((name, *(f"{count / 2**30:.1f}" for count in (*parts, *sums))))
    about = (
        f"A step has {_TOKENS:,} tokens under NVFP4 and keeps what the table of policies says of each, without logits."
    )
    return f"{markdown(rows)}\n\n{about} {_of_llama(found)}"


def _of_llama(found: dict) -> str:
    count, commit = found["model"]["elements"], found["environment"]["commit"]
    return f"Llama 3 8B, {count:,} parameters; counted by `benchmarks/optimizer_memory.py`, commit {commit}."
