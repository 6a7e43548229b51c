"""Where training starts: heads and students as parts of their target."""

from __future__ import annotations

import pytest
import torch
import transformers

from outrider.errors import ModelError, ParameterError
from outrider.heads.config import HeadConfig, Kind
from outrider.heads.layers import AutoregressiveHead, make_network
from outrider.models.recurrent.model import RecurrentModel
from outrider.models.transformers_model import TransformersModel
from outrider.train.shallow import _shallow, make_shallow
from outrider.train.start import head_config, start_from_target, weight_of
from tests.helpers.tiny_models import VOCABULARY, module, tiny

KINDS: tuple[Kind, ...] = ("autoregressive", "blockwise")
TEXT = [5, 6, 7, 8, 9, 20, 21, 3, 44, 17, 30, 2, 58, 12, 33, 5]


def test_a_head_starts_as_the_targets_last_layer() -> None:
    made = module("Llama", 0, torch.float32)
    target = TransformersModel(made)
    network = make_network(HeadConfig("autoregressive", "tiny", 32, VOCABULARY, VOCABULARY, 48, 4, 2, 8))
    assert isinstance(network, AutoregressiveHead)
    assert start_from_target(network, target, torch.tensor([TEXT, TEXT[::-1]]))
    torch.testing.assert_close(network.layer.down.weight, made.model.layers[-1].mlp.down_proj.weight, atol=1e-6, rtol=1e-5)
    assert not torch.equal(network.mix.join.weight, torch.zeros(32, 64))
    assert not start_from_target(network, tiny("GPT2"), torch.tensor([TEXT]))
    weight = torch.randn(5, 7)
    layer = torch.nn.Linear(7, 5)
    layer.weight.data.copy_(weight)
    torch.testing.assert_close(weight_of(layer, 7).detach(), weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["Mamba", "Mamba2"])
def test_heads_for_targets_without_attention_have_some_of_a_usual_size(architecture: str) -> None:
    target = RecurrentModel(module(architecture, 0, torch.float32))
    for kind in KINDS:
        config = head_config(target, kind, VOCABULARY, None, 2, 64)
        assert (config.num_heads, config.head_size) == (1, 32)
        make_network(config)
    assert head_config(tiny("Llama"), "autoregressive", VOCABULARY, None, 1, 64).num_heads == 4


def test_a_narrower_head_starts_with_the_neurons_that_matter() -> None:
    made = module("Llama", 0, torch.float32)
    last = made.model.layers[-1].mlp
    with torch.no_grad():
        last.down_proj.weight[:, ::2] *= 1e-3  # says nothing, however large its neurons are
        last.up_proj.weight[::2] *= 10.0
    network = make_network(HeadConfig("autoregressive", "tiny", 32, VOCABULARY, VOCABULARY, 24, 4, 2, 8))
    assert isinstance(network, AutoregressiveHead)
    assert start_from_target(network, TransformersModel(made), torch.tensor([TEXT, TEXT[::-1]]))
    for own, theirs in ((network.layer.gate, last.gate_proj), (network.layer.up, last.up_proj)):
        torch.testing.assert_close(own.weight, theirs.weight[1::2], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(network.layer.down.weight, last.down_proj.weight[:, 1::2], atol=1e-6, rtol=1e-5)
    wider = make_network(HeadConfig("autoregressive", "tiny", 32, VOCABULARY, VOCABULARY, 64, 4, 2, 8))
    assert isinstance(wider, AutoregressiveHead)
    assert not start_from_target(wider, TransformersModel(made), torch.tensor([TEXT]))


def test_a_students_layers_are_the_targets_first() -> None:
    target = TransformersModel(module("Llama", 0, torch.float32, num_hidden_layers=6))
    student = make_shallow(target, 2)
    for own, theirs in zip(student.module.model.layers, target.module.model.layers[:2], strict=True):
        torch.testing.assert_close(own.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    assert not student.module.get_input_embeddings().weight.requires_grad
    assert {name.partition(".")[0] for name, one in student.named_parameters() if one.requires_grad} == {"module", "map"}
    with pytest.raises(ParameterError, match=r"layers must be in 1 … 5, got 6"):
        make_shallow(target, 6)
    target.module.lm_head = torch.nn.Sequential(target.module.lm_head)
    with pytest.raises(ModelError, match="its head is no linear layer"):
        make_shallow(target, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_a_students_map_is_fitted_and_becomes_a_part_of_its_head(tied: bool) -> None:
    target = TransformersModel(module("Llama", 0, torch.float32, num_hidden_layers=4, tie_word_embeddings=tied))
    student = make_shallow(target, 1)
    windows = [torch.randint(VOCABULARY, (48,), generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    with torch.no_grad():
        own = [student.own_states(one.unsqueeze(0))[0] for one in windows]
    hidden = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(9))).Q
    student.fit((tokens, torch.cat([states @ hidden, states], -1)) for tokens, states in zip(windows, own, strict=True))
    with torch.no_grad():
        predicted = student(windows[0].unsqueeze(0))[0]
        torch.testing.assert_close(predicted, own[0] @ hidden, atol=0.02, rtol=0.02)  # a ridge
        expected = torch.nn.functional.linear(predicted, target.module.get_output_embeddings().weight)
        whole = student.whole().eval()
        torch.testing.assert_close(whole(windows[0].unsqueeze(0)).logits[0], expected, atol=1e-5, rtol=1e-4)
    assert whole.get_input_embeddings().weight is not whole.get_output_embeddings().weight


def test_a_map_is_fitted_without_dropout() -> None:
    target = TransformersModel(module("GPT2", 0, torch.float32))
    assert target.module.config.resid_pdrop > 0
    tokens = torch.randint(VOCABULARY, (8, 48), generator=torch.Generator().manual_seed(0))
    maps = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        student = make_shallow(target, 1)
        student.fit(
            (window, torch.randn(48, 32, generator=torch.Generator().manual_seed(i))) for i, window in enumerate(tokens)
        )
        assert student.training
        maps.append(student.map.weight.detach())
    torch.testing.assert_close(maps[0], maps[1])


def test_what_a_configuration_lists_by_layer_is_cut_with_the_layers() -> None:
    kinds = {"sliding_attention": 5, "full_attention": 1}
    text = {"num_hidden_layers": 6, "layer_types": [kind for kind, count in kinds.items() for _ in range(count)]}
    nested = transformers.Gemma3Config(text_config=text)
    shallow = _shallow(nested, 2, "nested")
    assert shallow.get_text_config().layer_types == ["sliding_attention"] * 2
    assert transformers.Gemma3Config.from_dict(shallow.to_dict()).get_text_config().num_hidden_layers == 2
    assert len(nested.get_text_config().layer_types) == 6
    experts = transformers.ExaoneMoeConfig(num_hidden_layers=4, eos_token_id=[1, 2, 3, 4])
    shallow = _shallow(experts, 3, "experts")
    assert (len(shallow.mlp_layer_types), shallow.eos_token_id) == (3, [1, 2, 3, 4])
    transformers.ExaoneMoeConfig.from_dict(shallow.to_dict())
    experts.layer_types = ["no such attention"] * 4
    with pytest.raises(ModelError, match="with 2 layers its configuration is refused"):
        _shallow(experts, 2, "experts")


def test_a_student_stops_where_its_target_does() -> None:
    target = TransformersModel(module("Llama", 0, torch.float32, num_hidden_layers=3))
    target.module.generation_config.eos_token_id = [2, 41]
    assert make_shallow(target, 1).module.generation_config.eos_token_id == [2, 41]
