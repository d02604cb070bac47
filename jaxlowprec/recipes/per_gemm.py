"""Mixed precision inside a linear: each of its three GEMMs follows a recipe of its own."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxlowprec.arguments import shown
from jaxlowprec.recipes.per_layer import PerLayer
from jaxlowprec.recipes.qat import QAT
from jaxlowprec.recipes.roles import GEMMS, Recipe, Roles
from jaxlowprec.recipes.sums import Sums


@dataclasses.dataclass(frozen=True)
class PerGemm(Recipe):
    """A recipe for each of a linear's three GEMMs: the forward pass, the input's gradient, the weight's gradient.

    Each GEMM is computed as the recipe given for it computes it, with both of its operands quantised by that recipe,
    stochastic rounding and rotation included. A tensor that two GEMMs read in different formats is quantised to each
    from the original, in one pass if only the rotation differs. Only what its own GEMM reads is kept for the backward
    pass: the input for `wgrad`, the weight for `dgrad`.

    Arguments:
        fprop: the recipe of the forward GEMM; None: high precision.
        dgrad, wgrad: the recipes of the GEMMs that give the gradients of the input and of the weight. None: high
            precision, from the original operands. "dequantized": high precision, from the weight or the input that
            fprop has read, decoded. A recipe's `backward_override` holds for the GEMM that the recipe is given for.

    For different recipes in different layers, put `PerGemm` into the rules of `PerLayer`.

    Raises:
        TypeError: an argument is not a recipe.
        ValueError: no GEMM has a recipe; or a recipe that has no GEMM of its own: quantisation-aware training,
            `DelayedScaling`, `PerLayer`; or the `backward_override` of fprop's recipe, where dgrad or wgrad is
            quantised.

    >>> import jaxlowprec as jlp
    >>> recipe = jlp.PerGemm(fprop=jlp.NVFP4BlockScaling(), dgrad=jlp.MXFP8BlockScaling(), wgrad=None)
    >>> [str(role.format) for role in recipe.roles().dgrad], recipe.roles().wgrad
    (['MXFP8 E4M3 1x32', 'MXFP8 E4M3 1x32'], 'high_precision')
    """

    fprop: Recipe | None = None
    dgrad: Recipe | Literal["dequantized"] | None = None
    wgrad: Recipe | Literal["dequantized"] | None = None
    backward_override = None  # that of each GEMM's own recipe holds

    def __post_init__(self):
        for gemm in GEMMS:
            _check_recipe(gemm, getattr(self, gemm))
        if not self._recipes():
            raise ValueError(
                "PerGemm: no GEMM has a recipe, so nothing would be quantised; needs one for fprop, dgrad or wgrad"
            )
        contradicted = [gemm for gemm, recipe in self._recipes().items() if recipe.backward_override is None]
        override = None if self.fprop is None else self.fprop.backward_override
        if override is not None and contradicted:
            raise ValueError(
                f"PerGemm: the recipe of fprop has backward_override={override!r}, but {' and '.join(contradicted)} "
                "would be quantised; set backward_override in the recipes of dgrad and wgrad, or give them none"
            )

    def _recipes(self) -> dict[str, Recipe]:
        given = {gemm: getattr(self, gemm) for gemm in GEMMS}
        return {gemm: recipe for gemm, recipe in given.items() if isinstance(recipe, Recipe)}

    @property
    def sums(self) -> Sums:
        """Those of each GEMM's own recipe."""
        return Sums(**{gemm: getattr(recipe.sums, gemm) for gemm, recipe in self._recipes().items()})

    def applies_to(self, name: str) -> bool:
        """Whether the recipe of any GEMM applies to a layer of this name."""
        return any(recipe.applies_to(name) for recipe in self._recipes().values())

    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """For each GEMM, what the roles of its own recipe say."""

        def operands(gemm: str) -> Any:
            recipe = getattr(self, gemm)
            if not isinstance(recipe, Recipe):
                return recipe or "high_precision"
            if not recipe.applies_to(name):
                return "high_precision"
            return recipe.roles(module_type, name).operands(gemm, recipe.backward_override)

        of_tensors: Any = {"input": self.wgrad, "weight": self.dgrad}  # their forms for the backward pass
        requantized: Any = tuple(
            tensor
            for tensor, recipe in of_tensors.items()
            if isinstance(recipe, Recipe) and tensor in recipe.roles(module_type, name).requantized
        )
        return Roles(None, None, None, **{gemm: operands(gemm) for gemm in GEMMS}, requantized=requantized)


def _check_recipe(gemm: str, recipe: Any) -> None:
    if recipe is None or (gemm != "fprop" and isinstance(recipe, str) and recipe == "dequantized"):
        return
    where = f"PerGemm: {gemm}={shown(recipe)}"
    if not isinstance(recipe, Recipe):
        words = "None for high precision" if gemm == "fprop" else 'None for high precision, or "dequantized"'
        raise TypeError(f"{where}; needs a recipe such as NVFP4BlockScaling(), {words}")
    if isinstance(recipe, PerLayer):
        raise ValueError(f"{where}; needs a recipe for all layers: put PerGemm into the rules of PerLayer")
    if isinstance(recipe, QAT):
        raise ValueError(
            f"{where}; quantisation-aware training is a recipe for all three GEMMs: use it alone, or PerGemm with a "
            "Custom recipe whose function returns formats of weights and inputs"
        )
    if recipe.delayed is not None:
        raise ValueError(
            f"{where}; the amax histories of delayed scaling are those of a layer with one format per tensor: use "
            "Float8CurrentScaling, which has the same formats"
        )
