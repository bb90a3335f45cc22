"""Ranks that shard different models are told before the first gather; a backend whose AVG is no mean is refused."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import collectives
from fsdp_ref.engine import MixedPrecisionPolicy, fully_shard
from fsdp_ref.errors import ConfigError, RankError, WorldError
from tests.engine.toys import Toy, batch, loss_of, toy

CASES = {
    "unit order": "rank 1 has blocks.1 as unit number 1, where rank 0 has blocks.0 as unit number 1",
    "frozen": "norm.weight of shape (6,) and torch.float32 cut along dim 0 and frozen in unit (root), where rank 0 has norm.weight",
    "shape": "blocks.0.up.weight of shape (12, 6) and torch.float32 cut along dim 0 and trained in unit blocks.0, where rank 0 has "
             "blocks.0.up.weight of shape (10, 6)",
    "one more": "where rank 0 has",
    "dtype": "torch.float64",
    "policy": "computed in torch.bfloat16",
}


def _different(rank, world, case):
    odd = rank == 1
    model = toy(hidden=12 if odd and case == "shape" else 10)
    if odd and case == "dtype":
        model.norm.double()
    if odd and case == "frozen":
        model.norm.weight.requires_grad_(False)
    if odd and case == "one more":
        model.extra = nn.Parameter(torch.zeros(3))
    for block in model.blocks:
        if not (odd and case == "unit order" and block is model.blocks[0]):
            fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16 if odd and case == "policy" else None))
    fully_shard(model)
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        loss_of(model, batch(0, rank))
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize("case", CASES)
def test_the_rank_and_the_module_that_differ_are_named_on_every_rank(ranks, case):
    told = ranks(3, _different, case)
    assert len({message for message, _ in told}) == 1, "all ranks say the same"
    message, seconds = told[0]
    assert message.startswith("the ranks shard different models: rank 1 has ") and "rank 0 has" in message and seconds < 10
    assert CASES[case] in message, message


def _late(rank, world):
    model = fully_shard(nn.Linear(2, 2))
    if rank == 1:
        time.sleep(4)
        return ""
    with pytest.raises(RankError) as caught:
        model(torch.ones(1, 2))
    return str(caught.value)


def test_a_rank_that_never_runs_the_model_is_named(ranks):
    told = ranks(2, _late, timeout=1.0)
    assert told[0].startswith("rank 1 did not run the first forward of this model within 1 s")


def _second_model(rank, world):
    """Every model is asked anew, and equal ones pass."""
    for _ in range(2):
        model = fully_shard(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
    return True


def test_equal_models_pass(ranks):
    assert all(ranks(3, _second_model))


def _broken_average(rank, world):
    original = dist.all_reduce

    def sums(tensor, op=None, **kwargs):
        return original(tensor, op=dist.ReduceOp.SUM, **kwargs)

    dist.all_reduce = sums
    try:
        with pytest.raises(WorldError, match="AVG of 0 to 2 gave 3 on the backend gloo, not 1"):
            fully_shard(nn.Linear(2, 2))
    finally:
        dist.all_reduce = original
    return fully_shard(nn.Linear(2, 2)) is not None         # asked again, since it had not passed


def test_b05_a_backend_whose_avg_is_a_sum_is_refused(ranks):
    assert all(ranks(3, _broken_average))


def _seeded(rank, world, case):
    """Models whose weights differ on rank 1, unless the case says that they may."""
    torch.manual_seed(0 if case == "same seed" else rank)
    model = Toy()
    with collectives.check_calls(case != "not checked"):
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        if case == "loaded since":
            for param in model.parameters():
                param.detach().fill_(0.5)
        try:
            loss_of(model, batch(0, rank))
        except ConfigError as error:
            return str(error)
    return ""


def test_ranks_that_start_from_other_weights_are_told_while_calls_are_checked(ranks):
    told = ranks(2, _seeded, "other seed")
    assert told == ["rank 1 starts from other weights of embedding.weight than rank 0; call torch.manual_seed with the same number on "
                    "every rank before building the model"] * 2
    for case in ("same seed", "not checked", "loaded since"):
        assert ranks(2, _seeded, case) == ["", ""], case
