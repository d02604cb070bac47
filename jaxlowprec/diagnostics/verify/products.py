"""GEMMs against float64: every pair of formats within the bound of the way that multiplies it (numerics.md 9.3)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arrays.formats import ELEMENTS, MXFP4, MXFP8, NVFP4, Float8Block, Float8Tensor, Format, Int4
from jaxlowprec.arrays.row_formats import Float8Rows, Int8Rows
from jaxlowprec.diagnostics.verify import inputs
from jaxlowprec.diagnostics.verify.quantisers import name_of
from jaxlowprec.ops.checks import Implementation, default_implementation
from jaxlowprec.ops.grouped_matmul.api import multiply_groups, multiply_within_groups, quantize_groups
from jaxlowprec.ops.grouped_matmul.weight_only import grouped_weight_only
from jaxlowprec.ops.quantize.api import quantize
from jaxlowprec.ops.scaled_matmul import cuda, portable
from jaxlowprec.ops.scaled_matmul.api import scaled_matmul
from jaxlowprec.wiring import native

M, K, N = 128, 512, 96
_ROUNDINGS = 32 * 2.0**-24  # of scales and epilogue
_HIGHEST = 8 * 2.0**-24  # of six passes of bfloat16: what they leave out of a product (numerics.md 9.3)

_SQUARE, _ANY = Float8Block(block=(128, 128)), Float8Block(power_of_two=False)
PAIRS: tuple[tuple[Format, Format], ...] = (
    (NVFP4(), NVFP4()),
    (NVFP4(), NVFP4((16, 16))),
    (NVFP4(row_scaled=True), NVFP4()),
    (MXFP8(), MXFP8()),
    (MXFP8("e5m2"), MXFP8(block=(32, 32))),
    (MXFP8(), MXFP4()),
    (MXFP4(), MXFP8()),
    (MXFP4(), MXFP4((32, 32))),
    (Float8Block(), Float8Block()),
    (Float8Block("e5m2"), _SQUARE),
    (_ANY, Float8Block(block=(128, 128), power_of_two=False)),
    (Float8Block(), MXFP4((32, 32))),
    (_ANY, MXFP4()),
    (Float8Tensor(), Float8Tensor()),
    (Float8Tensor("e5m2"), Float8Tensor()),
    (Float8Rows(), Float8Rows(scale_dtype="bfloat16")),
    (Int8Rows(), Int4()),
    (Int8Rows(), MXFP4()),
)
WEIGHTS: tuple[tuple[str, Format], ...] = (
    *(("bfloat16", fmt) for fmt in (NVFP4(), MXFP8(), MXFP4(), Float8Block(), _ANY, Float8Tensor())),
    *(("bfloat16", fmt) for fmt in (Int4(), Int4(32, symmetric=False), Int4(scale_dtype="float16"))),
    ("float32", NVFP4()),
    ("float32", _ANY),
)
IN_GROUPS = (NVFP4(), MXFP8(), Float8Block(), Float8Tensor(), Float8Rows(), Int8Rows())


class RunOn(NamedTuple):
    """A device, and the code that is verified there.

    Attributes:
        device: where.
        implementation: see `jaxlowprec.quantize`.
    """

    device: jax.Device
    implementation: Implementation = None

    @property
    def platform(self) -> str:
        """The platform as kernels are registered for it."""
        name = self.device.platform
        return name if name != "gpu" else "cuda" if native.compute_capability() else "rocm"


class Product(NamedTuple):
    """A product and what it should be.

    Attributes:
        actual: of the device.
        exact: in float64.
        bound: how far each element of `actual` may be from `exact`.
    """

    actual: np.ndarray
    exact: np.ndarray
    bound: np.ndarray


def decoded(q: Any, served: bool = True) -> np.ndarray:
    """The numbers of a quantised matrix, in lines along its quantised axis, rotated as it is; in float64, where no step
    rounds. `served`: those of Int4 are rounded to the scale's dtype."""
    fmt, data, scale = q.format, np.asarray(q.data), np.asarray(q.scale)
    if fmt.packed:
        codes = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
        values = codes.astype(np.float64)
        if fmt.element == "int4":
            zero = 8 if fmt.symmetric else np.repeat(np.asarray(q.zero_point), fmt.length, -1)[..., : codes.shape[-1]]
            values = values - zero
        else:
            values = codes.view(ELEMENTS[fmt.element].dtype).astype(np.float64)
    else:
        values = data.astype(np.float64)
    scales = scale.astype(np.float64)
    if fmt.scaling == "tensor":
        return values * scales[..., None, None]
    lines, length = values.shape[-2:]
    if fmt.scaling == "rows":
        return values * scales
    scales = np.repeat(np.repeat(scales, fmt.block[0], -2)[..., :lines, :], fmt.length, -1)[..., :length]
    if fmt.element == "int4" and served:
        return (values * scales).astype(np.float32).astype(fmt.scale_dtype).astype(np.float64)
    values = values * scales
    if q.amax is None:
        return values
    amax = np.asarray(q.amax, np.float64)
    return values * (amax[..., :, None] if fmt.row_scaled else amax[..., None, None]) / 2688


