"""Facts about a model, read from its config and from transformers' source, and about the machine.

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

# Keys of config.json for the number of routed experts of a layer, and of a token.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_COUNTS = (
    "num_experts_per_tok",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "num_experts_per_token",
    "num_selected_experts",
)
# Key of config.json -> an upper bound far above any model's: to build a larger one would never end.
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
# The same for sizes that may be 0.
LARGEST_COUNTS: Mapping[str, int] = {
    "first_k_dense_replace": 1000,
    **dict.fromkeys((*EXPERT_COUNTS, *CHOSEN_COUNTS, "n_shared_experts"), 1 << 14),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        1 << 20,
    ),
}
# Key of config.json -> (the types that its value may have, how a message calls them).
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
# The keys of config.json for the dropout of attention's weights; a class reads one of them.
ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
# Such as resid_pdrop, layerdrop and router_jitter_noise, but not dropout of other tasks' heads.
RANDOM = re.compile(r"(?!classifier|summary|encoder).*(drop|jitter)")
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
    """The facts in a model's config, as `read_model_facts` reads them.

    A size that the config does not give is 0.
    """

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int  # rows of the embedding
    positions: int | None  # length in tokens that the model was made for; None: not given
    experts: int = 0  # routed experts of a layer; 0: a dense model
    chosen: int = 0  # routed experts that the router chooses for a token
    expert_width: int = 0  # intermediate size of an expert
    layer_types: frozenset[str] = frozenset()
    # tokens that a query sees in layers with a sliding window or chunks; None: no layer has them
    window: int | None = None
    quantization: Quantization | None = None  # how the files are quantized
    # a form of `PUBLISHED`, if the files have one; their weights are read as plain numbers
    published: str | None = None
    # tokens of the tokenizer, added ones included; None: the tokenizer was not read
    tokens: int | None = None
    vision: bool = False  # whether it is the language model of a vision-language model
    # keys of the config, with commas, by which a forward in training changes activations at random
    dropout: str = ""

    @property
    def family(self) -> Family:
        """The facts about the model's family."""
        return find_family(self.model_type)

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether a mixture's family has a load-balancing loss in transformers.

        DeepSeek V3 has none, but a bias. A family whose source is not found is taken to have one.
        """
        source = read_family_source(self.model_type)
        return self.experts > 0 and (not source or "load_balancing_loss_func" in source)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The facts about a run's machine."""

    device: Literal["cuda", "cpu"]
    system: str = "linux"  # sys.platform
    has_compiler: bool = True
    gpu: str = ""  # the GPU's name
    capability: tuple[int, int] | None = None  # the GPU's compute capability; None on a CPU
    is_hip: bool = False
    # the model_types for which Liger has kernels; None: not known
    liger_families: frozenset[str] | None = None
    # whether the Python package of this import name is installed
    has_package: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None


