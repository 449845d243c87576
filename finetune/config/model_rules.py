"""The rules on a model: what its family and sizes allow, which of its layers pack, and images.

Imports no torch.
"""

import math
from collections.abc import Iterator

from finetune.config.facts import (
    PACKED_LAYER_TYPES,
    attends_by_mask,
    find_classes,
    find_linear_layers,
    has_fused_experts,
    has_own_attention,
    has_unknown_layers,
    read_family_source,
)
from finetune.config.families import FAMILIES, IMAGE_FAMILIES
from finetune.config.keys import keys_of
from finetune.config.layout import FP8_MULTIPLE, shard_experts
from finetune.config.module_names import find_expert_layers, is_within
from finetune.config.quantization import BLOCK, LOAD_KEYS, PUBLISHED, describe_quantization
from finetune.config.rule import (
    BF16,
    Case,
    Rule,
    has_ep,
    has_fp8,
    has_pp,
    has_sp,
    has_tp,
    make_rule,
)
from finetune.config.schema import Quantization
from finetune.constants import ALL_LINEAR, HEADS, LARGEST_FLASH_HEAD, ceil_div

# Classes of torch.nn, which a model may contain though its family's source does not define them.
TORCH_CLASSES = ("Embedding", "Linear", "LayerNorm", "RMSNorm")


def list_divisors(number: int, least: int = 2) -> str:
    """Lists the divisors of `number` that are `least` or more, as text for an advice; may be empty.

    >>> list_divisors(6), list_divisors(7), list_divisors(1)
    ('2, 3 or 6', '7', '')
    """
    sizes = [str(size) for size in range(least, number + 1) if number % size == 0]
    if len(sizes) > 1:
        return f"{', '.join(sizes[:-1])} or {sizes[-1]}"
    return "".join(sizes)


def set_to_divisor(key: str, number: int, condition: str = "") -> str:
    """Returns the advice to set `key` to a divisor of `number` above 1, or to remove it.

    `condition`: text that follows the divisors.

    >>> set_to_divisor("tp_size", 6), set_to_divisor("tp_size", 1)
    ('set it to 2, 3 or 6', 'remove tp_size')
    """
    sizes = list_divisors(number)
    if sizes:
        return f"set it to {sizes}{condition}"
    return f"remove {key}"


def count_local_heads(case: Case) -> int:
    """Counts the attention heads for which a rank of a tensor parallel group computes attention.

    They are all heads if the family's ranks gather the sharded products of the projections first.
    """
    if case.model.family.tensor_parallel == "products":
        return case.model.heads
    return case.model.heads // case.layout.tensor_parallel_size


def describe_local_heads(case: Case) -> str:
    """Says that cp_size or sp_size does not divide the heads of a rank, for families that need it
    (`_needs_whole_rows`).
    """
    local_heads = count_local_heads(case)
    tp_size = case.layout.tensor_parallel_size
    of_a_rank = ""
    if local_heads != case.model.heads:
        of_a_rank = f", of which tp_size {tp_size} leaves {local_heads} on a rank"
    return (
        f"cp_size (or sp_size) {case.layout.sequence_parallel_size} must divide the attention "
        f"heads of {case.model.model_type}, whose scores are computed in blocks of whole rows, but "
        f"the model has {case.model.heads}{of_a_rank}"
    )


def trains_experts(case: Case) -> bool:
    """Whether the weights of routed experts are trained themselves, not by adapters.

    False for a dense model.
    """
    model = case.model
    recipe = case.recipe
    # one parameter of each layer's experts, for the recipe's patterns
    names = [
        f"model.layers.{layer}.mlp.experts.down_proj"
        for layer in range(model.layers if model.experts else 0)
    ]
    if recipe.lora.use_peft:
        return any(is_within(name, recipe.lora.modules_to_save) for name in names)
    trained = recipe.model.trainable_modules
    frozen = recipe.model.frozen_modules
    return any(
        (not trained or is_within(name, trained)) and not is_within(name, frozen) for name in names
    )


