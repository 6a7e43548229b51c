#!/bin/sh
# The draft head for SmolLM2-135M-Instruct that comes with the package, from nothing but this checkout and its environment
# (extras `train` and `bench`). It goes on where it stopped.
#
#     recipes/smollm2-head.sh FOLDER [TEXTS] [STEPS]
#
# Data: TEXTS answers of the target to questions that it asks itself, half as many to each of two kinds of prompts (functions
# of the corpus, prose about plain things), greedy and at temperature 1; code and documentation of the installed packages
# under permissive licences (corpus/licences.json names them). Held out, and not in the data: its answers to the twenty
# requests of `bench tasks --task chat`, to twenty problems of HumanEval, and prose about twenty other things.
set -eu
out=$1 texts=${2:-1600} steps=${3:-6000}
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
outrider=${OUTRIDER:-$here/../.venv/bin/outrider}
python=$(dirname -- "$outrider")/python
mkdir -p "$out"

write() { # FILE COUNT OPTIONS…
    file=$1 count=$2
    shift 2
    "$outrider" train texts -o "$out/$file" --count "$count" --max-new-tokens 256 --batch-size 64 "$@"
}
[ -d "$out/corpus" ] || "$outrider" train corpus -o "$out/corpus" --characters 4000000
[ -e "$out/prompts.jsonl" ] || "$python" "$here/head_prompts.py" "$out" "$out/corpus/code.jsonl"
for domain in chat code prose; do
    write "held-out-$domain.jsonl" 20 --prompts "$out/prompts-$domain.jsonl" --seed 1000
done
write prompted.jsonl "$texts" --prompts "$out/prompts.jsonl"
write asked.jsonl "$texts"

train() { # FOLDER OPTIONS…
    folder=$1
    shift
    resume=
    ls "$out/$folder"/checkpoints/checkpoint-* >/dev/null 2>&1 && resume=--resume
    # shellcheck disable=SC2086
    "$outrider" train head -o "$out/$folder" --cache "$out/states" --loss mix --batch-size 8 --every 250 \
        --data "$out/prompted.jsonl" --data "$out/asked.jsonl" \
        --data "$out/corpus/code.jsonl@250000" --data "$out/corpus/docs.jsonl@150000" \
        --held-out chat="$out/held-out-chat.jsonl" --held-out code="$out/held-out-code.jsonl" \
        --held-out prose="$out/held-out-prose.jsonl" \
        --licence "Its own texts (model: Apache-2.0); code and documentation of packages under permissive licences (licences.json)" \
        $resume "$@"
}
# Chains of depth 1 over few tokens take a third of the time of depth 3, and what is learnt there holds for the later ones.
train first --vocabulary 8192 --state-layers 2,15,27 --depth 1 --learning-rate 1.2e-3 --steps "$steps"
train head --start "$out/first" --vocabulary 12288 --depth 3 --learning-rate 5e-4 --steps $((steps / 4))

# What is shipped: the head, and a card that names no folder of this run.
mkdir -p "$out/shipped"
cp "$out/head/config.json" "$out/head/model.safetensors" "$out/corpus/licences.json" "$out/shipped"
for page in README.md card.json; do
    sed -e "s#head:path=$out/head#head#g" -e "s#$out/##g" "$out/head/$page" >"$out/shipped/$page"
done
