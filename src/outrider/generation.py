"""The Python interface: text in, text out. `generate` for whole results, `stream` for text as it comes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from numbers import Integral
from threading import Event
from typing import Any, Self, Unpack, overload

from outrider.audio import Audio
from outrider.costs import review_costs
from outrider.decode import Decoder, Request
from outrider.decode.row import Row
from outrider.draft_length.predicted import passes
from outrider.errors import ParameterError
from outrider.models.base import Source, TextModel, end_tokens, refuse_draft_only
from outrider.pieces import Piece, Pieces
from outrider.randomness import stream_after
from outrider.records import Round
from outrider.request.choices import bound_drafter, make_length
from outrider.request.invariance import tell_of_rounding
from outrider.request.options import GenerateOptions, Options, parse_options
from outrider.request.own_rules import with_own_rules
from outrider.request.prompts import Message, Prepared, Prompt, prepare, source_length
from outrider.results import Result
from outrider.support.alone import Alone
from outrider.support.text import TextTracker


@overload
def generate(  # type: ignore[overload-overlap]
    target: TextModel, prompt: str | Sequence[int] | Sequence[Message] | Audio, **options: Unpack[GenerateOptions]
) -> Result: ...
@overload
def generate(
    target: TextModel,
    prompt: Sequence[str] | Sequence[Sequence[int] | Audio] | Sequence[Sequence[Message]],
    **options: Unpack[GenerateOptions],
) -> list[Result]: ...
def generate(target: TextModel, prompt: Any, **options: Unpack[GenerateOptions]) -> Result | list[Result]:
    """Generate with speculative decoding; the law of the output is that of `target` alone, unless `lenience` is below 1.

    prompt: one `Prompt`, or a list of texts, token lists or chats for a ragged batch (a list of results then, none of an
    empty list). For an encoder-decoder it is the source; for one that hears, an `Audio`.

    Options (keywords only):
    draft: a model from `load`, a drafter's name ("auto", the default, "prompt-lookup", "suffix", "ngram:table=FILE", …, see
    `draft_specs`), a `Drafter`, a list of these (the best at each point), or None for plain decoding.
    num_draft_tokens: 0 … 64 tokens a round; None: adapted to measured costs and to what is accepted; or an
    `OptimalLength(alpha)`.
    max_new_tokens: ≥ 1 (256). stop: a string or several, cut from the text. ignore_eos: do not end at end-of-sequence.
    temperature (0: greedy), top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias,
    processors: the law, see `SamplingSettings`.
    seed: 0 … 2^63-1; row i of a batch uses (seed, i). A list gives each row its own, as if it stood alone (where the draft
    length is adapted and tokens are drawn: with `drafter_invariant`).
    logprobs, betas, drafts: report log-probabilities of the tokens, sum min(target, draft) where tokens were offered, and
    the offered tokens, rejected ones included (in the result's `rounds`). top_logprobs: 0 … 100 of the most probable tokens
    in each token's place, too.
    lenience: below 1 the output is LOSSY, no longer the target's law: drafted tokens are accepted with
    min(1, target / (lenience · draft)), or at temperature 0 if they have lenience times the best one's probability.
    alternatives: tokens that are scored in each drafted one's place, 0 … 16, from models and heads as drafts; None: where
    they pay, with an adaptive length. If the target rejects the draft and draws one of them, the round has one token more.
    drafter_invariant: the tokens are a function of target, prompt, settings and seed alone, whatever drafts and however
    much: exact, and plain decoding's text but for rounding (`models.base.has_same_bits`), for somewhat less acceptance
    (`acceptance.by_position`).
    cancelled: called between rounds; generation ends with finish_reason "cancelled" once it returns true.

    Raises `OutriderError`s with one clear line: `ParameterError`, `ContextLengthError`, `VocabularyMismatchError`, ….
    """
    if isinstance(prompt, list | tuple) and not prompt:
        return []
    batch = _is_batch(prompt)
    generation = Generation(target, list(prompt) if batch else [prompt], **options)
    for _ in generation.run():
        pass
    results = generation.results()
    return results if batch else results[0]


def stream(target: TextModel, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
    """Iterate over the text as it is generated, by `Piece`s; options as in `generate`. `.result` holds the rest."""
    check_one(prompt, "stream", "use generate for a batch")
    return Stream(Generation(target, [prompt], **options))


class Stream:
    """An iterator of `Piece`s. `result` is complete once the iteration has ended, partial before.

    A stream that is left ends with its last reference, and at the end of a `with` block.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._pieces = _pieces(generation)  # which does not hold the stream: it ends when the last reference goes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except ValueError as error:
            if self._generation.stopped() and _is_in_use(error):  # another thread is closing it
                raise StopIteration from None
            raise

    def close(self) -> None:
        """Stop generating, at once, or after the round that another thread is reading just then. Waits for no thread."""
        self._generation.stop()
        while getgeneratorstate(self._pieces) not in (GEN_RUNNING, GEN_CLOSED):
            try:
                self._pieces.close()
            except ValueError as error:  # its reader was quicker, and may have gone on or come to the end by now
                if not _is_in_use(error):
                    raise

    @property
    def result(self) -> Result:
        """The result so far; finish_reason "cancelled" if it was cut short."""
        return self._generation.results()[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_in_use(error: ValueError) -> bool:
    """Whether this says that another thread is in a generator, which did not raise it itself."""
    return "already executing" in str(error) and error.__traceback__ is not None and error.__traceback__.tb_next is None


def _pieces(generation: Generation) -> Generator[Piece]:
    pieces = Pieces(generation.trackers[0])
    for batch in generation.run():
        for _, record in batch:
            pieces.add(record)
        yield from pieces.take()


def request_for(
    target: TextModel,
    prepared: Prepared,
    options: Options,
    seed: int,
    row: int,
    tracker: TextTracker,
    occasion: Sequence[int] = (),
) -> Request:
    """What the loop is asked for one prompt. row: in its batch; occasion: `Drafter.occasion`."""
    stream = stream_after(seed, row, prepared.tokens, prepared.source, occasion, options.drafter_invariant)
    eos = frozenset() if options.ignore_eos else end_tokens(target)
    return Request(prepared.tokens, options.max_new_tokens, stream, eos, tracker, prepared.source)


def result_of(
    rounds: Sequence[Round],
    row: Row | None,
    tracker: TextTracker,
    options: Options,
    seed: int,
    prompt: Sequence[int],
    source: Source | None,
) -> Result:
    """What has been generated so far of one prompt. row: None if it has not joined a batch."""
    return Result.of_rounds(
        rounds,
        0.0 if row is None else row.prefill_seconds,
        logprobs=options.extras.logprobs,
        top_logprobs=options.extras.top_logprobs > 0,
        text=tracker.text,
        finish_reason=(None if row is None else row.finish_reason) or "cancelled",
        seed=seed,
        prompt_tokens=len(prompt),
        source_tokens=source_length(source),
        lenience=options.lenience,
        drafter_invariant=options.drafter_invariant,
        cached_tokens=0 if row is None else getattr(row.sequence, "taken", 0),
    )


def check_target(target: TextModel) -> None:
    """Raise unless it is a model that can write texts."""
    if not hasattr(target, "score"):
        of_torch = hasattr(target, "state_dict")
        how = f"load({target!r})" if isinstance(target, str) else "load(model, tokenizer=…)" if of_torch else ""
        remedy = f": load it with outrider.{how}" if how else ""
        raise ParameterError(f"target must be a loaded model, got {type(target).__name__}{remedy}")
    if target.tokenizer is None:
        raise ParameterError(
            f"target {target.name} has no tokenizer: give it, outrider.load(model, tokenizer=…), or use outrider.decode "
            "for token ids"
        )
    refuse_draft_only(target)


class Generation:
    """A batch of prompts being generated: the token loop with the text around it."""

    def __init__(
        self,
        target: TextModel,
        prompts: Sequence[Prompt],
        **options: Unpack[GenerateOptions],
    ) -> None:
        check_target(target)
        self.target = target
        self.drafter = bound_drafter(options.get("draft", "auto"), target)
        self.options = parse_options(len(prompts), options)
        self._prepared = Alone([target]).run(lambda: [prepare(target, prompt) for prompt in prompts])  # some listen to it
        self.prompts = [one.tokens for one in self._prepared]
        if self.options.drafter_invariant and self.drafter is not None and not self.options.sampling.greedy:
            tell_of_rounding(target)
        limit = None if self.options.ignore_eos else self.options.max_new_tokens
        sampling = with_own_rules(target, self.options.sampling, self.prompts, limit)
        self.trackers = [TextTracker(target.tokenizer, ids, self.options.stop) for ids in self.prompts]
        alone = Alone([target, *(self.drafter.engines() if self.drafter is not None else ())])
        length = alone.run(make_length, options.get("num_draft_tokens"), target, self.drafter, len(prompts))
        seeds = self.options.seeds
        if len(prompts) > 1 and len(set(seeds)) == len(seeds):  # rows of one seed might know each other's next numbers
            length = length.together(len(prompts))
        self._rounds: list[list[Round]] = [[] for _ in prompts]
        stopped, asked = Event(), self.options.cancelled
        self.stop, self.stopped = stopped.set, stopped.is_set  # no methods, which the decoder would hold in a cycle
        """Let it end after its round, as if `cancelled` had said so; whether it is to."""
        self._decoder = Decoder(
            target,
            [self._request(i) for i in range(len(prompts))],
            sampling,
            self.drafter,
            length,
            self.options.extras,
            lambda: stopped.is_set() or asked(),
            self.options.lenience,
            self.options.alternatives,
        )

    def _request(self, i: int) -> Request:
        seeds = self.options.seeds
        seed, row = (seeds[i], 0) if len(seeds) > 1 else (seeds[0], i)
        occasion = self.drafter.occasion() if self.drafter is not None else ()
        return request_for(self.target, self._prepared[i], self.options, seed, row, self.trackers[i], occasion)

    def run(self) -> Iterator[list[tuple[int, Round]]]:
        """The rounds, as `Decoder.rounds`; text is complete once it has ended."""
        for batch in self._decoder.rounds():
            for number, record in batch:
                self._rounds[number].append(record)
                if record.finish_reason is not None:
                    self.trackers[number].finish()
            yield batch
        for tracker in self.trackers:
            tracker.finish()
        # Rows of a batch share their passes, which the tables are not about, and processors take what they take.
        if len(self.prompts) == 1 and not self.options.sampling.processors:
            review_costs(self.target, passes(self._rounds[0], len(self.prompts[0])))

    def results(self) -> list[Result]:
        """A result per prompt, with whatever has been generated so far."""
        rows: list[Row | None] = list(self._decoder.rows) or [None] * len(self.prompts)
        return [self._result(i, row) for i, row in enumerate(rows)]

    def _result(self, i: int, row: Row | None) -> Result:
        seeds, asked = self.options.seeds, self._prepared[i]
        seed = seeds[i] if len(seeds) > 1 else seeds[0]
        return result_of(self._rounds[i], row, self.trackers[i], self.options, seed, asked.tokens, asked.source)


def check_one(prompt: Any, whom: str, instead: str) -> None:
    """Raise for a list of prompts. instead: what to do with one."""
    if _is_batch(prompt):
        raise ParameterError(f"prompt must be one prompt for {whom}, got a list: {instead}")


def _is_batch(prompt: Any) -> bool:
    return (
        not isinstance(prompt, str)
        and isinstance(prompt, Sequence)
        and len(prompt) > 0
        and not isinstance(prompt, bytes | bytearray)
        and not isinstance(prompt[0], Integral | Mapping)
    )
