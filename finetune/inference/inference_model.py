"""Loads a model for generation by transformers.

It may be a model's folder, a hub name, an adapter on its base, or a checkpoint.
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
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from finetune.checkpoint.manifest import MODEL, find_checkpoint_of
from finetune.config.module_names import peft_name
from finetune.config.pretrained import check_adapter_config
from finetune.config.quantization import describe_quantization, read_published_form
from finetune.config.schema import RENDERINGS, Model
from finetune.constants import ADAPTER_CONFIG, GENERATION_FILE, SCORES
from finetune.data.images import ImageProcessor
from finetune.data.tokenizer import PLAIN, fit_template
from finetune.distributed.model_parts import has_scores
from finetune.errors import UserError, on_one_line
from finetune.export.export import export_source
from finetune.export.metadata import has_tokenizer, write_metadata
from finetune.export.publish import ExportOptions
from finetune.export.source import Source, find_base, has_vocabulary, open_source
from finetune.export.target import Value, cast_rows, count_tokens, describe_target, row_blocks
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
from finetune.models.documents import install_document_rotary, install_query_scales
from finetune.models.load import auto_class_of, weights_folder


@dataclass(frozen=True, slots=True)
class InferenceModel:
    """A model with its tokenizer, ready for `generate`. Returned by `load_inference_model`."""

    name: str
    model: Any  # transformers' model in evaluation mode; a PeftModel for an adapter
    tokenizer: Any
    template: str | None  # the tokenizer's chat template; None: prompts are continued unrendered
    variables: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs
    has_adapter: bool = False
    without_adapter: bool = False  # the adapter is switched off: the base answers

    @property
    def whole(self) -> Any:
        """Transformers' model, without peft's wrapper. Its class shows the forward's arguments."""
        if self.has_adapter:
            return self.model.get_base_model()
        return self.model

    def computing(self) -> AbstractContextManager[Any]:
        """Returns the context in which the model is called. It switches off the adapter if
        `without_adapter`.
        """
        return self.model.disable_adapter() if self.without_adapter else nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The options of loading, as on the command line."""

    chat_template: str | None = None  # a name, a file or Jinja text; None: the tokenizer's own
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    use_chat_template: bool = True
    base_model: str | None = None  # None: the base that the adapter or the checkpoint names
    trust_remote_code: bool = False


def load_inference_model(
    location: ModelLocation,
    options: LoadOptions,
    log: Callable[[str], object],
    beside: InferenceModel | None = None,
) -> InferenceModel:
    """Loads a model on the machine's GPUs, or on its CPU.

    Args:
        location: The model's place.
        options: The options of loading.
        log: Called with messages for the user.
        beside: The model to compare with, whose chat template serves a model that has none.

    Raises:
        UserError: The model cannot be loaded, or has no tokenizer or chat template.
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
            folder = _find_tokenizer(Path(location.name), options)
        else:
            model = _load_pretrained(location.name, location.revision, options)
        tokenizer = _load_tokenizer(folder, location, options)
    multiply_in_fp32(model.device, {parameter.dtype for parameter in model.parameters()})
    _avoid_narrow_kernel(model)
    base = model.get_base_model() if has_adapter else model
    # transformers' dynamic RoPE would remember the longest conversation
    with suppress(UserError):  # a model with code of its own keeps its rotary embedding
        install_document_rotary(base)
        install_query_scales(base)
    if location.kind == "checkpoint" and not has_adapter:
        processor_folder = str(source.description)
    else:
        processor_folder = model.config.name_or_path
    keys = Model(model_name_or_path=processor_folder, model_revision=location.revision)
    tokenizer.images = ImageProcessor(keys, tokenizer)
    template = choose_template(
        tokenizer, location, options, beside, log, is_scoring=has_scores(model)
    )
    if template is not None:
        tokenizer.chat_template = template
    variables = options.chat_template_kwargs
    return InferenceModel(location.name, model.eval(), tokenizer, template, variables, has_adapter)


