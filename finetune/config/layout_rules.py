"""The rules of a layout: what DDP, FSDP, parallelism and precision allow. Imports no torch."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Literal

from finetune.config.layout import describe_sizes
from finetune.config.model_rules import is_uneven_vocabulary, set_to_divisor, trains_experts
from finetune.config.optimization import DEFAULT_OPTIMIZER, OPTIMIZERS
from finetune.config.quantization import LOAD_KEYS
from finetune.config.recipe_rules import QAT, has_qat
from finetune.config.rule import (
    BF16,
    Case,
    Rule,
    has_ep,
    has_fp8,
    has_pp,
    has_sp,
    has_tp,
    is_fsdp1,
    is_quantized,
    is_set,
    layout_rule,
)
from finetune.config.yaml_file import COMMAND_LINE, LOAD_RECIPE
from finetune.units import counted

DEEPSPEED_NAMES = {  # a recipe's key -> DeepSpeed's name for it, where that is another
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "global_batch_size": "train_batch_size",
    "max_grad_norm": "gradient_clipping",
    "learning_rate": "lr",
    "adam_epsilon": "eps",
}


# What an optimizer may not work with (`OptimizerFacts.conflicts`): the keys that it is about, and
# when it is so.
OPTIMIZER_CONFLICTS: Mapping[
    str, tuple[tuple[str, ...], tuple[Literal["layout", "model"], ...], Callable[[Case], object]]
] = {
    "FSDP1": (("fsdp_version",), ("layout",), is_fsdp1),
    "CPU offload": (("fsdp_offload_params",), ("layout",), lambda c: c.layout.cpu_offload),
    "tp_size": (("tp_size",), ("layout",), has_tp),
    "expert_parallel_size": (("expert_parallel_size",), ("layout",), has_ep),
    "optim_offload: nvme": (("optim_offload",), (), is_set("optim_offload", "nvme")),
    "optim_in_backward": (("optim_in_backward",), (), is_set("optim_in_backward", True)),
    "trained experts": (("model_name_or_path",), ("model",), trains_experts),
    "an uneven vocabulary": (("tp_size",), ("layout", "model"), is_uneven_vocabulary),
}


def _optimizer_rule(feature: str) -> Rule:
    keys, needs, is_so = OPTIMIZER_CONFLICTS[feature]

    def conflicts(case: Case) -> bool:
        return feature in OPTIMIZERS[case["optim"]].conflicts and bool(is_so(case))

    def advise(case: Case) -> str:
        here = set()
        for other, (_, need, is_here) in OPTIMIZER_CONFLICTS.items():
            if set(need) <= {*needs} and is_here(case):
                here.add(other)
        fit = [name for name, facts in OPTIMIZERS.items() if not here.intersection(facts.conflicts)]
        return f"set optim to one of {', '.join(fit)}"

    return Rule(
        name=f"optim with {feature}",
        keys=("optim", *keys),
        needs=needs,
        when=conflicts,
        message=lambda c: (
            f"optim: {c['optim']} cannot be combined with {feature}: "
            f"{OPTIMIZERS[c['optim']].conflicts[feature]}"
        ),
        advice=advise,
        fix={"optim": DEFAULT_OPTIMIZER},
    )


def _exclude(
    feature: str,
    is_on: Callable[[Case], object],
    key: str,
    when: Callable[[Case], object],
    what: str | Callable[[Case], str],
    why: str = "",
    *,
    advice: str = "",
    fix: Mapping[str, Any] | None = None,
) -> Rule:
    """A rule: `what` (of `key`) cannot be combined with `feature`, a key of recipe or layout."""
    shown = what if callable(what) else lambda _: what
    end = f": {why}" if why else ""
    is_in_file = not feature.endswith("_parallel_size")
    return layout_rule(
        f"{key} with {feature}",
        key,
        feature,
        when=lambda c: is_on(c) and when(c),
        message=lambda c: (
            f"{shown(c)} cannot be combined with "
            f"{feature}{f' ({c.layout.source})' if is_in_file else ''}{end}"
        ),
        advice=advice or f"remove {key}",
        fix=fix,
    )


def has_teacher(case: Case) -> bool:
    return case.recipe.method_facts.needs_teacher or case.recipe.teacher is not None


def freezes(case: Case) -> bool:
    """Whether some parameters of the model are not trained."""
    model = case.recipe.model
    return case["use_peft"] or bool(model.frozen_modules or model.trainable_modules)


def _count_mesh(case: Case) -> int:
    return prod((case.layout.mesh_sizes or {}).values()) * case.layout.pipeline_parallel_size


def _describe_stages(case: Case) -> str:
    if has_pp(case):
        return f" x pipeline_parallel_size {case.layout.pipeline_parallel_size}"
    return ""


def _count_micro_batches(case: Case) -> int:
    ranks = case.ranks // case.layout.ranks_per_batch
    return -(
        -case.global_batch_size // (case.recipe.batch.per_device_train_batch_size * max(1, ranks))
    )


def _find_unequal_numbers(case: Case) -> list[str]:
    """Lists the numbers of a DeepSpeed file that differ from the recipe's."""
    recipe = case.recipe
    ranks = case.ranks // case.layout.ranks_per_batch
    optimization = case.recipe.optimization
    ours: dict[str, float | None] = {
        "gradient_accumulation_steps": _count_micro_batches(case),
        "per_device_train_batch_size": recipe.batch.per_device_train_batch_size,
        "global_batch_size": case.global_batch_size,
        "max_grad_norm": optimization.max_grad_norm,
        "learning_rate": optimization.learning_rate,
        "weight_decay": optimization.weight_decay,
        "adam_epsilon": optimization.adam_epsilon,
    }
    problems = []
    for key, value in case.layout.asked:
        if ours[key] != value:
            place = recipe.place_of(key)
            by = place if place in (COMMAND_LINE, LOAD_RECIPE) else "recipe"
            if "batch" in key or "steps" in key:
                on = f" on {ranks} ranks"
            else:
                on = ""
            number = "null" if ours[key] is None else format(ours[key], "g")
            name = DEEPSPEED_NAMES.get(key, key)
            problems.append(
                f"{name}: {value:g}, but {key} is {number} by the {by}{on}; set one to the other, "
                f"or {name} to auto"
            )
    return problems


