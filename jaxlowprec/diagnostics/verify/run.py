"""Runs the items of `jaxlowprec verify` on a device, several at a time, and says what differs."""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlowprec.diagnostics.verify import arithmetic, products, quantisers
from jaxlowprec.diagnostics.verify.products import RunOn
from jaxlowprec.ops.checks import Implementation, check_implementation
from jaxlowprec.wiring import native

_MOST_AT_A_TIME = 32  # items whose programs are compiled at the same time


class Result(NamedTuple):
    """The outcome of one item.

    Attributes:
        item: its name.
        ok: whether everything is as it must be.
        found: what differs, one text for each array; or how near a product came to its bound.
    """

    item: str
    ok: bool
    found: tuple[str, ...] = ()


class Report(NamedTuple):
    """The outcome of `verify`.

    Attributes:
        device: what ran, in words.
        compared_with: where the elements that must come out are from, if they are needed.
        results: of each item.
    """

    device: str
    compared_with: str
    results: list[Result]

    @property
    def ok(self) -> bool:
        """Whether all items are."""
        return all(result.ok for result in self.results)


class _Wanted(NamedTuple):
    """The CPU's kernels, or its reference: they say which elements differ where a digest does.

    Attributes:
        device: a CPU; None where JAX has none.
        implementation: for it.
        words: what it is, or why it is not there.
    """

    device: jax.Device | None
    implementation: Any
    words: str


def _on_the_cpu() -> _Wanted:
    try:
        device = jax.local_devices(backend="cpu")[0]
    except native.NO_PLATFORM:
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        remedy = f"set JAX_PLATFORMS={platforms},cpu to see which elements"
        return _Wanted(None, None, f"none: JAX has no CPU here; {remedy}")
    if "cpu" in native.platforms():
        return _Wanted(device, "ffi", f"the CPU's {native.isa()} kernels")
    return _Wanted(device, "reference", f"the reference on the CPU, because {native.why_not('cpu')}")


def differences(name: str, got: np.ndarray, wanted: np.ndarray) -> str:
    """How many elements differ, and the first of them; empty if none does."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{name}: {got.dtype}{list(got.shape)}, must be {wanted.dtype}{list(wanted.shape)}"
    unsigned = f"u{got.dtype.itemsize}"
    differ = np.atleast_1d(got.view(unsigned) != wanted.view(unsigned))
    if not differ.any():
        return ""
    first = np.unravel_index(int(differ.argmax()), differ.shape)
    a, b = (np.atleast_1d(x)[first] for x in (got, wanted))
    place = [int(i) for i in first]
    return f"{name}: {differ.sum()} of {differ.size} differ, first at {place}: got {_shown(a)}, must be {_shown(b)}"


def _shown(x: Any) -> str:
    if x.dtype.kind == "u":
        return f"0x{int(x):02x}"
    return f"{float(x)!r} (0x{int(x.view(f'u{x.dtype.itemsize}')):0{2 * x.dtype.itemsize}x})"


def _check_bytes(item: quantisers.Item, run_on: RunOn, wanted: _Wanted) -> tuple[str, ...]:
    """Compares digests; where one differs, the elements with the CPU's."""
    must_be = quantisers.expected()[item.name]
    found = item.run(*run_on)
    wrong = [name for name in must_be if name not in found or quantisers.digest(found[name]) != must_be[name]]
    if not wrong:
        return ()
    right: dict[str, np.ndarray] = {}
    if wanted.device is not None:
        with jax.default_device(wanted.device):
            right = item.run(wanted.device, wanted.implementation)
    said = []
    for name in wrong:
        known = name in found and name in right and quantisers.digest(right[name]) == must_be[name]
        told = differences(name, found[name], right[name]) if known else ""
        own = "" if wanted.device is None else ", nor has the CPU"
        said.append(told or f"{name}: not the bytes whose digest is {must_be[name]}{own}")
    return tuple(said)


def _check_elementwise(operation: str, device: jax.Device) -> tuple[str, ...]:
    said = differences(operation, *arithmetic.elementwise(operation, device))
    return (said,) if said else ()


def _check_product(run: Callable, where: Any) -> tuple[str, ...]:
    product = run(where)
    error = np.abs(product.actual - product.exact)
    far = ~(error <= product.bound)  # NaN is far from everything
    if not far.any():
        return ()
    first = np.unravel_index(int(far.argmax()), far.shape)
    place = [int(i) for i in first]
    return (
        f"{far.sum()} of {far.size} are out of bounds, first at {place}: got {product.actual[first]!r}, must be "
        f"{product.exact[first]!r} within {product.bound[first]:.3g}",
    )


def checks(run_on: RunOn, wanted: _Wanted) -> Iterator[tuple[str, Callable[[], tuple[str, ...]]]]:
    """Every item: its name, and a function that says what is wrong with it."""
    for operation in arithmetic.OPERATIONS:
        yield f"float32 {operation}", functools.partial(_check_elementwise, operation, run_on.device)
    highest = functools.partial(_check_product, arithmetic.highest, run_on.device)
    yield "float32 product at the highest precision", highest
    for item in quantisers.items():
        yield item.name, functools.partial(_check_bytes, item, run_on, wanted)
    for product in products.products():
        yield product.name, functools.partial(_check_product, product.run, run_on)


def verify(
    platform: str | None = None,
    only: str = "",
    implementation: Implementation = None,
    done: Callable[[Result], None] | None = None,
) -> Report:
    """Compares what a device computes with what it must.

    Arguments:
        platform: of the device; None: JAX's default.
        only: part of the names of the items that are run; "": all.
        implementation: what computes there; see `jaxlowprec.quantize`.
        done: is called with the result of each item, in their order.
    """
    check_implementation("verify", implementation)
    device = jax.local_devices(backend=platform)[0]
    wanted = _on_the_cpu()

    def checked(named: tuple[str, Callable[[], tuple[str, ...]]]) -> Result:
        name, check = named
        try:
            with jax.default_device(device):
                found = check()
        except Exception as error:  # a compiler or a device that fails is what verify is to find out
            found = (f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",)
        return Result(name, not found, found)

    chosen = [named for named in checks(RunOn(device, implementation), wanted) if only in named[0]]
    results = []
    pool = concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_AT_A_TIME))
    try:
        for result in pool.map(checked, chosen):
            results.append(result)
            if done:
                done(result)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupted command does not compute the rest
    kind = f"{device.platform}, {device.device_kind}" if device.device_kind != device.platform else device.platform
    return Report(kind, wanted.words, results)