def _find_sizes_if_uneven(case: Case) -> dict[str, int]:
    """Returns all sizes of the model that tp_size must divide; empty if it divides all of them.

    The names are keys of config.json, or products of two.
    """
    model = case.model
    ranks = case.layout.tensor_parallel_size
    sizes = {"intermediate_size": model.intermediate}
    if model.family.tensor_parallel == "products":
        sizes["num_attention_heads x head_dim"] = model.heads * model.head_size
        sizes["num_key_value_heads x head_dim"] = model.key_value_heads * model.head_size
    else:
        sizes["num_attention_heads"] = model.heads
        sizes["num_key_value_heads"] = model.key_value_heads
    if all(size % ranks == 0 for size in sizes.values()):
        return {}
    return sizes


def _advise_tp_size(case: Case) -> str:
    """Advises the smaller values of tp_size that divide all of the model's sizes."""
    common = math.gcd(*_find_sizes_if_uneven(case).values())
    ranks = case.layout.tensor_parallel_size
    divisors = ", ".join(str(size) for size in range(1, ranks) if common % size == 0)
    return f"set tp_size to one of {divisors}"


def _describe_uneven(case: Case) -> str:
    """Says which of the model's sizes tp_size does not divide."""
    ranks = case.layout.tensor_parallel_size
    uneven = []
    for key, size in _find_sizes_if_uneven(case).items():
        if size % ranks:
            uneven.append(
                f"{key} {size}, and {size} / {ranks} leaves a remainder of {size % ranks}"
            )
    return f"tp_size {ranks}: {case.name} has {'; '.join(uneven)}"


def is_uneven_vocabulary(case: Case) -> bool:
    """Whether tp_size does not divide the vocabulary, so that ranks hold different numbers of its
    rows.
    """
    return case.model.vocabulary % case.layout.tensor_parallel_size != 0


def _has_unsharded_experts(case: Case) -> bool:
    """Whether FSDP cannot shard the experts that one rank of expert parallelism owns.

    That is so if neither their number nor the rows of their matrices divide over the ranks that
    share them.
    """
    model = case.model
    expert_ranks = case.layout.expert_parallel_size
    shards = case.shards // expert_ranks
    row_counts = {model.hidden, 2 * model.expert_width}  # of down_proj and gate_up_proj
    mixture = model.family.mixture
    if mixture is not None and mixture.has_biases:  # down_proj is [experts, in, out]
        row_counts.add(model.expert_width)
    return shards > 1 and any(
        shard_experts((model.experts, rows), expert_ranks, shards) is None for rows in row_counts
    )


def _last_part(name: str) -> str:
    """Returns what follows the last dot in a module's name."""
    return name.rpartition(".")[2]


def _names_unadaptable(case: Case) -> bool:
    """Whether lora_target_modules names a layer that can have no adapter in the family."""
    unadaptable = case.model.family.unadaptable
    return any(_last_part(target) in unadaptable for target in case.recipe.lora.named_targets)


def _find_unknown_targets(case: Case) -> list[str]:
    """Lists the names in `lora_target_modules` that are no linear layer of the family.

    `all-linear` is listed if the family has no linear layer. Empty without adapters, or if the
    model's code is not transformers'.
    """
    lora = case.recipe.lora
    layers = find_linear_layers(case.model.model_type)
    if (
        not lora.use_peft
        or case.recipe.model.trust_remote_code
        or not read_family_source(case.model.model_type)
    ):
        return []
    if lora.adapts_all and not layers and not lora.lora_target_parameters:
        return [ALL_LINEAR]
    # a head that is trained whole may be named
    saved_whole = {_last_part(name) for name in lora.modules_to_save}
    known = layers | saved_whole | HEADS | find_expert_layers(case.model.model_type).keys()
    return [target for target in lora.named_targets if _last_part(target) not in known]


def _describe_unknown_targets(case: Case) -> str:
    """Says which names in `lora_target_modules` are unknown, and which layers the family has."""
    known = ", ".join(sorted(find_linear_layers(case.model.model_type)))
    if known:
        layers = f"it has {known}"
    else:
        layers = "its layers are transformers' Conv1D, which have no adapters here"
    experts = ""
    if case.model.experts:
        experts = "; routed experts are adapted with lora_target_parameters"
    targets = ", ".join(_find_unknown_targets(case))
    return (
        f"lora_target_modules: {targets}: no such linear layer in {case.model.model_type}; "
        f"{layers}{experts}"
    )


