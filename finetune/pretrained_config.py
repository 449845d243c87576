"""The transformers config of a recipe's model, and whether such a model can be trained."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.config.facts import ModelFacts, read_model_facts, refuse_wrong_values
from finetune.config.pretrained_adapter import find_config_file
from finetune.config.schema import Model
from finetune.errors import UserError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the recipe's tokens ask of the model. Returned by `data.tokenizer.plan_vocabulary`."""

    known: int  # tokens of the tokenizer as it is
    tokens: int  # with those that are added
    rows: int  # of the embedding and the head that hold them
    token_ids: Mapping[str, int] = field(default_factory=dict)  # what config.json is to say, such as eos_token_id


def load_config(model: Model, vocabulary: Vocabulary | None = None) -> Any:
    """The transformers config of the recipe's model (hub name, folder, or inline architecture), grown to `vocabulary`.

    Raises `UserError` where the hub, the folder or the architecture does not give one.
    """
    from transformers import AutoConfig

    if model.model_config is not None:
        try:
            config = AutoConfig.for_model(**model.model_config)
        except Exception as error:  # each family checks its config in its own way
            raise UserError(f"model_config: {_one_line(error)}") from None
    else:
        assert model.model_name_or_path is not None  # the recipe reader requires one of the two
        config = _pretrained_config(model.model_name_or_path, model)
    if model.attention_dropout is not None:
        config.attention_dropout = model.attention_dropout
    text_config = text_config_of(config)
    text_config.use_cache = config.use_cache = False
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        text_config.quantization_config = quantized
    if vocabulary is not None:
        text_config.update({"vocab_size": vocabulary.rows, **vocabulary.token_ids})
    return config if is_vision_language(config) else text_config


def trained_config(config: Any, model: Model) -> Any:
    """The part of a config of `load_config` that is loaded: all of it, or under `drop_vision` the language model's."""
    if not model.drop_vision:
        return config
    text_config = text_config_of(config)
    text_config.tie_word_embeddings = config.tie_word_embeddings
    return text_config


def text_config_of(config: Any) -> Any:
    """The part of a transformers config that its language model has; all of it where there is no other part."""
    return getattr(config, "text_config", None) or config


def is_vision_language(config: Any) -> bool:
    """Whether a transformers config is that of a vision-language model, which is loaded whole: it names its class."""
    from transformers import AutoModelForImageTextToText

    mapping: Any = AutoModelForImageTextToText._model_mapping
    if text_config_of(config) is config or type(config) not in mapping:
        return False
    return getattr(mapping[type(config)], "__name__", None) in (config.architectures or ())


def read_facts(config: Any, name: str | None, tokens: int | None = None) -> ModelFacts:
    """The facts of a transformers config. Raises `UserError` for one with which no model can be built.

    `tokens`: the number that the embedding must hold, which is the tokenizer's size.
    """
    text = text_config_of(config)
    if text is not config:
        refuse_wrong_values(config.to_dict().get("vision_config") or {}, name or "model_config")
    values = text.to_dict() | {"layer_types": getattr(text, "layer_types", None)}  # of some families a property
    return read_model_facts(values, name or "model_config", tokens, vision=is_vision_language(config))


def _pretrained_config(name: str, model: Model) -> Any:
    from transformers import AutoConfig

    find_config_file(name, model.model_revision)  # says why it fails, where transformers guesses
    try:
        return AutoConfig.from_pretrained(
            name, revision=model.model_revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        raise UserError(f"{name}: config.json: {_one_line(error)}; name another model") from None


def _one_line(error: Exception) -> str:
    """The whole message: a validation error of transformers names its cause in the second line."""
    return " ".join(str(error).split()) or type(error).__name__
