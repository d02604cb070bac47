#!/usr/bin/env bash
# Makes an environment in which SGLang serves models of text on a CPU: sglang.sh FOLDER [PYTHON]. Some 7 GB,
# since PyPI's torch that SGLang asks for is built for GPUs. Tests use it where JAXLOWPREC_SGLANG_PYTHON=FOLDER/bin/python.
set -euo pipefail
folder=$1 python=${2:-python3} here=$(dirname "$0")
pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet)
[[ -e $folder/ready ]] && exit
"$python" -m venv "$folder"
"${pip[@]}" install --no-deps 'sglang==0.5.23'
# What kernels for GPUs, images, sound and other front ends need is left out.
"$folder/bin/python" "$here/requirements_of.py" sglang >"$folder/requirements.txt" --without \
  torchaudio torchcodec torch_memory_saver timm av decord2 \
  cuda-python nvidia-cutlass-dsl nvidia-mathdx nvidia-ml-py nvshmem4py-cu13 flash-attn-4 \
  flashinfer_python humming-kernels quack-kernels tilelang kernels sglang-kernel sgl-deep-ep \
  sgl-deep-gemm sgl-flash-mla anthropic deepseek-recipe tml-renderers smg-grpc-servicer build \
  py-spy ninja blobfile datasets modelscope mistral_common outlines
"${pip[@]}" install -r "$folder/requirements.txt" dill jsonschema setuptools
touch "$folder/ready"
