"""The recipes of the examples by name, and runs that change their recipe on the way."""

from __future__ import annotations

from collections.abc import Callable

import jaxlowprec as jlp
from lm.training import Run

RECIPES: dict[str, Callable[[], jlp.Recipe | None]] = {
    "bf16": lambda: None,
    "nvfp4": jlp.NVFP4BlockScaling,
    "nvfp4-no-rht": lambda: jlp.NVFP4BlockScaling(disable_rht=True),
    "nvfp4-no-sr": lambda: jlp.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4-no-2d": lambda: jlp.NVFP4BlockScaling(disable_2d_quantization=True),
    "nvfp4-bf16-forward": lambda: jlp.NVFP4BlockScaling(forward_override="high_precision"),
    "nvfp4-row-scaled": lambda: jlp.NVFP4BlockScaling(row_scaled_activation=True),
    "nvfp4-4over6": lambda: jlp.NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True),
    "nvfp4-v2": lambda: jlp.NVFP4Eden(scale_rule="six", eden="gradient"),
    "nvfp4-quartet2": lambda: jlp.NVFP4Eden(scale_rule="four_over_six", requantize_input=True),
    "nvfp4-eden": jlp.NVFP4Eden,
    "nvfp4-eden-16x16": lambda: jlp.NVFP4Eden("16x16"),
    "nvfp4-eden-search": lambda: jlp.NVFP4Eden(scale_rule="search"),
    "nvfp4-eden-bf16-forward": lambda: jlp.NVFP4Eden(forward_override="high_precision"),
    "mxfp8": jlp.MXFP8BlockScaling,
    "fp8_block": jlp.Float8BlockScaling,
    "fp8_current": jlp.Float8CurrentScaling,
    "fp8_delayed": jlp.DelayedScaling,
    "fp8_rows": jlp.Float8RowScaling,
    "fp8_rows-bf16-wgrad": lambda: jlp.Float8RowScaling(high_precision_wgrad=True),
    "int8_rows": jlp.Int8RowScaling,
    "int8_rows-no-sr": lambda: jlp.Int8RowScaling(disable_stochastic_rounding=True),
    "int4_qat": jlp.Int4QAT,
    "nvfp4_qat": lambda: jlp.WeightQAT(jlp.NVFP4()),
}
TAIL, EDEN_TAIL = (f"{name}:0.8:{name}-bf16-forward" for name in ("nvfp4", "nvfp4-eden"))
"""NVFP4 whose forward pass is in bf16 for the last fifth of the steps."""
FRONTIER = (
    *(
        "nvfp4",
        "nvfp4-row-scaled",
        "nvfp4-4over6",
        "nvfp4-v2",
        "nvfp4-quartet2",
        "nvfp4-eden",
        "nvfp4-eden-16x16",
        "nvfp4-eden-search",
    ),
    *(TAIL, EDEN_TAIL),
)
"""The default NVFP4 recipe and those beyond it."""
NEEDS = f"one of {', '.join(RECIPES)}; or several with the steps, or shares of all steps, at which they change: {TAIL}"


def run_named(name: str, steps: int) -> Run:
    """The run of a recipe, or of recipes that follow each other, of so many steps.

    Raises:
        ValueError: the name has an unknown recipe, or does not say when they change.
    """
    first, *changes = name.split(":")
    if len(changes) % 2 or not {first, *changes[1::2]} <= set(RECIPES):
        raise ValueError(f"{name}: needs {NEEDS}")
    if not changes:
        return Run(name, RECIPES[name]())
    phases = {0: RECIPES[first]()}
    for at, recipe in zip(changes[::2], changes[1::2], strict=True):
        try:
            phases[int(at) if at.isdecimal() else float(at)] = RECIPES[recipe]()
        except ValueError:
            raise ValueError(f"{name}: {at} is neither a step nor a share of all steps; needs {NEEDS}") from None
    return Run(name, jlp.recipe_schedule(phases, total_steps=steps))
