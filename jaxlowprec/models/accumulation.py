"""accumulate_gradients: the gradient of a large batch from microbatches, with each weight quantised once."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import a_flag, as_array, shown, whole_number
from jaxlowprec.layers.accumulating import Accumulation, Total, accumulating
from jaxlowprec.layers.delayed_scaling import OVERWRITE_WITH_GRADIENT, add_gradients, is_state
from jaxlowprec.layers.layer_call import quantized_weight
from jaxlowprec.layers.residuals import in_profiles

_WHO = "accumulate_gradients"


def accumulate_gradients(
    loss: Callable[..., Any], *, microbatches: int, has_aux: bool = False
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A function like `jax.value_and_grad(loss)` that takes a large batch in parts, one after the other.

    The loss and the gradient are the means of those of the parts; gradients are added up in float32. The kernel of a
    linear layer under a recipe, and the kernels of a layer of experts, are quantised once for all parts, and each
    part's wgrad is added to the sum in the GEMM that computes it, so that there is one tree of gradients, not two.

    That is so for a kernel that one layer reads as it is in `params`, whatever its layout. Others are quantised in each
    part, and their gradients are added afterwards: those that are cast or transposed before, that several layers read,
    that a `jax.lax.scan` over layers slices, or that layers read within a transformation in the loss, such as
    `jax.jit`, `jax.checkpoint`, `jax.vmap` or `jax.lax.scan`. So are those of `Int4QAT` and of layers in high
    precision. New values of delayed scaling's states are combined by max.

    Arguments:
        loss: of (params, batch), a mean over the batch; a scalar, or with `has_aux` a pair of it and a tree.
        microbatches: the number of parts. Part i has the rows i, i + microbatches, ... of the batch, so that each
            device of a mesh that splits the batch holds a share of every part.
        has_aux: whether the loss gives a pair.

    Returns:
        A function of params, a tree of float arrays, and batch, a tree of arrays [B, ...] with B a multiple of
        `microbatches`. It gives (loss, gradients), or ((loss, aux), gradients), where arrays of `aux` have the axis of
        the parts in front. Gradients have the dtypes of params.

    Raises:
        TypeError: an argument has another type.
        ValueError: the batch does not divide, or has arrays of different lengths.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> def loss(params, x):
    ...     return jlp.linear(x, params["kernel"]).astype(jnp.float32).mean()
    >>> params, x = {"kernel": jnp.ones((64, 32))}, jnp.ones((64, 64), jnp.bfloat16)
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     value, gradients = jax.jit(jlp.accumulate_gradients(loss, microbatches=4))(params, x)
    >>> float(value), gradients["kernel"].shape
    (64.0, (64, 32))
    """
    if not callable(loss):
        raise TypeError(f"{_WHO}: loss={shown(loss)}; needs a function of params and batch")
    count = whole_number(_WHO, "microbatches", microbatches, 1)
    a_flag(_WHO, has_aux=has_aux)

    def with_aux(params: Any, part: Any) -> Any:
        found = loss(params, part)
        if has_aux and not (isinstance(found, tuple | list) and len(found) == 2):
            raise TypeError(f"{_WHO}: has_aux=True and loss returned {shown(found)}; needs a loss and aux")
        return found if has_aux else (found, None)

    @functools.wraps(loss)
    def value_and_grad(params: Any, batch: Any) -> tuple[Any, Any]:
        parts = _parts(batch, count)
        value, aux, gradients = _accumulated(with_aux, params, parts, count)
        return ((value, aux) if has_aux else value), gradients

    return value_and_grad


def _parts(batch: Any, count: int) -> Any:
    """The batch's arrays with the axis of the parts in front."""
    leaves = jax.tree.leaves(batch)
    if not leaves or any(not jnp.shape(leaf) for leaf in leaves):
        raise ValueError(f"{_WHO}: batch has {'a scalar' if leaves else 'no array'}; needs arrays [B, ...]")
    lengths = sorted({jnp.shape(leaf)[0] for leaf in leaves})
    if len(lengths) > 1 or lengths[0] % count or lengths[0] == 0:
        given = " and ".join(map(str, lengths))
        raise ValueError(f"{_WHO}: batch has arrays of {given} rows; needs one number of rows, a multiple of {count}")

    def split(x: Any) -> jax.Array:
        x = as_array(x)
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)

    return jax.tree.map(split, batch)


