"""A plain single-process fp32 training loop: transformers' own model and logits, one document at a time.

It shares nothing with the project but the order of the data and the adapters' start.
"""

import copy
import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedModel,
)

from finetune.config.reader import read_recipe
from finetune.config.schema import Quantization, Recipe
from finetune.data.prepare import prepare_data
from finetune.data.tokenizer import load_tokenizer
from finetune.models.lora import with_adapters
from tests.training.papers import kto, paper


class Alone:
    """A world of one, for the data room."""

    rank, size, local_rank, local_size, sequence_rank, sequence_size = 0, 1, 0, 1, 0, 1
    device = torch.device("cpu")


def train(
    recipe_path: Path,
    prepare: Callable[[Any], None] = lambda model: None,
    make_optimizer: "Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None" = None,
    label_smoothing: float = 0.0,
    other: Any = None,
    loss_of: "Callable[[Documents], torch.Tensor] | None" = None,
    inputs_of: "Callable[[str], dict[str, Any]] | None" = None,
    dtype: torch.dtype = torch.float32,
    attention: str = "eager",
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step. `prepare` may change what is trained; `loss_of`: the loss of a step, of its documents
    with the logits of `other`; `inputs_of`: the model's arguments for the row at a place, whose ids must be those of the data;
    `dtype`: fp64 instead, in which torch has no grouped products of experts."""
    recipe = read_recipe(str(recipe_path))
    data = prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), Alone())
    model: Any = _auto_class(recipe).from_pretrained(
        recipe.model.model_name_or_path,
        dtype=torch.float32,
        attn_implementation=attention,
        quantization_config=by_bitsandbytes(recipe.quantization),
        **({} if dtype == torch.float32 else {"experts_implementation": "eager"}),
    )
    if dtype != torch.float32:  # a model of bitsandbytes cannot be cast
        model = model.to(dtype)
    quantize_experts(model, recipe.quantization)
    adapter = recipe.lora.adapter_name_or_path
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    before = other if recipe.method_facts.rows == "answers" else copy.deepcopy(model)
    ratings = data.train.examples.find_group_ratings()
    model.train()  # there is no dropout; bitsandbytes rounds the inputs of 8-bit layers too outside of training
    if recipe.lora.use_peft and adapter is None:
        model = _with_adapters(model, recipe)
    prepare(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    if make_optimizer is None:
        optimizer: Any = torch.optim.AdamW(
            trained, lr=0.0, weight_decay=0.0, eps=recipe.optimization.adam_epsilon
        )
    else:
        optimizer = make_optimizer(trained)
    steps, results, coefficient = data.train.steps, [], recipe.model.router_aux_loss_coef
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _cosine(
                step, steps, recipe.optimization.learning_rate, recipe.optimization.warmup_ratio
            )
        documents, router_logits = [], []
        for ids in data.train.rows_of(step):
            for place, index in enumerate(ids):
                example = data.train.examples[index]
                input_ids = torch.from_numpy(example.input_ids.astype("int64"))[None]
                labels = torch.from_numpy(example.labels.astype("int64"))
                asked = {"output_router_logits": True} if coefficient else {}
                if inputs_of is not None:
                    asked |= inputs_of(data.train.examples.where(int(index)))
                    assert torch.equal(asked.pop("input_ids"), input_ids)
                output = model(input_ids=input_ids, use_cache=False, **asked)
                with torch.no_grad():
                    unchanged = (
                        None if before is None else before(input_ids=input_ids, **asked).logits[0]
                    )
                documents.append((output.logits[0], labels, unchanged))
                is_mismatched = recipe.method.method == "kto" and place % 2
                if coefficient and not is_mismatched:
                    router_logits.append(output.router_logits)
        is_good = [bool(ratings[i // 2] > 0) for ids in data.train.rows_of(step) for i in ids[::2]]
        if loss_of is not None:
            loss = loss_of(documents)
        else:
            compare = before is not None
            loss = (
                _compare(documents, recipe, is_good)
                if compare
                else _cross_entropy(documents, label_smoothing)
            )
        (loss + coefficient * _auxiliary(model, router_logits) if coefficient else loss).backward()
        # In fp64: torch's own fp32 norm of 400,000 gradients on a CPU is 1e-5 too small.
        norm = torch.nn.utils.get_total_norm(
            [p.grad.double() for p in trained if p.grad is not None]
        )
        torch.nn.utils.clip_grads_with_norm_(
            trained, recipe.optimization.max_grad_norm or math.inf, norm
        )
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results


def assert_as_near(
    lines: Sequence[dict[str, Any]], recipe: Path, rel: float = 1e-5, **keys: Any
) -> None:
    """That a run logged the losses of a plain loop up to `rel`, and its gradient norms so, or up to `rel` no farther from those of
    fp64 than plain loops in fp32 are, with attention in two forms: rounding is much in the gradients of some routers."""
    plain = train(recipe, **keys)
    assert [line["loss"] for line in lines] == pytest.approx([loss for loss, _ in plain], rel=rel)
    norms = [line["grad_norm"] for line in lines]
    if norms == pytest.approx([norm for _, norm in plain], rel=rel):
        return
    loops = [plain, train(recipe, attention="sdpa", **keys)]
    exact = train(recipe, dtype=torch.float64, **keys)
    for step, (_, true) in enumerate(exact):
        rounding = max(abs(loop[step][1] - true) for loop in loops)
        assert abs(norms[step] - true) <= rounding + rel * true, (step, norms, loops, exact)


losses = functools.cache(train)
"""As `train`, computed once for all tests that ask."""


def _auto_class(recipe: Recipe) -> Any:
    """That of the class which config.json names."""
    config = AutoConfig.from_pretrained(recipe.model.model_name_or_path)
    is_whole = (config.architectures or [""])[0].endswith("ForConditionalGeneration")
    return AutoModelForImageTextToText if is_whole else AutoModelForCausalLM


Documents = list[
    tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
]  # (logits, labels, logits of `other`, or before training)


def _cross_entropy(documents: Documents, label_smoothing: float) -> torch.Tensor:
    losses = [
        F.cross_entropy(
            logits, labels, ignore_index=-100, reduction="sum", label_smoothing=label_smoothing
        )
        for logits, labels, _ in documents
    ]
    return torch.stack(losses).sum() / sum(
        int((labels != -100).sum()) for _, labels, _ in documents
    )


def _compare(documents: Documents, recipe: Recipe, is_good: list[bool]) -> torch.Tensor:
    def log_probability(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return -F.cross_entropy(logits.double(), labels, ignore_index=-100, reduction="sum")

    policy = [log_probability(logits, labels) for logits, labels, _ in documents]
    before = [
        log_probability(logits, labels).item()
        for _, labels, logits in documents
        if logits is not None
    ]
    if recipe.method.method == "kto":
        return kto(recipe.method, policy, before, is_good)
    tokens = [int((labels != -100).sum()) for _, labels, _ in documents]
    return paper(recipe.method, policy, before, tokens, recipe.optimization.label_smoothing)


def _auxiliary(model: Any, router_logits: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """transformers' own auxiliary loss of all tokens of a step, given the router logits of each document by layer."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    function = sys.modules[type(plain).__module__].load_balancing_loss_func
    by_layer = tuple(torch.cat(layer) for layer in zip(*router_logits, strict=True))
    found: torch.Tensor = function(
        by_layer, by_layer[0].shape[-1], model.config.num_experts_per_tok
    )
    return found


def _cosine(step: int, steps: int, peak: float, warmup_ratio: float) -> float:
    warmup = math.ceil(warmup_ratio * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def by_bitsandbytes(quantization: Quantization) -> BitsAndBytesConfig | None:
    if quantization.bits is None:
        return None
    _multiply_dequantized()
    return BitsAndBytesConfig(
        load_in_4bit=quantization.load_in_4bit,
        load_in_8bit=quantization.load_in_8bit,
        bnb_4bit_quant_type=quantization.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=quantization.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=torch.float32,
    )


def _multiply_dequantized() -> None:
    """Makes bitsandbytes multiply by weights that it dequantizes as one row: its kernel for CPUs with AVX-512 (0.50.2) mixes up
    blocks where a row is shorter than one."""
    import bitsandbytes

    def multiply(inputs: Any, weight: Any, quant_state: Any, bias: Any = None) -> Any:
        as_one_row = copy.copy(quant_state)
        as_one_row.shape = torch.Size([1, quant_state.shape.numel()])
        dense = bitsandbytes.functional.dequantize_4bit(weight, as_one_row)
        return F.linear(inputs, dense.view(quant_state.shape).to(inputs.dtype), bias)

    bitsandbytes.matmul_4bit = multiply


def quantize_experts(model: PreTrainedModel, quantization: Quantization) -> None:
    """Rounds the experts, which transformers leaves as they are, to 4 bits and back by bitsandbytes' own functions. (With the
    library's own parametrization of parameters, peft 0.21.2 adds an adapter again in every forward.)"""
    if not quantization.load_in_4bit:
        return
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    nests, quant_type = quantization.bnb_4bit_use_double_quant, quantization.bnb_4bit_quant_type
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.dim() == 3:
            packed, state = quantize_4bit(parameter.data, None, None, 64, nests, quant_type)
            parameter.data.copy_(dequantize_4bit(packed, state))


def _with_adapters(model: PreTrainedModel, recipe: Recipe) -> Any:
    from peft import LoraConfig, OFTConfig, get_peft_model

    lora = recipe.lora
    if lora.oft_block_size is not None:  # which begins as no rotation
        targets = lora.lora_target_modules
        rotating = OFTConfig(
            oft_block_size=lora.oft_block_size,
            target_modules=targets if targets == "all-linear" else list(targets),
            modules_to_save=list(lora.modules_to_save) or None,
        )
        return get_peft_model(model, rotating)
    wrapped = get_peft_model(
        model,
        LoraConfig(
            r=lora.lora_r,
            lora_alpha=lora.lora_alpha,
            target_modules="all-linear"
            if lora.lora_target_modules == "all-linear"
            else list(lora.lora_target_modules),
            target_parameters=list(lora.lora_target_parameters) or None,
            use_dora=lora.use_dora,
            use_rslora=lora.use_rslora,
            rank_pattern=lora.rank_pattern or {},
            alpha_pattern=lora.alpha_pattern or {},
            modules_to_save=list(lora.modules_to_save) or None,
        ),
    )
    named = {name.removeprefix("base_model.model."): p for name, p in wrapped.named_parameters()}
    shapes = {name: p.shape for name, p in named.items()}
    shapes = {name: shape for name, shape in shapes.items() if ".lora_" in name}
    start = with_adapters(
        lambda name, slices: named[name].detach()[slices], shapes, recipe.run.seed
    )
    with torch.no_grad():
        for name, parameter in named.items():
            # The length of a quantized row is peft's own: it dequantizes the weight.
            is_peft_own = recipe.quantization.bits is not None and ".lora_magnitude_vector." in name
            if name in shapes and not is_peft_own:
                parameter.copy_(start(name, tuple(slice(0, size) for size in parameter.shape)))
    return wrapped
