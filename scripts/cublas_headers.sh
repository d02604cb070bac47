#!/usr/bin/env bash
# Puts cuBLASLt's headers, and nothing else of cuBLAS, into a folder: cublas_headers.sh FOLDER [PYTHON]
# They come from PyPI's nvidia-cublas, some 400 MB of which 1 MB is kept. Then build with
# -C cmake.define.JAXLOWPREC_CUBLAS_INCLUDE=FOLDER
set -euo pipefail
folder=$1 python=${2:-python3}
[[ -e $folder/cublasLt.h ]] && exit
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --only-binary=:all: \
  --dest "$download" 'nvidia-cublas==13.0.*'
"$python" - "$download" "$folder" <<'PYTHON'
import pathlib, sys, zipfile

download, folder = map(pathlib.Path, sys.argv[1:])
folder.mkdir(parents=True, exist_ok=True)
(wheel,) = download.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if "/include/" in name:
            (folder / pathlib.PurePosixPath(name).name).write_bytes(archive.read(name))
PYTHON
