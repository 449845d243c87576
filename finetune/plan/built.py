"""Architectures of models whose layers no table describes.

`models/outline.py` builds transformers' own class of such a model on the meta device and lists its
parameters. torch is imported only while such a model is planned.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from finetune.config.families import find_family
from finetune.constants import Names
from finetune.errors import UserError
from finetune.plan.activations import MASKED
from finetune.plan.architecture import Architecture, TensorShape, read_scores

if TYPE_CHECKING:
    from finetune.models.outline import Outline, Shapes
    from finetune.models.trace import Trace
    from finetune.plan.activations import Computation


def list_tensors(shapes: "Shapes") -> tuple[TensorShape, ...]:
    """Lists parameters, given as name -> shape."""
    return tuple(TensorShape(name, shape) for name, shape in shapes.items())


@lru_cache(maxsize=8)
def read_outline(config: str, where: str) -> "Outline":
    """Builds a model on the meta device and returns its outline.

    Raises `UserError` if torch or transformers is not installed, or transformers cannot build the
    model.

    Args:
        config: The text of a config.json, which unlike a mapping can be a key of the cache.
        where: How errors name the config.
    """
    values = json.loads(config)
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise UserError(
            f"{where}: {values.get('model_type')} is planned by transformers' own class; install "
            f"{' and '.join(missing)} for it"
        )
    from finetune.models.outline import outline_model

    return outline_model(values, where)


# A cache, because a trace takes a second. Keys: the settings of the forward and the config.
_TRACES: dict[str, "Trace"] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltArchitecture(Architecture):
    """The sizes of a model that transformers has built. All its layers may differ."""

    outline: "Outline"
    config: str  # the JSON text from which the model was built

    @property
    def is_uniform(self) -> bool:
        return False

    @property
    def text_names(self) -> Names:
        return self.outline.text_names

    @property
    def head_name(self) -> str:
        return self.outline.head_name

    @property
    def layer_names(self) -> str:
        return self.outline.layer_names

    @property
    def attending_layers(self) -> int:
        return self.outline.attending_layers

    @property
    def mean_head_size(self) -> float:
        return self.outline.head_size

    @property
    def embedding(self) -> TensorShape:
        return self._with_added_tokens(TensorShape(*self.outline.embedding))

    @property
    def tail(self) -> tuple[TensorShape, ...]:
        tensors = list_tensors(self.outline.tail.shapes)
        # an untied head grows with the vocabulary, unless its rows are scores
        head_of_vocabulary = None if self.scores else self.outline.head
        with_added_tokens = tuple(
            self._with_added_tokens(tensor) if tensor.name == head_of_vocabulary else tensor
            for tensor in tensors
        )
        return (*with_added_tokens, *self.critic)

    def _with_added_tokens(self, tensor: TensorShape) -> TensorShape:
        """Adds to a tensor [tokens, ...] the rows of tokens that the config's vocabulary lacks.

        `vocabulary` counts them: the recipe may add tokens.
        """
        _, (tokens_of_config, _) = self.outline.embedding
        added = self.vocabulary - tokens_of_config
        rows, *width = tensor.shape
        return TensorShape(tensor.name, (rows + added, *width))

    def _select(self, layer: int, names: Names) -> tuple[TensorShape, ...]:
        """Lists the parameters `names` of decoder layer `layer`."""
        shapes = self.outline.layers[layer].shapes
        return tuple(TensorShape(name, shapes[name]) for name in names)

    def linears(self, layer: int = 0) -> tuple[TensorShape, ...]:
        return self._select(layer, self.outline.layers[layer].linears)

    def layer(self, index: int = 0) -> tuple[TensorShape, ...]:
        return list_tensors(self.outline.layers[index].shapes)

    def experts(self, layer: int) -> tuple[TensorShape, ...]:
        return self._select(layer, self.outline.layers[layer].experts)

    def routed(self, layer: int) -> tuple[TensorShape, ...]:
        return self._select(layer, self.outline.layers[layer].routed)

    def has_experts(self, layer: int) -> bool:
        return bool(self.outline.layers[layer].routed)

    def adaptable(self) -> Mapping[str, tuple[TensorShape, ...]]:
        by_unit = {
            f"layer {index}": list_tensors(layer.adaptable)
            for index, layer in enumerate(self.outline.layers)
        }
        by_unit["tail"] = list_tensors(self.outline.tail.adaptable)
        return by_unit

    def expert_widths(self, weights: TensorShape) -> tuple[int, int]:
        _, first, second = weights.shape
        is_transposed = any(
            layer.is_transposed for layer in self.outline.layers if weights.name in layer.experts
        )
        return (second, first) if is_transposed else (first, second)

    @property
    def widest_layer(self) -> int:
        sizes = [sum(tensor.numel for tensor in self.layer(index)) for index in range(self.layers)]
        return sizes.index(max(sizes))

    @property
    def idle_parameters(self) -> int:
        return self.outline.idle

    def trace(self, computation: "Computation") -> "Trace":
        from finetune.models.trace import Forward, trace_model

        forward = Forward(
            itemsize=computation.itemsize,
            autocast=computation.autocast,
            lora=computation.lora,
            cpu=computation.cpu,
            # other packages' kernels save what this project's attention saves
            attention=computation.attention if computation.attention in MASKED else "auto",
        )
        key = f"{forward}\n{self.config}"
        if key not in _TRACES:
            _TRACES[key] = trace_model(json.loads(self.config), forward)
        return _TRACES[key]


def _untie(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sets `tie_word_embeddings` to false if the family's published files hold a head.

    A config that has the key already is returned as it is.
    """
    text = config.get("text_config") or {}
    has_key = "tie_word_embeddings" in config or "tie_word_embeddings" in text
    if has_key or not find_family(config["model_type"]).untied_in_files:
        return config
    return {**config, "tie_word_embeddings": False}