def sum_error(a: Format | str, b: Format, run_on: RunOn, depth: int = K, highest: bool = False) -> float:
    """How far a sum may be from the exact one, relative to the sum of the terms' magnitudes.

    Arguments:
        a: a format, or the dtype of an array in high precision.
        run_on: the device, and what computes there.
        depth: K.
        highest: `precision="highest"`.
    """
    float32 = depth * 2.0**-24
    platform, chosen = run_on.platform, run_on.implementation or default_implementation()
    kernels = chosen in (None, "ffi") and platform in native.platforms()
    if isinstance(a, Format) and kernels and platform == "cuda":
        capability = round(10 * (native.compute_capability() or 0))
        if not cuda.route(a, b, capability)[0]:
            return cuda.sum_errors(a, b, M, N, depth, highest, capability)[0]
    if chosen == "reference" or (platform == "cpu" and chosen is None) or (kernels and platform == "cpu"):
        return float32
    exact = portable.is_exact_in_bfloat16(b) and (b.served_dtype or "bfloat16") == "bfloat16"
    exact = exact and (a == "bfloat16" if isinstance(a, str) else portable.is_exact_in_bfloat16(a))
    return float32 if exact else float32 + _HIGHEST


def _of(actual: Any, a: np.ndarray, b: np.ndarray, error: float) -> Product:
    """a @ b.T, of the last two axes."""
    b = np.swapaxes(b, -1, -2)
    exact, sizes = a @ b, np.abs(a) @ np.abs(b)
    return Product(np.asarray(actual, np.float64), exact, (error + _ROUNDINGS) * sizes)


def _operands(run_on: RunOn, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
    a, b = inputs.normal((M, K), 100), inputs.normal((N, K), 101)
    a = np.ldexp(a, np.arange(M)[:, None] % 9 - 4)
    return jax.device_put((a.astype(dtype), b.astype(dtype)), run_on.device)


def _pair(a_format: Format, b_format: Format, precision: Any, run_on: RunOn) -> Product:
    x, w = _operands(run_on)
    by = run_on.implementation
    a, b = quantize(x, a_format, implementation=by), quantize(w, b_format, implementation=by)
    y = scaled_matmul(a, b, preferred_element_type=jnp.float32, precision=precision, implementation=by)
    error = sum_error(a_format, b_format, run_on, highest=precision is not None)
    return _of(y, decoded(a), decoded(b, served=a_format.element != "int8"), error)


def _weight_only(dtype: str, fmt: Format, run_on: RunOn) -> Product:
    x, w = _operands(run_on, jnp.dtype(dtype))
    b = quantize(w, fmt, implementation=run_on.implementation)
    y = scaled_matmul(x, b, preferred_element_type=jnp.float32, implementation=run_on.implementation)
    return _of(y, np.asarray(x, np.float64), decoded(b), sum_error(dtype, fmt, run_on))


_SIZES = np.array([40, 0, 60, 20], np.int32)  # and rows in no group


def _split(rows: np.ndarray) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(_SIZES))[: len(_SIZES)]


