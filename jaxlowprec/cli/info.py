"""What this installation can do on this machine."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import jax

from jaxlowprec import native

_PACKAGES = ("jaxlowprec", "jax", "jaxlib", "flax", "numpy", "ml_dtypes")

# Operation, its FFI target, what it covers, how the CPU kernel does it.
_OPERATIONS = (
    (
        "quantize",
        "jaxlowprec_quantize",
        "NVFP4, MXFP8, MXFP4, Float8Block, Float8Tensor; both ways, rotated, stochastic",
        "",
    ),
    ("amax", "jaxlowprec_amax", "of a tensor, and of its rotation, in one pass", ""),
    ("dequantize", "jaxlowprec_dequantize", "all formats, rotation undone", ""),
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
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """Versions, devices, the native library, and how each operation runs on each platform present."""
    library = native.library()
    targets = set(library.module.cpu_handlers()) if library.module else set()
    platforms = sorted({device.platform for device in jax.devices()} | {"cpu"})
    operations = []
    for name, target, covers, emulation in _OPERATIONS:
        runs = {}
        for p in platforms:
            reason = native.why_not(p)
            if reason is None and target not in targets:
                reason = f"the compiled library has no {target}"
            how = "reference" if reason else ("emulated" if emulation else "native")
            runs[p] = {"runs": how, "why": reason or emulation or f"{native.isa()} kernels"}
        operations.append({"operation": name, "covers": covers, "platforms": runs})
    return {
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}},
        "machine": f"{platform.system()} {platform.machine()}",
        "devices": [str(device) for device in jax.devices()],
        "native_library": {
            "loaded": library.module is not None,
            "reason": library.reason,
            "ffi_api_version": ".".join(map(str, library.module.ffi_api_version)) if library.module else None,
            "instruction_set": native.isa(),
            "instruction_sets_available": list(native.available_isas()),
        },
        "operations": operations,
    }


def render(found: dict[str, Any]) -> str:
    """The same as text."""
    library = found["native_library"]
    lines = ["jaxlowprec " + str(found["versions"]["jaxlowprec"] or "(not installed)")]
    facts = [
        ("versions", ", ".join(f"{p} {v}" for p, v in found["versions"].items() if v and p != "jaxlowprec")),
        ("machine", found["machine"]),
        ("devices", ", ".join(found["devices"])),
    ]
    if library["loaded"]:
        others = ", ".join(library["instruction_sets_available"])
        facts.append(("native library", f"loaded, XLA FFI {library['ffi_api_version']}"))
        facts.append(("instruction set", f"{library['instruction_set']} (of {others}; set JAXLOWPREC_ISA to choose)"))
    else:
        facts.append(("native library", f"none: {library['reason']}"))
    width = max(len(name) for name, _ in facts)
    lines += [f"  {name.ljust(width)}  {value}" for name, value in facts]
    rows = [("operation", "platform", "runs", "why", "covers")]
    for operation in found["operations"]:
        for p, how in operation["platforms"].items():
            rows.append((operation["operation"], p, how["runs"], how["why"], operation["covers"]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", table[0], "-" * len(table[0]), *table[1:]])