def read_parts(
    config: Mapping[str, Any], where: str
) -> tuple[str, tuple[tuple[TensorShape, ...], ...], bool]:
    """Reads the parts of a vision-language model from its config.json.

    Raises `UserError` as `read_outline` does.

    Returns:
        The name of the language model within the model; the tensors of each other part, such as the
        vision tower; and whether the output head is tied to the embedding.
    """
    outline = read_outline(json.dumps(_untie(config), sort_keys=True, default=str), where)
    return outline.prefix, tuple(map(list_tensors, outline.beside)), outline.head is None


def read_built_architecture(config: Mapping[str, Any], where: str) -> BuiltArchitecture:
    """Reads the architecture that a complete config.json describes, by building its class.

    Raises `UserError` as `read_outline` does, and if the class has no decoder layers.
    """
    text = json.dumps(config, sort_keys=True, default=str)
    outline = read_outline(text, where)
    if not outline.layers:
        raise UserError(
            f"{where}: {config.get('model_type')} cannot be planned: its class has no decoder "
            "layers"
        )
    _, (vocabulary, width) = outline.embedding
    facts = outline.facts
    return BuiltArchitecture(
        model_type=facts.model_type,
        hidden=facts.hidden or width,
        intermediate=facts.intermediate,
        layers=len(outline.layers),
        heads=outline.heads,
        key_value_heads=outline.key_value_heads,
        head_size=int(outline.head_size),
        vocabulary=vocabulary,
        tied=outline.head is None,
        # only the formulas of a table read the next three: `outline` has the biases
        query_key_value_bias=False,
        output_bias=False,
        mlp_bias=False,
        family=facts.family,
        facts=facts,
        beside=tuple(map(list_tensors, outline.beside)),
        prefix=outline.prefix,
        scores=read_scores(config),
        scales_logits=outline.logits.scale != 1.0,
        caps_logits=outline.logits.softcap is not None,
        outline=outline,
        config=text,
    )
