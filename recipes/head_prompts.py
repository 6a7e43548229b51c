"""The prompts that a head's target answers: those it is trained on, and those it is measured on.

    head_prompts.py FOLDER CORPUS/code.jsonl

Writes prompts.jsonl (code and prose in turn, for training), prompts-chat.jsonl, -code.jsonl and -prose.jsonl (held out).
"""

from __future__ import annotations

import ast
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from random import Random

from outrider.bench.examples import Source, load_examples

HELD_OUT = (
    "a walk along a river in winter", "how bread is baked in a village oven", "the history of the umbrella",
    "a lighthouse keeper and a storm", "why people collect old maps", "a garden in the first week of spring",
    "how a clock with a pendulum works", "a train journey through the mountains", "the life of a street musician",
    "what bees do in the winter", "an old bridge and the town around it", "a market on a Saturday morning",
    "how glass is made", "a letter that came too late", "the trees of a northern forest", "a museum of small things",
    "how rivers change their course", "a chess game between two friends", "the making of a violin", "a night in the desert",
)  # fmt: skip
THINGS = (
    "an island", "the moon", "a bakery", "a school", "the sea", "a dragon", "a robot", "an orchestra", "a farm",
    "a hospital", "the weather", "coffee", "a bicycle", "the internet", "a library", "elephants", "volcanoes",
    "a football team", "money", "dreams", "the heart", "electricity", "a king", "a detective", "space travel",
    "a small business", "cats", "a wedding", "plants", "a computer game", "the human brain", "a pirate", "paper",
    "a restaurant", "sleep", "an old house", "friendship", "a spider", "the stock market", "dinosaurs", "a doctor",
    "painting", "a lost dog", "chocolate", "a time machine", "insects",
)  # fmt: skip
FORMS = (
    "Write a short story about {}.", "Explain {} to a beginner.", "Write an essay about {}.", "What should I know about {}?",
    "Write a newspaper article about {}.", "Describe {} in three paragraphs.", "Write a poem about {}.",
    "List ten facts about {}.", "Write a letter to a friend about {}.", "Tell me something surprising about {}.",
)  # fmt: skip
SENTENCE = 200  # characters of a docstring's beginning


def functions(corpus: Path) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Public functions of a file of the corpus that have docstrings, with the first paragraphs of these."""
    for line in corpus.read_text(encoding="utf-8").splitlines():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(json.loads(line)["text"])
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if isinstance(node, ast.FunctionDef) and said and not node.name.startswith("_"):
                yield node, said.partition("\n\n")[0]


def code_prompts(corpus: Path) -> Iterator[str]:
    """Functions of the corpus by their signatures and the first lines of their docstrings."""
    for node, said in functions(corpus):
        yield f"Write a Python function `{node.name}({ast.unparse(node.args)})`. {' '.join(said[:SENTENCE].split())}"


def main(folder: Path, corpus: Path) -> None:
    """Write them."""
    chat = [example.prompt for example in load_examples(Source("chat", prompts="20"))]
    problems = load_examples(Source("humaneval", prompts="20"))
    code = [f"Complete this Python function:\n\n{problem.prompt}" for problem in problems]
    prose = [f"Write a page of prose about {about}." for about in HELD_OUT]
    functions = sorted(set(code_prompts(corpus)))
    texts = [form.format(thing) for thing, form in product(THINGS, FORMS)]
    for prompts in (functions, texts):
        Random(0).shuffle(prompts)
    training = [prompt for both in zip(functions, texts, strict=False) for prompt in both]
    for name, prompts in (("-chat", chat), ("-code", code), ("-prose", prose), ("", training)):
        _write(folder / f"prompts{name}.jsonl", prompts)


def _write(path: Path, prompts: Iterable[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
