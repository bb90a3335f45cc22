"""By name, from the end; the last block is kept, as backward begins with it; answers made one by one."""

import torch


def capstone(model, fully_shard, MixedPrecisionPolicy):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, module in reversed(list(model.named_modules())):
        if name.startswith("blocks.") and name.count(".") == 1:
            fully_shard(module, mp_policy=policy, reshard_after_forward=name != "blocks.5")
    fully_shard(model, mp_policy=policy)
    answers = {}
    answers["worst moment"] = 2
    answers["twice the ranks"] = 3
    answers["float32 sums"] = 1
    return answers
