"""What it costs training that sums over devices travel in few bits: `sums=` of a recipe, over eight devices.

    python examples/sums_study.py --out runs/sums    # three hours on 2 cores; resumes where it was stopped

A CPU is divided into eight virtual devices. On the mesh data=2,tensor=4 the sums of activations and of their gradients
are varied, on data=8 those of the kernels' gradients; the others are in float32. Gaps are those of training_study.py,
against bf16 on the same mesh.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
from lm import mesh
from lm.model import SIZES
from lm.study import BASELINES, arguments, parsed, print_gaps, results_of, settings_of, summarize, write
from lm.training import Run

import jaxlowprec as jlp

VARIED = {  # on each mesh: the GEMMs whose sums are varied
    "data=2,tensor=4": ("fprop", "dgrad"),
    "data=8": ("wgrad",),
}
KINDS = ("float32", "bfloat16", "bfloat16_stochastic", "quantized")


def main() -> None:
    """Trains the missing runs, and prints and writes the summary."""
    parser = arguments(__doc__, "runs/sums")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--mesh", nargs="+", choices=VARIED, default=list(VARIED))
    parser.add_argument("--sums", nargs="+", choices=KINDS, default=KINDS)
    options, text = parsed(parser)
    jax.config.update("jax_num_cpu_devices", 8)
    config, summary, found = SIZES[options.size], [], []
    for sizes in options.mesh:
        layout = mesh.Layout(mesh.make_mesh(mesh.parse(sizes)))
        runs = list(BASELINES)
        for kind in options.sums:
            recipe = jlp.NVFP4BlockScaling(sums=jlp.Sums(**dict.fromkeys(VARIED[sizes], kind)))
            runs.append(Run("nvfp4" if kind == "float32" else f"nvfp4, {kind}", recipe))
        found = results_of(options, text, options.steps, [(run, config) for run in runs], sizes, layout=layout)
        gaps = summarize(found)
        summary += [{"mesh": sizes, **entry} for entry in gaps]
        print(f"{sizes}: sums of {' and '.join(VARIED[sizes])}")
        print_gaps(gaps)
    settings = settings_of(options, config, found[0]["parameters"], text)
    commit = settings.pop("commit")
    summary = [{"commit": commit, **entry} for entry in summary]
    write(options.save, {"settings": settings, "summary": [*saved_before(options, settings), *summary]})


def saved_before(options: argparse.Namespace, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What the file to write has of other meshes, if it is of the same settings."""
    if not options.save or not options.save.exists():
        return []
    saved = json.loads(options.save.read_text())
    same = saved["settings"] == settings
    return [entry for entry in saved["summary"] if same and entry["mesh"] not in options.mesh]


if __name__ == "__main__":
    main()
