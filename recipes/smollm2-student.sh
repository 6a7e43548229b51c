#!/bin/sh
# A student of SmolLM2-135M-Instruct with two of its layers, which drafts 8,192 tokens, from nothing but this checkout and its
# environment (extra `bench`). It goes on where it stopped; data and held-out texts as for the head
# (smollm2-head.sh), and of the same seed.
#
#     recipes/smollm2-student.sh FOLDER [TEXTS] [STEPS]
set -eu
out=$1 texts=${2:-800} steps=${3:-2000} target='' writing='' rows=64
. "$(dirname -- "$0")/head_stages.sh"

texts "$texts" "$texts"
train student student 100000 60000 --vocabulary 8192 --layers 2 --learning-rate 6e-4 --steps "$steps"
