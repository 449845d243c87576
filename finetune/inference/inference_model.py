"""A model loaded for generation by transformers: a folder, an adapter on its base, or a
checkpoint's weights.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from finetune.checkpoint.manifest import find_checkpoint_of
from finetune.config.module_names import peft_name
from finetune.config.pretrained import check_adapter_config
from finetune.config.quantization import describe_quantization, read_published_form
from finetune.config.schema import RENDERINGS, Model
from finetune.constants import ADAPTER_CONFIG, GENERATION_FILE, SCORES
from finetune.data.images import ImageProcessor
from finetune.data.tokenizer import PLAIN, read_template
from finetune.distributed.model_parts import has_scores
from finetune.errors import UserError, on_one_line
from finetune.export.card import has_tokenizer, write_metadata
from finetune.export.export import export_source
from finetune.export.publish import ExportOptions
from finetune.export.source import Source, find_base, open_source
from finetune.export.target import Value, cast_rows, describe_target, row_blocks
from finetune.export.write import plan_weights
from finetune.files.json_files import load_json
from finetune.files.network import hub_error
from finetune.files.tensors import read_folder, read_header
from finetune.inference.inputs import (
    ModelLocation,
    refuse_other_use,
    trained_formats,
    trained_quantization,
)
from finetune.models.cpu_products import multiply_in_fp32
from finetune.models.documents import install_document_rotary
from finetune.models.load import auto_class_of, weights_folder


@dataclass(frozen=True, slots=True)
class InferenceModel:
    """A model with its tokenizer, ready for `generate`. Returned by `load_inference_model`."""

    name: str
    model: Any  # of transformers, in evaluation mode on its device; a PeftModel for an adapter
    tokenizer: Any
    template: str | None  # the tokenizer's chat template; None: prompts are continued as they are
    variables: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs
    has_adapter: bool = False
    without_adapter: bool = False  # answer with the base under the adapter

    @property
    def whole(self) -> Any:
        """The model of transformers, whose own arguments are known also under an adapter."""
        if self.has_adapter:
            return self.model.get_base_model()
        return self.model

    def computing(self) -> AbstractContextManager[Any]:
        """The block in which the model computes."""
        return self.model.disable_adapter() if self.without_adapter else nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How models are loaded, as the command asks for it."""

    chat_template: str | None = None  # a name, a file or Jinja text; None: the tokenizer's own
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    use_chat_template: bool = True
    # where an adapter or a checkpoint does not name it, or it has moved
    base_model: str | None = None
    trust_remote_code: bool = False


def load_inference_model(
    location: ModelLocation,
    options: LoadOptions,
    log: Callable[[str], object],
    default_template: str | None = None,
) -> InferenceModel:
    """Loads a model on the GPUs of this machine, or its CPU. `default_template` is used where it
    has none of its own.

    Raises `UserError` where it cannot be loaded, or has no tokenizer or chat template.
    """
    refuse_other_use(location)
    if not sys.stderr.isatty():
        disable_progress_bar()
    with TemporaryDirectory(prefix="finetune-") as temporary:
        folder: str | Path = location.name
        has_adapter = location.kind == "adapter"
        if location.kind == "checkpoint":
            source = open_source(Path(location.name), base_model=options.base_model, log=log)
            has_adapter = source.adapter is not None
            folder = Path(temporary) / "model"
            if has_adapter:
                model = _load_lora_checkpoint(source, folder, options)
            else:
                model = _load_source(source, folder, options)
        elif has_adapter:
            model = _load_adapter(Path(location.name), options)
        else:
            model = _load_pretrained(location.name, location.revision, options)
        tokenizer = _load_tokenizer(folder, location, options)
    multiply_in_fp32(model.device, {parameter.dtype for parameter in model.parameters()})
    with suppress(UserError):  # a model's own code keeps its own rotary embedding
        # else dynamic RoPE remembers
        install_document_rotary(model.get_base_model() if has_adapter else model)
    is_whole = location.kind == "checkpoint" and not has_adapter
    if is_whole:
        described = str(source.description)
    else:
        described = model.config.name_or_path
    keys = Model(model_name_or_path=described, model_revision=location.revision)
    tokenizer.images = ImageProcessor(keys, tokenizer)
    is_scoring = has_scores(model)
    template = choose_template(
        tokenizer, location, options, default_template, log, is_scoring=is_scoring
    )
    if template is not None:
        tokenizer.chat_template = template
    variables = options.chat_template_kwargs
    return InferenceModel(location.name, model.eval(), tokenizer, template, variables, has_adapter)


