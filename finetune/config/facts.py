"""Facts about a model, by its config and by transformers' source, and about the machine.

Imports no torch.
"""

import importlib.util
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from finetune.config.families import Family, find_family
from finetune.config.layout import Sharding
from finetune.config.quantization import read_published_form, read_stored_quantization
from finetune.config.schema import Quantization, Recipe
from finetune.constants import HEADS, find_positions
from finetune.errors import UserError

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_COUNTS = (
    "num_experts_per_tok",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "num_experts_per_token",
    "num_selected_experts",
)
# Upper bounds of a config's sizes, far above any model: with a larger one, building the model would
# never end.
LARGEST_SIZES: Mapping[str, int] = {
    "num_hidden_layers": 1000,
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "shared_expert_intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "decoder_sparse_step": 1000,
    "depth": 1000,  # layers of a vision tower
}
# The same, of sizes that may be 0.
LARGEST_COUNTS: Mapping[str, int] = {
    "first_k_dense_replace": 1000,
    **dict.fromkeys((*EXPERT_COUNTS, *CHOSEN_COUNTS, "n_shared_experts"), 1 << 14),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        1 << 20,
    ),
}
KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "hidden_act": ((str,), "a name"),
    "hidden_activation": ((str,), "a name"),
    "attention_dropout": ((int, float), "a number"),
    "layer_types": ((list, tuple), "a list"),
    "mlp_only_layers": ((list, tuple), "a list"),
    "rope_scaling": ((dict,), "a mapping"),
    "rope_parameters": ((dict,), "a mapping"),
    "text_config": ((dict,), "a mapping"),
    "vision_config": ((dict,), "a mapping"),
}
# The names that transformers' ACT2FN knows (tests/config/test_compatibility.py compares them).
ACTIVATIONS = frozenset(
    """
    gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh
    hardswish laplace leaky_relu linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu
    sqrtsoftplus swish tanh xielu
    """.split()  # noqa: SIM905 - a name a line would be a page
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts in a model's config.

    Returned by `read_model_facts`, for a run and for a plan alike.
    """

    model_type: str
    layers: int
    hidden: int
    intermediate: int  # 0: the config does not say
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int  # rows of the embedding
    positions: int | None  # of a document that the model was made for
    experts: int = 0  # routed experts of a layer; 0: a dense model
    chosen: int = 0  # of these, the experts of one token
    expert_width: int = 0  # intermediate size of an expert
    layer_types: frozenset[str] = frozenset()
    window: int | None = None  # tokens that a query of some layers sees; None: all before it
    quantization: Quantization | None = None  # how the files are quantized
    # in which form of `PUBLISHED` the files are, which are read as plain numbers
    published: str | None = None
    tokens: int | None = None  # of the tokenizer, with added ones; None: it was not read
    vision: bool = False  # whether it is the language model of a vision-language one

    @property
    def family(self) -> Family:
        """The facts about the model's family."""
        return find_family(self.model_type)

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether transformers has a load-balancing loss for the family; DeepSeek V3 has a bias
        instead.
        """
        source = read_family_source(self.model_type)
        return self.experts > 0 and (not source or "load_balancing_loss_func" in source)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The facts about a run's machine.

    `capability` is the GPU's compute capability; None on a CPU.
    """

    device: Literal["cuda", "cpu"]
    system: str = "linux"  # sys.platform
    has_compiler: bool = True
    gpu: str = ""  # its name
    capability: tuple[int, int] | None = None
    is_hip: bool = False
    liger_families: frozenset[str] | None = None  # None: not known
    has_package: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None


def read_model_facts(
    config: Mapping[str, Any], name: str, tokens: int | None = None, *, vision: bool = False
) -> ModelFacts:
    """Returns the facts of a config: the text model's part of config.json or `to_dict()`, with the
    family's defaults.

    Args:
        config: Keys as in config.json.
        name: The model, for messages.
        tokens: Number of tokens of the tokenizer, where it was read.
        vision: Whether it is the language model of a vision-language one.

    Raises:
        UserError: For every size or name in the config with which no model can be built.
    """
    refuse_wrong_values(config, name)
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    return ModelFacts(
        model_type=str(config.get("model_type")),
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_size(config, "intermediate_size"),
        heads=heads,
        key_value_heads=_size(config, "num_key_value_heads") or heads,
        head_size=_size(config, "head_dim") or (hidden // heads if heads else 0),
        vocabulary=_size(config, "vocab_size"),
        positions=find_positions(config),
        experts=count_experts(config),
        chosen=count_chosen(config),
        expert_width=_size(config, "moe_intermediate_size", "intermediate_size"),
        layer_types=frozenset(map(str, config.get("layer_types") or ())),
        window=_find_window(config),
        quantization=read_stored_quantization(config.get("quantization_config"), name),
        published=read_published_form(config.get("quantization_config")),
        tokens=tokens,
        vision=vision,
    )


def refuse_wrong_values(config: Any, name: str) -> None:
    """Raises `UserError` for every size or name in (a part of) a config with which no model can be
    built.
    """
    problems = []
    for key, largest in {**LARGEST_SIZES, **LARGEST_COUNTS}.items():
        value = config.get(key)
        # Under latent attention head_dim is the rotated part of a key, and GLM-5-Next rotates none.
        may_be_zero = key in LARGEST_COUNTS or (
            key == "head_dim" and config.get("qk_rope_head_dim") == 0
        )
        least = 0 if may_be_zero else 1
        if value is not None and not _is_whole(value, least, largest) and not _are_sizes(value):
            problems.append(
                f"{name}: {key}: {_shorten(value)}: a whole number from {least} to {largest:,} is "
                "expected"
            )
    for key, (kinds, expected) in KINDS.items():
        if config.get(key) is not None and not isinstance(config[key], kinds):
            problems.append(f"{name}: {key}: {_shorten(config[key])}: {expected} is expected")
    activation = config.get("hidden_act", config.get("hidden_activation"))
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        problems.append(
            f"{name}: hidden_act: {_shorten(activation)}: no activation of transformers; for "
            "example silu is expected"
        )
    if problems:
        raise UserError.of(problems)


def names_vision_language(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a vision-language model, by the class that it names.

    >>> names_vision_language(
    ...     {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}
    ... )
    True
    """
    names = config.get("architectures")
    is_listed = isinstance(names, list) and any(
        str(name).endswith("ForConditionalGeneration") for name in names
    )
    return is_listed and "vision_config" in config


def count_experts(config: Mapping[str, Any]) -> int:
    """Counts the routed experts of a layer by the config; 0 for a dense model."""
    return _size(config, *EXPERT_COUNTS) or _size(_experts_section(config), *EXPERT_COUNTS)


def count_chosen(config: Mapping[str, Any]) -> int:
    """Counts the routed experts of one token by the config; 0 where it does not say."""
    return _size(config, *CHOSEN_COUNTS) or _size(_experts_section(config), *CHOSEN_COUNTS)


def _experts_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the section in which DBRX's config has the sizes of its experts."""
    section = config.get("ffn_config")
    return section if isinstance(section, Mapping) else {}


def _find_window(config: Mapping[str, Any]) -> int | None:
    """Returns the tokens of the sliding window, or of a chunk, that some layers have."""
    types = config.get("layer_types") or ()
    if "chunked_attention" in types:
        return _size(config, "attention_chunk_size") or None
    is_used = config.get("use_sliding_window", True) and (not types or "sliding_attention" in types)
    return _size(config, "sliding_window") or None if is_used else None


def _size(config: Mapping[str, Any], *keys: str) -> int:
    """Returns the first of `keys` that has a number; of a list with one for each layer the
    largest.
    """
    for key in keys:
        value = config.get(key)
        if (
            isinstance(value, list | tuple)
            and value
            and all(isinstance(each, int) for each in value)
        ):
            value = max(value)
        if isinstance(value, int | float) and value:
            return int(value)
    return 0


def _are_sizes(value: Any) -> bool:
    """Whether it is a list of one size for each layer."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(_is_whole(each, 0, 1 << 24) for each in value)
    )


def _is_whole(value: Any, least: int, largest: int) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and least <= value <= largest
        and value == int(value)
    )


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@cache
def has_compiler() -> bool:
    """Whether torch.compile finds a C compiler.

    Cached: searching the PATH for every parameter takes milliseconds.
    """
    return shutil.which("cc") is not None


def adopt_quantization(recipe: Recipe, facts: ModelFacts) -> Recipe:
    """Adds to `recipe` how its base is quantized, where the files of the base already are."""
    if facts.quantization is None:
        return recipe
    return replace(recipe, quantization=facts.quantization)


def with_recipe_keys(layout: Sharding, recipe: Recipe) -> Sharding:
    """Returns `layout` with the keys of it that the recipe has."""
    return replace(
        layout,
        expert_parallel_size=recipe.model.expert_parallel_size,
        pipeline_parallel_size=recipe.model.pipeline_parallel_size,
        pipeline_schedule=recipe.model.pipeline_schedule,
    )


# What transformers' source says of a family.
# self.q_proj = nn.Linear(...), and where a condition over several lines decides, up to the next
# assignment.
VISION = re.compile(r"class \w*Vision")
LINEAR = re.compile(
    r"self\.(\w+)(?:: \S+)? = (?:(?!self\.\w+(?:: \S+)? = |class ).){0,120}?Linear\(", re.DOTALL
)
# nn.Linear(...) -> its name and arguments
LINEAR_ARGUMENTS = re.compile(r"self\.(\w+) = nn\.Linear\(((?:[^()]|\([^()]*\))*)\)")
PACKED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


@cache
def read_family_source(model_type: str, kind: str = "modeling") -> str:
    """Returns the text of transformers' modeling file for a family, or its configuration file;
    empty where there is none.

    Importing it would take seconds, and torch.
    """
    spec = importlib.util.find_spec("transformers")
    module = model_type.replace("-", "_")
    if spec is None or spec.origin is None or not module.isidentifier():
        return ""
    models = Path(spec.origin).parent / "models"
    mappings = models / "auto" / "auto_mappings.py"
    listed = ""
    if mappings.is_file():
        listed = mappings.read_text(encoding="utf-8")
    # gemma3_text is in gemma3's file
    of_another = re.search(rf'\("{model_type}", "([a-z0-9_]+)"\)', listed)
    folder = of_another[1] if of_another else module
    source = models / folder / f"{kind}_{folder}.py"
    if source.is_file():
        return source.read_text(encoding="utf-8")
    return ""


@cache
def find_classes(model_type: str) -> frozenset[str]:
    """Returns the classes of a family's modeling file; empty where it is not known."""
    return frozenset(re.findall(r"^class (\w+)", read_family_source(model_type), re.MULTILINE))


def find_layer_class(model_type: str) -> str:
    """Returns the class of a family's decoder layers, which FSDP wraps.

    >>> find_layer_class("gemma3_text")
    'Gemma3DecoderLayer'
    """
    return min(
        (name for name in find_classes(model_type) if name.endswith("DecoderLayer")),
        default="layers",
    )


def _read_classes(model_type: str) -> list[str]:
    """The source of a family's classes, each from its first line on."""
    return re.split(r"^(?=class )", read_family_source(model_type), flags=re.MULTILINE)


@cache
def find_linear_layers(model_type: str) -> frozenset[str]:
    """Returns the names of a family's linear layers, without heads and vision towers; none of an
    unknown family.

    >>> sorted(find_linear_layers("phi3"))
    ['down_proj', 'gate_up_proj', 'o_proj', 'qkv_proj']
    """
    of_text = "".join(text for text in _read_classes(model_type) if not VISION.match(text))
    return frozenset(LINEAR.findall(of_text)) - HEADS


@cache
def find_biased_layers(model_type: str) -> frozenset[str]:
    """Returns the names of a family's linear layers with a bias, where its config does not say,
    without heads and vision towers.

    >>> sorted(find_biased_layers("qwen2")), sorted(find_biased_layers("llama"))
    (['k_proj', 'q_proj', 'v_proj'], [])
    """
    of_text = "".join(
        text
        for text in _read_classes(model_type)
        if not re.match(r"class \w*(Vision|For[A-Z])", text)
    )
    defaults = read_family_source(model_type, "configuration")
    biased = set()
    for name, arguments in LINEAR_ARGUMENTS.findall(of_text):
        bias = re.search(r"bias=([\w.]+)", arguments)
        value = bias[1] if bias else "True"  # of nn.Linear
        key = value.removeprefix("config.")
        if value == "True" or re.search(rf"\b{key}(: [^=\n]+)? ?= ?True", defaults):
            biased.add(name)
    return frozenset(biased)


def find_vision_layers(model_type: str) -> frozenset[str]:
    """Returns the names of the linear layers of a family's vision tower; none where another
    family's is in its place.

    >>> sorted(find_vision_layers("qwen3_vl"))
    ['linear_fc1', 'linear_fc2', 'proj', 'qkv']
    """
    of_tower = "".join(text for text in _read_classes(model_type) if VISION.match(text))
    return frozenset(LINEAR.findall(of_tower))


def has_own_attention(model_type: str) -> bool:
    """Whether a family computes attention in its own code, which ignores document boundaries; False
    if it is unknown.

    >>> has_own_attention("mpt"), has_own_attention("llama"), has_own_attention("unheard_of")
    (True, False, False)
    """
    source = read_family_source(model_type)
    return bool(source) and "ALL_ATTENTION_FUNCTIONS" not in source


def has_unknown_layers(model_type: str, layer_types: Iterable[str]) -> bool:
    """Whether a model has layers in which it is not known how packed documents are kept apart.

    >>> (
    ...     has_unknown_layers("llama", ["linear_attention"]),
    ...     has_unknown_layers("qwen3_next", ["linear_attention"]),
    ... )
    (True, False)
    """
    family = find_family(model_type)
    is_known = family.recurrence is not None or family.document_mask is not None
    return not is_known and not PACKED_LAYER_TYPES.issuperset(layer_types)


def attends_by_mask(model_type: str, layer_types: Iterable[str]) -> bool:
    """Whether a model's attention reads a mask of all pairs of tokens, not the boundaries of
    documents.

    >>> (
    ...     attends_by_mask("gptj", []),
    ...     attends_by_mask("llama", ["full_attention"]),
    ...     attends_by_mask("mamba", []),
    ... )
    (True, False, False)
    """
    family = find_family(model_type)
    has_own = has_own_attention(model_type) and family.recurrence is None
    return (
        family.document_mask is not None or has_own or has_unknown_layers(model_type, layer_types)
    )


def has_fused_experts(model_type: str) -> bool:
    """Whether transformers keeps a family's experts of a layer in one parameter each.

    >>> has_fused_experts("mixtral"), has_fused_experts("llama4_text"), has_fused_experts("llama")
    (True, False, False)
    """
    return "@use_experts_implementation" in read_family_source(model_type)
