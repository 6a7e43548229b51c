#!/bin/sh
# The draft head for SmolLM2-135M-Instruct that the one in the package began as (`gpu_head`), from nothing but this checkout
# and its environment (extra `bench`). It goes on where it stopped.
#
#     recipes/smollm2-head.sh FOLDER [TEXTS] [STEPS]
#
# Data: TEXTS answers of the target to questions that it asks itself, half as many to each of two kinds of prompts (functions
# of the corpus, prose about plain things), greedy and at temperature 1; code and documentation of the installed packages
# under permissive licences (corpus/licences.json names them). Held out, and not in the data: its answers to the twenty
# requests of `bench tasks --task chat`, to twenty problems of HumanEval, and prose about twenty other things.
set -eu
out=$1 texts=${2:-1600} steps=${3:-6000} target='' writing='' rows=64
. "$(dirname -- "$0")/head_stages.sh"

texts "$texts" "$texts"
# Chains of depth 1 over few tokens take a third of the time of depth 3, and what is learnt there holds for the later ones.
train head first 250000 150000 --vocabulary 8192 --state-layers 2,15,27 --depth 1 --learning-rate 1.2e-3 --steps "$steps"
train head head 250000 150000 --start "$out/first" --vocabulary 12288 --depth 3 --learning-rate 5e-4 --steps $((steps / 4))

# What is shipped: the head, and a card that names no folder of this run.
mkdir -p "$out/shipped"
cp "$out/head/config.json" "$out/head/model.safetensors" "$out/corpus/licences.json" "$out/shipped"
for page in README.md card.json; do
    sed -e "s#head:path=$out/head#head#g" -e "s#$out/##g" "$out/head/$page" >"$out/shipped/$page"
done
