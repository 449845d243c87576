"""The cases of fake_steps.py: models, layouts and ways to train, and the batches that they train on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from finetune.config.layout import Fp8
from finetune.config.methods import MULTI_LABEL, RANKING_LOSSES, SINGLE_LABEL, Method
from finetune.config.optimization import OPTIMIZERS
from finetune.config.schema import Data, Lora, Optimization, Quantization, Recipe
from finetune.constants import ROUND_TOKENS
from finetune.data.batches import MicroBatch
from finetune.distributed.world import World
from finetune.models.load import load_teacher
from finetune.models.log_probabilities import DivergenceOptions
from finetune.training.objectives.contrastive import ContrastiveObjective
from finetune.training.objectives.distill import Distillation, StoredTeacher
from finetune.training.objectives.early_exit import EarlyExit
from finetune.training.objectives.masked_diffusion import MaskedDiffusion
from finetune.training.objectives.objective import SFT, Objective
from finetune.training.objectives.preference import PreferenceObjective, RatingObjective
from finetune.training.objectives.scores import SCORING
from finetune.training.reference import Reference, StoredReference, without_adapters
from tests.models.families import FAMILIES

LENGTHS = (
    30,
    5,
    60,
    33,
)  # tokens of the documents of a micro-batch; a multiple of ROUND_TOKENS together
FUSED = Optimization(optim="adamw_torch_fused")

MakeObjective = Callable[[Recipe, World], Objective]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model in a layout, and the ways in which it takes a step."""

    name: str
    family: str = "llama"
    layout: str = "fsdp2"
    ranks: int = 2
    rank: int = 0  # that is there
    sharding: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    lora: Lora = field(default_factory=Lora)
    quantization: Quantization = field(default_factory=Quantization)
    method: Method = field(default_factory=Method)
    optimizations: Mapping[str, Optimization] = field(default_factory=lambda: {"step": FUSED})
    data: Data = field(default_factory=Data)
    layers: int = 1
    packing: bool = True
    accumulation: int = 1  # micro-batches in a step
    make_objective: MakeObjective = lambda recipe, world: SFT

    @property
    def parts(self) -> int:
        """The ranks that divide a row's tokens."""
        return int(self.sharding.get("sequence_parallel_size", 1))


def every_optimizer(on_device: bool) -> dict[str, Optimization]:
    """Each optimizer that works there; where the device itself may keep a loss that is not finite from the update, also with
    steps that are skipped instead."""
    return {
        f"{optim}, {on_nonfinite}": Optimization(optim=optim, on_nonfinite=on_nonfinite)  # type: ignore[arg-type]
        for optim, facts in OPTIMIZERS.items()
        if on_device or "fsdp_offload_params" not in facts.conflicts
        for on_nonfinite in (("stop", "skip") if on_device and facts.reads_found_inf else ("stop",))
    }


def stored_teacher() -> StoredTeacher:
    """One that has said the same of every token."""
    pieces = [(np.zeros((sum(LENGTHS), 4), np.int32), np.zeros((sum(LENGTHS), 5), np.float32))]
    starts = np.cumsum(LENGTHS) - LENGTHS
    places = np.stack([np.zeros(len(LENGTHS), np.int64), starts, LENGTHS], 1)
    return StoredTeacher(pieces, places, 64, DivergenceOptions(0.5, 1.0, 1.0))


def stored_reference() -> StoredReference:
    """The log-probabilities of the micro-batch's documents, computed before training."""
    return StoredReference(torch.zeros(len(LENGTHS), dtype=torch.float64))


def compare_pairs(make_reference: Callable[[World], Reference | None]) -> MakeObjective:
    """The objective of pairs, with this reference."""
    return lambda recipe, world: PreferenceObjective(
        recipe.method, make_reference(world), sequence_group=world.sequence_group
    )


def adapters_off(world: World) -> Reference:
    """The model without its adapters."""
    return partial(without_adapters, sequence_group=world.sequence_group)


def score(recipe: Recipe, world: World) -> Objective:
    """The objective of a head of scores."""
    return SCORING[recipe.method_facts.rows](recipe, world.sequence_group)


