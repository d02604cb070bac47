"""The GEMM's custom call on NVIDIA GPUs: tensor cores multiply; XLA applies the epilogue parts that cuBLASLt cannot do
exactly.

`xla_ffi/cuda/matmul/matmul_plan.h` says how each pair of formats is multiplied on which GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import MXFP4, MXFP8, Format
from jaxlowprec.arrays.layouts import pad_to_multiples
from jaxlowprec.ops import scale_order
from jaxlowprec.ops.scaled_matmul import reference
from jaxlowprec.wiring import native

if TYPE_CHECKING:
    from jaxlowprec.ops.scaled_matmul.op import MatmulSpec

# Multiples that cuBLASLt needs: rows of codes and of the result are whole 16 bytes, K is whole blocks of 32, and with
# float32 block scales, also those that MX scales become, rows of scales are whole 16 bytes. K of MXFP4 by FP8 blocks is
# whole blocks of these.
_DEPTH, _COLUMNS, _SCALED_ROWS, _SCALED_DEPTH = 32, 16, 4, 128

# Least rows of an `a` with float32 block scales. cuBLASLt's manual allows 4, but few of its algorithms have so narrow a
# tile; a row of zero codes costs next to nothing.
_LEAST_SCALED_ROWS = 16

# Compute capabilities with different needs. A program exported without a GPU may run on any of these.
_CAPABILITIES = (80, 89, 90, 100)


def _plans(
    formats: tuple[dict, dict], rows: int, columns: int, depth: int, accumulate: bool, float32_sums: bool
) -> tuple[str, int]:
    """Why the GPUs of this process have no such GEMM, or ""; and the bytes of workspace. `formats`: as attributes."""
    plan = native.library().module.cuda_matmul_plan  # type: ignore[union-attr]
    capability = native.compute_capability()
    capabilities = _CAPABILITIES if capability is None else (round(10 * capability),)
    plans = [plan(*formats, rows, columns, depth, accumulate, float32_sums, c) for c in capabilities]
    possible = [workspace for problem, workspace, *_ in plans if not problem]
    return ("", max(possible)) if possible else plans[0][:2]


def _as_mx(fmt: Format, capability: float) -> bool:
    """Whether FP8 blocks go to the tensor cores as MX blocks on a GPU of that compute capability."""
    return fmt.scaling == "float32" and fmt.power_of_two and capability >= 10


def _as_taken(fmt: Format, capability: float) -> Format:
    """The format that the tensor cores get: `_as_mx`, or the same."""
    return MXFP8(fmt.element) if _as_mx(fmt, capability) else fmt  # type: ignore[arg-type]


def _rebases(a_format: Format, b_format: Format, capability: float) -> bool:
    """Whether the kernels give MXFP4 to the tensor cores of a GPU of that compute capability as FP8 blocks of 128."""
    return capability == 9 and all(f.scaling == "e8m0" and f.packed for f in (a_format, b_format))


def _multiples(a_format: Format, b_format: Format, rows: int, rebased: bool) -> tuple[int, int]:
    """Multiples that the rows of a and K are padded to. `rebased`: both operands are."""
    least = _LEAST_SCALED_ROWS if rows < _LEAST_SCALED_ROWS else _SCALED_ROWS
    if a_format.scaling == "float32":
        return least, _DEPTH if b_format.scaling == "float32" else _SCALED_DEPTH
    if a_format.scaling == "rows" and not b_format.packed:
        return _SCALED_ROWS, _DEPTH
    return least if rebased else 1, _DEPTH


def _planned(a_format: Format, b_format: Format, rows: int, columns: int, depth: int) -> tuple[int, int, int]:
    """The sizes that decide how operands are multiplied: of FP8 blocks by MXFP4 the padded ones."""
    if a_format.scaling == b_format.scaling or a_format.scaling != "float32":
        return rows, columns, depth
    multiples = _multiples(a_format, b_format, rows, False)
    padded = (
        -(-n // m) * m for n, m in zip((rows, columns, depth), (multiples[0], _COLUMNS, multiples[1]), strict=True)
    )
    return tuple(padded)  # type: ignore[return-value]


def route(a_format: Format, b_format: Format, capability: int) -> tuple[str, str]:
    """Why GPUs of that compute capability (90 for 9.0) cannot multiply many rows, or ""; and how they do, in words."""
    a_format, b_format = (_as_taken(f, capability / 10) for f in (a_format, b_format))
    plan = native.library().module.cuda_matmul_plan  # type: ignore[union-attr]
    problem, _, words, _ = plan(a_format.attributes, b_format.attributes, 4096, 4096, 4096, False, False, capability)
    return problem, words


def sum_errors(
    a_format: Format, b_format: Format, rows: int, columns: int, depth: int, float32_sums: bool, capability: int
) -> tuple[float, float]:
    """How far a GEMM's sums may be from the exact ones on GPUs of that compute capability (90 for 9.0).

    Relative to the sum of the terms' magnitudes, before the result is rounded: the bound that tests use for random
    operands, and the bound that no operands exceed. `xla_ffi/cuda/matmul/gemm_error.h` has the numbers,
    docs/explanation/exact_sums.md derives them and says what re-based operands add.
    """
    sizes = _planned(a_format, b_format, rows, columns, depth)
    if not float32_sums:
        a_format, b_format = (_as_taken(f, capability / 10) for f in (a_format, b_format))
    plan = native.library().module.cuda_matmul_plan  # type: ignore[union-attr]
    return plan(a_format.attributes, b_format.attributes, *sizes, False, float32_sums, capability)[3]


def _padded(data: jax.Array, scale: jax.Array, fmt: Format, rows: int, depth: int) -> tuple[jax.Array, jax.Array]:
    """An operand with its rows padded to a multiple of `rows`, its K to one of `depth`: zero codes add nothing."""
    data = pad_to_multiples(data, rows, depth // 2 if fmt.packed else depth)
    if fmt.scaling == "rows":
        scale = pad_to_multiples(scale.astype(jnp.float32), rows, 1)
    elif fmt.scaling != "tensor":
        scale = pad_to_multiples(scale, 1 if fmt.tiles else rows, max(1, depth // fmt.length))
    return data, scale


def _as_mxfp8(scale: jax.Array, fmt: Format, rows: int, depth: int) -> tuple[jax.Array, Format]:
    """The scales of FP8 blocks, powers of two, as those of MX blocks: the exponent of each, for its four blocks of 32.

    `depth` is a multiple of 32. Scales that are not finite stay NaN.
    """
    exponents = (jax.lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)
    exponents = jnp.repeat(exponents, 4, axis=-1)[..., : depth // 32]
    if fmt.tiles:
        exponents = jnp.repeat(exponents, 4, axis=-2)[..., : -(-rows // 32), :]
    as_mx = MXFP8(fmt.element, (32, 32) if fmt.tiles else (1, 32))  # type: ignore[arg-type]
    return jax.lax.bitcast_convert_type(exponents, as_mx.scale_dtype), as_mx


def _by_lines(scale: jax.Array, fmt: Format, rows: int) -> tuple[jax.Array, Format]:
    """The scales of a 4-bit weight [..., rows, K]: in square tiles, repeated for each line of a tile."""
    if not fmt.tiles:
        return scale, fmt
    codes = jnp.repeat(jax.lax.bitcast_convert_type(scale, jnp.uint8), fmt.length, axis=-2)[..., :rows, :]
    return jax.lax.bitcast_convert_type(codes, scale.dtype), MXFP4()


def why_not(spec: MatmulSpec, a_data: jax.Array, b_data: jax.Array) -> str:
    """Why the GPUs of this process have no GEMM for these operands; empty if they have one, or if there is no GPU."""
    if not all(isinstance(n, int) for n in (*a_data.shape, *b_data.shape)):
        return "shapes are symbolic, but the workspace depends on their sizes: export each size by itself"
    depth = a_data.shape[-1] * (1 + spec.a_format.packed)
    sizes = _planned(spec.a_format, spec.b_format, a_data.shape[-2], b_data.shape[-2], depth)
    formats = spec.a_format.attributes, spec.b_format.attributes
    return _plans(formats, *sizes, False, spec.float32_sums)[0]


def matmul(
    spec: MatmulSpec, a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array, *extras: jax.Array
) -> list[jax.Array]:
    """The op of `op.py`, on the operands that it documents."""
    rest = list(extras)
    a_fmt, b_fmt = spec.a_format, spec.b_format
    rows, columns, batch = a_data.shape[-2], b_data.shape[-2], a_data.shape[:-2]
    alpha = None
    if spec.two_level:
        alpha = reference.alpha(rest.pop(0), rest.pop(0))
    elif a_fmt.scaling == "tensor":
        alpha = a_scale * b_scale
    epilogue = spec.epilogue
    bias, accumulate, _ = epilogue.split(rest)

    capability = native.compute_capability() or 0
    if by_groups := a_fmt.scaling == "rows" and b_fmt.packed:  # a kernel of the library: any number of rows
        b_scale, b_fmt = _by_lines(b_scale, b_fmt, columns)
    rebased = not spec.float32_sums and _rebases(a_fmt, b_fmt, capability)
    a_rows, multiple = _multiples(a_fmt, b_fmt, rows, rebased)
    a_data, a_scale = _padded(a_data, a_scale, a_fmt, a_rows, multiple)
    b_data, b_scale = _padded(b_data, b_scale, b_fmt, _COLUMNS, multiple)
    padded = (a_data.shape[-2], b_data.shape[-2])
    depth = a_data.shape[-1] * (1 + a_fmt.packed)
    if not spec.float32_sums:
        a_scale, a_fmt = _as_mxfp8(a_scale, a_fmt, padded[0], depth) if _as_mx(a_fmt, capability) else (a_scale, a_fmt)
        b_scale, b_fmt = _as_mxfp8(b_scale, b_fmt, padded[1], depth) if _as_mx(b_fmt, capability) else (b_scale, b_fmt)
    # cuBLASLt accumulates before an activation, its biases are bfloat16, and it does not round a product to float16: in
    # these cases it returns the float32 sums, and XLA applies the epilogue.
    plain = bias is None and epilogue.activation is None and epilogue.out_dtype in (jnp.bfloat16, jnp.float32)
    fits = accumulate is None or (accumulate.dtype == epilogue.out_dtype and padded == (rows, columns))
    whole = plain and fits
    added = accumulate if whole else None
    operands = [a_data, a_scale, b_data, b_scale]
    if alpha is not None:
        beta = jnp.full_like(alpha, added is not None)
        operands.append(jnp.stack([alpha, beta], axis=-1))
    if added is not None:
        operands.append(added)
    column_major = [not spec.float32_sums and scale_order.is_column_major(fmt) for fmt in (a_fmt, b_fmt)]
    column_major[1] |= by_groups
    a_format, b_format = map(scale_order.attributes, (a_fmt, b_fmt), column_major)
    layouts = [
        *scale_order.layouts(operands[:2], column_major[0]),
        *scale_order.layouts(operands[2:4], column_major[1]),
    ]
    layouts += [None] * len(operands[4:])
    _, workspace = _plans((a_format, b_format), *padded, depth, added is not None, spec.float32_sums)
    results = [
        jax.ShapeDtypeStruct((*batch, *padded), epilogue.out_dtype if whole else jnp.float32),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    ]
    y, _ = jax.ffi.ffi_call("jaxlowprec_scaled_matmul", results, input_layouts=layouts)(
        *operands,
        a_format=a_format,
        b_format=b_format,
        accumulate=added is not None,
        float32_sums=spec.float32_sums,
    )
    y = y[..., :rows, :columns]
    if whole:
        return [y]
    return epilogue.finish(y, rest)
