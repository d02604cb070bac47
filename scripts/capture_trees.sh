#!/usr/bin/env bash
# Captures the trees of other trainers again, for tests/checkpoints/families: capture_trees.sh FOLDER [PYTHON3.11] [PYTHON3.12].
# Makes two environments in FOLDER, some 5 GB: one with tunix and the gemma package, one with MaxText, which needs Python 3.12.
# They have what imports of the models need; what only other parts of these packages need is left out.
set -euo pipefail
mkdir -p "$1"
folder=$(cd "$1" && pwd) python311=${2:-python3.11} python312=${3:-python3.12}
cd "$(dirname "$0")/../tests/checkpoints/families/captured"

environment() { # name, Python
  [[ -e $folder/$1/ready ]] && return
  "$2" -m venv "$folder/$1"
  "$folder/$1/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps -r "$1.txt"
  touch "$folder/$1/ready"
}

environment tunix "$python311"
environment maxtext "$python312"
export JAX_PLATFORMS=cpu DECOUPLE_GCLOUD=TRUE # MaxText then imports nothing of Google's cloud
"$folder/tunix/bin/python" capture.py tunix flax_gemma
"$folder/maxtext/bin/python" capture.py maxtext
git --no-pager diff --stat -- .
