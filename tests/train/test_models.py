"""The GPT: causal, well started, of the stated size, and loss goes through the call that sharding hooks into."""

import math

import pytest
import torch
import torch.nn.functional as F

from fsdp_ref.errors import ConfigError
from fsdp_ref.models import GPT, GPTConfig

SMALL = dict(context=16, dim=32, layers=2, heads=4)


def bytes_of(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def test_shape_of_the_logits():
    assert GPT(GPTConfig(**SMALL))(bytes_of(3, 10)).shape == (3, 10, 256)


@pytest.mark.parametrize("changed", [0, 7, 15])
def test_a_byte_changes_nothing_before_it_and_something_from_it_on(changed):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SMALL)).eval()
    tokens = bytes_of(1, 16)
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % 256
    before, after = model(tokens)[0], model(other)[0]
    torch.testing.assert_close(before[:changed], after[:changed], rtol=0, atol=0)
    assert all(not torch.equal(before[t], after[t]) for t in range(changed, 16))


def test_attention_equals_the_textbook_formula():
    torch.manual_seed(0)
    attention = GPT(GPTConfig(**SMALL)).blocks[0].attn
    x = torch.randn(2, 5, 32)
    q, k, v = attention.qkv(x).split(32, dim=-1)                                      # (2, 5, 32) each
    heads = []
    for h in range(4):
        own = slice(8 * h, 8 * h + 8)
        scores = q[..., own] @ k[..., own].transpose(1, 2) / math.sqrt(8)             # (2, 5, 5)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[..., own])
    torch.testing.assert_close(attention(x), attention.proj(torch.cat(heads, -1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_an_untrained_model_knows_nothing(tied):
    torch.manual_seed(0)
    tokens = bytes_of(8, 17)
    loss = GPT(GPTConfig(tied=tied, **SMALL)).loss(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_stated_number_of_parameters_is_the_real_one(tied, layers):
    config = GPTConfig(context=16, dim=24, layers=layers, heads=3, tied=tied)
    assert sum(p.numel() for p in GPT(config).parameters()) == config.parameters()


def test_tying_shares_one_tensor():
    tied, untied = GPT(GPTConfig(tied=True, **SMALL)), GPT(GPTConfig(tied=False, **SMALL))
    assert tied.head.weight is tied.tokens.weight
    assert untied.head.weight is not untied.tokens.weight


def test_loss_calls_the_model_and_every_unit_so_that_hooks_run():
    model = GPT(GPTConfig(**SMALL))
    calls = []
    for module in (model, *model.units()):
        module.register_forward_pre_hook(lambda module, _: calls.append(module))
    tokens = bytes_of(2, 9)
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    assert calls == [model, *model.blocks]
    logits = model(tokens[:, :-1])
    by_hand = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
    torch.testing.assert_close(loss, by_hand)
    torch.testing.assert_close(loss, F.cross_entropy(logits.reshape(-1, 256), tokens[:, 1:].reshape(-1)))


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model = GPT(GPTConfig(dropout=0.5, **SMALL))
    tokens = bytes_of(1, 16)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    torch.testing.assert_close(model(tokens), model(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("wrong, named", [({"heads": 5}, "dim 32"), ({"dim": 0}, "dim is 0"), ({"layers": 0}, "layers"),
                                          ({"dropout": 1.0}, "dropout"), ({"dropout": -0.1}, "dropout")])
def test_a_shape_that_cannot_work_is_named(wrong, named):
    with pytest.raises(ConfigError, match=named):
        GPTConfig(**{**SMALL, **wrong})


def test_an_input_longer_than_the_context_is_refused():
    with pytest.raises(ConfigError, match="17 tokens.*context is 16"):
        GPT(GPTConfig(**SMALL))(bytes_of(1, 17))