def _find_unknown_wraps(case: Case) -> list[str]:
    """Lists the classes that FSDP should wrap and that the family's source does not define.

    Empty if FSDP does not wrap by class, or the source is not known.
    """
    known = find_classes(case.model.model_type)
    wraps_by_class = case.layout.is_fsdp and case.layout.wrapping == "TRANSFORMER_BASED_WRAP"
    if not known or not wraps_by_class or case.recipe.model.trust_remote_code:
        return []
    return [
        name for name in case.layout.wrap_classes if name not in known and name not in TORCH_CLASSES
    ]


def _describe_unknown_wraps(case: Case) -> str:
    """Says which classes FSDP cannot wrap, and which layers and blocks the family has."""
    layers = sorted(
        name for name in find_classes(case.model.model_type) if name.endswith(("Layer", "Block"))
    )
    return (
        f"wraps {', '.join(_find_unknown_wraps(case))}, but {case.name} is made of "
        f"{', '.join(layers)}"
    )


def _find_other_quantization(case: Case) -> Iterator[str]:
    """Yields the keys whose value is neither the default nor that of the quantized files."""
    stored = case.model.quantization
    default = Quantization()
    asked = case.recipe.quantization
    for key in keys_of(Quantization):
        if getattr(asked, key) not in (getattr(default, key), getattr(stored, key)):
            yield key


def _describe_other_quantization(case: Case) -> list[str]:
    """Says for each key that contradicts the quantized files how they are stored."""
    stored = describe_quantization(case.quantization)
    reason = f"the weights of {case.name} are stored as {stored}"
    return [
        f"{key}: {str(case[key]).lower()}: {reason}; remove {key}, or name the unquantized model"
        for key in _find_other_quantization(case)
    ]


def _describe_dequantized(case: Case) -> str:
    """Says in which form the files are, and that their weights are dequantized."""
    assert case.model.published is not None  # the rule's condition
    stored = PUBLISHED[case.model.published]
    text = f"{case.name}: its weights are stored in {stored}, and dequantized as they are read"
    if not case.quantization.bits:
        text += "; load_in_4bit: true with use_peft keeps them in 4 bits"
    return text


SMALLEST_FP8_HIDDEN = 4096  # the smallest hidden size at which FP8 was measured to be faster


def _has_fp8_layer(case: Case) -> bool:
    """Whether some linear layer of the decoder can be multiplied in FP8.

    Both its sizes must be multiples of FP8_MULTIPLE: the hidden size, and the size of queries, keys
    or the MLP. An `intermediate` of 0 is not known.
    """
    model = case.model
    widths = (
        model.heads * model.head_size,
        model.key_value_heads * model.head_size,
        model.intermediate,
    )
    return model.hidden % FP8_MULTIPLE == 0 and any(
        width and width % FP8_MULTIPLE == 0 for width in widths
    )


def _list_families(trait: str) -> str:
    """Lists the families with a trait, an attribute of `Family`, for a message."""
    return ", ".join(name for name, family in FAMILIES.items() if getattr(family, trait))


def _has_text_class(model_type: str) -> bool:
    """Whether transformers can load the language model alone, without the vision tower."""
    return any(name.endswith("ForCausalLM") for name in find_classes(model_type))


def _has_unfit_attention(case: Case) -> bool:
    """Whether the family computes attention in its own code, which does not support what the recipe
    asks of it: an attn_implementation, or packing.

    False for families with transformers' attention interface, and for code of the model's own
    repository.
    """
    model_type = case.model.model_type
    keys = case.recipe.model
    family = case.model.family
    reads_mask = family.document_mask is not None  # which keeps packed documents apart
    has_own_code = family.recurrence is None and has_own_attention(model_type)
    if keys.trust_remote_code or not (reads_mask or has_own_code):
        return False
    kind = keys.attn_implementation
    # flash and flex attention of own code: not tried with any family
    is_supported = kind in ("auto", "eager") or (
        kind == "sdpa" and "_supports_sdpa = True" in read_family_source(model_type)
    )
    can_pack = reads_mask and kind in ("auto", "eager", "sdpa")
    return not is_supported or (case.recipe.data.packing and not can_pack)


def _attends_by_mask(case: Case) -> bool:
    """Whether transformers' code of the model reads a mask of all pairs of tokens (see
    `attends_by_mask`).
    """
    if case.recipe.model.trust_remote_code:
        return False
    return attends_by_mask(case.model.model_type, case.model.layer_types)


