#!/usr/bin/env bash
# What the GPU kernels are and how fast, on a machine with an NVIDIA GPU: gpu_check.sh OUT
#
# Builds for the GPU that is there, runs the tests on it (and the CPU's own beside them), compute-sanitizer over the tests
# marked for it, and the benchmarks. Leaves OUT/gpu.json and a log a phase, each written as results come, and prints a table
# last. Needs no network if PYTHON has JAX with CUDA, the test packages, scikit-build-core, nanobind, cmake and ninja, and
# nvcc and cublasLt.h are found (cmake/FindJaxlowprecCuda.cmake). 10 minutes on 16 cores; what has no time left is cut off.
#
#   PHASES="facts build test sanitize bench"   what to do
#   PYTHON=.venv/bin/python                    default: that one if it is there, else python3
#   MINUTES=9.5                                for everything together
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
python=$(command -v "${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}")
phases=${PHASES:-facts build test sanitize bench}
work=$PWD/build/gpu_check # the installation, and the tests apart from the source tree's own package
seconds=$("$python" -c "print(int(float('${MINUTES:-9.5}') * 60))")
for_bench=200
cores=$(nproc)
status=()
export PYTHONUNBUFFERED=1 PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
export XLA_PYTHON_CLIENT_PREALLOCATE=false # several processes share the GPU
unset JAX_PLATFORMS
rm -f "$out"/{build,cpu_tests,gpu_tests,sanitize,bench}.log "$out"/gpu.json "$out"/summary.txt
mkdir -p "$work"

# Runs a command with a share of the time, in a folder; its output goes to a log as it comes.
phase() { # name, log, most seconds, folder, command...
  local name=$1 log=$out/$2.log most=$3 folder=$4 left=$((seconds - SECONDS)) code said results before started=$SECONDS
  shift 4
  [[ $name != bench ]] && wanted bench && left=$((left - for_bench))
  ((most < left)) && left=$most
  if ((left < 5)); then
    status+=("$name: FAILED, no time left")
    return 1
  fi
  before=$(stat --format=%s "$log" 2>/dev/null || echo 0)
  (cd "$folder" && timeout --kill-after=5 "$left" "$@") >>"$log" 2>&1
  code=$?
  said=$(tail -c +$((before + 1)) "$log" | grep -aE '^=+ .* in [0-9.]+s|ERROR SUMMARY|RACECHECK SUMMARY' | tail -1)
  if ((code == 124 || code == 137)); then
    results=$(tail -c +$((before + 1)) "$log")
    said="cut off, $(grep -ac ' PASSED ' <<<"$results") passed and $(grep -ac ' FAILED ' <<<"$results") failed till then"
  fi
  status+=("$name: $([[ $code == 0 ]] && echo ok || echo "FAILED ($code)"), $((SECONDS - started)) s $said")
  echo "${status[-1]}"
  return $code
}

wanted() { [[ " $phases " == *" $1 "* ]]; }

# `make gpu` installs so that the source tree is used.
is_here='import sys, jaxlowprec, jaxlowprec.native as n; m = n.library().module
sys.exit(not (jaxlowprec.__file__.startswith(sys.argv[1] + "/jaxlowprec/") and m and not m.no_cuda))'

facts() {
  nvidia-smi || return
  nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit --format=csv
  command -v nvcc && nvcc --version
  "$python" -m pip list 2>/dev/null | grep -iE '^(jax|flax|numpy|ml.dtypes|nvidia|nanobind|scikit|cmake|ninja|pytest)'
  git rev-parse HEAD
  lscpu | grep -E 'Model name|^CPU\(s\)'
}

build() {
  local capability arch
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
  case $capability in
    8?) arch=80 ;;
    90 | 100 | 120) arch=${capability}a ;;
    *) arch= ;; # runs from portable code
  esac
  rm -rf "$work/site" "$work/tree"
  mkdir -p "$work/tree"
  cp -r tests examples benchmarks pyproject.toml "$work/tree"
  if (cd / && "$python" -c "$is_here" "$OLDPWD"); then
    echo "installed from this source tree, with GPU kernels: used as it is"
    return
  fi
  export CMAKE_BUILD_PARALLEL_LEVEL=$cores
  "$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --target "$work/site" \
    -C build-dir="$work/build" -C cmake.define.JAXLOWPREC_CUDA=ON -C cmake.define.JAXLOWPREC_CUDA_ARCHS="$arch" \
    -C cmake.define.JAXLOWPREC_CUDA_PTX="$([[ $arch ]] || echo 90)" . || return
  (cd "$work/tree" && "$python" -m jaxlowprec.cli.main info)
}

sanitize() { # tool
  # Each allocation its own, so that the checker sees its end; no graphs, so that it sees each launch.
  XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS="--xla_gpu_enable_command_buffer=" \
    compute-sanitizer --tool "$1" --kernel-name kns=jaxlowprec --error-exitcode 3 \
    "$python" -m pytest -v -p no:cacheprovider -m "gpu and sanitize" -k "not slow" tests/gpu
}

summary() {
  echo
  printf '%s\n' "${status[@]}"
  [[ -e $out/gpu.json ]] && "$python" benchmarks/gpu.py --show "$out/gpu.json"
}
trap 'summary | tee "$out/summary.txt"' EXIT
trap 'exit 1' TERM INT

export -f facts build sanitize
export python work cores is_here
failed=0
tests=(-m pytest -p no:cacheprovider --tb=short -ra -v)
if wanted facts; then phase facts build 30 . bash -c facts || failed=1; fi
if wanted build; then
  phase build build 240 . bash -c build || {
    tail -30 "$out/build.log"
    exit 1
  }
fi
if wanted test; then
  # Some cores have the CPU's suite, the others first the comparison of GPU and CPU, then the suite on the GPU. The
  # benchmarks come when all have ended: they need the machine for themselves.
  JAX_PLATFORMS=cpu phase cpu_tests cpu_tests 200 "$work/tree" "$python" "${tests[@]}" -n $((cores * 3 / 8)) --maxfail=50 >"$work/cpu" &
  beside=$!
  phase gpu_tests gpu_tests 120 "$work/tree" "$python" "${tests[@]}" -n $((cores * 5 / 8)) -m gpu --maxfail=200 tests/gpu || failed=1
  phase gpu_large gpu_tests 60 "$work/tree" "$python" "${tests[@]}" -m "gpu and slow" --slow tests/gpu || failed=1
  JAXLOWPREC_TESTS_ON=cuda phase gpu_suite gpu_tests 60 "$work/tree" "$python" "${tests[@]}" -n $((cores * 5 / 8)) -m "not gpu" || failed=1
  wait $beside || failed=1
  status+=("$(tail -1 "$work/cpu")")
fi
if wanted sanitize; then
  for tool in memcheck racecheck; do
    phase $tool sanitize 50 "$work/tree" bash -c "sanitize $tool" || failed=1
  done
fi
if wanted bench; then
  unset XLA_PYTHON_CLIENT_PREALLOCATE
  phase bench bench $for_bench "$PWD" "$python" benchmarks/gpu.py --save "$out/gpu.json" || failed=1
fi
exit $failed
