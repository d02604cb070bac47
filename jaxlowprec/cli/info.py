"""`jaxlowprec info`: says which operations run here, how, and why others do not."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import pathlib
import platform
from typing import Any, NamedTuple

import jax

from jaxlowprec.arrays.formats import MXFP4, MXFP8, NVFP4, Float8Block, Float8Tensor, Format, Int4
from jaxlowprec.arrays.row_formats import Float8Rows, Int8Rows
from jaxlowprec.cli.streams import as_json, emit
from jaxlowprec.diagnostics import support
from jaxlowprec.recipes.eden import NVFP4Eden
from jaxlowprec.recipes.qat import Int4QAT
from jaxlowprec.recipes.roles import Recipe
from jaxlowprec.recipes.rows import Float8RowScaling, Int8RowScaling
from jaxlowprec.recipes.transformer_engine import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from jaxlowprec.wiring import native

VERIFIED_ON_GPUS: dict[float, str] = {9.0: "NVIDIA H200"}
"""The GPUs, by compute capability, on which `tests/gpu` ran and found the kernels right: they count as verified there.

docs/reference/platforms.md names the tests that did not pass or did not run. A line here and
benchmarks/results/gpu.json are added together: a test compares them.
"""


_PACKAGES = ("jaxlowprec", "jax", "jaxlib", "flax", "numpy", "ml_dtypes")

_INT4 = (Int4(),)


class _Operation(NamedTuple):
    """A line of the table.

    Attributes:
        name: of the line.
        op: see `support.runs`.
        covers: what it can do.
        formats: for which the platforms' ways are shown, each as `support.runs` takes it.
    """

    name: str
    op: str
    covers: str
    formats: tuple[tuple[Format, ...], ...] = ((),)


_OPERATIONS = (
    _Operation("quantize", "quantize", "all formats but Int4; both ways, rotated, stochastic"),
    _Operation("amax", "amax", "of a tensor, and of its rotation, in one pass"),
    _Operation("dequantize", "dequantize", "all formats, rotation undone"),
    _Operation("quantize, Int4", "quantize", "any group size, both ways, symmetric or not", (_INT4,)),
    _Operation("dequantize, Int4", "dequantize", "the same", (_INT4,)),
    _Operation("fake_quantize, Int4", "fake_quantize", "the same, in one pass", (_INT4,)),
    _Operation("hadamard_transform", "hadamard_transform", "sizes 16 to 256, rows and columns"),
    _Operation("activations", "activation", "gelu, silu, relu_squared, swiglu, geglu, and their gradients"),
    _Operation("norms", "norm", "rms_norm, layer_norm, with a residual, and their gradients"),
    _Operation("telemetry.statistics", "statistics", "moments, outliers, sums of all formats but Int4 and rows"),
    _Operation(
        "scaled_matmul, 4-bit",
        "scaled_matmul",
        "NVFP4 x NVFP4, MXFP4 x MXFP4, square blocks on either side",
        tuple((fmt, fmt) for fmt in (NVFP4(), MXFP4())),
    ),
    _Operation(
        "scaled_matmul, 8-bit",
        "scaled_matmul",
        "MXFP8 x MXFP8 or MXFP4, Float8Block x Float8Block or MXFP4, Float8Tensor x Float8Tensor",
        tuple((fmt, fmt) for fmt in (MXFP8(), Float8Block(), Float8Tensor())),
    ),
    _Operation(
        "scaled_matmul, INT8 by rows",
        "scaled_matmul",
        "Int8Rows x Int8Rows, Int4 or MXFP4",
        ((Int8Rows(), Int8Rows()),),
    ),
    _Operation(
        "scaled_matmul, FP8 by rows",
        "scaled_matmul",
        "Float8Rows x Float8Rows",
        ((Float8Rows(), Float8Rows()),),
    ),
    _Operation(
        "scaled_matmul, weight-only",
        "scaled_matmul",
        "bfloat16, float16 or float32 by every format, Int4 too",
        ((NVFP4(),),),
    ),
)

_RECIPES: tuple[type[Recipe], ...] = (
    NVFP4BlockScaling,
    NVFP4Eden,
    MXFP8BlockScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    DelayedScaling,
    Float8RowScaling,
    Int8RowScaling,
    Int4QAT,
)
_PORTABLE = "tested on CPUs only; `jaxlowprec verify` compares what this device computes with what it must"
_NEWEST = 10.0  # the compute capability for which GPUs are described where there is none


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "info", help="versions, platforms, and what runs natively, emulated or in pure JAX here"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    found = collect()
    emit(as_json(found) if options.json else render(found))
    return 0


def _cublaslt() -> str | None:
    """Version and path of the cuBLASLt that JAX has loaded into this process; None if there is none."""
    try:
        mapped = pathlib.Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = sorted({line.split(maxsplit=5)[5] for line in mapped.splitlines() if "/libcublasLt.so" in line})
    if not paths:
        return None
    version = ctypes.CDLL(paths[0]).cublasLtGetVersion
    version.restype = ctypes.c_size_t
    number = version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}, {paths[0]}"


def _cuda() -> dict[str, Any]:
    """The GPU part of the library, and the GPU and libraries that it would run on."""
    module = native.library().module
    absent = getattr(module, "no_cuda", "") if module else native.library().reason
    capability = native.compute_capability()
    return {
        "built": not absent,
        "reason": native.why_not("cuda"),
        "compiler": None if absent else module.cuda_version,  # type: ignore[union-attr]
        "architectures": [] if absent else module.cuda_architectures.split(),  # type: ignore[union-attr]
        "compute_capability": capability,
        "cublaslt": _cublaslt(),
        "verified_on": list(VERIFIED_ON_GPUS.values()),
    }


def _runs(operation: _Operation, platform: str) -> dict[str, str]:
    """How an operation runs on a platform, and why: for each format that goes its own way."""
    capability = native.compute_capability() or _NEWEST
    ways = {formats: support.runs(operation.op, platform, formats, capability) for formats in operation.formats}
    first = next(iter(ways.values()))
    why = first.why
    if len(ways) > 1 and (first.how == "portable" or platform == "cuda"):
        why = "; ".join(f"{type(formats[0]).__name__}: {way.why}" for formats, way in ways.items())
    if platform == "cuda" and first.how not in ("portable", "reference"):
        if len(ways) > 1:
            why += "" if native.compute_capability() else " (on the newest GPUs)"
        why += "" if capability in VERIFIED_ON_GPUS else f"; never verified on a GPU of compute capability {capability}"
    return {"runs": first.how, "why": why}


def _devices() -> tuple[list[Any], str | None]:
    """The devices that JAX finds; none, and the reason, if the platforms that it is told to use cannot be started."""
    try:
        return jax.devices(), None
    except native.NO_PLATFORM as error:
        return [], native.why_no_platform(error)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """Versions, devices, the native library, and how each operation runs on each platform present."""
    library = native.library()
    cuda = _cuda()
    names = {"gpu": "cuda" if cuda["compute_capability"] else "rocm"}  # JAX calls both "gpu"
    devices, why_no_devices = _devices()
    present = {names.get(device.platform, device.platform) for device in devices} | {"cpu"}
    platforms = sorted(present if cuda["reason"] else present | {"cuda"})
    operations = [
        {"operation": o.name, "covers": o.covers, "platforms": {p: _runs(o, p) for p in platforms}} for o in _OPERATIONS
    ]
    recipes = [
        {
            "recipe": recipe.__name__,
            "platforms": {
                p: support.supported(recipe(), platform=p)._asdict() for p in platforms if p in support.PLATFORMS
            },
        }
        for recipe in _RECIPES
    ]
    return {
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}},
        "machine": f"{platform.system()} {platform.machine()}",
        "devices": [str(device) for device in devices],
        "why_no_devices": why_no_devices,
        "native_library": {
            "loaded": library.module is not None,
            "reason": library.reason,
            "ffi_api_version": ".".join(map(str, library.module.ffi_api_version)) if library.module else None,
            "instruction_set": native.isa(),
            "instruction_sets_available": list(native.available_isas()),
        },
        "cuda": cuda,
        "operations": operations,
        "recipes": recipes,
    }


def _cuda_facts(cuda: dict[str, Any]) -> list[tuple[str, str]]:
    if not cuda["built"]:
        return [("GPU kernels", f"none: {cuda['reason']}")]
    verified = ", ".join(cuda["verified_on"]) or "on none: they were compiled, and executed on CPUs only"
    facts = [
        ("GPU kernels", f"CUDA {cuda['compiler']}, for {', '.join(cuda['architectures'])}"),
        ("verified on GPUs", verified),
        ("cuBLASLt", cuda["cublaslt"] or "not loaded"),
    ]
    if cuda["reason"]:
        facts.append(("not used here", cuda["reason"]))
    return facts


def render(found: dict[str, Any]) -> list[str]:
    """The facts as lines of text."""
    library = found["native_library"]
    lines = ["jaxlowprec " + str(found["versions"]["jaxlowprec"] or "(not installed)")]
    facts = [
        ("versions", ", ".join(f"{p} {v}" for p, v in found["versions"].items() if v and p != "jaxlowprec")),
        ("machine", found["machine"]),
        ("devices", ", ".join(found["devices"]) or f"none: {found['why_no_devices']}"),
    ]
    if library["loaded"]:
        others = ", ".join(library["instruction_sets_available"])
        facts.append(("native library", f"loaded, XLA FFI {library['ffi_api_version']}"))
        facts.append(("instruction set", f"{library['instruction_set']} (of {others}; set JAXLOWPREC_ISA to choose)"))
    else:
        facts.append(("native library", f"none: {library['reason']}"))
    facts += _cuda_facts(found["cuda"])
    width = max(len(name) for name, _ in facts)
    lines += [f"  {name.ljust(width)}  {value}" for name, value in facts]
    rows = [("operation", "platform", "runs", "why", "covers")]
    for operation in found["operations"]:
        for p, how in operation["platforms"].items():
            rows.append((operation["operation"], p, how["runs"], how["why"], operation["covers"]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", table[0], "-" * len(table[0]), *table[1:], ""]
    if any(row[2] == "portable" for row in rows):
        lines += [f"portable: {_PORTABLE}", ""]
    for recipe in found["recipes"]:
        for answer in recipe["platforms"].values():
            says = "runs" if answer["supported"] else "does not run"
            lines.append(f"{recipe['recipe']} {says}. {answer['reason']}")
    return lines
