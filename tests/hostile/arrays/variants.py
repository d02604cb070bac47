"""Which op on arrays of which shape, dtype and options: drawn by a seed, compiled once and run on many arrays.

A variant makes operands for `count` arrays at once, along a leading axis, and calls the op natively or by reference.
What an array gives depends on it alone, so that each is a case of its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxlowprec as jlp
from jaxlowprec.arrays.quantized_array import arrays_of_lines
from jaxlowprec.ops.grouped_matmul.api import group_amaxes, multiply_groups, quantize_groups
from jaxlowprec.ops.grouped_matmul.weight_only import grouped_weight_only
from tests.helpers import FORMATS
from tests.hostile.arrays.data import DTYPES, bytes_of_any_kind, float32_numbers, numbers

SIZES = (1, 2, 3, 5, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 160, 255, 256, 257, 300, 511, 513)
LEADING = ((), (), (), (), (1,), (2,), (2, 3), (1, 1, 2), (3, 1, 1, 2))
MOST_ELEMENTS = 6000
HADAMARDS = (jlp.Hadamard(), jlp.Hadamard(), jlp.Hadamard(16, None), jlp.Hadamard(32), jlp.Hadamard(64, (1, -1)))
INT4S = tuple(
    jlp.Int4(group, symmetric, dtype, pad=True)
    for group in (1, 2, 3, 7, 16, 32, 64, 96, 128)
    for symmetric in (True, False)
    for dtype in ("bfloat16", "float16")
)
FOUR_BITS = [fmt for fmt in FORMATS if fmt.element == "e2m1"]
ROWWISE = [fmt for fmt in FORMATS if not fmt.tiles]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One op with its options.

    Attributes:
        text: what it is, for a report.
        operands: random numbers and how many arrays -> NumPy arrays, each with those in front.
        call: an implementation and those operands -> a list of arrays, likewise.
        any_nan: a NaN of the results may be any NaN.
    """

    text: str
    operands: Callable[[np.random.Generator, int], tuple[np.ndarray, ...]]
    call: Callable[..., list[jax.Array]]
    any_nan: bool = False


def pick(rng, values):
    """One of them, as it is."""
    return values[rng.integers(len(values))]


