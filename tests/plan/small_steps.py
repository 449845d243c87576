"""A training step of a small model on a CPU: what torch allocates for it, and what the plan says."""

from dataclasses import replace
from typing import Any

import torch

from finetune.config.layout import Sharding
from finetune.config.schema import Lora, Optimization
from finetune.models.cross_entropy import install_loss
from finetune.models.decoder_layers import checkpoint_activations
from finetune.models.documents import install_attention
from finetune.models.experts import set_experts_implementation
from finetune.models.fused_lora import fuse_adapters
from finetune.models.gating import install_gating
from finetune.models.lora import add_adapters
from finetune.models.loss_chunks import TokenWeights
from finetune.plan.peaks import plan_phases
from tests.plan.run_specs import make_spec
from tests.plan.traced import allocated_peak

SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}


def planned_share(
    config: dict[str, Any],
    *,
    lora: Lora | None = None,
    autocast: bool = False,
    recomputes: bool = False,
    tokens: int = 256,
    attention: Any = "auto",
    documents: int = 1,
    rows: int = 1,
    evaluates: bool = False,
    dtype: Any = "float32",
    token_loss: Any = "cross_entropy",
) -> float:
    """The planned bytes of a forward and backward of one row, over those that torch allocates.

    `rows`: how many full rows are packed into the one.
    `evaluates`: of a forward without gradients instead.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    set_experts_implementation(model, "eager")  # which a run chooses on a CPU
    install_attention(model, attention)
    weights = None if token_loss == "cross_entropy" else TokenWeights(token_loss)
    install_loss(model, token_weights=weights)
    install_gating(model)
    if lora is not None:
        add_adapters(model, lora, torch.bfloat16 if autocast else torch.float32)
        fuse_adapters(model)
    if recomputes:
        checkpoint_activations(model, 1, "nothing")
    model.train(not evaluates)
    ids = torch.randint(3, 500, (1, tokens))
    length = tokens // documents
    row = {
        "position_ids": torch.arange(tokens)[None] % length,
        "cu_seq_lens": torch.arange(0, tokens + 1, length, dtype=torch.int32),
        "max_document_length": length,
        "packed_lengths": (length,) * documents,
    }

    def run() -> None:
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            torch.set_grad_enabled(not evaluates),
        ):
            loss = model(input_ids=ids, labels=ids, **row)
        if not evaluates:
            loss.backward()
            model.zero_grad()

    run()  # what is allocated once, such as the rotary embedding
    sharding = Sharding(
        layout="single",
        mixed_precision="bf16" if autocast else "no",
        activation_checkpointing=recomputes,
    )
    spec = make_spec(config, ranks=1, sharding=sharding, max_length=tokens // rows, rows=rows)
    recipe = replace(
        spec.recipe,
        model=replace(spec.recipe.model, attn_implementation=attention, dtype=dtype),
        lora=lora or Lora(),
        optimization=Optimization(optim="sgd", token_loss=token_loss),
    )
    phases = plan_phases(replace(spec, recipe=recipe, device="cpu"))
    name = "evaluation" if evaluates else "steady step"
    peak = next(phase.peak for phase in phases if phase.name == name)
    return (peak.allocated - peak.parameters) / allocated_peak(run)
