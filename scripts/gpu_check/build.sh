#!/usr/bin/env bash
# Installs the library with GPU kernels for the GPU that is there: build.sh WORK KEPT
#
# Uses what PYTHON has if that is this source tree with GPU kernels, else WORK/site if it was built from the same sources for the
# same GPU and interpreter, else the archive KEPT if it was; otherwise compiles into WORK/site and writes KEPT.
# DRY_RUN=1: what PYTHON has is used, with or without GPU kernels. WHEEL=FILE: installed instead of compiling; its Python sources
# must be this tree's.
set -euo pipefail
work=$1 kept=$2
python=${PYTHON:-python3}

is_here='import sys, jaxlowprec, jaxlowprec.wiring.native as n; m = n.library().module
sys.exit(not (jaxlowprec.__file__.startswith(sys.argv[1] + "/jaxlowprec/") and m and not m.no_cuda))'
has_gpu='import jax, jaxlowprec.wiring.native as n
why = n.why_not("cuda")
if why: raise SystemExit(f"the GPU kernels cannot be used: {why}")
print(*jax.devices("cuda"))'

if [[ ${DRY_RUN:-} ]]; then
  rm -rf "$work/site"
  (cd / && "$python" -c 'import jaxlowprec; print("dry run: uses", jaxlowprec.__file__)')
  exit
fi

command -v nvidia-smi >/dev/null || { echo "build: nvidia-smi is missing: no GPU to build for" >&2; exit 1; }
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
case $capability in
  8?) arch=80 ;;
  90) arch=90a ;;
  100 | 103) arch=100f ;;
  120 | 121) arch=120f ;;
  *) arch= ;; # runs from portable code
esac
here=$PWD
stamp="$("$python" benchmarks/sources.py) ${arch:-portable} $("$python" -c '
import platform, sys
from importlib.metadata import version
print(sys.implementation.cache_tag, platform.machine(), "jaxlib", version("jaxlib"))')"

site_is_of_these_sources() { [[ -e $work/site/stamp && $(<"$work/site/stamp") == "$stamp" ]]; }

if (cd / && "$python" -c "$is_here" "$here") 2>/dev/null; then
  echo "uses what is installed from this source tree, with GPU kernels"
  rm -rf "$work/site"
else
  if ! site_is_of_these_sources && [[ -e $kept ]]; then
    rm -rf "$work/site"
    tar -xzf "$kept" -C "$work" && echo "unpacked $kept"
  fi
  if site_is_of_these_sources; then
    echo "uses $work/site, built from the same sources: $stamp"
  else
    rm -rf "$work/site"
    if [[ ${WHEEL:-} ]]; then
      "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$work/site" "$WHEEL"
      diff -rq -x __pycache__ -x '*.so' jaxlowprec "$work/site/jaxlowprec" ||
        { echo "build: $WHEEL has other sources than this tree: build it again" >&2; exit 1; }
    else
      CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation \
        --no-deps --target "$work/site" -C build-dir="$work/build" -C cmake.define.JAXLOWPREC_CUDA=ON \
        -C cmake.define.JAXLOWPREC_CUDA_ARCHS="$arch" -C cmake.define.JAXLOWPREC_CUDA_PTX="$([[ $arch ]] || echo 90)" .
    fi
    echo "$stamp" >"$work/site/stamp"
  fi
  [[ -e $kept && $(tar -xzOf "$kept" site/stamp 2>/dev/null) == "$stamp" ]] || tar -czf "$kept" -C "$work" site
fi
cd "$work" # not the source tree, whose own package has no compiled library
"$python" -m jaxlowprec.cli.main info
"$python" -c "$has_gpu"
