"""Norms and activations whose results only products read: they have them quantised, or with their amaxes, from the pass
that makes them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxlowprec import wiring
from jaxlowprec.layers.operands import alike, for_both_ways, role_of
from jaxlowprec.layers.product import (
    GemmOperands,
    GemmSpec,
    QuantizedInput,
    SavedForBackward,
    Specs,
    States,
    amaxes_of_input,
    quantized_inputs,
    roles_of_input,
)
from jaxlowprec.layers.residuals import dtype_marker, in_profiles
from jaxlowprec.ops.activations.quantized import quantized_activation, quantized_activation_gradients
from jaxlowprec.ops.norms.api import Norm, norm_gradients, normed
from jaxlowprec.ops.norms.op import NormSpec
from jaxlowprec.ops.norms.quantized import quantized_norm
from jaxlowprec.recipes.roles import Role
from jaxlowprec.wiring.sharding_rule import resharded, sharding_of


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
        """The input that `norm` makes, from its x in the shape that products take, `tokens`."""
        residual = None if norm.residual is None else norm.residual.reshape(tokens.shape)
        arrays = tokens, residual, norm.weight, norm.beta
        x, residual, weight, beta = wiring.align_varying(*arrays)
        return NormedInput(x, residual, weight, beta, norm.spec, tuple(map(sharding_of, arrays)))


class _KeptNorm(NamedTuple):
    """Residuals of a norm for its backward pass."""

    norm: NormedInput  # with what was normed as its x, and no residual
    saved: tuple[jax.Array, ...]


def inputs_of(
    specs: Specs,
    x: jax.Array | NormedInput,
    states: Sequence[States],
    *,
    first: GemmOperands,
    backward: bool = False,
) -> tuple[tuple[QuantizedInput, ...], list[jax.Array], Any]:
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
        inputs: tuple[QuantizedInput, ...] = (QuantizedInput(None, found.rowwise, found.columnwise),)
    else:
        with in_profiles("norm"):
            wanted = amaxes_of_input(spec, backward)
            found = normed(dataclasses.replace(x.spec, amaxes=wanted), *operands)
        amaxes = for_both_ways(found.amaxes)
        inputs = quantized_inputs(specs, found.y, states, **of_first, backward=backward, amaxes=amaxes)
    what = x.x if found.total is None else found.total
    kept = _KeptNorm(dataclasses.replace(x, x=what, residual=None), found.saved)
    return inputs, [] if found.total is None else [found.total], kept


def _reads_codes_alone(spec: GemmSpec, states: Sequence[States]) -> bool:
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


def input_dtype_marker(kept: Any) -> Any:
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


def quantized_hidden(
    activation: Any, down: GemmSpec, operands: Sequence[jax.Array], states: States, sizes: Any, **wanted: bool
) -> QuantizedInput | None:
    """The input of `down`, quantised as its GEMMs read it and not stored; None where that cannot be.

    Arguments:
        operands: of the activation.
        states: of `down`: None each, or something else reads its input.
        sizes: see `GemmOperands`.
        wanted: `forward`, `backward`; see `quantized_input`.
    """
    row, column = roles_of_input(down, **wanted)
    in_high_precision = wanted.get("backward", False) and not (down.wgrad or down.decodes("wgrad"))
    in_high_precision |= wanted.get("forward", True) and not down.fprop
    read_elsewhere = sizes is not None or down.requantizes("input") or any(part is not None for part in states)
    if in_high_precision or read_elsewhere or not _in_one_pass(activation, down, row, column):
        return None
    with in_profiles("activation, quantize input"):
        return QuantizedInput(
            None, *quantized_activation(activation, _format(row, column), operands, **_directions(down, row, column))
        )


def quantized_gradients(
    activation: Any, specs: Specs, kept: Sequence[SavedForBackward], operands: Sequence[jax.Array], da: jax.Array
) -> list[tuple[Any, Any]] | None:
    """The gradients of the results of products, the activation's operands, row- and columnwise, as their GEMMs read
    them, and not stored; None where that cannot be. They share their input, and so their roles.

    Arguments:
        kept: of each product.
        da: the activation's gradient.
    """
    first, learn = specs[0], any(product.dtype_markers[0] is not None for product in kept)
    row, column = role_of(first.dgrad, 0), role_of(first.wgrad, 1, learn)
    in_high_precision = row is None or (learn and column is None)
    read_elsewhere = any(part is not None for k in kept for part in (k.dtype_markers[1], k.sizes, k.state, k.telemetry))
    if in_high_precision or read_elsewhere or not _in_one_pass(activation, first, row, column):
        return None
    with in_profiles("activation gradient, quantize gradient"):
        da, fmt = resharded(da, sharding_of(operands[0])), _format(row, column)
        return quantized_activation_gradients(activation, fmt, da, operands, **_directions(first, row, column))


def _in_one_pass(activation: Any, spec: GemmSpec, row: Role | None, column: Role | None) -> bool:
    """Whether the activation's kernel quantises as these roles say: those of a tensor rowwise and columnwise."""
    roles = [role for role in (row, column) if role is not None]
    if callable(activation) or not roles or (len(roles) == 2 and not alike(row, column)) or spec.delayed is not None:
        return False
    rotated = any(role.hadamard is not None for role in roles)
    return roles[0].format.scaled_by_blocks_alone and roles[0].rounding == "nearest" and not rotated


def _format(row: Role | None, column: Role | None) -> Any:
    role: Any = row or column
    return role.format


def _directions(spec: GemmSpec, row: Role | None, column: Role | None) -> dict[str, Any]:
    return {"rowwise": row is not None, "columnwise": column is not None, "rows_split": spec.rows_split}
