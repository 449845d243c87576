"""Architectures by transformers' own class, where no table gives the layers: `models/outline.py`
has built it on meta.

Imports torch where such a model is planned, and nowhere else.
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
from finetune.plan.architecture import Architecture, TensorShape, read_scores

if TYPE_CHECKING:
    from finetune.models.outline import Outline, Shapes
    from finetune.models.trace import Trace
    from finetune.plan.activations import Computation


def list_tensors(shapes: "Shapes") -> tuple[TensorShape, ...]:
    """The tensors of these names and shapes."""
    return tuple(TensorShape(name, shape) for name, shape in shapes.items())


@lru_cache(maxsize=8)
def read_outline(config: str, where: str) -> "Outline":
    """The outline of the model of the JSON `config`, which is named `where` in errors.

    Raises `UserError` where torch and transformers are not installed, or the latter cannot build
    it.
    """
    values = json.loads(config)
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise UserError(
            f"{where}: {values.get('model_type')} is planned by transformers' own class; install "
            f"{' and '.join(missing)} for it"
        )
    from finetune.models.outline import outline_model

    return outline_model(values, where)


_TRACES: dict[str, "Trace"] = {}  # those that were made, which takes a second each


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltArchitecture(Architecture):
    """The sizes of a model that transformers has built. Its layers may all differ."""

    outline: "Outline"
    config: str  # the JSON that it was built from

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
        grows = None if self.scores else self.outline.head
        grown = tuple(self._with_added_tokens(t) if t.name == grows else t for t in tensors)
        return (*grown, *self.critic)

    def _with_added_tokens(self, tensor: TensorShape) -> TensorShape:
        added = self.vocabulary - self.outline.embedding[1][0]
        return TensorShape(tensor.name, (tensor.shape[0] + added, *tensor.shape[1:]))

    def _pick(self, layer: int, names: Names) -> tuple[TensorShape, ...]:
        shapes = self.outline.layers[layer].shapes
        return tuple(TensorShape(name, shapes[name]) for name in names)

    def linears(self, layer: int = 0) -> tuple[TensorShape, ...]:
        return self._pick(layer, self.outline.layers[layer].linears)

    def layer(self, index: int = 0) -> tuple[TensorShape, ...]:
        return list_tensors(self.outline.layers[index].shapes)

    def experts(self, layer: int) -> tuple[TensorShape, ...]:
        return self._pick(layer, self.outline.layers[layer].experts)

    def routed(self, layer: int) -> tuple[TensorShape, ...]:
        return self._pick(layer, self.outline.layers[layer].routed)

    def has_experts(self, layer: int) -> bool:
        return bool(self.outline.layers[layer].routed)

    def adaptable(self) -> Mapping[str, tuple[TensorShape, ...]]:
        layers = enumerate(self.outline.layers)
        of_layers = {f"layer {index}": list_tensors(layer.adaptable) for index, layer in layers}
        return of_layers | {"tail": list_tensors(self.outline.tail.adaptable)}

    def expert_widths(self, weights: TensorShape) -> tuple[int, int]:
        first, second = weights.shape[1:]
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

        how = Forward(
            itemsize=computation.itemsize,
            autocast=computation.autocast,
            lora=computation.lora,
            cpu=computation.cpu,
        )
        key = f"{how}\n{self.config}"
        if key not in _TRACES:
            _TRACES[key] = trace_model(json.loads(self.config), how)
        return _TRACES[key]


def _untie(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with an untied head, where it does not say and published files of its family hold
    a head.
    """
    text = config.get("text_config") or {}
    says = "tie_word_embeddings" in config or "tie_word_embeddings" in text
    if says or not find_family(config["model_type"]).untied_in_files:
        return config
    return {**config, "tie_word_embeddings": False}


def read_parts(
    config: Mapping[str, Any], where: str
) -> tuple[str, tuple[tuple[TensorShape, ...], ...], bool]:
    """Reads the parts of a vision-language model from its config.json.

    Raises `UserError` as `read_outline` does.

    Returns:
        The name of its language model, the tensors of each part beside that, and whether the output
        head is the embedding.
    """
    outline = read_outline(json.dumps(_untie(config), sort_keys=True, default=str), where)
    return outline.prefix, tuple(map(list_tensors, outline.beside)), outline.head is None


def read_built_architecture(config: Mapping[str, Any], where: str) -> BuiltArchitecture:
    """The architecture of a whole config.json.

    Raises `UserError` as `read_outline`, and where there are no layers.
    """
    text = json.dumps(config, sort_keys=True, default=str)
    outline = read_outline(text, where)
    if not outline.layers:
        raise UserError(
            f"{where}: {config.get('model_type')} cannot be planned: its class has no decoder "
            "layers"
        )
    rows, width = outline.embedding[1]
    facts = outline.facts
    return BuiltArchitecture(
        model_type=facts.model_type,
        hidden=facts.hidden or width,
        intermediate=facts.intermediate,
        layers=len(outline.layers),
        heads=outline.heads,
        key_value_heads=outline.key_value_heads,
        head_size=int(outline.head_size),
        vocabulary=rows,
        tied=outline.head is None,
        query_key_value_bias=False,
        output_bias=False,
        mlp_bias=False,
        family=facts.family,
        facts=facts,
        beside=tuple(map(list_tensors, outline.beside)),
        prefix=outline.prefix,
        scores=read_scores(config),
        outline=outline,
        config=text,
    )
