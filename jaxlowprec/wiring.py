"""How an op meets JAX: batching, sharding, result types, lowering per platform and export, in one place for all ops.

`define` composes, from the outside in,

    jit > custom_vmap > custom_partitioning > a Primitive with one lowering rule a platform

jit makes eager calls take its fast path and traces once a shape; custom_vmap turns a mapped axis into one more leading
batch axis; custom_partitioning keeps sharded operands where they are; the primitive chooses the implementation when the
platform is known and types its results without a device. All four read the same einops-like rule:

    Rule("... r (c k), ... -> ... r (c h), ... r c", k=16, h=8)

An operand's dimension is a factor, or a product whose first factor alone may be split: `(c k)` is split into whole
blocks of k. Factors of given size are never split. `...` stands for batch axes, which all operands that have them
share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

Avals = Sequence[Any]
Split = Mapping[str, tuple[str, ...]]  # mesh axes by the factor they split


class Rule:
    """How results are split when operands are.

    Arguments:
        text: the rule, see the module's docstring.
        reductions: factors summed (or otherwise combined) away: results on split operands need a collective.
        whole: further factors that are never split.
        sizes: factors of fixed size.
    """

    def __init__(self, text: str, reductions: Sequence[str] = (), whole: Sequence[str] = (), **sizes: int):
        def side(part: str) -> list[list[str]]:
            return [re.findall(r"\.\.\.|\([^)]*\)|\w+", operand) for operand in part.split(",")]

        self.text, self.reductions, self.sizes = text, tuple(reductions), sizes
        self.whole = {*sizes, *whole}
        self.operands, self.results = (side(part) for part in text.split("->"))

    def dims(self, tokens: list[str], ndim: int) -> list[tuple[str, int]]:
        """For each dimension, the factor that may be split and the product of the others."""
        if "..." in tokens:
            at = tokens.index("...")
            batch = [f"batch{i}" for i in range(ndim - len(tokens) + 1)]
            tokens = [*tokens[:at], *batch, *tokens[at + 1 :]]
        factors = [token.strip("()").split() for token in tokens]
        return [(first, math.prod(self.sizes[f] for f in rest)) for first, *rest in factors]

    def split(self, mesh: Any, shapes: Sequence[tuple[int, ...]], specs: Sequence[Any], partial: bool) -> Split:
        """The mesh axes that split each factor: the first operand that splits a factor decides.

        Blocks are never cut. Where all axes of a dimension do not divide it into whole blocks, `partial` keeps as many
        as do; otherwise none are kept.
        """
        found: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for tokens, shape, spec in zip(self.operands, shapes, specs, strict=True):
            padded = [*spec, *[None] * (len(shape) - len(spec))]
            for (factor, rest), size, entry in zip(self.dims(tokens, len(shape)), shape, padded, strict=True):
                axes = entry if isinstance(entry, tuple) else (entry,)
                axes = tuple(axis for axis in axes if axis is not None and axis not in used)
                while axes and size // rest % math.prod(mesh.shape[axis] for axis in axes):
                    axes = axes[:-1] if partial else ()
                if axes and factor not in found and factor not in self.whole:
                    found[factor] = axes
                    used.update(axes)
        return found

    def spec(self, tokens: list[str], ndim: int, split: Split) -> PartitionSpec:
        """The partition of an array of `ndim` dimensions named by `tokens`."""
        return PartitionSpec(*[split.get(factor) for factor, _ in self.dims(tokens, ndim)])

    def shardy(self, mesh: Any, operands: Avals, results: Avals) -> tuple[str, dict[str, Any]]:
        """The rule as Shardy wants it: `(c k)` becomes `(c ck)`, or `ck` where c is 1.

        Special factors come in order of appearance, a factor that only occurs in products needs its size, no factor
        occurs twice in one array, and none of size 1 in a product.
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
        alone = re.sub(r"\([^)]*\)", "", text)
        options: dict[str, Any] = {f: sizes[f] for f in order if f in sizes and f not in re.findall(r"\w+", alone)}
        special = {
            "need_replication_factors": tuple(f for f in order if f in whole),
            "reduction_factors": tuple(f for f in order if f in self.reductions),
        }
        return text, options | {name: factors for name, factors in special.items() if factors}


