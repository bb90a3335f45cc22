"""Memory beside published counts, beside what autograd really saves, beside the forecast that the engine's ledger was measured with."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from fsdp_ref import forecast
from fsdp_ref.errors import ConfigError
from fsdp_ref.models import GPT, GPTConfig
from fsdp_ref.plan import Architecture, Strategy, activations, memory, modules, preset
from fsdp_ref.plan.footprint import describe
from fsdp_ref.plan.presets import presets
from fsdp_ref.plan.quantities import GiB
from fsdp_ref.plan.strategy import by_batch
from fsdp_ref.policies import MixedPrecisionPolicy
from fsdp_ref.rows import Category

PUBLISHED = {"gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320,
             "llama2-70b": 68_976_648_192, "llama3.1-8b": 8_030_261_248, "llama3.1-70b": 70_553_706_496,
             "llama3.1-405b": 405_853_388_800, "vit-h": 632_045_800}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    """safetensors' headers on the Hugging Face hub; vit_h_14 of torchvision."""
    assert preset(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize(("name", "of"), [("gpt2-large", "GPT2Config"), ("llama3.1-8b", "LlamaConfig")])
def test_presets_are_the_models_that_transformers_builds(name, of):
    import transformers
    shape = preset(name)
    if of == "GPT2Config":
        config = transformers.GPT2Config(n_layer=shape.layers, n_embd=shape.dim, n_head=shape.heads, architectures=["GPT2LMHeadModel"])
    else:
        config = transformers.LlamaConfig(vocab_size=shape.vocab, hidden_size=shape.dim, intermediate_size=shape.ffn,
                                          num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
                                          num_key_value_heads=shape.kv_heads)
    built = describe(config)
    assert built.parameters == shape.parameters and len(built.blocks) == shape.layers
    assert {block.parameters for block in built.blocks} == {shape.block().parameters}
    assert memory(built, gpus=8).of(Category.SHARDED_PARAM) == memory(name, gpus=8).of(Category.SHARDED_PARAM) == 4 * shape.parameters / 8


def test_flops_of_a_token_by_torchtitans_formula():
    """6 N without the embedding + 12 L h s: 57.91e9 for Llama 3.1 8B at 8,192 tokens (planner reference, B.5)."""
    assert preset("llama3.1-8b").flops_per_token(8192) == pytest.approx(57.91e9, rel=1e-4)


def gpt_shape(config, **more):
    return Architecture("gpt", config.layers, config.dim, config.heads, 4 * config.dim, config.vocab, config.context, **more)


def test_activations_are_what_autograd_saves():
    config = GPTConfig(dim=256, layers=3, heads=4, context=128)
    counted = modules.describe(lambda: GPT(config), (torch.zeros(4, 128, dtype=torch.long),))
    shape = gpt_shape(config)
    formula = sum(activations.block(shape, 128, 128).values())
    assert all(saved == pytest.approx(formula, rel=0.002) for saved in counted.saved[:-1])           # the rest: statistics of the norms
    assert counted.work[:-1] == pytest.approx([128 * shape.block_flops(128)] * 3) and counted.work[-1] == 128 * shape.head_flops()
    assert counted.edges == pytest.approx([activations.block_input(shape, 128)] * 3)
    stores = modules.describe(lambda: GPT(config), (torch.zeros(4, 128, dtype=torch.long),), flash=False)
    assert stores.saved[0] > sum(activations.block(shape, 128, 128, scores=True).values()) > counted.saved[0]
    assert memory(counted, micro_batch=6).of("activations") == pytest.approx(6 * sum(counted.saved))
    assert memory(counted, recompute="full").of("activations") < memory(counted).of("activations") / 3


@pytest.mark.parametrize(("tensor", "parallel", "scores", "expected"), [
    (1, False, True, 34 + 5 * 96 * 2048 / 12288), (8, False, True, 10 + 24 / 8 + 5 * 96 * 2048 / 12288 / 8),
    (8, True, True, (34 + 5 * 96 * 2048 / 12288) / 8), (8, True, False, 34 / 8)])
def test_a_gpt_blocks_activations_are_korthikantis(tensor, parallel, scores, expected):
    terms = activations.block(preset("gpt3-175b"), 2048, 2048, tensor=tensor, sequence_parallel=parallel, scores=scores)
    terms.pop("row sums of flash attention", None)
    assert sum(terms.values()) == pytest.approx(expected * 2048 * 12288, rel=1e-12)


@pytest.mark.parametrize("dtypes", ["fp32", "fsdp"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_zero3_is_the_forecast_that_the_ledger_confirms(world, dtypes):
    """forecast.held is compared with the engine's own ledger in tests/engine/test_forecast.py. All gradients may accumulate there."""
    model = GPT(GPTConfig(dim=30, layers=3, heads=2, vocab=97, context=33))                          # rows that must be padded
    policy = MixedPrecisionPolicy() if dtypes == "fp32" else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    held = forecast.held(forecast.sizes(model, list(reversed(model.blocks)), world, policy))
    planned = memory(model, gpus=world, dtypes=dtypes, runtime=False)
    at_rest = sum(planned.of(kind) for kind in (Category.SHARDED_PARAM, Category.SHARDED_GRAD, Category.OPTIMIZER, "padding"))
    assert at_rest == 16 / 12 * (held[Category.SHARDED_PARAM] + held[Category.OPTIMIZER])
    if world > 1:
        assert planned.low == pytest.approx(held.total(), rel=0.07)                                  # whole units there include padding


def test_every_row_of_the_ladder_holds_what_zero_says():
    """ZeRO, section 5, with K = 12: 16 Psi, 4 + 12/N, 2 + 14/N, 16/N."""
    psi, n = preset("llama2-7b").parameters, 8
    for stage, expected in (("ddp", 16), ("zero1", 4 + 12 / n), ("zero2", 2 + 14 / n), ("zero3", 16 / n)):
        found = memory("llama2-7b", gpus=n, stage=stage, dtypes="mixed", runtime=False)
        kinds = (Category.SHARDED_PARAM, Category.UNSHARDED_PARAM, Category.SHARDED_GRAD, Category.UNSHARDED_GRAD, Category.OPTIMIZER)
        assert sum(found.of(kind) for kind in kinds) == pytest.approx(expected * psi), stage


def test_whole_weights_beside_a_wider_master_are_there_twice():
    """ZeRO-2 with fp32 shards computes with bf16 copies: 2 + (4 + 4 + 8)/N, as the engine keeps them."""
    found = memory("gpt2", gpus=4, stage="zero2", dtypes="fsdp", runtime=False)
    psi = preset("gpt2").parameters
    assert found.of(Category.UNSHARDED_PARAM) == 2 * psi and found.of(Category.OPTIMIZER) == 12 * psi / 4


def test_a_unit_is_whole_not_a_linear():
    """DeepSpeed's "largest layer" is one Linear; a Llama block is 218 M parameters, its largest matrix 59 M."""
    one = memory("llama3.1-8b", gpus=8)
    root, block = preset("llama3.1-8b").root().parameters, preset("llama3.1-8b").block().parameters
    assert one.of("whole weights in use") == 2 * (root + block)
    assert memory("llama3.1-8b", gpus=8, prefetch=0).of("all-gather buffer") == 0 < one.of("all-gather buffer") == 2 * block


def test_flash_and_selective_do_not_add_up():
    """Megatron-LM #1225: selective recomputation gains nothing where flash attention stores no scores."""
    shape = {"gpus": 8, "sequence": 2048}
    stores, selective = (memory("gpt3-175b", flash=False, recompute=kind, **shape).of("activations") for kind in ("none", "selective"))
    assert stores > 1.5 * selective
    assert selective == memory("gpt3-175b", **shape).of("activations")
    assert selective == memory("gpt3-175b", recompute="selective", **shape).of("activations")


def test_the_fullest_stage_of_a_pipeline():
    options = {"gpus": 64, "tensor": 8, "pipeline": 8, "sequence": 2048, "flash": False, "micro_batches": 64}
    plain = memory("gpt3-175b", **options)
    woven = memory("gpt3-175b", schedule="interleaved", chunks=3, **options)
    assert plain.stage_index == 0 and woven.of("activations") == pytest.approx((1 + 7 / 24) * plain.of("activations"))
    assert memory("gpt3-175b", **options | {"micro_batches": 2}).of("activations") == pytest.approx(plain.of("activations") / 4)


def test_frozen_parameters_cost_neither_gradients_nor_moments():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("meta")
    model[0].requires_grad_(False)
    found = memory(model, runtime=False)
    assert found.of(Category.SHARDED_PARAM) == 4 * 144
    assert found.of(Category.OPTIMIZER) == 8 * 72 and found.of(Category.SHARDED_GRAD) == 4 * 72


def test_the_table_names_units_terms_and_what_is_left_out():
    text = str(memory("llama3.1-8b", gpus=8))
    assert "GiB" in text and "GB" in text and "not included:" in text and "fragmentation" in text and "logits and loss" in text
    assert "activations: give example inputs" in str(memory(nn.Linear(2, 2)))
    found = memory("llama3.1-8b", gpus=8)
    assert found.low < found.high and found.fits(found.high) == "yes" and found.fits(found.low - 1) == "no"
    assert found.fits((found.low + found.high) / 2) == "perhaps"


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.total = self.weight.sum().item()


class Branches(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


@pytest.mark.parametrize(("call", "words"), [
    (lambda: memory("lama3.1-70b"), "no model 'lama3.1-70b'; did you mean llama3.1-70b"),
    (lambda: memory("gpt2", gpus=6, tensor=4), "6 GPUs cannot be cut into groups of tensor 4"),
    (lambda: memory("gpt2", gpus=-1), "gpus is -1; it must be a whole number"),
    (lambda: memory("gpt2", gpus=2.5), "gpus is 2.5"),
    (lambda: memory("gpt2", micro_batch=0), "micro_batch is 0"),
    (lambda: memory("gpt2", stage="zero4"), "no stage 'zero4'; did you mean"),
    (lambda: memory("gpt2", dtypes="fp8"), "no dtypes 'fp8'"),
    (lambda: memory("gpt2", gpus=8, stage="hsdp", replicas=3), "3 replicas do not divide the 8"),
    (lambda: memory("gpt2", gpus=8, replicas=2), "replicas belong to hsdp"),
    (lambda: memory("gpt2", gpus=16, tensor=8), "12 heads and 12 key-value heads, which tensor 8 does not divide"),
    (lambda: memory("gpt2", gpus=16, pipeline=16), "12 blocks, too few for 16 pipeline stages"),
    (lambda: memory("gpt2", gpus=16, pipeline=2, chunks=2), "2 chunks a rank need schedule='interleaved'"),
    (lambda: memory("vit-h", sequence=100), "looks at 257 patches"),
    (lambda: by_batch(100, gpus=64), "a batch of 100 sequences does not divide by 64 data-parallel ranks"),
    (lambda: by_batch(64, gpu=64), "no option 'gpu'; did you mean gpus"),
    (lambda: memory(Reads), "cannot be built on the meta device"),
    (lambda: memory(7), "a int cannot be planned"),
    (lambda: modules.describe(Branches(2, 2), (torch.ones(2, 2),)), "Branches cannot run without data"),
    (lambda: memory(nn.Linear(2, 2), gpus=2, tensor=2), "is a module, and only data parallelism of modules"),
    (lambda: Architecture("x", 1, 10, 3, 1, 1, 1), "dim 10 cannot be cut into 3 equal heads"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_is_one_clear_error(call, words):
    with pytest.raises(ConfigError) as caught:
        call()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_presets_and_formulas_need_no_torch():
    code = "import sys; from fsdp_ref.plan import memory; print(memory('llama3.1-70b', gpus=64).low > 0, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["True", "False"]


def test_every_preset_says_where_it_comes_from():
    assert all(shape.source for shape in presets().values())
    assert Strategy(gpus=8).batch == 8 and by_batch(64, gpus=8).micro_batches == 8
    assert memory("gpt2", gpus=1, runtime=False).low / GiB < memory("gpt2", gpus=1).low / GiB


def test_examples_in_docstrings_are_true():
    import doctest

    from fsdp_ref.plan import checks, quantities, stages
    for part in (checks, quantities, stages):
        assert doctest.testmod(part).failed == 0 < doctest.testmod(part).attempted, part.__name__
