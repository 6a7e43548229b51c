#!/bin/sh
# A draft head for Qwen2.5-Coder-1.5B-Instruct, to be measured, not shipped. It goes on where it stopped.
#
#     recipes/qwen-head.sh FOLDER TARGET.gguf [TEXTS] [STEPS]
#
# As smollm2-head.sh, but for a target of which every token counts: its texts are written with weights in 4 bits (OpenVINO),
# TEXTS (3 at least) to prompts and a third as many of its own; its states are those of bfloat16. The network is narrower than
# the target's, since a drafted token should cost some 3 ms in 8 bits. No spaces in the path of TARGET.gguf.
set -eu
out=$1 texts=${3:-1200} steps=${4:-4000} target="--target $2" writing='--dtype int4'
. "$(dirname -- "$0")/head_stages.sh"

texts "$texts" $((texts / 3))
train first 60000 20000 --vocabulary 8192 --intermediate-size 4096 --state-layers 2,14,26 --depth 1 --learning-rate 1e-3 --steps "$steps"
train head 60000 20000 --start "$out/first" --vocabulary 16384 --depth 3 --learning-rate 4e-4 --steps $((steps / 4))
