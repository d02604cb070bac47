#!/usr/bin/env bash
# Checks and measures the GPU kernels on a machine with an NVIDIA GPU: gpu_check.sh OUT [PHASE...]
#
#   once        the machine's facts, the build, and every kernel launched once
#   test        tests/gpu against the CPU, without the slowest
#   bench       benchmarks/gpu.py, training and GEMMs with few rows first
#   memcheck, racecheck, initcheck, synccheck
#               compute-sanitizer over the tests that launch every kernel once
#   profile     the three worst rows of the benchmark: bandwidth, occupancy, stall reasons (ncu), or times
#   slow        the slowest of tests/gpu, and those that need the device's whole memory
#   suite       all other tests with the GPU in the CPU's place; only if it is named
#
# Without PHASE all but the last. Each builds first where nothing is built, ends within MINUTES, writes OUT/PHASE.log, and adds
# each result to OUT as it comes: tests.jsonl, gpu.json, profiles.json. A later call with the same OUT goes on: what passed or
# was measured with the same library on the same device is left out. OUT/summary.txt is written after every step. The exit
# status is 1 if a phase failed or was cut off.
#
#   PYTHON=.venv/bin/python   default: that one if it is there, else python3
#   MINUTES=9                 for each phase, its build included
#   RESUME=FOLDER             OUT of an earlier call: its results and its build are copied to OUT first
#   AGAIN=1                   results of earlier calls do not count
#   ONLY='*few rows*'         which rows of the benchmark, as benchmarks/gpu.py --only
#   PYTEST_ADDOPTS='-k int4'  pytest's own variable
#   WORKERS=4                 processes that share the GPU in `test`
#   DRY_RUN=1                 a CPU in the GPU's place and small sizes: shows that the phases work
#
# Needs no network if PYTHON has JAX with CUDA, the test packages, scikit-build-core, nanobind, cmake and ninja, and nvcc and
# cublasLt.h are found (cmake/FindJaxlowprecCuda.cmake).
set -euo pipefail
cd "$(dirname "$0")/.."
known=(once test bench memcheck racecheck initcheck synccheck profile slow suite)
usage() {
  echo "gpu_check.sh: $1; needs: gpu_check.sh OUT [PHASE...], with phases of: ${known[*]}" >&2
  exit 2
}
[[ ${1:-} && ! " ${known[*]} " == *" $1 "* ]] || usage "no folder for the results is given"
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
phases=("$@")
(($#)) || phases=("${known[@]::${#known[@]}-1}")
for phase in "${phases[@]}"; do [[ " ${known[*]} " == *" $phase "* ]] || usage "'$phase' is not a phase"; done

PYTHON=$(command -v "${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}")
[[ $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
source=$PWD work=$PWD/build/gpu_check # the installation, and the tests apart from the source tree's own package
tree=$work/tree results=$out/tests.jsonl scripts=$PWD/scripts/gpu_check
seconds=$("$PYTHON" -c "print(int(float('${MINUTES:-9}') * 60))")
workers=${WORKERS:-4}
only=() again=() divide=()
[[ ! ${ONLY:-} ]] || only=(--only "$ONLY")
[[ ! ${AGAIN:-} ]] || again=(--again)
[[ ! ${DRY_RUN:-} ]] || divide=(--divide 32 --rounds 3)
status=() failed=() child='' begun=$SECONDS
export PYTHON PYTHONUNBUFFERED=1 PYTHONPATH=$work/site:$scripts${PYTHONPATH:+:$PYTHONPATH}
# What one process has compiled, others and later calls need not.
export JAX_COMPILATION_CACHE_DIR=$work/cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
unset JAX_PLATFORMS
if [[ ${DRY_RUN:-} ]]; then
  export JAX_PLATFORMS=cpu JAXLOWPREC_GPU_TESTS_ON=cpu
else
  PATH+=:${CUDA_HOME:-/usr/local/cuda}/bin # for compute-sanitizer and ncu
fi
commit=${JAXLOWPREC_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo 'unknown: set JAXLOWPREC_COMMIT')}
device=$([[ ${DRY_RUN:-} ]] && echo "a CPU in its place" || nvidia-smi --query-gpu=name --format=csv,noheader | head -1) ||
  device="no GPU: nvidia-smi is missing or fails"

# --- time, logs and the summary

summarize() {
  {
    echo "$(date -u '+%F %R') UTC: ${phases[*]}, on $device, commit $commit"
    printf '%s\n' "${status[@]}"
    [[ ! -e $out/gpu.json ]] || "$PYTHON" benchmarks/gpu_file.py "$out/gpu.json"
  } >"$out/summary.new" && mv "$out/summary.new" "$out/summary.txt"
}

note() { # text
  status+=("$1")
  echo "$1"
  summarize
}

# Ends with the command that runs, so that nothing is left behind on the device.
end() { # why
  if [[ $child ]]; then
    kill -TERM "$child" 2>/dev/null || true
    wait "$child" || true
  fi
  note "${phase:-}: FAILED, gpu_check.sh was ended from outside after $((SECONDS - begun)) s"
  cat "$out/summary.txt"
  exit 1
}
trap end TERM INT HUP

# Runs a command with what is left of the phase's time, in a folder; its output goes to the phase's log as it comes. Leaves its
# exit status in `code` and says in `verdict` how it ended.
run() { # folder, command...
  local left=$((deadline - SECONDS - 8)) started=$SECONDS
  code=0 verdict="FAILED, the phase had no time left for it"
  if ((left < 2)); then
    code=124
    return
  fi
  (cd "$1" && exec timeout --kill-after=5 "$left" "${@:2}") >>"$out/$phase.log" 2>&1 &
  child=$!
  wait "$child" || code=$?
  child=
  case $code in
    0) verdict=ok ;;
    124 | 137) verdict="CUT OFF" ;;
    *) verdict="FAILED ($code)" ;;
  esac
  verdict+=", $((SECONDS - started)) s"
}

