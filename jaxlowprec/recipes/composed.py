"""Recipes of recipes: rules by the layer's name, and a recipe for each of a linear's three GEMMs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Literal

from jaxlowprec.arguments import a_text, shown
from jaxlowprec.recipes.fields import Sums, Use, check_pattern, check_patterns, is_chosen
from jaxlowprec.recipes.qat import DEFAULT_EXCLUDE, QAT
from jaxlowprec.recipes.roles import GEMMS, Recipe, Roles
from jaxlowprec.recipes.transformer_engine import Calibrating, DelayedScaling


@dataclasses.dataclass(frozen=True)
class PerLayer(Recipe):
    """A recipe for each layer, chosen by the layer's name.

    The first rule whose regular expression matches the whole name decides. A Linen layer's name is its path in the
    model ("block_0/mlp/up"); NNX layers get such names from `jaxlowprec.nnx.name_layers`; functions such as `linear`
    take `name=`. A layer without a name has the name "".

    Arguments:
        rules: pairs of a regular expression and the recipe of the layers that it matches; None: high precision.
        default: the recipe of all other layers; None: high precision.
        exclude: regular expressions, searched for in a layer's name: these layers stay in high precision, whatever the
            rules say; for embeddings, norms, routers and heads `DEFAULT_EXCLUDE`.
        stacks: of layers whose kernels are stacked along a first axis and run by `lax.scan` (`nn.scan`, `nnx.scan`):
            triples of a regular expression on their names and how many of the first and of the last ones stay in high
            precision. Only `quantize_matmuls` knows a layer's place in its stack; it runs the stack in pieces.

    Raises:
        TypeError: a rule is not a pair of a text and a recipe or None, or a stack not a triple.
        ValueError: a regular expression is not valid, no layer could have a recipe, or two rules have different
            `DelayedScaling`, whose states could not be told apart.

    >>> import jaxlowprec as jlp
    >>> nvfp4, mxfp8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()
    >>> recipe = jlp.PerLayer(((r"block_[01]/.*|.*head", None), (r".*/out", mxfp8)), default=nvfp4)
    >>> [type(recipe.at(name)).__name__ for name in ("block_0/mlp/up", "block_5/attention/out", "block_5/mlp/up")]
    ['NoneType', 'MXFP8BlockScaling', 'NVFP4BlockScaling']
    >>> print(recipe)
    rule                   recipe
    block_[01]/.*|.*head   high precision
    .*/out                 MXFP8BlockScaling
    all others             NVFP4BlockScaling
    """

    rules: tuple[tuple[str, Recipe | None], ...]
    default: Recipe | None = None
    exclude: tuple[str, ...] = ()
    stacks: tuple[tuple[str, int, int], ...] = ()
    backward_override = None  # each layer's own recipe has it

    def __post_init__(self) -> None:
        given = self.rules
        if not isinstance(given, list | tuple) or not all(isinstance(r, list | tuple) and len(r) == 2 for r in given):
            raise TypeError(
                f'PerLayer: rules={shown(given)}; needs pairs such as ((".*head", None), (".*", NVFP4BlockScaling()))'
            )
        for pattern, recipe in given:
            if not isinstance(pattern, str):
                raise TypeError(f"PerLayer: a rule begins with {shown(pattern)}; needs a regular expression as a text")
            check_rule("PerLayer", f"rule {pattern!r}", recipe)
            check_pattern("PerLayer: a rule", pattern)
        check_rule("PerLayer", "default", self.default)
        object.__setattr__(self, "rules", tuple((pattern, recipe) for pattern, recipe in given))
        object.__setattr__(self, "exclude", check_patterns("PerLayer", "exclude", self.exclude))
        object.__setattr__(self, "stacks", _checked_stacks(self.stacks))
        if not self._recipes():
            raise ValueError("PerLayer: no rule and no default has a recipe, so nothing would be quantised; needs one")
        delayed = {recipe.delayed for recipe in self._recipes() if recipe.delayed is not None}
        if len(delayed) > 1:
            raise ValueError(
                f"PerLayer: {len(delayed)} rules have different DelayedScaling; layers keep one kind of state: give "
                "all of them the same one"
            )

    @classmethod
    def keep_ends(
        cls,
        recipe: Recipe,
        blocks: int | None = None,
        first: int = 2,
        last: int = 8,
        *,
        block: str = "block_{}",
        exclude: tuple[str, ...] = DEFAULT_EXCLUDE,
    ) -> PerLayer:
        """Rules that keep the first and last blocks of a model in high precision, as published NVFP4 runs do.

        Arguments:
            recipe: of the layers between.
            blocks: how many blocks the model has; None for a stack, which knows it.
            first, last: how many of the first and of the last blocks stay in high precision.
            block: what a block is called in its layers' names, with {} for its number, counted from 0. Without {} it is
                a stack of blocks run by a scan, see `stacks`.
            exclude: regular expressions, searched for in a layer's name: these layers stay in high precision, too;
                by default embeddings, norms, routers and heads (`DEFAULT_EXCLUDE`).

        Raises:
            TypeError, ValueError: an argument is invalid, or no block is left.

        >>> import jaxlowprec as jlp
        >>> print(jlp.PerLayer.keep_ends(jlp.NVFP4BlockScaling(), 24, 1, 2, exclude=("head",)))
        rule                          recipe
        names with head               high precision
        (.*/)?block_(0|22|23)(/.*)?   high precision
        all others                    NVFP4BlockScaling
        """
        who = "PerLayer.keep_ends"
        for name, count in (("first", first), ("last", last), *([] if blocks is None else [("blocks", blocks)])):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"{who}: {name}={shown(count)}; needs a whole number, 0 or more")
        a_text(who, block=block)
        before, number, after = block.partition("{}")
        if not number:
            if blocks is not None:
                raise ValueError(f'{who}: blocks={blocks} with block={block!r}, a stack; needs "{{}}" for the number')
            return cls((), recipe, exclude, ((rf"(.*/)?{re.escape(block)}(/.*)?", first, last),))
        if blocks is None or first + last >= blocks:
            raise ValueError(
                f"{who}: blocks={blocks}, of which the first {first} and the last {last} stay in high precision; needs "
                "more blocks than that"
            )
        numbers = "|".join(map(str, (*range(first), *range(blocks - last, blocks))))
        ends = rf"(.*/)?{re.escape(before)}({numbers}){re.escape(after)}(/.*)?"
        return cls(((ends, None),) if numbers else (), recipe, exclude)

    def _recipes(self) -> list[Recipe]:
        return [recipe for recipe in (*(recipe for _, recipe in self.rules), self.default) if recipe is not None]

    def at(self, name: str) -> Recipe | None:
        """The recipe of the layer of this name: that of the first rule that matches, else the default.

        Raises:
            ValueError: the layer is in one of `stacks`, so its place would have to be known.
        """
        found = self.within(name)
        if found is not None and self.ends(name):
            raise ValueError(
                f"PerLayer: layer {name!r} is in a stack whose first and last layers stay in high precision; only "
                "quantize_matmuls knows a layer's place in its stack: transform the model's function"
            )
        return found

    def ends(self, name: str) -> tuple[int, int] | None:
        """How many of the first and of the last layers of the stack of this name stay in high precision, or None."""
        return next(((first, last) for pattern, first, last in self.stacks if re.fullmatch(pattern, name)), None)

    def within(self, name: str, use: Use = Use.UNKNOWN) -> Recipe | None:
        """The recipe of a layer that is not among the ends of its stack, and of this use."""
        if not is_chosen(name, (".*",), self.exclude, use):
            return None
        found = next((recipe for pattern, recipe in self.rules if re.fullmatch(pattern, name)), self.default)
        return None if found is None else found.within(name, use)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The regular expressions of rules and stacks that match none of these names."""
        names = list(names)
        patterns = [*(rule[0] for rule in self.rules), *(stack[0] for stack in self.stacks)]
        return [pattern for pattern in patterns if not any(re.fullmatch(pattern, name) for name in names)]

    def applies_to(self, name: str) -> bool:
        """Whether the layer of this name has a recipe."""
        return self.at(name) is not None

    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The roles of the layer's own recipe; all None if it has none."""
        found = self.at(name)
        return Roles(None, None, None) if found is None else found.roles(module_type, name)

    def quantises(self, pattern: str) -> bool:
        """Whether the rule of this regular expression has a recipe."""
        return any(rule == pattern and recipe is not None for rule, recipe in self.rules)

    @property
    def delayed(self) -> DelayedScaling | None:
        """The `DelayedScaling` of the rules that have one: layers that are made without a name get its state."""
        return next((r.delayed for r in self._recipes() if r.delayed is not None), None)

    def __str__(self) -> str:
        rows = [("rule", "recipe")]
        rows += [(f"names with {pattern}", named(None)) for pattern in self.exclude]
        rows += [(pattern, named(recipe)) for pattern, recipe in self.rules]
        for pattern, first, last in self.stacks:
            rows.append((pattern, f"high precision in the first {first} and last {last} of the stack"))
        rows.append(("all others", named(self.default)))
        width = max(len(pattern) for pattern, _ in rows)
        return "\n".join(f"{pattern:{width}}   {recipe}" for pattern, recipe in rows)