def shape_of(rng, multiple=1):
    """[..., R, C] of a few thousand elements; of no elements once in a while. R and C are multiples."""
    leading = pick(rng, LEADING)
    size = int(np.prod(leading))
    while True:
        rows, columns = (-(-pick(rng, SIZES) // m) * m for m in ((multiple, multiple) if multiple > 1 else (1, 1)))
        if size * rows * columns <= MOST_ELEMENTS * multiple:
            break
    if rng.random() < 0.03:
        rows, columns = pick(rng, ((0, columns), (rows, 0)))
    return (*leading, rows, columns)


def _words(rng, count, batch):
    return rng.integers(0, 2**32, (count, *batch, 2), np.uint32)


def quantize(rng):
    """Along one axis or both."""
    fmt, dtype, shape = pick(rng, FORMATS), pick(rng, tuple(DTYPES)), shape_of(rng)
    batch = shape[:-2]
    direction = pick(rng, ("rows", "columns", "both"))
    hadamard = pick(rng, HADAMARDS) if rng.random() < 0.3 else False
    stochastic, extra = rng.random() < 0.3, rng.random()
    given = None
    if extra < 0.3 and fmt.has_tensor_scale:
        given = "encode_scale" if fmt.scaling == "tensor" and extra < 0.15 else "amax"
    offset = (16 * int(rng.integers(0, 2**20)), 16 * int(rng.integers(0, 2**20))) if stochastic else (0, 0)

    def operands(rng, count):
        found = [numbers(rng, count, shape, dtype)]
        found += [_words(rng, count, batch)] * stochastic
        return (*found, *[float32_numbers(rng, (count, *batch))] * (given is not None))

    def call(implementation, x, *rest):
        options: dict[str, Any] = {"implementation": implementation, "offset": offset}
        if stochastic:
            options |= {"rounding": "stochastic", "key": rest[0]}
        if given is not None:
            options[given] = (rest[-1], rest[-1]) if (given, direction) == ("amax", "both") else rest[-1]
        if direction == "both":
            return jax.tree.leaves(jlp.quantize_both(x, fmt, hadamard_columnwise=hadamard, **options))
        return jax.tree.leaves(
            jlp.quantize(x, fmt, axis=-1 if direction == "rows" else -2, hadamard=hadamard, **options)
        )

    text = f"quantize {direction} of {dtype}{list(shape)} to {fmt!r}, hadamard={hadamard}, stochastic={stochastic}"
    return Variant(f"{text}, offset={offset}, given={given}", operands, call)


def quantize_split_rows(rng):
    """Both ways, of one tensor whose rows are split."""
    fmt, dtype, parts = pick(rng, FORMATS), pick(rng, tuple(DTYPES)), int(rng.integers(1, 4))
    rows = fmt.length if fmt.scaling != "tensor" else pick(rng, SIZES[:12])
    shape = (parts, rows, pick(rng, SIZES[:16]))

    def operands(rng, count):
        return (numbers(rng, count, shape, dtype),)

    def call(implementation, x):
        return jax.tree.leaves(jlp.quantize_both(x, fmt, rows_split=True, implementation=implementation))

    return Variant(f"quantize_both of split rows of {dtype}{list(shape)} to {fmt!r}", operands, call)


def _arrays(fmt, shape):
    """Shapes of the fields of a rowwise QuantizedArray of that shape."""
    codes, scales = (dims for dims, _ in arrays_of_lines(fmt, *shape[-2:]))
    return (*shape[:-2], *codes), (*shape[:-2], *scales)


def _scales(rng, fmt, shape, tame):
    """Scales that decode; any bytes, unless `tame`: then powers of two and E4M3 numbers of sizes that products hold."""
    if isinstance(fmt, jlp.Int4):
        return np.exp2(rng.uniform(-8, 8, shape)).astype(DTYPES[fmt.scale_dtype])
    if fmt.scaling in ("two_level", "e8m0"):
        low, high = (0, 0x7F) if fmt.scaling == "two_level" else (107, 148)
        given = rng.integers(low, high, shape).astype(np.uint8) if tame else bytes_of_any_kind(rng, shape)
        not_a_number = 0x7F if fmt.scaling == "two_level" else 0xFF
        return np.where(rng.random(shape) < rng.choice([0, 0.01]), not_a_number, given).astype(np.uint8)
    exponents = rng.uniform(-8, 8, shape)
    return np.exp2(np.round(exponents) if fmt.power_of_two else exponents).astype(np.float32)


def _codes(rng, fmt, shape, tame):
    codes = bytes_of_any_kind(rng, shape)
    if tame and not fmt.packed:  # finite ones
        largest = {"e4m3": 0x7E, "e5m2": 0x7B}[fmt.element]
        codes = np.where(codes & 0x7F > largest, largest, codes).astype(np.uint8)
    return codes


def _quantized_operands(rng, count, fmt, shape, tame):
    """Data, scale and, where the format has them, amax or zero points."""
    data, scale = ((count, *dims) for dims in _arrays(fmt, shape))
    found = [_codes(rng, fmt, data, tame), _scales(rng, fmt, scale, tame)]
    if fmt.scaling == "two_level":
        amax = np.exp2(rng.uniform(-8, 8, (count, *shape[:-2]))).astype(np.float32)
        found.append(amax if tame else np.abs(float32_numbers(rng, amax.shape)))
    if isinstance(fmt, jlp.Int4) and not fmt.symmetric:
        found.append(rng.integers(0, 16, scale, np.uint8))
    return found


def _as_quantized(fmt, shape, dtype, arrays, hadamard=None):
    data, scale, *rest = arrays
    data = jax.lax.bitcast_convert_type(data, fmt.data_dtype) if data.dtype != fmt.data_dtype else data
    scale = jax.lax.bitcast_convert_type(scale, fmt.scale_dtype) if scale.dtype == jnp.uint8 else scale
    amax = rest[0] if fmt.scaling == "two_level" else None
    zero = rest[0] if rest and amax is None else None
    return jlp.QuantizedArray(data, scale, amax, zero, fmt, tuple(shape[-2:]), jnp.dtype(dtype), -1, hadamard)


def dequantize(rng):
    """Of bytes that nothing was quantised to."""
    fmt, dtype, shape = pick(rng, FORMATS + INT4S), pick(rng, tuple(DTYPES)), shape_of(rng)

    def operands(rng, count):
        return tuple(_quantized_operands(rng, count, fmt, shape, tame=False))

    def call(implementation, *arrays):
        return [jlp.dequantize(_as_quantized(fmt, shape, dtype, arrays), implementation=implementation)]

    return Variant(f"dequantize to {dtype}{list(shape)} from {fmt!r}", operands, call, any_nan=True)


def int4(rng):
    """Quantise, and fake-quantise where the dtype can hold it."""
    fmt, dtype, shape = pick(rng, INT4S), pick(rng, tuple(DTYPES)), shape_of(rng)
    axis, fake = pick(rng, (-1, -2)), dtype in ("float32", fmt.scale_dtype) and rng.random() < 0.5

    def operands(rng, count):
        return (numbers(rng, count, shape, dtype),)

    def call(implementation, x):
        function = jlp.fake_quantize if fake else jlp.quantize
        return jax.tree.leaves(function(x, fmt, axis=axis, implementation=implementation))

    what = "fake_quantize" if fake else "quantize"
    return Variant(f"{what} {dtype}{list(shape)} along {axis} to {fmt!r}", operands, call, any_nan=True)


def hadamard(rng):
    """The transform, along either axis, and its inverse."""
    rotation, dtype, vertical, inverse = (
        pick(rng, HADAMARDS),
        pick(rng, tuple(DTYPES)),
        rng.random() < 0.5,
        rng.random() < 0.5,
    )
    shape = shape_of(rng, rotation.size)

    def operands(rng, count):
        return (numbers(rng, count, shape, dtype),)

    def call(implementation, x):
        options = {"axis": -2 if vertical else -1, "size": rotation.size, "signs": rotation.signs}
        return [jlp.hadamard_transform(x, **options, inverse=bool(inverse), implementation=implementation)]

    text = f"{rotation!r} of {dtype}{list(shape)}, vertical={vertical}, inverse={inverse}"
    return Variant(text, operands, call, any_nan=True)


def _epilogue(rng, shape, columns):
    """Options of scaled_matmul, and the operands that they need."""
    batch = shape[:-2]
    with_bias, added, activation = rng.random() < 0.4, rng.random() < 0.3, pick(rng, (None, None, "gelu", "dgelu"))
    out_dtype = pick(rng, tuple(DTYPES))
    result = (*shape[:-1], columns)
    needed = [(*batch, columns)] * with_bias + [result] * added + [result] * (activation == "dgelu")

    def operands(rng, count):
        return [rng.standard_normal((count, *dims)).astype(np.float32) * 4 for dims in needed]

    def options(extras):
        extras = list(extras)
        found = {
            "activation": activation,
            "preferred_element_type": out_dtype,
            "return_pre_activation": activation == "gelu",
        }
        found |= {"bias": extras.pop(0)} if with_bias else {}
        found |= {"accumulate": extras.pop(0)} if added else {}
        return found | ({"activation_input": extras.pop(0)} if activation == "dgelu" else {})

    text = f"bias={with_bias}, accumulate={added}, activation={activation} to {out_dtype}"
    return operands, options, text


def scaled_matmul(rng):
    """Of two 4-bit operands: those whose bytes are defined."""
    a = pick(rng, FOUR_BITS)
    b = pick(rng, [f for f in FOUR_BITS if (f.scaling, f.scale_rule) == (a.scaling, a.scale_rule)])
    *batch, rows, depth = shape_of(rng)
    columns = pick(rng, SIZES[:14])
    a_shape, b_shape = (*batch, rows, depth), (*batch, columns, depth)
    extras, options, text = _epilogue(rng, a_shape, columns)
    fields = 3 if a.scaling == "two_level" else 2

    def operands(rng, count):
        found = [_quantized_operands(rng, count, f, s, tame=True) for f, s in ((a, a_shape), (b, b_shape))]
        return (*found[0], *found[1], *extras(rng, count))

    def call(implementation, *arrays):
        first = _as_quantized(a, a_shape, "bfloat16", arrays[:fields])
        second = _as_quantized(b, b_shape, "bfloat16", arrays[fields : 2 * fields])
        return jax.tree.leaves(
            jlp.scaled_matmul(first, second, implementation=implementation, **options(arrays[2 * fields :]))
        )

    return Variant(f"{a!r}{list(a_shape)} x {b!r}{list(b_shape)}, {text}", operands, call, any_nan=True)


def weight_only(rng):
    """16-bit activations, whose products are exact, by a weight in any format."""
    fmt, dtype = pick(rng, FORMATS + INT4S), pick(rng, ("bfloat16", "float16"))
    *batch, rows, depth = shape_of(rng)
    columns = pick(rng, SIZES[:14])
    x_shape, w_shape = (*batch, rows, depth), (*batch, columns, depth)
    extras, options, text = _epilogue(rng, x_shape, columns)

    def operands(rng, count):
        x = rng.standard_normal((count, *x_shape)) * np.exp2(rng.uniform(-4, 4))
        special = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan], x.shape)
        x = np.where(rng.random(x.shape) < rng.choice([0, 0.001]), special, x).astype(np.float32).astype(DTYPES[dtype])
        return (x, *extras(rng, count), *_quantized_operands(rng, count, fmt, w_shape, tame=True))

    def call(implementation, x, *arrays):
        fields = 2 + (fmt.scaling == "two_level") + (isinstance(fmt, jlp.Int4) and not fmt.symmetric)
        given = len(arrays) - fields
        w = _as_quantized(fmt, w_shape, dtype, arrays[given:])
        return jax.tree.leaves(jlp.scaled_matmul(x, w, implementation=implementation, **options(arrays[:given])))

    return Variant(f"{dtype}{list(x_shape)} x {fmt!r}{list(w_shape)}, {text}", operands, call, any_nan=True)


