"""Which layers other tools train, in full or by adapters, experts and routers among them.

A comment above a text or a pattern names the code, mostly the tool's, that it describes.
"""

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from finetune.config.facts import find_linear_layers, has_fused_experts, read_family_source
from finetune.config.families import find_family
from finetune.config.module_names import find_alias, find_renames, rename_pattern
from finetune.config.quantization import LOAD_KEYS
from finetune.constants import ALL_LINEAR
from finetune.convert.counterparts import ToolFile
from finetune.convert.defaults import LORA_DEFAULTS
from finetune.convert.image_models import adapt_fusion, report_unread_parts
from finetune.convert.model_names import (
    guess_depth,
    guess_family,
    guess_vision_family,
    is_mixture,
    name_model,
)
from finetune.convert.shared import MLP_LAYERS
from finetune.convert.value_conversion import LINEAR_LAYERS, Conversion, convert_names, read_section

NOT_OF_TEXT = re.compile("vision|visual|image|projector|audio")  # parts that get no adapters here
# models for which Automodel has a class of its own with an auxiliary loss of the routers
BALANCED = re.compile(
    r"gpt-?oss|qwen-?3.*a\d+b|qwen3-next|qwen-?3\.\d-flash-next|qwen-?4-exp|"
    r"ernie-4\.5.*a\d+b|laguna"
)
AUTOMODEL_ADAPTERS = (
    "peft: adapters have the base's dtype and another start there, fp32 and peft's start here"
)
AUTOMODELS_START = "peft: adapters have another start there, peft's start here"
OTHER_LAYERS = (
    "all linear layers but the head here, for this model's code is its own: one of another name "
    "gets no adapter there"
)
WITH_HEAD = [ALL_LINEAR, "lm_head"]
NO_SUCH_LAYER = "no layer is known by this name here, and none gets an adapter by it"
# a pattern with the number of a decoder layer, or with a choice of characters
PART_OF_MODEL = re.compile(r"[.*]\d+[.*]|[\[\]?]")
BY_ITS_END = "layers are named by the end of a pattern here, in every block of the model"
# parameters of all experts of a layer: Automodel adapts both where a pattern matches the experts
EXPERT_PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
# Gate._compute_aux_loss of Automodel's components/moe/layers.py, and
# _set_moe_aux_loss_backward_scale of its recipes/base_recipe.py; here load_balancing_loss_func of
# transformers
BY_LAYER = (
    "of each layer and micro-batch there, over the experts of a token: layers / experts of a token "
    "times as much where all layers are alike; of all layers and the whole step together here"
)
# _route_scores of components/moe/layers.py: its scores choose the experts
BY_BIASES = (
    f"{BY_LAYER}; there of the experts that the routers' biases choose, here of those with the "
    "highest scores"
)
# families whose routers choose by other scores than those of the loss here -> the difference
OTHER_EXPERTS = {
    "ernie4_5_moe": BY_BIASES,
    "laguna": f"{BY_BIASES}; by a token's sigmoids, divided by their sum, there, by a softmax here",
}
AUXILIARY = (
    "the routers' auxiliary loss of the model's config is added there; router_aux_loss_coef adds "
    "it here, {}"
)
NO_AUXILIARY = "no auxiliary loss is added there for this class"


def adapt_trained_layers(settings: ToolFile, conversion: Conversion) -> None:
    """Adds the layers that Automodel adapts, and reports what its own model classes do otherwise.

    For torchtune it adds which parts of Llama 3.2 Vision are trained; for other tools, nothing.
    """
    if conversion.tool == "torchtune" and conversion.image_family:
        adapt_fusion(read_section(settings, "model"), name_model(settings), conversion)
        report_unread_parts(settings, conversion)
    if conversion.tool != "Automodel":
        return
    peft = read_section(settings, "peft")
    _report_auxiliary(settings, conversion)
    if peft:
        conversion.recipe["use_peft"] = True
        is_in_fp32 = "float32" in str(peft.get("lora_dtype"))
        conversion.remarks.append(AUTOMODELS_START if is_in_fp32 else AUTOMODEL_ADAPTERS)
        family = guess_family(name_model(settings)) or ""
        _adapt_automodel_targets(family, peft, conversion)
        if not _may_adapt_head(settings) and conversion.recipe["lora_target_modules"] == WITH_HEAD:
            conversion.recipe["lora_target_modules"] = ALL_LINEAR
        _report_router(family, settings, conversion)
        _report_fused_mlp(family, settings, conversion)


