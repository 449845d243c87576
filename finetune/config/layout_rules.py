"""The rules of a layout: what DDP, FSDP, parallelism and precision allow. Imports no torch."""

from math import prod

from finetune.config.layout import describe_sizes
from finetune.config.model_rules import set_to_divisor
from finetune.config.rule import Case, Rule, has_ep, has_pp, make_rule, no_effect
from finetune.config.yaml_file import COMMAND_LINE, LOAD_RECIPE
from finetune.constants import ceil_div
from finetune.units import counted

DEEPSPEED_NAMES = {  # a recipe's key -> DeepSpeed's key, if that has another name
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "global_batch_size": "train_batch_size",
    "max_grad_norm": "gradient_clipping",
    "learning_rate": "lr",
    "adam_epsilon": "eps",
}


def _count_mesh_ranks(case: Case) -> int:
    """Counts the ranks that the sizes of the mesh and of the pipeline give together."""
    return prod((case.layout.mesh_sizes or {}).values()) * case.layout.pipeline_parallel_size


def _describe_stages(case: Case) -> str:
    """Writes the pipeline's factor of the number of ranks; empty without a pipeline."""
    if has_pp(case):
        return f" x pipeline_parallel_size {case.layout.pipeline_parallel_size}"
    return ""


def _count_batch_groups(case: Case) -> int:
    """Counts the groups of ranks that train on different rows."""
    return case.ranks // case.layout.ranks_per_batch


def _count_micro_batches(case: Case) -> int:
    """Counts the micro-batches of a step on each rank."""
    groups = max(1, _count_batch_groups(case))  # 0: fewer ranks than the layout needs
    rows = case.recipe.batch.per_device_train_batch_size * groups
    return ceil_div(case.global_batch_size, rows)


def _advise_one_micro_batch(case: Case) -> str:
    """Says which rows of a step, or of a micro-batch, make a step of one micro-batch."""
    advice = (
        f"set global_batch_size: {case['per_device_train_batch_size'] * case.ranks}, or "
        f"per_device_train_batch_size: {ceil_div(case.global_batch_size, case.ranks)}"
    )
    if case["gradient_accumulation_steps"] is None:
        return advice
    return f"remove gradient_accumulation_steps, and {advice}"


def _describe_unequal_numbers(case: Case) -> list[str]:
    """Returns a message for each number of a DeepSpeed file that differs from the recipe's."""
    recipe = case.recipe
    optimization = case.recipe.optimization
    recipe_numbers: dict[str, float | None] = {
        "gradient_accumulation_steps": _count_micro_batches(case),
        "per_device_train_batch_size": recipe.batch.per_device_train_batch_size,
        "global_batch_size": case.global_batch_size,
        "max_grad_norm": optimization.max_grad_norm,
        "learning_rate": optimization.learning_rate,
        "weight_decay": optimization.weight_decay,
        "adam_epsilon": optimization.adam_epsilon,
    }
    messages = []
    for key, value in case.layout.asked:
        recipe_number = recipe_numbers[key]
        # DeepSpeed's gradient_clipping: 0 is max_grad_norm: null
        if recipe_number == value or (recipe_number is None and value == 0):
            continue
        place = recipe.place_of(key)
        source = place if place in (COMMAND_LINE, LOAD_RECIPE) else "recipe"
        on_ranks = ""
        if "batch" in key or "steps" in key:
            on_ranks = f" on {_count_batch_groups(case)} ranks"
        number = "null" if recipe_number is None else format(recipe_number, "g")
        name = DEEPSPEED_NAMES.get(key, key)
        messages.append(
            f"{name}: {value:g}, but {key} is {number} by the {source}{on_ranks}; set one to the "
            f"other, or {name} to auto"
        )
    return messages


def _describe_ep_ranks(case: Case) -> str:
    """Says that expert_parallel_size does not divide the ranks of a replica."""
    size = case.layout.expert_parallel_size
    replicas = case.layout.replicate_size or 1
    ranks = case.shards
    if replicas == 1:
        owner = "the run"
    else:
        owner = f"each of the {replicas} replicas of {case.layout.source}"
    return (
        f"expert_parallel_size: {size}: {owner} has {counted(ranks, 'rank')}, and {ranks} / {size} "
        "is not a whole number"
    )


NO_PIPELINE = {"pipeline_parallel_size": 1}