fail() { # the phase that runs
  [[ " ${failed[*]:-} " == *" $phase "* ]] || failed+=("$phase")
}

# --- what the phases consist of

ready=
prepare() { # builds, and copies what the tests need
  [[ ! $ready ]] || return 0
  rm -rf "$tree"
  mkdir -p "$tree"
  cp -r tests examples benchmarks docs README.md pyproject.toml "$tree"
  run "$source" bash "$scripts/build.sh" "$work" "$out/installed.tar.gz"
  note "build: $verdict"
  if ((code)); then
    tail -30 "$out/$phase.log"
    return 1
  fi
  key="$device, $("$PYTHON" benchmarks/sources.py)"
  ready=1
}

# Runs tests by `command`, which starts Python; each result goes to tests.jsonl.
tests() { # name of a checker or '', arguments of pytest...
  local tool=$1 before=$work/before.jsonl id said well=0
  id="$phase $(date +%s)-$$"
  rm -f "$before"
  [[ ${AGAIN:-} || ! -e $results ]] || cp "$results" "$before"
  run "$tree" "${command[@]}" "$PYTHON" -m pytest -p no:cacheprovider -p results --results="$results" --before="$before" \
    --key="$key" --tool="$tool" --run="$id" --tb=short -ra -v -o faulthandler_timeout=120 "${@:2}"
  said=$("$PYTHON" "$scripts/results.py" count "$results" "$id") || well=1
  note "$phase: $verdict; $said"
  ((code == 0 && well == 0)) || fail
}

gpu_tests=() # in this order
for name in runtime assumptions matmul quantize training golden int4 grouped statistics producers optimizer; do gpu_tests+=("tests/gpu/test_$name.py"); done

