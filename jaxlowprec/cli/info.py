"""`jaxlowprec info`: says which operations run here, how, and why others do not."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import pathlib
import platform
from typing import Any

import jax

from jaxlowprec.arrays.formats import MXFP4, MXFP8, NVFP4, Float8Block, Float8Tensor
from jaxlowprec.cli.streams import emit
from jaxlowprec.cli.verified import VERIFIED_ON_GPUS
from jaxlowprec.ops.scaled_matmul.cuda import route
from jaxlowprec.wiring import native

_PACKAGES = ("jaxlowprec", "jax", "jaxlib", "flax", "numpy", "ml_dtypes")

# For each operation: its FFI target, what it covers, and what the CPU emulates of a GPU.
_OPERATIONS = (
    (
        "quantize",
        "jaxlowprec_quantize",
        "NVFP4, MXFP8, MXFP4, Float8Block, Float8Tensor; both ways, rotated, stochastic",
        "",
    ),
    ("amax", "jaxlowprec_amax", "of a tensor, and of its rotation, in one pass", ""),
    ("dequantize", "jaxlowprec_dequantize", "all formats, rotation undone", ""),
    ("quantize, Int4", "jaxlowprec_int4_quantize", "any group size, both ways, symmetric or not", ""),
    ("dequantize, Int4", "jaxlowprec_int4_dequantize", "the same", ""),
    ("fake_quantize, Int4", "jaxlowprec_int4_fake_quantize", "the same, in one pass", ""),
    ("hadamard_transform", "jaxlowprec_hadamard", "sizes 16 to 256, rows and columns", ""),
    (
        "scaled_matmul, 4-bit",
        "jaxlowprec_scaled_matmul",
        "NVFP4 x NVFP4, MXFP4 x MXFP4, square blocks on either side",
        "exact integer dot products instead of FP4 tensor cores",
    ),
    (
        "scaled_matmul, 8-bit",
        "jaxlowprec_scaled_matmul",
        "MXFP8 x MXFP8 or MXFP4, Float8Block x Float8Block, Float8Tensor x Float8Tensor",
        "codes decoded to float32 instead of FP8 tensor cores",
    ),
    (
        "scaled_matmul, weight-only",
        "jaxlowprec_weight_only_matmul",
        "bfloat16, float16 or float32 by every format, Int4 too",
        "",
    ),
)


_MULTIPLIED = {  # formats for whose GEMMs a GPU has its own instructions
    "scaled_matmul, 4-bit": (NVFP4(), MXFP4()),
    "scaled_matmul, 8-bit": (MXFP8(), Float8Block(), Float8Tensor()),
}


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "info", help="versions, platforms, and what runs natively, emulated or by reference here"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    found = collect()
    emit(json.dumps(found, indent=2).split("\n") if options.json else render(found))
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
        "verified_on": list(VERIFIED_ON_GPUS),
    }


def _how_on_cuda(operation: str, capability: float | None) -> str:
    """What computes an operation on a GPU; on this machine's GPU if it has one."""
    if operation == "scaled_matmul, weight-only":
        return (
            "up to 16 rows of bfloat16 by NVFP4 or Int4: codes decoded in registers; others: XLA's GEMM of the decoded "
            "weight"
        )
    formats = _MULTIPLIED.get(operation)
    if formats is None:
        return "CUDA kernels"
    known = round(10 * (capability or 10))
    parts = [f"{type(fmt).__name__}: {route(fmt, known) or 'none below compute capability 8.0'}" for fmt in formats]
    return "; ".join(parts) + ("" if capability else " (on the newest GPUs)")


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
    targets: dict[str, set[str]] = {"cpu": set(), "cuda": set()}
    if library.module:
        targets["cpu"], targets["cuda"] = set(library.module.cpu_handlers()), set(library.module.cuda_handlers())
    names = {"gpu": "cuda" if cuda["compute_capability"] else "rocm"}  # JAX calls both "gpu"
    devices, why_no_devices = _devices()
    present = {names.get(device.platform, device.platform) for device in devices} | {"cpu"}
    platforms = sorted(present if cuda["reason"] else present | {"cuda"})
    unverified = "" if cuda["verified_on"] else "; never verified on a GPU"
    operations = []
    for name, target, covers, emulation in _OPERATIONS:
        runs = {}
        for p in platforms:
            reason = native.why_not(p)
            if reason is None and target not in targets[p]:
                reason = f"the compiled library has no {target}"
            if p == "cuda":
                how = "reference" if reason else "native"
                why = reason or _how_on_cuda(name, cuda["compute_capability"]) + unverified
            else:
                how = "reference" if reason else ("emulated" if emulation else "native")
                why = reason or emulation or f"{native.isa()} kernels"
            runs[p] = {"runs": how, "why": why}
        operations.append({"operation": name, "covers": covers, "platforms": runs})
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
    return [*lines, "", table[0], "-" * len(table[0]), *table[1:]]
