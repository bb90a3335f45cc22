"""Harness: a GPT, and a `fully_shard` that writes down what it is asked for instead of doing it."""

from fsdp_ref.models import GPT, GPTConfig
from fsdp_ref.policies import MixedPrecisionPolicy


def build():
    """The model of the exercise."""
    return GPT(GPTConfig(vocab=512, dim=64, layers=6, heads=4, context=64))


def run(function, case, rank):
    """The evidence: the calls in order, and the answers to the three choices."""
    model, calls = build(), []
    names = {module: name for name, module in model.named_modules()}

    def fully_shard(module, *, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy()):  # noqa: B008 (a frozen value)
        """Writes down the call."""
        if module not in names:
            raise ValueError(f"fully_shard takes one module of the model in this exercise, and this is a {type(module).__name__}")
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward is {reshard_after_forward!r}; give True or False in this exercise")
        if not isinstance(mp_policy, MixedPrecisionPolicy):
            raise ValueError("mp_policy must be a MixedPrecisionPolicy")
        calls.append({"unit": names[module], "reshard": reshard_after_forward, "param": dtype_name(mp_policy.param_dtype),
                      "reduce": dtype_name(mp_policy.reduce_dtype)})
        return module

    answers = function(model, fully_shard, MixedPrecisionPolicy)
    return {"calls": calls, "answers": answers if isinstance(answers, dict) else None}


def dtype_name(dtype):
    """bfloat16 for torch.bfloat16; "" for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")