def _avoid_narrow_kernel(model: Any) -> None:
    """Keeps bitsandbytes' 4-bit layers from a kernel that does not take their width.

    The kernel, which bitsandbytes uses outside of training on some CPUs, takes multiples of 32
    outputs, and rows of whole blocks.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            block = module.weight.quant_state.blocksize
            if module.out_features % 32 or module.in_features % block:
                module.support_avx512bf16_for_cpu = False


def load_trunk(location: ModelLocation, options: LoadOptions) -> tuple[Any, Any]:
    """Loads a model without its head; returns (the model, its tokenizer).

    Raises `UserError` if one of them cannot be loaded.
    """
    from transformers import AutoModel

    keys = {"trust_remote_code": options.trust_remote_code, **_choose_placement()}
    with _as_user_error(location.name, "its model"):
        model: Any = AutoModel.from_pretrained(location.name, **keys)
    multiply_in_fp32(model.device, {parameter.dtype for parameter in model.parameters()})
    return model.eval(), _load_tokenizer(location.name, location, options)


def load_base(
    model: InferenceModel, base: ModelLocation, options: LoadOptions, log: Callable[[str], object]
) -> InferenceModel:
    """Loads the base of `model`. The base of an adapter is in memory already, under the adapter.

    Args:
        model: The model.
        base: The place of the base.
        options: The options of loading.
        log: Called with messages for the user.
    """
    if model.has_adapter:
        return replace(model, name=base.name, without_adapter=True)
    return load_inference_model(base, options, log, beside=model)


def describe_base(model: InferenceModel, location: ModelLocation) -> str:
    """Describes in which form the base of an adapter is loaded, and in which it was trained on.

    Empty for a model without an adapter, and if training did not quantize the base.
    """
    quantization = trained_quantization(location.run)
    if not model.has_adapter or quantization.bits is None:
        return ""
    trained = describe_quantization(quantization)
    if getattr(model.model.config, "quantization_config", None) is not None:
        return f"; base loaded in {trained}, as trained on"
    dtype = str(model.model.dtype).removeprefix("torch.")
    return f"; base loaded in {dtype}, trained on in {trained}"


def choose_template(
    tokenizer: Any,
    location: ModelLocation,
    options: LoadOptions,
    beside: InferenceModel | None,
    log: Callable[[str], object],
    *,
    is_scoring: bool,
) -> str | None:
    """Chooses the chat template: the option's, the tokenizer's, that of `beside`, or that of
    training.

    Args:
        tokenizer: The model's tokenizer.
        location: The model's place.
        options: The options of loading.
        beside: The model to compare with, which gets the same prompts; None: there is none.
        log: Called with messages for the user.
        is_scoring: Whether the model has a score head.

    Returns:
        The Jinja text; None: prompts are continued as they are.

    Raises:
        UserError: No template is known, and training does not show that none is needed.
    """
    if not options.use_chat_template:
        return None
    if options.chat_template is not None:
        return fit_template(options.chat_template, tokenizer)
    formats = trained_formats(location.run)
    are_rendered = any(name in RENDERINGS and RENDERINGS[name].is_chat for name in formats)
    rows = f"rows of {' and '.join(sorted(formats))}"
    if is_scoring and formats and not are_rendered:
        return None
    tokenizer_template = tokenizer.chat_template
    if tokenizer_template:
        if formats and not are_rendered:
            log(
                f"{location.name}: was trained on {rows}, without its chat template; "
                "--no-chat-template asks in that form"
            )
        if isinstance(tokenizer_template, str):
            return tokenizer_template
        by_name = tokenizer_template  # several templates
        return str(by_name.get("default") or next(iter(by_name.values())))
    if beside is not None and beside.template is not None:
        return beside.template
    if are_rendered:
        return PLAIN  # training rendered conversations with it, as no other template was known
    if formats:
        log(
            f"{location.name}: has no chat template and was trained on {rows}; prompts are "
            "continued as they are"
        )
        return None
    if beside is not None:
        return None
    raise UserError(
        f"{location.name}: has no chat template; name one with --chat-template (chatml, llama3, a "
        "file, ...), or have prompts continued as they are with --no-chat-template"
    )


def _load_pretrained(name: str, revision: str | None, options: LoadOptions) -> Any:
    """Loads the model of a Hugging Face folder or a hub name.

    Quantized weights are dequantized, as training reads them.
    """
    from transformers import AutoConfig

    keys: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    if revision:
        keys["revision"] = revision
    with _as_user_error(name, "its model", revision):
        config: Any = AutoConfig.from_pretrained(name, **keys)
        form = read_published_form(getattr(config, "quantization_config", None))
        if form in DEQUANTIZED_BY_TRANSFORMERS:
            config.quantization_config["dequantize"] = True
            keys["config"] = config
        elif form is not None:
            return _load_packed(name, revision, options)
        return auto_class_of(config).from_pretrained(name, **_choose_placement(), **keys)


DEQUANTIZED_BY_TRANSFORMERS = ("fp8", "mxfp4")  # forms of weights, as in `read_published_form`


def _load_packed(name: str, revision: str | None, options: LoadOptions) -> Any:
    """Loads a model with packed weights. They are unpacked as in an export of the model."""
    folder = weights_folder(Model(model_name_or_path=name, model_revision=revision))
    source = open_source(folder, log=lambda _: None)
    with TemporaryDirectory(prefix="finetune-") as temporary:
        return _load_source(source, Path(temporary) / "model", options)


def _choose_placement() -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` for the files' dtype, and all GPUs or the CPU."""
    return {"dtype": "auto", "device_map": "auto" if torch.accelerator.is_available() else None}