WITH_FLAG_AND_WITHOUT = {
    "skips": replace(FUSED, on_nonfinite="skip"),
    "stops": FUSED,
    "reads no flag": Optimization(optim="adamw_torch"),
}
UPDATED_IN_BACKWARD = {
    optim: Optimization(optim=optim, optim_in_backward=True, max_grad_norm=None)  # type: ignore[arg-type]
    for optim in ("adamw_torch_fused", "adamw_bf16_moments", "adamw_torch")
}
PEFT = Lora(use_peft=True, lora_r=4, lora_dropout=0.1)
NF4 = Quantization(load_in_4bit=True, bnb_4bit_use_double_quant=True)
DPO = Method(method="dpo", rpo_alpha=1.0)
DISTILL: dict[str, Any] = {
    "method": Method(method="distill", teacher_model_name_or_path="teacher", distill_alpha=0.5),
    "make_objective": lambda recipe, world: Distillation(load_teacher(recipe, world)),
}
IN_SEQUENCES = {"sequence_parallel_size": 2}
IN_TENSORS = {"tensor_parallel_size": 2, "shard_size": 2}
IN_STAGES = {"pipeline_parallel_size": 2}
BY_EXPERTS = {"expert_parallel_size": 2}
CASES = (
    Case(name="full", optimizations=WITH_FLAG_AND_WITHOUT),
    Case(name="every optimizer", optimizations=every_optimizer(on_device=True)),
    Case(
        name="offload",
        sharding={"cpu_offload": True},
        optimizations=every_optimizer(on_device=False),
    ),
    Case(name="two layers, accumulated", layers=2, accumulation=2),
    Case(name="one process", layout="single"),
    Case(name="ddp", layout="ddp", accumulation=2),
    Case(
        name="ddp, lora, checkpointed",
        layout="ddp",
        lora=PEFT,
        sharding={"activation_checkpointing": True},
    ),
    Case(
        name="hybrid",
        sharding={"strategy": "HYBRID_SHARD", "replicate_size": 2, "shard_size": 1},
        accumulation=2,
    ),
    Case(name="updated in backward", optimizations=UPDATED_IN_BACKWARD),
    Case(
        name="updated in backward, offload",
        sharding={"cpu_offload": True},
        optimizations=UPDATED_IN_BACKWARD,
    ),
    Case(name="fp16", sharding={"mixed_precision": "fp16"}),
    Case(name="fp8", sharding={"fp8": Fp8()}),
    Case(name="padded rows", packing=False),
    Case(
        name="checkpointed",
        sharding={"activation_checkpointing": True},
        model={"activation_checkpointing_keeps": "attention"},
    ),
    Case(name="lora", lora=PEFT),
    Case(name="lora, offload", lora=PEFT, sharding={"cpu_offload": True}, accumulation=2),
    Case(name="nf4", lora=PEFT, quantization=NF4),
    Case(
        name="nf4, checkpointed",
        lora=PEFT,
        quantization=NF4,
        sharding={"activation_checkpointing": True},
    ),
    Case(
        name="int8, one process",
        layout="single",
        lora=PEFT,
        quantization=Quantization(load_in_8bit=True),
    ),
    Case(
        name="neftune",
        optimizations={"step": replace(FUSED, neftune_noise_alpha=5.0, label_smoothing=0.1)},
    ),
    Case(
        name="sequence, dpo",
        sharding=IN_SEQUENCES,
        lora=PEFT,
        method=DPO,
        make_objective=compare_pairs(adapters_off),
    ),
    Case(name="sequence, more ranks than heads", sharding={"sequence_parallel_size": 8}, ranks=8),
    Case(name="tensor", family="qwen3", ranks=4, sharding=IN_TENSORS, accumulation=2),
    Case(name="tensor, lora", sharding=IN_TENSORS | {"shard_size": 1}, lora=PEFT),
    Case(
        name="tensor, offload", family="qwen3", ranks=4, sharding=IN_TENSORS | {"cpu_offload": True}
    ),
    Case(
        name="sequence, tensor, checkpointed",
        ranks=4,
        sharding=IN_SEQUENCES | {"tensor_parallel_size": 2, "activation_checkpointing": True},
    ),
    *(
        Case(
            name=f"pipeline, stage {rank}", sharding=IN_STAGES, rank=rank, layers=2, accumulation=3
        )
        for rank in (0, 1)
    ),
    *(
        Case(
            name=f"pipeline, lora, checkpointed, stage {rank}",
            family="mixtral",
            model={"router_aux_loss_coef": 0.01},
            sharding=IN_STAGES | {"activation_checkpointing": True},
            rank=rank,
            layers=2,
            accumulation=2,
            lora=PEFT,
        )
        for rank in (0, 1)
    ),
    Case(
        name="experts",
        family="mixtral",
        ranks=4,
        sharding=BY_EXPERTS,
        model={"router_aux_loss_coef": 0.01},
    ),
    Case(
        name="experts, lora, checkpointed",
        family="mixtral",
        sharding=BY_EXPERTS | {"activation_checkpointing": True},
        lora=replace(PEFT, lora_target_parameters=["mlp.experts.gate_up_proj"], lora_dropout=0.0),
    ),
    Case(
        name="experts, lora, ddp",
        family="gpt_oss",
        layout="ddp",
        lora=replace(PEFT, lora_target_parameters=["mlp.experts.down_proj"], lora_dropout=0.0),
    ),
    Case(name="dpo, adapters", lora=PEFT, method=DPO, make_objective=compare_pairs(adapters_off)),
    Case(name="dpo", method=DPO, make_objective=compare_pairs(lambda _: stored_reference())),
    Case(
        name="masked diffusion",
        method=Method(method="masked_diffusion"),
        make_objective=lambda recipe, world: MaskedDiffusion(3, 1e-3, 0),
    ),
    Case(
        name="early exits",
        method=Method(method="early_exit", exit_layers=":", layer_dropout=0.5),
        make_objective=lambda recipe, world: EarlyExit(recipe.method, 0, None),
    ),
    Case(name="orpo", method=Method(method="orpo"), make_objective=compare_pairs(lambda _: None)),
    Case(
        name="kto",
        method=Method(method="kto"),
        make_objective=lambda recipe, world: RatingObjective(recipe.method, stored_reference()),
    ),
    Case(
        name="reward",
        method=Method(method="reward", center_rewards_coefficient=0.01),
        make_objective=score,
    ),
    Case(name="reward, lora", lora=PEFT, method=Method(method="reward"), make_objective=score),
    Case(name="steps", method=Method(method="process_reward"), make_objective=score),
    *(
        Case(
            name=f"classes, {problem}",
            method=Method(method="classify", class_weights=(1.0, 0.5)),
            data=Data(labels=("a", "b"), problem_type=problem),  # type: ignore[arg-type]
            make_objective=score,
        )
        for problem in (SINGLE_LABEL, MULTI_LABEL)
    ),
    *(
        Case(
            name=f"ranked, {loss}",
            method=Method(method="rerank", loss_type=loss),
            data=Data(num_negatives=1),
            make_objective=score,
        )
        for loss in RANKING_LOSSES
    ),
    Case(
        name="embeddings",
        method=Method(method="embed", temperature=0.05, matryoshka_dims=(48, 16)),
        make_objective=lambda recipe, world: ContrastiveObjective.of(recipe, world.sequence_group),
    ),
    Case(name="distill", **DISTILL),
    Case(
        name="distill, asked before",
        method=Method(method="distill", teacher_model_name_or_path="teacher", distill_top_k=4),
        make_objective=lambda recipe, world: Distillation(stored_teacher()),
    ),
    Case(name="distill, lora, sequence", lora=PEFT, sharding=IN_SEQUENCES, **DISTILL),
    *(Case(name=family, family=family) for family in ("gemma2", "mixtral", "gpt_oss")),
    Case(
        name="capped scores, sequence, tensor",
        family="gemma2",
        ranks=4,
        sharding=IN_SEQUENCES | {"tensor_parallel_size": 2, "activation_checkpointing": True},
    ),
    Case(name="wide heads", config={"head_dim": 320}),
    # What no kernel takes all documents of: the host knows how long each is.
    Case(name="capped scores, dropout", family="gemma2", model={"attention_dropout": 0.1}),
)


