#!/bin/bash
# What only a GPU can show, on a machine with one and no network, in under eight minutes (scripts/gpu_check.py):
#
#     scripts/gpu_check.sh [--out FILE] [--parts NAME ...]
#
# PYTHON names the interpreter; else .venv's (make setup TORCH_INDEX=), else python3. WHEELS names a folder of wheels,
# brought along, of packages that it lacks: they are put in a temporary folder, and nothing is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${PYTHON:-}" ]; then
    PYTHON=$([ -x .venv/bin/python ] && .venv/bin/python -c 'import torch' 2>/dev/null && echo .venv/bin/python || echo python3)
fi
if [ -n "${WHEELS:-}" ]; then
    packages=$(mktemp -d)
    trap 'rm -rf "$packages"' EXIT
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$packages" "$WHEELS"/*.whl
    export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
timeout --kill-after=5 475 "$PYTHON" -m scripts.gpu_check "$@"
