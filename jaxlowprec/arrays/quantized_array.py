"""QuantizedArray: codes, block scales and tensor scale of an array, as one pytree."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import one_of, shown
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.hadamard import Hadamard

_PLACE = "_empty"  # the key of a fifth child: None, except in trees of other leaves than arrays
_MADE_BY_HAND = "_made_by_hand"  # the key of arrays that the constructor made and nothing has checked yet
_FIELDS = ("data", "scale", "amax", "zero_point")  # the arrays of every quantised array
_DRAWN_FIELDS = (*_FIELDS, "signs")  # and of one whose rotation has drawn signs


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, repr=False)
class QuantizedArray:
    """An array quantised along one of its last two axes.

    Invariants, for logical shape `[..., M, K]`, blocks of `b` and `axis=-1`:

        dequantize(q)  ~ the array, in its original orientation
        data           uint8 [..., M, ceil(K/b) * b/2] for packed 4-bit formats: element 2i in the low nibble of byte i;
                       float8 or int8 [..., M, K] for 8-bit formats, K padded to whole transforms where it is rotated
                       Int4: [..., M, ceil(ceil(K/b) * b / 2)], code + 8 where symmetric, a last odd nibble decodes to 0
        scale          [..., M, ceil(K/b)]; for b x b tiles [..., ceil(M/b), ceil(K/b)]; for Float8Tensor [...]; for
                       Float8Rows and Int8Rows [..., M, 1]; of the format's `scale_dtype`
        zero_point     uint8 [..., M, ceil(K/b)], 0 to 15, for asymmetric Int4; else None
        amax           float32 [...], after the rotation, or None; of row-scaled formats [..., M]
        signs          uint32 [..., 4], if the rotation has drawn signs: sign i is -1 where bit i % 32 of word i / 32 is
                       set; else None
        axis == -2     data and scale are those of the transposed array, [..., K, ...]: blocks run along M

    For Int4 four bytes of data, read as a little-endian int32, are one word of a compressed-tensors checkpoint.

    A last block that the array does not fill is padded with zeros before it is rotated and quantised. Leading axes are
    batch axes, each slice with its own amax; jax.vmap adds and removes them.

    Attributes:
        data: codes.
        scale: one decode scale per block.
        amax: the largest magnitude of each slice (float32), which NVFP4's block scales are relative to; else None.
        zero_point: one per block for asymmetric integer formats, else None.
        format: what it is quantised to.
        matrix_shape: the logical sizes of the last two axes (of the only one, for a vector).
        dtype: what `dequantize` gives by default: the dtype it was quantised from.
        axis: -1 (rowwise) or -2 (columnwise): the quantised axis, which a GEMM contracts.
        hadamard: the rotation applied along that axis, or None.
        signs: of that rotation if they were drawn from a key, else None. An array that is quantised with it as
            `sign_key=` is rotated alike.
    """

    data: jax.Array
    scale: jax.Array
    amax: jax.Array | None
    zero_point: jax.Array | None
    format: Any
    matrix_shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    axis: int
    hadamard: Hadamard | None
    signs: jax.Array | None = None

    def __post_init__(self) -> None:
        who = "QuantizedArray"
        if not isinstance(self.format, Format):
            raise TypeError(f"{who}: format={shown(self.format)}; needs a format such as NVFP4()")
        sizes = self.matrix_shape
        if not isinstance(sizes, tuple) or len(sizes) not in (1, 2) or not all(map(_is_size, sizes)):
            raise TypeError(f"{who}: matrix_shape={shown(sizes)}; needs a tuple of one or two sizes")
        one_of(who, "axis", self.axis, -1, -2)
        if self.hadamard is not None and not isinstance(self.hadamard, Hadamard):
            raise TypeError(f"{who}: hadamard={shown(self.hadamard)}; needs a jaxlowprec.Hadamard or None")
        self.__dict__[_MADE_BY_HAND] = True

    # Written by hand: jax.tree_util.register_dataclass adds 3 us, a sixth of an eager call on a small array.
    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arrays and an empty child, then the static fields."""
        # Checkpoints hold the children: an array of another rotation has none for signs.
        drawn = (self.signs,) if _is_drawn(self.hadamard) else ()
        children = (self.data, self.scale, self.amax, self.zero_point, *drawn, self.__dict__.get(_PLACE))
        return children, (self.format, self.matrix_shape, self.dtype, self.axis, self.hadamard)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """`tree_flatten` with a name for each child; the empty child's name describes the static fields.

        Orbax saves a tree's arrays and the names of its children, empty ones too, and compares the names when it
        restores. So codes are never restored with another format, axis, rotation or shape than they were saved with.
        """
        children, static = self.tree_flatten()
        rotation = "" if self.hadamard is None else f", rotated by {_without_defaults(self.hadamard)}"
        told = f"{_without_defaults(self.format)} along axis {self.axis} of {self.matrix_shape}{rotation}"
        names = _DRAWN_FIELDS if _is_drawn(self.hadamard) else _FIELDS
        return tuple(zip(map(jax.tree_util.GetAttrKey, (*names, told)), children, strict=True)), static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: tuple[Any, ...]) -> QuantizedArray:
        """The inverse of `tree_flatten`."""
        self = object.__new__(cls)
        fields = self.__dict__
        fields["data"], fields["scale"], fields["amax"], fields["zero_point"], *drawn, fields[_PLACE] = children
        fields["format"], fields["matrix_shape"], fields["dtype"], fields["axis"], fields["hadamard"] = static
        fields["signs"] = drawn[0] if drawn else None
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, batch axes included."""
        return (*self.data.shape[: self.data.ndim - len(self.matrix_shape)], *self.matrix_shape)

    @property
    def ndim(self) -> int:
        """The number of logical axes."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """The number of logical elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all array fields."""
        return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(self))

    @property
    def compression(self) -> float:
        """Bytes of the array that it approximates, divided by its own bytes."""
        return self.size * jnp.dtype(self.dtype).itemsize / max(self.nbytes, 1)

    @property
    def mT(self) -> QuantizedArray:
        """The matrix transpose: the same data in the other orientation; no byte moves."""
        if len(self.matrix_shape) != 2:
            raise ValueError(f"QuantizedArray.mT: shape {self.shape} is a vector; a matrix transpose needs two axes")
        return dataclasses.replace(self, matrix_shape=self.matrix_shape[::-1], axis=-3 - self.axis)

    def __getitem__(self, index: Any) -> QuantizedArray:
        """The whole array for `...`, as in `layer.kernel[...]` of an `nnx.Param`; a TypeError for any part of it."""
        if index is Ellipsis:
            return self
        raise TypeError(
            f"QuantizedArray: [{index!r}] would take a part of what blocks share scales in; only [...] is the whole; "
            "decode it first: q.dequantize()[index]"
        )

    def dequantize(self, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """See `jaxlowprec.dequantize`."""
        from jaxlowprec.ops.dequantize import dequantize  # the op builds on this class

        return dequantize(self, dtype=dtype)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{self!r} is no array of numbers; call q.dequantize()")

    def __repr__(self) -> str:
        try:
            rotated = f", {self.hadamard}" if self.hadamard else ""
            return (
                f"QuantizedArray({self.format}, shape={self.shape}, dtype={jnp.dtype(self.dtype).name}, "
                f"axis={self.axis}{rotated}, {_readable(self.nbytes)}, {self.compression:.2f}x smaller)"
            )
        except (AttributeError, TypeError):  # leaves that are not arrays, as transformations put there
            return f"QuantizedArray({self.format}, data={self.data}, scale={self.scale}, amax={self.amax})"


def _is_drawn(hadamard: Hadamard | None) -> bool:
    return hadamard is not None and hadamard.drawn


def _is_size(size: Any) -> bool:
    return isinstance(size, int | np.integer) or jax.export.is_symbolic_dim(size)


def arrays_of_lines(fmt: Format, lines: int, length: int) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of the codes and of the scales of `lines` lines of length `length`."""
    blocks = fmt.blocks(length)
    codes = -(-blocks * fmt.length // 2) if fmt.packed else length
    scales = () if fmt.scaling == "tensor" else (-(-lines // fmt.length) if fmt.tiles else lines, blocks)
    return [((lines, codes), fmt.data_dtype), (scales, fmt.scale_dtype)]


@functools.lru_cache(maxsize=4096)
def _arrays(
    fmt: Format, matrix: tuple[int, ...], axis: int, hadamard: Hadamard | None, batch: tuple[int, ...]
) -> tuple[Any, ...]:
    """Shape and dtype of each array field; None for a field that is None."""
    lines, length = (1, *matrix) if len(matrix) == 1 else matrix if axis == -1 else matrix[::-1]
    if hadamard is not None:
        length = hadamard.padded(length)
    codes, scales = arrays_of_lines(fmt, lines, length)
    if len(matrix) == 1:
        codes, scales = ((shape[1:], dtype) for shape, dtype in (codes, scales))
    per_line = (lines,) if fmt.row_scaled and len(matrix) == 2 else ()
    amax = (per_line, jnp.float32) if fmt.scaling == "two_level" else None
    zero_point = (scales[0], jnp.uint8) if fmt.has_zero_point else None
    signs = ((4,), jnp.uint32) if _is_drawn(hadamard) else None
    fields = (codes, scales, amax, zero_point, signs)
    return tuple(None if f is None else ((*batch, *f[0]), jnp.dtype(f[1])) for f in fields)


def _described(array: tuple[Any, Any] | None) -> str:
    return "None" if array is None else f"{array[1]}{list(array[0] or ())}"


def check_quantized(who: str, name: str, q: Any) -> None:
    """Raises unless q is a QuantizedArray whose arrays have the shapes and dtypes that its format and shape need.

    Only arrays made by the constructor are checked, and only once; those that ops return are right.

    Raises:
        TypeError: q is not a QuantizedArray.
        ValueError: an array of another shape or dtype.
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(
            f"{who}: {name} is a {type(q).__name__}; needs a QuantizedArray, as jaxlowprec.quantize returns"
        )
    if _MADE_BY_HAND not in q.__dict__:
        return
    fields = [getattr(q, name) for name in _DRAWN_FIELDS]
    found = tuple(None if f is None else (getattr(f, "shape", None), getattr(f, "dtype", None)) for f in fields)
    shape = getattr(q.data, "shape", ())
    batch = shape[: len(shape) - len(q.matrix_shape)]
    if found != (needed := _arrays(q.format, q.matrix_shape, q.axis, q.hadamard, batch)):
        field, has, needs = next((f, h, n) for f, h, n in zip(_DRAWN_FIELDS, found, needed, strict=True) if h != n)
        what = f"{q.format} of {'x'.join(map(str, q.matrix_shape))} along axis {q.axis}"
        raise ValueError(f"{who}: {name}.{field} is {_described(has)}; {what} needs {_described(needs)}")
    q.__dict__.pop(_MADE_BY_HAND, None)


def _without_defaults(value: Any) -> str:
    """`repr` without the fields that have their default: new fields with defaults do not change it.

    >>> from jaxlowprec.arrays.formats import MXFP8
    >>> _without_defaults(MXFP8("e5m2"))
    "MXFP8(element='e5m2')"
    """
    if not dataclasses.is_dataclass(value):
        return repr(value)
    return f"{type(value).__name__}({', '.join(f'{name}={found!r}' for name, found in changed_fields(value).items())})"


def changed_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that do not have their defaults."""
    given = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {field.name: found for field, found in given if found != field.default}


def _readable(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def by_tensor(fmt: Any) -> Any:
    """The format with an amax per tensor."""
    return dataclasses.replace(fmt, row_scaled=False)


def lines_of(x: jax.Array, axis: int) -> jax.Array:
    """The lines of x [..., M, K] along `axis` as matrices [..., L, 1, C]."""
    return (jnp.swapaxes(x, -1, -2) if axis == -2 else x)[..., None, :]


def as_matrices(q: QuantizedArray) -> QuantizedArray:
    """q [..., M, K] with an amax per line as its L lines [..., L, 1, C], along axis -1, with an amax per matrix."""
    shape = 1, q.matrix_shape[q.axis]
    data, scale = q.data[..., None, :], q.scale[..., None, :]
    return dataclasses.replace(q, data=data, scale=scale, format=by_tensor(q.format), matrix_shape=shape, axis=-1)
