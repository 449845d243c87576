"""The transformers config of a recipe's model, and whether such a model can be trained."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError
from finetune.hub import download_file
from finetune.recipe.expert_division import refuse_undivided
from finetune.recipe.memory_keys import refuse_unsuited_keys
from finetune.recipe.quantization import (
    check_quantization,
    describe_quantization,
    read_stored_quantization,
    refuse_quantized_experts,
)
from finetune.recipe.schema import Data, Model, Quantization, Recipe
from finetune.recipe.sequence_division import refuse_undivided_attention
from finetune.recipe.tensor_division import check_divisible

if TYPE_CHECKING:
    from finetune.distributed.sharding import Sharding

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_COUNTS = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "num_selected_experts")
MAX_LAYERS = 1000  # decoder layers; a config that claims more would be built for minutes


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
    config.use_cache = False
    text_config = getattr(config, "text_config", None) or config
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        text_config.quantization_config = quantized
    if vocabulary is not None:
        text_config.update({"vocab_size": vocabulary.rows, **vocabulary.token_ids})
    return text_config


def check_config(config: Any, model: Model, data: Data, vocabulary: int) -> None:
    """Raises `UserError` for a model that cannot be trained on such rows, as far as its config shows.

    `vocabulary`: the number of tokens that the embedding must hold, which is the tokenizer's size.
    """
    name = model.model_name_or_path or "model_config"
    layers = getattr(config, "num_hidden_layers", 1)
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        raise UserError(f"{name}: num_hidden_layers: {layers}: from 1 to {MAX_LAYERS:,} decoder layers can be trained")
    read_stored_quantization(config, name)
    if vocabulary > config.vocab_size:
        raise UserError(
            f"{name}: its embedding has {config.vocab_size} rows, but the tokenizer has {vocabulary} tokens; "
            "use the model's own tokenizer (added_tokens adds tokens to it), or set vocab_size in model_config"
        )


def check_division(config: Any, recipe: Recipe, sharding: "Sharding", ranks: int) -> None:
    """Raises `UserError` where the model of `config` or its rows cannot be divided over the layout's groups, its experts, its
    matrices, the heads of its attention, or a key is not for its kind. ranks: of the run."""
    name, experts = recipe.model.model_name_or_path or "model_config", count_experts(config)
    refuse_undivided(sharding, config.model_type, experts, name, ranks)
    refuse_unsuited_keys(recipe.model, recipe.lora, experts, name)
    if sharding.tensor_parallel_size > 1:
        _check_matrices(config, recipe, sharding, name)
    check_sequence_parallel(config, recipe.model, recipe.data, sharding)


def _check_matrices(config: Any, recipe: Recipe, sharding: "Sharding", name: str) -> None:
    heads = config.num_attention_heads
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{sharding.source}: tp_size {sharding.tensor_parallel_size}: the weights of {name} are quantized, and cannot be "
            "divided; name the unquantized model, or set tp_size: 1"
        )
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "intermediate_size": getattr(config, "intermediate_size", 0),
        "vocab_size": config.vocab_size,
    }
    check_divisible(config.model_type, sizes, sharding, name, recipe.optimization.optim)


def check_sequence_parallel(config: Any, model: Model, data: Data, sharding: "Sharding") -> None:
    """Raises `UserError` where the ranks cannot divide the tokens of such a model's rows between them, as far as its config shows."""
    if sharding.sequence_parallel_size > 1:
        heads = config.get_text_config().num_attention_heads
        refuse_undivided_attention(config.model_type, heads, model.attn_implementation, sharding)


def count_experts(config: Any) -> int:
    """The routed experts of a layer by the config; 0 for a dense model."""
    return next((count for name in EXPERT_COUNTS if (count := getattr(config, name, None))), 0)


def count_chosen(config: Any) -> int:
    """The routed experts of one token by the config; 0 where it does not say."""
    return next((int(count) for name in CHOSEN_COUNTS if (count := getattr(config, name, None))), 0)


def complete_quantization(recipe: Recipe, config: Any, sharding: "Sharding") -> Recipe:
    """`recipe` with the keys that say how its base is quantized, where the files of the base already are.

    Raises `UserError` where the recipe asks for another quantization than theirs or for full fine-tuning, where the layout
    cannot hold a quantized base, and where bitsandbytes is not installed.
    """
    completed = _adopt_stored_quantization(recipe, config)
    name = recipe.model.model_name_or_path or "model_config"
    refuse_quantized_experts(completed.quantization, config.model_type, count_experts(config), name)
    check_quantization(completed.quantization, sharding)
    return completed


def _adopt_stored_quantization(recipe: Recipe, config: Any) -> Recipe:
    name, given = recipe.model.model_name_or_path or "model_config", recipe.quantization
    stored = read_stored_quantization(config, name)
    if stored is None:
        return recipe
    if not recipe.lora.use_peft:
        raise UserError(
            f"{name}: its weights are stored in {stored.bits} bits, so they cannot be fine-tuned in full; set use_peft: true, "
            "or name the unquantized model"
        )
    usual = Quantization()
    for key in fields(Quantization):
        asked = getattr(given, key.name)
        if asked not in (getattr(usual, key.name), getattr(stored, key.name)):
            raise UserError(
                f"{key.name}: {json.dumps(asked)}: the weights of {name} are stored as {describe_quantization(stored)}; leave "
                f"{key.name} out, or name the unquantized model"
            )
    return replace(recipe, quantization=stored)


def refuse_other_folder(folder: Path) -> None:
    """Raises `UserError` for a folder that holds something else of ours or peft's than a model."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder}: holds an adapter, not a model; merge the two with `finetune export`, or name the adapter's base model"
        )
    if (folder / "checkpoints").is_dir():
        raise UserError(f"{folder}: is a run's folder; name its export/, or one of its checkpoints/")


def _pretrained_config(name: str, model: Model) -> Any:
    from transformers import AutoConfig

    folder = Path(name)
    refuse_other_folder(folder)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"{name}: has no config.json; give a folder with config.json and *.safetensors, or a hub name")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{name}: is a file; give a folder with config.json and *.safetensors, or a hub name")
    if not folder.is_dir():
        download_file(
            name, "config.json", model.model_revision
        )  # names the reason where it is unreachable; transformers guesses
    try:
        return AutoConfig.from_pretrained(
            name, revision=model.model_revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        raise UserError(f"{name}: config.json: {_one_line(error)}; name another model") from None


def _one_line(error: Exception) -> str:
    """The whole message: a validation error of transformers names its cause in the second line."""
    return " ".join(str(error).split()) or type(error).__name__
