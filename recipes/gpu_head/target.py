"""SmolLM2-135M-Instruct from its GGUF file, by itself: its passes over many rows at once, on a GPU or a CPU.

Neither transformers nor accelerate is needed, and nothing is compiled. `check.py` holds weights, states and greedy texts to
those of transformers' module. What `train.trainee.HeadTrainee` asks of a target is here as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

PREFILL = 1 << 16  # tokens of a pass over prompts: bounds its memory
CHECKED_EVERY = 32  # steps between looks at which rows have ended
COMPACT = 0.8  # rows that have ended leave the batch when no more than this share is left
BISECTIONS = 8  # of the top-p threshold, over NATS below the best token
NATS = 12.0


@dataclass(frozen=True)
class Shape:
    """Of a model of Llama's kind."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    vocab_size: int
    theta: float
    eps: float

    @property
    def head_size(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Layer:
    """join: query, key and value. open: gate and up."""

    first_norm: Tensor
    join: Tensor
    out: Tensor
    second_norm: Tensor
    open: Tensor
    down: Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature 0: greedy. top_p is found to a twentieth of a nat."""

    temperature: float
    top_p: float = 1.0


class Target:
    """The model. It attends to whole rows of equal length; nothing is padded."""

    def __init__(self, shape: Shape, layers: list[Layer], embedding: Tensor, norm: Tensor, head: Tensor, name: str) -> None:
        self.shape, self.layers, self.embedding, self.norm, self.head, self.name = shape, layers, embedding, norm, head, name
        self._turns: tuple[Tensor, Tensor] = self._rotations(1024)

    # What a head asks of its target (`models.base.HandsOutStates`)
    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def state_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def state_size(self) -> int:
        return self.shape.width

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    def embed(self, tokens: Tensor) -> Tensor:
        """[..] → [.., W]"""
        return F.embedding(tokens, self.embedding)

    def logits_of(self, states: Tensor) -> Tensor:
        """[.., W] → [.., V]"""
        return F.linear(states, self.head)

    def _rotations(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, size], in the model's dtype, as transformers rounds them."""
        size, device = self.shape.head_size, self.embedding.device
        frequencies = 1.0 / self.shape.theta ** (torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
        angles = torch.arange(length, device=device, dtype=torch.float32).unsqueeze(-1) * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _turn(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if stop > len(self._turns[0]):
            self._turns = self._rotations(2 * stop)
        cos, sin = self._turns
        return cos[start:stop, None], sin[start:stop, None]  # over heads

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.eps)

    def _pass(
        self, tokens: Tensor, start: int, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor], kept: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Tokens int64 [R, N] at positions start … → last states, normed [R, N, W], and what came out of the layers `kept`.

        attend: layer, queries [R, N, heads, size], keys and values [R, N, kv heads, size] → [R, N, heads · size]
        """
        shape = self.shape
        (rows, width), size = tokens.shape, shape.head_size
        cos, sin = self._turn(start, start + width)
        x, found = self.embed(tokens), []
        for number, layer in enumerate(self.layers):
            every = F.linear(self._normed(x, layer.first_norm), layer.join).view(rows, width, -1, size)
            turned, values = every[:, :, : shape.heads + shape.kv_heads], every[:, :, shape.heads + shape.kv_heads :]
            first, second = turned.chunk(2, dim=-1)
            turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
            mixed = attend(number, turned[:, :, : shape.heads], turned[:, :, shape.heads :], values)
            x = x + F.linear(mixed, layer.out)
            gate, up = F.linear(self._normed(x, layer.second_norm), layer.open).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
            if number + 1 in kept:
                found.append(x)
        return self._normed(x, self.norm), found

    def _over_itself(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Causal attention of whole rows."""
        groups = self.shape.heads // self.shape.kv_heads
        keys, values = (one.transpose(1, 2).repeat_interleave(groups, 1) for one in (keys, values))
        return (
            F.scaled_dot_product_attention(queries.transpose(1, 2), keys, values, is_causal=True).transpose(1, 2).flatten(2)
        )

    @torch.no_grad()
    def states(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        """As `train.states.states_of`: the last ones first. int64 [n, L] → [n, L, (1 + layers) W]"""
        last, found = self._pass(tokens, 0, lambda _, q, k, v: self._over_itself(q, k, v), layers)
        return torch.cat([last, *found], dim=-1)

    @torch.no_grad()
    def normalisers(self, states: Tensor, rows: int = 4096) -> Tensor:
        """Log of the sum of exp over the whole vocabulary, in float32. [.., ≥ W] → [..]"""
        last = states[..., : self.shape.width].reshape(-1, self.shape.width)
        head = self.head.float()
        return torch.cat([F.linear(part.float(), head).logsumexp(-1) for part in torch.split(last, rows)]).view(
            states.shape[:-1]
        )

    @torch.no_grad()
    def mass(self, states: Tensor, normalisers: Tensor, rows: int = 4096) -> Tensor:
        """The laws at some positions added up. [N, ≥ W], [N] → [V]"""
        head, total = self.head.float(), torch.zeros(self.vocab_size, device=self.device)
        for part, log in zip(torch.split(states[:, : self.shape.width], rows), torch.split(normalisers, rows), strict=True):
            total += F.linear(part.float(), head).sub_(log.unsqueeze(-1)).exp_().sum(0)
        return total

    @torch.no_grad()
    def write(
        self,
        prompts: Sequence[np.ndarray],
        new: int,
        sampling: Sampling,
        end: int,
        generator: torch.Generator,
        deadline: float,
    ) -> list[np.ndarray]:
        """Go on with each prompt until `end` or for `new` tokens; what is not written by the deadline is cut off.

        deadline: by time.monotonic(). The rows stand side by side at one position: where a prompt is longer than the
        shortest, its own tokens take the place of drawn ones. Give prompts of like lengths. → the answers, with their ends
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        total, shortest = int(lengths.max()) + new, int(lengths.min())
        filled = np.zeros((len(prompts), total), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            filled[row, : len(prompt)] = prompt
        batch = _Batch(self, torch.from_numpy(filled).to(self.device), torch.from_numpy(lengths).to(self.device), new, end)
        logits, stop = batch.prefill(shortest), total
        for at in range(shortest, total):
            batch.put(at, _draw(logits, sampling, generator))
            if (at - shortest + 1) % CHECKED_EVERY == 0:
                left = batch.compact()
                if not left or time.monotonic() > deadline:
                    stop = at + 1
                    break
            if at + 1 < total:
                logits = batch.step(at)
        return [
            _answer(row, int(length), min(int(length) + new, stop), end)
            for row, length in zip(batch.all(), lengths, strict=True)
        ]


def _answer(row: np.ndarray, start: int, stop: int, end: int) -> np.ndarray:
    answer = row[start:stop]
    ends = np.flatnonzero(answer == end)
    return answer[: ends[0] + 1] if len(ends) else answer


class _Batch:
    """Rows that are written side by side, with their keys and values [R, kv heads, total, size] by layer."""

    def __init__(self, target: Target, tokens: Tensor, lengths: Tensor, new: int, end: int) -> None:
        self._target, self._new, self._end = target, new, end
        self._written = tokens.clone()
        self._tokens, self._lengths = tokens, lengths
        self._slots = torch.arange(len(tokens), device=tokens.device)
        self._ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        shape = target.shape
        size = (len(tokens), shape.kv_heads, tokens.shape[1], shape.head_size)
        self._keys, self._values = (
            [torch.empty(size, dtype=target.dtype, device=tokens.device) for _ in target.layers] for _ in range(2)
        )

    def prefill(self, width: int) -> Tensor:
        """The first tokens of all rows. → logits of the last one [R, V]"""
        step = max(1, PREFILL // width)
        found = []
        for first in range(0, len(self._tokens), step):
            rows = slice(first, first + step)

            def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, rows: slice = rows) -> Tensor:
                self._keys[layer][rows, :, :width] = keys.transpose(1, 2)
                self._values[layer][rows, :, :width] = values.transpose(1, 2)
                return self._target._over_itself(queries, keys, values)

            states, _ = self._target._pass(self._tokens[rows, :width], 0, attend)
            found.append(states[:, -1])
        return self._target.logits_of(torch.cat(found))

    def put(self, at: int, drawn: Tensor) -> None:
        """The token at a position: the prompt's own, the drawn one, or the end again."""
        asked = at < self._lengths
        token = torch.where(asked, self._tokens[:, at], drawn.masked_fill(self._ended, self._end))
        self._tokens[:, at] = token
        self._ended |= ((token == self._end) & ~asked) | (at + 1 >= self._lengths + self._new)

    def step(self, at: int) -> Tensor:
        """A pass over the token at a position. → logits [R, V]"""
        shape = self._target.shape
        groups = shape.heads // shape.kv_heads

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            known, said = self._keys[layer], self._values[layer]
            known[:, :, at] = keys[:, 0]
            said[:, :, at] = values[:, 0]
            asking = queries.reshape(len(queries), shape.kv_heads, groups, shape.head_size)  # a group stands as positions
            mixed = F.scaled_dot_product_attention(asking, known[:, :, : at + 1], said[:, :, : at + 1])
            return mixed.reshape(len(queries), 1, -1)

        states, _ = self._target._pass(self._tokens[:, at : at + 1], at, attend)
        return self._target.logits_of(states[:, 0])

    def compact(self) -> int:
        """Drop rows that have ended if they are many. → how many go on"""
        alive = (~self._ended).nonzero().squeeze(-1)
        if len(alive) and len(alive) <= COMPACT * len(self._tokens):
            self._written[self._slots] = self._tokens
            self._tokens, self._lengths, self._slots, self._ended = (
                one[alive] for one in (self._tokens, self._lengths, self._slots, self._ended)
            )
            for cache in (self._keys, self._values):
                for layer, one in enumerate(cache):
                    cache[layer] = one[alive]
                    del one
        return len(alive)

    def all(self) -> np.ndarray:
        """Every row as it is now, on the host."""
        self._written[self._slots] = self._tokens
        return self._written.cpu().numpy()


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """A token of each row. [R, V] → [R]"""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probs = (logits.float() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        probs.mul_(probs >= _threshold(probs, sampling.top_p))
    noise = torch.empty_like(probs).exponential_(generator=generator).clamp_(min=1e-30)
    return probs.div_(noise).argmax(-1)


def _threshold(probs: Tensor, top_p: float) -> Tensor:
    """The least probability among the likely tokens that have top_p together. [R, V] → [R, 1]"""
    best = probs.amax(-1, keepdim=True)
    low, high = torch.full_like(best, -NATS), torch.zeros_like(best)  # log below the best
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = (probs * (probs >= best * middle.exp())).sum(-1, keepdim=True) >= top_p
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return best * low.exp()


def load_target(path: Path, device: torch.device, dtype: torch.dtype) -> Target:
    """From a GGUF file, its weights dequantized in float32 and then rounded to `dtype`, as `outrider.load` does."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(str(path))
    about = {name: field for name, field in reader.fields.items() if name.startswith("llama.")}

    def number(name: str) -> Any:
        return about[f"llama.{name}"].contents()

    weights = {one.name: dequantize(one.data, one.tensor_type) for one in reader.tensors}
    heads, kv_heads = int(number("attention.head_count")), int(number("attention.head_count_kv"))
    embedding = weights["token_embd.weight"]
    shape = Shape(
        layers=int(number("block_count")),
        width=int(number("embedding_length")),
        heads=heads,
        kv_heads=kv_heads,
        vocab_size=len(embedding),
        theta=float(number("rope.freq_base")),
        eps=float(number("attention.layer_norm_rms_epsilon")),
    )

    def put(*arrays: np.ndarray) -> Tensor:
        whole = np.ascontiguousarray(np.concatenate(arrays), dtype=np.float32)
        return torch.from_numpy(whole.copy()).to(dtype).to(device)

    def layer(at: int) -> Layer:
        def of(name: str) -> np.ndarray:
            found: np.ndarray = weights[f"blk.{at}.{name}.weight"]
            return found

        return Layer(
            first_norm=put(of("attn_norm")),
            join=put(_halves(of("attn_q"), heads), _halves(of("attn_k"), kv_heads), of("attn_v")),
            out=put(of("attn_output")),
            second_norm=put(of("ffn_norm")),
            open=put(of("ffn_gate"), of("ffn_up")),
            down=put(of("ffn_down")),
        )

    table = put(embedding)
    head = put(weights["output.weight"]) if "output.weight" in weights else table
    return Target(
        shape, [layer(at) for at in range(shape.layers)], table, put(weights["output_norm.weight"]), head, path.name
    )


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head as pairs of neighbours, which GGUF files have → as halves, which Llama in transformers has."""
    size = len(weight) // heads
    return weight.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def attention_kernels(device: torch.device) -> AbstractContextManager[None]:
    """Without cuDNN's, which makes a plan for each length, and a text has hundreds of lengths."""
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    made: AbstractContextManager[None] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return made
