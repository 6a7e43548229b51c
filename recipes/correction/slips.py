"""Lines of documentation and the same lines with slips of the hand, to learn correction from:

    slips.py CORPUS/docs.jsonl FOLDER

CORPUS is what `outrider train corpus` made. Leaves FOLDER/train.jsonl and FOLDER/test.jsonl, a {"prompt": with slips,
"reference": the line} on each line, and FOLDER/tokenizer (byte-level BPE). No text has lines in both.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TOKENS = 4096
SLIPS = 0.12  # of the words
TEST_TEXTS = 0.02
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LINE = re.compile(r"[A-Z][A-Za-z0-9 ,.;:'()\"-]{38,158}[.!?]")  # prose, not code


def lines(text: str) -> Iterator[str]:
    """The sentences of a text that are prose."""
    for part in re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", text)):
        if LINE.fullmatch(part):
            yield part


def with_slips(line: str, chance: random.Random) -> str:
    """The line as it might have been typed."""
    return " ".join(_slip(word, chance) if chance.random() < SLIPS else word for word in line.split())


def _slip(word: str, chance: random.Random) -> str:
    at = chance.randrange(len(word))
    return chance.choice(
        (
            word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :],  # two letters in turn
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[:at] + chance.choice(LETTERS) + word[at + 1 :],
            word.swapcase() if len(word) == 1 else word[0].swapcase() + word[1:],
            f"{word} {word}",
        )
    )


def _tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=TOKENS, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def main(corpus: Path, folder: Path) -> None:
    """Write the files."""
    chance = random.Random(0)
    parts: dict[str, list[str]] = {"train": [], "test": []}
    seen: set[str] = set()
    with corpus.open() as file:
        for entry in file:
            part = parts["test" if chance.random() < TEST_TEXTS else "train"]
            for line in lines(json.loads(entry)["text"]):
                if line not in seen:
                    seen.add(line)
                    part.append(line)
    folder.mkdir(parents=True, exist_ok=True)
    slipped = {name: [with_slips(line, chance) for line in part] for name, part in parts.items()}
    _tokenizer([*parts["train"], *slipped["train"]]).save_pretrained(folder / "tokenizer")
    for name, part in parts.items():
        chance.shuffle(order := list(range(len(part))))
        with (folder / f"{name}.jsonl").open("w") as out:
            for i in order:
                out.write(json.dumps({"prompt": slipped[name][i], "reference": part[i]}) + "\n")
    print(f"{len(parts['train'])} lines to learn from, {len(parts['test'])} to test with")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
