"""Defines ops: what computes them on each platform, how they batch, and how a mesh splits them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jaxlowprec.wiring.placement import check_pieces, mesh_array, refine
from jaxlowprec.wiring.sharding_rule import MeshArray, ShardingRule, Split

__all__ = ["ShardingRule", "align_varying", "as_bytes", "define", "from_bytes", "further_axes", "varying_axes"]

Avals = Sequence[Any]
Shapes = Sequence[tuple[tuple[int, ...], Any]]
"""Shape and dtype of each result of an op."""
Body = Callable[..., Sequence[jax.Array]]
"""Arrays -> arrays: what computes an op on one platform."""
Op = Callable[..., tuple[jax.Array, ...]]
"""Arrays -> a tuple of arrays, under every transformation but autodiff."""
Elsewhere = Literal["portable", "reference", "refused"]
"""How an op is computed on a platform for which it has no native body."""
UNPARTITIONED = ("tpu",)
"""Platforms whose compiler calls no partitioning rules (https://github.com/jax-ml/jax/issues/38196). It partitions the
bodies of ops itself, as it does every other operation."""
AddUp = Callable[[jax.Array], jax.Array]
"""Adds up partial results of devices, see `define`'s `when_reduced`."""


class Partials(NamedTuple):
    """The mesh axes over which partial results are added up.

    Attributes:
        scattered: for each dimension of which a device keeps its part of the sum, the mesh axes of the parts.
        reduced: the other mesh axes that are added up over: the sum is on all of their devices.
        elsewhere: the mesh axes whose devices have other parts of the partial results already.
    """

    scattered: Mapping[int, tuple[str, ...]]
    reduced: tuple[str, ...]
    elsewhere: tuple[str, ...]


class Adder(Protocol):
    """Adds up the partial results of devices."""

    @property
    def drawn(self) -> bool:
        """Whether it takes random words, uint32 [..., 2]."""

    def add_up(self, partial: jax.Array, where: Partials, words: jax.Array | None) -> jax.Array:
        """The sum of the devices' partial results, or of the own part of it; within the devices' own program."""


class _AdderInTheirDtype:
    drawn = False

    def add_up(self, partial: jax.Array, where: Partials, words: jax.Array | None = None) -> jax.Array:
        del words
        for dim, axes in where.scattered.items():
            partial = jax.lax.psum_scatter(partial, axes, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(partial, where.reduced) if where.reduced else partial


IN_THEIR_DTYPE: Adder = _AdderInTheirDtype()
"""Adds up by XLA's reduce-scatter and all-reduce, in the dtype of the partial results."""


@contextlib.contextmanager
def _as_by_default() -> Iterator[None]:
    """Traces a body without the caller's mesh, whose types would leak into it, and without the caller's strict
    promotion rules, which are meant for the caller's own code."""
    no_mesh, any_ranks = use_abstract_mesh(AbstractMesh((), ())), jax.numpy_rank_promotion("allow")
    with no_mesh, any_ranks, jax.numpy_dtype_promotion("standard"):
        yield


def _lowering(name: str, body: Body, on_one_device: Body | None = None) -> Callable[..., Any]:
    def rule(ctx: Any, *args: Any, alone: bool = True) -> Any:
        chosen = on_one_device if on_one_device and alone else body

        def named(*args: Any) -> Sequence[jax.Array]:
            with jax.named_scope(name):  # in profiles
                return chosen(*args)

        lower = mlir.lower_fun(named, multiple_results=True)
        avals_in, avals_out = (
            [jax.core.ShapedArray(a.shape, a.dtype) for a in avals] for avals in (ctx.avals_in, ctx.avals_out)
        )
        with _as_by_default():
            return lower(ctx.replace(avals_in=avals_in, avals_out=avals_out), *args)

    return rule


def _is_on_one_device(ctx: Any) -> bool:
    """Whether what is lowered runs on one device: all of the program, or the body of a shard_map over all mesh axes."""
    context = ctx.module_context.axis_context
    if (manual := getattr(context, "manual_axes", None)) is not None:
        return {*manual, *context.mesh.manual_axes} == {*context.mesh.axis_names}
    return getattr(context, "num_devices", None) == 1


def _unless_empty(native: Body, reference: Body) -> Body:
    """A native body that leaves the work to the reference where the first operand has no elements.

    Kernels write only results that depend on elements. A result that exists without any, such as the scale of an empty
    tensor, would keep whatever its memory holds.
    """
    return lambda *args: (native if args[0].size else reference)(*args)


_identity = custom_partitioning(lambda x: x)
_identity.def_partition(None)
_PARTITIONED = jax.make_jaxpr(_identity)(jax.ShapeDtypeStruct((), "uint8"))
"""A parameter of ops. JAX names a program's devices while it lowers it only if it sees a partitioned operation."""


def as_bytes(x: jax.Array) -> jax.Array:
    """An array of 8-bit floats as uint8: XLA's collectives on CPUs would send 8-bit floats as float16."""
    dtype = _byte_dtype(x.dtype)
    return x if dtype == x.dtype else jax.lax.bitcast_convert_type(x, dtype)


def from_bytes(values: Sequence[jax.Array], dtypes: Sequence[Any]) -> tuple[jax.Array, ...]:
    """The inverse of `as_bytes`, for arrays of these dtypes."""
    return tuple(
        v if v.dtype == dtype else jax.lax.bitcast_convert_type(v, dtype)
        for v, dtype in zip(values, dtypes, strict=True)
    )


def define(
    name: str,
    *,
    rule: ShardingRule,
    outputs: Callable[..., Shapes],
    reference: Body,
    native: Body | Mapping[str, Body] | None = None,
    platforms: Sequence[str] = (),
    collective: Callable | Sequence[Callable] = jax.lax.psum,
    when_reduced: Body | None = None,
    when_split: Body | None = None,
    out_spec: PartitionSpec | None = None,
    portable: Body | Mapping[str | None, Body] | None = None,
    on_one_device: Mapping[str, Body] | None = None,
    fenced: bool = False,
    elsewhere: Elsewhere = "reference",
    by_reference: Sequence[str] = (),
    missing: Mapping[str, str] | None = None,
    adder: Adder = IN_THEIR_DTYPE,
    inline: bool = False,
) -> Op:
    """Makes an op: a function of arrays that returns a tuple of arrays, under every transformation but autodiff.

    Arguments:
        name: of the primitive.
        rule: how it shards and which operands have batch axes.
        outputs: operand avals -> [(shape, dtype)] of the results. Pure Python: shapes need no device.
        reference: arrays -> arrays in pure JAX, for platforms without a native implementation.
        native: as `reference`, by an FFI call; a mapping where platforms have different calls.
        platforms: the platforms that `native` serves.
        collective: combines results over mesh axes that split a reduction factor that they do not have; a sequence has
            one for each result.
        when_reduced: (add_up, *arrays) -> arrays, used instead of `reference` and `collective` when a reduction factor
            is split and combining the results is not enough; no result has that factor. `add_up` adds up an array laid
            out as a result. The sum may stay scattered if all results are laid out alike; operands without a reduction
            factor are then split as the results are.
        when_split: (axes, *arrays) -> arrays, used instead of `reference` and `collective` when mesh axes split
            reduction factors: for results that have a factor, and depend on all of it. `axes` has those of each.
        out_spec: in explicit mode, the wanted partition of the first result; followed as far as the rule allows.
        portable: as `reference`, for compilers of any platform to make fast: its bytes need not be the kernels'. A
            mapping has a body for each of some platforms, and under None that for all others. None: the reference.
        on_one_device: by platform, preferred to `portable` and `native` where a program runs on one device, or the op
            is in a shard_map over all mesh axes: kernels that the platform's compiler cannot split, and calls with
            operands that nothing splits.
        fenced: whether portable results are stored before they are read. Without it XLA computes them again in each
            reader's loop; an FFI call's results are stored anyway.
        elsewhere: what computes the op on platforms without a native body; "refused" raises NotImplementedError.
        by_reference: platforms that run the reference if they have no native body, whatever `elsewhere` says.
        missing: for error messages: why a platform is not among `platforms`.
        adder: of the partial results. If it draws, the op takes one more operand, uint32 [..., 2] with the batch axes,
            which neither `outputs` nor the bodies see.
        inline: the op is part of the function that calls it: for ops that jitted functions call, since XLA copies each
            function of a lowered program for each of its calls.
    """
    bodies: Mapping[str | None, Body] = portable if isinstance(portable, Mapping) else {None: portable or reference}
    if adder.drawn:
        rule = rule.with_operand("... words", whole=["words"])
        outputs, reference = _without_last(outputs), _without_last(reference)
        if native:
            mapping = native if isinstance(native, Mapping) else dict.fromkeys(platforms, native)
            native = {platform: _without_last(body) for platform, body in mapping.items()}
        bodies = {platform: _without_last(body) for platform, body in bodies.items()}
        on_one_device = {platform: _without_last(body) for platform, body in (on_one_device or {}).items()}
    primitive: Any = Primitive(name)  # of whole arrays, which a mesh may split
    local: Any = Primitive(f"{name}_local")  # of the arrays that one device has
    primitive.multiple_results = local.multiple_results = True
    collectives = [collective] * len(rule.results) if callable(collective) else collective

    def types(*avals: Any, **_: Any) -> list[Any]:
        first, shapes = avals[0], outputs(*avals)
        mesh = first.sharding.mesh
        split: Split = {}
        if not mesh.empty:
            operands = [MeshArray(a.shape, a.sharding.spec, a.dtype.itemsize) for a in avals]
            wanted = None
            if out_spec is not None:
                shape, dtype = shapes[0]
                wanted = MeshArray(shape, out_spec, jnp.dtype(dtype).itemsize)
            split = rule.split(mesh, operands, [wanted] if wanted else [])
            split = {**split, **rule.landed(mesh, split, wanted)[0]}
        return [
            first.update(
                shape=tuple(shape),
                dtype=jnp.dtype(dtype),
                weak_type=False,
                sharding=first.sharding.update(spec=rule.spec(tokens, len(shape), split)),
            )
            for tokens, (shape, dtype) in zip(rule.results, shapes, strict=True)
        ]

    primitive.def_abstract_eval(types)
    local.def_abstract_eval(types)

    def body_elsewhere(platform: str | None) -> Body:
        if elsewhere == "refused":
            reason = (missing or {}).get(platform or "")
            why = f"not for {platform}: {reason}" if reason else "not for this platform"
            return _refusal(f'{name}: implementation="ffi" has kernels for {tuple(platforms)}, {why}')
        if elsewhere == "reference" or platform in by_reference:
            return reference
        body = bodies.get(platform) or bodies[None]
        return _fenced(body) if fenced else body

    alone = {platform: _unless_empty(body, reference) for platform, body in (on_one_device or {}).items()}
    others = [*bodies, *(alone if elsewhere == "portable" else ()), *by_reference, *(missing or ())]
    for platform in dict.fromkeys(others):
        kernel = alone.get(platform) if elsewhere == "portable" else None
        mlir.register_lowering(local, _lowering(name, body_elsewhere(platform), kernel), platform=platform)
    primitive.native = {}  # the kernels' calls by platform: tests make them without a compiled program
    if native:
        for platform in platforms:
            body = native[platform] if isinstance(native, Mapping) else native
            primitive.native[platform] = body
            mlir.register_lowering(
                local, _lowering(name, _unless_empty(body, reference), alone.get(platform)), platform=platform
            )

    def bind(*args: jax.Array, alone: bool = False) -> tuple[jax.Array, ...]:
        return tuple(local.bind(*align_varying(*args), alone=alone))

    @primitive.def_impl
    def _(*args: jax.Array, **_: Any) -> tuple[jax.Array, ...]:
        # The implementation is chosen in lowering, which jax.disable_jit would skip. The op is compiled as a whole: a
        # body that calls other ops is lowered without devices unless JAX sees a partitioned op around it.
        with jax.disable_jit(False):
            return compiled(*args)

    def partition(
        dtypes: Sequence[Any], mesh: Any, args: Avals, results: Any
    ) -> tuple[Any, Body, tuple[Any, ...], tuple[Any, ...]]:
        """JAX passes shardings that may contradict each other or be inexpressible on its mesh: all are derived again
        from the rule."""
        results = jax.tree.leaves(results)
        if mesh.empty:
            check_pieces(name, rule, args, results)
            local = _on_bytes(bind, dtypes)
            return mesh, local, tuple(r.sharding for r in results), tuple(a.sharding for a in args)
        mesh = refine(mesh)
        operands, wanted = ([mesh_array(mesh, value) for value in values] for values in (args, results))
        split = rule.split(mesh, operands, wanted, partial=True)
        alike = all(tokens == rule.results[0] for tokens in rule.results)
        landed, scattered = rule.landed(mesh, split, wanted[0] if when_reduced and alike else None)
        reduced = tuple(axis for factor in rule.reductions for axis in split.get(factor, ()))
        where = [split if rule.is_reduced(tokens) else landed for tokens in rule.operands]

        def add_up(partial: jax.Array, words: jax.Array | None) -> jax.Array:
            factors = [factor for factor, _ in rule.dims(rule.results[0], partial.ndim)]
            parts = {dim: scattered[factor] for dim, factor in enumerate(factors) if factor in scattered}
            rest = tuple(a for a in reduced if a not in itertools.chain(*parts.values()))
            elsewhere = tuple(a for factor in factors for a in split.get(factor, ()) if a not in reduced)
            return adder.add_up(partial, Partials(parts, rest, elsewhere), words)

        def compute(*local_args: jax.Array) -> tuple[jax.Array, ...]:
            with _as_by_default():  # the collective's own scalar computation too
                if reduced and when_split:
                    return tuple(when_split({f: split.get(f, ()) for f in rule.reductions}, *local_args))
                if reduced and when_reduced:
                    operands, words = (local_args[:-1], local_args[-1]) if adder.drawn else (local_args, None)
                    return tuple(when_reduced(functools.partial(add_up, words=words), *operands))
                axes = [rule.combined(tokens, split) for tokens in rule.results]
                found = zip(bind(*local_args), axes, collectives, strict=True)
                return tuple(combine(out, a) if a else out for out, a, combine in found)

        def shardings(tokens: Sequence[Any], values: Avals, splits: Sequence[Split]) -> tuple[NamedSharding, ...]:
            specs = [rule.spec(t, len(v.shape), s) for t, v, s in zip(tokens, values, splits, strict=True)]
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        placed_results = shardings(rule.results, results, [{**split, **landed}] * len(results))
        return mesh, _on_bytes(compute, dtypes), placed_results, shardings(rule.operands, args, where)

    def sharding_rule(dtypes: Sequence[Any], mesh: Any, operands: Avals, results: Avals) -> Any:
        del dtypes
        return rule.shardy(mesh, operands, results)

    split = custom_partitioning(lambda dtypes, *args: _on_bytes(bind, dtypes)(*args), static_argnums=(0,))
    split.def_partition(partition, decode_shardings=False, sharding_rule=sharding_rule)

    def lower(ctx: Any, *args: Any, **_: Any) -> Any:
        if {*(ctx.platforms or ctx.module_context.platforms)} <= {*UNPARTITIONED}:
            if adder is not IN_THEIR_DTYPE and getattr(ctx.module_context.axis_context, "num_devices", 1) > 1:
                raise NotImplementedError(
                    f"{name}: this platform's compiler adds up the partial sums of devices itself, in float32 or the "
                    "result's dtype; remove `sums=`, or call the op within jax.shard_map over all mesh axes"
                )
            return _lowering(name, functools.partial(bind, alone=_is_on_one_device(ctx)))(ctx, *args)
        dtypes = tuple(aval.dtype for aval in ctx.avals_in)

        def run(*args: jax.Array) -> tuple[jax.Array, ...]:
            return from_bytes(split(dtypes, *map(as_bytes, args)), [aval.dtype for aval in ctx.avals_out])

        body = functools.partial(bind, alone=True) if _is_on_one_device(ctx) else run
        return mlir.lower_fun(body, multiple_results=True)(ctx, *args)

    mlir.register_lowering(primitive, lower)

    def batch(args: Sequence[jax.Array], dims: Sequence[int | None], **_: Any) -> tuple[Sequence[jax.Array], list[int]]:
        (size,) = {a.shape[dim] for a, dim in zip(args, dims, strict=True) if dim is not None}
        widened = []
        for i, (a, dim, tokens) in enumerate(zip(map(as_bytes, args), dims, rule.operands, strict=True)):
            if dim is not None and tokens[:1] != ["..."]:
                raise NotImplementedError(f"{name}: operand {i} has no batch axes and cannot be mapped over by vmap")
            if dim is not None:
                a = jnp.moveaxis(a, dim, 0)
            elif tokens[:1] == ["..."]:
                a = jnp.broadcast_to(a, (size, *a.shape))
            widened.append(a)
        out = op(*from_bytes(widened, [a.dtype for a in args]))
        return out, [0] * len(out)

    batching.primitive_batchers[primitive] = batch

    def op(*args: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(primitive.bind(*align_varying(*args), partitioned=_PARTITIONED))

    compiled = jax.jit(op)
    return op if inline else compiled


def _refusal(message: str) -> Body:
    def body(*args: jax.Array) -> NoReturn:
        raise NotImplementedError(message)

    return body


def _fenced(body: Body) -> Body:
    return lambda *args: jax.lax.optimization_barrier(tuple(body(*args)))


def _byte_dtype(dtype: Any) -> Any:
    """The dtype in which `as_bytes` passes arrays of this one."""
    return jnp.dtype("uint8") if dtype.itemsize == 1 and dtype.kind in "fV" else dtype


def _without_last(function: Callable) -> Callable:
    """The function of one more operand, which it does not read."""
    return lambda *args: function(*args[:-1])


def _on_bytes(function: Body, dtypes: Sequence[Any]) -> Op:
    """The function of arrays of these dtypes, with 8-bit floats passed and returned as bytes."""
    return lambda *args: tuple(map(as_bytes, function(*from_bytes(args, dtypes))))


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes of a shard_map along which x differs."""
    return jax.typeof(x).manual_axis_type.varying


def further_axes(x: Any, than: Any) -> tuple[str, ...]:
    """The axes of `jax.shard_map` that x varies over and the other array does not: those that split x alone."""
    return tuple(sorted(varying_axes(x) - varying_axes(than)))


def align_varying(*trees: Any) -> tuple[Any, ...]:
    """Under shard_map, the same values typed as varying over the mesh axes that any of them varies over.

    An op's operands must agree in this. So must those of a custom_vjp: without the cast, whose transpose is the sum
    over those axes, its cotangents would have the wrong type.
    """
    leaves, structure = jax.tree.flatten(trees)
    varying = [varying_axes(leaf) for leaf in leaves]
    union = frozenset().union(*varying)
    aligned = [
        jax.lax.pcast(leaf, tuple(sorted(union - v)), to="varying") if union - v else leaf
        for leaf, v in zip(leaves, varying, strict=True)
    ]
    return jax.tree.unflatten(structure, aligned)
