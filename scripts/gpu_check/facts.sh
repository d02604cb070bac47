#!/usr/bin/env bash
# What a result has to be read with: the GPU, the driver, compilers, tools and versions. PYTHON: the interpreter.
set -uo pipefail
python=${PYTHON:-python3}

# Says what a program prints, or that it is not there: nothing here is needed by the tests.
ask() {
  echo "--- $*"
  command -v "$1" >/dev/null || { echo "$1 is not on the PATH"; return; }
  "$@" 2>&1 | tail -40
}

ask nvidia-smi
ask nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit --format=csv
for tool in nvcc compute-sanitizer ncu; do ask $tool --version; done
ask git rev-parse HEAD
ask lscpu | grep -E -- '---|Model name|^CPU\(s\)|not on'
echo "--- packages of $("$python" --version)"
"$python" -c '
from importlib.metadata import distributions
wanted = ("jax", "flax", "numpy", "ml_dtypes", "ml-dtypes", "nvidia", "nanobind", "scikit", "cmake", "ninja", "pytest")
print(*sorted({f"{d.name} {d.version}" for d in distributions() if d.name.lower().startswith(wanted)}), sep="\n")'
