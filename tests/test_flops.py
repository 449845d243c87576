"""The FLOP of a training step against those that torch counts, and the peak of a GPU by the name that torch gives it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.config.schema import Method
from finetune.flops import (
    count_attention_layers,
    count_token_passes,
    flop_per_token,
    flop_per_token_of,
    forward_flop_per_token_of,
    fp8_share_of,
    peak_flops_of,
)
from finetune.plan.speed import estimate_speed
from tests.plan.run_specs import make_spec

TERA = 1e12
PEAKS = {  # dense bf16, from the vendors' data sheets
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A40": 150,
    "NVIDIA A10": 125,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 4090": 165,
    "AMD Instinct MI300X": 1307,
}
UNKNOWN = (
    "NVIDIA RTX A4000",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA A10G",
)


@pytest.mark.parametrize("name", PEAKS)
def test_a_gpu_has_the_peak_of_its_own_version(name: str) -> None:
    assert peak_flops_of(name) == PEAKS[name] * TERA


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_only_looks_like_a_known_one_has_no_peak(name: str) -> None:
    assert peak_flops_of(name) is None


TOKENS = 128
CONFIG = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1}
EXPERTS |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6)
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 24},
    "stablelm": {},  # whose config has no head_dim
    "qwen3_moe": EXPERTS | {"head_dim": 24, "mlp_only_layers": [0]},
    "gpt_oss": EXPERTS | {"head_dim": 24},
    "deepseek_v3": EXPERTS | LATENT | {"first_k_dense_replace": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "lengths", [(TOKENS,), (TOKENS, 40, 12, 12)], ids=["one document", "packed"]
)
def test_the_flop_of_a_step_are_those_that_torch_counts(
    family: str, lengths: tuple[int, ...]
) -> None:
    """Documents of a packed row run one by one. Of the model that transformers builds, with attention written out, as the formula counts it; norms and biases, which the
    formula takes for products, are the difference (1.1% in so small a gpt-oss). The plan counts from config.json alone."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from finetune.data.batches import StepBatch
    from finetune.models.load import count_parameters
    from finetune.training.metrics import Window
    from finetune.training.objectives.objective import Measured

    config = CONFIG | FAMILIES[family]
    model: Any = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**config), attn_implementation="eager"
    )
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            model(
                input_ids=torch.randint(3, 256, (1, length)), use_cache=False
            ).logits.sum().backward()
    size = count_parameters(model)
    window = Window(torch.device("cpu"))
    squares = sum(length**2 for length in lengths)
    window.add(
        Measured(torch.zeros(())),
        1,
        StepBatch(0, 0.0, (), sum(lengths), 0, squared_tokens=squares),
        0.0,
    )
    found = flop_per_token_of(model.config, parameters=size.multiplied, length=window.mean_length())
    assert found * sum(lengths) == pytest.approx(counter.get_total_flops(), rel=0.015)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for length in lengths:
            model(input_ids=torch.randint(3, 256, (1, length)), use_cache=False)
    found = forward_flop_per_token_of(
        model.config, parameters=size.multiplied, length=window.mean_length()
    )
    assert found * sum(lengths) == pytest.approx(counter.get_total_flops(), rel=0.015)
    found = flop_per_token_of(model.config, parameters=size.multiplied, length=TOKENS)
    planned = estimate_speed(
        make_spec({"model_type": family, **config}, ranks=1, max_length=TOKENS), mfu=0.4
    )
    assert planned.flop_per_token == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("use_peft", [False, True])
@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_a_methods_forwards_without_a_backward_are_counted_once(
    method: str, use_peft: bool
) -> None:
    """Of KTO's tokens half are mismatched, which no backward reaches; under LoRA a reference runs on all of both methods'."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**CONFIG, head_dim=24, attn_implementation="eager"))
    documents = torch.randint(3, 256, (2, TOKENS))
    passes = [(documents[:1] if method == "kto" else documents, True)]  # (tokens, has a backward)
    if method == "kto":
        passes.append((documents[1:], False))
    if method != "sft" and use_peft:
        passes.append((documents, False))
    with FlopCounterMode(display=False) as counter:
        for input_ids, has_backward in passes:
            with torch.set_grad_enabled(has_backward):
                embedded = model.get_input_embeddings()(input_ids).detach()
                embedded.requires_grad_(has_backward)
                model.requires_grad_(not use_peft)
                loss = model(inputs_embeds=embedded, use_cache=False).logits.sum()
            if has_backward:
                loss.backward()
    spec = make_spec({"model_type": "llama", "head_dim": 24, **CONFIG}, ranks=1, max_length=TOKENS)
    lora = replace(spec.recipe.lora, use_peft=use_peft, lora_r=1)
    spec = replace(spec, recipe=replace(spec.recipe, method=Method(method=method), lora=lora))
    planned = estimate_speed(spec, mfu=0.4).flop_per_token * documents.numel()
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.03)


# the layers of transformers' default configs that attend
ATTENDING = {"jamba": 4, "recurrent_gemma": 8, "zamba2": 9, "falcon_h1": 32, "mamba": 0}


@pytest.mark.parametrize("family", ATTENDING)
def test_layers_in_which_no_tokens_are_compared_are_not_counted(family: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert count_attention_layers(CONFIG_MAPPING[family]()) == ATTENDING[family]


def test_layers_that_differ_are_counted_each_by_its_own_heads() -> None:
    layers = [
        SimpleNamespace(num_hidden_layers=1, num_attention_heads=heads, head_dim=size)
        for heads, size in ((2, 16), (6, 8), (4, 32))
    ]
    whole: Any = SimpleNamespace(
        num_hidden_layers=3, is_heterogeneous=True, per_layer_config=layers
    )
    each = [flop_per_token_of(layer, parameters=0, length=TOKENS) for layer in layers]
    assert flop_per_token_of(whole, parameters=0, length=TOKENS) == pytest.approx(sum(each))


@pytest.mark.parametrize("are_rated", [False, True])
@pytest.mark.parametrize("measures_all", [False, True])
@pytest.mark.parametrize("frozen", [0, 300, 1000])
def test_where_every_product_is_in_fp8_their_share_is_all(
    frozen: int, measures_all: bool, are_rated: bool
) -> None:
    """Without attention, whatever is frozen and however often a token is computed."""
    sizes = {"parameters": 1000, "layers": 1, "heads": 1, "head_size": 1, "length": 0}
    passes = count_token_passes(are_rated=are_rated, measures_all=measures_all)
    flop = passes.trained * flop_per_token(**sizes, frozen=frozen) + passes.measured * 2 * 1000
    share = fp8_share_of(flop, trained=1000 - frozen, frozen=frozen, passes=passes)
    assert share == pytest.approx(1.0)
