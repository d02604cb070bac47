#!/usr/bin/env bash
# The sdist, and the wheel that is built from it, in dist: checked, installed into an empty environment and run there.
# build_wheel.sh [PYTHON]: 3.12 or newer, whose stable ABI the wheel has; default: one that is found. With JAXLOWPREC_CUDA=ON
# the wheel has to have the GPU kernels.
set -euo pipefail
cd "$(dirname "$0")/.."

python=
for candidate in "${1:-}" python3 python3.1{3,2,4} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1{3,2,4}*/bin/python; do
  if [[ -n $candidate ]] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[[ -n $python ]] || { echo "no Python 3.12 or newer here: make wheel PYTHON=/path/to/it" >&2; exit 1; }
if command -v ccache >/dev/null; then
  export CXX=${CXX:-g++} CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
  export CCACHE_BASEDIR=/ CCACHE_NOHASHDIR=1 # the sdist is unpacked in a folder of another name each time
fi

rm -rf dist build/packaging build/installed
"$python" -m venv build/packaging
build/packaging/bin/python -m pip install --quiet --disable-pip-version-check build twine
echo "building: one to three minutes, more with GPU kernels"
build/packaging/bin/python -m build --outdir dist . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
grep "GPU kernels" build/wheel.log
build/packaging/bin/python -m twine check --strict dist/*
scripts/check_sdist.sh dist/*.tar.gz
if [[ ${JAXLOWPREC_CUDA:-AUTO} == ON ]]; then
  scripts/check_wheel.sh dist/*.whl
else
  scripts/check_wheel.sh dist/*.whl --without-gpu-kernels
fi

"$python" -m venv build/installed
build/installed/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
root=$PWD
cd / # not beside the sources
export JAX_PLATFORMS=cpu
"$root/build/installed/bin/jaxlowprec" info
"$root/build/installed/bin/python" "$root/scripts/smoke_test.py"
ls -l "$root"/dist
