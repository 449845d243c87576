"""A model's tensors, counted from its config.json: their names and shapes, by decoder layer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.facts import (
    LARGEST_COUNTS,
    LARGEST_SIZES,
    ModelFacts,
    find_layer_class,
    names_vision_language,
    read_model_facts,
    refuse_wrong_values,
)
from finetune.config.families import Family, MixtureKeys, find_family
from finetune.config.multi_token import count_predicting_layers
from finetune.config.pretrained import SCORING_CLASS, find_config_file
from finetune.config.schema import Model
from finetune.constants import SCORES, VALUE_WEIGHT, Names, Shape
from finetune.errors import UserError
from finetune.files.json_files import load_json

if TYPE_CHECKING:
    from finetune.models.trace import Trace
    from finetune.plan.activations import Computation


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One parameter: transformers' name and its shape."""

    name: str
    shape: Shape

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


def gated_linears(mlp: str, intermediate: int, hidden: int) -> dict[str, tuple[int, int]]:
    """The linear layers [out, in] of the MLP named `mlp`."""
    into = (intermediate, hidden)
    return {
        f"{mlp}.gate_proj": into,
        f"{mlp}.up_proj": into,
        f"{mlp}.down_proj": (hidden, intermediate),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The sizes of a layer's routed experts."""

    experts: int
    chosen: int  # of a token
    intermediate: int  # of one expert
    shared: int  # of the expert that every token passes; 0: none
    layers: frozenset[int]  # the decoder layers that have them; the others are dense
    keys: MixtureKeys

    def expert_weights(self, mlp: str, hidden: int) -> tuple[TensorShape, ...]:
        """The weights of all routed experts of the layer whose MLP is named `mlp`."""
        shapes = {
            "gate_up_proj": (2 * self.intermediate, hidden),
            "down_proj": (hidden, self.intermediate),
        }
        if self.keys.has_biases:  # such families keep [in, out]
            shapes = {name: (width_in, width_out) for name, (width_out, width_in) in shapes.items()}
        return tuple(
            TensorShape(f"{mlp}.experts.{name}", (self.experts, *shape))
            for name, shape in shapes.items()
        )

    def expert_biases(self, mlp: str, hidden: int) -> tuple[TensorShape, ...]:
        """The biases of all routed experts."""
        if not self.keys.has_biases:
            return ()
        widths = {"gate_up_proj_bias": 2 * self.intermediate, "down_proj_bias": hidden}
        return tuple(
            TensorShape(f"{mlp}.experts.{name}", (self.experts, width))
            for name, width in widths.items()
        )

    def router(self, mlp: str, hidden: int) -> tuple[TensorShape, ...]:
        """The layer that chooses the experts of a token."""
        weight = TensorShape(f"{mlp}.{self.keys.router}.weight", (self.experts, hidden))
        bias = TensorShape(f"{mlp}.{self.keys.router}.bias", (self.experts,))
        return (weight, bias) if self.keys.has_biases else (weight,)

    def shared_linears(self, mlp: str, hidden: int) -> dict[str, tuple[int, int]]:
        """The linear layers of the expert that every token passes."""
        if not self.shared:
            return {}
        if self.keys.shared is None:  # several, without a gate
            return gated_linears(f"{mlp}.shared_experts", self.shared, hidden)
        gate = {f"{mlp}.shared_expert_gate": (1, hidden)}
        return gated_linears(f"{mlp}.shared_expert", self.shared, hidden) | gate


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """The sizes of multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1):
    queries, keys and values come out of narrow latents; a part of each query and key is rotated,
    the other is not.
    """

    query_rank: int | None  # None: queries come from the hidden state
    key_value_rank: int
    rotated: int  # of a head's query and key; all heads share that of the key
    plain: int  # the rest of a head's query and key
    value: int  # of a head

    @property
    def query_key_size(self) -> int:
        """Size of a head's query, which is also the size of its key."""
        return self.plain + self.rotated

    def linears(self, attention: str, hidden: int, heads: int) -> dict[str, tuple[int, int]]:
        """The linear layers [out, in] of the attention named `attention`."""
        queries = heads * self.query_key_size
        shapes = {"q_proj": (queries, hidden)}
        if self.query_rank is not None:
            shapes = {"q_a_proj": (self.query_rank, hidden), "q_b_proj": (queries, self.query_rank)}
        shapes |= {
            "kv_a_proj_with_mqa": (self.key_value_rank + self.rotated, hidden),
            "kv_b_proj": (heads * (self.plain + self.value), self.key_value_rank),
            "o_proj": (hidden, heads * self.value),
        }
        return {f"{attention}.{name}": shape for name, shape in shapes.items()}

    def norms(self, attention: str) -> tuple[TensorShape, ...]:
        """The norms of the latents."""
        ranks = {"q_a_layernorm": self.query_rank, "kv_a_layernorm": self.key_value_rank}
        return tuple(
            TensorShape(f"{attention}.{name}.weight", (rank,))
            for name, rank in ranks.items()
            if rank
        )


def read_mixture(family: Family, sizes: Mapping[str, Any]) -> Mixture | None:
    """The routed experts of a config with these `sizes`; None where the family is dense, or no
    layer has any.
    """
    if family.mixture is None:
        return None
    keys = family.mixture
    layers = frozenset(range(sizes["num_hidden_layers"]))
    if keys.some_are_dense:
        dense = sizes.get("mlp_only_layers") or ()
        every = sizes.get("decoder_sparse_step") or 1
        layers = frozenset(
            index for index in layers if index not in dense and (index + 1) % every == 0
        )
    if keys.first_are_dense:
        layers = frozenset(index for index in layers if index >= sizes["first_k_dense_replace"])
    if not layers or not sizes[keys.experts]:
        return None
    shared = sizes[keys.shared] if keys.shared else 0
    if keys.shared_count:
        shared = sizes[keys.intermediate] * sizes[keys.shared_count]
    return Mixture(
        experts=sizes[keys.experts],
        chosen=sizes["num_experts_per_tok"],
        intermediate=sizes[keys.intermediate],
        shared=shared,
        layers=layers,
        keys=keys,
    )


def read_latent_attention(
    family: Family, config: Mapping[str, Any], sizes: Mapping[str, Any]
) -> LatentAttention | None:
    """The latent attention of a `config` with these `sizes`, defaults included; None where the
    family's is not.
    """
    if not family.latent_attention:
        return None
    return LatentAttention(
        query_rank=config.get("q_lora_rank", sizes["q_lora_rank"]),  # null: no latent
        key_value_rank=sizes["kv_lora_rank"],
        rotated=sizes["qk_rope_head_dim"],
        plain=sizes["qk_nope_head_dim"],
        value=sizes["v_head_dim"],
    )


REQUIRED_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes of a Llama-style model. Returned by `read_architecture`."""

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    query_key_value_bias: bool
    output_bias: bool
    mlp_bias: bool
    family: Family
    facts: ModelFacts
    mixture: Mixture | None = None
    latent: LatentAttention | None = None
    query_key_norm: bool = False  # of the kind that the family has
    attention_dropout: float = 0.0
    activation: str = "silu"
    beside: tuple[tuple[TensorShape, ...], ...] = ()  # the other parts of a vision-language model
    prefix: str = "model"  # the name of the language model
    # for multi-token prediction: they are no parameters, but the export has the base's
    predicting_layers: int = 0
    # of a document, where the output head computes these in place of a vocabulary's
    scores: int = 0
    has_critic: bool = False  # a vector beside the output head, which no export holds

    @property
    def is_uniform(self) -> bool:
        """Whether all decoder layers have the same tensors."""
        return self.mixture is None

    @property
    def head_name(self) -> str:
        """The name of the output head's weight; a tied one has it beside the embedding's."""
        return f"{SCORES}.weight" if self.scores else "lm_head.weight"

    @property
    def head_rows(self) -> int:
        """The numbers that the output head computes for a token."""
        return self.scores or self.vocabulary

    @property
    def layer_names(self) -> str:
        """The number of decoder layers, and their class."""
        return f"{self.layers} x {find_layer_class(self.model_type)}"

    @property
    def attending_layers(self) -> int:
        """The decoder layers in which tokens are compared with each other."""
        return self.layers

    def trace(self, computation: "Computation") -> "Trace | None":
        """The tensors of the decoder layers, traced in their own code; None where the formulas of
        activations.py know them.
        """
        return None

    @property
    def text_names(self) -> Names:
        """The beginnings of the names of what works on text."""
        return (f"{self.prefix}.", "lm_head.") if self.beside else ("",)

    @property
    def query_width(self) -> int:
        """Width of all query heads together; but for latent attention also that of the attention's
        output.
        """
        return self.heads * (
            self.latent.query_key_size if self.latent is not None else self.head_size
        )

    @property
    def mean_head_size(self) -> float:
        """The mean size of a head's key and value."""
        if self.latent is not None:
            return (self.latent.query_key_size + self.latent.value) / 2
        return self.head_size

    @property
    def rotated_size(self) -> int:
        """Numbers of a head's query that are rotated, at most."""
        if self.latent is not None:
            return self.latent.rotated
        return self.head_size

    @property
    def key_value_width(self) -> int:
        """Width of all key heads together, and of all value heads together."""
        return self.key_value_heads * self.head_size

    @property
    def embedding(self) -> TensorShape:
        """The input embedding."""
        return TensorShape(f"{self.prefix}.embed_tokens.weight", (self.vocabulary, self.hidden))

    @property
    def tail(self) -> tuple[TensorShape, ...]:
        """The final norm, the output head where it is a tensor of its own, and the critic."""
        norm = TensorShape(f"{self.prefix}.norm.weight", (self.hidden,))
        if self.tied:
            return (norm, *self.critic)
        head = TensorShape(self.head_name, (self.head_rows, self.hidden))
        return (norm, head, *self.critic)

    @property
    def critic(self) -> tuple[TensorShape, ...]:
        """The critic's vector, where there is one."""
        if not self.has_critic:
            return ()
        return (TensorShape(f"lm_head.{VALUE_WEIGHT}", (self.hidden,)),)

    def linears(self, layer: int = 0) -> tuple[TensorShape, ...]:
        """The weights [out, in] of the linear layers of decoder layer `layer`."""
        attention = f"{self.prefix}.layers.{layer}.self_attn"
        mlp = f"{self.prefix}.layers.{layer}.mlp"
        if self.latent is not None:
            attended = self.latent.linears(attention, self.hidden, self.heads)
        else:
            widths = {
                "q_proj": self.query_width,
                "k_proj": self.key_value_width,
                "v_proj": self.key_value_width,
            }
            if self.family.fused:
                widths = {"qkv_proj": sum(widths.values())}
            attended = {
                f"{attention}.{name}": (width, self.hidden) for name, width in widths.items()
            }
            attended |= {f"{attention}.o_proj": (self.hidden, self.query_width)}
        if self.mixture is not None and self.has_experts(layer):
            passed = self.mixture.shared_linears(mlp, self.hidden)
        elif self.family.fused:
            passed = {f"{mlp}.gate_up_proj": (2 * self.intermediate, self.hidden)}
            passed |= {f"{mlp}.down_proj": (self.hidden, self.intermediate)}
        else:
            passed = gated_linears(mlp, self.intermediate, self.hidden)
        return tuple(
            TensorShape(f"{name}.weight", shape) for name, shape in (attended | passed).items()
        )

    def adaptable(self) -> Mapping[str, tuple[TensorShape, ...]]:
        """The weights that all-linear adapts, by their FSDP unit."""
        return {f"layer {index}": self.linears(index) for index in range(self.layers)}

    def has_experts(self, layer: int) -> bool:
        """Whether decoder layer `layer` routes its tokens to experts."""
        return self.mixture is not None and layer in self.mixture.layers

    @property
    def widest_layer(self) -> int:
        """A decoder layer with as many parameters as any."""
        if self.mixture is not None:
            return min(self.mixture.layers, default=0)
        return 0

    @property
    def dense_layer(self) -> int:
        """The first decoder layer without experts, of a mixture that has one; else the first."""
        return next((index for index in range(self.layers) if not self.has_experts(index)), 0)

    def experts(self, layer: int) -> tuple[TensorShape, ...]:
        """The weights of all routed experts of decoder layer `layer`."""
        if self.mixture is None or not self.has_experts(layer):
            return ()
        return self.mixture.expert_weights(f"{self.prefix}.layers.{layer}.mlp", self.hidden)

    def quantizable(self, layer: int) -> tuple[TensorShape, ...]:
        """The weights of decoder layer `layer` that a quantized base keeps in few bits: those of
        linear layers and experts. Experts that the files hold quantized are dequantized instead.
        """
        experts = self.experts(layer) if self.facts.quantization is None else ()
        return (*self.linears(layer), *experts)

    def expert_widths(self, weights: TensorShape) -> tuple[int, int]:
        """Returns (out, in) of one expert's part of `weights`."""
        first, second = weights.shape[1:]
        if self.mixture is not None and self.mixture.keys.has_biases:
            return (second, first)
        return (first, second)

    def routed(self, layer: int) -> tuple[TensorShape, ...]:
        """All that belongs to the routed experts of decoder layer `layer`, biases too."""
        if self.mixture is None or not self.has_experts(layer):
            return ()
        return (
            *self.experts(layer),
            *self.mixture.expert_biases(f"{self.prefix}.layers.{layer}.mlp", self.hidden),
        )

    def layer(self, index: int = 0) -> tuple[TensorShape, ...]:
        """Every parameter of decoder layer `index`, in the order of the modules."""
        layer = f"{self.prefix}.layers.{index}"
        attention = []
        if self.family.sinks:
            attention = [TensorShape(f"{layer}.self_attn.sinks", (self.heads,))]
        mlp: list[TensorShape] = []
        for linear in self.linears(index):
            (mlp if ".mlp." in linear.name else attention).extend(self._with_bias(linear))
        if self.mixture is not None and self.has_experts(index):
            mlp += [*self.mixture.router(f"{layer}.mlp", self.hidden), *self.routed(index)]
        norms = [
            TensorShape(f"{layer}.{norm}.weight", (self.hidden,)) for norm in self.family.norms
        ]
        return (*attention, *self._query_key_norms(f"{layer}.self_attn"), *mlp, *norms)

    def tensors(self) -> Iterator[TensorShape]:
        """Every parameter once; a tied head is the embedding."""
        yield self.embedding
        for index in range(self.layers):
            yield from self.layer(index)
        yield from self.tail
        for part in self.beside:
            yield from part

    def _with_bias(self, linear: TensorShape) -> Iterator[TensorShape]:
        yield linear
        if linear.name.endswith(("q_b_proj.weight", "kv_b_proj.weight")) or (
            self.latent is not None and linear.name.endswith(".q_proj.weight")
        ):
            return
        has_bias = self.query_key_value_bias
        if linear.name.endswith("o_proj.weight"):
            has_bias = self.output_bias
        elif ".mlp." in linear.name:
            has_bias = self.mlp_bias
        if has_bias:
            yield TensorShape(linear.name.removesuffix("weight") + "bias", (linear.shape[0],))

    def _query_key_norms(self, attention: str) -> Iterator[TensorShape]:
        if self.latent is not None:
            yield from self.latent.norms(attention)
        if not self.query_key_norm:
            return
        per_head = self.family.query_key_norm == "head"
        query = self.head_size if per_head else self.query_width
        key = self.head_size if per_head else self.key_value_width
        yield TensorShape(f"{attention}.q_norm.weight", (query,))
        yield TensorShape(f"{attention}.k_norm.weight", (key,))

    @property
    def parameters(self) -> int:
        """Numbers in the whole model; a tied head counts once."""
        return sum(tensor.numel for tensor in self.tensors())

    @property
    def carried_parameters(self) -> int:
        """Numbers that an export carries over from the base.

        A layer for multi-token prediction has a decoder layer, norms, a projection of two hidden
        states, and the copies of embedding and head of DeepSeek and GLM.
        """
        layer = sum(tensor.numel for tensor in self.layer(self.widest_layer))
        projection = 2 * self.hidden**2
        norms = 3 * self.hidden
        copies = 2 * self.vocabulary * self.hidden
        return self.predicting_layers * (layer + projection + norms + copies)

    @property
    def idle_parameters(self) -> int:
        """Numbers that do not work on a given token: the routed experts that it does not choose,
        and what text does not reach.
        """
        beside = sum(tensor.numel for part in self.beside for tensor in part)
        if self.mixture is None:
            return beside
        routed = sum(tensor.numel for index in range(self.layers) for tensor in self.routed(index))
        return beside + routed - routed * self.mixture.chosen // self.mixture.experts

    @property
    def mlp_width(self) -> int:
        """The intermediate size of one layer; of a mixture the sum over the experts of a token."""
        if self.mixture is None:
            return self.intermediate
        return self.mixture.chosen * self.mixture.intermediate + self.mixture.shared


def find_config(model: Model) -> tuple[dict[str, Any], str]:
    """The model's config.json, and where it was found, for errors: inline, a local folder, or one
    file of the hub.

    Raises `UserError` where there is none.
    """
    if model.model_config is not None:
        return split_config(model.model_config, model.drop_vision), "model_config"
    path = find_config_file(str(model.model_name_or_path), model.model_revision)
    return split_config(load_json(path), model.drop_vision), str(path)


WHOLE = "vision_language_config"  # the key under which `split_config` keeps all of a config.json


def split_config(config: Mapping[str, Any], drop_vision: bool = False) -> dict[str, Any]:
    """The config of the language model alone, from a config.json.

    For a vision-language model the key WHOLE holds the complete config, or None with `drop_vision`.

    >>> config = {
    ...     "model_type": "qwen2_5_vl",
    ...     "architectures": ["VForConditionalGeneration"],
    ...     "vision_config": {},
    ... }
    >>> split_config(config)["model_type"]
    'qwen2_5_vl_text'
    """
    text = config.get("text_config")
    own = {**text} if isinstance(text, dict) else {**config}
    if not names_vision_language(config):
        return own
    # Qwen2.5-VL is published without a text_config
    if not isinstance(text, dict) or "model_type" not in text:
        own["model_type"] = f"{config.get('model_type')}_text"
    if "tie_word_embeddings" in config:
        own["tie_word_embeddings"] = config["tie_word_embeddings"]
    return own | {WHOLE: None if drop_vision else config}


def set_scores(config: Mapping[str, Any], scores: Names) -> dict[str, Any]:
    """The `config` of a model whose head computes `scores`; transformers builds its class by it
    where the family is in no table.
    """
    if not scores:
        return {**config}
    head = {
        "architectures": [SCORING_CLASS],
        "num_labels": len(scores),
        "tie_word_embeddings": False,
    }
    return {**config, **head}


def read_scores(config: Mapping[str, Any]) -> int:
    """The scores that the head of `set_scores` computes; 0: it has a vocabulary's."""
    if config.get("architectures") == [SCORING_CLASS]:
        return int(config["num_labels"])
    return 0


def read_reward_model(name: str) -> Architecture:
    """The architecture of a reward model.

    Raises `UserError` where it scores no text, or gives more than one score.
    """
    try:
        config, where = find_config(Model(model_name_or_path=name))
    except UserError as error:
        raise UserError(f"rewards: {error}") from None
    classes = config.get("architectures") or ()
    if not any(each.endswith(SCORING_CLASS) for each in classes):
        raise UserError(
            f"rewards: {name}: is a {', '.join(classes) or config.get('model_type')}, which scores "
            f"no text; name a model of one score (...{SCORING_CLASS}), as method: reward exports it"
        )
    # 2 is transformers' own default
    labels = len(config.get("id2label") or range(config.get("num_labels", 2)))
    if labels != 1:
        raise UserError(
            f"rewards: {name}: gives {labels} scores, those of classes; name a model of one score"
        )
    return read_architecture(set_scores(config, ("reward",)), where)


def find_local_facts(model: Model) -> ModelFacts | None:
    """The facts of a known family's model whose config.json is at hand: without torch or the
    network.
    """
    if model.model_config is None and not Path(str(model.model_name_or_path)).is_dir():
        return None
    try:
        config, where = find_config(model)
        if _is_in_table(config):
            return _read_known_facts(_read_sizes(config, where), where)
        return None
    except UserError:  # transformers may know the family, or says better what is wrong
        return None


def _is_in_table(config: Mapping[str, Any]) -> bool:
    """Whether the table gives the layers of the language model, which all have the same sizes."""
    has_lists = any(
        isinstance(config.get(key), list | tuple) for key in (*LARGEST_SIZES, *LARGEST_COUNTS)
    )
    return bool(find_family(str(config.get("model_type"))).defaults) and not has_lists


def _read_sizes(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config with the family's defaults. Raises `UserError` where a size is missing."""
    defaults = find_family(str(config.get("model_type"))).defaults
    # None: tower dropped
    given = {key: value for key, value in config.items() if value is not None or key == WHOLE}
    sizes = {**defaults, **given}
    missing = [key for key in REQUIRED_SIZES if not isinstance(sizes.get(key), int)]
    if missing:
        raise UserError(
            f"{where}: {', '.join(missing)}: missing or not a number; name the config.json of a "
            "transformers model"
        )
    return sizes


def _read_known_facts(sizes: Mapping[str, Any], where: str) -> ModelFacts:
    return read_model_facts(sizes, where, vision=WHOLE in sizes)


def read_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """The architecture that a config.json describes; errors name `where`.

    A family in the table is read without torch. Another family, and the parts of a vision-language
    model beside its language model, are built by transformers.

    Raises `UserError` where a size is missing, or transformers cannot build the model.

    >>> config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 172,
    ...           "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4,
    ...           "vocab_size": 512, "tie_word_embeddings": True}
    >>> read_architecture(config, "stories260k/config.json").parameters
    260032
    """
    with_towers = config.get(WHOLE)
    for part in (config, with_towers or {}, (with_towers or {}).get("vision_config") or {}):
        refuse_wrong_values(part, where)
    if not _is_in_table(config):
        from finetune.plan.built import read_built_architecture  # which imports torch

        own = {key: value for key, value in config.items() if key != WHOLE}
        return read_built_architecture(own if with_towers is None else with_towers, where)
    sizes = _read_sizes(config, where)
    facts = _read_known_facts(sizes, where)
    family = find_family(str(config["model_type"]))
    prefix = "model"
    tied = bool(config.get("tie_word_embeddings", family.tied))
    beside: tuple[tuple[TensorShape, ...], ...] = ()
    if with_towers is not None:
        from finetune.plan.built import read_parts

        prefix, beside, tied = read_parts(with_towers, where)
    heads = sizes["num_attention_heads"]

    def flag(fact: bool | str) -> bool:
        if isinstance(fact, str):
            return bool(config.get(fact, family.attention_bias))
        return fact

    return Architecture(
        model_type=facts.model_type,
        hidden=sizes["hidden_size"],
        intermediate=sizes["intermediate_size"],
        layers=sizes["num_hidden_layers"],
        heads=heads,
        key_value_heads=sizes.get("num_key_value_heads") or heads,
        head_size=sizes.get("head_dim") or sizes["hidden_size"] // heads,
        vocabulary=sizes["vocab_size"],
        tied=tied,
        query_key_value_bias=flag(family.query_key_value_bias),
        output_bias=flag(
            family.query_key_value_bias if family.output_bias is None else family.output_bias
        ),
        mlp_bias=flag(family.mlp_bias),
        family=family,
        facts=facts,
        mixture=read_mixture(family, sizes),
        latent=read_latent_attention(family, config, sizes),
        query_key_norm=family.query_key_norm is not None
        and (family.query_key_norm_key is None or bool(config.get(family.query_key_norm_key))),
        attention_dropout=config.get("attention_dropout") or 0.0,
        activation=config.get("hidden_act") or config.get("hidden_activation") or "silu",
        beside=beside,
        prefix=prefix,
        predicting_layers=count_predicting_layers(config),
        scores=read_scores(config),
    )
