"""An MLP's activation and its gradients, where only GEMMs read them: quantised in the pass that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxlowprec.layers.operands import alike, role_of
from jaxlowprec.layers.product import Input, KeptProduct, ProductSpec, Specs, States, roles_of_input
from jaxlowprec.layers.residuals import in_profiles
from jaxlowprec.ops.activations.quantized import quantized_activation, quantized_activation_gradients
from jaxlowprec.recipes.roles import Role
from jaxlowprec.wiring.out_sharding import resharded, sharding_of


def quantized_hidden(
    activation: Any, down: ProductSpec, operands: Sequence[jax.Array], states: States, sizes: Any, **wanted: bool
) -> Input | None:
    """The input of `down`, quantised as its GEMMs read it and not stored; None where that cannot be.

    Arguments:
        operands: of the activation.
        states: of `down`: None each, or something else reads its input.
        sizes: see `Product`.
        wanted: `forward`, `backward`; see `quantized_input`.
    """
    row, column = roles_of_input(down, **wanted)
    in_high_precision = wanted.get("backward", False) and not (down.wgrad or down.decodes("wgrad"))
    in_high_precision |= wanted.get("forward", True) and not down.fprop
    read_elsewhere = sizes is not None or down.requantizes("input") or any(part is not None for part in states)
    if in_high_precision or read_elsewhere or not _in_one_pass(activation, down, row, column):
        return None
    with in_profiles("activation, quantize input"):
        return Input(
            None, *quantized_activation(activation, _format(row, column), operands, **_directions(down, row, column))
        )


def quantized_gradients(
    activation: Any, specs: Specs, kept: Sequence[KeptProduct], operands: Sequence[jax.Array], da: jax.Array
) -> list[tuple[Any, Any]] | None:
    """The gradients of the results of products, the activation's operands, row- and columnwise, as their GEMMs read
    them, and not stored; None where that cannot be. They share their input, and so their roles.

    Arguments:
        kept: of each product.
        da: the activation's gradient.
    """
    first, learn = specs[0], any(product.like[0] is not None for product in kept)
    row, column = role_of(first.dgrad, 0), role_of(first.wgrad, 1, learn)
    in_high_precision = row is None or (learn and column is None)
    read_elsewhere = any(part is not None for k in kept for part in (k.like[1], k.sizes, k.state, k.found))
    if in_high_precision or read_elsewhere or not _in_one_pass(activation, first, row, column):
        return None
    with in_profiles("activation gradient, quantize gradient"):
        da, fmt = resharded(da, sharding_of(operands[0])), _format(row, column)
        return quantized_activation_gradients(activation, fmt, da, operands, **_directions(first, row, column))


def _in_one_pass(activation: Any, spec: ProductSpec, row: Role | None, column: Role | None) -> bool:
    """Whether the activation's kernel quantises as these roles say: those of a tensor rowwise and columnwise."""
    roles = [role for role in (row, column) if role is not None]
    if callable(activation) or not roles or (len(roles) == 2 and not alike(row, column)) or spec.delayed is not None:
        return False
    rotated = any(role.hadamard is not None for role in roles)
    return roles[0].format.scaled_by_blocks_alone and roles[0].rounding == "nearest" and not rotated


def _format(row: Role | None, column: Role | None) -> Any:
    role: Any = row or column
    return role.format


def _directions(spec: ProductSpec, row: Role | None, column: Role | None) -> dict[str, Any]:
    return {"rowwise": row is not None, "columnwise": column is not None, "rows_split": spec.rows_split}
