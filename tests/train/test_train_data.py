"""What drafts are trained on: windows, what is kept apart, the target's states on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from outrider.errors import ModelError, ParameterError
from outrider.heads.config import HeadConfig
from outrider.heads.layers import Mix
from outrider.models.transformers_model import TransformersModel
from outrider.train.apart import check_apart, check_outside
from outrider.train.corpus import HELD_OUT_EVERY, Source, left_out, marked, parse_source, stamp, texts_of, windows
from outrider.train.make import Data, HeadSettings, train_head
from outrider.train.run import RunSettings
from outrider.train.states import SHARD, StateFolder, StateWindows, check_states, frequent_tokens, keep_states, states_of
from tests.helpers.folders import make_tokenizer
from tests.helpers.tiny_models import VOCABULARY, module, tiny
from tests.helpers.train_windows import window_of

TEXT = [5, 6, 7, 8, 9, 20, 21, 3, 44, 17, 30, 2, 58, 12, 33, 5]


def test_windows_are_cut_from_other_documents_than_those_held_out(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    lines = [json.dumps({"tokens": [number] * 10}) for number in range(120)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join([json.dumps({"settings": {}}), *lines]))
    kept = {int(t) for window in windows([Source(str(path))], tokenizer, 20, False) for t in window.tokens}
    apart = {int(t) for window in windows([Source(str(path))], tokenizer, 10, True) for t in window.tokens}
    assert apart == {HELD_OUT_EVERY - 1, 2 * HELD_OUT_EVERY - 1}
    assert not kept & apart
    assert len(kept) == 118
    assert len(list(windows([Source(str(path), 100)], tokenizer, 20, None))) == 5
    assert parse_source("a/b@300") == Source("a/b", 300)
    assert parse_source("user@host.txt") == Source("user@host.txt")
    with pytest.raises(ParameterError, match="does not exist"):
        list(windows([Source(str(tmp_path / "none"))], tokenizer, 20, None))


@pytest.mark.parametrize("count", [1, 2, 3, 49, 50, 51, 100, 120])
def test_the_last_of_few_documents_is_kept_apart(count: int) -> None:
    apart = [document[0] for document, is_apart in marked([number] for number in range(count)) if is_apart]
    kept = [document[0] for document, is_apart in marked([number] for number in range(count)) if not is_apart]
    assert sorted(apart + kept) == list(range(count))
    assert apart == ([] if count == 1 else [count - 1] if count < 50 else [49] if count < 100 else [49, 99])


def test_a_limit_does_not_move_the_document_that_is_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"tokens": [number] * 10}) for number in range(4)))
    tokenizer = make_tokenizer()
    kept = {int(t) for window in windows([Source(str(path), 20)], tokenizer, 10, False) for t in window.tokens}
    apart = {int(t) for window in windows([Source(str(path), 10)], tokenizer, 10, True) for t in window.tokens}
    assert (kept, apart) == ({0, 1}, {3})


def test_windows_know_the_tokens_of_prompts(tmp_path: Path) -> None:
    """Of texts that the target wrote; plain text has none, nor have tokens without a word about it."""
    path = tmp_path / "texts.jsonl"
    lines: list[dict[str, object]] = [{"tokens": [1, 1, 1, 2, 2], "prompt_tokens": 3}, {"tokens": [3, 3]}, {"text": "0123"}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    found = list(windows([Source(str(path))], make_tokenizer(), 4, None))
    assert found[0].tokens.tolist() == [1, 1, 1, 2]
    flags = [flag for window in found for flag in window.drafted.tolist()]
    assert flags[:3] == [False] * 3
    assert all(flags[3:])
    assert len(flags) >= 8


def test_text_is_not_taken_twice(tmp_path: Path) -> None:
    """By whatever path it is named: a folder, a link, another spelling; and no text is refused that occurs once."""
    data, other = tmp_path / "data", tmp_path / "other"
    for folder in (data / "deep", other):
        folder.mkdir(parents=True)
    for file in (data / "a.txt", data / "deep" / "b.txt", other / "c.txt"):
        file.write_text(file.name)
    (tmp_path / "link.txt").symlink_to(data / "deep" / "b.txt")
    (tmp_path / "hard.txt").hardlink_to(data / "a.txt")
    check_apart([str(data), str(other)], {})
    check_apart([str(data)], {"other": str(other / "c.txt")})
    check_apart(["dataset:x,split=train"], {"test": "dataset:x,split=test"})
    inside = [data / "deep" / "b.txt", data / "deep", data, tmp_path / "link.txt", tmp_path / "hard.txt", tmp_path]
    for held_out in [*inside, data / ".." / "data" / "a.txt"]:
        with pytest.raises(ParameterError, match=r"held-out code=.* and data .* must not share a text"):
            check_apart([str(data)], {"code": str(held_out)})
    with pytest.raises(ParameterError, match="must not share a text"):
        check_apart([str(data / "deep" / "b.txt")], {"code": str(data)})
    with pytest.raises(ParameterError, match=r"data .* and data .* must not share a text, both have .*b.txt: give it once"):
        check_apart([str(data), str(data / "deep")], {})
    with pytest.raises(ParameterError, match="must not share a text"):
        check_apart(["dataset:x,split=train,column=a"], {"code": "dataset:x,column=a,split=train"})
    with pytest.raises(ParameterError, match="must lie outside the data"):
        check_outside([str(data)], [data / "deep" / "head"])
    check_outside([str(data)], [tmp_path / "head"])


def test_a_stamp_changes_with_the_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("one")
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    stamps = [stamp(str(tmp_path)), stamp(str(tmp_path))]
    assert stamps[0] == stamps[1]
    (tmp_path / "b.txt").write_text("another")
    os.utime(tmp_path / "b.txt", ns=(10**18, 10**18))
    stamps.append(stamp(str(tmp_path)))
    os.utime(tmp_path / "a.txt", ns=(10**18, 2 * 10**18))
    stamps.append(stamp(str(tmp_path)))
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    stamps.append(stamp(str(tmp_path)))
    (tmp_path / "c.txt").unlink()
    stamps.append(stamp(str(tmp_path)))
    assert len({repr(one) for one in stamps}) == 5
    assert stamp(str(tmp_path / "a.txt")) == [3, 2 * 10**18]


def test_what_is_no_text_is_refused_by_name_and_left_out_of_folders(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(bytes(range(256)) * 300)
    with pytest.raises(ParameterError, match=r"photo\.png must be text in UTF-8"):
        list(texts_of(str(tmp_path / "photo.png")))
    with pytest.raises(ParameterError, match="must hold text, and none of its files is"):
        list(texts_of(str(tmp_path)))
    odd = "a" * 70_000 + "\N{LATIN SMALL LETTER E WITH ACUTE}"  # in Latin-1: one byte that is not UTF-8, after a long text
    (tmp_path / "text.txt").write_bytes(odd.encode("latin-1"))
    assert list(texts_of(str(tmp_path))) == ["a" * 70_000 + "\N{REPLACEMENT CHARACTER}"]
    assert (left_out(str(tmp_path)), left_out(str(tmp_path / "text.txt"))) == (1, 0)


def test_states_go_on_where_they_stopped(tmp_path: Path) -> None:
    target = TransformersModel(module("Llama", 0, torch.float32))
    every = [window_of([(7 * i + j) % 50 + 3 for j in range(4)], asked=i % 3) for i in range(SHARD + 3)]
    whole, cut = StateFolder(tmp_path / "whole", {"a": 1}), StateFolder(tmp_path / "cut", {"a": 1})
    list(keep_states(target, iter(every), whole, batch_size=64))
    for done in keep_states(target, iter(every), cut, batch_size=64):
        if done > SHARD:
            break  # in the second shard: only the first is kept
    assert len(cut.paths) == 1
    list(keep_states(target, iter(every), StateFolder(tmp_path / "cut", {"a": 1}), batch_size=64))
    ours, theirs = StateWindows(cut.paths), StateWindows(whole.paths)
    assert len(ours) == len(theirs) == SHARD + 3
    torch.testing.assert_close(ours[SHARD + 2]["states"], theirs[SHARD + 2]["states"])
    assert [ours[SHARD + i]["drafted"].tolist() for i in (0, 1)] == [[True] * 4, [False, True, True, True]]  # asked: 1, 2
    with torch.inference_mode():
        out = target.module(input_ids=ours[SHARD + 1]["tokens"].unsqueeze(0))
    torch.testing.assert_close(ours[SHARD + 1]["normalisers"], out.logits[0].logsumexp(-1), atol=1e-4, rtol=1e-4)
    every_token = torch.stack([ours[i]["tokens"] for i in range(SHARD + 3)])
    with torch.inference_mode():
        wanted = target.module(input_ids=every_token).logits.softmax(-1).sum((0, 1))
    assert frequent_tokens(cut.paths, 10, VOCABULARY, frozenset()).tolist() == sorted(wanted.topk(10).indices.tolist())
    rare = int(wanted.argmin())
    assert rare in frequent_tokens(cut.paths, 10, VOCABULARY, frozenset({rare}))
    with pytest.raises(ParameterError, match="made of other data"):
        StateFolder(tmp_path / "cut", {"a": 2})
    (tmp_path / "cut" / "index.json").write_text('{"a": ')
    with pytest.raises(ParameterError, match=r"\(index\.json is damaged\): delete the folder"):
        StateFolder(tmp_path / "cut", {"a": 1})


def test_states_of_other_weights_are_refused(tmp_path: Path) -> None:
    """Of the same configuration, as two models fine-tuned from one are."""
    ours, theirs = (TransformersModel(module("Llama", seed, torch.float32)) for seed in (0, 1))
    assert ours.fingerprint == theirs.fingerprint
    folder = StateFolder(tmp_path / "states", {})
    check_states(theirs, folder)  # nothing is there yet
    list(keep_states(ours, iter([window_of(TEXT)] * 5), folder))
    check_states(ours, folder)
    with pytest.raises(ParameterError, match="were made with other weights"):
        check_states(theirs, folder)


def test_states_of_other_weights_are_seen_beside_enormous_ones(tmp_path: Path) -> None:
    """Real models have a position or two whose states are of another size than all others'."""
    ours, theirs = (module("Llama", 0, torch.float32) for _ in range(2))
    with torch.no_grad():
        for made in (ours, theirs):
            made.model.embed_tokens.weight[TEXT[0]] *= 1000.0
        theirs.model.layers[1].mlp.down_proj.weight.neg_()
    folder = StateFolder(tmp_path / "states", {})
    target = TransformersModel(ours)
    list(keep_states(target, iter([window_of(TEXT)] * 5), folder, (1,)))
    check_states(target, folder, (1,))
    with pytest.raises(ParameterError, match="were made with other weights"):
        check_states(TransformersModel(theirs), folder, (1,))


def test_a_target_with_capped_logits_is_refused(tmp_path: Path) -> None:
    target = TransformersModel(module("Gemma2", 0, torch.float32, final_logit_softcapping=1.0))
    target.keep_states()
    with pytest.raises(ModelError, match="are not those of its output layer on its last state"):
        states_of(target, torch.tensor([TEXT]))


def test_data_and_head_have_the_same_layers(tmp_path: Path) -> None:
    """Else the states of one layer would be read as those of another."""
    data = Data([], StateWindows([]), {}, (1,), {})
    with pytest.raises(ParameterError, match=r"layers must be those that the data has, \[1\], got \[\]"):
        train_head(tiny("Llama"), data, HeadSettings("autoregressive"), RunSettings(1), tmp_path)
    config = HeadConfig("autoregressive", "tiny", 32, VOCABULARY, VOCABULARY, 24, 4, 2, 8, layers=(1,))
    with pytest.raises(ParameterError, match="states must be 32 or 64 wide, got 96"):
        Mix(config)(torch.zeros(1, 32), torch.zeros(1, 96))
