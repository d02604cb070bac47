"""How the operands of a product's three GEMMs are quantised, and sums are added up, as its recipe says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.amax import Amaxes
from jaxlowprec.ops.amax import amax as tensor_amax
from jaxlowprec.ops.grouped_matmul.api import quantize_groups
from jaxlowprec.ops.hadamard import STREAM_OF_DGRAD, drawn_signs
from jaxlowprec.ops.quantize.api import quantize, quantize_both
from jaxlowprec.ops.quantize.random_bits import Randomness, further_words, slice_words
from jaxlowprec.ops.rounding import narrowed
from jaxlowprec.ops.sums.kinds import SumOverDevices, draws
from jaxlowprec.recipes.fields import Sums
from jaxlowprec.recipes.roles import BackwardOverride, Role, Roles


@dataclasses.dataclass(frozen=True)
class Gemms:
    """Says how the operands of a product's three GEMMs are quantised.

    Attributes:
        roles, backward_override: the recipe's.
    """

    roles: Roles
    backward_override: BackwardOverride

    @property
    def fprop(self) -> tuple[Role, Role] | None:
        """The roles of the input rowwise and of the weight columnwise in fprop; None: it is not quantised."""
        return self._operands("fprop")

    @property
    def dgrad(self) -> tuple[Role, Role] | None:
        """The roles of the gradient rowwise and of the weight rowwise in dgrad; None: it is not quantised."""
        return self._operands("dgrad")

    @property
    def wgrad(self) -> tuple[Role, Role] | None:
        """The roles of the input columnwise and of the gradient columnwise in wgrad; None: it is not quantised."""
        return self._operands("wgrad")

    @property
    def wgrad_commutes(self) -> bool:
        """Whether wgrad is quantised and its operands may change places: their scales multiply without rounding."""
        formats = [role.format for role in self.wgrad or ()]
        return bool(formats) and all(f.power_of_two or f.scaling in ("two_level", "e8m0") for f in formats)

    def decodes(self, gemm: str) -> bool:
        """Whether a GEMM in high precision reads the operand that fprop has read, decoded."""
        return self.fprop is not None and self.roles.operands(gemm, self.backward_override) == "dequantized"

    def requantizes(self, tensor: str) -> bool:
        """Whether the form of the input or the weight for the backward pass is quantised from what fprop reads."""
        return self.fprop is not None and tensor in self.roles.requantized

    def _operands(self, gemm: str) -> tuple[Role, Role] | None:
        found = self.roles.operands(gemm, self.backward_override)
        return found if isinstance(found, tuple) else None


def role_of(operands: tuple[Role, Role] | None, place: int, wanted: bool = True) -> Role | None:
    """The role of the first (0) or second (1) operand of a GEMM; None if it is not quantised, or not wanted."""
    return operands[place] if operands is not None and wanted else None


def alike(row: Role | None, column: Role | None) -> bool:
    """Whether both forms of a tensor are quantised in one pass over it."""
    if row is None or column is None or row.hadamard is not None:
        return False
    return (row.format, row.rounding) == (column.format, column.rounding)


class Shard(NamedTuple):
    """How an array is a shard of a whole one, in shard_map.

    Attributes:
        axis_name: the mesh axes along which the shards lie.
        axis: the axis of the array that is split, -1 or -2.
    """

    axis_name: Any
    axis: int

    def axis_name_of(self, fmt: Format, axis: int) -> Any:
        """`axis_name` of `quantize`, along an axis: scales of lines that are whole do not depend on other shards."""
        return None if fmt.scaling == "rows" and axis != self.axis else self.axis_name


class FormOptions(TypedDict, total=False):
    """Options of `both_ways` for rows of every kind, see there."""

    words: jax.Array | None
    amax: tuple[jax.Array, jax.Array] | None
    encode: jax.Array | None
    sign_key: jax.Array | None
    row_sign_key: jax.Array | None


def both_ways(
    x: jax.Array,
    row: Role | None,
    column: Role | None,
    *,
    words: jax.Array | None = None,
    amax: tuple[jax.Array, jax.Array] | None = None,
    encode: jax.Array | None = None,
    rows_split: bool = False,
    sign_key: jax.Array | None = None,
    row_sign_key: jax.Array | None = None,
    shard: Shard | None = None,
) -> tuple[Any, Any]:
    """x quantised rowwise and columnwise, None where there is no role; in one pass if the roles allow it.

    `words`: for stochastic rounding. `sign_key`, `row_sign_key`: for a rotation with drawn signs, of the columnwise and
    of the rowwise form; see `quantize`. `shard`: how x is one.
    """
    options: Any = {"encode_scale": encode, "rows_split": rows_split}
    row_amax, column_amax = amax or (None, None)
    in_one_pass = alike(row, column) and not (shard and row is not None and row.format.scaling == "rows")
    if row is not None and column is not None and in_one_pass:
        options["sign_key"] = sign_key if column.draws_signs else None
        options["axis_name"] = shard and shard.axis_name
        return quantize_both(
            x,
            row.format,
            hadamard_columnwise=column.hadamard or False,
            rounding=row.rounding,
            key=words,
            amax=amax,
            **options,
        )

    def one(role: Role | None, axis: int, amax: Any, signs: Any) -> QuantizedArray | None:
        if role is None:
            return None
        used = words if role.rounding != "nearest" else None
        amax = amax if role.format.has_tensor_scale else None
        signs = signs if role.draws_signs else None
        return quantize(
            x,
            role.format,
            axis=axis,
            hadamard=role.hadamard or False,
            rounding=role.rounding,
            key=used,
            amax=amax,
            sign_key=signs,
            axis_name=shard and shard.axis_name_of(role.format, axis),
            **options,
        )

    return one(row, -1, row_amax, row_sign_key), one(column, -2, column_amax, sign_key)


def rounded_to(w: jax.Array, served_dtype: str | None) -> jax.Array:
    """w rounded to that dtype; w itself if that is None."""
    if served_dtype is None or w.dtype == served_dtype:
        return w
    return narrowed(w.astype(jnp.float32), jnp.dtype(served_dtype)).astype(served_dtype)


def weight_both_ways(
    w: jax.Array,
    row: Role | None,
    column: Role | None,
    *,
    requantized: bool = False,
    served_dtype: str | None = None,
    encode: jax.Array | None = None,
    randomness: Randomness | None = None,
    shard: Shard | None = None,
    transposed: bool = False,
) -> tuple[Any, Any]:
    """A weight [..., K, N] quantised rowwise, for dgrad, and columnwise, for fprop; see `both_ways`.

    Arguments:
        requantized: the rowwise form is quantised from the columnwise one, decoded to bfloat16.
        served_dtype: the dtype that w is rounded to first, or None.
        randomness: the source of the bits and the signs that the rowwise form takes, if it takes some; see
            `Roles.draws_for_weight`.
        transposed: w is a transposition, without `requantized` and randomness. Its own transposition is quantised, with
            the same bytes: XLA takes both transpositions away.
    """
    if transposed:
        columnwise, rowwise = weight_both_ways(w.mT, column, row, served_dtype=served_dtype, encode=encode, shard=shard)
        return None if rowwise is None else rowwise.mT, None if columnwise is None else columnwise.mT
    given: Any = {"encode": encode, "shard": shard}
    w = rounded_to(w, served_dtype)
    drawn: Any = {}
    if row is not None and randomness is not None:
        source = randomness.words_for(lambda: tensor_amax(w, True, None)[0])
        words = further_words(source, 4)
        drawn["words"] = slice_words(words, w.shape[:-2]) if words.ndim == 1 else words
        drawn["row_sign_key"] = drawn_signs(source, STREAM_OF_DGRAD)
    if not requantized or row is None or column is None:
        return both_ways(w, row, column, **given, **drawn)
    w_column = both_ways(w, None, column, **given)[1]
    return both_ways(w_column.dequantize(jnp.bfloat16), row, None, **given, **drawn)[0], w_column


def amaxes_of(row: Role | None, column: Role | None, rows_split: bool = False) -> Amaxes | None:
    """The amaxes of a tensor that is quantised rowwise and columnwise: plain, and rotated if the columnwise form is.

    None if its formats have no tensor scale, or a rotation is none of the kernels that find amaxes.
    """
    if row is not None and row.hadamard is not None:
        return None
    tensor_scales = [role for role in (row, column) if role is not None and role.format.has_tensor_scale]
    rotation = column.hadamard if column is not None and column in tensor_scales else None
    if not tensor_scales or (rotation is not None and not rotation.in_pass):
        return None
    return Amaxes(True, rotation, rows_split)


def amaxes_both_ways(x: jax.Array, wanted: Amaxes | None) -> tuple[jax.Array, jax.Array] | None:
    """The tensor amaxes of x rowwise and columnwise, in one pass over it."""
    if wanted is None:
        return None
    return for_both_ways(tensor_amax(x, wanted.plain, wanted.hadamard, rows_split=wanted.rows_split))


def for_both_ways(found: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array] | None:
    """Amaxes as `both_ways` takes them; None if there are none."""
    return (found[0], found[-1]) if found else None


def groups_both_ways(
    x: jax.Array,
    sizes: jax.Array,
    row: Role | None,
    column: Role | None,
    *,
    words: jax.Array | None = None,
    amaxes: tuple[jax.Array, jax.Array] | None = None,
    encode: jax.Array | None = None,
) -> tuple[Any, Any]:
    """The rows of each group of x [..., T, C], as `both_ways`: GroupedQuantizedArrays."""

    def some(role: Role, rowwise: bool, columnwise: bool) -> tuple[Any, Any]:
        used = words if role.rounding != "nearest" else None
        options: Any = {"hadamard": column.hadamard if column is not None else None, "words": used, "amaxes": amaxes}
        options |= {"eden": role.rounding == "eden", "encode_scale": encode}
        return quantize_groups(x, sizes, role.format, rowwise=rowwise, columnwise=columnwise, **options)

    if row is not None and column is not None and alike(row, column):
        return some(row, True, True)
    found = None if row is None else some(row, True, False)[0]
    return found, None if column is None else some(column, False, True)[1]


def sum_over_devices(sums: Sums, gemm: str, source: Randomness | None, operand: Any) -> SumOverDevices:
    """The sum over devices of a GEMM's partial results.

    Arguments:
        source: of the random bits that rounding draws; without a key they come from the largest scale of `operand`.
        operand: quantised.
    """
    kind = getattr(sums, gemm)
    if not draws(kind):
        return SumOverDevices(kind)
    assert source is not None
    words = source.words_for(lambda: _largest_scale(operand))
    return SumOverDevices(kind, further_words(words, _STREAM_OF_SUMS[gemm]))


_STREAM_OF_SUMS = {"fprop": 9, "dgrad": 10, "wgrad": 11}


def _largest_scale(q: Any) -> jax.Array:
    """float32 []: the largest amax of an array that has amaxes, else its largest scale."""
    return jax.lax.stop_gradient(jnp.max((q.scale if q.amax is None else q.amax).astype(jnp.float32)))
