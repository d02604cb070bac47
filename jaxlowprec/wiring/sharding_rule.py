"""How an op's results are split when its operands are: the einops-like rule that `wiring.define` reads.

    ShardingRule("... r (c k), ... -> ... r (c h), ... r c", k=16, h=8)

An operand's dimension is a factor, or a product of which only the first factor may be split: `(c k)` is split into
whole blocks of k. Factors of given size are never split. `...` stands for batch axes, which all operands that have them
share. In JAX's explicit-sharding mode (`AxisType.Explicit`) the types of arrays say how results are to be split.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

Split = Mapping[str, tuple[str, ...]]  # mesh axes by the factor they split

ShardingLike = NamedSharding | PartitionSpec | None
"""How a result is to be split, in explicit mode; None: as JAX derives it from the operands."""


class MeshArray(NamedTuple):
    """An array on a mesh.

    Attributes:
        shape: of the whole array.
        spec: the mesh axes of each dimension, major ones first: a PartitionSpec, or a sequence like one.
        itemsize: bytes of an element.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec | Sequence[Any]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize

    @property
    def axes(self) -> list[tuple[str, ...]]:
        """The mesh axes of each dimension."""
        entries = [*self.spec, *[None] * (len(self.shape) - len(self.spec))]
        return [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]


