"""What goes over the wire may be said by the shard itself: 8-bit gathers, and torch's protocol for tensor subclasses."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_ref import fp8, ledger
from fsdp_ref.engine import MixedPrecisionPolicy, fully_shard
from fsdp_ref.errors import ConfigError
from fsdp_ref.ledger import Category, Lane
from tests.engine.toys import batch, loss_of, toy, train

EVEN = dict(vocab=64, dim=32, hidden=64, layers=3)


def sharded(apply=fully_shard, sizes=EVEN, **options):
    model = toy(**sizes)
    for block in model.blocks:
        apply(block, **options)
    return apply(model, **options)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_quantised_numbers_are_close(scale):
    values = torch.randn(64, 33, generator=torch.Generator().manual_seed(1)) * scale
    numbers, factor = fp8.quantise(values)
    assert numbers.dtype is torch.float8_e4m3fn and factor.shape == (1,)
    error = (numbers.float() * factor - values).abs()
    assert (error <= torch.maximum(values.abs() / 16, factor * 2**-10)).all()


def test_quantising_nothing_and_zeros():
    for tensor in (torch.zeros(3, 2), torch.zeros(0, 2)):
        numbers, factor = fp8.quantise(tensor)
        assert numbers.shape == tensor.shape and factor.item() == 1 and not numbers.float().any()


def _bytes(rank, world, sizes):
    """Bytes of the blocks' all-gathers with and without; and the loss beside the one of rounded weights, computed in one process."""
    plain, quantised = sharded(sizes=sizes), sharded(sizes=sizes)
    names = fp8.gather_in_fp8(quantised)
    books = []
    for model in (plain, quantised):
        with ledger.record() as book:
            loss = loss_of(model, batch(0, rank, vocab=sizes["vocab"]))
            loss.backward()
        books.append(sum(event.wire_bytes for event in book.events if event.lane == Lane.ALL_GATHER))
    reference = toy(**sizes)
    with torch.no_grad():
        for name, param in reference.named_parameters():
            if name in names:
                rows = [fp8.quantise(chunk) for chunk in param.chunk(world)]
                param.copy_(torch.cat([numbers.float() * scale for numbers, scale in rows]))
    return books, torch.equal(loss, loss_of(reference, batch(0, rank, vocab=sizes["vocab"]))), names


def test_eight_bits_are_a_quarter_of_fp32_and_arrive_as_they_were_rounded(ranks):
    for (plain, quantised), same, names in ranks(2, _bytes, EVEN):
        assert same and len(names) == 2 + 2 * 3
        matrices = 4 * (2 * 64 * 32 + 3 * 2 * 64 * 32)
        rest = plain - (matrices + 3 * 2 * 64 * 32 * 4) / 2           # blocks are gathered twice; what is not a matrix stays fp32
        assert quantised == pytest.approx((plain - rest) / 4 + rest, rel=0.01)


def _whole_bytes(rank, world):
    """Bytes of whole weights on the books while a block computes, and when all is freed again."""
    seen = []
    for eight_bits in (False, True):
        model = sharded()
        if eight_bits:
            fp8.gather_in_fp8(model)
        model.blocks[1].up.register_forward_pre_hook(lambda *_: seen.append(ledger.live_bytes(Category.UNSHARDED_PARAM)))
        loss_of(model, batch(0, rank, vocab=64)).backward()
        seen.append(ledger.live_bytes(Category.UNSHARDED_PARAM))
    return seen


def test_whole_weights_of_an_extension_are_on_the_books(ranks):
    plain, freed, eight_bits, freed_again = ranks(2, _whole_bytes)[0]
    assert freed == freed_again == 0
    sent = 4 * 64 * 32                                                 # two matrices of the root, two of the block: a byte a number
    assert plain + sent <= eight_bits < plain + sent + 500, "the numbers in fp32, beside the 8-bit ones (and scales) they were made of"


def test_uneven_rows_in_eight_bits(ranks):
    assert all(same for _, same, _ in ranks(3, _bytes, dict(vocab=17, dim=6, hidden=10, layers=2)))


def _trains(rank, world):
    """Masters stay fp32: the loss falls as without, and the shards hold what 8 bits cannot."""
    model, reference = sharded(), sharded()
    fp8.gather_in_fp8(model)
    losses, expected = train(model, rank, steps=6), train(reference, rank, steps=6)
    shard = model.head.weight.to_local()
    return losses, expected, bool((fp8.quantise(shard)[0].float() * fp8.quantise(shard)[1] != shard).any())


def test_training_with_eight_bit_gathers(ranks):
    for losses, expected, finer in ranks(2, _trains):
        assert losses == pytest.approx(expected, rel=0.02) and finer


def _groups(state):
    """torch 2.13 has several groups a state, 2.11 one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if groups is None and state._fsdp_param_group else groups or []


def _like_torch(rank, world):
    """The same hooks on torch's own fully_shard, bf16 compute: the same losses."""
    policies = [dict(mp_policy=policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)) for policy in
                (MixedPrecisionPolicy, torch.distributed.fsdp.MixedPrecisionPolicy)]
    models = [sharded(apply, **policy) for apply, policy in zip((fully_shard, torch_fully_shard), policies, strict=True)]
    for model in models:
        fp8.gather_in_fp8(model)
        if model is models[1]:                              # torch looks for the hooks when it lays out the shards
            for param in (p for m in model.modules() if hasattr(m, "_get_fsdp_state") for g in _groups(m._get_fsdp_state())
                          for p in g.fsdp_params):
                param._init_extensions()
    return train(models[0], rank, steps=2) == train(models[1], rank, steps=2)


def test_the_hooks_mean_the_same_to_torch(ranks):
    assert all(ranks(2, _like_torch))


def _moved(rank, world):
    """`.to(dtype)` lays the shards out anew; the hooks follow."""
    model = sharded()
    fp8.gather_in_fp8(model)
    loss_of(model, batch(0, rank, vocab=64)).backward()
    model.zero_grad()
    with ledger.record() as before:
        loss_of(model, batch(0, rank, vocab=64))
    model.double().float()
    with ledger.record() as after:
        loss_of(model, batch(0, rank, vocab=64))
    count = lambda book: sum(e.bytes for e in book.events if e.lane == Lane.ALL_GATHER)  # noqa: E731
    return count(before), count(after)


def test_the_hooks_survive_a_change_of_memory(ranks):
    before, after = ranks(2, _moved)[0]
    assert before == after


def test_refusals():
    with pytest.raises(ConfigError, match="is sharded"):
        fp8.gather_in_fp8(toy())


def _nothing_chosen(rank, world):
    with pytest.raises(ConfigError, match="was chosen"):
        fp8.gather_in_fp8(sharded(), lambda name, param: False)
    model = fully_shard(torch.nn.Linear(4, 4))
    model.weight._local_tensor.fsdp_pre_all_gather = lambda mesh: None
    with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather"):
        model(torch.ones(1, 4))
    return True


def test_half_a_protocol_is_refused(ranks):
    assert all(ranks(2, _nothing_chosen))
