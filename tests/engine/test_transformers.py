"""Real models: a Llama and a GPT-2 of Hugging Face transformers, trained with our fully_shard and with torch's, give the same bits.

Two ranks: a sum of two numbers has one order only, so nothing may differ. The weights are random and the models tiny; what is real is
the code of the models: keyword arguments, output dataclasses, tied embeddings, masks and position tensors made inside forward, caches.
transformers takes seconds to import, so only the ranks do it.
"""

import warnings

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_ref import engine

pytestmark = pytest.mark.slow            # the import

VOCAB, LENGTH = 67, 11                   # odd, so that two ranks shard the embedding unevenly


def _llama(tied):
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=24, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
                                         num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied, use_cache=False,
                                         attention_dropout=0.1, attn_implementation="sdpa", pad_token_id=0, eos_token_id=VOCAB + 1))
    return model, model.model.embed_tokens, list(model.model.layers), model.model.norm


def _gpt2(tied):
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=24, n_inner=37, n_layer=2, n_head=3, n_positions=32, use_cache=False,
                                       tie_word_embeddings=tied, attn_implementation="eager", pad_token_id=0, eos_token_id=VOCAB + 1))
    return model, model.transformer.wte, list(model.transformer.h), model.transformer.ln_f


FAMILIES = {"llama": _llama, "gpt2": _gpt2}


def _build(family, tied, api=None, together=False, policy=None, checkpointing=False):
    """The model, sharded by `api` (our engine or torch's module): the same weights each time.

    A tied pair must be in one unit: the root's, or with `together` one of its own. An untied pair is two units.
    """
    torch.manual_seed(0)
    model, embedding, layers, norm = FAMILIES[family](tied)
    head = model.lm_head
    assert (head.weight is embedding.weight) is tied
    model.calls = []                                            # of the first layer's forward, recomputed ones too
    next(layers[0].children()).register_forward_pre_hook(lambda *_: model.calls.append(None))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if api is None:
        return model
    options = {"mesh": init_device_mesh("cpu", (2,))}
    if policy:
        options["mp_policy"] = api.MixedPrecisionPolicy(**policy)
    for layer in layers:
        api.fully_shard(layer, **options)
    if together:
        api.fully_shard([embedding, norm, head], **options)
    elif not tied:
        api.fully_shard(embedding, **options)
        api.fully_shard([norm, head], **options)
    return api.fully_shard(model, **options)


def _tokens(step, rank):
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))


def _step(model, optimizer, tokens, seed):
    """Loss and gradient norm of one AdamW step. The seed makes the dropout masks of both engines the same."""
    torch.manual_seed(seed)
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach(), norm.full_tensor()


def _beside_torch(rank, world, family, tied, options):
    with warnings.catch_warnings(action="error", category=UserWarning):         # an output that is a view, a cache that is turned off, ...
        return _three_steps(rank, world, family, tied, options)


def _three_steps(rank, world, family, tied, options):
    models = [_build(family, tied, api, **options).train() for api in (engine, fsdp)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    first = last = None
    for step in range(3):
        ours, theirs = (_step(m, o, _tokens(step, rank), seed=step + 100 * rank) for m, o in zip(models, optimizers, strict=True))
        assert torch.equal(ours[0], theirs[0]), f"loss of step {step}: {ours[0]} is not {theirs[0]}"
        assert torch.equal(ours[1], theirs[1]), f"gradient norm of step {step}: {ours[1]} is not {theirs[1]}"
        first, last = (ours[0] if first is None else first), ours[0]
    assert [len(model.calls) for model in models] == [6 if options.get("checkpointing") else 3] * 2
    assert not torch.equal(first, last) and ours[1].isfinite() and ours[1] > 0
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    for (name, a), (_, b) in zip(*(m.named_parameters() for m in models), strict=True):
        assert isinstance(a, DTensor) and a.placements == b.placements and torch.equal(a.to_local(), b.to_local()), name
    return True


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.parametrize("options", [{}, {"policy": BF16}, {"checkpointing": True}, {"checkpointing": True, "policy": BF16}],
                         ids=["fp32", "bf16", "checkpointing", "bf16-checkpointing"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_give_the_bits_of_torch(ranks, family, tied, options):
    assert all(ranks(2, _beside_torch, family, tied, options, limit=120))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_pair_in_a_unit_of_its_own(ranks, family):
    assert all(ranks(2, _beside_torch, family, True, {"together": True}, limit=120))


def _generate(rank, world, family):
    plain, ours = _build(family, True).eval(), _build(family, True, engine).eval()
    engine.register_fsdp_forward_method(ours, "generate")
    prompt = _tokens(0, rank)[:, :4]
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    expected = plain.generate(prompt, **options)
    found = ours.generate(prompt, **options)
    assert found.shape == (2, 10) and torch.equal(found, expected)
    assert all(isinstance(param, DTensor) for param in ours.parameters()), "generate leaves shards behind"
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_through_a_registered_method(ranks, family):
    assert all(ranks(2, _generate, family, limit=120))


def _split_tie(rank, world):
    model, embedding, _, _ = FAMILIES["llama"](tied=True)
    engine.fully_shard(embedding)
    engine.fully_shard(model)
    with pytest.raises(ValueError, match="shared with a parameter already managed") as caught:
        model(input_ids=_tokens(0, rank))
    assert "embed_tokens" in str(caught.value) and "lm_head" in str(caught.value)
    return True


def test_a_tie_split_over_two_units_is_refused_by_name(ranks):
    assert all(ranks(2, _split_tie, limit=120))