def _accumulated(loss: Callable[..., Any], params: Any, parts: Any, count: int) -> tuple[Any, Any, Any]:
    """The mean loss, the stacked aux and the gradients."""
    paths, tree = jax.tree.flatten_with_path(params)
    leaves = [as_array(leaf) for _, leaf in paths]
    states = {i for i, (path, _) in enumerate(paths) if is_state(path)}
    found = _kernels(loss, tree, leaves, jax.tree.map(lambda x: x[0], parts))
    quantized = {i: _quantized_once(leaves[i], call) for i, call in found.items()}

    def of_part(carry: Any, part: Any) -> tuple[Any, Any]:
        added, totals = carry

        def with_sums(totals: dict[int, Any], learned: dict[int, Any]) -> tuple[Any, Any]:
            arrays = [learned.get(i, leaf) for i, leaf in enumerate(leaves)]
            sums = {i: Total(totals[i], quantized[i]) for i in totals}
            accumulation = Accumulation()
            for i, each in sums.items():
                accumulation.add(arrays[i], each)
            with accumulating(accumulation):
                value, aux = loss(jax.tree.unflatten(tree, arrays), part)
            assert all(len(each.calls) == 1 for each in sums.values()), "the loss is not traced alike twice"
            return value, aux

        learned = {i: leaf for i, leaf in enumerate(leaves) if i not in totals}
        (of_one, aux), (totals, gradients) = jax.value_and_grad(with_sums, argnums=(0, 1), has_aux=True)(
            totals, learned
        )
        return (add_gradients(added, of_others(of_one.astype(jnp.float32), gradients)), totals), aux

    def of_others(value: jax.Array, gradients: dict[int, Any]) -> dict[str, Any]:
        """The loss and gradients that no GEMM adds up, as `add_gradients` tells new states from what is added."""
        by_kind: dict[str, Any] = {"loss": value, "learned": {}, OVERWRITE_WITH_GRADIENT: {}}
        for i, gradient in gradients.items():
            by_kind[OVERWRITE_WITH_GRADIENT if i in states else "learned"][i] = gradient
        return by_kind

    def zeros(i: int) -> jax.Array:
        leaf = leaves[i]
        return jnp.zeros_like(leaf, None if i in states else jnp.float32)

    totals = {i: jnp.zeros_like(call.matrices(leaves[i]), jnp.float32) for i, call in found.items()}
    added = of_others(jnp.float32(0), {i: zeros(i) for i in range(len(leaves)) if i not in found})
    (added, totals), aux = jax.lax.scan(of_part, (added, totals), parts)
    totals = {i: _of_kernel(found[i], leaves[i], total) for i, total in totals.items()}
    gradients = totals | added["learned"] | added[OVERWRITE_WITH_GRADIENT]
    means = [gradients[i] if i in states else (gradients[i] / count).astype(x.dtype) for i, x in enumerate(leaves)]
    return added["loss"] / count, aux, jax.tree.unflatten(tree, means)


def _kernels(loss: Callable[..., Any], tree: Any, leaves: list[jax.Array], part: Any) -> dict[int, Any]:
    """The call of the layer, of linears or experts, that alone reads a leaf, by the leaf's number."""
    sums = [Total() for _ in leaves]

    def traced(arrays: list[jax.Array], part: Any) -> Any:
        accumulation = Accumulation()
        for array, each in zip(arrays, sums, strict=True):
            accumulation.add(array, each)
        with accumulating(accumulation):
            return loss(jax.tree.unflatten(tree, arrays), part)

    jaxpr = jax.make_jaxpr(traced)(leaves, part).jaxpr
    same = Counter(map(id, leaves))  # one array in two places of the tree is two kernels that cannot be told apart
    read = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
    uses = Counter(map(id, read))
    return {
        i: each.calls[0]
        for i, (each, variable) in enumerate(zip(sums, jaxpr.invars, strict=False))
        if len(each.calls) == 1 and uses[id(variable)] == 1 and same[id(leaves[i])] == 1
    }


def _quantized_once(kernel: jax.Array, call: Any) -> Any:
    """The kernel quantised for all parts; None if its scale is a layer's state, which the loss knows."""
    if call.recipe.delayed is not None or not call.roles.quantizes_weight:
        return None
    with in_profiles(call.name, "quantize weight"):
        weight = call.matrices(kernel)
        return quantized_weight(call.who, call.roles, weight, None, call.name)  # the call's key is each part's own


def _of_kernel(call: Any, kernel: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient of a kernel, from that of the matrices that its layer makes of it."""
    return jax.vjp(call.matrices, kernel.astype(jnp.float32))[1](gradient)[0]
