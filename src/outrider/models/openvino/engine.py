"""The OpenVINO engine: quantized weights on a CPU, several tokens scored for little more than one.

A sequence is a list of blocks of the paged cache. Roll-back is a smaller length; sequences of any lengths share a call; the
logits of prompts are not computed. The cache keeps its numbers as they are computed, never in 8 bits: OpenVINO scales
8-bit keys by blocks of tokens, so that a rejected token would leave its mark on those before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ModelError, ParameterError
from outrider.models.base import LAST, Sequence, WhichLogits, check_layers, fit_vocabulary, represented
from outrider.models.cut_head import check_num_tokens, cut_name
from outrider.models.dtypes import native_dtype
from outrider.models.engine_checks import check_truncate, new_tokens, owned_sequences
from outrider.models.flat import begins, in_rows
from outrider.models.openvino.blocks import Blocks
from outrider.models.openvino.cut_head import cut_head
from outrider.models.openvino.flat import kept, places
from outrider.models.openvino.paged import INDICES, LONGEST, insert_paged_attention
from outrider.models.openvino.parts import Embeddings, Head, leave_outputs
from outrider.models.openvino.saved import Saved, read_bytes
from outrider.models.openvino.states import KeptStates
from outrider.models.openvino.trace import LOGITS, state_name
from outrider.models.steady_width import NARROWEST, SteadyWidth

BLOCK = 32  # tokens, fixed by OpenVINO's CPU kernels
FIRST_BLOCKS = 64


@cache  # it is looked up on the disk, and asked for in each generation
def _version() -> str:
    return version("openvino")


class PagedSequence:
    """A sequence of tokens in blocks of the model's cache."""

    def __init__(self, model: OpenVinoModel) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.blocks: list[int] = []
        self.closed = False
        self.private = False  # whether its blocks are never to be shared
        self.taken = 0  # tokens that were read by others

    @property
    def length(self) -> int:
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        check_truncate(length, len(self.tokens))
        del self.tokens[length:]

    def advance(self, count: int) -> None:
        """Pretend to hold further tokens, so that long contexts are timed without reading one."""
        self.private = True
        self.model.extend(self, [0] * count)

    def close(self) -> None:
        self.model.release(self)