# Gemma4Gate of Automodel's models/gemma4_moe
ROUTER_UNADAPTED = (
    "the adapter of a router's proj changes nothing there, where the router reads the weight "
    "alone; here it is trained"
)


def _report_router(family: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports a router's adapters that have no effect in Automodel's own class of Gemma 4."""
    targets = conversion.recipe["lora_target_modules"]
    is_adapted = ALL_LINEAR in targets or "proj" in targets
    has_own_class = is_mixture(name_model(settings)) and not is_of_transformers(settings)
    if family == "gemma4_text" and has_own_class and is_adapted:
        conversion.add_difference("lora_target_modules", targets, ROUTER_UNADAPTED)


# install_fused_lora_mlp of Automodel's components/_peft/lora_mlp.py replaces an MLP that has
# MLP_LAYERS and SiLU. Under FSDP on several GPUs the model is on meta by then, and stays as it is.
BY_FUSED_MLP = "on one GPU or under DDP, by its fused MLP with adapters, "
FUSED_OTHERWISE = {
    "falcon_h1": f"{BY_FUSED_MLP}mlp_multipliers of the config have no effect there; here they do",
    "seed_oss": (
        f"{BY_FUSED_MLP}an MLP's output is not dropped in part there; here by its config's share"
    ),
}
GROUP_SIZES = ("tp_size", "pp_size", "cp_size", "ep_size")  # keys of Automodel's `distributed`


def _report_fused_mlp(family: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports what Automodel's fused MLP, if the file's model gets it, computes otherwise."""
    peft = read_section(settings, "peft")
    layout = read_section(settings, "distributed")
    targets = conversion.recipe["lora_target_modules"]
    adapts_mlp = ALL_LINEAR in targets or set(MLP_LAYERS) <= set(targets)
    is_off = peft.get("use_memory_efficient_lora") is False or peft.get("use_dora")
    has_groups = any(str(layout.get(key)) not in ("None", "none", "1") for key in GROUP_SIZES)
    keeps_own_mlp = is_off or has_groups or peft.get("dropout") or settings.get("quantization")
    if family in FUSED_OTHERWISE and adapts_mlp and not keeps_own_mlp:
        key = "use_memory_efficient_lora"
        conversion.add_difference(f"peft.{key}", peft.get(key), FUSED_OTHERWISE[family])


# materialize_lm_weight of Automodel's components/loss/linear_ce.py reads the head's weight alone.
FUSED_LOSS = "FusedLinearCrossEntropy"


def _may_adapt_head(settings: ToolFile) -> bool:
    """Whether Automodel trains an adapter of the output head if the file asks for one.

    The fused loss leaves it at 0, and Baichuan's head is no linear layer.
    """
    is_fused = str(read_section(settings, "loss_fn").get("_target_")).endswith(FUSED_LOSS)
    return not is_fused and "baichuan" not in name_model(settings).lower()


def is_of_transformers(settings: ToolFile) -> bool:
    """Whether Automodel loads transformers' class of a model, though it may have its own class."""
    model = read_section(settings, "model")
    quantization = read_section(settings, "quantization")
    return bool(model.get("force_hf") or any(quantization.get(key) for key in LOAD_KEYS))


def _report_auxiliary(settings: ToolFile, conversion: Conversion) -> None:
    """Reports how Automodel's auxiliary loss of the routers differs from ours.

    Drops router_aux_loss_coef if the model's class there has no such loss.
    """
    name = name_model(settings)
    model = read_section(settings, "model")
    coefficient = model.get("router_aux_loss_coef")
    has_loss = BALANCED.search(name.lower()) and not is_of_transformers(settings)
    note = OTHER_EXPERTS.get(str(guess_family(name)), BY_LAYER)
    if has_loss and coefficient is None:  # then the coefficient of the model's config counts there
        conversion.add_difference("model", name, AUXILIARY.format(note))
    elif has_loss and coefficient:
        conversion.add_difference("model.router_aux_loss_coef", coefficient, note)
    elif coefficient:
        conversion.recipe.pop("router_aux_loss_coef", None)
        conversion.add_remark("model.router_aux_loss_coef", coefficient, NO_AUXILIARY)


def _adapt_automodel_targets(family: str, peft: Mapping[str, Any], conversion: Conversion) -> None:
    """Sets the layers and the experts' parameters that get adapters, from the section `peft`.

    Excluded layers are remembered, and reported if they get adapters here.
    """
    excluded = convert_names(peft.get("exclude_modules")) or []
    conversion.excluded_layers = frozenset(name.split(".")[-1] for name in excluded)
    targets = peft.get("target_modules")
    names = convert_names(targets) or []
    unadaptable = find_family(family).unadaptable
    left_out = [
        name
        for name in excluded
        if not NOT_OF_TEXT.search(name)
        and "head" not in name  # all-linear leaves the head out
        and name.split(".")[-1] not in unadaptable
    ]
    if left_out:
        note = "they get adapters here"
        conversion.add_difference(
            "peft.exclude_modules", left_out, note, "LoRA without some layers"
        )
    # with exclude_modules all other linear layers get adapters there
    has_all = peft.get("match_all_linear") or targets in (["*"], "*") or excluded
    layers = find_linear_layers(family)
    projections = sorted(layer for layer in layers if layer.endswith("_proj"))
    if has_all and not any("head" in name for name in excluded):
        conversion.recipe["lora_target_modules"] = list(WITH_HEAD)
    elif has_all:
        conversion.recipe["lora_target_modules"] = ALL_LINEAR
    elif targets and names != ["*_proj"]:
        _name_automodel_layers(names, layers, conversion)
    else:  # *_proj, which is the default
        if len(projections) < len(layers):
            conversion.recipe["lora_target_modules"] = projections
        else:
            conversion.recipe["lora_target_modules"] = "all-linear"
        if not layers:
            conversion.add_difference("peft.target_modules", "*_proj", OTHER_LAYERS)
    names_experts = any(name == "*" or name.endswith(".experts") for name in names)
    if names_experts and has_fused_experts(family):
        conversion.recipe["lora_target_parameters"] = list(EXPERT_PARAMETERS)


def _name_automodel_layers(
    patterns: Sequence[str], layers: Collection[str], conversion: Conversion
) -> None:
    """Sets the layers that get adapters: those whose name matches the last part of a pattern.

    `layers`: the family's linear layers; if empty, a Llama's are taken.
    """
    known = layers or LINEAR_LAYERS.keys()
    targets: dict[str, None] = {}
    for pattern in patterns:
        end = pattern.rpartition(".")[2]
        matching = sorted(layer for layer in (*known, "lm_head") if fnmatch.fnmatchcase(layer, end))
        targets |= dict.fromkeys(matching)
        if PART_OF_MODEL.search(pattern) or (end == "*" and pattern != "*"):
            conversion.add_difference("peft.target_modules", pattern, BY_ITS_END)
        if not matching and end != "experts":
            conversion.add_difference("peft.target_modules", pattern, NO_SUCH_LAYER)
    conversion.recipe["lora_target_modules"] = list(targets)


# a pattern of the whole language model
ALL_OF_TEXT = r"language_model(\.model)?(\.\*|\.\.\*)?$"
# freeze_layers_except of Axolotl matches the start of names. Its train.py calls it once the
# adapters are in place, when names start with base_model.
ADAPTERS_FROZEN = (
    "no pattern names the adapters, and all that none names is frozen there, so that nothing is "
    "trained; the adapters are trained here"
)
# the source of the classes with an output head in a family's file of transformers
HEAD_CLASS = re.compile(
    r"^class \w+For(?:CausalLM|ConditionalGeneration)\(.*?(?=^class |\Z)", re.DOTALL | re.MULTILINE
)
# LayerNamePattern of Axolotl's utils/freeze.py matches a dot of a pattern with a dot alone, in the
# names of transformers 5. {}: the patterns.
NAMED_OTHERWISE = (
    "a pattern is the start of a name in transformers 5 there, and a dot in it is a dot: what is "
    "meant by {} is frozen there, trained here"
)

# named_parameters of torch, through which Axolotl looks, gives a shared tensor its first name alone
HEAD_UNNAMED = (
    "where the output head is the embedding, lm_head is no name of it there, and it stays frozen; "
    "it is trained here"
)


def _report_unnamed(settings: ToolFile, conversion: Conversion) -> None:
    """Reports Axolotl's patterns of trained parameters that match nothing there, but do here."""
    patterns = settings.get("unfrozen_parameters")
    if not isinstance(patterns, list) or not conversion.recipe.get("trainable_modules"):
        return
    family = guess_vision_family(name_model(settings)) or ""
    unnamed = [each for each in map(str, patterns) if _names_nothing(each, family)]
    if unnamed:
        note = NAMED_OTHERWISE.format(", ".join(unnamed))
        conversion.add_difference("unfrozen_parameters", patterns, note)
    starts = [str(each).removeprefix("^") for each in patterns]
    names_head = any(each.startswith("lm_head") for each in starts)
    if names_head and not any("emb" in each or "wte" in each for each in starts):
        conversion.add_remark("unfrozen_parameters", patterns, HEAD_UNNAMED)


def _names_nothing(pattern: str, family: str) -> bool:
    """Whether Axolotl's pattern matches the start of no parameter's name; False if in doubt.

    >>> [
    ...     _names_nothing(pattern, "mixtral")
    ...     for pattern in ("model.layers.1.mlp", "model.layers.1.block_sparse_moe", "layers.1")
    ... ]
    [False, True, True]
    """
    start = pattern.removeprefix("^")
    is_old_name = rename_pattern(start, find_renames(family)) != start
    if is_old_name or "\\." in start or ".*" in start.removesuffix(".*"):
        return True
    classes = HEAD_CLASS.findall(read_family_source(family))
    modules = set(re.findall(r"self\.(\w+) = ", "".join(classes)))  # such as model and lm_head
    first = re.split(r"\W", start)[0]
    return bool(modules and first) and not any(name.startswith(first) for name in modules)


def adapt_frozen(settings: ToolFile, conversion: Conversion) -> None:
    """Sets which modules are trained in full or frozen; reports what a tool does otherwise."""
    recipe = conversion.recipe
    patterns = recipe.get("trainable_modules")
    if patterns and (
        recipe.get("use_peft") or any(re.search(ALL_OF_TEXT, str(name)) for name in patterns)
    ):
        # LoRA freezes the base by itself; without it the patterns name all that is loaded here
        del recipe["trainable_modules"]
        frozen = ", and LoRA freezes it by itself" if recipe.get("use_peft") else ""
        conversion.remarks.append(
            f"trainable_modules is dropped: the language model is loaded alone{frozen}"
        )
        names_adapters = any(str(name).startswith((".", "base_model")) for name in patterns)
        unfrozen = settings.get("unfrozen_parameters")
        if unfrozen and recipe.get("use_peft") and not names_adapters:
            conversion.add_difference("unfrozen_parameters", unfrozen, ADAPTERS_FROZEN)
    _report_unnamed(settings, conversion)
    if conversion.tool == "Automodel":
        _adapt_selectors(read_section(settings, "freeze_config"), settings, conversion)
    if settings.get("finetuning_type") == "freeze" and conversion.tool == "LLaMA-Factory":
        recipe["use_peft"] = False
        _train_layers(settings, conversion)


# FreezeConfig of Automodel's components/utils/model_utils.py, for both texts
ADAPTERS_LEFT_ALONE = "adapters in these modules are frozen there, trained here"
TRAINED_BESIDE = "these modules are trained there, whatever else freezes them; not here"


def _adapt_selectors(
    section: Mapping[str, Any], settings: ToolFile, conversion: Conversion
) -> None:
    """Freezes the modules that the selectors of Automodel's freeze_config name.

    `section`: freeze_config; {} if there is none.
    """
    frozen = section.get("freeze_modules") or []
    patterns = [_read_selector(each) for each in frozen if isinstance(each, dict)]
    if patterns and settings.get("peft"):
        conversion.add_difference("freeze_config.freeze_modules", frozen, ADAPTERS_LEFT_ALONE)
    elif patterns:
        conversion.recipe["frozen_modules"] = patterns
    unfrozen = section.get("unfreeze_modules")
    if unfrozen and (settings.get("peft") or len(section) > 1):
        conversion.add_difference("freeze_config.unfreeze_modules", unfrozen, TRAINED_BESIDE)


def _read_selector(selector: Mapping[str, Any]) -> str:
    """Returns our pattern for a selector: a whole name (path), or a shell pattern of one (glob).

    >>> _read_selector({"path": "lm_head"}), _read_selector({"glob": "model.layers.[!0].*"})
    ('lm_head', 'model.layers.[^0]..*')
    """
    if selector.get("path") is not None:
        return str(selector["path"])
    return str(selector.get("glob")).replace("?", ".").replace("*", ".*").replace("[!", "[^")


def report_shared_experts(settings: ToolFile, conversion: Conversion) -> None:
    """Reports that shared experts get adapters here, and not by the tool's regular expression.

    The expression matches whole names there. Here it becomes names of layers, which shared experts
    have too.
    """
    pattern = settings.get("lora_target_modules")
    targets = conversion.recipe.get("lora_target_modules")
    if (
        not isinstance(pattern, str)
        or not isinstance(targets, list)
        or re.fullmatch(r"[\w.,]+", pattern)
    ):
        return
    shared = [name for name in targets if LINEAR_LAYERS.get(name) == "mlp"]
    family = guess_family(name_model(settings)) or ""
    if shared and SHARED_EXPERTS.search(read_family_source(family)):
        note = "the shared experts get adapters by these names too here, not by the pattern there"
        conversion.add_difference("lora_target_modules", pattern, note)


def _train_layers(settings: ToolFile, conversion: Conversion) -> None:
    """Sets the decoder layers that LLaMA-Factory trains: the last ones, or the first ones for a
    number below 0.

    If the model's number of layers is not known, naming the last ones is left to do.
    """
    count = settings.get("freeze_trainable_layers", 2)
    depth = guess_depth(str(settings.get("model_name_or_path")))
    if isinstance(count, int) and count <= 0:
        numbers = range(-count)
    elif isinstance(count, int) and depth is not None:
        numbers = range(depth - count, depth)
    else:
        note = f"trainable_modules: name the last {count} layers, as in layers.(30|31)"
        conversion.to_do.append(f"freeze_trainable_layers: {count}: {note}")
        return
    modules = convert_names(settings.get("freeze_trainable_modules", "all")) or []
    inner = "" if "all" in modules else rf"\.({'|'.join(modules)})"
    layers = f"layers.({'|'.join(map(str, numbers))}){inner}"
    extra = convert_names(settings.get("freeze_extra_modules")) or []
    conversion.recipe["trainable_modules"] = [layers, *extra]


MLP_NAMES = frozenset(name for name, block in LINEAR_LAYERS.items() if block == "mlp")
# tools whose adapters are peft's
WITH_PEFT = ("TRL", "Axolotl", "LLaMA-Factory", "ms-swift")
SHARED_EXPERTS = re.compile("shared_(expert|mlp)")
ONTO_EXPERTS = (
    "since transformers 5 peft takes gate_proj, up_proj and down_proj for layers of the routed "
    "experts: their adapters are on these there, of twice the rank where two are one, and on no "
    "shared expert or dense layer; here on linear layers of these names, and on experts by "
    "lora_target_parameters"
)
ALL_WITH_EXPERTS = (
    "since transformers 5 peft's all-linear is also the routed experts, of twice the rank where "
    "two are one, and the routers, but no shared expert or dense layer; here all linear layers, "
    "and experts by lora_target_parameters"
)
TWICE_THE_RANK = (
    "w1 and w3 of the experts are one parameter since transformers 5, whose adapter has twice the "
    "rank there, and lora_r here"
)
PEFT_REFUSES = (
    "since transformers 5 peft takes routed experts for such layers too, and refuses {}: the run "
    "stops there; under 4, where experts are linear layers, they get adapters there; here they get "
    "some by lora_target_parameters alone"
)
DROPOUT_ON_EXPERTS = PEFT_REFUSES.format("a lora_dropout above 0 on them")
HALF_OF_FUSED = PEFT_REFUSES.format("one of two layers that are one parameter there")
# layers that are one parameter in transformers 5 (peft's _MOE_FUSED_TARGETS)
FUSED_PAIRS = ({"gate_proj", "up_proj"}, {"w1", "w3"})


def report_expert_names(settings: ToolFile, conversion: Conversion) -> None:
    """Reports adapters that peft moves onto routed experts (its _convert_peft_config_moe)."""
    recipe = conversion.recipe
    if conversion.tool not in WITH_PEFT or not recipe.get("use_peft"):
        return
    family = guess_family(name_model(settings)) or ""
    is_mixtrals = "mixtral" in (family, find_alias(family))
    is_qwens = find_alias(family) == "qwen2_moe"  # not Qwen2 MoE itself, which is no alias
    targets = recipe.get("lora_target_modules", ALL_LINEAR)
    names = [] if targets == ALL_LINEAR else targets
    layers = {name.rpartition(".")[2] for name in names}
    # other tools than TRL replace all-linear by names, among them those of shared experts
    has_shared = bool(SHARED_EXPERTS.search(read_family_source(family)))
    note = None
    if ALL_LINEAR in targets and conversion.tool == "TRL" and (is_mixtrals or is_qwens):
        note = ALL_WITH_EXPERTS
    elif is_qwens and (layers & MLP_NAMES or (ALL_LINEAR in targets and has_shared)):
        note = ONTO_EXPERTS
    elif is_mixtrals and layers & {"w1", "w3"}:
        note = TWICE_THE_RANK
    if note is not None or (is_mixtrals and "w2" in layers):
        note = _find_refusal(layers, settings, conversion) or note
    if note is not None:
        conversion.add_difference("lora_target_modules", targets, note)


def _find_refusal(
    layers: Collection[str], settings: ToolFile, conversion: Conversion
) -> str | None:
    """Returns the note on why peft refuses adapters on experts, if it does.

    For dropout it is ParamWrapper of its tuners/lora/layer.py that refuses. Axolotl changes it
    (_patch_peft_param_wrapper_dropout of its loaders/adapter.py).
    """
    if any(len(pair & set(layers)) == 1 for pair in FUSED_PAIRS):
        return HALF_OF_FUSED
    default = LORA_DEFAULTS[conversion.tool].get("lora_dropout")
    if settings.get("lora_dropout", default) and conversion.tool != "Axolotl":
        return DROPOUT_ON_EXPERTS
    return None
