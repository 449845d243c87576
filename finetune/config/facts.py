"""What a rule may look at: the recipe, the layout, facts about the model and the machine. Imports no torch."""

import importlib.util
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from finetune.config.families import Family, find_family, read_family_source
from finetune.config.layout import Sharding
from finetune.config.quantization import name_load_key, quantize_teacher, read_published_form, read_stored_quantization
from finetune.config.schema import Quantization, Recipe, compute_global_batch_size, recipe_keys
from finetune.errors import UserError

Need = Literal["layout", "model", "machine"]
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_COUNTS = (
    "num_experts_per_tok",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "num_experts_per_token",
    "num_selected_experts",
)
# Upper bounds of a config's sizes, far above any model: with a larger one, building the model would never end.
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
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 1 << 20),
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
    gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh hardswish laplace leaky_relu
    linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh xielu
    """.split()  # noqa: E501, SIM905 - a name a line would be a page
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's config says. Returned by `read_model_facts`, for a run and for a plan alike."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int  # 0: the config does not say
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int  # rows of the embedding
    positions: int | None  # max_position_embeddings
    experts: int = 0  # routed experts of a layer; 0: a dense model
    chosen: int = 0  # of these, the experts of one token
    expert_width: int = 0  # intermediate size of an expert
    layer_types: frozenset[str] = frozenset()
    quantization: Quantization | None = None  # how the files are quantized
    published: str | None = None  # in which form of `PUBLISHED` the files are, which are read as plain numbers
    tokens: int | None = None  # of the tokenizer, with added ones; None: it was not read
    vision: bool = False  # whether it is the language model of a vision-language one

    @property
    def family(self) -> Family:
        """What is known of the family."""
        return find_family(self.model_type)

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether transformers has a load-balancing loss for the family; DeepSeek V3 has a bias instead."""
        source = read_family_source(self.model_type)
        return self.experts > 0 and (not source or "load_balancing_loss_func" in source)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What the machine of a run has. `capability` is the GPU's compute capability; None on a CPU."""

    device: Literal["cuda", "cpu"]
    system: str = "linux"  # sys.platform
    has_compiler: bool = True
    gpu: str = ""  # its name
    capability: tuple[int, int] | None = None
    is_hip: bool = False
    liger_families: frozenset[str] | None = None  # None: not known
    has_package: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run to judge. A rule reads `layout`, `model` and `machine` only where it says that it needs them."""

    recipe: Recipe
    layout: Sharding
    model: ModelFacts
    machine: MachineFacts
    ranks: int = 1
    steps: int | None = None  # of the run, where the data has been read or max_steps says it
    is_teacher: bool = False  # whether `model` is the teacher
    images: str | None = None  # the family of the whole model, once rows with images have been read

    @property
    def shards(self) -> int:
        """Ranks that hold a replica of the model, or of a stage's layers, between them under FSDP2."""
        return self.ranks // (self.layout.pipeline_parallel_size * (self.layout.replicate_size or 1))

    def __getitem__(self, key: str) -> Any:
        """The value of a recipe's key, or the attribute of this name."""
        found = recipe_keys().get(key)
        return getattr(self, key) if found is None else getattr(getattr(self.recipe, found.section), key)

    @property
    def name(self) -> str:
        """The model, for messages."""
        keys = self.recipe.method if self.is_teacher else self.recipe.model
        name = keys.teacher_model_name_or_path if keys is self.recipe.method else self.recipe.model.model_name_or_path
        return name or "model_config"

    @property
    def quantization(self) -> Quantization:
        """How the model is kept: as its files are quantized, else as the recipe says."""
        stored: Quantization | None = getattr(self.model, "quantization", None)
        return stored or (quantize_teacher(self.recipe.method) if self.is_teacher else self.recipe.quantization)

    @property
    def is_whole(self) -> bool:
        """Whether a vision tower is loaded with the model."""
        return self.model.vision and not self.recipe.model.drop_vision

    @property
    def load_key(self) -> str:
        """The key that asks for the quantization."""
        return name_load_key(self.quantization, of_teacher=self.is_teacher)

    @property
    def global_batch_size(self) -> int:
        """Rows in an optimizer step over all ranks."""
        return compute_global_batch_size(self.recipe.batch, self.ranks // self.layout.ranks_per_batch)

    @property
    def precision(self) -> str:
        """`mixed_precision` as the Accelerate file has it."""
        return "fp8" if self.layout.fp8 is not None else self.layout.mixed_precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a rule found: `place` is a file with its line, or the command line."""

    rule: str
    place: str
    sentence: str
    fix: Mapping[str, Any] | None = None
    is_note: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.sentence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that does not work, or has no effect.

    `keys` are those that it reads, of the recipe or the Accelerate file; the problem is reported at the first that was
    set. `message` says what is wrong; `{key}` in it is the value of a Case. What to do is `advice`, else "set" each key
    of `fix`.
    """

    name: str
    keys: tuple[str, ...]
    when: Callable[[Case], object]
    message: str | Callable[[Case], str | list[str]]
    advice: str | Callable[[Case], str] = ""
    fix: Mapping[str, Any] | None = None
    needs: tuple[Need, ...] = ()
    of_teacher: bool = False  # whether a teacher must keep it too
    is_note: bool = False  # worth a line, no reason to stop

    def check(self, case: Case) -> Iterable[Problem]:
        """The problems of `case` by this rule."""
        if not self.when(case):
            return []
        found = self.message.format_map(case) if isinstance(self.message, str) else self.message(case)
        advice = self.advice if isinstance(self.advice, str) else self.advice(case)
        if not advice and self.fix is not None:
            advice = "set " + " and ".join(f"{key}: {_in_yaml(value)}" for key, value in self.fix.items())
        end = f"; {advice}" if advice else ""
        start, place = "teacher_model_name_or_path: " if case.is_teacher else "", _find_place(self.keys, case)
        return [
            Problem(rule=self.name, place=place, sentence=start + text + end, fix=self.fix, is_note=self.is_note)
            for text in ([found] if isinstance(found, str) else found)
        ]


def _find_place(keys: tuple[str, ...], case: Case) -> str:
    """Where the first of `keys` stands that somebody set; the file where all of them are defaults."""
    recipe, layout = case.recipe, case.layout
    for key in ("teacher_model_name_or_path", *keys) if case.is_teacher else keys:
        if key in recipe.places:
            return recipe.places[key]
        if layout is not None and layout.place_of(key) != layout.source:
            return layout.place_of(key)
    of_layout = layout is not None and all(key not in recipe_keys() for key in keys[:1])
    return layout.source if of_layout else recipe.path


def _in_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def layout_rule(name: str, *keys: str, **others: Any) -> Rule:
    """A rule on the layout."""
    return Rule(name=name, keys=keys, needs=("layout",), **others)


def model_rule(name: str, *keys: str, **others: Any) -> Rule:
    """A rule on the model."""
    return Rule(name=name, keys=keys, needs=("model",), **others)


def model_layout_rule(name: str, *keys: str, **others: Any) -> Rule:
    """A rule on the model under a layout."""
    return Rule(name=name, keys=keys, needs=("layout", "model"), **others)


def no_effect(key: str, without: str, when: Callable[[Case], object], *reads: str, is_note: bool = False) -> Rule:
    """A rule: `key` has no effect; `without` says why, and what would give it one."""
    return Rule(
        name=f"{key} without effect: {without}",
        keys=(key, *reads),
        when=lambda case: is_set(key)(case) and when(case),
        message=f"{key} has no effect {without}",
        advice=f"set it, or remove {key}" if without.startswith("without") else f"remove {key}",
        is_note=is_note,
    )


def is_set(key: str, to: Any = ...) -> Callable[[Case], bool]:
    """A condition: `key` has the value `to`, or without one any other value than its default."""

    def check(case: Case) -> bool:
        value = case[key]
        return bool(value != recipe_keys()[key].default) if to is ... else bool(value == to)

    return check


def both(*conditions: Callable[[Case], object]) -> Callable[[Case], bool]:
    """A condition: all of `conditions` hold."""
    return lambda case: all(condition(case) for condition in conditions)


def has_tp(case: Case) -> bool:
    return case.layout.tensor_parallel_size > 1


def has_sp(case: Case) -> bool:
    return case.layout.sequence_parallel_size > 1


def has_ep(case: Case) -> bool:
    return case.layout.expert_parallel_size > 1


def has_pp(case: Case) -> bool:
    return case.layout.pipeline_parallel_size > 1


def is_fsdp1(case: Case) -> bool:
    return case.layout.layout == "fsdp1"


def has_fp8(case: Case) -> bool:
    return case.layout.fp8 is not None


def is_quantized(case: Case) -> bool:
    return case.quantization.bits is not None


BF16 = {"mixed_precision": "bf16"}


def read_model_facts(
    config: Mapping[str, Any], name: str, tokens: int | None = None, *, vision: bool = False
) -> ModelFacts:
    """The facts of a config: the text model's part of config.json or `to_dict()`, with the family's defaults.

    Args:
        config: Keys as in config.json.
        name: The model, for messages.
        tokens: Number of tokens of the tokenizer, where it was read.
        vision: Whether it is the language model of a vision-language one.

    Raises:
        UserError: For every size or name in the config with which no model can be built.
    """
    refuse_wrong_values(config, name)
    positions, heads = config.get("max_position_embeddings"), _size(config, "num_attention_heads")
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
        positions=positions if isinstance(positions, int) else None,
        experts=count_experts(config),
        chosen=count_chosen(config),
        expert_width=_size(config, "moe_intermediate_size", "intermediate_size"),
        layer_types=frozenset(map(str, config.get("layer_types") or ())),
        quantization=read_stored_quantization(config.get("quantization_config"), name),
        published=read_published_form(config.get("quantization_config")),
        tokens=tokens,
        vision=vision,
    )