def _checkpointed_only(key: str, what: str, *, is_note: bool = False) -> Rule:
    return layout_rule(
        f"{key} without checkpointing",
        key,
        "fsdp_activation_checkpointing",
        when=lambda c: is_set(key)(c) and not c.layout.activation_checkpointing,
        message=lambda c: f"{key}: {what}, but {c.layout.source} checkpoints no layer",
        advice="set fsdp_activation_checkpointing: true there, or remove the key",
        is_note=is_note,
    )


def _describe_ep_ranks(case: Case) -> str:
    size = case.layout.expert_parallel_size
    replicas = case.layout.replicate_size or 1
    shards = case.shards
    if replicas == 1:
        run = "the run"
    else:
        run = f"each of the {replicas} replicas of {case.layout.source}"
    return (
        f"expert_parallel_size: {size}: {run} has {counted(shards, 'rank')}, and {shards} / {size} "
        "is not a whole number"
    )


IN_BACKWARD = is_set("optim_in_backward", True)
ON_NVME = is_set("optim_offload", "nvme")
NO_PIPELINE = {"pipeline_parallel_size": 1}


# Whether the layout is possible at all.
POSSIBLE: tuple[Rule, ...] = (
    layout_rule(
        "one process",
        "distributed_type",
        when=lambda c: c.layout.layout == "single" and c.ranks > 1,
        message="this layout is for one process, but {ranks} were launched",
        advice="launch one, or use ddp or an fsdp config",
    ),
    layout_rule(
        "hybrid sharding of one rank",
        "sharding_strategy",
        "dp_replicate_size",
        when=lambda c: c.layout.strategy == "HYBRID_SHARD" and c.ranks == 1,
        message="hybrid sharding needs at least 2 ranks, but 1 was launched",
        advice="use fsdp_full_shard",
    ),
    layout_rule(
        "sizes of the mesh",
        "parallelism_config",
        when=lambda c: c.layout.mesh_sizes is not None and _count_mesh(c) != c.ranks,
        message=lambda c: (
            f"{describe_sizes(c.layout.mesh_sizes or {})}{_describe_stages(c)} = {_count_mesh(c)}, "
            f"but {c.ranks} {'rank was' if c.ranks == 1 else 'ranks were'} launched"
        ),
        advice=lambda c: f"set the sizes so that their product is {c.ranks}",
    ),
    layout_rule(
        "machines without a rank",
        "num_machines",
        when=lambda c: c.ranks < c.layout.num_machines,
        message=(
            "num_machines: {layout.num_machines}, but --num-processes {ranks}: each machine runs "
            "at least one"
        ),
        advice="set num_machines: 1, or ask for more processes",
    ),
    layout_rule(
        "numbers of a DeepSpeed file",
        "deepspeed_config",
        when=_find_unequal_numbers,
        message=_find_unequal_numbers,
    ),
    layout_rule(
        "frozen parameters without shards",
        "fsdp_sharding_strategy",
        when=lambda c: (
            is_fsdp1(c) and (c.layout.strategy == "NO_SHARD" or c.ranks == 1) and freezes(c)
        ),
        message=(
            "FSDP1 without shards (NO_SHARD, or one rank) cannot hold frozen parameters (LoRA's "
            "base, frozen_modules)"
        ),
        advice=lambda c: (
            f"use {'ddp' if c.ranks > 1 else 'accelerate_config: single'}, which is the same "
            "layout, or set fsdp_version: 2"
        ),
    ),
)