class ShardingRule:
    """How results are split when operands are.

    Arguments:
        text: the rule, see the module's docstring.
        reductions: factors summed (or otherwise combined) away: results on split operands need a collective. A result
            that has such a factor is not combined over it, but stays split.
        whole: further factors that are never split.
        sizes: factors of fixed size.

    Attributes:
        alike: see `with_alike`.
    """

    alike: tuple[str, ...] = ()

    def __init__(self, text: str, reductions: Sequence[str] = (), whole: Sequence[str] = (), **sizes: int):
        def side(part: str) -> list[list[str]]:
            return [re.findall(r"\.\.\.|\([^)]*\)|\w+", operand) for operand in part.split(",")]

        self.text, self.reductions, self.sizes = text, tuple(reductions), sizes
        self.whole = {*sizes, *whole}
        self.operands, self.results = (side(part) for part in text.split("->"))

    def with_operand(self, text: str, whole: Sequence[str] = ()) -> ShardingRule:
        """The rule with one more operand, the last. `whole`: its factors that are never split."""
        operands, results = self.text.split("->")
        further = (*(self.whole - {*self.sizes}), *whole)
        rule = ShardingRule(f"{operands.rstrip()}, {text} ->{results}", self.reductions, further, **self.sizes)
        return rule.with_alike(self.alike)

    def with_alike(self, factors: Sequence[str]) -> ShardingRule:
        """The rule whose factors of these names, of any sizes and no two in one array, are split by the same axes."""
        rule = copy.copy(self)
        rule.alike = tuple(factors)
        return rule

    def dims(self, tokens: list[str], ndim: int) -> list[tuple[str, int]]:
        """The factor of each dimension that may be split, and the product of the others."""
        if "..." in tokens:
            at = tokens.index("...")
            batch = [f"batch{i}" for i in range(ndim - len(tokens) + 1)]
            tokens = [*tokens[:at], *batch, *tokens[at + 1 :]]
        factors = [token.strip("()").split() for token in tokens]
        return [(first, math.prod(self.sizes[f] for f in rest)) for first, *rest in factors]

    def split(
        self, mesh: Any, operands: Sequence[MeshArray], results: Sequence[MeshArray] = (), partial: bool = False
    ) -> Split:
        """The mesh axes that split each factor: where the op is computed.

        The first operand that splits a factor decides by which mesh axes. A mesh axis keeps the factor that all
        operands split by it agree in. Where they disagree, it splits no reduction (that would change the order of a
        sum), but the factor for which the fewest bytes move, results included; without results, the first factor. A
        mesh axis that splits only results splits their factor: the operands are cut, which moves nothing.

        Blocks are never cut. Where the axes of a dimension do not divide it into whole blocks, `partial` keeps as many
        leading axes as do; otherwise it keeps none.
        """
        inputs, outputs = (
            [_Factors(self, mesh, tokens, value, partial) for tokens, value in zip(sides, values, strict=False)]
            for sides, values in ((self.operands, operands), (self.results, results))
        )
        owners: dict[str, set[str]] = {}
        for array in inputs:
            array.follow(owners)
        arrays = inputs + outputs
        sizes = {factor: size for array in reversed(arrays) for factor, size in array.sizes.items()}
        for factor in self.alike[:1]:
            sizes[factor] = math.gcd(*(array.sizes[factor] for array in arrays if factor in array.sizes))
        found: dict[str, tuple[str, ...]] = {}
        for axis in dict.fromkeys(axis for array in arrays for axis in array.held):
            for factor in self._candidates(axis, mesh, inputs, outputs):
                axes = (*found.get(factor, ()), axis)
                if sizes[factor] % math.prod(mesh.shape[a] for a in axes) == 0:
                    found[factor] = axes
                    break
        return found | {factor: found[self.alike[0]] for factor in self.alike if self.alike[0] in found}

    def first_of(self, factor: str) -> str:
        """The factor, or the first one that is split alike."""
        return self.alike[0] if factor in self.alike else factor

    def _candidates(self, axis: str, mesh: Any, operands: list[_Factors], results: list[_Factors]) -> list[str]:
        """The factors that a mesh axis may split, the best one first."""
        by_operands = dict.fromkeys(a.held[axis] for a in operands if axis in a.held)
        by_results = dict.fromkeys(a.held[axis] for a in results if axis in a.held)
        if len(by_operands) == 1:
            return [*by_operands]
        candidates = [f for f in {**by_operands, **by_results} if f not in self.reductions] or [*by_operands]
        if not results:
            return candidates
        n = mesh.shape[axis]

        def moved(factor: str) -> float:
            """Bytes that each device receives, up to a common factor of (n - 1) / n."""
            gathered = sum(a.moved(axis, factor, n) for a in operands)
            return gathered + sum(a.moved(axis, factor, n, is_result=True) for a in results)

        return sorted(candidates, key=moved)

    def landed(self, mesh: Any, split: Split, wanted: MeshArray | None) -> tuple[Split, Split]:
        """How results are split once reductions are done.

        The sum over a split reduction is on all devices, or, where the wanted partition of the first result allows it,
        each device keeps its part (reduce-scatter).

        Returns:
            The split of results and of the operands that are not reduced, and the part of it that is scattered.
        """
        reduced = {axis for factor in self.reductions for axis in split.get(factor, ())}
        done = {factor: axes for factor, axes in split.items() if factor not in self.reductions}
        scattered: dict[str, tuple[str, ...]] = {}
        if wanted is None or not reduced:
            return done, scattered
        dims = self.dims(self.results[0], len(wanted.shape))
        for (factor, rest), size, axes in zip(dims, wanted.shape, wanted.axes, strict=True):
            before = done.get(factor, ())
            extra = axes[len(before) :]
            parts = math.prod(mesh.shape[a] for a in axes)
            whole_blocks = size % rest == 0 and size // rest % parts == 0
            if extra and axes[: len(before)] == before and reduced.issuperset(extra) and whole_blocks:
                done[factor], scattered[factor] = axes, extra
        return done, scattered

    def is_reduced(self, tokens: list[str]) -> bool:
        """Whether an operand has a factor that is reduced away."""
        return not set(self.reductions).isdisjoint(_names(tokens))

    def combined(self, tokens: list[str], split: Split) -> tuple[str, ...]:
        """The mesh axes that a result is combined over: those that split a reduction that it does not have."""
        names = _names(tokens)
        return tuple(axis for factor in self.reductions if factor not in names for axis in split.get(factor, ()))

    def spec(self, tokens: list[str], ndim: int, split: Split) -> PartitionSpec:
        """The partition of an array of `ndim` dimensions named by `tokens`."""
        return PartitionSpec(*[split.get(factor) for factor, _ in self.dims(tokens, ndim)])

    def shardy(self, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        """The rule as Shardy wants it: `(c k)` becomes `(c ck)`, or `ck` where c is 1.

        Shardy wants special factors in order of appearance and the size of each factor that occurs only in products. It
        takes no factor twice in one array and no factor of size 1 in a product.
        """
        leading = {
            factor: n // rest
            for tokens, value in zip(self.operands + self.results, [*operands, *results], strict=True)
            for (factor, rest), n in zip(self.dims(tokens, len(value.shape)), value.shape, strict=True)
            if rest > 1
        }
        text, whole, sizes = self.text, set(self.whole), dict(leading)
        for factor, rest in dict.fromkeys(re.findall(r"\((\w+) ([^)]*)\)", text)):
            name = (factor + rest).replace(" ", "")
            text = text.replace(f"({factor} {rest})", f"({factor} {name})" if leading[factor] > 1 else name)
            sizes[name] = math.prod(self.sizes[f] for f in rest.split())
            whole.add(name)
        order = dict.fromkeys(re.findall(r"\w+", text))
        kept = {name for tokens in self.results for name in _names(tokens)}
        alone = re.sub(r"\([^)]*\)", "", text)
        options: dict[str, Any] = {f: sizes[f] for f in order if f in sizes and f not in re.findall(r"\w+", alone)}
        special = {
            "need_replication_factors": tuple(f for f in order if f in whole),
            "reduction_factors": tuple(f for f in order if f in self.reductions and f not in kept),
        }
        return text, options | {name: factors for name, factors in special.items() if factors}


def _names(tokens: list[str]) -> list[str]:
    return re.findall(r"\w+", " ".join(tokens))


class _Factors:
    """The factors of an operand or result.

    Attributes:
        nbytes: of the whole array.
        held: the factor that each mesh axis splits here, in order of dimensions and from major to minor axes. It leaves
            out axes that would cut a block or split a whole factor: the array is gathered along them.
        sizes: the number of blocks of each factor that may be split.
    """

    def __init__(self, rule: ShardingRule, mesh: Any, tokens: list[str], value: MeshArray, partial: bool):
        self.nbytes = value.nbytes
        self.held: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        dims = rule.dims(tokens, len(value.shape))
        for (factor, rest), size, axes in zip(dims, value.shape, value.axes, strict=True):
            if factor in rule.whole:
                continue
            while axes and size // rest % math.prod(mesh.shape[axis] for axis in axes):
                axes = axes[:-1] if partial else ()
            factor = rule.first_of(factor)
            self.held.update(dict.fromkeys(axes, factor))
            self.sizes[factor] = size // rest

    def follow(self, owners: dict[str, set[str]]) -> None:
        """Drops the mesh axes by which an earlier operand does not split the same factor."""
        self.held = {axis: factor for axis, factor in self.held.items() if axis in owners.get(factor, {axis})}
        for factor in set(self.held.values()) - owners.keys():
            owners[factor] = {axis for axis, of in self.held.items() if of == factor}

    def moved(self, axis: str, factor: str, n: int, is_result: bool = False) -> float:
        """Bytes moved to reshard this array from `held` so that a mesh axis of size n splits `factor`; for a result,
        from that split back to `held`."""
        held = self.held.get(axis)
        if held == factor:
            return 0
        if held is not None:
            return self.nbytes / n if factor in self.sizes else self.nbytes  # all-to-all; all-gather or reduce-scatter
        if not is_result:
            return 0
        return self.nbytes if factor in self.sizes else 2 * self.nbytes  # all-gather; all-reduce


def sharding_of(x: jax.Array | None) -> NamedSharding | None:
    """The sharding of x's type, which its gradient has too; None outside of meshes in explicit mode."""
    sharding = None if x is None else jax.typeof(x).sharding
    return sharding if sharding is not None and sharding.mesh.explicit_axes else None


def dimensions_of(x: jax.Array) -> list[tuple[str, ...]]:
    """The mesh axes that each dimension of x is split over in its type."""
    entries = [*jax.typeof(x).sharding.spec, *[None] * x.ndim][: x.ndim]
    return [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]


def sharding_of_product(x: jax.Array, features: tuple[str, ...]) -> NamedSharding | None:
    """The sharding of x [..., K] times a kernel whose features are split over those mesh axes; x's axes come first."""
    sharding = sharding_of(x)
    if sharding is None:
        return None
    *lines, _ = dimensions_of(x)
    used = {axis for axes in lines for axis in axes}
    return sharding.update(spec=PartitionSpec(*lines, tuple(axis for axis in features if axis not in used)))


def spec_of(out_sharding: ShardingLike) -> PartitionSpec | None:
    """The partition in it: what a `wiring` op takes as `out_spec`."""
    return out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding


def resharded(x: jax.Array, out_sharding: ShardingLike) -> jax.Array:
    """x, split as `out_sharding` says; x itself where that is None."""
    return x if out_sharding is None else jax.sharding.reshard(x, out_sharding)


def replicated(x: Any) -> Any:
    """x, whole on every device in explicit mode; x itself otherwise, None too."""
    sharding = sharding_of(x)
    return x if sharding is None else jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))
