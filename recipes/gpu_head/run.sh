#!/bin/sh
# On the machine with the GPU, from the root of the checkout: prepare beforehand by
#     outrider train corpus -o CORPUS --characters 40000000 && python recipes/gpu_head/prompts.py CORPUS PROMPTS.npz
#
#     recipes/gpu_head/run.sh MODEL.gguf PROMPTS.npz OUT [SECONDS_TEXTS] [SECONDS_TRAIN] [options of on_gpu.py]
#
# It goes on from the shipped head, or from $START. The shipped one itself was begun from the head of commit ee54af3.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
model=$1 prompts=$2 out=$3 texts=${4:-70} train=${5:-150}
[ $# -lt 5 ] && shift $# || shift 5
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True PYTORCH_ALLOC_CONF=expandable_segments:True
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" "$here/on_gpu.py" --model "$model" --prompts "$prompts" --out "$out" \
    --start "${START:-$here/../../src/outrider/heads/shipped/smollm2-135m-instruct}" \
    --seconds-texts "$texts" --seconds-train "$train" "$@"