def named(recipe: Recipe | None) -> str:
    """A recipe as its class and the fields that differ from their defaults."""
    if recipe is None:
        return "high precision"
    if isinstance(recipe, PerLayer):
        return "PerLayer"
    name, fields = type(recipe).__name__, []
    own: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(recipe) if dataclasses.is_dataclass(recipe) else ()
    for field in own:
        default: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if (value := getattr(recipe, field.name)) != default:
            fields.append(f"{field.name}={named(value) if isinstance(value, Recipe) else shown(value)}")
    return f"{name}({', '.join(fields)})" if fields else name


def _checked_stacks(given: Any) -> tuple[tuple[str, int, int], ...]:
    stacks: Any = given if isinstance(given, list | tuple) else [None]
    for stack in stacks:
        pattern, *ends = stack if isinstance(stack, list | tuple) else [None]
        counts = [n for n in ends if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
        if not isinstance(pattern, str) or len(ends) != 2 or counts != ends:
            raise TypeError(f'PerLayer: stacks={shown(given)}; needs triples such as (("layers/.*", 2, 8),)')
        check_pattern("PerLayer: a stack", pattern)
    return tuple((pattern, first, last) for pattern, first, last in stacks)


def check_rule(who: str, where: str, recipe: object) -> None:
    """Raises TypeError unless this is a recipe, or None."""
    if isinstance(recipe, Calibrating) or (recipe is not None and not isinstance(recipe, Recipe)):
        raise TypeError(
            f"{who}: {where} has {shown(recipe)}; needs a recipe such as NVFP4BlockScaling(), or None for high "
            "precision"
        )


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

    def __post_init__(self) -> None:
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
        """The sums over devices of each GEMM's own recipe."""
        return Sums(**{gemm: getattr(recipe.sums, gemm) for gemm, recipe in self._recipes().items()})

    def applies_to(self, name: str) -> bool:
        """Whether the recipe of any GEMM applies to a layer of this name."""
        return any(recipe.applies_to(name) for recipe in self._recipes().values())

    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The `Roles` value of each GEMM's own recipe."""

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
