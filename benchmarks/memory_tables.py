"""The tables of what `jax.checkpoint` keeps and computes again, and of what fine-tuning keeps."""

from __future__ import annotations

from cells import markdown
from recorded import load


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


def lora_memory() -> str:
    """By what is trained: GiB of parameters, gradients and optimizer state."""
    found = load("lora_memory")
    parts = ("frozen", "trained", "gradients", "optimizer")
    rows = [("trained", "frozen parameters", "trained parameters", "gradients", "Adam", "all, GiB")]
    for name, kept in found["results"].items():
        gib = [kept[part] / 2**30 for part in parts]
        rows.append((name, *(f"{one:.2f}" for one in gib), f"{sum(gib):.1f}"))
    return f"{markdown(rows)}\n\nCounted by `benchmarks/lora_memory.py`, commit {found['environment']['commit']}."
