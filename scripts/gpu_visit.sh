#!/usr/bin/env bash
# Fifteen minutes of a GPU, planned.
#
#   gpu_visit.sh wheel          before, without a GPU: builds runs/gpu_visit/*.whl for sm_90a, for the Python that is to run it
#   WHEEL=FILE gpu_visit.sh OUT on the device: the steps below, by gpu_check.sh; without WHEEL the library is compiled there
#
#   2 min    every kernel launched once
#   2 min    the same under a tool of compute-sanitizer: TOOL=memcheck, racecheck, initcheck or synccheck
#   5 min    the benchmark: training steps, few rows, GEMMs, rows in groups, quantisers; ONLY='few-rows' for some
#   1 min    the worst three rows by Nsight Compute
#
# Each step ends within its time and is useful alone. A later call with the same OUT, or with RESUME=FOLDER, goes on where this
# one ended. gpu_check.sh has further variables, among them DRY_RUN=1.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# == 1 ]] || { echo "gpu_visit.sh: needs 'wheel', or a folder for the results" >&2; exit 2; }

if [[ $1 == wheel ]]; then
  exec "${PYTHON:-python3}" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir runs/gpu_visit \
    -C cmake.define.JAXLOWPREC_CUDA=ON -C cmake.define.JAXLOWPREC_CUDA_ARCHS=90a -C cmake.define.JAXLOWPREC_CUDA_PTX= .
fi

failed=()
step() { # minutes, phase
  MINUTES=$1 scripts/gpu_check.sh "$out" "$2" || failed+=("$2")
}
out=$1
step "${ONCE_MINUTES:-2}" once
step "${TOOL_MINUTES:-2}" "${TOOL:-memcheck}"
step "${BENCH_MINUTES:-5}" bench
step "${PROFILE_MINUTES:-1}" profile
echo "gpu_visit.sh: $((4 - ${#failed[@]})) of 4 steps passed${failed[*]:+; failed: ${failed[*]}}"
exit $((${#failed[@]} > 0))