def _load_adapter(folder: Path, options: LoadOptions) -> Any:
    """Loads an adapter from a PEFT folder, and its base. The two are not merged."""
    from peft import PeftModel
    from transformers import GenerationConfig

    config = load_json(folder / ADAPTER_CONFIG)
    check_adapter_config(config, str(folder / ADAPTER_CONFIG))
    if SCORES in (config.get("modules_to_save") or ()):
        raise UserError(
            f"{folder}: an adapter of a reward model or classifier; name the run's export/, which "
            "is merged"
        )
    model = _load_base(_find_base(folder, options), options)
    _resize_vocabulary(model, folder)
    with _as_user_error(str(folder), "its adapter"), warnings.catch_warnings():
        # peft reads an attribute that transformers is about to rename
        warnings.simplefilter("ignore", FutureWarning)
        if (folder / GENERATION_FILE).is_file():
            # it also has the recipe's eot_tokens
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return PeftModel.from_pretrained(model, folder)


def _find_base(folder: Path, options: LoadOptions) -> Path:
    """Finds the folder of the base of the adapter in `folder`, downloading it if it is missing."""
    config = load_json(folder / ADAPTER_CONFIG)
    trained_base = config.get("base_model_name_or_path")
    name = options.base_model or trained_base
    if not isinstance(name, str) or not name:
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: names no base model; name it with --base-model"
        )
    revision = config.get("revision") if name == trained_base else None
    return find_base(name, revision, with_weights=True)


def _find_tokenizer(folder: Path, options: LoadOptions) -> Path:
    """Returns the folder with the tokenizer of the adapter in `folder`: its own, or its base's."""
    if has_vocabulary(folder):
        return folder
    base = _find_base(folder, options)
    checkpoint = find_checkpoint_of(base)
    return base if checkpoint is None else checkpoint / MODEL


def _load_base(folder: Path, options: LoadOptions) -> Any:
    """Loads the base of an adapter: a model's folder, or the checkpoint of an earlier run."""
    checkpoint = find_checkpoint_of(folder)
    if checkpoint is None:
        return _load_pretrained(str(folder), None, options)
    with TemporaryDirectory(prefix="finetune-") as temporary:
        return _load_source(open_source(checkpoint), Path(temporary) / "model", options)