class OpenVinoModel:
    """A converted model, opened from its folder. Not safe for concurrent use by several threads.

    The logits that `score` returns are overwritten by the next call. num_tokens: rows left of the head (`cut_head`);
    draft_tokens: what they stand for, None if it has them all.
    """

    flat = True

    def __init__(self, saved: Saved, num_tokens: int | None = None) -> None:
        self._saved = saved
        self._about = saved.about
        self._num_tokens = num_tokens
        self.draft_tokens = None
        if num_tokens is not None and num_tokens < saved.about.vocab_size:
            self.draft_tokens = torch.arange(num_tokens)
        self._steady = SteadyWidth()
        self.tokenizer = saved.tokenizer
        self.threads = torch.get_num_threads()
        self._states = KeptStates(BLOCK, self._about.width)
        self._compile()
        self._held: dict[str, Any] = {}
        self._blocks = Blocks(BLOCK, 0)
        self._open: list[PagedSequence] = []
        self._grow(FIRST_BLOCKS)

    def _compile(self) -> None:
        """The graph with the outputs that are wanted, ready to run; its caches are to be set."""
        import openvino as ov

        try:
            graph = self._saved.graph()
            if self._num_tokens is not None:
                check_num_tokens(self._num_tokens, self._about.vocab_size)
                cut_head(graph, self._num_tokens, self._about.name)
            leave_outputs(graph, {LOGITS, *(state_name(layer) for layer in self._states.layers)}, self._about.name)
            self.weight_bytes = read_bytes(graph)
            insert_paged_attention(graph, self._about.layers)
            compiled = ov.Core().compile_model(graph, "CPU", self._properties())
        except RuntimeError as error:
            reason = " ".join(str(error).split())[-160:]
            raise ModelError(
                f"converted model {self._saved.folder} can't be opened ({reason}): delete the folder, it is made again"
            ) from error
        self._request = compiled.create_infer_request()
        self._caches = {
            port.any_name: (port.element_type, [int(d.get_length()) for d in list(port.partial_shape)[1:]])
            for port in compiled.inputs
            if "_cache." in port.any_name
        }

    def _properties(self) -> dict[str, Any]:
        """Float32 wherever nothing was quantized: there, the bits of a token's logits do not depend on the others in a pass.

        Activations are quantized to 8 bits within groups of one token, as the integer kernels need.
        """
        return {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0 if self._about.weights == "float32" else self._about.group,
        }

    def __repr__(self) -> str:
        return represented(self)

    @property
    def name(self) -> str:
        return cut_name(self._about.name, self._num_tokens)

    @property
    def vocab_size(self) -> int:
        return self._about.vocab_size

    @property
    def max_length(self) -> int | None:
        return self._about.max_length

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype_name(self) -> str:
        """Of its weights."""
        return self._about.weights

    @property
    def same_bits(self) -> bool:
        """Whether a token's logits have the same bits in a pass of any width."""
        return self._about.weights in ("int8", "int4")

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that the model's generation config names as ends."""
        return frozenset(self._about.end_tokens)

    @property
    def fingerprint(self) -> str:
        """What the costs of a pass depend on, the machine apart."""
        return f"openvino {_version()}, steady widths, {self.threads} {self._about.to_json()}"

    def open(self, reserve: int = 0) -> PagedSequence:
        longest = reserve if self.max_length is None else min(reserve, self.max_length)
        self._make_room(-(-longest // BLOCK))
        sequence = PagedSequence(self)
        self._open.append(sequence)
        return sequence

    def release(self, sequence: PagedSequence) -> None:
        """Give a sequence's blocks back."""
        if sequence in self._open:
            self._open.remove(sequence)
            for block in reversed(sequence.blocks):  # the oldest unused block is evicted first: let it be a last one
                self._blocks.give(block)
            sequence.blocks, sequence.closed = [], True

    def score(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        out = self.score_few(sequences, tokens, lengths, logits)
        return None if out is None else fit_vocabulary(out, self.vocab_size)

    def score_few(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        """See `FewTokens`."""
        new = new_tokens(sequences, tokens, lengths, self.vocab_size)
        rows = owned_sequences(self, PagedSequence, sequences, lengths, tokens.shape[1])
        if logits == "none":
            new = [self._share(row, part) for row, part in zip(rows, new, strict=True)]
            rows, new = [r for r, p in zip(rows, new, strict=True) if p], [p for p in new if p]
            if not rows:
                return None
        counts = [len(part) for part in new]
        widths = self._widths(rows, counts, logits)
        # What is filled in stands behind the last token: it changes none before.
        padded = [part + [0] * (width - len(part)) for part, width in zip(new, widths, strict=True)]
        starts = [row.length for row in rows]
        out = self._infer(rows, padded, kept(counts, widths, logits))
        for row, start, count in zip(rows, starts, counts, strict=True):
            row.truncate(start + count)
        if logits == "none":
            for row in rows:
                self._publish(row)
            return None
        return in_rows(out, counts if logits == "all" else [1] * len(rows))

    def _widths(self, rows: list[PagedSequence], counts: list[int], logits: WhichLogits) -> list[int]:
        """How many tokens wide each row of a pass is made: what is to be filled in goes to the shortest row."""
        widths = [max(NARROWEST, count) for count in counts]
        if logits == "none":
            self._steady.forget()
            return widths
        more = self._steady.of(sum(widths)) - sum(widths)
        shortest = min(range(len(rows)), key=lambda i: rows[i].length + widths[i])
        if self.max_length is not None:
            more = max(0, min(more, self.max_length - rows[shortest].length - widths[shortest]))
        widths[shortest] += more
        return widths

    def keep_width(self, on: bool) -> None:
        """Whether passes are kept as wide as the one before (the default); see `SteadyWidth`."""
        self._steady.on = on
        self._steady.forget()

    def extend(self, row: PagedSequence, tokens: Many[int]) -> None:
        """Append tokens, with blocks for them."""
        self._own_blocks(row, len(row.tokens))
        needed = -(-(len(row.tokens) + len(tokens)) // BLOCK) - len(row.blocks)
        self._make_room(needed)
        row.blocks += [self._blocks.take() for _ in range(needed)]
        row.tokens += tokens

    def _own_blocks(self, row: PagedSequence, start: int) -> None:
        """Blocks that will be written from `start` on must be the sequence's own; those beyond its length go back."""
        used = -(-start // BLOCK)
        while len(row.blocks) > used:
            self._blocks.give(row.blocks.pop())
        if start % BLOCK and row.blocks and not self._blocks.retract(row.blocks[-1]):
            shared = row.blocks[-1]
            self._make_room(1)
            row.blocks[-1] = self._blocks.take()
            for name in self._caches:
                self._held[name][row.blocks[-1]] = self._held[name][shared]
            self._states.copy(shared, row.blocks[-1])
            self._blocks.give(shared)

    def _share(self, row: PagedSequence, tokens: list[int]) -> list[int]:
        """Take over blocks that hold the tokens already. → those still to be scored"""
        while len(row.tokens) % BLOCK == 0 and len(tokens) >= BLOCK:
            self._own_blocks(row, len(row.tokens))
            block = self._blocks.find(row.blocks[-1] if row.blocks else None, tokens[:BLOCK])
            if block is None:
                break
            row.blocks.append(block)
            row.tokens += tokens[:BLOCK]
            row.taken += BLOCK
            tokens = tokens[BLOCK:]
        return tokens

    def _publish(self, row: PagedSequence) -> None:
        if row.private:
            return
        for i in range(len(row.tokens) // BLOCK):
            before = row.blocks[i - 1] if i else None
            self._blocks.publish(row.blocks[i], before, row.tokens[i * BLOCK : (i + 1) * BLOCK])

    def _infer(self, rows: list[PagedSequence], new: list[list[int]], keep: list[int]) -> Tensor:
        """One flat pass of all rows. → the logits at the positions `keep` of it [len(keep), V]"""
        past = [row.length for row in rows]
        for row, part in zip(rows, new, strict=True):
            self.extend(row, part)
        flat = [token for part in new for token in part]
        positions = [start + i for start, part in zip(past, new, strict=True) for i in range(len(part))]
        self._set("input_ids", np.array([flat], np.int64))
        self._set("position_ids", np.array([positions], np.int64))
        # A lone row of the head goes through another kernel on processors without VNNI: other last bits.
        self._set("keep", np.array(keep * 2 if len(keep) == 1 else keep, np.int64))
        indices = (
            past,
            begins(len(part) for part in new),
            [block for row in rows for block in row.blocks],
            begins(len(row.blocks) for row in rows),
        )
        for name, values in zip(INDICES, indices, strict=True):
            self._set(name, np.array(values, np.int32))
        self._set(LONGEST, np.array(max(row.length for row in rows), np.int32))
        self._request.infer()
        if self._states.layers:
            where = places([row.blocks for row in rows], BLOCK, past, [len(part) for part in new])
            for layer in self._states.layers:
                self._states.put(layer, self._request.get_tensor(state_name(layer)).data[0], where)
        out = torch.from_numpy(self._request.get_tensor(LOGITS).data)
        return out.view(-1, out.shape[-1])[: len(keep)]

    def _set(self, name: str, values: Any) -> None:
        import openvino as ov

        self._request.set_tensor(name, ov.Tensor(values))

    @property
    def state_size(self) -> int:
        return self._about.width

    @property
    def num_layers(self) -> int:
        return len(self._about.layers)

    @property
    def state_dtype(self) -> torch.dtype:
        """Of what is beside a model with quantized weights: what the processor is quick in."""
        return torch.float32 if self._about.weights == "float32" else native_dtype(self.device)

    @property
    def quantized(self) -> bool:
        """See `HandsOutStates`."""
        return self._about.weights != "float32"

    def keep_states(self, layers: Many[int] = ()) -> None:
        """See `HandsOutStates`. Opens the model anew; blocks that are there already are not shared any more."""
        check_layers(layers, len(self._about.layers), self.name)
        fresh = self._states.add((LAST, *layers))
        if not fresh:
            return
        try:
            self._compile()
        except BaseException:
            self._states.drop(fresh)
            raise
        self._attach()
        self._blocks.forget()
        for row in self._open:
            row.private = True  # nor are theirs, from before

    def states(self, sequence: Sequence, start: int, stop: int, layers: Many[int] = ()) -> Tensor:
        """See `HandsOutStates`."""
        every = (LAST, *layers)
        if not isinstance(sequence, PagedSequence) or sequence not in self._open or not self._states.has(every):
            raise ParameterError(
                f"states must be of an open sequence of {self.name} that were kept: call keep_states() first"
            )
        if not 0 <= start <= stop <= sequence.length:
            raise ParameterError(f"states must be of positions in 0 … {sequence.length}, got {start} … {stop}")
        return self._states.at(every, places([sequence.blocks], BLOCK, [start], [stop - start]))

    def embed(self, tokens: Tensor) -> Tensor:
        """See `HandsOutStates`."""
        return self._embeddings(tokens)

    @cached_property
    def _embeddings(self) -> Embeddings:
        return Embeddings(self._saved)

    def logits_of(self, states: Tensor) -> Tensor:
        """See `HandsOutStates`."""
        return self._head(states)

    @cached_property
    def _head(self) -> Head:
        return Head(self._saved)

    def _make_room(self, blocks: int) -> None:
        if blocks > self._blocks.available:
            self._grow(max(2 * self._blocks.count, self._blocks.count + blocks - self._blocks.available))

    def _grow(self, count: int) -> None:
        """Caches of more blocks. Fresh memory is only taken from the system once it is written."""
        try:
            fresh = {
                name: np.zeros((count, *shape), _STORAGE[kind.get_size()]) for name, (kind, shape) in self._caches.items()
            }
        except MemoryError:
            raise ModelError(
                f"{self.name}: a cache of {count * BLOCK} tokens does not fit into memory: lower max_new_tokens, or "
                "generate fewer sequences at once"
            ) from None
        for name in self._held:
            fresh[name][: self._blocks.count] = self._held[name]
        self._held = fresh
        self._attach()
        self._states.grow(count)
        self._blocks.grow(count)

    def _attach(self) -> None:
        """Give the caches to the model that is to run."""
        import openvino as ov

        for name, (kind, shape) in self._caches.items():
            self._request.set_tensor(name, ov.Tensor(self._held[name], [len(self._held[name]), *shape], kind))


_STORAGE = {1: np.uint8, 2: np.uint16, 4: np.uint32}