RULES: tuple[Rule, ...] = (
    # FSDP1
    _exclude(
        "fsdp_version: 1",
        is_fsdp1,
        "method",
        has_teacher,
        lambda c: f"method: {c['method']}",
        "FSDP1 gathers no single unit, as the teacher's head needs it",
        advice="set fsdp_version: 2, or use ddp",
    ),
    Rule(
        name="a quantized base under FSDP1",
        keys=(*LOAD_KEYS, "fsdp_version"),
        needs=("layout",),
        of_teacher=True,
        when=lambda c: is_fsdp1(c) and is_quantized(c),
        message=(
            "{load_key} cannot be combined with fsdp_version: 1 ({layout.source}): FSDP1 "
            "flattens and converts the parameters of a layer together, which corrupts quantized "
            "ones"
        ),
        advice="set fsdp_version: 2",
    ),
    _exclude(
        "fsdp_version: 1",
        is_fsdp1,
        "lora_target_parameters",
        is_set("lora_target_parameters"),
        "lora_target_parameters",
        (
            "FSDP1 flattens the parameters of a layer together, so that none of them can have an "
            "adapter of its own"
        ),
        advice="set fsdp_version: 2",
    ),
    # Tensor parallelism
    _exclude(
        "tp_size",
        has_tp,
        "mixed_precision",
        lambda c: c.precision in ("fp16", "fp8"),
        lambda c: f"mixed_precision: {c.precision}",
        advice="set it to bf16, or tp_size: 1",
        fix=BF16,
    ),
    _exclude(
        "tp_size",
        has_tp,
        "fsdp_auto_wrap_policy",
        lambda c: c.layout.wrapping != "TRANSFORMER_BASED_WRAP",
        lambda c: f"fsdp_auto_wrap_policy: {c.layout.wrapping}",
        advice="set TRANSFORMER_BASED_WRAP, or tp_size: 1",
    ),
    _exclude(
        "tp_size",
        has_tp,
        "attn_implementation",
        is_set("attn_implementation"),
        lambda c: f"attn_implementation: {c['attn_implementation']}",
        fix={"attn_implementation": "auto"},
    ),
    _exclude(
        "tp_size",
        has_tp,
        "activation_checkpointing_keeps",
        is_set("activation_checkpointing_keeps", "attention_and_projections"),
        "activation_checkpointing_keeps: attention_and_projections",
        "it finds its products by their sizes, and each rank has a shard",
        advice="set it to attention",
        fix={"activation_checkpointing_keeps": "attention"},
    ),
    _exclude(
        "tp_size",
        has_tp,
        "token_loss",
        is_set("token_loss", "eaft"),
        "token_loss: eaft",
        why="no rank has all scores of a token",
        advice="set tp_size: 1, or token_loss: dft",
    ),
    _exclude(
        "tp_size",
        has_tp,
        "neftune_noise_alpha",
        is_set("neftune_noise_alpha"),
        "neftune_noise_alpha",
        fix={"neftune_noise_alpha": None},
    ),
    _exclude(
        "tp_size",
        has_tp,
        LOAD_KEYS[0],
        is_quantized,
        lambda c: c.load_key,
        "torch divides a layer by its weight, and a quantized layer has codes and scales instead",
        advice="name an unquantized model without the key, or set tp_size: 1",
    ),
    _exclude(
        "tp_size",
        has_tp,
        "method",
        has_teacher,
        lambda c: f"method: {c['method']}",
        advice="set tp_size: 1",
    ),
    *(
        _exclude(
            "tp_size",
            has_tp,
            key,
            is_set(key, True),
            f"{key}: true",
            why,
            advice=f"set {key}: false, or tp_size: 1",
            fix={key: False},
        )
        for key, why in (
            (
                "use_dora",
                (
                    "peft adds DoRA's magnitudes, which are whole on each rank, to products that "
                    "are divided"
                ),
            ),
            ("torch_compile", "inductor does not end in a layer of divided matrices (torch 2.13)"),
            ("use_liger_kernel", "its kernels do not take divided matrices"),
            ("activation_offload", "what a layer keeps of divided products is not copied"),
            (
                "optim_in_backward",
                "a gradient's norm is of a mesh of its own, known after the backward",
            ),
        )
    ),
    _exclude(
        "tp_size",
        has_tp,
        QAT,
        has_qat,
        lambda c: f"{QAT}: {c[QAT]}",
        "a scale is that of a part of a row that one rank holds",
        advice="set tp_size: 1",
        fix={"tp_size": 1},
    ),
    # Sequence parallelism
    _exclude(
        "cp_size",
        has_sp,
        "mixed_precision",
        has_fp8,
        "mixed_precision: fp8",
        advice="set it to bf16",
        fix=BF16,
    ),
    _exclude(
        "cp_size",
        has_sp,
        "attn_implementation",
        is_set("attn_implementation"),
        lambda c: f"attn_implementation: {c['attn_implementation']}",
        "only the packed attention that is built in works where ranks share a row",
        fix={"attn_implementation": "auto"},
    ),
    *(
        _exclude("cp_size", has_sp, key, is_set(key, True), f"{key}: true", fix={key: False})
        for key in ("activation_offload", "optim_in_backward")
    ),
    # Expert parallelism
    layout_rule(
        "expert parallelism without FSDP2",
        "expert_parallel_size",
        "fsdp_version",
        when=lambda c: has_ep(c) and c.layout.layout != "fsdp2",
        message=(
            "expert_parallel_size: {layout.expert_parallel_size} requires FSDP2, and "
            "{layout.source} is another layout"
        ),
        advice="use fsdp_full_shard, or set expert_parallel_size: 1",
        fix={"expert_parallel_size": 1},
    ),
    layout_rule(
        "ranks of expert parallelism",
        "expert_parallel_size",
        when=lambda c: (
            has_ep(c) and c.layout.layout == "fsdp2" and c.shards % c.layout.expert_parallel_size
        ),
        message=_describe_ep_ranks,
        advice=lambda c: set_to_divisor(
            "expert_parallel_size", c.shards, " (it must divide the experts of a layer too)"
        ),
        fix={"expert_parallel_size": 1},
    ),
    layout_rule(
        "expert parallelism within groups",
        "expert_parallel_size",
        "tp_size",
        when=lambda c: has_ep(c) and has_tp(c),
        message=(
            "expert_parallel_size cannot be combined with tp_size ({layout.source}): ranks that "
            "divide a layer's matrices have the same tokens, and would send each expert all of "
            "them"
        ),
        advice="set expert_parallel_size: 1, or the Accelerate file's tp_size to 1",
        fix={"expert_parallel_size": 1},
    ),
    _exclude(
        "expert_parallel_size",
        has_ep,
        "mixed_precision",
        lambda c: c.precision in ("fp16", "fp8"),
        lambda c: f"mixed_precision: {c.precision}",
        advice="set it to bf16",
        fix=BF16,
    ),
    *(
        _exclude(
            "expert_parallel_size", has_ep, key, is_set(key, True), f"{key}: true", fix={key: False}
        )
        for key in ("activation_offload", "optim_in_backward")
    ),
    _exclude(
        "expert_parallel_size",
        has_ep,
        "torch_compile",
        is_set("torch_compile", True),
        "torch_compile: true",
        "within a layer the host reads how many tokens come from each rank",
        fix={"torch_compile": False},
    ),
    # Pipeline parallelism
    layout_rule(
        "pipeline parallelism without FSDP2",
        "pipeline_parallel_size",
        "fsdp_version",
        when=lambda c: has_pp(c) and c.layout.layout != "fsdp2",
        message=(
            "pipeline_parallel_size: {layout.pipeline_parallel_size} requires FSDP2, and "
            "{layout.source} is another layout"
        ),
        advice="use fsdp_full_shard, or set pipeline_parallel_size: 1",
        fix=NO_PIPELINE,
    ),
    layout_rule(
        "ranks of a pipeline",
        "pipeline_parallel_size",
        when=lambda c: has_pp(c) and c.ranks % c.layout.smallest_world,
        message=lambda c: (
            f"pipeline_parallel_size: {c.layout.pipeline_parallel_size}: the run has "
            f"{counted(c.ranks, 'rank')}, and this layout needs a multiple of "
            f"{c.layout.smallest_world}"
        ),
        advice="choose another size or number of ranks",
        fix=NO_PIPELINE,
    ),
    layout_rule(
        "schedule without a pipeline",
        "pipeline_schedule",
        when=lambda c: is_set("pipeline_schedule")(c) and not has_pp(c),
        is_note=True,
        message="pipeline_schedule has no effect: pipeline_parallel_size is 1",
        advice="remove it",
    ),
    *(
        _exclude("pipeline_parallel_size", has_pp, key, when, what, why, advice=advice, fix=fix)
        for key, when, what, why, advice, fix in (
            (
                "mixed_precision",
                lambda c: c.precision in ("fp16", "fp8"),
                lambda c: f"mixed_precision: {c.precision}",
                "",
                "set it to bf16",
                BF16,
            ),
            (
                "method",
                has_teacher,
                lambda c: f"method: {c['method']}",
                "a teacher's layers are not in the pipeline",
                "set pipeline_parallel_size: 1",
                NO_PIPELINE,
            ),
            (
                "streaming",
                lambda c: c["streaming"] and c.recipe.method_facts.needs_reference,
                "streaming: true",
                "the reference of all rows is computed first",
                "remove streaming",
                {"streaming": False},
            ),
            (
                "optim_offload",
                is_set("optim_offload", "nvme"),
                "optim_offload: nvme",
                "",
                "remove optim_offload",
                {"optim_offload": "none"},
            ),
            (
                "optim_in_backward",
                is_set("optim_in_backward", True),
                "optim_in_backward: true",
                "a step has several micro-batches",
                "",
                {"optim_in_backward": False},
            ),
            (
                "modules_to_save",
                is_set("modules_to_save"),
                "modules_to_save",
                "no rank has both ends of the model",
                "",
                {"modules_to_save": ()},
            ),
            (
                "added_tokens",
                lambda c: c["use_peft"] and c["added_tokens"],
                "added_tokens with use_peft",
                "no rank has both ends of the model",
                "set pipeline_parallel_size: 1",
                NO_PIPELINE,
            ),
        )
    ),
    # FP8
    Rule(
        name="a quantized base in FP8",
        keys=(*LOAD_KEYS, "mixed_precision"),
        needs=("layout",),
        of_teacher=True,
        when=lambda c: has_fp8(c) and is_quantized(c),
        message=(
            "{load_key} cannot be combined with mixed_precision: fp8 ({layout.source}): a "
            "base in {quantization.bits} bits is multiplied in bf16 only"
        ),
        advice=lambda c: (
            f"set mixed_precision: bf16, or remove {c.load_key} and name an unquantized model"
        ),
        fix=BF16,
    ),
    _exclude(
        "mixed_precision: fp8",
        has_fp8,
        "use_dora",
        is_set("use_dora"),
        "use_dora",
        "DoRA measures the rows of the frozen weights, which are rounded to FP8 here",
        advice="set mixed_precision: bf16, or remove use_dora",
    ),
    _exclude(
        "mixed_precision: fp8",
        has_fp8,
        "optim_in_backward",
        IN_BACKWARD,
        "optim_in_backward",
        fix={"optim_in_backward": False},
    ),
    _exclude(
        "mixed_precision: fp8",
        has_fp8,
        "optim_offload",
        ON_NVME,
        "optim_offload: nvme",
        advice="set mixed_precision: bf16, or remove optim_offload",
    ),
    # Activation checkpointing
    _checkpointed_only("activation_checkpointing_keeps", "it says what checkpointed layers keep"),
    _checkpointed_only("activation_offload", "it offloads what checkpointed layers keep"),
    _checkpointed_only(
        "activation_checkpointing_every", "it says which layers are checkpointed", is_note=True
    ),
    # The update in the backward
    layout_rule(
        "micro-batches with optim_in_backward",
        "optim_in_backward",
        "global_batch_size",
        "gradient_accumulation_steps",
        when=lambda c: IN_BACKWARD(c) and _count_micro_batches(c) > 1,
        message=lambda c: (
            f"optim_in_backward: a step of {c.global_batch_size} rows is {_count_micro_batches(c)} "
            f"micro-batches of {c['per_device_train_batch_size']} on {counted(c.ranks, 'rank')}, "
            "but a gradient that is freed in the backward cannot wait for the next micro-batch"
        ),
        advice=lambda c: (
            f"set global_batch_size: {c['per_device_train_batch_size'] * c.ranks}, or "
            f"per_device_train_batch_size: {-(-c.global_batch_size // c.ranks)}"
        ),
    ),
    *(
        _exclude(
            feature,
            is_on,
            "optim_in_backward",
            IN_BACKWARD,
            "optim_in_backward",
            why,
            advice=advice,
        )
        for feature, is_on, why, advice in (
            (
                "distributed_type: MULTI_GPU",
                lambda c: c.layout.layout == "ddp",
                "DDP keeps every gradient in its buckets",
                "use FSDP2 or one process, or remove the key",
            ),
            (
                "fsdp_version: 1",
                is_fsdp1,
                "FSDP1 flattens parameters together",
                "use FSDP2 or one process, or remove the key",
            ),
            (
                "fsdp_offload_params",
                lambda c: c.layout.cpu_offload,
                "under CPU offload gradients are in host memory already",
                "",
            ),
            (
                "mixed_precision: fp16",
                lambda c: c.precision == "fp16",
                "all gradients are checked for overflow before the first update",
                "set mixed_precision: bf16, or remove the key",
            ),
        )
    ),
    # The optimizer
    *map(_optimizer_rule, OPTIMIZER_CONFLICTS),
    layout_rule(
        "state in files without FSDP2",
        "optim_offload",
        "fsdp_version",
        when=lambda c: ON_NVME(c) and c.layout.layout != "fsdp2",
        message=(
            "optim_offload: nvme requires FSDP2, for one rank too, and {layout.source} is another "
            "layout"
        ),
        advice="use fsdp_full_shard, or remove optim_offload",
    ),
    _exclude(
        "mixed_precision: fp16",
        lambda c: c.precision == "fp16",
        "optim_offload",
        ON_NVME,
        "optim_offload: nvme",
        "it has no loss scaler",
        advice="set mixed_precision: bf16, or remove optim_offload",
    ),
)