def _primes(n: int) -> list[int]:
    prime = next((p for p in range(2, n + 1) if n % p == 0), None)
    return [prime, *_primes(n // prime)] if prime else []


def _refine(mesh: Mesh) -> Mesh:
    """The same devices in the same order with every axis cut into primes: Shardy may use a part of an axis."""
    primes = [p for n in mesh.devices.shape for p in _primes(n)] or [1]
    return Mesh(mesh.devices.reshape(primes), tuple(f"_{i}" for i in range(len(primes))))


def _spec_on(mesh: Mesh, sharding: Any, shape: tuple[int, ...]) -> list[tuple[str, ...]]:
    """Any sharding as a spec of a refined mesh, read off from which device holds which slice.

    The shape is scaled by the mesh's size so that it divides however it is split. Along each mesh axis the first step
    away from the origin shows which dimension moves, and how far; larger steps are major axes.
    """
    where = sharding.devices_indices_map(tuple(n * mesh.size for n in shape))
    steps = []
    for axis, size in enumerate(mesh.devices.shape):
        index = tuple(int(k == axis and size > 1) for k in range(mesh.devices.ndim))
        steps.append([part.start or 0 for part in where[mesh.devices[index]]])
    spec = []
    for dim in range(len(shape)):
        moving = [(-steps[axis][dim], axis) for axis in range(mesh.devices.ndim) if steps[axis][dim]]
        spec.append(tuple(mesh.axis_names[axis] for _, axis in sorted(moving)))
    return spec


def _no_mesh():
    """Bodies see plain shapes: the caller's mesh would leak its types into them."""
    return use_abstract_mesh(AbstractMesh((), ()))


def _lowering(body: Callable):
    lower = mlir.lower_fun(body, multiple_results=True)

    def rule(ctx, *args):
        avals_in, avals_out = (
            [jax.core.ShapedArray(a.shape, a.dtype) for a in avals] for avals in (ctx.avals_in, ctx.avals_out)
        )
        with _no_mesh():
            return lower(ctx.replace(avals_in=avals_in, avals_out=avals_out), *args)

    return rule


def define(
    name: str,
    *,
    rule: Rule,
    outputs: Callable[..., Sequence[tuple[tuple[int, ...], Any]]],
    reference: Callable,
    native: Callable | Mapping[str, Callable] | None = None,
    platforms: Sequence[str] = (),
    collective: Callable = jax.lax.psum,
    when_reduced: Callable | None = None,
    only_native: bool = False,
    missing: Mapping[str, str] | None = None,
) -> Callable:
    """Makes an op: a function of arrays that returns a tuple of arrays, under every transformation but autodiff.

    Arguments:
        name: of the primitive.
        rule: how it shards and which operands have batch axes.
        outputs: operand avals -> [(shape, dtype)] of the results. Pure Python: shapes need no device.
        reference: arrays -> arrays in pure JAX, for platforms without a native implementation.
        native: the same by an FFI call; where platforms differ in it, one for each.
        platforms: where `native` serves.
        collective: combines results over mesh axes that split a reduction factor.
        when_reduced: arrays, mesh axes -> arrays; how to compute when a reduction factor is split, where combining the
            results is not enough.
        only_native: other platforms raise NotImplementedError instead of running the reference.
        missing: for the message, why a platform is not among `platforms`.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def _(*avals):
        first = avals[0]
        mesh = first.sharding.mesh
        shapes, specs = [a.shape for a in avals], [a.sharding.spec for a in avals]
        split = {} if mesh.empty else rule.split(mesh, shapes, specs, partial=False)
        return [
            first.update(
                shape=tuple(shape),
                dtype=jnp.dtype(dtype),
                weak_type=False,
                sharding=first.sharding.update(spec=rule.spec(tokens, len(shape), split)),
            )
            for tokens, (shape, dtype) in zip(rule.results, outputs(*avals), strict=True)
        ]

    def unavailable(why: str) -> Callable:
        def body(*args):
            raise NotImplementedError(f'{name}: implementation="ffi" has kernels for {tuple(platforms)}, {why}')

        return body

    mlir.register_lowering(primitive, _lowering(unavailable("not for this platform") if only_native else reference))
    for platform, why in (missing or {}).items() if only_native else ():
        mlir.register_lowering(primitive, _lowering(unavailable(f"not for {platform}: {why}")), platform=platform)
    if native:
        for platform in platforms:
            body = native[platform] if isinstance(native, Mapping) else native
            mlir.register_lowering(primitive, _lowering(body), platform=platform)

    def bind(*args):
        return tuple(primitive.bind(*align_varying(*args)))

    compiled = jax.jit(lambda *args: primitive.bind(*args))

    @primitive.def_impl
    def _(*args):
        with jax.disable_jit(False):  # the implementation is chosen in lowering, which jax.disable_jit would skip
            return compiled(*args)

    def partition(mesh, args, results):
        """JAX hands out shardings that are neither consistent nor always expressible on its mesh: all are derived anew
        from the rule."""
        results = jax.tree.leaves(results)
        reduced: tuple[str, ...] = ()

        def local(*local_args):
            if reduced and when_reduced:
                with _no_mesh():
                    return tuple(when_reduced(reduced, *local_args))
            with _no_mesh():  # the collective's own scalar computation too
                outs = bind(*local_args)
                return tuple(collective(out, reduced) for out in outs) if reduced else outs

        if mesh.empty:
            _check_pieces(name, rule, args, results)
            return mesh, local, tuple(r.sharding for r in results), tuple(a.sharding for a in args)
        mesh = _refine(mesh)
        specs = [_spec_on(mesh, a.sharding, a.shape) for a in args]
        split = rule.split(mesh, [a.shape for a in args], specs, partial=True)
        reduced = tuple(axis for factor in rule.reductions for axis in split.get(factor, ()))

        def shardings(tokens, values):
            specs = [rule.spec(t, len(v.shape), split) for t, v in zip(tokens, values, strict=True)]
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        return mesh, local, shardings(rule.results, results), shardings(rule.operands, args)

    split = custom_partitioning(lambda *args: bind(*args))
    split.def_partition(partition, decode_shardings=False, sharding_rule=rule.shardy)

    op = custom_vmap(lambda *args: split(*args))

    @op.def_vmap
    def _(size, batched, *args):
        for i, (mapped, tokens) in enumerate(zip(batched, rule.operands, strict=True)):
            if mapped and tokens[:1] != ["..."]:
                raise NotImplementedError(f"{name}: operand {i} has no batch axes and cannot be mapped over by vmap")
        widened = [
            a if mapped or tokens[:1] != ["..."] else jnp.broadcast_to(a, (size, *a.shape))
            for a, mapped, tokens in zip(args, batched, rule.operands, strict=True)
        ]
        out = op(*widened)
        return out, (True,) * len(out)

    return jax.jit(op)


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes of a shard_map that x differs along."""
    return jax.typeof(x).manual_axis_type.varying


def align_varying(*trees: Any) -> tuple[Any, ...]:
    """Under shard_map, the same values typed as varying over the mesh axes that any of them varies over.

    An op's operands must agree in this; so must those of a custom_vjp, whose cotangents otherwise would not (the cast's
    transpose is the sum over those axes).
    """
    leaves, structure = jax.tree.flatten(trees)
    varying = [varying_axes(leaf) for leaf in leaves]
    union = frozenset().union(*varying)
    aligned = [
        jax.lax.pcast(leaf, tuple(sorted(union - v)), to="varying") if union - v else leaf
        for leaf, v in zip(leaves, varying, strict=True)
    ]
    return jax.tree.unflatten(structure, aligned)


_TILED = re.compile(r"{devices=\[([\d,]+)\](?:([\d,]+)|<=\[([\d,]+)\](?:T\(([\d,]+)\))?)(?: last_tile_dim_replicate)?}")


def _tiles(sharding: Any, ndim: int) -> list[tuple[int, ...]] | None:
    """Which tile of each dimension each device holds, () for a dimension that is not split; None if that is not known.

    Read from the printed form: JAX has no public one for the shardings inside a partially manual shard_map.
    """
    if sharding.is_fully_replicated:
        return [()] * ndim
    found = _TILED.search(str(sharding))
    if not found:
        return None
    sizes, listed, iota, order = ([int(n) for n in (group or "").split(",") if n] for group in found.groups())
    devices = listed or np.arange(math.prod(iota)).reshape(iota).transpose(order or range(len(iota))).ravel()
    held = np.unravel_index(np.argsort(devices), sizes)
    return [tuple(index.tolist()) if n > 1 else () for index, n in zip(held[:ndim], sizes, strict=False)]


def _check_pieces(name: str, rule: Rule, args: Avals, results: Avals) -> None:
    """A shard_map that is manual over some axes only: shardings are passed through, so they must already agree."""
    pieces: dict[str, tuple[int, ...]] = {}

    def agrees(factor: str, rest: int, size: int, held: tuple[int, ...]) -> bool:
        count = 1 + max(held, default=0)
        whole = factor in rule.reductions or factor in rule.whole
        return size % (count * rest) == 0 and not (held and whole) and pieces.setdefault(factor, held) == held

    for tokens, value in zip(rule.operands + rule.results, [*args, *results], strict=True):
        dims, tiles = rule.dims(tokens, len(value.shape)), _tiles(value.sharding, len(value.shape))
        if tiles is None or not all(
            agrees(*dim, size, held) for dim, size, held in zip(dims, value.shape, tiles, strict=True)
        ):
            raise NotImplementedError(
                f"{name}: operands are split differently in a partially manual shard_map; make all mesh axes manual"
            )
