"""The model that a recipe starts from and the adapter that it trains further: their folders and
configs.

The module imports no torch. Functions that need transformers import it when they are called.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from finetune.config.export_formats import find_format_of
from finetune.config.facts import (
    ATTENTION_DROPOUTS,
    ModelFacts,
    read_model_facts,
    refuse_wrong_values,
)
from finetune.config.methods import ScoreHead
from finetune.config.module_names import ORIGINAL_MODULE, is_adapter, peft_name
from finetune.config.schema import Model, Recipe
from finetune.config.served import NAMES_KEY
from finetune.constants import (
    ADAPTER,
    ADAPTER_CONFIG,
    ALL_LINEAR,
    CONFIG_FILE,
    ROTATION,
    SCORES,
    Names,
    find_positions,
)
from finetune.errors import UserError, on_one_line
from finetune.files.json_files import load_json, read_json_object, read_tensor_header
from finetune.files.network import download_file, download_folder


def refuse_other_path(path: Path) -> None:
    """Raises `UserError` if the path of a model is a file for inference engines, or the folder of
    an adapter or a run.
    """
    if file_format := find_format_of(path):
        raise UserError(
            f"{path}: a {file_format.title} file, which inference engines read and nothing trains; "
            "name the original model, a folder or hub name with safetensors"
        )
    if (path / ADAPTER_CONFIG).is_file():
        base = read_json_object(path / ADAPTER_CONFIG).get("base_model_name_or_path") or "ITS_BASE"
        raise UserError(
            f"{path}: holds an adapter, not a model; to train it further set model_name_or_path: "
            f"{base}, use_peft: true and adapter_name_or_path: {path}; to train the merged model, "
            f"make it with `finetune export {path} --output FOLDER`"
        )
    if (path / "checkpoints").is_dir():
        raise UserError(f"{path}: is a run's folder; name its export/, or one of its checkpoints/")


def find_config_file(name: str, revision: str | None) -> Path:
    """Finds the config.json of a model, in a local folder or by downloading it from the hub.

    Args:
        name: A folder or a hub name.
        revision: That of the hub; None is the default one.

    Raises:
        UserError: There is no config.json, or the path is no model.
    """
    folder = Path(name)
    refuse_other_path(folder)
    if folder.is_file():
        raise UserError(
            f"{name}: is a file; give a folder with config.json and *.safetensors, or a hub name"
        )
    if folder.exists():
        config_file = folder / CONFIG_FILE
        if not config_file.is_file():
            raise UserError(
                f"{name}: has no config.json; give a folder with config.json and *.safetensors, or "
                "a hub name"
            )
        return config_file
    if folder.is_absolute() or name.startswith("."):  # no hub name
        raise UserError(
            f"{name}: no such folder; name one that holds config.json and safetensors, or a hub "
            "name"
        )
    return download_file(name, CONFIG_FILE, revision)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's vocabulary after added_tokens and special_tokens of the recipe.

    `data.tokenizer.plan_vocabulary` makes it.
    """

    known: int  # tokens of the tokenizer before any is added
    tokens: int  # tokens with the added ones
    rows: int  # rows of the embedding and of the head
    # key of config.json -> the id of the recipe's special token, such as eos_token_id
    token_ids: Mapping[str, int] = field(default_factory=dict)


