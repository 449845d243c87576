"""The rules on layers across tokens (which keep documents apart, which ranks can share), and on images. No torch."""

from finetune.config.facts import Case, Rule
from finetune.config.families import (
    IMAGE_FAMILIES,
    PACKED_LAYER_TYPES,
    attends_by_mask,
    has_own_attention,
    has_unknown_layers,
    read_family_source,
)
from finetune.config.model_rules import (
    count_local_heads,
    describe_local_heads,
    list_divisors,
    model_layout_rule,
    model_rule,
)
from finetune.constants import LARGEST_FLASH_HEAD


def _has_unfit_attention(case: Case) -> bool:
    """Whether the family computes attention in its own code, and the recipe asks for what that does not do."""
    family, keys, traits = case.model.model_type, case.recipe.model, case.model.family
    by_mask = traits.masks_documents is not None
    is_other = not by_mask and (traits.recurrence is not None or not has_own_attention(family))
    if keys.trust_remote_code or is_other:
        return False
    kind = keys.attn_implementation
    supports = f"_supports_{kind.rpartition('_2')[0] or kind} = True"
    is_its_own = kind in ("auto", "eager") or supports in read_family_source(family)
    is_packed = by_mask and kind in ("auto", "eager", "sdpa")
    return not is_its_own or (case.recipe.data.packing and not is_packed)


def _has_unknown_layers(case: Case) -> bool:
    return has_unknown_layers(case.model.model_type, case.model.layer_types)


def _attends_by_mask(case: Case) -> bool:
    is_own = not case.recipe.model.trust_remote_code
    return is_own and attends_by_mask(case.model.model_type, case.model.layer_types)


def _lacks_kernels(case: Case) -> bool:
    """Whether a GPU computes one document of a packed row after the other, which it need not."""
    recurrence = case.model.family.recurrence
    is_slow = recurrence is not None and case.machine.device == "cuda" and case.recipe.data.packing
    return is_slow and not all(map(case.machine.has_package, recurrence.packages if recurrence else ()))


def _describe_kernels(case: Case) -> str:
    packages = case.model.family.recurrence.packages if case.model.family.recurrence else ()
    names = " ".join(DISTRIBUTIONS[package] for package in packages if not case.machine.has_package(package))
    return (
        f"{case.name}: without {names.replace(' ', ' and ')} the layers of {case.model.model_type} that carry a state "
        f"run over one document after the other, by slow reference code; pip install {names}"
    )


def _needs_blocks(case: Case) -> bool:
    """Whether attention is computed in blocks of whole rows, which more ranks than heads have no part of."""
    family = case.model.family
    return family.caps_scores or family.sinks or case.model.head_size > LARGEST_FLASH_HEAD


# A package as it is imported -> as it is installed.
DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
RULES: tuple[Rule, ...] = (
    model_layout_rule(
        "heads under sequence parallelism", "cp_size", "sp_size",
        when=lambda c: _needs_blocks(c) and count_local_heads(c) % c.layout.sequence_parallel_size,
        message=describe_local_heads,
        advice=lambda c: f"set it to {list_divisors(count_local_heads(c), 1)}",
        fix={"cp_size": 1}, of_teacher=True,
    ),
    model_layout_rule(
        "layers under sequence parallelism", "cp_size", "sp_size",
        when=lambda c: c.layout.sequence_parallel_size > 1 and (c.model.family.recurrence or _attends_by_mask(c)),
        message="cp_size, sp_size: not supported for {model.model_type}, the family of {name}, whose layers need the "
        "whole row on a rank",
        fix={"cp_size": 1}, of_teacher=True,
    ),
    model_rule(
        "layers with a state", "packing", "model_name_or_path",
        when=lambda c: c["packing"] and _has_unknown_layers(c),
        message=lambda c: f"{c.name}: {c.model.model_type} has "
        f"{', '.join(sorted(c.model.layer_types - PACKED_LAYER_TYPES))} layers, in which packed documents cannot be "
        "kept apart",
        fix={"packing": False}, of_teacher=True,
    ),
    model_rule(
        "attention of its own", "attn_implementation", "packing", "model_name_or_path", when=_has_unfit_attention,
        message="{name}: {model.model_type} computes attention in its own code and cannot be trained on packed "
        "documents",
        advice="set packing: false and remove attn_implementation",
        fix={"packing": False, "attn_implementation": "auto"}, of_teacher=True,
    ),
    model_rule(
        "attention over a mask", "attn_implementation", "model_name_or_path",
        when=lambda c: c["attn_implementation"] == "auto" and _attends_by_mask(c),
        message="{name}: the attention of {model.model_type} reads a mask of all pairs of tokens; transformers' own is "
        "used, whose memory grows with the square of a row",
        is_note=True, of_teacher=True,
    ),
    Rule(
        name="kernels of layers with a state", keys=("model_name_or_path",), needs=("model", "machine"),
        when=_lacks_kernels, message=_describe_kernels, is_note=True, of_teacher=True,
    ),
    # Rows with images, which are known once the data has been read.
    Rule(
        name="images of the family", keys=("model_name_or_path", "model_config"),
        when=lambda c: c.images and c.images not in IMAGE_FAMILIES,
        message="{name}: rows hold images, and training on images is not supported for {images}; it is tested with "
        f"{', '.join(IMAGE_FAMILIES)}",
        advice="remove these rows",
    ),
    Rule(
        name="images without the tower", keys=("drop_vision",), when=lambda c: c.images and c["drop_vision"],
        message="drop_vision: rows hold images, which need the vision tower", fix={"drop_vision": False},
    ),
    Rule(
        name="images in packed rows", keys=("attn_implementation", "packing"),
        when=lambda c: c.images and c["packing"] and c["attn_implementation"] != "auto",
        message="attn_implementation: {attn_implementation}: does not keep packed documents with images apart",
        fix={"packing": False},
    ),
    Rule(
        name="images of a method", keys=("method",),
        when=lambda c: c.images and (c.recipe.method_facts.rows == "ratings" or c.recipe.teacher is not None),
        message="method: {method}: rows hold images, which it does not support",
        advice="use method: sft, or one that learns from pairs",
    ),
    Rule(
        name="images in compiled layers", keys=("torch_compile",), when=lambda c: c.images and c["torch_compile"],
        message="torch_compile: rows hold images, with which it was not tried", fix={"torch_compile": False},
    ),
    Rule(
        name="images beyond the plan", keys=("datasets",), when=lambda c: c.images,
        message="rows hold images: the plan counts their tokens with the row's, and not what the vision tower needs "
        "while it runs, or keeps where it is trained",
        is_note=True,
    ),
)  # fmt: skip