def _resize_vocabulary(model: Any, folder: Path) -> None:
    """Gives the base as many tokens as the adapter in `folder` has, if that has an embedding."""
    shapes = {peft_name(name): tensor.shape for name, tensor in read_folder(folder).items()}
    tokens = count_tokens(model, shapes)
    if tokens is not None:
        # No mean values for new rows: the adapter has their values.
        model.resize_token_embeddings(tokens, mean_resizing=False)


def _load_lora_checkpoint(source: Source, folder: Path, options: LoadOptions) -> Any:
    """Exports the adapter of a checkpoint to `folder`, and loads it from there, with its base."""
    export_source(source, folder, ExportOptions(model=False, verify=False), log=lambda _: None)
    return _load_adapter(folder, replace(options, base_model=source.base_model))


def _load_source(source: Source, folder: Path, options: LoadOptions) -> Any:
    """Loads a full model with the weights that its export would have.

    `folder`: A new folder, for the export's other files.
    """
    from transformers import AutoConfig, GenerationConfig

    target = describe_target(source.description, trust_remote_code=options.trust_remote_code)
    export_options = ExportOptions(trust_remote_code=options.trust_remote_code)
    weights = plan_weights(source, target, export_options)
    folder.mkdir()
    write_metadata(folder, source, target, weights, folder.name, export_options)
    state: dict[str, Tensor] = {}
    for shard in weights.model:
        state |= {value.name: _read_value(value) for value in shard.values}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    with _as_user_error(str(source.path), "its model"):
        model_class: Any = type(target.model)
        placement = _choose_placement()
        model = model_class.from_pretrained(None, config=config, state_dict=state, **placement)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _read_value(value: Value) -> Tensor:
    """Computes an exported tensor, a block of rows at a time."""
    tensor = torch.empty(value.shape, dtype=value.dtype)
    for start, stop in row_blocks(value.shape):
        block = tensor[start:stop] if value.shape else tensor  # a scalar has no rows
        block.copy_(cast_rows(value, start, stop))
    return tensor


def _load_tokenizer(folder: str | Path, location: ModelLocation, options: LoadOptions) -> Any:
    """Loads the tokenizer of a folder or hub name. Raises `UserError` if there is none.

    location: The model's place, whose name is in messages.
    """
    from transformers import AutoTokenizer

    if Path(folder).is_dir() and not has_tokenizer(Path(folder)):
        raise UserError(
            f"{location.name}: has no tokenizer; copy the base model's tokenizer files into it"
        )
    keys: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    if location.revision:
        keys["revision"] = location.revision
    with _as_user_error(location.name, "its tokenizer", location.revision):
        return AutoTokenizer.from_pretrained(folder, **keys)


@contextmanager
def _as_user_error(name: str, loaded_part: str, revision: str | None = None) -> Iterator[None]:
    """Turns any error of transformers, peft, the hub or a damaged file into a `UserError`.

    Args:
        name: The model's folder or hub name.
        loaded_part: "its model", "its tokenizer" or "its adapter".
        revision: The revision on the hub.
    """
    try:
        yield
    except Exception as error:
        if not Path(name).exists():
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise hub_error(name, cause, what=loaded_part, revision=revision) from None
        damage = _find_damage(Path(name))
        if damage is None:
            raise UserError(
                f"{name}: {loaded_part} cannot be loaded: {on_one_line(error)}"
            ) from None
        run = Path(name).parent
        again = ""
        if (run / "checkpoints").is_dir():
            again = f", or export it again: finetune export {run} --output {name} --overwrite"
        raise UserError(f"{damage}{again}") from None


def _find_damage(folder: Path) -> UserError | None:
    """Returns the error of the first damaged weights file in `folder`; None: no file is damaged."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            read_header(file)
        except UserError as damage:
            return damage
    return None
