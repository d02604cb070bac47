"""find_policy: which layers, and which of their GEMMs, to keep in high precision, by measurement."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import one_of, shown
from jaxlowprec.models.policy_costs import Costs
from jaxlowprec.models.policy_log import Log
from jaxlowprec.models.quantize_matmuls import TracedFunction, quantize_matmuls
from jaxlowprec.recipes.autocast import autocast
from jaxlowprec.recipes.composed import PerGemm, PerLayer
from jaxlowprec.recipes.roles import GEMMS, Recipe
from jaxlowprec.telemetry.scopes import Choices, entered

_WHO = "find_policy"
WHOLE = "all"
"""A layer's three GEMMs together."""


@dataclasses.dataclass(frozen=True)
class Effect:
    """The effect of quantising on a step: means over batches and keys, and their standard errors.

    Attributes:
        loss: the loss minus that in high precision, relative to it.
        cosine: of the gradient with that in high precision.
        error: squared norm of the gradient's error over that of the gradient in high precision. Errors of different
            layers are nearly independent, so these add up.
        loss_se, cosine_se, error_se: the standard errors.
    """

    loss: float
    cosine: float
    error: float
    loss_se: float
    cosine_se: float
    error_se: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """One row of the table: a GEMM of a layer alone under a candidate, all else in high precision.

    Attributes:
        layer: its name.
        gemm: "fprop", "dgrad", "wgrad", or "all" of them.
        candidate: the label of its recipe.
        effect: what it does.
        cost: of this recipe there, as a share of what it costs to keep everything in high precision.
        high_precision_cost: of high precision there.
        policy: what the found rules do there: a candidate's label, or "high precision".
    """

    layer: str
    gemm: str
    candidate: str
    effect: Effect
    cost: float
    high_precision_cost: float
    policy: str