def find_file(name: str, file: str, revision: str | None) -> Path | None:
    """Finds a file of the model `name`, a folder or a hub name, and downloads it if it is not in
    the cache.

    Returns None if the model has no such file, or the hub does not give it.
    """
    from transformers.utils import cached_file

    path = cached_file(
        name,
        file,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(path) if path else None


def load_config(model: Model, vocabulary: Vocabulary | None = None) -> Any:
    """Loads the transformers config of the recipe's model, from its files or from model_config.

    A vision-language model has its whole config, any other model that of its language model.

    Args:
        model: The recipe's section.
        vocabulary: The vocabulary that the config gets; None keeps its own.

    Raises:
        UserError: The files are missing, or transformers makes no config of them or of
            model_config.
    """
    from transformers import AutoConfig

    if model.model_config is not None:
        try:
            # transformers completes mappings in the config, such as rope_scaling, in place
            config = AutoConfig.for_model(**deepcopy(model.model_config))
        except Exception as error:  # each family checks its config in its own way
            raise UserError(f"model_config: {on_one_line(error)}") from None
    else:
        assert model.model_name_or_path is not None  # the recipe reader requires one of the two
        config = _read_config(model.model_name_or_path, model)
    text_config = text_config_of(config)
    if model.attention_dropout is not None:
        for key in ATTENTION_DROPOUTS:
            if hasattr(text_config, key):
                setattr(text_config, key, model.attention_dropout)
    text_config.use_cache = config.use_cache = False
    quantization_config = getattr(config, "quantization_config", None)
    if quantization_config is not None:  # it stands in the whole config
        text_config.quantization_config = quantization_config
    if vocabulary is not None:
        text_config.update({"vocab_size": vocabulary.rows, **vocabulary.token_ids})
    return config if is_vision_language(config) else text_config


def trained_config(config: Any, model: Model) -> Any:
    """Returns the config of the model to train: `config`, or under `drop_vision` that of its
    language model.
    """
    if not model.drop_vision:
        return config
    text_config = text_config_of(config)
    text_config.tie_word_embeddings = config.tie_word_embeddings
    return text_config


# How transformers' classes with a head of scores are named at the end: for each document, and for
# each token.
SCORING_CLASS = "ForSequenceClassification"
TOKEN_SCORING_CLASS = "ForTokenClassification"


def set_head(config: Any, head: ScoreHead, pad_id: int | None) -> None:
    """Changes `config` in place, so that transformers builds the model with the method's head.

    For the vocabulary's head it only removes the name of a class with a head of scores.

    Args:
        config: The transformers config of the model.
        head: The head.
        pad_id: The id that fills rows up; the class finds a document's last token by it.

    Raises:
        UserError: transformers has no class with a head of scores for this type of model.
    """
    if not head.names:
        if has_scores_class(config):
            config.architectures = None
        return
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
    from transformers.modeling_layers import GenericForTokenClassification

    auto_class = AutoModelForSequenceClassification
    task = "sequence classification"
    scored = "documents"
    if head.reads_tokens:
        auto_class = AutoModelForTokenClassification
        task = "token classification"
        scored = "steps"
        config.classifier_dropout = 0.0  # the loss would depend on it
        config.token_classification_bias = False
    mapping: Any = auto_class._model_mapping
    model_class = mapping.get(type(config), None)
    has_other_head = (
        head.reads_tokens
        and model_class
        and not issubclass(model_class, GenericForTokenClassification)
    )
    if model_class is None or has_other_head:
        raise UserError(
            f"{config.model_type}: transformers has no class for {task} of this type, which scores "
            f"{scored}; name another model"
        )
    config.architectures = [model_class.__name__]
    config.id2label = dict(enumerate(head.names))
    config.label2id = {name: index for index, name in enumerate(head.names)}
    config.problem_type = head.problem_type
    config.tie_word_embeddings = False
    config.pad_token_id = pad_id


def has_scores_class(config: Any) -> bool:
    """Whether a transformers config names a class with a head of scores."""
    return names_class(getattr(config, "architectures", None), SCORING_CLASS, TOKEN_SCORING_CLASS)


def scores_tokens(config: Any) -> bool:
    """Whether a transformers config names a class that scores each token."""
    return names_class(getattr(config, "architectures", None), TOKEN_SCORING_CLASS)


def names_class(architectures: Sequence[str] | None, *ends: str) -> bool:
    """Whether a config names a class whose name ends with one of `ends`.

    `architectures`: the names of classes in the config; None if it has none.
    """
    return any(name.endswith(ends) for name in architectures or ())


def text_config_of(config: Any) -> Any:
    """Returns the language model's part of a transformers config; `config` if it has no parts."""
    return getattr(config, "text_config", None) or config


def is_vision_language(config: Any) -> bool:
    """Whether a transformers config is of a vision-language model and names its class.

    The model is then loaded whole, with its vision tower.
    """
    from transformers import AutoModelForImageTextToText

    mapping: Any = AutoModelForImageTextToText._model_mapping
    if text_config_of(config) is config or type(config) not in mapping:
        return False
    return getattr(mapping[type(config)], "__name__", None) in (config.architectures or ())


def read_positions(config: Any) -> int | None:
    """Returns how many positions the language model was made for; None if that is not known."""
    return find_positions(text_config_of(config).to_dict())


def read_facts(config: Any, name: str | None, tokens: int | None = None) -> ModelFacts:
    """Returns the facts in a transformers config.

    Args:
        config: The config.
        name: The model, for messages; None for one from model_config.
        tokens: The size of the tokenizer; None if it was not read.

    Raises:
        UserError: No model can be built with the config.
    """
    text_config = text_config_of(config)
    if text_config is not config:
        refuse_wrong_values(config.to_dict().get("vision_config") or {}, name or "model_config")
    # In some families layer_types is a property, which to_dict leaves out.
    values = text_config.to_dict() | {"layer_types": getattr(text_config, "layer_types", None)}
    return read_model_facts(
        values, name or "model_config", tokens, vision=is_vision_language(config)
    )


def _read_config(name: str, model: Model) -> Any:
    """Reads the config of the model `name`, a folder or a hub name.

    Raises `UserError` if there is none, or transformers cannot read it.
    """
    from transformers import AutoConfig

    # Called for its errors: it says why there is no config.json, where transformers guesses.
    find_config_file(name, model.model_revision)
    try:
        return AutoConfig.from_pretrained(
            name, revision=model.model_revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        # A validation error of transformers names its cause in the second line.
        raise UserError(f"{name}: config.json: {on_one_line(error)}; name another model") from None


ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_TORCH_FILE = "adapter_model.bin"
# Keys of adapter_config.json under which the trained model is not W + B A.
UNSUPPORTED_LORA_KEYS = (
    "fan_in_fan_out",
    "megatron_config",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_qalora",
    "layer_replication",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
# The only values of OFT's keys in adapter_config.json that are supported: peft's defaults.
OFT_SETTINGS: Mapping[str, Any] = {
    "coft": False,
    "block_share": False,
    "use_cayley_neumann": True,
    "num_cayley_neumann_terms": 5,
    "module_dropout": 0.0,
    "layers_to_transform": None,
}
# Values of init_lora_weights; the others (PiSSA, OLoRA, CorDA, ...) change the base's weights.
INITIALIZATIONS_THAT_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
# Keys of the recipe that must agree with the adapter's config. Differences in other keys show in
# the names and shapes of the adapter's tensors.
COMPARED_KEYS = (
    "lora_r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "oft_block_size",
)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_names_or_pattern(value: Any) -> bool:
    return isinstance(value, str) or _is_names(value)


def _is_layers(value: Any) -> bool:
    """Whether a value is a layer's number or a list of such numbers; true and false are none."""
    layers = value if isinstance(value, list) else [value]
    return all(type(layer) is int for layer in layers)


def _is_dropout(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _is_block_size(value: Any) -> bool:
    return isinstance(value, int) and 1 < value <= LARGEST_RANK


def _is_pattern_of(is_valid: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_valid, value.values()))


LARGEST_RANK = 1 << 16  # of a rank in adapter_config.json, and of OFT's block size
RANK_TIMES = 30  # such a rank is at most this many times the largest in the adapter's file
NAMES = "a list of names"
# Optional keys of adapter_config.json -> (the check of a value, what it expects in words).
ADAPTER_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "target_modules": (_is_names_or_pattern, f"{NAMES} or a pattern"),
    "exclude_modules": (_is_names_or_pattern, f"{NAMES} or a pattern"),
    "modules_to_save": (_is_names, NAMES),
    "target_parameters": (_is_names, NAMES),
    "layers_to_transform": (_is_layers, "a number or numbers of layers"),
    "lora_dropout": (_is_dropout, "a number from 0 to below 1"),
    "use_rslora": (_is_flag, "true or false"),
    "use_dora": (_is_flag, "true or false"),
    "rank_pattern": (
        partial(_is_pattern_of, _is_rank),
        "a mapping of modules to positive whole numbers",
    ),
    "alpha_pattern": (
        partial(_is_pattern_of, _is_positive),
        "a mapping of modules to positive numbers",
    ),
}
# The same for the keys that each kind of adapter, a peft_type, must have.
REQUIRED_VALUES: Mapping[str, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "LORA": {
        "r": (_is_rank, "a positive whole number"),
        "lora_alpha": (_is_positive, "a positive number"),
    },
    "OFT": {"oft_block_size": (_is_block_size, f"a number from 2 to {LARGEST_RANK:,}")},
}


def check_adapter_config(config: Mapping[str, Any], where: str) -> None:
    """Refuses an adapter's config with values that no adapter has.

    Args:
        config: The contents of adapter_config.json.
        where: The path of that file, for messages and to find the weights beside it.

    Raises:
        UserError: It is neither LoRA nor OFT, a value is of a wrong kind, a rank is larger than the
            weights can have, or its modules have the names of another program.
    """
    if NAMES_KEY in config:
        raise UserError(
            f"{where}: {NAMES_KEY}: its modules have the names of {config[NAMES_KEY]}, which alone "
            "opens it; name the folder that it was exported from"
        )
    kind = config.get("peft_type")
    required = REQUIRED_VALUES.get(str(kind))
    if required is None:
        raise UserError(
            f"{where}: peft_type: {kind!r} is neither LORA nor OFT, the supported kinds"
        )
    for key, (is_valid, expected) in {**ADAPTER_VALUES, **required}.items():
        value = config.get(key)
        if not is_valid(value) and (value is not None or key in required):
            raise UserError(
                f"{where}: {key}: {expected} is expected, not {value!r:.60}; copy it again"
            )
    if kind == "LORA":
        _check_ranks([config["r"], *(config.get("rank_pattern") or {}).values()], where)


def _check_ranks(ranks: Iterable[int], where: str) -> None:
    """Raises `UserError` for a rank far above those of the weights, before anything is made by it.

    `where`: the path of adapter_config.json; the weights are read beside it if they are there.
    """
    weights = Path(where).with_name(ADAPTER_WEIGHTS)
    largest_stored = _find_largest_rank(weights) if weights.is_file() else None
    for rank in ranks:
        if largest_stored is not None and rank > RANK_TIMES * largest_stored:
            raise UserError(
                f"{where}: r: {rank:,}: its weights have factors of rank {largest_stored:,} at "
                "most; copy both files again"
            )
        if rank > LARGEST_RANK:
            raise UserError(
                f"{where}: r: {rank:,}: more than {LARGEST_RANK:,}, which no adapter has; copy it "
                "again"
            )


def _find_largest_rank(weights: Path) -> int | None:
    """Returns the largest rank in an adapter's file, the most rows of a factor A; None without one.

    An entry without a valid shape is passed over.
    """
    ranks = []
    header, *_ = read_tensor_header(weights)
    for name, entry in header.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        factor = name.rpartition(".lora_")[2]
        is_factor_a = factor.startswith(("A", "embedding_A"))
        if is_factor_a and isinstance(shape, list) and shape and isinstance(shape[0], int):
            ranks.append(shape[0])
    return max(ranks, default=None)


def why_unsupported(config: Mapping[str, Any]) -> str | None:
    """Says why an adapter cannot be added to its base here; None if it can.

    LoRA cannot if W + B A, with W of the original base, is not the model that was trained.
    """
    for key in UNSUPPORTED_LORA_KEYS:
        if config.get(key):
            return f"{key}: this kind of LoRA is not supported"
    if config.get("peft_type") == "OFT":
        for key, value in OFT_SETTINGS.items():
            if config.get(key, value) != value:
                return f"{key}: {config[key]}: this kind of OFT is not supported"
    initialization = config.get("init_lora_weights", True)
    if initialization not in INITIALIZATIONS_THAT_KEEP_THE_BASE:
        return (
            f"init_lora_weights: {initialization} changes the base model, so that this adapter "
            "does not fit the original"
        )
    return None


def find_adapter(name: str) -> Path:
    """Finds the folder of an adapter, or downloads it from the hub.

    `name`: a PEFT folder, the folder of a run or a checkpoint, or a hub name.

    Raises `UserError` if there is no adapter, or it cannot be downloaded.
    """
    path = Path(name)
    for folder in (path, path / ADAPTER, path / "model"):
        if (folder / ADAPTER_CONFIG).is_file():
            return folder
    if path.exists():
        if (path / "config.json").is_file():
            advice = "it is a model: name it in model_name_or_path"
        else:
            advice = "name the folder of a LoRA adapter"
        raise UserError(f"adapter_name_or_path: {name}: has no {ADAPTER_CONFIG}; {advice}")
    download_file(name, ADAPTER_CONFIG)  # for its error about a repository without an adapter
    return download_folder(name, [ADAPTER_CONFIG, ADAPTER_WEIGHTS], "its adapter")


def complete_lora(recipe: Recipe) -> Recipe:
    """Returns `recipe` with the adapter keys that it leaves open, as adapter_name_or_path has them.

    A head of scores is added to modules_to_save, also without adapter_name_or_path. The names and
    shapes of the adapter's tensors are compared with the model's later, when they are read
    (models/lora.py).

    Raises:
        UserError: The adapter cannot be read, is of a kind that is not supported, or contradicts a
            key that the recipe sets.
    """
    name = recipe.lora.adapter_name_or_path
    if name is None:
        return _save_scores(recipe)
    folder = find_adapter(name)
    where = str(folder / ADAPTER_CONFIG)
    config = load_json(folder / ADAPTER_CONFIG)
    check_adapter_config(config, where)
    reason = why_unsupported(config)
    if reason is None and (config.get("bias", "none") != "none" or config.get("lora_bias")):
        reason = "bias: trained biases are not supported"
    if reason is not None:
        raise UserError(
            f"{where}: {reason}; merge it with the tool that made it, or name another adapter"
        )
    if not any(folder.glob("*.safetensors")):
        if (folder / ADAPTER_TORCH_FILE).is_file():
            advice = f"finetune export {folder} --output NEW_FOLDER --adapter-only converts it"
        else:
            advice = "name the folder of an adapter"
        raise UserError(f"{folder}: has no {ADAPTER_WEIGHTS}; {advice}")
    keys = _read_keys(config, folder)
    problems = list(_find_contradictions(recipe, name, keys))
    if problems:
        raise UserError.of(problems)
    missing_keys = {key: value for key, value in keys.items() if key not in recipe.places}
    # an adapter of a language model has no head of scores yet
    return _save_scores(replace(recipe, lora=replace(recipe.lora, **missing_keys)))


def _find_contradictions(recipe: Recipe, name: str, keys: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each key that the recipe sets to another value than the adapter has.

    Args:
        recipe: The recipe.
        name: The adapter, for messages.
        keys: The adapter's values of the recipe's keys.
    """
    for key, adapter_value in keys.items():
        if key not in COMPARED_KEYS or key not in recipe.places:
            continue
        recipe_value = getattr(recipe.lora, key) or None
        if recipe_value != (adapter_value or None):
            reason = f"the adapter {name} has {json.dumps(adapter_value)}"
            place = recipe.place_of(key)
            yield f"{place}: {key}: {json.dumps(recipe_value)}: {reason}; leave {key} out"


def _save_scores(recipe: Recipe) -> Recipe:
    """Returns `recipe` with a head of scores in modules_to_save, if it trains adapters beside one.

    The head is new and has no weights in the base, so that it must be trained whole.
    """
    lora = recipe.lora
    if not (recipe.score_names and lora.use_peft) or SCORES in lora.modules_to_save:
        return recipe
    return replace(recipe, lora=replace(lora, modules_to_save=(*lora.modules_to_save, SCORES)))


def _read_keys(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Translates an adapter's config into the recipe's keys of `Lora`.

    `folder`: that of the adapter, in whose weights some modules are looked up.
    """
    saved = config.get("modules_to_save") or ()
    # peft takes a name in its list as any end of a module's name; the weights have the whole names
    if saved and (folder / ADAPTER_WEIGHTS).is_file():
        modules = _list_modules(folder, ".weight")
        # without a frozen embedding, which peft may save beside them
        saved = [name for name in modules if name.endswith(tuple(saved))] or saved
    targets = _read_targets(config, folder)
    if config["peft_type"] == "OFT":
        return {
            "oft_block_size": config["oft_block_size"],
            "lora_target_modules": targets,
            "modules_to_save": tuple(saved),
        }
    parameters = config.get("target_parameters") or ()
    return {
        "lora_r": config["r"],
        "lora_alpha": config["lora_alpha"],  # may be a fraction, as no recipe writes it
        "lora_dropout": float(config.get("lora_dropout") or 0.0),
        "lora_target_modules": targets,
        "lora_target_parameters": tuple(
            name for name in parameters if not name.endswith(".weight")
        ),
        "rank_pattern": config.get("rank_pattern") or None,
        "alpha_pattern": config.get("alpha_pattern") or None,
        "modules_to_save": tuple(saved),
        "use_rslora": bool(config.get("use_rslora")),
        "use_dora": bool(config.get("use_dora")),
    }


def _read_targets(config: Mapping[str, Any], folder: Path) -> str | Names:
    """Returns `lora_target_modules` for an adapter's config.

    If the config chooses them by a pattern, by exclude_modules or by layers_to_transform, they are
    the modules that have adapters in the weights.
    """
    targets = config.get("target_modules") or ()
    if targets == ALL_LINEAR:
        return ALL_LINEAR
    saved = config.get("modules_to_save") or ()
    excluded = [name for name in config.get("exclude_modules") or () if name not in saved]
    if isinstance(targets, str) or excluded or config.get("layers_to_transform") is not None:
        marker = ROTATION if config["peft_type"] == "OFT" else ".lora_A."
        targets = _list_modules(folder, marker)
    # config_for_peft (models/lora.py) names some layers by their weights.
    parameters = config.get("target_parameters") or ()
    layers = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]
    return (*targets, *layers)


def _list_modules(folder: Path, marker: str) -> Names:
    """Lists the modules whose tensors in an adapter's weights have `marker` in their names.

    `marker`: ".lora_A." or ROTATION for modules with adapters, ".weight" for those trained whole.
    """
    header, *_ = read_tensor_header(folder / ADAPTER_WEIGHTS)
    names = {peft_name(name) for name in header if ORIGINAL_MODULE not in name}
    candidates = {name for name in names if is_adapter(name) == (marker != ".weight")}
    modules = {name.rpartition(marker)[0] for name in candidates}  # "" for names without `marker`
    return tuple(sorted(modules - {""}))