def config_of(case: Case) -> dict[str, Any]:
    """A small model, whose heads have a size that 8 does not divide where the family allows it."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": case.layers,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {"model_type": case.family, **sizes, **heads, **FAMILIES[case.family], **case.config}


def make_micro_batch(packing: bool, parts: int = 1) -> MicroBatch:
    """A micro-batch of LENGTHS on the host, as `collate` makes them for the first of `parts` ranks of a sequence."""
    lengths = torch.tensor(LENGTHS)
    ends = lengths.cumsum(0)
    if packing:
        shape, positions = (1, sum(LENGTHS) // parts), torch.cat([torch.arange(n) for n in LENGTHS])
    else:
        shape, positions = (
            (len(LENGTHS), max(LENGTHS)),
            torch.arange(max(LENGTHS)).repeat(len(LENGTHS)),
        )
    trained = torch.arange(ROUND_TOKENS)
    documents = torch.arange(ROUND_TOKENS) % len(LENGTHS)
    batch = MicroBatch(
        input_ids=torch.ones(shape, dtype=torch.int64),
        labels=torch.ones(shape, dtype=torch.int64),
        position_ids=positions[: shape[0] * shape[1]].view(shape),
        trained_positions=trained,
        cu_seq_lens=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32) if packing else None,
        max_document_length=max(LENGTHS),
        example_ids=tuple(range(len(LENGTHS))),
        document_lengths=LENGTHS,
        packed_lengths=LENGTHS if packing else None,
        token_mask=torch.ones(shape, dtype=torch.bool),
        trained_documents=documents,
        desirable=torch.arange(len(LENGTHS)) % 2 == 0,
    )
    return replace(batch, mismatched=batch)
