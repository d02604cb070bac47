#!/usr/bin/env bash
# Makes an environment in which SGLang serves models of text on a CPU: sglang.sh FOLDER [PYTHON]. Some 2 GB. Tests use it
# where JAXLOWPREC_SGLANG_PYTHON=FOLDER/bin/python.
set -euo pipefail
folder=$1 python=${2:-python3}
pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet)
[[ -e $folder/ready ]] && exit
"$python" -m venv "$folder"
"${pip[@]}" install --no-deps 'sglang==0.5.23'
# What GPUs, images, sound and other front ends need is left out; SGLang asks for torch 2.14.1, whose wheels are for GPUs.
"$folder/bin/python" - >"$folder/requirements.txt" <<'PYTHON'
import importlib.metadata, re

LEFT_OUT = {
    *("torch", "torchaudio", "torchcodec", "torchvision", "torch_memory_saver", "timm", "av", "decord2", "soundfile"),
    *("cuda-python", "nvidia-cutlass-dsl", "nvidia-mathdx", "nvidia-ml-py", "nvshmem4py-cu13", "flash-attn-4"),
    *("flashinfer_python", "humming-kernels", "quack-kernels", "tilelang", "kernels", "sglang-kernel", "sgl-deep-ep"),
    *("sgl-deep-gemm", "sgl-flash-mla", "anthropic", "deepseek-recipe", "tml-renderers", "smg-grpc-servicer", "build"),
    *("py-spy", "ninja", "blobfile", "datasets", "modelscope", "mistral_common", "outlines"),
}
for line in importlib.metadata.requires("sglang"):
    requirement, _, marker = line.partition(";")
    if "extra ==" not in marker and re.match(r"[\w.-]+", line)[0] not in LEFT_OUT:
        print(line)
print("torch==2.13.0", "setuptools", sep="\n")
PYTHON
"${pip[@]}" install -r "$folder/requirements.txt"
touch "$folder/ready"
