"""Holds `target.py` and what `on_gpu.py` makes of it to transformers' module and to outrider's own training code, on a CPU.

check.py MODEL.gguf HEAD PROMPTS.npz
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import target as text
import torch
from on_gpu import frequent_tokens, states_of, training_windows
from prompts import read
from target import Sampling, _threshold, load_target
from texts import Text, beginnings, end_to_end

torch.set_num_threads(1)


def main(model: Path, head: Path, prompts: Path) -> None:  # noqa: PLR0915
    """All of it."""
    from outrider.heads.config import load_head
    from outrider.heads.target_parts import output_rows
    from outrider.models.loading import load_transformers
    from outrider.train.corpus import cut
    from outrider.train.states import states_of as their_states
    from outrider.train.trainee import embedding_table

    stored = dict(np.load(prompts))
    own = load_target(model, torch.device("cpu"), torch.float32)
    theirs = load_transformers(model, dtype="float32", device="cpu", pack=False)
    end = int(stored["end"])
    state = theirs.module.state_dict()
    assert torch.equal(own.embedding, state["model.embed_tokens.weight"])
    for number, layer in enumerate(own.layers):
        join = torch.cat([state[f"model.layers.{number}.self_attn.{name}_proj.weight"] for name in "qkv"])
        assert torch.equal(layer.join, join), number
    print("weights: equal to those that outrider.load has")

    config, tokens, _ = load_head(head)
    theirs.keep_states(config.layers)
    every = read(stored, "train")
    some = [every[i] for i in range(0, 40, 4)]
    windows = beginnings([Text(one, len(one) // 2, 0, 0) for one in some], 96)
    batch = states_of(own, windows, config.layers)
    other = their_states(theirs, torch.from_numpy(windows.tokens), config.layers, torch.from_numpy(windows.drafted))
    scale = other.states.abs().mean()
    off = [
        float((batch.states - other.states).abs().max() / scale),
        float((batch.normalisers - other.normalisers).abs().max()),
    ]
    assert max(off[0] / 50, off[1]) < 1e-3, off
    median = float(((batch.states - other.states).norm(dim=-1) / other.states.norm(dim=-1)).max())
    assert torch.equal(batch.drafted, other.drafted)
    print(f"states: off by {median:.1e} of their norm at most, normalisers by {off[1]:.1e}")
    mass = own.mass(batch.states.flatten(0, 1), batch.normalisers.flatten())
    print(f"mass: off by {float((mass - other.mass).abs().max()):.1e} of {float(mass.sum()):.0f}")
    like: Any = own
    rows, table = output_rows(theirs, tokens), embedding_table(theirs)
    assert torch.allclose(output_rows(like, tokens).weight, rows.weight, atol=1e-6)
    assert torch.equal(embedding_table(like), table)
    chosen, covered = frequent_tokens(own, batch, 2000, stored["special"].tolist())
    assert len(set(chosen.tolist())) == 2000
    assert set(stored["special"].tolist()) <= set(chosen.tolist())
    print(f"2000 tokens cover {covered:.3f}")

    generator = torch.Generator().manual_seed(0)
    asked = sorted((every[i] for i in range(100, 700, 100)), key=len)
    answers = own.write(asked, 32, Sampling(0.0), end, generator, math.inf)
    for prompt, answer in zip(asked, answers, strict=True):
        expected = theirs.module.generate(
            torch.from_numpy(prompt)[None], attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=32, eos_token_id=end, pad_token_id=end,
        )[0, len(prompt) :]  # fmt: skip
        assert answer.tolist() == expected.tolist(), (len(prompt), answer.tolist(), expected.tolist())
    print(f"greedy texts: equal to generate's for prompts of {[len(one) for one in asked]} tokens")

    text.COMPACT, text.CHECKED_EVERY = 1.0, 8  # rows leave as soon as they may
    comma = int(np.bincount(np.concatenate(answers)).argmax())  # as an end, it comes early and late
    for whole, answer in zip(answers, own.write(asked, 32, Sampling(0.0), comma, generator, math.inf), strict=True):
        stop = int(np.flatnonzero(whole == comma)[0]) + 1 if comma in whole else 32
        assert answer.tolist() == whole[:stop].tolist()
    print("greedy texts: the same when rows that have ended leave")

    one = every[5]
    logits = own.logits_of(own.states(torch.from_numpy(one)[None], ())[0, -1])
    law = logits.softmax(-1)
    drawn = torch.cat([text._draw(logits.expand(500, -1), Sampling(1.0), generator) for _ in range(8)])
    counts = torch.bincount(drawn, minlength=own.vocab_size) / 4000
    likely = law.topk(5).indices
    print(
        "sampling: law", [round(x, 3) for x in law[likely].tolist()], "drawn", [round(x, 3) for x in counts[likely].tolist()]
    )
    assert float((law[likely] - counts[likely]).abs().max()) < 0.03
    nucleus = law * (law >= _threshold(law[None], 0.9)[0])
    assert 0.9 <= float(nucleus.sum()) < 0.94, float(nucleus.sum())

    texts = [Text(np.arange(i, i + 70), 20, 0, 0) for i in range(10)]
    made = end_to_end(texts, 64)
    assert np.array_equal(made.tokens, np.stack(list(cut((text.tokens.tolist() for text in texts), 64, None))))
    made = beginnings(texts, 100)
    assert made.tokens[3].tolist() == [*range(3, 73), *range(4, 34)]
    assert made.drafted[3].sum() == 50 + 10
    print("windows: as corpus.cut has them;", len(training_windows(texts, stored, 320, 0)), "with the corpus")


if __name__ == "__main__":
    main(*(Path(one) for one in sys.argv[1:4]))
