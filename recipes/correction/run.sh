#!/bin/sh
# An encoder–decoder pair that corrects slips of the hand, trained here, and what drafts give before it (Leviathan 4.1):
#
#     recipes/correction/run.sh OUTPUT [MINUTES]
#
# The data are sentences of installed packages' documentation (`outrider train corpus` names their licences). Goes on where it
# was stopped. Leaves OUTPUT/target, OUTPUT/draft, OUTPUT/test.jsonl and what the benches print.
set -eu
out=$1 minutes=${2:-30}
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
outrider=${OUTRIDER:-$here/../../.venv/bin/outrider}
python=$(dirname -- "$outrider")/python
mkdir -p "$out"
[ -e "$out/corpus/licences.json" ] || "$outrider" train corpus -o "$out/corpus" --characters 30000000
[ -e "$out/lines/test.jsonl" ] || "$python" "$here/slips.py" "$out/corpus/docs.jsonl" "$out/lines"
for size in draft target; do
    [ -e "$out/$size/trained.json" ] || "$python" "$here/train_corrector.py" "$out/lines" "$out/$size" $size --minutes "$minutes"
done
head -n "${LINES_TESTED:-40}" "$out/lines/test.jsonl" >"$out/test.jsonl"
set -- --target "$out/target" --max-new-tokens 96 --temperature 0 --temperature 1
"$outrider" bench alpha "$@" --task "jsonl:$out/test.jsonl" --draft "$out/draft" --draft prompt-lookup --draft suffix
"$outrider" bench tasks "$@" --task "jsonl:$out/test.jsonl" --metric wer \
    --draft "$out/draft" --draft prompt-lookup --draft suffix --draft "$out/draft + prompt-lookup"