def refuse_wrong_values(config: Any, name: str) -> None:
    """Raises `UserError` for every size or name in (a part of) a config with which no model can be built."""
    problems = []
    for key, largest in {**LARGEST_SIZES, **LARGEST_COUNTS}.items():
        value = config.get(key)
        least = 0 if key in LARGEST_COUNTS else 1
        if value is not None and not _is_whole(value, least, largest) and not _are_sizes(value):
            problems.append(f"{name}: {key}: {_shorten(value)}: a whole number from {least} to {largest:,} is expected")
    for key, (kinds, expected) in KINDS.items():
        if config.get(key) is not None and not isinstance(config[key], kinds):
            problems.append(f"{name}: {key}: {_shorten(config[key])}: {expected} is expected")
    activation = config.get("hidden_act", config.get("hidden_activation"))
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        problems.append(
            f"{name}: hidden_act: {_shorten(activation)}: no activation of transformers; for example silu is expected"
        )
    if problems:
        raise UserError.of(problems)


def names_vision_language(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a vision-language model, by the class that it names.

    >>> names_vision_language({"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}})
    True
    """
    names = config.get("architectures")
    is_listed = isinstance(names, list) and any(str(name).endswith("ForConditionalGeneration") for name in names)
    return is_listed and "vision_config" in config


def count_experts(config: Mapping[str, Any]) -> int:
    """The routed experts of a layer by the config; 0 for a dense model."""
    return _size(config, *EXPERT_COUNTS) or _size(_experts_section(config), *EXPERT_COUNTS)


def count_chosen(config: Mapping[str, Any]) -> int:
    """The routed experts of one token by the config; 0 where it does not say."""
    return _size(config, *CHOSEN_COUNTS) or _size(_experts_section(config), *CHOSEN_COUNTS)


def _experts_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where DBRX's config has the sizes of its experts."""
    section = config.get("ffn_config")
    return section if isinstance(section, Mapping) else {}


def _size(config: Mapping[str, Any], *keys: str) -> int:
    """The first of `keys` that has a number; a list, which has one for each layer, counts by its largest."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, list | tuple) and value and all(isinstance(each, int) for each in value):
            value = max(value)
        if isinstance(value, int | float) and value:
            return int(value)
    return 0


def _are_sizes(value: Any) -> bool:
    """Whether it is a list of one size for each layer."""
    return isinstance(value, list | tuple) and bool(value) and all(_is_whole(each, 0, 1 << 24) for each in value)


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
    """Whether torch.compile finds a C compiler. Cached: searching the PATH for every parameter takes milliseconds."""
    return shutil.which("cc") is not None


def adopt_quantization(recipe: Recipe, facts: ModelFacts) -> Recipe:
    """`recipe` with the keys that say how its base is quantized, where the files of the base already are."""
    return recipe if facts.quantization is None else replace(recipe, quantization=facts.quantization)


def with_recipe_keys(layout: Sharding, recipe: Recipe) -> Sharding:
    """`layout` with the keys of it that the recipe has."""
    return replace(
        layout,
        expert_parallel_size=recipe.model.expert_parallel_size,
        pipeline_parallel_size=recipe.model.pipeline_parallel_size,
        pipeline_schedule=recipe.model.pipeline_schedule,
    )
