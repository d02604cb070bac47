#!/usr/bin/env bash
# Sets an environment up for NVIDIA GPUs, on a machine that has a driver and nothing else: JAX with CUDA, a CUDA compiler and
# cuBLASLt's header from PyPI where there are none, and this library with its GPU kernels, editable.
#   PYTHON=.venv/bin/python install_gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

command -v nvidia-smi >/dev/null || { echo "make gpu: nvidia-smi is missing: install NVIDIA's driver first" >&2; exit 1; }
read -r major minor < <(nvidia-smi | sed -n 's/.*CUDA[^:]*Version: *\([0-9]*\)\.\([0-9]*\).*/\1 \2/p') || true # the driver's newest
if [[ ${major:-0} -lt 12 ]]; then
  echo "make gpu: the driver supports CUDA ${major:-of no version}; 12 or newer is needed: driver 525, or 580 for CUDA 13" >&2
  exit 1
fi
if [[ $major -ge 13 ]]; then
  # A driver compiles portable code (PTX) of its own version and older ones: so no newer compiler than that.
  compiler=">=13,<13.$((major == 13 ? minor + 1 : 100))"
  install 'jax[cuda13]>=0.10.2' "nvidia-cuda-nvcc$compiler" "nvidia-cuda-crt$compiler" "nvidia-nvvm$compiler" \
    "nvidia-cuda-runtime$compiler" 'nvidia-cuda-cccl>=13,<14' 'nvidia-cublas>=13,<14'
else
  # PyPI has no nvcc of CUDA 12, and what another compiles does not run with this driver.
  root=${CUDA_HOME:-${CUDA_PATH:-}}
  nvcc=${CUDACXX:-$([[ $root ]] && echo "$root/bin/nvcc" || command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
  if ! "$nvcc" --version 2>/dev/null | grep -q 'release 12\.9'; then
    echo "make gpu: this driver needs CUDA 12, and PyPI has no nvcc of it: install the toolkit 12.9 and set CUDACXX to its" \
      "nvcc, or install driver 580" >&2
    exit 1
  fi
  export CUDACXX=$nvcc
  install 'jax[cuda12]>=0.10.2'
fi
echo "compiling the kernels: several minutes"
install --config-settings=cmake.define.JAXLOWPREC_CUDA=ON --editable '.[test]'
# `make test` needs not install again; another environment than its own is not recorded there.
if [[ $("$python" -c 'import sys; print(sys.prefix)') -ef .venv ]]; then touch .venv/installed; fi
"$python" -m jaxlowprec.cli.main info
