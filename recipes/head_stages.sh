# shellcheck shell=sh disable=SC2154
# What recipes for drafts have in common, to be read by one (`. head_stages.sh`). It goes on where it stopped.
#
# Set before: out, the folder; target, options that name the target (may be empty; no spaces in its path); writing, how it is
# opened to write texts; rows, how many texts are written side by side.
# $OUTRIDER: the command, the checkout's own if not set.
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
outrider=${OUTRIDER:-$here/../.venv/bin/outrider}
mkdir -p "$out"

write() { # FILE COUNT OPTIONS…
    file=$1 count=$2
    shift 2
    # shellcheck disable=SC2086
    "$outrider" train texts $target $writing -o "$out/$file" --count "$count" --max-new-tokens 256 --batch-size "$rows" "$@"
}

texts() { # PROMPTED ASKED: answers to prompts of ours and to questions that the target asks itself (0: none), and those held out
    [ -d "$out/corpus" ] || "$outrider" train corpus -o "$out/corpus" --characters 4000000
    [ -e "$out/prompts.jsonl" ] || "$(dirname -- "$outrider")/python" "$here/head_prompts.py" "$out" "$out/corpus/code.jsonl"
    for domain in chat code prose; do
        write "held-out-$domain.jsonl" 20 --prompts "$out/prompts-$domain.jsonl" --seed 1000
    done
    write prompted.jsonl "$1" --prompts "$out/prompts.jsonl"
    [ "$2" -eq 0 ] || write asked.jsonl "$2"
}

train() { # KIND FOLDER CODE DOCS OPTIONS…: a head or student, with so many tokens of the packages' code and documentation
    kind=$1 folder=$2 code=$3 docs=$4
    shift 4
    resume=
    ls "$out/$folder"/checkpoints/checkpoint-* >/dev/null 2>&1 && resume=--resume
    [ ! -e "$out/asked.jsonl" ] || set -- --data "$out/asked.jsonl" "$@"
    # shellcheck disable=SC2086
    "$outrider" train "$kind" $target -o "$out/$folder" --cache "$out/states" --loss mix --batch-size 8 --every 250 \
        --data "$out/prompted.jsonl" \
        --data "$out/corpus/code.jsonl@$code" --data "$out/corpus/docs.jsonl@$docs" \
        --held-out chat="$out/held-out-chat.jsonl" --held-out code="$out/held-out-code.jsonl" \
        --held-out prose="$out/held-out-prose.jsonl" \
        --licence "Its own texts (model: Apache-2.0); code and documentation of packages under permissive licences (licences.json)" \
        $resume "$@"
}
