#!/usr/bin/env bash
# Whether the GPU kernels' machine code keeps enough bytes in flight (scripts/machine_code): check_machine_code.sh FILE...
# Files are objects, libraries or wheels with code for sm_90a and sm_100f, whose name in them is sm_100. Options of
# scripts/machine_code/check.py may come first: --table, --count, --partial. The two tools that read machine code come from
# PyPI, 6 MB, into build/cuda_tools.
# Half a minute for all kernels; for those that have not changed since, a second.
set -euo pipefail
build=$(cd "$(dirname "$0")/.." && pwd)/build
tools=$build/cuda_tools
if [[ ! -x $tools/nvidia/cu13/bin/nvdisasm || ! -x $tools/nvidia/cu13/bin/cuobjdump ]]; then
  "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --upgrade --target "$tools" \
    'nvidia-cuda-nvdisasm>=13,<14' 'nvidia-cuda-cuobjdump>=13,<14'
fi
PATH="$tools/nvidia/cu13/bin:$PATH" "${PYTHON:-python3}" "$(dirname "$0")/machine_code/check.py" --cache "$build/machine_code" "$@"
