"""The tables of what training loses under each recipe."""

from __future__ import annotations

from cells import markdown
from recorded import load

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
    step_bytes = settings["batch"] * settings["config"]["context"]
    about = (
        f"{settings['parameters']:,} parameters, {step_bytes} bytes per step, peak learning rate "
        f"{settings['learning_rate']}, {settings['seeds']} seeds"
    )
    return f"{', '.join([about, *kept])}; jax {settings['jax']} on {settings['platform']}, commit {settings['commit']}."


def frontier_study() -> str:
    """The recipes beyond the default NVFP4 recipe, by the block that stays in bf16."""
    result = load("frontier_study")
    rows = [("in bf16", "run", "loss gap", "by seed", "less than `nvfp4`", "validation gap", "less than `nvfp4`")]
    for s in result["summary"]:
        loss, validation = s["loss_gap_percent"], s["validation_loss_gap_percent"]
        seeds = ", ".join(f"{g:+.2f}" for g in loss["by_seed"])
        gaps = _with_error(loss), seeds, *_less(s, loss), _with_error(validation), *_less(s, validation)
        rows.append((_KEPT[s["kept"]], s["run"], *gaps))
    (steps,) = {s["steps"] for s in result["summary"]}
    return f"{markdown(rows)}\n\n{steps} steps; {_about(result)}"


def _with_error(values: dict) -> str:
    """A mean of the seeds and its standard error."""
    return f"{values['mean']:+.2f} ± {values['standard_error']:.2f} %"


def _less(entry: dict, gap: dict) -> list[str]:
    """The paired difference from the default recipe."""
    return [""] if entry["run"] in ("nvfp4", "bf16 perturbed") else [_with_error(gap["less_than_default"])]
