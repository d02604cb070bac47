#!/usr/bin/env bash
# The kernels compile for Arm: the portable ones, by a cross compiler (Debian: g++-aarch64-linux-gnu), fetched if missing.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v aarch64-linux-gnu-g++ >/dev/null; then
  apt-get update -qq
  apt-get install -y -qq g++-aarch64-linux-gnu
fi
cmake -S . -B build/arm -DJAXLOWPREC_MODULE=OFF -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
cmake --build build/arm --parallel "$(nproc)"