def _by_groups(actual: Any, products: list[Product]) -> Product:
    """The products of the groups, one below the other; rows in no group are zeros."""
    rest = np.zeros((M - int(_SIZES.sum()), N))
    exact, bound = (np.concatenate([*(p[i] for p in products), rest]) for i in (1, 2))
    return Product(np.asarray(actual, np.float64), exact, bound)


def _grouped(fmt: Format, run_on: RunOn) -> Product:
    x, w = _operands(run_on)
    sizes = jax.device_put(_SIZES, run_on.device)
    by = run_on.implementation
    b = quantize(jnp.stack([w, -w, w * 2, w]), fmt, implementation=by)
    a, _ = quantize_groups(x, sizes, fmt, rowwise=True, columnwise=False, implementation=by)
    y = multiply_groups(a, b, None, jnp.float32, by)  # type: ignore[arg-type]
    error = sum_error(fmt, fmt, run_on)
    parts = jnp.split(x, np.cumsum(_SIZES))[: len(_SIZES)]
    groups = [quantize(rows, fmt, implementation=by) for rows in parts if len(rows)]
    weights = decoded(b)[_SIZES > 0]
    return _by_groups(y, [_of(0, decoded(g), v, error) for g, v in zip(groups, weights, strict=True)])


def _grouped_weight_only(fmt: Format, run_on: RunOn) -> Product:
    x, w = _operands(run_on)
    by = run_on.implementation
    b = quantize(jnp.stack([w, -w, w * 2, w]), fmt, implementation=by)
    y = grouped_weight_only(x, b, jax.device_put(_SIZES, run_on.device), None, jnp.float32, by)
    error = sum_error("bfloat16", fmt, run_on)
    rows = _split(np.asarray(x, np.float64))
    return _by_groups(y, [_of(0, r, v, error) for r, v in zip(rows, decoded(b), strict=True)])


def _within_groups(fmt: Format, run_on: RunOn) -> Product:
    x, _ = _operands(run_on)
    sizes = jax.device_put(_SIZES, run_on.device)
    a, b = x[:, :256], x[:, 256:384]
    options: Any = {"implementation": run_on.implementation}
    left, right = (quantize_groups(v, sizes, fmt, rowwise=False, columnwise=True, **options)[1] for v in (a, b))
    y = multiply_within_groups(left, right, jnp.float32, **options)  # type: ignore[arg-type]
    error = sum_error(fmt, fmt, run_on, int(_SIZES.max()))
    found = []
    for first, size in zip(np.cumsum(_SIZES) - _SIZES, _SIZES, strict=True):
        if size:
            of_group = [quantize(v[first : first + size], fmt, axis=-2, **options) for v in (a, b)]
            found.append(_of(0, decoded(of_group[0]), decoded(of_group[1]), error))
        else:
            found.append(Product(*[np.zeros((256, 128))] * 3))
    return Product(np.asarray(y, np.float64), *(np.stack([p[i] for p in found]) for i in (1, 2)))


class ProductItem(NamedTuple):
    """A product and its name.

    Attributes:
        name: of it.
        run: `RunOn` -> what came out and what should have.
    """

    name: str
    run: Any


def products() -> Iterator[ProductItem]:
    """All of them."""
    fmt: Format
    for a, b in PAIRS:
        yield ProductItem(f"scaled_matmul {name_of(a)} x {name_of(b)}", functools.partial(_pair, a, b, None))
    for fmt in (Float8Tensor(), Float8Block(), MXFP4()):
        name = f'scaled_matmul {name_of(fmt)} x {name_of(fmt)}, precision="highest"'
        yield ProductItem(name, functools.partial(_pair, fmt, fmt, "highest"))
    for dtype, fmt in WEIGHTS:
        yield ProductItem(f"scaled_matmul {dtype} x {name_of(fmt)}", functools.partial(_weight_only, dtype, fmt))
    for fmt in IN_GROUPS:
        yield ProductItem(f"grouped_matmul {name_of(fmt)}", functools.partial(_grouped, fmt))
        yield ProductItem(f"grouped_matmul {name_of(fmt)} within groups", functools.partial(_within_groups, fmt))
    for fmt in (NVFP4(), Int4()):
        yield ProductItem(f"grouped_matmul bfloat16 x {name_of(fmt)}", functools.partial(_grouped_weight_only, fmt))