def read_model_facts(
    config: Mapping[str, Any], name: str, tokens: int | None = None, *, vision: bool = False
) -> ModelFacts:
    """Reads the facts of a language model from its config.

    Args:
        config: The text model's part of config.json or of `to_dict()`, with the family's defaults
            filled in.
        name: The model, for messages.
        tokens: Number of tokens of the tokenizer; None: it was not read.
        vision: Whether it is the language model of a vision-language model.

    Raises:
        UserError: One error for all values in the config with which no model can be built.
    """
    refuse_wrong_values(config, name)
    heads = _read_size(config, "num_attention_heads")
    hidden = _read_size(config, "hidden_size")
    return ModelFacts(
        model_type=str(config.get("model_type")),
        layers=_read_size(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_read_size(config, "intermediate_size"),
        heads=heads,
        key_value_heads=_read_size(config, "num_key_value_heads") or heads,
        head_size=_read_size(config, "head_dim") or (hidden // heads if heads else 0),
        vocabulary=_read_size(config, "vocab_size"),
        positions=find_positions(config),
        experts=count_experts(config),
        chosen=count_chosen(config),
        expert_width=_read_size(config, "moe_intermediate_size", "intermediate_size"),
        layer_types=frozenset(map(str, config.get("layer_types") or ())),
        window=_find_window(config),
        quantization=read_stored_quantization(config.get("quantization_config"), name),
        published=read_published_form(config.get("quantization_config")),
        tokens=tokens,
        vision=vision,
        dropout=", ".join(key for key, value in config.items() if is_random(key, value)),
    )


def refuse_wrong_values(config: Any, name: str) -> None:
    """Raises one `UserError` for all values with which no model can be built.

    Args:
        config: A model's config, or a section of it; anything with `get` and `[]`.
        name: The model, for messages.
    """
    problems = []
    for key, largest in {**LARGEST_SIZES, **LARGEST_COUNTS}.items():
        value = config.get(key)
        # Under latent attention head_dim is the rotated part of a key, and GLM-5-Next rotates none.
        is_unrotated = key == "head_dim" and config.get("qk_rope_head_dim") == 0
        least = 0 if key in LARGEST_COUNTS or is_unrotated else 1
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
    """Whether a config.json names the class of a vision-language model, and has a vision_config.

    >>> names_vision_language(
    ...     {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}
    ... )
    True
    """
    classes = config.get("architectures")
    has_class = isinstance(classes, list) and any(
        str(name).endswith("ForConditionalGeneration") for name in classes
    )
    return has_class and "vision_config" in config


def count_experts(config: Mapping[str, Any]) -> int:
    """Returns the number of routed experts of a layer; 0 for a dense model."""
    section = _read_experts_section(config)
    return _read_size(config, *EXPERT_COUNTS) or _read_size(section, *EXPERT_COUNTS)


def count_chosen(config: Mapping[str, Any]) -> int:
    """Returns the number of routed experts that a token is sent to; 0 if the config has none."""
    section = _read_experts_section(config)
    return _read_size(config, *CHOSEN_COUNTS) or _read_size(section, *CHOSEN_COUNTS)


def _read_experts_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the section that DBRX's config has for its experts; empty for other families."""
    section = config.get("ffn_config")
    return section if isinstance(section, Mapping) else {}


def _find_window(config: Mapping[str, Any]) -> int | None:
    """Returns the size in tokens of the sliding window, or of the chunks, of some layers.

    None if no layer has either.
    """
    layer_types = config.get("layer_types") or ()
    if "chunked_attention" in layer_types:
        return _read_size(config, "attention_chunk_size") or None
    # A config without layer_types has a window in every layer.
    has_layers = not layer_types or "sliding_attention" in layer_types
    if has_layers and config.get("use_sliding_window", True):
        return _read_size(config, "sliding_window") or None
    return None


def is_random(key: str, value: Any) -> bool:
    """Whether a key of a config makes the forward of a language model in training random."""
    return RANDOM.match(key) is not None and type(value) in (int, float) and value > 0


def _read_size(config: Mapping[str, Any], *keys: str) -> int:
    """Returns the value of the first of `keys` that has a number above 0; 0 if none has.

    A list has a size for each layer; the largest is returned.
    """
    for key in keys:
        value = config.get(key)
        if (
            isinstance(value, list | tuple)
            and value
            and all(isinstance(size, int) for size in value)
        ):
            value = max(value)
        if isinstance(value, int | float) and value:
            return int(value)
    return 0


def _are_sizes(value: Any) -> bool:
    """Whether a value is a list that may hold one size for each layer: whole numbers from 0."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(_is_whole(size, least=0, largest=1 << 24) for size in value)
    )


def _is_whole(value: Any, least: int, largest: int) -> bool:
    """Whether a value is a whole number from `least` to `largest`; 2.0 is one, True is not."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and least <= value <= largest
        and value == int(value)
    )


def _shorten(value: Any) -> str:
    """Writes a value for a message, in at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@cache
def has_compiler() -> bool:
    """Whether torch.compile finds a C compiler.

    Cached: searching the PATH for every parameter takes milliseconds.
    """
    return shutil.which("cc") is not None


def adopt_quantization(recipe: Recipe, facts: ModelFacts) -> Recipe:
    """Returns `recipe` with the quantization of the base's files; unchanged if they have none."""
    if facts.quantization is None:
        return recipe
    return replace(recipe, quantization=facts.quantization)


def with_recipe_keys(layout: Sharding, recipe: Recipe) -> Sharding:
    """Returns `layout` with the recipe's keys of expert and pipeline parallelism added."""
    return replace(
        layout,
        expert_parallel_size=recipe.model.expert_parallel_size,
        pipeline_parallel_size=recipe.model.pipeline_parallel_size,
        pipeline_schedule=recipe.model.pipeline_schedule,
    )


# Patterns of transformers' source.
VISION = re.compile(r"class \w*Vision")
# `self.q_proj = nn.Linear(`. A condition may stand before Linear, even over several lines, but not
# another assignment or class.
LINEAR = re.compile(
    r"self\.(\w+)(?:: \S+)? = (?:(?!self\.\w+(?:: \S+)? = |class ).){0,120}?Linear\(", re.DOTALL
)
# `self.q_proj = nn.Linear(...)` -> (the attribute, the arguments)
LINEAR_ARGUMENTS = re.compile(r"self\.(\w+) = nn\.Linear\(((?:[^()]|\([^()]*\))*)\)")
# Layer types in which attention can keep packed documents apart.
PACKED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


@cache
def read_family_source(model_type: str, kind: str = "modeling") -> str:
    """Returns the text of transformers' source file for a family; empty if there is none.

    The file is read, not imported: an import would take seconds, and torch.

    Args:
        model_type: The family.
        kind: "modeling" or "configuration".
    """
    spec = importlib.util.find_spec("transformers")
    module = model_type.replace("-", "_")
    if spec is None or spec.origin is None or not module.isidentifier():
        return ""
    models = Path(spec.origin).parent / "models"
    mappings = models / "auto" / "auto_mappings.py"
    mappings_text = ""
    if mappings.is_file():
        mappings_text = mappings.read_text(encoding="utf-8")
    # A family may be in another's folder: gemma3_text is in gemma3's.
    match = re.search(rf'\("{model_type}", "([a-z0-9_]+)"\)', mappings_text)
    folder = match[1] if match else module
    source = models / folder / f"{kind}_{folder}.py"
    if source.is_file():
        return source.read_text(encoding="utf-8")
    return ""


@cache
def find_classes(model_type: str) -> frozenset[str]:
    """Returns the names of the classes in a family's modeling file; empty if there is none."""
    return frozenset(re.findall(r"^class (\w+)", read_family_source(model_type), re.MULTILINE))


def find_layer_class(model_type: str) -> str:
    """Returns the name of the class of a family's decoder layers; "layers" if it is not found.

    >>> find_layer_class("gemma3_text")
    'Gemma3DecoderLayer'
    """
    return min(
        (name for name in find_classes(model_type) if name.endswith("DecoderLayer")),
        default="layers",
    )


def _read_classes(model_type: str) -> list[str]:
    """Returns the source of a family's modeling file, cut before each class.

    The first text is what stands before the first class.
    """
    return re.split(r"^(?=class )", read_family_source(model_type), flags=re.MULTILINE)


@cache
def find_linear_layers(model_type: str) -> frozenset[str]:
    """Returns the names of a family's linear layers, without output heads and vision towers.

    Empty for an unknown family.

    >>> sorted(find_linear_layers("phi3"))
    ['down_proj', 'gate_up_proj', 'o_proj', 'qkv_proj']
    """
    language = "".join(text for text in _read_classes(model_type) if not VISION.match(text))
    return frozenset(LINEAR.findall(language)) - HEADS


@cache
def find_biased_layers(model_type: str) -> frozenset[str]:
    """Returns the names of a family's linear layers that have a bias by default.

    The default is nn.Linear's, or that of the config's key which decides. Output heads and vision
    towers are left out.

    >>> sorted(find_biased_layers("qwen2")), sorted(find_biased_layers("llama"))
    (['k_proj', 'q_proj', 'v_proj'], [])
    """
    language = "".join(
        text
        for text in _read_classes(model_type)
        if not re.match(r"class \w*(Vision|For[A-Z])", text)  # ...For... classes hold the heads
    )
    config_source = read_family_source(model_type, "configuration")
    biased = set()
    for name, arguments in LINEAR_ARGUMENTS.findall(language):
        bias = re.search(r"bias=([\w.]+)", arguments)
        value = bias[1] if bias else "True"  # nn.Linear's default
        key = value.removeprefix("config.")
        if value == "True" or re.search(rf"\b{key}(: [^=\n]+)? ?= ?True", config_source):
            biased.add(name)
    return frozenset(biased)


def find_vision_layers(model_type: str) -> frozenset[str]:
    """Returns the names of the linear layers of a family's vision tower.

    Empty if the family has no tower of its own, but another family's.

    >>> sorted(find_vision_layers("qwen3_vl"))
    ['linear_fc1', 'linear_fc2', 'proj', 'qkv']
    """
    tower = "".join(text for text in _read_classes(model_type) if VISION.match(text))
    return frozenset(LINEAR.findall(tower))


def has_own_attention(model_type: str) -> bool:
    """Whether a family computes attention in its own code, which ignores document boundaries.

    False for an unknown family.

    >>> has_own_attention("mpt"), has_own_attention("llama"), has_own_attention("unheard_of")
    (True, False, False)
    """
    source = read_family_source(model_type)
    return bool(source) and "ALL_ATTENTION_FUNCTIONS" not in source


def has_unknown_layers(model_type: str, layer_types: Iterable[str]) -> bool:
    """Whether a model has layers of a type in which packed documents may not be kept apart.

    False for a family with a known recurrence or document mask.

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
    """Whether a model's attention reads a mask of all pairs of tokens, not document boundaries.

    True too if the model has layers of an unknown type (`has_unknown_layers`).

    >>> (
    ...     attends_by_mask("gptj", []),
    ...     attends_by_mask("llama", ["full_attention"]),
    ...     attends_by_mask("mamba", []),
    ... )
    (True, False, False)
    """
    family = find_family(model_type)
    uses_own_code = has_own_attention(model_type) and family.recurrence is None
    return (
        family.document_mask is not None
        or uses_own_code
        or has_unknown_layers(model_type, layer_types)
    )


def has_fused_experts(model_type: str) -> bool:
    """Whether transformers keeps each weight of a layer's experts as one parameter for all experts.

    >>> has_fused_experts("mixtral"), has_fused_experts("llama4_text"), has_fused_experts("llama")
    (True, False, False)
    """
    return "@use_experts_implementation" in read_family_source(model_type)
