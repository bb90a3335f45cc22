"""Finer units: attention and MLP of each block; the last one stays whole until its backward."""

import torch


def capstone(model, fully_shard, MixedPrecisionPolicy):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parts = [part for block in model.blocks for part in (block.attn, block.mlp)]
    for part in parts:
        fully_shard(part, mp_policy=policy, reshard_after_forward=part is not parts[-1])
    fully_shard(model, mp_policy=policy)
    return {"worst moment": 2, "twice the ranks": 3, "float32 sums": 1}
