"""units are too many and too small"""

import torch


def capstone(model, fully_shard, MixedPrecisionPolicy):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        for part in (block.attn.qkv, block.attn.proj, block.mlp.up, block.mlp.down):
            fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return {"worst moment": 2, "twice the ranks": 3, "float32 sums": 1}
