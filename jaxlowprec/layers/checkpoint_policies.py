"""Policies for `jax.checkpoint`: what of this library's layers is kept for the backward pass, and where.

`jax.checkpoint` recomputes the forward pass of a function within its backward pass. A policy says what is kept instead.
JAX's own policies know `dot_general`, but not the library's quantisations and GEMMs, so these go by the names that the
layers give to what a policy may keep (see `residuals`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import Recompute

from jaxlowprec.arguments import a_text, shown
from jaxlowprec.layers.residuals import PRODUCT, QUANTIZED_INPUT, QUANTIZED_WEIGHT

Policy = Callable[..., Any]

_quantized = jax.checkpoint_policies.save_only_these_names(QUANTIZED_INPUT, QUANTIZED_WEIGHT)
_products = jax.checkpoint_policies.save_only_these_names(PRODUCT)
_both = jax.checkpoint_policies.save_only_these_names(QUANTIZED_INPUT, QUANTIZED_WEIGHT, PRODUCT)


def save_quantized(prim: Any, *args: Any, **params: Any) -> Any:
    """Keeps the quantised inputs and weights that the backward pass reads.

    The forward GEMMs whose results the backward pass needs are computed again, and their operands are quantised again.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> def block(x, w):
    ...     return jnp.tanh(jlp.linear(x, w, recipe=jlp.MXFP8BlockScaling()))
    >>> saving = jax.checkpoint(block, policy=jlp.checkpoint_policies.save_quantized)
    >>> jax.grad(lambda x, w: saving(x, w).sum())(jnp.ones((32, 64)), jnp.ones((64, 32))).shape
    (32, 64)
    """
    return _quantized(prim, *args, **params)


def save_products(prim: Any, *args: Any, **params: Any) -> Any:
    """Keeps the results of the forward GEMMs, of layers in high precision too. Their operands are quantised again."""
    return _products(prim, *args, **params)


def save_quantized_and_products(prim: Any, *args: Any, **params: Any) -> Any:
    """Keeps what `save_quantized` and `save_products` keep: no quantisation and no GEMM runs again."""
    return _both(prim, *args, **params)


def offload(
    names: Sequence[str] = (QUANTIZED_INPUT, QUANTIZED_WEIGHT, PRODUCT),
    *,
    save: Sequence[str] = (),
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> Policy:
    """A policy that moves what has these names to host memory until the backward pass needs it.

    Arguments:
        names: checkpoint_names: `QUANTIZED_INPUT`, `QUANTIZED_WEIGHT`, `PRODUCT`, or names of your own.
        save: those that stay on the device instead.
        offload_src, offload_dst: memory kinds, as for `jax.checkpoint_policies.save_and_offload_only_these_names`. The
            platform must have them: `jax.devices()[0].addressable_memories()` lists its memories.

    Raises:
        TypeError: a name is not a string.
        ValueError: a name is in both.

    >>> import jax, jaxlowprec as jlp
    >>> policies = jlp.checkpoint_policies
    >>> to_host = policies.offload([policies.PRODUCT], save=[policies.QUANTIZED_INPUT, policies.QUANTIZED_WEIGHT])
    >>> block = jax.checkpoint(lambda x, w: jlp.linear(x, w), policy=to_host)
    """
    who = "offload"
    for argument, given in (("names", names), ("save", save)):
        if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
            raise TypeError(f"{who}: {argument}={shown(given)}; needs a list of names, such as [PRODUCT]")
    a_text(who, offload_src=offload_src, offload_dst=offload_dst)
    if twice := sorted(set(names) & set(save)):
        raise ValueError(f"{who}: {', '.join(twice)} is in names and in save; needs each name in one of them")
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=save,
        names_which_can_be_offloaded=names,
        offload_src=offload_src,
        offload_dst=offload_dst,
    )


def either(policy_1: Policy, policy_2: Policy) -> Policy:
    """A policy that keeps what either of two keeps; if both do, as the first says.

    It is `jax.checkpoint_policies.save_from_both_policies` for policies that offload, too.

    >>> import jax, jaxlowprec as jlp
    >>> ours, jaxs = jlp.checkpoint_policies, jax.checkpoint_policies
    >>> policy = ours.either(ours.offload(), jaxs.dots_with_no_batch_dims_saveable)
    """
    for name, policy in (("policy_1", policy_1), ("policy_2", policy_2)):
        if not callable(policy):
            raise TypeError(f"either: {name}={shown(policy)}; needs a policy, such as save_products")

    def combined(prim: Any, *args: Any, **params: Any) -> Any:
        first = policy_1(prim, *args, **params)
        return policy_2(prim, *args, **params) if first is False or first is Recompute else first

    return combined