# Rules on whether the layout is possible at all; they are reported before all others.
POSSIBLE: tuple[Rule, ...] = (
    make_rule(
        "one process",
        "distributed_type",
        when=lambda c: c.layout.layout == "single" and c.ranks > 1,
        message="this layout is for one process, but {ranks} were launched",
        advice="launch one, or use ddp or an fsdp config",
    ),
    make_rule(
        "hybrid sharding of one rank",
        "sharding_strategy",
        "dp_replicate_size",
        when=lambda c: c.layout.strategy == "HYBRID_SHARD" and c.ranks == 1,
        message="hybrid sharding needs at least 2 ranks, but 1 was launched",
        advice="use fsdp_full_shard_auto",
    ),
    make_rule(
        "sizes of the mesh",
        "parallelism_config",
        when=lambda c: c.layout.mesh_sizes is not None and _count_mesh_ranks(c) != c.ranks,
        message=lambda c: (
            f"{describe_sizes(c.layout.mesh_sizes or {})}{_describe_stages(c)} = "
            f"{_count_mesh_ranks(c)}, but {c.ranks} "
            f"{'rank was' if c.ranks == 1 else 'ranks were'} launched"
        ),
        advice=lambda c: f"set the sizes so that their product is {c.ranks}",
    ),
    make_rule(
        "machines without a rank",
        "num_machines",
        when=lambda c: c.ranks < c.layout.num_machines,
        message=(
            "num_machines: {layout.num_machines}, but --num-processes {ranks}: each machine runs "
            "at least one"
        ),
        advice="set num_machines: 1, or ask for more processes",
    ),
    make_rule(
        "numbers of a DeepSpeed file",
        "deepspeed_config",
        when=_describe_unequal_numbers,  # any message is a problem
        message=_describe_unequal_numbers,
    ),
)


RULES: tuple[Rule, ...] = (
    # Expert parallelism
    make_rule(
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
    # Pipeline parallelism
    make_rule(
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
    no_effect(
        "pipeline_schedule", "without pipeline_parallel_size", lambda c: not has_pp(c), is_note=True
    ),
    make_rule(
        "streaming to a pipeline's reference",
        "streaming",
        "pipeline_parallel_size",
        when=lambda c: has_pp(c) and c["streaming"] and c.method_facts.needs_reference,
        message=(
            "streaming cannot be combined with pipeline_parallel_size: the reference of all rows "
            "is computed first"
        ),
        advice="remove streaming",
        fix={"streaming": False},
    ),
    # Activation checkpointing
    *(
        no_effect(
            key,
            "without fsdp_activation_checkpointing: true in {layout.source}",
            lambda c: not c.layout.activation_checkpointing,
            "fsdp_activation_checkpointing",
            is_note=key == "activation_checkpointing_every",
        )
        for key in (
            "activation_checkpointing_keeps",
            "activation_offload",
            "activation_checkpointing_every",
        )
    ),
    # The rows of a step
    make_rule(
        "two numbers of micro-batches",
        "gradient_accumulation_steps",
        "global_batch_size",
        "per_device_train_batch_size",
        when=lambda c: (
            None not in (c["gradient_accumulation_steps"], c["global_batch_size"])
            and c["gradient_accumulation_steps"] != _count_micro_batches(c)
        ),
        message=lambda c: (
            f"gradient_accumulation_steps: {c['gradient_accumulation_steps']}: global_batch_size: "
            f"{c.global_batch_size} takes {_count_micro_batches(c)} with "
            f"per_device_train_batch_size: {c['per_device_train_batch_size']} on "
            f"{counted(c.ranks, 'rank')}"
        ),
        advice="remove one of the two",
        fix={"gradient_accumulation_steps": None},
    ),
    # The update in the backward
    make_rule(
        "micro-batches with optim_in_backward",
        "optim_in_backward",
        "global_batch_size",
        "gradient_accumulation_steps",
        when=lambda c: c["optim_in_backward"] and _count_micro_batches(c) > 1,
        message=lambda c: (
            f"optim_in_backward: a step of {c.global_batch_size} rows is {_count_micro_batches(c)} "
            f"micro-batches of {c['per_device_train_batch_size']} on {counted(c.ranks, 'rank')}, "
            "but a gradient that is freed in the backward cannot wait for the next micro-batch"
        ),
        advice=_advise_one_micro_batch,
    ),
)
