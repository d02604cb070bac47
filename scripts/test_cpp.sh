#!/usr/bin/env bash
# Builds and runs the C++ tests three times: as shipped; with the address and undefined-behaviour sanitizers, kernels then
# portable and for AVX2 (or for ISA="avx2;avx512"); and those of several threads with the thread sanitizer. Where the
# processor has no AVX512_BF16, or with EMULATE=ON, the AVX-512 kernels are tested by emulation if SIMDe's headers are there
# (Debian: libsimde-dev). The numerics are compiled as device code where nvcc is. The GPU kernels are executed on the CPU;
# their calls of cuBLASLt are tested where a CUDA compiler and cublasLt.h are (scripts/cublas_headers.sh build/cublas).
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PATH:$PWD/.venv/bin" # cmake and ninja, if the machine has none

run() { # name, sanitizers, tests, options
  local folder="build/cpp-$1"
  cmake -S . -B "$folder" -G Ninja -DJAXLOWPREC_TESTS=ON -DJAXLOWPREC_MODULE=OFF -DJAXLOWPREC_SANITIZE="$2" "${@:4}"
  cmake --build "$folder"
  ctest --test-dir "$folder" --parallel "$(nproc)" --output-on-failure --no-tests=error -R "$3"
}

cublas=()
[[ -e build/cublas/cublasLt.h ]] && cublas=(-DJAXLOWPREC_CUBLAS_INCLUDE="$PWD/build/cublas")
emulate=ON
grep -qw avx512_bf16 /proc/cpuinfo 2>/dev/null && emulate=${EMULATE:-OFF}
run release "" . "${cublas[@]}" -DJAXLOWPREC_EMULATE_AVX512=$emulate
run address address,undefined . -DJAXLOWPREC_CUDA=OFF -DJAXLOWPREC_ISAS="${ISAS:-avx2}"
run thread thread parallel_for -DJAXLOWPREC_CUDA=OFF -DJAXLOWPREC_ISAS=portable
