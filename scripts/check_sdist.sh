#!/usr/bin/env bash
# An sdist has what a build needs, and nothing that only the repository needs: check_sdist.sh SDIST
set -euo pipefail
files=$(tar --list --file "$1" | sed 's,^[^/]*/,,')
for needed in pyproject.toml CMakeLists.txt LICENSE README.md xla_ffi/bindings/module.cc cmake/FindJaxlowprecCuda.cmake \
  jaxlowprec/__init__.py jaxlowprec/py.typed; do
  grep -qx "$needed" <<<"$files" || { echo "$1 lacks $needed" >&2; exit 1; }
done
! grep -E '^(tests|examples|benchmarks|docs|\.ci|\.github)/|\.(so|o|pyc)$' <<<"$files" || { echo "not for $1" >&2; exit 1; }
