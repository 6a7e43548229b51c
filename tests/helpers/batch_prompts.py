"""Prompts for batches, and how they are sampled if their lines say nothing."""

from __future__ import annotations

DEFAULTS = {"seed": 3, "temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
PROMPTS = [
    "the quick brown fox",
    "def f(x):",
    "0123456789 012",
    "jumps over",
    "naïve café",
    "the the the",
    "x",
    "dog fox dog",
]