def load_trunk(location: ModelLocation, options: LoadOptions) -> tuple[Any, Any]:
    """Returns (the model of a folder without its head, its tokenizer), to compute states with.

    Raises `UserError` where it cannot be loaded.
    """
    from transformers import AutoModel

    keys = {"trust_remote_code": options.trust_remote_code, **_placement()}
    with _one_sentence(location.name, "its weights"):
        model: Any = AutoModel.from_pretrained(location.name, **keys)
    multiply_in_fp32(model.device, {parameter.dtype for parameter in model.parameters()})
    return model.eval(), _load_tokenizer(location.name, location, options)


def load_base(
    model: InferenceModel, base: ModelLocation, options: LoadOptions, log: Callable[[str], object]
) -> InferenceModel:
    """The base model of `model`. Under an adapter it is in memory already."""
    if model.has_adapter:
        return replace(model, name=base.name, without_adapter=True)
    return load_inference_model(base, options, log, default_template=model.template)


def describe_base(model: InferenceModel, location: ModelLocation) -> str:
    """The form in which the base under an adapter is loaded, where the training quantized it; empty
    otherwise.
    """
    quantization = trained_quantization(location.run)
    if not model.has_adapter or quantization.bits is None:
        return ""
    trained = describe_quantization(quantization)
    if getattr(model.model.config, "quantization_config", None) is not None:
        return f"; base loaded in {trained}, as trained on"
    return (
        f"; base loaded in {str(model.model.dtype).removeprefix('torch.')}, trained on in {trained}"
    )


def choose_template(
    tokenizer: Any,
    location: ModelLocation,
    options: LoadOptions,
    default: str | None,
    log: Callable[[str], object],
    *,
    is_scoring: bool = False,
) -> str | None:
    """The chat template to ask in: the one that is named, the tokenizer's own, else what the model
    was trained with.

    None: prompts are continued as they are. Raises `UserError` where none of these is known.
    """
    if not options.use_chat_template:
        return None
    if options.chat_template is not None:
        return read_template(options.chat_template)
    formats = trained_formats(location.run)
    are_rendered = any(name in RENDERINGS and RENDERINGS[name].is_chat for name in formats)
    rows = f"rows of {' and '.join(sorted(formats))}"
    if is_scoring and formats and not are_rendered:
        return None
    if tokenizer.chat_template:
        if formats and not are_rendered:
            log(
                f"{location.name}: was trained on {rows}, without its chat template; "
                "--no-chat-template asks in that form"
            )
        own = tokenizer.chat_template
        return str(own if isinstance(own, str) else own.get("default") or next(iter(own.values())))
    if default is not None:
        return default
    if are_rendered:
        return PLAIN  # training rendered the conversations with it, for want of another
    if formats:
        log(
            f"{location.name}: has no chat template and was trained on {rows}; prompts are "
            "continued as they are"
        )
        return None
    raise UserError(
        f"{location.name}: has no chat template; name one with --chat-template (chatml, llama3, a "
        "file, ...), or have prompts continued as they are with --no-chat-template"
    )


def _load_pretrained(name: str, revision: str | None, options: LoadOptions) -> Any:
    """The model in a Hugging Face folder, or of a hub name."""
    from transformers import AutoConfig

    keys = {
        "trust_remote_code": options.trust_remote_code,
        **({"revision": revision} if revision else {}),
    }
    with _one_sentence(name, "its weights", revision):
        config: Any = AutoConfig.from_pretrained(name, **keys)
        form = read_published_form(getattr(config, "quantization_config", None))
        if form in BY_TRANSFORMERS:
            # as the training read it, on every device
            config.quantization_config["dequantize"] = True
            keys["config"] = config
        elif form is not None:
            return _load_packed(name, revision, options)
        return auto_class_of(config).from_pretrained(name, **_placement(), **keys)


BY_TRANSFORMERS = ("fp8", "mxfp4")  # what it dequantizes itself


def _load_packed(name: str, revision: str | None, options: LoadOptions) -> Any:
    """A packed base in plain numbers, in memory as its export would be."""
    folder = weights_folder(Model(model_name_or_path=name, model_revision=revision))
    source = open_source(folder, log=lambda _: None)
    with TemporaryDirectory(prefix="finetune-") as temporary:
        return _load_source(source, Path(temporary) / "model", options)


def _placement() -> dict[str, Any]:
    """Returns the arguments that load a model in the dtype of its files, over all GPUs of this
    machine or on its CPU.
    """
    return {"dtype": "auto", "device_map": "auto" if torch.accelerator.is_available() else None}


def _load_adapter(folder: Path, options: LoadOptions) -> Any:
    """A PEFT folder on its base model, not merged."""
    from peft import PeftModel

    config = load_json(folder / ADAPTER_CONFIG)
    name = options.base_model or config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: names no base model; name it with --base-model"
        )
    check_adapter_config(config, str(folder / ADAPTER_CONFIG))
    if SCORES in (config.get("modules_to_save") or ()):
        raise UserError(
            f"{folder}: an adapter of a reward model or classifier; name the run's export/, which "
            "is merged"
        )
    model = _load_base(find_base(name, config.get("revision"), with_weights=True), options)
    _grow_vocabulary(model, folder)
    with _one_sentence(str(folder), "its adapter"), warnings.catch_warnings():
        # peft reads an attribute that transformers is about to rename
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(model, folder)


