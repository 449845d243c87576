"""The names and shapes of a model's parameters by decoder layer, read from its config.json.

`config/families.py` has a table of families whose layers `Architecture` describes by formulas. For
any other family, `built.py` builds transformers' own class.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.facts import (
    ATTENTION_DROPOUTS,
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
    """One parameter: the name that transformers gives it, and its shape."""

    name: str
    shape: Shape

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


def gated_linears(mlp: str, intermediate: int, hidden: int) -> dict[str, tuple[int, int]]:
    """Lists the linear layers of a gated MLP: name -> [out, in]. `mlp` is the MLP's name."""
    gate_or_up = (intermediate, hidden)
    return {
        f"{mlp}.gate_proj": gate_or_up,
        f"{mlp}.up_proj": gate_or_up,
        f"{mlp}.down_proj": (hidden, intermediate),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The sizes of the routed experts in a decoder layer, and the layers that have them."""

    experts: int  # routed experts of a layer
    chosen: int  # experts that the router chooses for a token
    intermediate: int  # intermediate size of one expert
    shared: int  # intermediate size of the expert that every token passes; 0 without one
    layers: frozenset[int]  # the decoder layers with experts; all others are dense
    keys: MixtureKeys

    def expert_weights(self, mlp: str, hidden: int) -> tuple[TensorShape, ...]:
        """Lists the weights of all routed experts of one layer: [experts, out, in].

        They are [experts, in, out] in families with biases. `mlp` is the name of the layer's MLP.
        """
        shapes = {
            "gate_up_proj": (2 * self.intermediate, hidden),
            "down_proj": (hidden, self.intermediate),
        }
        if self.keys.has_biases:
            shapes = {name: (width_in, width_out) for name, (width_out, width_in) in shapes.items()}
        return tuple(
            TensorShape(f"{mlp}.experts.{name}", (self.experts, *shape))
            for name, shape in shapes.items()
        )

    def expert_biases(self, mlp: str, hidden: int) -> tuple[TensorShape, ...]:
        """Lists the biases of all routed experts of one layer; empty in families without them."""
        if not self.keys.has_biases:
            return ()
        widths = {"gate_up_proj_bias": 2 * self.intermediate, "down_proj_bias": hidden}
        return tuple(
            TensorShape(f"{mlp}.experts.{name}", (self.experts, width))
            for name, width in widths.items()
        )

    def router(self, mlp: str, hidden: int) -> tuple[TensorShape, ...]:
        """Lists the parameters of the router, the linear layer that chooses a token's experts."""
        weight = TensorShape(f"{mlp}.{self.keys.router}.weight", (self.experts, hidden))
        bias = TensorShape(f"{mlp}.{self.keys.router}.bias", (self.experts,))
        return (weight, bias) if self.keys.has_biases else (weight,)

    def shared_linears(self, mlp: str, hidden: int) -> dict[str, tuple[int, int]]:
        """Lists the linear layers of the shared expert: name -> [out, in].

        Every token passes that expert. Empty if the family has none.
        """
        if not self.shared:
            return {}
        if self.keys.shared is None:  # several shared experts in one MLP, without a gate
            return gated_linears(f"{mlp}.shared_experts", self.shared, hidden)
        gate = {f"{mlp}.shared_expert_gate": (1, hidden)}
        return gated_linears(f"{mlp}.shared_expert", self.shared, hidden) | gate


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """The sizes of multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    Queries, keys and values are projected from narrow latents. RoPE rotates only a part of each
    query and key.
    """

    query_rank: int | None  # size of the queries' latent; None: queries come from the hidden state
    key_value_rank: int  # size of the latent of keys and values
    rotated: int  # size of the rotated part of a head's query and key; heads share that key part
    plain: int  # size of the rest of a head's query and key
    value: int  # size of a head's value

    @property
    def query_key_size(self) -> int:
        """The size of a head's query, which is also the size of a head's key."""
        return self.plain + self.rotated

    def linears(self, attention: str, hidden: int, heads: int) -> dict[str, tuple[int, int]]:
        """Lists the linear layers of the attention: name -> [out, in].

        `attention` is the name of the attention module.
        """
        query_width = heads * self.query_key_size
        if self.query_rank is None:
            shapes = {"q_proj": (query_width, hidden)}
        else:
            shapes = {
                "q_a_proj": (self.query_rank, hidden),
                "q_b_proj": (query_width, self.query_rank),
            }
        shapes |= {
            "kv_a_proj_with_mqa": (self.key_value_rank + self.rotated, hidden),
            "kv_b_proj": (heads * (self.plain + self.value), self.key_value_rank),
            "o_proj": (hidden, heads * self.value),
        }
        return {f"{attention}.{name}": shape for name, shape in shapes.items()}

    def norms(self, attention: str) -> tuple[TensorShape, ...]:
        """Lists the weights of the latents' norms. `attention` is the attention module's name."""
        ranks = {"q_a_layernorm": self.query_rank, "kv_a_layernorm": self.key_value_rank}
        return tuple(
            TensorShape(f"{attention}.{name}.weight", (rank,))
            for name, rank in ranks.items()
            if rank
        )


def read_mixture(family: Family, sizes: Mapping[str, Any]) -> Mixture | None:
    """Reads the sizes of the routed experts; None if the family is dense or no layer has experts.

    `sizes`: the config.json with the family's defaults.
    """
    if family.mixture is None:
        return None
    keys = family.mixture
    layers = frozenset(range(sizes["num_hidden_layers"]))
    if keys.some_are_dense:
        dense_layers = sizes.get("mlp_only_layers") or ()
        every = sizes.get("decoder_sparse_step") or 1
        layers = frozenset(
            index for index in layers if index not in dense_layers and (index + 1) % every == 0
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
    """Reads the sizes of latent attention; None if the family does not have it.

    `sizes`: the `config` with the family's defaults.
    """
    if not family.latent_attention:
        return None
    return LatentAttention(
        # In `sizes` the family's default replaces a null, but here null means: no latent.
        query_rank=config.get("q_lora_rank", sizes["q_lora_rank"]),
        key_value_rank=sizes["kv_lora_rank"],
        rotated=sizes["qk_rope_head_dim"],
        plain=sizes["qk_nope_head_dim"],
        value=sizes["v_head_dim"],
    )


REQUIRED_SIZES = (  # keys that config.json or the family's defaults must give
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes of a Llama-style model, and by them its parameters. Made by `read_architecture`."""

    model_type: str
    hidden: int
    intermediate: int
    layers: int  # number of decoder layers
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    tied: bool  # the output head is the embedding
    query_key_value_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    family: Family
    facts: ModelFacts
    mixture: Mixture | None = None  # None: the model is dense
    latent: LatentAttention | None = None
    query_key_norm: bool = False  # queries and keys are normalized, as `family.query_key_norm` says
    attention_dropout: float = 0.0
    activation: str = "silu"
    # the parameters of each part of a vision-language model besides the language model
    beside: tuple[tuple[TensorShape, ...], ...] = ()
    prefix: str = "model"  # the name of the language model within the model
    # Layers for multi-token prediction. They are not trained and not in `tensors`; an export copies
    # them from the base's files.
    predicting_layers: int = 0
    # how many scores of a document the output head computes; 0: it computes a vocabulary's logits
    scores: int = 0
    # what the class does to its head's scores before the softmax (`models/loss_chunks.py`)
    scales_logits: bool = False
    caps_logits: bool = False
    has_critic: bool = False  # a critic's vector next to the output head, which no export holds

    @property
    def is_uniform(self) -> bool:
        """Whether all decoder layers have the same tensors."""
        return self.mixture is None

    @property
    def head_name(self) -> str:
        """The name of the output head's weight, also of a tied one."""
        return f"{SCORES}.weight" if self.scores else "lm_head.weight"

    @property
    def head_rows(self) -> int:
        """How many numbers the output head computes for a token: logits or scores."""
        return self.scores or self.vocabulary

    @property
    def layer_names(self) -> str:
        """The number of decoder layers and their class, as the plan prints them."""
        return f"{self.layers} x {find_layer_class(self.model_type)}"

    @property
    def attending_layers(self) -> int:
        """The number of decoder layers in which tokens attend to each other."""
        return self.layers

    def trace(self, computation: "Computation") -> "Trace | None":
        """Traces the tensors that the decoder layers save, by running transformers' own code.

        None if the formulas of activations.py describe the layers.
        """
        return None

    @property
    def text_names(self) -> Names:
        """How the names of the parameters begin that work on text; "" begins every name."""
        return (f"{self.prefix}.", "lm_head.") if self.beside else ("",)

    @property
    def query_width(self) -> int:
        """The width of all query heads together.

        The attention's output has the same width, except in latent attention.
        """
        return self.heads * (
            self.latent.query_key_size if self.latent is not None else self.head_size
        )

    @property
    def mean_head_size(self) -> float:
        """The mean of the sizes of a head's key and of a head's value."""
        if self.latent is not None:
            return (self.latent.query_key_size + self.latent.value) / 2
        return self.head_size

    @property
    def rotated_size(self) -> int:
        """How many numbers of a head's query RoPE rotates, at most."""
        if self.latent is not None:
            return self.latent.rotated
        return self.head_size

    @property
    def key_value_width(self) -> int:
        """The width of all key heads together, which is also that of all value heads."""
        return self.key_value_heads * self.head_size

    @property
    def embedding(self) -> TensorShape:
        """The weight of the input embedding."""
        return TensorShape(f"{self.prefix}.embed_tokens.weight", (self.vocabulary, self.hidden))

    @property
    def tail(self) -> tuple[TensorShape, ...]:
        """The final norm, the output head unless it is tied, and the critic if there is one."""
        norm = TensorShape(f"{self.prefix}.norm.weight", (self.hidden,))
        if self.tied:
            return (norm, *self.critic)
        head = TensorShape(self.head_name, (self.head_rows, self.hidden))
        return (norm, head, *self.critic)

    @property
    def critic(self) -> tuple[TensorShape, ...]:
        """The critic's vector; empty without a critic."""
        if not self.has_critic:
            return ()
        return (TensorShape(f"lm_head.{VALUE_WEIGHT}", (self.hidden,)),)

    def linears(self, layer: int = 0) -> tuple[TensorShape, ...]:
        """The weights [out, in] of the linear layers of decoder layer `layer`."""
        attention = f"{self.prefix}.layers.{layer}.self_attn"
        mlp = f"{self.prefix}.layers.{layer}.mlp"
        if self.latent is not None:
            shapes = self.latent.linears(attention, self.hidden, self.heads)
        else:
            widths = {
                "q_proj": self.query_width,
                "k_proj": self.key_value_width,
                "v_proj": self.key_value_width,
            }
            if self.family.fused:
                widths = {"qkv_proj": sum(widths.values())}
            shapes = {f"{attention}.{name}": (width, self.hidden) for name, width in widths.items()}
            shapes |= {f"{attention}.o_proj": (self.hidden, self.query_width)}
        if self.mixture is not None and self.has_experts(layer):
            shapes |= self.mixture.shared_linears(mlp, self.hidden)
        elif self.family.fused:
            shapes |= {
                f"{mlp}.gate_up_proj": (2 * self.intermediate, self.hidden),
                f"{mlp}.down_proj": (self.hidden, self.intermediate),
            }
        else:
            shapes |= gated_linears(mlp, self.intermediate, self.hidden)
        return tuple(TensorShape(f"{name}.weight", shape) for name, shape in shapes.items())

    def adaptable(self) -> Mapping[str, tuple[TensorShape, ...]]:
        """The weights that all-linear adapts, by the FSDP unit that they are in."""
        return {f"layer {index}": self.linears(index) for index in range(self.layers)}

    def has_experts(self, layer: int) -> bool:
        """Whether decoder layer `layer` routes its tokens to experts."""
        return self.mixture is not None and layer in self.mixture.layers

    @property
    def widest_layer(self) -> int:
        """The index of a decoder layer with the most parameters."""
        if self.mixture is not None:
            return min(self.mixture.layers, default=0)
        return 0

    @property
    def dense_layer(self) -> int:
        """The index of the first decoder layer without experts; 0 if all layers have experts."""
        return next((index for index in range(self.layers) if not self.has_experts(index)), 0)

    @property
    def largest_layers(self) -> frozenset[int]:
        """The indexes of a layer with experts and of one without: one of them is a rank's largest.

        It is the layer without experts if many ranks share the experts.
        """
        return frozenset((self.widest_layer, self.dense_layer))

    def experts(self, layer: int) -> tuple[TensorShape, ...]:
        """The weights of all routed experts of decoder layer `layer`; empty in a dense layer."""
        if self.mixture is None or not self.has_experts(layer):
            return ()
        return self.mixture.expert_weights(f"{self.prefix}.layers.{layer}.mlp", self.hidden)

    def quantizable(self, layer: int) -> tuple[TensorShape, ...]:
        """The weights of decoder layer `layer` that a quantized base keeps in 4 or 8 bits.

        They are the weights of linear layers and of experts. Experts that the model's files hold
        quantized are dequantized when they are loaded, and not in the list.
        """
        experts = self.experts(layer) if self.facts.quantization is None else ()
        return (*self.linears(layer), *experts)

    def expert_widths(self, weights: TensorShape) -> tuple[int, int]:
        """The widths (out, in) of one expert's matrix; `weights` are all experts' matrices."""
        first, second = weights.shape[1:]
        if self.mixture is not None and self.mixture.keys.has_biases:  # [experts, in, out]
            return (second, first)
        return (first, second)

    def routed(self, layer: int) -> tuple[TensorShape, ...]:
        """All parameters of the routed experts of decoder layer `layer`: weights and biases."""
        if self.mixture is None or not self.has_experts(layer):
            return ()
        return (
            *self.experts(layer),
            *self.mixture.expert_biases(f"{self.prefix}.layers.{layer}.mlp", self.hidden),
        )

    def layer(self, index: int = 0) -> tuple[TensorShape, ...]:
        """Every parameter of decoder layer `index`, in the order of the modules."""
        layer = f"{self.prefix}.layers.{index}"
        attention: list[TensorShape] = []
        if self.family.sinks:
            attention.append(TensorShape(f"{layer}.self_attn.sinks", (self.heads,)))
        mlp: list[TensorShape] = []
        for linear in self.linears(index):
            if ".mlp." in linear.name:
                mlp += self._with_bias(linear)
            else:
                attention += self._with_bias(linear)
        if self.mixture is not None and self.has_experts(index):
            mlp += [*self.mixture.router(f"{layer}.mlp", self.hidden), *self.routed(index)]
        norms = [
            TensorShape(f"{layer}.{norm}.weight", (self.hidden,)) for norm in self.family.norms
        ]
        return (*attention, *self._query_key_norms(f"{layer}.self_attn"), *mlp, *norms)

    def tensors(self) -> Iterator[TensorShape]:
        """Yields every parameter once: a tied head is the embedding."""
        yield self.embedding
        for index in range(self.layers):
            yield from self.layer(index)
        yield from self.tail
        for part in self.beside:
            yield from part

    def _with_bias(self, linear: TensorShape) -> Iterator[TensorShape]:
        """Yields a linear layer's weight, then its bias if the layer has one."""
        yield linear
        # In latent attention the projections to heads never have a bias.
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
        """Yields the weights of the norms in the attention module named `attention`.

        They are the norms of latents and of queries and keys, as far as the model has them.
        """
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
        """The number of parameters of the whole model, in elements; a tied head counts once."""
        return sum(tensor.numel for tensor in self.tensors())

    @property
    def carried_parameters(self) -> int:
        """How many elements an export carries over from the base's files: those of the layers for
        multi-token prediction.

        Each has a decoder layer, three norms, a projection [hidden, 2 * hidden], and, as in
        DeepSeek and GLM, copies of embedding and head.
        """
        layer = sum(tensor.numel for tensor in self.layer(self.widest_layer))
        projection = 2 * self.hidden**2
        norms = 3 * self.hidden
        copies = 2 * self.vocabulary * self.hidden
        return self.predicting_layers * (layer + projection + norms + copies)

    @property
    def idle_parameters(self) -> int:
        """How many elements do no work on a text token.

        They are those of the routed experts that are not chosen for it, and the parts besides the
        language model.
        """
        beside = sum(tensor.numel for part in self.beside for tensor in part)
        if self.mixture is None:
            return beside
        routed = sum(tensor.numel for index in range(self.layers) for tensor in self.routed(index))
        return beside + routed - routed * self.mixture.chosen // self.mixture.experts

    @property
    def mlp_width(self) -> int:
        """The intermediate size of one layer; in a mixture, summed over a token's experts."""
        if self.mixture is None:
            return self.intermediate
        return self.mixture.chosen * self.mixture.intermediate + self.mixture.shared


def find_config(model: Model) -> tuple[dict[str, Any], str]:
    """Reads the language model's config.json, which is in the recipe, a local folder, or the hub.

    Raises `UserError` if there is none.

    Returns:
        The config as `split_config` returns it, with the recipe's attention dropout, and how errors
        name its place.
    """
    if model.model_config is not None:
        config: Any = model.model_config
        where = "model_config"
    else:
        path = find_config_file(str(model.model_name_or_path), model.model_revision)
        config = load_json(path)
        where = str(path)
    if model.attention_dropout is not None:
        dropout = dict.fromkeys(ATTENTION_DROPOUTS, model.attention_dropout)
        text = config.get("text_config")
        if isinstance(text, dict):
            config = config | {"text_config": text | dropout}
        else:
            config = config | dropout
    return split_config(config, model.drop_vision), where


WHOLE = "vision_language_config"  # the key under which `split_config` keeps the complete config


def split_config(config: Mapping[str, Any], drop_vision: bool = False) -> dict[str, Any]:
    """Returns the config of the language model, out of a complete config.json.

    For a vision-language model, the key WHOLE of the result holds the complete config; with
    `drop_vision` it holds None.

    >>> config = {
    ...     "model_type": "qwen2_5_vl",
    ...     "architectures": ["VForConditionalGeneration"],
    ...     "vision_config": {},
    ... }
    >>> split_config(config)["model_type"]
    'qwen2_5_vl_text'
    """
    text = config.get("text_config")
    language = {**text} if isinstance(text, dict) else {**config}
    if not names_vision_language(config):
        return language
    # Qwen2.5-VL is published without a text_config.
    if not isinstance(text, dict) or "model_type" not in text:
        language["model_type"] = f"{config.get('model_type')}_text"
    if "tie_word_embeddings" in config:
        language["tie_word_embeddings"] = config["tie_word_embeddings"]
    return language | {WHOLE: None if drop_vision else config}


def set_scores(config: Mapping[str, Any], scores: Names) -> dict[str, Any]:
    """Changes a config to that of a model whose head computes `scores` instead of logits.

    `read_scores` reads them back; for a family that is in no table, transformers builds the scoring
    class from this config. Without `scores` the config stays as it is.
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
    """Reads the number of scores that `set_scores` wrote; 0 if the head computes logits."""
    if config.get("architectures") == [SCORING_CLASS]:
        return int(config["num_labels"])
    return 0


def read_reward_model(name: str) -> Architecture:
    """Reads the architecture of the reward model `name`, a folder or a model of the hub.

    Raises `UserError` if its config cannot be read, it scores no text, or it gives more than one
    score.
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
    # a list of names, or a range of as many numbers; 2 is transformers' own default
    labels = len(config.get("id2label") or range(config.get("num_labels", 2)))
    if labels != 1:
        raise UserError(
            f"rewards: {name}: gives {labels} scores, those of classes; name a model of one score"
        )
    return read_architecture(set_scores(config, ("reward",)), where)


def find_local_facts(model: Model) -> ModelFacts | None:
    """Reads a model's facts if that needs neither torch nor the network; else returns None.

    The config.json has to be in the recipe or a local folder, and the family in the table.
    """
    if model.model_config is None and not Path(str(model.model_name_or_path)).is_dir():
        return None
    try:
        config, where = find_config(model)
        if _is_in_table(config):
            return _read_known_facts(_read_sizes(config, where), where)
        return None
    # None, because transformers may still be able to read the model, or has the better error
    except UserError:
        return None


def _is_in_table(config: Mapping[str, Any]) -> bool:
    """Whether the table of families describes the layers of the language model.

    It does not if the config lists sizes by layer: in the table all layers have the same sizes.
    """
    has_lists = any(
        isinstance(config.get(key), list | tuple) for key in (*LARGEST_SIZES, *LARGEST_COUNTS)
    )
    return bool(find_family(str(config.get("model_type"))).defaults) and not has_lists


def _read_sizes(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Adds the family's defaults for keys that the config lacks, or has as null.

    Raises `UserError` if a required size is missing.
    """
    defaults = find_family(str(config.get("model_type"))).defaults
    # WHOLE is kept even as None, which means a vision-language model without its tower.
    set_keys = {key: value for key, value in config.items() if value is not None or key == WHOLE}
    # two names of one number: transformers writes num_experts of published configs as the other
    for name, other_name in permutations(("num_experts", "num_local_experts")):
        if other_name in set_keys:
            set_keys.setdefault(name, set_keys[other_name])
    sizes = {**defaults, **set_keys}
    missing = [key for key in REQUIRED_SIZES if not isinstance(sizes.get(key), int)]
    if missing:
        raise UserError(
            f"{where}: {', '.join(missing)}: missing or not a number; name the config.json of a "
            "transformers model"
        )
    return sizes


def _read_known_facts(sizes: Mapping[str, Any], where: str) -> ModelFacts:
    """Reads the facts of a model in the table. `sizes`: as `_read_sizes` returns them."""
    return read_model_facts(sizes, where, vision=WHOLE in sizes)


def read_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Reads the architecture that a config describes.

    A family in the table is read without torch. transformers builds any other family, and the parts
    of a vision-language model besides its language model.

    Raises `UserError` if a size is missing, or transformers cannot build the model.

    Args:
        config: As `split_config` returns it.
        where: How errors name the config.

    >>> config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 172,
    ...           "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4,
    ...           "vocab_size": 512, "tie_word_embeddings": True}
    >>> read_architecture(config, "stories260k/config.json").parameters
    260032
    """
    with_towers = config.get(WHOLE)  # None for a text model, or with `drop_vision`
    for part in (config, with_towers or {}, (with_towers or {}).get("vision_config") or {}):
        refuse_wrong_values(part, where)
    if not _is_in_table(config):
        from finetune.plan.built import read_built_architecture  # which imports torch

        if with_towers is not None:
            return read_built_architecture(with_towers, where)
        language = {key: value for key, value in config.items() if key != WHOLE}
        return read_built_architecture(language, where)
    sizes = _read_sizes(config, where)
    facts = _read_known_facts(sizes, where)
    family = find_family(str(config["model_type"]))
    if with_towers is None:
        prefix = "model"
        tied = bool(config.get("tie_word_embeddings", family.tied))
        beside: tuple[tuple[TensorShape, ...], ...] = ()
    else:
        from finetune.plan.built import read_parts

        prefix, beside, tied = read_parts(with_towers, where)
    heads = sizes["num_attention_heads"]

    def has_bias(fact: bool | str) -> bool:
        """Reads a family's fact about biases: the fact itself, or the config's key that says it."""
        if isinstance(fact, str):
            return bool(config.get(fact, family.attention_bias))
        return fact

    if family.output_bias is None:
        output_bias = family.query_key_value_bias
    else:
        output_bias = family.output_bias

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
        query_key_value_bias=has_bias(family.query_key_value_bias),
        output_bias=has_bias(output_bias),
        mlp_bias=has_bias(family.mlp_bias),
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
        scales_logits=sizes.get("logits_scaling", 1) != 1,
        caps_logits=bool(config.get("final_logit_softcapping", family.caps_logits)),
    )
