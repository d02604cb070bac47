#!/usr/bin/env bash
# A wheel is for any Python and any machine: check_wheel.sh WHEEL [--without-gpu-kernels]
# It has the stable ABI, or is for CPython 3.11, which that ABI does not reach back to. It has GPU kernels, unless it may
# be without them, needs none of CUDA's libraries to be imported, and exports no symbol of the copy that it has.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m zipfile -e "$1" "$folder"
module=("$folder"/jaxlowprec/_native*.so)
[[ $1 == *-abi3-* && $module == *.abi3.so || $1 == *-cp311-cp311-* && $module == *.cpython-311-*.so ]] ||
  { echo "not built for the stable ABI or for CPython 3.11: $1" >&2; exit 1; }
if [[ ${2:-} != --without-gpu-kernels ]]; then
  readelf --sections --wide "$module" | grep -q nv_fatbin || { echo "no GPU kernels in $1" >&2; exit 1; }
fi
! readelf --dynamic "$module" | grep -E 'NEEDED.*(libcuda|libcublas|libnv)' || { echo "needs CUDA to be imported" >&2; exit 1; }
! nm --dynamic --defined-only "$module" | grep -E ' (cu|nv)[A-Za-z]|__cuda' || { echo "CUDA's symbols are visible" >&2; exit 1; }
