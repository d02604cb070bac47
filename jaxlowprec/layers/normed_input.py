"""A norm whose result only products read: they have it quantised, or with its amaxes, from the pass that makes it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxlowprec import wiring
from jaxlowprec.layers.operands import alike, for_both_ways, role_of
from jaxlowprec.layers.product import Input, Product, ProductSpec, Specs, States, amaxes_of_input, quantized_inputs
from jaxlowprec.layers.residuals import dtype_marker, in_profiles
from jaxlowprec.ops.norms.api import Norm, norm_gradients, normed
from jaxlowprec.ops.norms.op import NormSpec
from jaxlowprec.ops.norms.quantized import quantized_norm
from jaxlowprec.wiring.out_sharding import sharding_of


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "residual", "weight", "beta"),
    meta_fields=("spec", "shardings"),
)
@dataclasses.dataclass(frozen=True)
class NormedInput:
    """The input of products that a norm makes: given to them in its place.

    Attributes:
        x, residual: [..., T, K], as the products take their input.
        weight, beta: float32 [K]; see `ops.norms.api.Norm`.
        spec: of the norm.
        shardings: of the four arrays.
    """

    x: Any
    residual: Any
    weight: Any
    beta: Any
    spec: NormSpec
    shardings: tuple[Any, ...]

    @staticmethod
    def of(norm: Norm, tokens: jax.Array) -> NormedInput:
        """Of the norm's x as products take it, `tokens`."""
        residual = None if norm.residual is None else norm.residual.reshape(tokens.shape)
        arrays = tokens, residual, norm.weight, norm.beta
        x, residual, weight, beta = wiring.align_varying(*arrays)
        return NormedInput(x, residual, weight, beta, norm.spec, tuple(map(sharding_of, arrays)))


class _KeptNorm(NamedTuple):
    """What the backward pass needs of a norm."""

    norm: NormedInput  # with what was normed as its x, and no residual
    saved: tuple[jax.Array, ...]


def inputs_of(
    specs: Specs,
    x: jax.Array | NormedInput,
    states: Sequence[States],
    *,
    first: Product,
    backward: bool = False,
) -> tuple[tuple[Input, ...], list[jax.Array], Any]:
    """`quantized_inputs` of x, further results, and what `input_gradients` needs. `first`: of the products.

    The further result is that of a norm with a residual: the sum of it and x.
    """
    of_first: Any = {"sizes": first.sizes, "randomness": first.randomness, "signs": first.signs}
    if not isinstance(x, NormedInput):
        return quantized_inputs(specs, x, states, **of_first, backward=backward), [], dtype_marker(x)
    spec, operands = specs[0], (x.x, x.weight, x.residual, x.beta)
    if _reads_codes_alone(spec, states):
        fmt = role_of(spec.fprop, 0).format  # type: ignore[union-attr]
        with in_profiles("norm, quantize input"):
            options: Any = {"columnwise": backward, "rows_split": spec.rows_split}
            found: Any = quantized_norm(x.spec, fmt, *operands, **options)
        inputs: tuple[Input, ...] = (Input(None, found.rowwise, found.columnwise),)
    else:
        with in_profiles("norm"):
            wanted = amaxes_of_input(spec, backward)
            found = normed(dataclasses.replace(x.spec, amaxes=wanted), *operands)
        amaxes = for_both_ways(found.amaxes)
        inputs = quantized_inputs(specs, found.y, states, **of_first, backward=backward, amaxes=amaxes)
    what = x.x if found.total is None else found.total
    kept = _KeptNorm(dataclasses.replace(x, x=what, residual=None), found.saved)
    return inputs, [] if found.total is None else [found.total], kept


def _reads_codes_alone(spec: ProductSpec, states: Sequence[States]) -> bool:
    """Whether products read nothing of their input but what the norm's kernel quantises in its pass."""
    row, column = role_of(spec.fprop, 0), role_of(spec.wgrad, 0)
    watched = any(part is not None for state in states for part in state)
    if row is None or column is None or not alike(row, column) or watched:
        return False
    return (
        row.format.scaled_by_blocks_alone
        and row.rounding == "nearest"
        and column.hadamard is None
        and spec.delayed is None
        and not spec.requantizes("input")
    )


def like_input(kept: Any) -> Any:
    """An array of the input's dtype, from what `inputs_of` kept."""
    return kept.norm.x if isinstance(kept, _KeptNorm) else kept


def input_gradients(kept: Any, dx: jax.Array, of_results: Sequence[jax.Array]) -> Any:
    """The gradient of what was given to `inputs_of`.

    Arguments:
        dx: of the products' input.
        of_results: of the further results.
    """
    if not isinstance(kept, _KeptNorm):
        return dx
    norm = kept.norm
    with in_profiles("norm gradient"):
        whole = norm.x, norm.weight, kept.saved
        x, residual, weight, beta = norm_gradients(norm.spec, norm.shardings, whole, dx, of_results)
    return NormedInput(x, residual, weight, beta, norm.spec, norm.shardings)
