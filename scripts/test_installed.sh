#!/usr/bin/env bash
# Tests an installed wheel, not the source tree beside it: test_installed.sh PYTHON TEST...
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp -r tests examples docs pyproject.toml "$folder"
cd "$folder"
export JAX_PLATFORMS=cpu
"$python" -m jaxlowprec.cli.main info
"$python" -c 'from jaxlowprec.wiring import native; assert native.library().module, native.library().reason'
"$python" -m pytest -n 2 --dist worksteal "${@:2}"