@dataclasses.dataclass(frozen=True)
class Policy:
    """Rules that `find_policy` found within the budget, with the measurements behind them.

    Attributes:
        recipe: the rules, for `autocast`, `quantize_matmuls` and `convert`.
        cost: what they cost, as a share of what it costs to keep everything in high precision.
        table: what was measured, the most harmful first.
        quantized: the effect of the first candidate everywhere.
        found: the effect of the rules.
    """

    recipe: PerLayer
    cost: float
    table: tuple[Measured, ...]
    quantized: Effect
    found: Effect

    def __str__(self) -> str:
        """The table, and the effects of the rules and of the first candidate everywhere."""
        rows = [("layer", "gemm", "recipe", "loss", "cosine", "gradient error", "cost", "in high precision", "policy")]
        for m in self.table:
            costs = f"{m.cost:.1%}", f"{m.high_precision_cost:.1%}"
            rows.append((m.layer, m.gemm, m.candidate, *_words(m.effect), *costs, m.policy))
        rows.append(("everything", "", "first candidate", *_words(self.quantized), "0.0%", "100.0%", ""))
        rows.append(("everything", "", "found rules", *_words(self.found), f"{self.cost:.1%}", "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def _words(effect: Effect) -> tuple[str, str, str]:
    return (
        f"{effect.loss:+.1e} ± {effect.loss_se:.0e}",
        f"{effect.cosine:.5f} ± {effect.cosine_se:.0e}",
        f"{effect.error:.1e} ± {effect.error_se:.0e}",
    )


def find_policy(
    loss_fn: Callable[..., jax.Array],
    params: Any,
    batches: Sequence[Any],
    candidates: Recipe | Mapping[str, Recipe],
    *,
    budget: float,
    cost: Literal["flops", "bytes"] = "flops",
    by: Literal["gemm", "layer"] | None = None,
    repeats: int = 2,
    key: jax.Array | None = None,
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Policy:
    """Measures what quantising each layer does to the loss and the gradient, and keeps the worst in high precision.

    Every layer that follows a recipe is quantised alone, all else in high precision, for each batch and key; then
    those are kept in high precision, or under a better candidate, that spare the most of the gradient's error for
    their cost, until the budget is used up. All of it is one compiled program. Deterministic, given a key.

    Arguments:
        loss_fn: loss_fn(params, batch), the loss in high precision if no recipe is in force: a scalar. Its layers are
            those of this library, with names; of a function without any, its matrix products by parameters are taken
            (`quantize_matmuls`). Layers with a recipe of their own stay as they are. The experts of a layer are one.
        params: a tree of arrays, by which it is differentiated.
        batches: of training data, each of the same shapes. Four batches and two repeats tell layers well apart.
        candidates: a recipe, or recipes by label, the cheapest first. Everything follows the first one, but for what
            the policy puts under another one or keeps in high precision. They differ in nothing but their numbers: no
            `PerLayer`, no state of delayed scaling.
        budget: the share of the cost of keeping everything in high precision that the policy may cost, 0 to 1.
        cost: "flops": multiply-adds of the GEMMs that do not follow the first candidate; for one of b bits per
            element in place of the first one's a, (b - a) / (16 - a) of them. "bytes": those that the weights take
            more than under the first candidate.
        by: "gemm": fprop, dgrad and wgrad of a layer are measured and chosen one by one (`PerGemm`). "layer":
            together. Default: by GEMM for flops, by layer for bytes. Measures a third as much by layer.
        repeats: keys of stochastic rounding for each batch.
        key: a key that these are derived from; default `jax.random.key(0)`.
        path: a file that measurements are appended to. If it has some of the same search, they are not made again.
        progress: shows a bar in a terminal, if tqdm is installed.

    Returns:
        The rules, and the measured table: `print` it.

    Raises:
        TypeError, ValueError: an argument is invalid, no layer follows the recipe, layers have no names, or the file
            at `path` is of another search.
        FloatingPointError: the loss or the gradient is not finite in high precision.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> def loss(params, x):
    ...     return jnp.square(jnp.tanh(x @ params["up"]) @ params["down"]).mean()
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> params = {"up": jax.random.normal(keys[0], (64, 64)), "down": jax.random.normal(keys[1], (64, 64))}
    >>> batches = jax.random.normal(keys[2], (2, 32, 64))
    >>> policy = jlp.find_policy(loss, params, batches, jlp.NVFP4BlockScaling(), budget=0.5, by="layer", progress=False)
    >>> print(policy.recipe)
    rule         recipe
    up           high precision
    all others   NVFP4BlockScaling
    """
    labels = _checked_candidates(candidates)
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
        raise ValueError(f"{_WHO}: budget={shown(budget)}; needs a share, 0 to 1")
    one_of(_WHO, "cost", cost, "flops", "bytes")
    if by is None:
        by = "gemm" if cost == "flops" else "layer"
    one_of(_WHO, "by", by, "gemm", "layer")
    if cost == "bytes" and by == "gemm":
        raise ValueError(f'{_WHO}: by="gemm" with cost="bytes"; weights are stored once for all GEMMs: use by="layer"')
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"{_WHO}: repeats={shown(repeats)}; needs a positive number of keys")
    try:
        batches = [*batches]
    except TypeError:
        raise TypeError(f"{_WHO}: batches={shown(batches)}; needs a list of batches") from None
    if not batches:
        raise ValueError(f"{_WHO}: batches is empty; needs one or more")
    search = _Search(loss_fn, params, batches, labels, jax.random.key(0) if key is None else key, repeats, by)
    units = search.units()
    samples = _measured(search, units, path, progress)
    costs = Costs(search.layers, labels, cost, by)
    effects = {unit: _effect([samples[unit, b, r] for b, r in search.samples()]) for unit in units}
    chosen = costs.choose(effects, budget)
    recipe = _rules(chosen, labels, search.joined)
    table = [
        Measured(
            *unit, effect, costs.of(unit[0], unit[2]), costs.of(unit[0], None), chosen[unit[:2]] or "high precision"
        )
        for unit, effect in effects.items()
    ]
    table.sort(key=lambda row: (-row.effect.error, row.layer, row.gemm, row.candidate))
    spent = sum(costs.of(layer, label) for (layer, _), label in chosen.items())
    first = PerLayer((), default=next(iter(labels.values())))
    quantized, found = (_effect([search.under(rules, b, r) for b, r in search.samples()]) for rules in (first, recipe))
    return Policy(recipe, spent, tuple(table), quantized, found)


def _checked_candidates(candidates: Any) -> dict[str, Recipe]:
    labels = {type(candidates).__name__: candidates} if isinstance(candidates, Recipe) else candidates
    if not isinstance(labels, Mapping) or not labels or not all(isinstance(r, Recipe) for r in labels.values()):
        raise TypeError(
            f"{_WHO}: candidates={shown(candidates)}; needs a recipe, or recipes by label, such as "
            "{'nvfp4': NVFP4BlockScaling(), 'mxfp8': MXFP8BlockScaling()}"
        )
    for label, recipe in labels.items():
        if isinstance(recipe, PerLayer | PerGemm) or recipe.delayed is not None or recipe.roles().ste is not None:
            raise ValueError(
                f"{_WHO}: candidate {label!r} is {shown(recipe)}; needs a recipe for all three GEMMs of all layers, "
                "without a state and not for quantisation-aware training"
            )
    return dict(labels)


Unit = tuple[str, str, str]
"""A layer, a GEMM or WHOLE, and the label of a candidate."""


class _Search:
    """Computes losses and gradients with one unit quantised.

    Attributes:
        layers: by name, multiply-adds of fprop and elements of the weight.
        joined: the names of all parameters of a layer that the function joins from several.
    """

    def __init__(self, loss_fn, params, batches, labels: dict[str, Recipe], key, repeats: int, by: str):
        self.params, self.batches, self.labels = params, batches, labels
        self.key, self.repeats = key, repeats
        self.gemms = tuple(GEMMS) if by == "gemm" else (WHOLE,)
        self.first = next(iter(labels.values()))
        self.joined: dict[str, list[str]] = {}
        self.loss_fn, self.layers = self._with_layers(loss_fn)
        self.recipes: tuple[Recipe | None, ...] = (
            None,
            *(_only(gemm, recipe) for recipe in labels.values() for gemm in self.gemms),
        )
        self._compiled = jax.jit(self._under(self.recipes))
        self._compared = jax.jit(_compared)
        self._references: dict[int, Any] = {}

    def _with_layers(self, loss_fn: Any) -> tuple[Callable[..., Any], dict[str, tuple[int, int]]]:
        """The function, transformed if it has no layers; its layers."""
        if not callable(loss_fn):
            raise TypeError(f"{_WHO}: loss_fn={shown(loss_fn)}; needs a function")
        for function in (loss_fn, quantize_matmuls(loss_fn, self.first)):
            search = Choices(self.first)
            with warnings.catch_warnings(), entered(search):
                warnings.simplefilter("ignore")  # that no layer follows the recipe
                with autocast(self.first):
                    result = jax.eval_shape(function, self.params, self.batches[0])
            if search.sizes:
                break
        if getattr(result, "shape", None) != () or not jnp.issubdtype(result.dtype, jnp.floating):
            raise TypeError(f"{_WHO}: loss_fn returns {shown(result)}; needs a loss, a scalar")
        if not search.sizes:
            raise ValueError(
                f"{_WHO}: no layer of loss_fn follows {self.first}; needs layers of this library without recipes of "
                "their own, or matrix products by leaves of params"
            )
        if "" in search.sizes:
            raise ValueError(
                f"{_WHO}: layers have no names, so no rule can tell them apart; call jaxlowprec.nnx.name_layers, or "
                "give name="
            )
        if function is not loss_fn:
            traced = TracedFunction(loss_fn, (0,), (self.params, self.batches[0]), {}, self.first)
            self.joined = {p.weight.name: [s.name for s in p.weight.singles] for p in traced.trace.products}
        return function, dict(search.sizes)

    def units(self) -> list[Unit]:
        """All that is measured, in order."""
        return list(itertools.product(self.layers, self.gemms, self.labels))

    def samples(self) -> Iterator[tuple[int, int]]:
        """Numbers of batches and keys."""
        return itertools.product(range(len(self.batches)), range(self.repeats))

    def _under(self, recipes: tuple[Recipe | None, ...]) -> Callable[..., Any]:
        """Loss and gradient with each layer under the one of these recipes that is chosen for it."""

        def loss_and_gradient(params: Any, batch: Any, chosen: Mapping[str, Any], key: Any) -> Any:
            def loss(params: Any) -> jax.Array:
                with entered(Choices(self.first, recipes, chosen, key)), autocast(self.first):
                    return self.loss_fn(params, batch)

            return jax.value_and_grad(loss)(params)

        return loss_and_gradient

    def _keys(self, batch: int, repeat: int) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(self.key, batch), repeat)

    def reference(self, batch: int) -> Any:
        """Loss and gradient in high precision. The last batch's is kept."""
        if batch not in self._references:
            nothing = dict.fromkeys(self.layers, jnp.int32(0))
            found = self._compiled(self.params, self.batches[batch], nothing, self._keys(batch, 0))
            norm = float(jnp.sqrt(_squares(found[1])))
            if not (math.isfinite(float(found[0])) and math.isfinite(norm) and norm > 0):
                raise FloatingPointError(
                    f"{_WHO}: in high precision batch {batch} has the loss {float(found[0])} and a gradient of norm "
                    f"{norm}; needs finite ones, and a gradient that is not zero"
                )
            self._references = {batch: found}
        return self._references[batch]

    def alone(self, unit: Unit, batch: int, repeat: int) -> list[float]:
        """A sample, with one unit quantised: relative change of the loss, cosine, relative square error."""
        layer, gemm, label = unit
        number = 1 + list(self.labels).index(label) * len(self.gemms) + self.gemms.index(gemm)
        chosen = {name: jnp.int32(number if name == layer else 0) for name in self.layers}
        found = self._compiled(self.params, self.batches[batch], chosen, self._keys(batch, repeat))
        return [float(v) for v in self._compared(found, self.reference(batch))]

    def under(self, rules: PerLayer, batch: int, repeat: int) -> list[float]:
        """A sample under rules."""
        compiled = self._under_rules(rules)
        found = compiled(self.params, self.batches[batch], self._keys(batch, repeat))
        return [float(v) for v in self._compared(found, self.reference(batch))]

    @functools.lru_cache(maxsize=2)  # noqa: B019  a search ends with the call
    def _under_rules(self, rules: PerLayer) -> Callable[..., Any]:
        recipes = tuple(rules.at(name) for name in self.layers)
        numbers = {name: i for i, name in enumerate(self.layers)}
        under = self._under(recipes)
        return jax.jit(lambda params, batch, key: under(params, batch, numbers, key))


def _only(gemm: str, recipe: Recipe) -> Recipe:
    """A recipe for one GEMM, or for all."""
    return recipe if gemm == WHOLE else PerGemm(**{gemm: recipe})


def _squares(tree: Any) -> jax.Array:
    return jnp.stack([jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]).sum()


def _compared(found: Any, reference: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Relative change of the loss, cosine of the gradients, square of the relative error."""
    (loss, gradient), (usual, wanted) = found, reference
    pairs = [
        (a.astype(jnp.float32), b.astype(jnp.float32))
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True)
    ]
    dot = jnp.stack([jnp.sum(a * b) for a, b in pairs]).sum()
    ours, theirs, off = _squares(gradient), _squares(wanted), _squares([a - b for a, b in pairs])
    return (loss - usual) / jnp.abs(usual), dot / jnp.sqrt(ours * theirs), off / theirs


def _effect(samples: list[list[float]]) -> Effect:
    means = [statistics.fmean(values) for values in zip(*samples, strict=True)]
    count = len(samples)
    errors = [
        statistics.stdev(values) / math.sqrt(count) if count > 1 else math.nan for values in zip(*samples, strict=True)
    ]
    return Effect(*means, *errors)


def _measured(
    search: _Search, units: list[Unit], path: Any, progress: bool
) -> dict[tuple[Unit, int, int], list[float]]:
    """A sample for each unit, batch and key: those of the file, and new ones, which it gets."""
    about = {
        "units": [list(unit) for unit in units],
        "candidates": {label: repr(recipe) for label, recipe in search.labels.items()},
        "key": jax.random.key_data(search.key).tolist(),
    }
    done: dict[tuple[Unit, int, int], list[float]] = {}
    with Log(path, about) as log, _bar(len(units) * len(search.batches) * search.repeats, progress) as bar:
        for batch in range(len(search.batches)):
            log.check_reference(batch, [float(search.reference(batch)[0]), float(_squares(search.reference(batch)[1]))])
            for unit, repeat in itertools.product(units, range(search.repeats)):
                found = log.get(unit, batch, repeat)
                if found is None:
                    found = search.alone(unit, batch, repeat)
                    log.put(unit, batch, repeat, found)
                done[unit, batch, repeat] = found
                bar.update()
    return done


class _NoBar:
    def __enter__(self):
        return self

    def __exit__(self, *_: object):
        pass

    def update(self) -> None:
        """Shows nothing."""


def _bar(total: int, progress: bool) -> Any:
    """A progress bar of tqdm's, which is none unless standard error is a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(total=total, desc=_WHO, disable=None if progress else True)


def _rules(
    chosen: dict[tuple[str, str], str | None], labels: dict[str, Recipe], joined: Mapping[str, list[str]]
) -> PerLayer:
    """Rules by which every layer's GEMMs follow what is chosen for them; joined: see `_Search`."""
    first = next(iter(labels.values()))
    layers: dict[Recipe | None, list[str]] = {}
    for name in dict.fromkeys(layer for layer, _ in chosen):
        found = {
            gemm: None if label is None else labels[label] for (layer, gemm), label in chosen.items() if layer == name
        }
        recipes = set(found.values())
        recipe = recipes.pop() if len(recipes) == 1 else PerGemm(**found)
        if recipe != first:
            layers.setdefault(recipe, []).extend(joined.get(name, [name]))
    rules = tuple(("|".join(map(re.escape, names)), recipe) for recipe, names in layers.items())
    return PerLayer(rules, default=first)