def _group_sizes(rng, count, rows, groups):
    sizes = rng.integers(0, max(2, 2 * rows // groups + 1), (count, groups))
    return np.where(rng.random(sizes.shape) < 0.1, rng.choice([-7, 0, 1, 10_000], sizes.shape), sizes).astype(np.int32)


def grouped_quantize(rng):
    """Rows in groups, both ways, with their amaxes."""
    fmt, dtype, groups = pick(rng, ROWWISE), pick(rng, tuple(DTYPES)), int(rng.integers(1, 7))
    rows, columns = pick(rng, SIZES[:20]), pick(rng, SIZES[:14])
    rotation = jlp.Hadamard() if fmt.scaling == "two_level" and rng.random() < 0.5 else None
    stochastic = rng.random() < 0.3
    scaled = fmt.scaling == "tensor" and rng.random() < 0.5

    def operands(rng, count):
        found = [numbers(rng, count, (rows, columns), dtype), _group_sizes(rng, count, rows, groups)]
        found += [_words(rng, count, (groups,))] * stochastic
        return (*found, *[numbers(rng, count, (groups,), "float32")] * scaled)

    def call(implementation, x, sizes, *further):
        options = {"rowwise": True, "columnwise": True, "hadamard": rotation, "implementation": implementation}
        options |= {"words": further[0] if stochastic else None, "encode_scale": further[-1] if scaled else None}
        both = quantize_groups(x, sizes, fmt, **options)
        return jax.tree.leaves([both, group_amaxes(x, sizes, True, rotation, implementation)])

    text = f"{groups} groups of {dtype}[{rows}, {columns}] to {fmt!r}, hadamard={rotation}, stochastic={stochastic}"
    return Variant(f"{text}, scaled={scaled}", operands, call)


def grouped_product(rng):
    """Rows in groups, in 16 bits or 4, by a weight for each group."""
    quantised = rng.random() < 0.5
    x_fmt = pick(rng, [f for f in FOUR_BITS if not f.tiles])
    alike = [f for f in FOUR_BITS if (f.scaling, f.scale_rule) == (x_fmt.scaling, x_fmt.scale_rule)]
    fmt = pick(rng, alike if quantised else FORMATS + INT4S)
    groups, rows, depth, columns = int(rng.integers(1, 6)), *(pick(rng, SIZES[:n]) for n in (18, 14, 12))
    shape, out_dtype = (groups, columns, depth), pick(rng, tuple(DTYPES))

    def operands(rng, count):
        x = rng.standard_normal((count, rows, depth)).astype(np.float32).astype(DTYPES["bfloat16"])
        weight = _quantized_operands(rng, count, fmt, shape, tame=True)
        return (x, _group_sizes(rng, count, rows, groups), *weight)

    def call(implementation, x, sizes, *weight):
        w = _as_quantized(fmt, shape, "bfloat16", weight)
        if not quantised:
            return [grouped_weight_only(x, w, sizes, None, out_dtype, implementation)]
        row, _ = quantize_groups(x, sizes, x_fmt, rowwise=True, columnwise=False, implementation=implementation)
        return [multiply_groups(row, w, None, out_dtype, implementation)]

    what = f"{x_fmt!r}" if quantised else "bfloat16"
    return Variant(f"{groups} groups of {what}[{rows}, {depth}] x {fmt!r}{list(shape)}", operands, call, any_nan=True)


KINDS = (
    *[quantize] * 8,
    quantize_split_rows,
    *[dequantize] * 3,
    *[int4] * 3,
    hadamard,
    *[scaled_matmul] * 2,
    *[weight_only] * 2,
    *[grouped_quantize] * 2,
    grouped_product,
)


def variant(seed, index):
    """The variant of that number of a seed's."""
    rng = np.random.default_rng([seed, index])
    return pick(rng, KINDS)(rng)