def _load_base(folder: Path, options: LoadOptions) -> Any:
    checkpoint = find_checkpoint_of(folder)  # a run that trained on from another one's
    if checkpoint is None:
        return _load_pretrained(str(folder), None, options)
    with TemporaryDirectory(prefix="finetune-") as temporary:
        return _load_source(open_source(checkpoint), Path(temporary) / "model", options)


def _grow_vocabulary(model: Any, folder: Path) -> None:
    """Gives the base as many token embeddings as the adapter was trained with, where it added
    tokens.
    """
    embedding = model.get_input_embeddings()
    name = next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)
    adapter = {peft_name(stored): tensor for stored, tensor in read_folder(folder).items()}
    if name in adapter and adapter[name].shape[0] > embedding.weight.shape[0]:
        # the adapter brings the new rows
        model.resize_token_embeddings(adapter[name].shape[0], mean_resizing=False)


def _load_lora_checkpoint(source: Source, folder: Path, options: LoadOptions) -> Any:
    """The adapter of a checkpoint, on its base; `folder` becomes a PEFT folder."""
    from transformers import GenerationConfig

    export_source(source, folder, ExportOptions(model=False, verify=False), log=lambda _: None)
    model = _load_adapter(folder, replace(options, base_model=source.base_model))
    if (source.description / GENERATION_FILE).is_file():
        # has the recipe's eot_tokens
        model.generation_config = GenerationConfig.from_pretrained(source.description)
    return model


def _load_source(source: Source, folder: Path, options: LoadOptions) -> Any:
    """A checkpoint's whole model in memory, as its export would be; `folder` gets all but the
    weights.
    """
    from transformers import AutoConfig, GenerationConfig

    target = describe_target(source.description, trust_remote_code=options.trust_remote_code)
    export_options = ExportOptions(trust_remote_code=options.trust_remote_code)
    weights = plan_weights(source, target, export_options)
    folder.mkdir()
    write_metadata(folder, source, target, weights, folder.name, export_options)
    state = {value.name: _read_value(value) for shard in weights.model for value in shard.values}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    with _one_sentence(str(source.path), "its weights"):
        model_class: Any = type(target.model)
        model = model_class.from_pretrained(None, config=config, state_dict=state, **_placement())
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _read_value(value: Value) -> torch.Tensor:
    tensor = torch.empty(value.shape, dtype=value.dtype)
    for start, stop in row_blocks(value.shape):
        part = tensor[start:stop] if value.shape else tensor
        part.copy_(cast_rows(value, start, stop))
    return tensor


def _load_tokenizer(folder: str | Path, location: ModelLocation, options: LoadOptions) -> Any:
    from transformers import AutoTokenizer

    if Path(folder).is_dir() and not has_tokenizer(Path(folder)):
        raise UserError(
            f"{location.name}: has no tokenizer; copy the base model's tokenizer files into it"
        )
    with _one_sentence(location.name, "its tokenizer", location.revision):
        return AutoTokenizer.from_pretrained(
            folder,
            trust_remote_code=options.trust_remote_code,
            **({"revision": location.revision} if location.revision else {}),
        )


@contextmanager
def _one_sentence(name: str, what: str, revision: str | None = None) -> Iterator[None]:
    """Turns whatever transformers, peft, the hub or a damaged file raise in this block into a
    `UserError`.
    """
    try:
        yield
    except Exception as error:
        raise _describe_failure(name, revision, what, error) from None


def _describe_failure(name: str, revision: str | None, what: str, error: Exception) -> UserError:
    if not Path(name).exists():
        if isinstance(error.__cause__, Exception):
            cause = error.__cause__
        else:
            cause = error
        return hub_error(name, cause, what=what, revision=revision)
    damage = _find_damage(Path(name))
    if damage is not None:
        is_export = (Path(name).parent / "checkpoints").is_dir()
        if is_export:
            again = (
                f", or export it again: finetune export {Path(name).parent} --output {name} "
                "--overwrite"
            )
        else:
            again = ""
        return UserError(f"{damage}{again}")
    reason = on_one_line(error)
    return UserError(f"{name}: {what} cannot be loaded: {reason}")


def _find_damage(folder: Path) -> UserError | None:
    """Finds what is wrong with the first damaged weights file in `folder`; None where all are
    whole.
    """
    for file in sorted(folder.glob("*.safetensors")):
        try:
            read_header(file)
        except UserError as damage:
            return damage
    return None
