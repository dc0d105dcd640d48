#!/usr/bin/env bash
# Checks Piecework's numbers on a GPU, then times it: one table, and JSON under $OUT. At most 8 minutes.
#   tools/gpu_check.sh          on a machine with a GPU, torch, triton and transformers
#   tools/gpu_check.sh --large  a model of 8 billion weights, too
#   tools/gpu_check.sh --dry    the same steps, tiny, on the simulated accelerator
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec timeout 480 "${PYTHON:-python3}" -m tools.gpu_check "$@"
