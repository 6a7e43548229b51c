#!/bin/sh
# A deep-and-narrow student of Qwen2.5-Coder-1.5B-Instruct, to be measured, not shipped: the 0.5B with 1,536 of the 4,864
# neurons of each layer, over 32,000 tokens. It goes on where it stopped.
#
#     recipes/qwen-student.sh FOLDER TARGET.gguf BODY.gguf [TEXTS] [STEPS]
#
# Data and held-out texts as for the head (qwen-head.sh), in the same folder if you like.
set -eu
out=$1 body=$3 texts=${4:-900} steps=${5:-700} target="--target $2" writing='--dtype int8' rows=64
. "$(dirname -- "$0")/head_stages.sh"

texts "$texts" 0
train student student 60000 20000 --body "$body" --intermediate-size 1536 --vocabulary 32000 --steps "$steps"
