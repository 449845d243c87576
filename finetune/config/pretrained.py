"""The model that a recipe starts from and the LoRA adapter that it trains further: where they are,
and their configs.

No torch at import: `load_config` and what reads a transformers config import transformers when a
run calls them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.config.export_formats import find_format_of
from finetune.config.facts import ModelFacts, read_model_facts, refuse_wrong_values
from finetune.config.methods import ScoreHead
from finetune.config.module_names import is_adapter
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
    """Raises `UserError` if `path`, which is named as a model, is a file of a format, or holds an
    adapter or a run.
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
    """Returns the config.json of a model in a folder, or of the hub.

    Raises `UserError` where there is none.
    """
    folder = Path(name)
    refuse_other_path(folder)
    if folder.is_file():
        raise UserError(
            f"{name}: is a file; give a folder with config.json and *.safetensors, or a hub name"
        )
    if not folder.exists() and (folder.is_absolute() or name.startswith(".")):
        raise UserError(
            f"{name}: no such folder; name one that holds config.json and safetensors, or a hub "
            "name"
        )
    if folder.exists() and not (folder / CONFIG_FILE).is_file():
        raise UserError(
            f"{name}: has no config.json; give a folder with config.json and *.safetensors, or a "
            "hub name"
        )
    if folder.exists():
        return folder / CONFIG_FILE
    return download_file(name, CONFIG_FILE, revision)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The changes that the recipe's tokens make to the model's vocabulary. Returned by
    `data.tokenizer.plan_vocabulary`.
    """

    known: int  # tokens of the tokenizer as it is
    tokens: int  # with those that are added
    rows: int  # of the embedding and the head that hold them
    # what config.json is to say, such as eos_token_id
    token_ids: Mapping[str, int] = field(default_factory=dict)


def load_config(model: Model, vocabulary: Vocabulary | None = None) -> Any:
    """Loads the config of the recipe's model (hub name, folder, or inline architecture), grown to
    `vocabulary`.

    Raises `UserError` where the hub, the folder or the architecture does not give one.
    """
    from transformers import AutoConfig

    if model.model_config is not None:
        try:
            config = AutoConfig.for_model(**model.model_config)
        except Exception as error:  # each family checks its config in its own way
            raise UserError(f"model_config: {on_one_line(error)}") from None
    else:
        assert model.model_name_or_path is not None  # the recipe reader requires one of the two
        config = _read_config(model.model_name_or_path, model)
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
    """Returns the part of a config that is loaded: all of it, or under `drop_vision` the language
    model's.
    """
    if not model.drop_vision:
        return config
    text_config = text_config_of(config)
    text_config.tie_word_embeddings = config.tie_word_embeddings
    return text_config


SCORING_CLASS = "ForSequenceClassification"  # the end of the name of a class with a head of scores
TOKEN_SCORING_CLASS = "ForTokenClassification"  # of each token


def set_head(config: Any, head: ScoreHead, pad_id: int | None) -> None:
    """Makes `config` name the class with the head that a method trains: of scores by name, or the
    vocabulary's.

    pad_id: The id that fills up rows, behind which that class looks for the last token.

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
    kind = "sequence classification"
    scored = "documents"
    if head.reads_tokens:
        auto_class = AutoModelForTokenClassification
        kind = "token classification"
        scored = "steps"
        config.classifier_dropout = 0.0  # the loss would depend on it
        config.token_classification_bias = False
    mapping: Any = auto_class._model_mapping
    known = mapping.get(type(config), None)
    is_other = head.reads_tokens and known and not issubclass(known, GenericForTokenClassification)
    if known is None or is_other:
        raise UserError(
            f"{config.model_type}: transformers has no class for {kind} of this type, which scores "
            f"{scored}; name another model"
        )
    config.architectures = [known.__name__]
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
    """Whether one of the classes that a config names ends with one of `ends`."""
    return any(name.endswith(ends) for name in architectures or ())


def text_config_of(config: Any) -> Any:
    """Returns the part of a transformers config that its language model has; all of it where there
    is no other part.
    """
    return getattr(config, "text_config", None) or config


def is_vision_language(config: Any) -> bool:
    """Whether a transformers config is that of a vision-language model, which is loaded whole: it
    names its class.
    """
    from transformers import AutoModelForImageTextToText

    mapping: Any = AutoModelForImageTextToText._model_mapping
    if text_config_of(config) is config or type(config) not in mapping:
        return False
    return getattr(mapping[type(config)], "__name__", None) in (config.architectures or ())


def read_positions(config: Any) -> int | None:
    """Returns the number of positions that the language model of `config` was made for; None where
    it does not say.
    """
    return find_positions(text_config_of(config).to_dict())


def read_facts(config: Any, name: str | None, tokens: int | None = None) -> ModelFacts:
    """Returns the facts of a transformers config.

    Raises `UserError` for one with which no model can be built.

    `tokens`: the number that the embedding must hold, which is the tokenizer's size.
    """
    text = text_config_of(config)
    if text is not config:
        refuse_wrong_values(config.to_dict().get("vision_config") or {}, name or "model_config")
    # of some families a property
    values = text.to_dict() | {"layer_types": getattr(text, "layer_types", None)}
    return read_model_facts(
        values, name or "model_config", tokens, vision=is_vision_language(config)
    )


