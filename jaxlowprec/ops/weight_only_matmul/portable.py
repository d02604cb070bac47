"""The weight-only GEMM as XLA's product with the decoded weight: without kernels, and for many rows on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import Format
from jaxlowprec.ops.scaled_matmul.portable import is_exact_in_bfloat16
from jaxlowprec.ops.weight_only_matmul import reference

if TYPE_CHECKING:
    from jaxlowprec.ops.weight_only_matmul.op import WeightOnlySpec


def exact_dtype(fmt: Format, x: jax.Array) -> Any:
    """The narrowest dtype that holds both operands exactly: x's own if the decoded weight fits it, else float32."""
    weight = jnp.dtype(fmt.served_dtype or ("bfloat16" if is_exact_in_bfloat16(fmt) else "float32"))
    return x.dtype if x.dtype == weight else jnp.dtype("float32")


def decoded_matmul(
    spec: WeightOnlySpec,
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array,
    amax: jax.Array | None,
    zero_point: jax.Array | None,
    extras: Sequence[jax.Array],
) -> list[jax.Array]:
    """The product by XLA's GEMM of x and the decoded weight, in the narrowest dtype that holds both exactly."""
    dtype = exact_dtype(spec.format, x)
    w = reference.decoded(data, scale, zero_point, spec.format)[..., : x.shape[-1]].astype(dtype)
    y = jnp.einsum(
        "...mk,nk->...mn" if spec.shared else "...mk,...nk->...mn",
        x.astype(dtype),
        w,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return spec.epilogue.finish(reference.apply_alpha(y, reference.alpha(scale, amax, spec.format)), extras)
