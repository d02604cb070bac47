#!/usr/bin/env bash
# Builds and runs parts of the C++ tests: test_cpp.sh [PART]...; without a name all of them, emulated only where it is needed.
#   release   the CPU's kernels and the numerics as shipped. The numerics are compiled as device code where nvcc is; calls of
#             cuBLASLt are tested where a CUDA compiler and cublasLt.h are (scripts/cublas_headers.sh build/cublas)
#   address   the same with the address and undefined-behaviour sanitizers, kernels portable and for AVX2, or for ISA=avx2,avx512
#   thread    tests of several threads with the thread sanitizer
#   emulated  the AVX-512 kernels by emulation, where SIMDe's headers are (Debian: libsimde-dev). Needed where the processor has
#             no AVX512_BF16, and with EMULATE=ON
#   cuda90    the GPU's kernels as compiled for compute capability 9.0, executed on the CPU; likewise cuda80 and cuda100
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PATH:$PWD/.venv/bin" # cmake and ninja, if the machine has none

run() { # folder, labels of tests, options
  local folder=build/cpp-$1 targets=()
  for label in $2; do targets+=("tests_$label"); done
  cmake -S . -B "$folder" -G Ninja -DJAXLOWPREC_TESTS=ON -DJAXLOWPREC_MODULE=OFF "${@:3}"
  cmake --build "$folder" --target "${targets[@]}"
  ctest --test-dir "$folder" --parallel "$(nproc)" --output-on-failure --no-tests=error -L "^(${2// /|})\$"
}

parts=("$@")
if [[ $# == 0 ]]; then
  parts=(release address thread cuda90 cuda80 cuda100)
  if [[ ${EMULATE:-OFF} == ON ]] || ! grep -qw avx512_bf16 /proc/cpuinfo 2>/dev/null; then parts+=(emulated); fi
fi

released=() # parts of one build
others=()
for part in "${parts[@]}"; do
  case $part in
    release) released+=(release) ;;
    emulated | cuda80 | cuda90 | cuda100) released+=("$part") ;;
    address | thread) others+=("$part") ;;
    *) echo "test_cpp.sh: no part '$part'; there are release, address, thread, emulated, cuda80, cuda90 and cuda100" >&2; exit 2 ;;
  esac
done

cublas=()
[[ -e build/cublas/cublasLt.h ]] && cublas=(-DJAXLOWPREC_CUBLAS_INCLUDE="$PWD/build/cublas")
[[ ${#released[@]} == 0 ]] || run release "${released[*]}" "${cublas[@]}"
for part in "${others[@]}"; do
  case $part in
    address) run address release -DJAXLOWPREC_SANITIZE=address,undefined -DJAXLOWPREC_CUDA=OFF -DJAXLOWPREC_ISAS="${ISA:-avx2}" ;;
    thread) run thread threads -DJAXLOWPREC_SANITIZE=thread -DJAXLOWPREC_CUDA=OFF -DJAXLOWPREC_ISAS=portable ;;
  esac
done
