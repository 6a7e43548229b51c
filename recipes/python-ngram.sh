#!/bin/sh
# n-gram tables of Python and what they draft: alpha on text like the corpus, and the speed at gamma 3 (Leviathan 3.6, 4.2).
#
#     recipes/python-ngram.sh FOLDER [TARGET]
#
# Corpus: the packages of this environment that are written down below. What is gone on from: the beginnings of modules of
# torch, which is none of them. The table is counted once; the figures are printed.
set -eu
out=$1 target=${2:+--target $2}
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
outrider=${OUTRIDER:-$here/../.venv/bin/outrider}
python=$(dirname -- "$outrider")/python
mkdir -p "$out"
packages=$("$python" - "$out/python.jsonl" <<'PYTHON'
import importlib.util
import json
import sys
from pathlib import Path

CORPUS = ("scipy", "numpy", "transformers", "datasets", "pytest", "rich", "matplotlib", "sacrebleu")


def folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is to be installed"
    return Path(spec.origin or "").parent


lines = []
for path in sorted(folder("torch").glob("nn/modules/*.py"))[:20]:
    text = path.read_text(encoding="utf-8")
    cut = text.find("\n    def ", 2000)  # in the midst of a class
    if cut > 0:
        lines.append({"id": path.stem, "prompt": text[max(0, cut - 1500) : cut + 9]})
Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
print(*(folder(name) for name in CORPUS))
PYTHON
)
# shellcheck disable=SC2086
[ -e "$out/python.ngram" ] || "$outrider" train-ngram $packages -o "$out/python.ngram" $target
table=ngram:table=$out/python.ngram
# shellcheck disable=SC2086
"$outrider" bench alpha $target --task "jsonl:$out/python.jsonl" --raw --prompts 10 --max-new-tokens 96 \
    --temperature 0 --temperature 1 --draft "$table,order=1" --draft "$table,order=2" --draft "$table"
for draft in "$table,order=2" "$table"; do
    # shellcheck disable=SC2086
    "$outrider" bench tasks $target --task "jsonl:$out/python.jsonl" --raw --metric none --prompts 0-9 --max-new-tokens 64 \
        --num-draft-tokens 3 --temperature 0 --temperature 1 --draft "$draft"
done
