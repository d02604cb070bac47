"""The compiled library: finds and loads it, registers its FFI targets, and says what it can serve here and why not.

A missing or unusable library is never an error by itself: everything then runs on the pure-JAX reference, and
`implementation="ffi"` raises with the reason kept here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.export

_CUDA_PLUGINS = (12, 13)

NO_PLATFORM = (RuntimeError, AssertionError)
"""Exceptions of JAX for a platform that cannot be started. JAX asserts that one of $JAX_PLATFORMS was found."""


class NotAvailable(ValueError):
    """The environment asks for something that this machine or this build does not have."""


@dataclasses.dataclass(frozen=True)
class Library:
    """The loaded module, or why there is none; and why it does not serve a platform that other builds serve."""

    module: ModuleType | None
    reason: str | None
    platforms: tuple[str, ...]
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)


def _runtime_ffi_version() -> tuple[int, int]:
    """The FFI version of the installed jaxlib, read from the header it ships."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return int(numbers["MAJOR"]), int(numbers["MINOR"])


def _load() -> Library:
    if os.environ.get("JAXLOWPREC_DISABLE_NATIVE", "0") not in ("", "0"):
        return Library(None, "JAXLOWPREC_DISABLE_NATIVE is set", ())
    try:
        from jaxlowprec import _native  # type: ignore[attr-defined]
    except ImportError as error:
        return Library(None, f"the compiled library could not be loaded: {error}", ())
    module: Any = _native
    try:
        built, runtime = module.ffi_api_version, _runtime_ffi_version()
        # XLA refuses handlers newer than itself, and takes the whole backend down with them.
        if built[0] != runtime[0] or built[1] > runtime[1]:
            return Library(
                None,
                f"the compiled library uses XLA FFI {built[0]}.{built[1]}, this jaxlib has {runtime[0]}.{runtime[1]}; "
                "reinstall jaxlowprec with pip's build isolation on, which builds against the oldest supported jaxlib",
                (),
            )
        for name, capsule in module.cpu_handlers().items():
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    except Exception as error:  # a library of another version, or a header that is gone: say so, run the reference
        return Library(None, f"the compiled library is not usable: {type(error).__name__}: {error}", ())
    _require_isa(module, os.environ.get("JAXLOWPREC_ISA"))
    why_no_cuda = _why_no_cuda(module) or _register_cuda(module)
    return (
        Library(module, None, ("cpu",), {"cuda": why_no_cuda})
        if why_no_cuda
        else Library(module, None, ("cpu", "cuda"))
    )


def _require_isa(module: Any, wanted: str | None) -> None:
    """Raises if the wanted instruction set is not here: the library would silently take the best one."""
    if wanted and wanted not in (there := tuple(module.available_isas())):
        raise NotAvailable(
            f"JAXLOWPREC_ISA={wanted!r} is not available here; set it to one of {', '.join(there)}, or leave it unset, "
            "which takes the best"
        )


def _why_no_cuda(module: Any) -> str | None:
    if not getattr(module, "cuda_handlers", dict)():
        found = getattr(module, "no_cuda", "") or "no CUDA compiler was found"
        return (
            f"jaxlowprec was built without CUDA ({found}); to build it with, have nvcc and cublasLt.h where it is "
            "installed: `make gpu` in a source tree does all of that"
        )
    if not any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in _CUDA_PLUGINS):
        return 'jax has no CUDA plugin here: pip install "jax[cuda13]" (or "jax[cuda12]")'
    return module.cuda_driver_problem() or None


def _register_cuda(module: Any) -> str | None:
    """Registers the CUDA targets, which JAX keeps until it starts that backend; returns the error as text, or None."""
    try:
        for name, handler in module.cuda_handlers().items():
            jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    except Exception as error:  # the CPU's kernels work all the same
        return f"its CUDA kernels are not usable: {type(error).__name__}: {error}"
    return None


@functools.cache
def library() -> Library:
    """The library, loaded and registered on first use. Raises NotAvailable for a JAXLOWPREC_ISA that is not here."""
    return _load()


def platforms() -> tuple[str, ...]:
    """Platforms that have native kernels here, such as `("cpu", "cuda")`."""
    return library().platforms


def why_not(platform: str) -> str | None:
    """Why `platform` has no native kernels here, or None if it has."""
    found = library()
    if platform in found.platforms:
        return None
    return (
        found.reason
        or found.missing.get(platform)
        or f"this build of jaxlowprec has no kernels for platform {platform!r}"
    )


def why_no_platform(error: BaseException) -> str:
    """One of `NO_PLATFORM` in words, for the user who chose the platforms."""
    wanted = jax.config.jax_platforms  # type: ignore[attr-defined]
    return f"JAX cannot use JAX_PLATFORMS={wanted}: {error or 'it finds none of them'}"


def compute_capability() -> float | None:
    """The lowest compute capability of this process's GPUs, such as 9.0; None if it has no GPU."""
    try:
        devices = jax.local_devices(backend="cuda")
    except NO_PLATFORM:
        return None
    return min(float(device.compute_capability) for device in devices)


def isa() -> str | None:
    """The instruction set whose CPU kernels are in use: "avx512_amx", "avx512_bf16", "avx512", "avx2" or "portable"."""
    module = library().module
    return module.isa() if module else None


def available_isas() -> tuple[str, ...]:
    """The instruction sets that can run here, best first."""
    module = library().module
    return tuple(module.available_isas()) if module else ()


def use_isa(name: str) -> None:
    """Switches the CPU kernels to another instruction set, for tests and benchmarks. All give the same bytes."""
    module = library().module
    if not module or not module.use_isa(name):
        raise ValueError(f"use_isa: {name!r} is not available here; these are: {available_isas()}")


def disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The names of this library's kernels, for `jax.export.export(function, disabled_checks=...)`.

    JAX refuses to write custom calls into a file, since it cannot promise that they will be there, or mean the same,
    where the file is read. With these it writes those of jaxlowprec: read the file with the version that wrote it.

    Returns:
        One `jax.export.DisabledSafetyCheck` for each kernel of this build, of CPUs and GPUs, and one for XLA's own
        LayoutConstraint, by which products on TPUs say how operands lie.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> x, w = jnp.ones((16, 64)), jnp.ones((64, 32))
    >>> serve = jax.jit(lambda x, w: jlp.linear(x, w, recipe=jlp.MXFP8BlockScaling()))
    >>> file = jax.export.export(serve, disabled_checks=jlp.disabled_checks())(x, w).serialize()
    >>> jax.export.deserialize(file).call(x, w).shape
    (16, 32)
    """
    module: Any = library().module
    names = {"LayoutConstraint"}
    if module is not None:
        names |= {*module.cpu_handlers(), *getattr(module, "cuda_handlers", dict)()}
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in sorted(names)]