def _lacks_kernels(case: Case) -> bool:
    """Whether recurrent layers run over the documents of packed rows one after another on a GPU,
    because packages with their kernels are missing.
    """
    recurrence = case.model.family.recurrence
    if recurrence is None or case.machine.device != "cuda" or not case.recipe.data.packing:
        return False
    return not all(map(case.machine.has_package, recurrence.packages))


def _describe_kernels(case: Case) -> str:
    """Says which packages with kernels are missing, and how to install them."""
    assert case.model.family.recurrence is not None  # `_lacks_kernels`
    missing = [
        DISTRIBUTIONS[package]
        for package in case.model.family.recurrence.packages
        if not case.machine.has_package(package)
    ]
    return (
        f"{case.name}: without {' and '.join(missing)} the layers of {case.model.model_type} "
        "that carry a state run over one document after the other, by slow reference code; pip "
        f"install {' '.join(missing)}"
    )


def _needs_whole_rows(case: Case) -> bool:
    """Whether FlashAttention cannot compute the family's attention scores, so that attention needs
    a row's tokens together.

    Ranks that share a row then divide its heads between them, and each needs as many.
    """
    family = case.model.family
    return family.caps_scores or family.sinks or case.model.head_size > LARGEST_FLASH_HEAD


# A package's name in an import -> its name for pip.
DISTRIBUTIONS = {
    "fla": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d",
    "mamba_ssm": "mamba-ssm",
}
RULES: tuple[Rule, ...] = (
    make_rule(
        "more tokens than rows",
        "tokenizer_name_or_path",
        "model_name_or_path",
        "model_config",
        when=lambda c: (c.model.tokens or 0) > c.model.vocabulary + c.model.family.rows_beyond_head,
        message=(
            "{name}: its embedding has {model.vocabulary} rows, but the tokenizer has "
            "{model.tokens} tokens"
        ),
        advice=(
            "use the model's own tokenizer (added_tokens adds tokens to it), or set vocab_size in "
            "model_config"
        ),
        of_teacher=True,
    ),
    # Stored quantization
    make_rule(
        "stored quantization in full",
        "use_peft",
        "model_name_or_path",
        when=lambda c: c.model.quantization is not None and not c["use_peft"],
        message=(
            "{name}: its weights are stored in {quantization.bits} bits, so they cannot be "
            "fine-tuned in full"
        ),
        advice="set use_peft: true, or name the unquantized model",
        fix={"use_peft": True},
    ),
    make_rule(
        "a base that is dequantized",
        "model_name_or_path",
        when=lambda c: c.model.published is not None,
        message=_describe_dequantized,
        is_note=True,
        of_teacher=True,
    ),
    make_rule(
        "another quantization than the stored one",
        *keys_of(Quantization),
        when=lambda c: c.model.quantization is not None and any(_find_other_quantization(c)),
        message=_describe_other_quantization,
    ),
    make_rule(
        "quantized experts",
        *LOAD_KEYS,
        "model_name_or_path",
        when=lambda c: (
            c.quantization.bits is not None
            and c.model.quantization is None  # else the files' experts are dequantized
            and c.model.experts
            and not has_fused_experts(c.model.model_type)
        ),
        message=(
            "{load_key}: {name} is a mixture of experts ({model.model_type}), whose experts "
            "are not quantized here"
        ),
        advice="remove it, and name the unquantized model",
        of_teacher=True,
    ),
    make_rule(
        "quantized experts over ranks",
        "expert_parallel_size",
        "load_in_4bit",
        when=lambda c: (
            has_ep(c)
            and c.quantization.bits == 4
            and c.model.experts
            and c.model.experts
            // c.layout.expert_parallel_size
            * c.model.hidden
            * c.model.expert_width
            % BLOCK
        ),
        message=(
            "expert_parallel_size: {layout.expert_parallel_size}: the experts of a rank do not "
            f"begin with a block of {BLOCK} numbers, which load_in_4bit keeps under one scale"
        ),
        advice="set it to 1, and FSDP shards the experts",
        fix={"expert_parallel_size": 1},
    ),
    make_rule(
        "layers that cannot be adapted",
        "lora_target_modules",
        "use_peft",
        when=lambda c: c["use_peft"] and _names_unadaptable(c),
        message=lambda c: (
            f"lora_target_modules: {', '.join(c.model.family.unadaptable)} of {c.model.model_type} "
            "can have no adapters"
        ),
        advice="name other linear layers",
    ),
    make_rule(
        "layers that all-linear leaves out",
        "lora_target_modules",
        "use_peft",
        when=lambda c: c["use_peft"] and c.recipe.lora.adapts_all and c.model.family.unadaptable,
        message=lambda c: (
            f"lora_target_modules: all-linear: without {', '.join(c.model.family.unadaptable)} of "
            f"{c.model.model_type}, which can have no adapters"
        ),
        is_note=True,
    ),
    make_rule(
        "names of published files",
        "lora_target_modules",
        "trainable_modules",
        "frozen_modules",
        when=lambda c: c.recipe.renamed,
        message=lambda c: list(c.recipe.renamed),
        is_note=True,
    ),
    make_rule(
        "layers that the family does not have",
        "lora_target_modules",
        "use_peft",
        when=_find_unknown_targets,
        message=_describe_unknown_targets,
    ),
    make_rule(
        "tokens beyond a table of positions",
        "max_length",
        when=lambda c: (
            c.model.family.has_position_table
            and c.model.positions
            and c["max_length"] > c.model.positions
        ),
        message=(
            "max_length: {max_length}: {name} embeds positions by a table, which ends after "
            "{model.positions}"
        ),
        advice=lambda c: f"set max_length: {c.model.positions}",
        of_teacher=True,
    ),
    make_rule(
        "axial positions",
        "model_name_or_path",
        when=lambda c: c.model.family.has_axial_positions,
        message="{name}: its axial positions take rows of one length alone",
        advice="name another model",
    ),
    make_rule(
        "packed rows beyond a table of positions",
        "packing",
        "max_length",
        "per_device_train_batch_size",
        when=lambda c: (
            c.model.family.bounds_rows
            and c["packing"]
            and c.model.positions
            and c.recipe.row_tokens * c["per_device_train_batch_size"] > c.model.positions
        ),
        message=(
            "packing: the attention of {name} takes packed rows of no more than {model.positions} "
            "tokens, and those of this recipe may be longer"
        ),
        fix={"packing": False},
    ),
    # Vision-language models
    make_rule(
        "no tower to drop",
        "drop_vision",
        when=lambda c: c["drop_vision"] and not c.model.vision,
        message="drop_vision: {name} is no vision-language model",
        fix={"drop_vision": False},
    ),
    make_rule(
        "no text class",
        "drop_vision",
        when=lambda c: (
            c["drop_vision"] and c.model.vision and not _has_text_class(c.model.model_type)
        ),
        message=(
            "drop_vision: transformers has no class for {model.model_type}, the language model of "
            "{name}, alone"
        ),
        fix={"drop_vision": False},
    ),
    # Mixtures
    make_rule(
        "embeddings cut beyond their length",
        "matryoshka_dims",
        when=lambda c: max(c["matryoshka_dims"], default=0) > c.model.hidden,
        message=lambda c: (
            f"matryoshka_dims: {max(c['matryoshka_dims'])}: the model's states have "
            f"{c.model.hidden} numbers"
        ),
        advice="name smaller lengths",
    ),
    make_rule(
        "family of a pipeline",
        "pipeline_parallel_size",
        when=lambda c: has_pp(c) and (not c.model.family.has_pipeline or c.model.vision),
        message=(
            "pipeline_parallel_size: {layout.pipeline_parallel_size}: not supported for "
            "{model.model_type}, the family of {name}; it is tested with "
            f"{_list_families('has_pipeline')}"
        ),
        advice="remove it",
        fix={"pipeline_parallel_size": 1},
    ),
    make_rule(
        "layers of a pipeline",
        "pipeline_parallel_size",
        "pipeline_schedule",
        when=lambda c: c.layout.pipeline_chunks > c.model.layers and has_pp(c),
        message=(
            "pipeline_parallel_size: {layout.pipeline_parallel_size}: {name} has {model.layers} "
            "layers, and {layout.pipeline_schedule} cuts them into {layout.pipeline_chunks} groups"
        ),
        advice="choose a smaller size",
        fix={"pipeline_parallel_size": 1, "pipeline_schedule": "1f1b"},
    ),
    make_rule(
        "family of expert parallelism",
        "expert_parallel_size",
        when=lambda c: has_ep(c) and c.model.experts and not c.model.family.has_expert_parallelism,
        message=(
            "expert_parallel_size: {layout.expert_parallel_size}: not supported for "
            "{model.model_type}, the family of {name}; it is tested with "
            f"{_list_families('has_expert_parallelism')}"
        ),
        advice="remove it",
        fix={"expert_parallel_size": 1},
    ),
    make_rule(
        "experts over ranks",
        "expert_parallel_size",
        when=lambda c: c.model.experts % c.layout.expert_parallel_size,
        message=(
            "expert_parallel_size: {layout.expert_parallel_size}: a layer of {name} has "
            "{model.experts} experts, and {model.experts} / {layout.expert_parallel_size} "
            "is not a whole number"
        ),
        advice=lambda c: set_to_divisor(
            "expert_parallel_size", math.gcd(c.model.experts, c.shards)
        ),
        fix={"expert_parallel_size": 1},
    ),
    make_rule(
        "experts over shards",
        "expert_parallel_size",
        when=lambda c: has_ep(c) and c.model.experts and _has_unsharded_experts(c),
        message=lambda c: (
            f"expert_parallel_size: {c.layout.expert_parallel_size}: neither the "
            f"{c.model.experts // c.layout.expert_parallel_size} experts of a rank's group nor the "
            "rows of their matrices divide over the ranks that share them"
        ),
        advice="choose another size",
        fix={"expert_parallel_size": 1},
    ),
    # Tensor parallelism
    make_rule(
        "family of tensor parallelism",
        "tp_size",
        when=lambda c: has_tp(c) and not c.model.family.tensor_parallel,
        message=(
            "tp_size {layout.tensor_parallel_size}: not supported for {model.model_type}, the "
            f"family of {{name}}; only for {_list_families('tensor_parallel')}"
        ),
        fix={"tp_size": 1},
    ),
    make_rule(
        "sizes under tensor parallelism",
        "tp_size",
        when=lambda c: has_tp(c) and c.model.family.tensor_parallel and _find_sizes_if_uneven(c),
        message=_describe_uneven,
        advice=_advise_tp_size,
        fix={"tp_size": 1},
    ),
    make_rule(
        "rows of the vocabulary under tensor parallelism",
        "tp_size",
        when=lambda c: (
            c.model.family.tensor_parallel
            and (ranks := c.layout.tensor_parallel_size) > 1
            # the last rank would have no row: each rank before it takes a rounded-up share
            and (ranks - 1) * ceil_div(c.model.vocabulary, ranks) >= c.model.vocabulary
        ),
        message=(
            "tp_size {layout.tensor_parallel_size}: {name} has vocab_size "
            "{model.vocabulary}, too few rows for {layout.tensor_parallel_size} ranks"
        ),
        advice="set a smaller tp_size",
        fix={"tp_size": 1},
    ),
    make_rule(
        "classes that are wrapped",
        "fsdp_transformer_layer_cls_to_wrap",
        when=_find_unknown_wraps,
        message=_describe_unknown_wraps,
        advice="name that class, or remove the key, and the class is found",
    ),
    # FP8
    make_rule(
        "FP8 without a layer",
        "mixed_precision",
        when=lambda c: has_fp8(c) and not c.model.experts and not _has_fp8_layer(c),
        message=(
            "mixed_precision: fp8: {name} has no linear layer that can be multiplied in FP8: "
            f"their sizes must be multiples of {FP8_MULTIPLE}"
        ),
        fix=BF16,
    ),
    make_rule(
        "FP8 of narrow layers",
        "mixed_precision",
        when=lambda c: has_fp8(c) and _has_fp8_layer(c) and c.model.hidden < SMALLEST_FP8_HIDDEN,
        message=(
            "mixed_precision: fp8: {name} has hidden_size {model.hidden}, at which the casts "
            "to FP8 cost more than its products save: with 2,048 an H100 trained 9% slower than "
            "in bf16, with 4,096 an H200 17% faster"
        ),
        advice="set bf16 for speed",
        is_note=True,
    ),
    # Layers across tokens: which keep documents apart, which ranks can share
    make_rule(
        "heads under sequence parallelism",
        "cp_size",
        "sp_size",
        when=lambda c: (
            _needs_whole_rows(c) and count_local_heads(c) % c.layout.sequence_parallel_size
        ),
        message=describe_local_heads,
        advice=lambda c: f"set it to {list_divisors(count_local_heads(c), 1)}",
        fix={"cp_size": 1},
        of_teacher=True,
    ),
    make_rule(
        "layers under sequence parallelism",
        "cp_size",
        "sp_size",
        when=lambda c: has_sp(c) and (c.model.family.recurrence or _attends_by_mask(c)),
        message=(
            "cp_size, sp_size: not supported for {model.model_type}, the family of {name}, "
            "whose layers need the whole row on a rank"
        ),
        fix={"cp_size": 1},
        of_teacher=True,
    ),
    make_rule(
        "layers with a state",
        "packing",
        "model_name_or_path",
        when=lambda c: c["packing"] and has_unknown_layers(c.model.model_type, c.model.layer_types),
        message=lambda c: (
            f"{c.name}: {c.model.model_type} has "
            f"{', '.join(sorted(c.model.layer_types - PACKED_LAYER_TYPES))} layers, in which "
            "packed documents cannot be kept apart"
        ),
        fix={"packing": False},
        of_teacher=True,
    ),
    make_rule(
        "attention of its own",
        "attn_implementation",
        "packing",
        "model_name_or_path",
        when=_has_unfit_attention,
        message=(
            "{name}: {model.model_type} computes attention in its own code and cannot be "
            "trained on packed documents"
        ),
        advice="set packing: false and remove attn_implementation",
        fix={"packing": False, "attn_implementation": "auto"},
        of_teacher=True,
    ),
    make_rule(
        "attention over a mask",
        "attn_implementation",
        "model_name_or_path",
        when=lambda c: c["attn_implementation"] == "auto" and _attends_by_mask(c),
        message=(
            "{name}: the attention of {model.model_type} reads a mask of all pairs of tokens; "
            "transformers' own is used, whose memory grows with the square of a row"
        ),
        is_note=True,
        of_teacher=True,
    ),
    make_rule(
        "masked tokens in a window",
        "method",
        "max_length",
        when=lambda c: (
            c.method_facts.masks and c.model.window is not None and c.model.window < c["max_length"]
        ),
        message=(
            "method: {method}: layers of {model.model_type}, the family of {name}, see "
            "{model.window} tokens at most, and no more than those before a token"
        ),
        advice=lambda c: f"set max_length to {c.model.window} or less, or name another model",
    ),
    make_rule(
        "masked tokens under a mask",
        "method",
        "model_name_or_path",
        when=lambda c: c.method_facts.masks and _attends_by_mask(c),
        message=(
            "method: {method}: the attention of {model.model_type}, the family of {name}, reads a "
            "mask of transformers' own, which hides what is after a token"
        ),
        advice="name another model",
    ),
    make_rule(
        "kernels of layers with a state",
        "model_name_or_path",
        when=_lacks_kernels,
        message=_describe_kernels,
        is_note=True,
        of_teacher=True,
    ),
    # Rows with images, which are known once the data has been read.
    make_rule(
        "images of the family",
        "model_name_or_path",
        "model_config",
        when=lambda c: c.images and c.images not in IMAGE_FAMILIES,
        message=(
            "{name}: rows hold images, and training on images is not supported for {images}; "
            f"it is tested with {', '.join(IMAGE_FAMILIES)}"
        ),
        advice="remove these rows",
    ),
    make_rule(
        "images in packed rows",
        "attn_implementation",
        "packing",
        when=lambda c: c.images and c["packing"] and c["attn_implementation"] != "auto",
        message=(
            "attn_implementation: {attn_implementation}: does not keep packed documents with "
            "images apart"
        ),
        fix={"packing": False},
    ),
    make_rule(
        "images beyond the plan",
        "datasets",
        when=lambda c: c.images,
        message=(
            "rows hold images: the plan counts their tokens with the row's, and not what the "
            "vision tower needs while it runs, or keeps where it is trained"
        ),
        is_note=True,
    ),
)