sanitize() { # tool
  if ! command -v compute-sanitizer >/dev/null; then
    note "$1: FAILED, compute-sanitizer is not on the PATH: it comes with the CUDA toolkit"
    fail
    return
  fi
  # Each allocation its own, so that the checker sees its end; no graphs, so that it sees each launch. initcheck has to see what
  # XLA's kernels write, too.
  local kernels=(--kernel-name kns=jaxlowprec)
  [[ $1 != initcheck ]] || kernels=()
  command=(compute-sanitizer --tool "$1" "${kernels[@]}" --error-exitcode 3)
  export XLA_PYTHON_CLIENT_ALLOCATOR=platform
  [[ ${DRY_RUN:-} ]] || export XLA_FLAGS="--xla_gpu_enable_command_buffer="
  local before found
  before=$(stat --format=%s "$out/$phase.log" 2>/dev/null || echo 0)
  tests "$1" -m "gpu and sanitize and not slow" "${gpu_tests[@]}"
  unset XLA_PYTHON_CLIENT_ALLOCATOR XLA_FLAGS
  # An error is reported apart from the test that launched the kernel: a later call repeats all of them.
  found=$(tail -c +$((before + 1)) "$out/$phase.log" |
    grep -aE '^=+ ((ERROR|RACECHECK) SUMMARY: [1-9]|Invalid |Uninitialized |Error: |Warning: |Barrier error)' | tail -1) || true
  if [[ $found ]]; then
    "$PYTHON" "$scripts/results.py" void "$results" "$1"
    note "$1: FAILED, it found errors: $found"
    fail
  fi
}

phase_once() {
  run "$source" bash "$scripts/facts.sh"
  note "facts: $verdict"
  prepare || return
  tests '' -n "$workers" -m "gpu and sanitize and not slow" "${gpu_tests[@]}"
}

phase_test() { tests '' -n "$workers" --maxschedchunk 1 --maxfail 200 -m "gpu and not slow" "${gpu_tests[@]}"; }

phase_slow() { tests '' -m "gpu and slow" --slow "${gpu_tests[@]}"; }

phase_suite() {
  [[ ${DRY_RUN:-} ]] || export JAXLOWPREC_TESTS_ON=cuda
  tests '' -n "$(($(nproc) / 2 + 1))" --maxfail 200 -m "not gpu"
  unset JAXLOWPREC_TESTS_ON
}

phase_bench() {
  unset XLA_PYTHON_CLIENT_PREALLOCATE # the benchmark has the device for itself
  run "$source" "$PYTHON" benchmarks/gpu.py --save "$out/gpu.json" "${divide[@]}" "${only[@]}" "${again[@]}"
  note "bench: $verdict; $([[ ! -e $out/gpu.json ]] || "$PYTHON" benchmarks/gpu_file.py "$out/gpu.json" | tail -1)"
  ((code == 0)) || fail
}

phase_profile() {
  command -v ncu >/dev/null || note "profile: ncu is not on the PATH: XLA's kernel times instead"
  run "$source" "$PYTHON" benchmarks/gpu_profile.py "$out/gpu.json" --save "$out/profiles.json"
  note "profile: $verdict; see profile.log"
  ((code == 0)) || fail
}

# --- the phases

mkdir -p "$work"
if [[ ${RESUME:-} ]]; then
  for file in tests.jsonl gpu.json profiles.json installed.tar.gz; do
    [[ ! -e $RESUME/$file || -e $out/$file ]] || cp "$RESUME/$file" "$out"
  done
fi
for phase in "${phases[@]}"; do
  deadline=$((SECONDS + seconds))
  command=(env)
  export XLA_PYTHON_CLIENT_PREALLOCATE=false # several processes share the GPU
  echo "=== $phase, $(date -u '+%F %T') UTC" >>"$out/$phase.log"
  if [[ $phase != once ]] && ! prepare; then
    fail
    break
  fi
  case $phase in
    *check) sanitize "$phase" ;;
    *) "phase_$phase" || fail ;;
  esac
  [[ $ready ]] || break # nothing can be tested or measured without the library
done
if ((${#failed[@]})); then
  note "FAILED: ${failed[*]}"
else
  note "all passed: ${phases[*]}"
fi
echo
cat "$out/summary.txt"
exit $((${#failed[@]} > 0))