def _read_config(name: str, model: Model) -> Any:
    from transformers import AutoConfig

    find_config_file(name, model.model_revision)  # says why it fails, where transformers guesses
    try:
        return AutoConfig.from_pretrained(
            name, revision=model.model_revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        # A validation error of transformers names its cause in the second line.
        raise UserError(f"{name}: config.json: {on_one_line(error)}; name another model") from None


ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_TORCH_FILE = "adapter_model.bin"
# Settings under which B A is not what is added to W, or something else is.
UNSUPPORTED = (
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
# OFT as it is trained here, which is peft's default.
ROTATIONS: Mapping[str, Any] = {
    "coft": False,
    "block_share": False,
    "use_cayley_neumann": True,
    "num_cayley_neumann_terms": 5,
    "module_dropout": 0.0,
    "layers_to_transform": None,
}
# PiSSA, OLoRA, CorDA … change it
INITIALIZATIONS_THAT_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
# Keys whose difference no shape would show; the others are compared by the names and shapes of the
# adapter's tensors.
COMPARED = (
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
    layers = value if isinstance(value, list) else [value]
    return all(type(layer) is int for layer in layers)


def _is_dropout(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


NAMES = "a list of names"
# keys of adapter_config.json that may be left out -> (what fits, in words)
ADAPTER_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "target_modules": (_is_names_or_pattern, f"{NAMES} or a pattern"),
    "exclude_modules": (_is_names_or_pattern, f"{NAMES} or a pattern"),
    "modules_to_save": (_is_names, NAMES),
    "target_parameters": (_is_names, NAMES),
    "layers_to_transform": (_is_layers, "a number or numbers of layers"),
    "lora_dropout": (_is_dropout, "a number from 0 to below 1"),
    "use_rslora": (_is_flag, "true or false"),
    "use_dora": (_is_flag, "true or false"),
}
LARGEST_RANK = 1 << 16
RANK_TIMES = 30  # of a rank, as a multiple of the largest in the adapter's file


def check_adapter_config(config: Mapping[str, Any], where: str) -> None:
    """Raises `UserError` unless `config` describes a LoRA adapter, of ranks that the file beside it
    may have.
    """
    if NAMES_KEY in config:
        raise UserError(
            f"{where}: {NAMES_KEY}: its modules have the names of {config[NAMES_KEY]}, which alone "
            "opens it; name the folder that it was exported from"
        )
    for key, (fits, words) in ADAPTER_VALUES.items():
        value = config.get(key)
        if value is not None and not fits(value):
            raise UserError(
                f"{where}: {key}: {words} is expected, not {value!r:.60}; copy it again"
            )
    if config.get("peft_type") == "OFT":
        _check_rotation(config, where)
        return
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{where}: peft_type: {config.get('peft_type')!r} is neither LORA nor OFT, the "
            "supported kinds"
        )
    for key in ("r", "lora_alpha"):
        if not _is_positive(config.get(key)):
            raise UserError(
                f"{where}: {key}: a positive number is expected, not {config.get(key)!r}"
            )
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or not all(map(_is_positive, pattern.values())):
            raise UserError(f"{where}: {key}: a mapping of modules to positive numbers is expected")
    _check_ranks([config["r"], *(config.get("rank_pattern") or {}).values()], where)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _check_ranks(ranks: Iterable[float], where: str) -> None:
    """Raises `UserError` for a rank that the weights beside an adapter's config cannot have, before
    anything of that size is made.
    """
    weights = Path(where).with_name(ADAPTER_WEIGHTS)
    largest = _find_largest_rank(weights) if weights.is_file() else None
    for rank in ranks:
        if largest is not None and rank > RANK_TIMES * largest:
            raise UserError(
                f"{where}: r: {rank:,}: its weights have factors of rank {largest:,} at most; copy "
                "both files again"
            )
        if rank > LARGEST_RANK:
            raise UserError(
                f"{where}: r: {rank:,}: more than {LARGEST_RANK:,}, which no adapter has; copy it "
                "again"
            )


def _check_rotation(config: Mapping[str, Any], where: str) -> None:
    """Raises `UserError` unless `config` describes OFT in blocks of a size."""
    block = config.get("oft_block_size")
    if not isinstance(block, int) or not 1 < block <= LARGEST_RANK:
        raise UserError(
            f"{where}: oft_block_size: a number from 2 to {LARGEST_RANK:,} is expected, not "
            f"{block!r}; copy it again, or name another adapter"
        )


def _find_largest_rank(weights: Path) -> int | None:
    """Returns the rows of the largest first factor in an adapter's file; None where it has none."""
    rows = []
    for name, entry in read_tensor_header(weights)[0].items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        is_first_factor = name.rpartition(".lora_")[2].startswith(("A", "embedding_A"))
        if is_first_factor and isinstance(shape, list):
            rows += [size for size in shape[:1] if isinstance(size, int)]
    return max(rows, default=None)


def why_unsupported(config: Mapping[str, Any]) -> str | None:
    """Says why an adapter cannot be added to its base as it is here; None where it can.

    For LoRA: why W + B A, in the original base, is not the model that was trained.
    """
    for key in UNSUPPORTED:
        if config.get(key):
            return f"{key}: this kind of LoRA is not supported"
    if config.get("peft_type") == "OFT":
        for key, value in ROTATIONS.items():
            if config.get(key, value) != value:
                return f"{key}: {config[key]}: this kind of OFT is not supported"
    start = config.get("init_lora_weights", True)
    if start not in INITIALIZATIONS_THAT_KEEP_THE_BASE:
        return (
            f"init_lora_weights: {start} changes the base model, so that this adapter does not fit "
            "the original"
        )
    return None


def find_adapter(name: str) -> Path:
    """Finds the folder of an adapter by `name`: a PEFT folder, a run, a checkpoint, or a hub name.

    Raises `UserError` if there is none, or it cannot be downloaded.
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
    download_file(name, ADAPTER_CONFIG)  # says what is wrong with a repository of something else
    return download_folder(name, [ADAPTER_CONFIG, ADAPTER_WEIGHTS], "its adapter")


def complete_lora(recipe: Recipe) -> Recipe:
    """Returns `recipe` with the keys of LoRA as its adapter_name_or_path has them; unchanged if it
    names none.

    A key that the recipe sets stays, where it agrees with the adapter. The names and shapes of the
    adapter's tensors are compared with the model's when they are read (models/lora.py).

    Raises `UserError` if the adapter cannot be read, is of another kind than LoRA, or contradicts
    the recipe.
    """
    recipe = _train_scores(recipe)
    name = recipe.lora.adapter_name_or_path
    if name is None:
        return recipe
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
    taken = {key: value for key, value in keys.items() if key not in recipe.places}
    return replace(recipe, lora=replace(recipe.lora, **taken))


def _find_contradictions(recipe: Recipe, name: str, keys: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each key that the recipe sets otherwise than the adapter `name`."""
    for key, of_adapter in keys.items():
        if key not in COMPARED or key not in recipe.places:
            continue
        asked = getattr(recipe.lora, key) or None
        if asked != (of_adapter or None):
            has = f"the adapter {name} has {json.dumps(of_adapter)}"
            yield f"{recipe.place_of(key)}: {key}: {json.dumps(asked)}: {has}; leave {key} out"


def _train_scores(recipe: Recipe) -> Recipe:
    """Returns `recipe`, under whose adapters a head of scores is trained whole: it has no values
    before.
    """
    lora = recipe.lora
    if not (recipe.score_names and lora.use_peft) or SCORES in lora.modules_to_save:
        return recipe
    return replace(recipe, lora=replace(lora, modules_to_save=(*lora.modules_to_save, SCORES)))


def _read_keys(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the keys of `Lora` as adapter_config.json has them."""
    saved = config.get("modules_to_save") or ()
    # a name in peft's list is any end of a module's name
    if saved and (folder / ADAPTER_WEIGHTS).is_file():
        saved = _list_modules(folder, ".weight") or saved
    targets = _read_targets(config, folder)
    if config["peft_type"] == "OFT":
        return {
            "oft_block_size": config["oft_block_size"],
            "lora_target_modules": targets,
            "modules_to_save": tuple(saved),
        }
    parameters = config.get("target_parameters") or ()
    return {
        "lora_r": int(config["r"]),
        "lora_alpha": int(config["lora_alpha"]),
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
    """Returns `lora_target_modules` as adapter_config.json has them.

    Of a pattern, of excluded modules and of chosen layers they are the modules in the adapter's
    file.
    """
    targets = config.get("target_modules") or ()
    if targets == ALL_LINEAR:
        return ALL_LINEAR
    saved = config.get("modules_to_save") or ()
    excluded = [name for name in config.get("exclude_modules") or () if name not in saved]
    if isinstance(targets, str) or excluded or config.get("layers_to_transform"):
        targets = _list_modules(folder, ROTATION if config["peft_type"] == "OFT" else ".lora_A.")
    # config_for_peft (models/lora.py) names some layers by their weights.
    parameters = config.get("target_parameters") or ()
    layers = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]
    return (*targets, *layers)


def _list_modules(folder: Path, kind: str) -> Names:
    """Lists modules in the adapter's file, by what their tensors' names contain.

    `kind`: ".lora_A." or ROTATION for modules with adapters, ".weight" for those trained whole.
    """
    short = {
        name.removeprefix("base_model.model.")
        for name in read_tensor_header(folder / ADAPTER_WEIGHTS)[0]
    }
    chosen = {name for name in short if is_adapter(name) == (kind != ".weight")}
    return tuple(sorted({name.rpartition(kind)[0] for name in chosen} - {""}))
