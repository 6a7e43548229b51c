#!/bin/sh
# A draft head for Qwen2.5-Coder-1.5B-Instruct, to be measured, not shipped. It goes on where it stopped.
#
#     recipes/qwen-head.sh FOLDER TARGET.gguf [TEXTS] [STEPS]
#
# As smollm2-head.sh, but for a target of which every token counts: TEXTS answers to prompts (code and prose in turn), 128 side
# by side in bfloat16, which is several times as fast as its weights in 4 bits are at so many rows, and none to questions of its
# own. The network is narrower than the target's, and few tokens are drafted: a drafted token should cost some 5 ms in 8 bits.
set -eu
out=$1 texts=${3:-800} steps=${4:-1500} target="--target $2" writing='--dtype bfloat16' rows=128
. "$(dirname -- "$0")/head_stages.sh"

texts "$texts" 0
train head first 140000 20000 --vocabulary 8192 --intermediate-size 3072 --state-layers 2,14,26 --depth 1 --learning-rate 8e-4 --steps "$steps"
train head head 140000 20000 --start "$out/first" --vocabulary 12288 --depth 3 --learning-rate 4e-4 --steps $((steps / 6))
