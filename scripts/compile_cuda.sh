#!/usr/bin/env bash
# Compiles only the GPU kernels: warnings, register spills and local memory are errors, and so are kernels that keep too few
# bytes in flight (check_machine_code.sh). It needs nvcc, and no GPU.
#   compile_cuda.sh             all architectures
#   compile_cuda.sh 90a         one, while developing
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PATH:$PWD/.venv/bin" # cmake and ninja, if the machine has none
archs=(-U 'JAXLOWPREC_CUDA_ARCHS' -U 'JAXLOWPREC_CUDA_PTX') # what an earlier call chose
[[ $# == 0 ]] || archs=(-DJAXLOWPREC_CUDA_ARCHS="$(IFS=';' && echo "$*")" -DJAXLOWPREC_CUDA_PTX=)
scripts/cublas_headers.sh build/cublas
cmake -S . -B build/cuda -G Ninja -DJAXLOWPREC_MODULE=OFF -DJAXLOWPREC_CUDA=ON -DJAXLOWPREC_CUDA_STRICT=ON \
  -DJAXLOWPREC_CUBLAS_INCLUDE="$PWD/build/cublas" "${archs[@]}"
cmake --build build/cuda --target jlp_cuda
partial=()
[[ $# == 0 ]] || partial=(--partial)
scripts/check_machine_code.sh "${partial[@]}" build/cuda/cuda/*.o
