"""The export, stage by stage: open the source, describe the target, plan the weights, write,
verify, publish.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from finetune.config.export_formats import EXPORT_FORMATS, SAFETENSORS, list_keys
from finetune.config.families import find_family
from finetune.config.pretrained import scores_tokens
from finetune.config.served import (
    NAMES_KEY,
    list_kinds_of_adapter,
    list_kinds_of_model,
    serve_adapter,
    serve_model,
    was_served,
)
from finetune.constants import ADAPTER, CONFIG_FILE, EXPORT
from finetune.distributed.model_parts import has_scores
from finetune.errors import UserError
from finetune.export.base_account import NOTHING_CARRIED, account_for_base
from finetune.export.card import CARD_FILE
from finetune.export.formats import PlannedFormat, load_planners
from finetune.export.logits import CheckpointLogits
from finetune.export.merge_choice import choose_merge
from finetune.export.metadata import has_chat_template, has_tokenizer, write_metadata
from finetune.export.publish import (
    ExportOptions,
    check_disk_space,
    check_request,
    is_alone,
    publish,
)
from finetune.export.reload_process import ReloadProcess
from finetune.export.source import Source, open_source
from finetune.export.target import TargetModel, describe_target, find_main_rope
from finetune.export.values import refuse_idle
from finetune.export.verify import start_logits, start_verification
from finetune.export.vllm_names import has_other_names
from finetune.export.write import Weights, make_files, plan_weights, write_weights
from finetune.files.json_files import read_json_object
from finetune.files.network import check_push, push_folder
from finetune.files.phases import Phases
from finetune.files.tensors import read_files
from finetune.models.quantized_weights import one_torch_thread
from finetune.units import disk_size, read_folder_path


def export(
    run_or_checkpoint: str | Path,
    output: str | Path,
    *,
    formats: Sequence[str] = (SAFETENSORS,),
    adapter_only: bool = False,
    base_model: str | None = None,
    push_to_hub: str | None = None,
    log: Callable[[str], object] = print,
    **others: Any,
) -> Path:
    """Makes the folder `output` from a run, a checkpoint, or another tool's folder.

    One process does it, without a GPU or a process group. Memory stays bounded: a few blocks of
    rows, and one tensor during the verification. `output` appears when it is complete and verified,
    or not at all.

    Args:
        run_or_checkpoint: The source; export/source.py lists the kinds of folders.
        output: The folder to make.
        formats: Names of formats in config/export_formats.py.
        adapter_only: LoRA: whether to make only the PEFT folder, without a merged model.
        base_model: A folder or hub name of the base, if the checkpoint does not name it.
        push_to_hub: The repository to upload to. A failed push is logged, not raised.
        log: Takes the lines that say what was made.
        others: `dtype`, `max_shard_size`, `verify`, `overwrite`, `trust_remote_code`,
            `adapter_names` and `merge_onto` of `ExportOptions`, and the keys of the formats in
            config/export_formats.py.

    Raises:
        UserError: The source or the result is wrong, or an argument is unknown.
    """
    fields_of_options = {
        field.name: others.pop(field.name)
        for field in fields(ExportOptions)
        if field.name in others
    }
    # What remains in `others` are keys of formats.
    options = ExportOptions(
        model=not adapter_only, formats=tuple(formats), keys=others, **fields_of_options
    )
    target = Path(read_folder_path(str(output)))
    check_request(Path(run_or_checkpoint), target, options)
    if push_to_hub is not None:
        check_push(push_to_hub)
    source = open_source(Path(run_or_checkpoint), base_model=base_model, log=log)
    exported = export_source(source, target, options, log)
    if push_to_hub is not None:
        push_folder(exported, push_to_hub, log)
    return exported


def export_run(
    run: Path,
    *,
    checkpoint: Path | None = None,
    verify: bool = True,
    log: Callable[[str], object] = print,
    phases: Phases | None = None,
) -> Path:
    """Exports a finished run to its folder `export/`, and for LoRA also to `adapter/`.

    One process calls it, after the last checkpoint. Earlier exports of the run are replaced.

    The formats and their keys are those of the run's recipe.

    Args:
        run: The run's folder.
        checkpoint: The checkpoint to export; None: the run's newest.
        verify: Whether the result is read back and compared.
        log: Takes the lines that say what was made.
        phases: Takes the seconds of the export and of its check.

    Returns:
        The folder `export/`.
    """
    phases = phases or Phases()
    with phases.timed("export"):
        source = open_source(checkpoint or run, log=log)
        trust_remote_code = bool(source.recipe.get("trust_remote_code"))
        options = ExportOptions(verify=verify, overwrite=True, trust_remote_code=trust_remote_code)
        if source.adapter is not None:
            export_source(source, run / ADAPTER, replace(options, model=False), log, phases=phases)
        formats = tuple(source.recipe.get("export_formats") or options.formats)
        keys = {
            key.name: source.recipe.get(key.recipe_key) for key in list_keys() if key.recipe_key
        }
        options = replace(options, adapter=False, formats=formats, keys=keys)
        return export_source(source, run / EXPORT, options, log, phases=phases)


def export_source(
    source: Source,
    output: Path,
    options: ExportOptions,
    log: Callable[[str], object] = print,
    reload: ReloadProcess | None = None,
    phases: Phases | None = None,
) -> Path:
    """Exports an open source to the folder `output`, which it returns as an absolute path.

    Args:
        source: The model, opened by `open_source`.
        output: The folder to make. The model card's title is its name, or the run's name if it is
            in the run's folder.
        options: What to export, and how.
        log: Takes the lines that say what was made.
        reload: The separate process of the verification; None: one is started if it is needed.
        phases: Takes the seconds of the verification.

    Raises:
        UserError: The source or the result is wrong, or there is no room for the result.
    """
    phases = phases or Phases()
    output = output.absolute()
    _check_output_is_apart(source, output)
    title = output.parent.name if output.parent == source.run else output.name
    target = describe_target(
        source.description,
        trust_remote_code=options.trust_remote_code,
        adapter=source.adapter_shapes,
        is_quantized=bool(source.quantized),
    )
    _refuse_other_formats(source, target, options)
    if source.adapter is not None and options.verify:
        refuse_idle(source.adapter, str(source.path))
    # Outside of `one_torch_thread`, since this computes more than it reads.
    merge = choose_merge(source, target, options, log)
    # The rest works in several threads and one more process. If torch started threads for each of
    # them, they would outnumber the cores and wait for each other; on busy cores a cast takes eight
    # times its CPU time.
    with one_torch_thread(), publish(output, overwrite=options.overwrite) as folder:
        account = NOTHING_CARRIED  # an adapter alone carries nothing over from its base
        if options.model:
            account = account_for_base(source, target, options.formats)
        target = account.target or target
        weights = plan_weights(source, target, options, merge, account)
        planned_formats = [
            plan(source, target, weights, options, title, log)
            for plan in load_planners(options.formats)
        ]
        files = PlannedFiles(source, target, weights, options, planned_formats)
        check_disk_space(folder, files.byte_count)
        write_metadata(folder, source, target, weights, title, options)
        lines = files.write(folder, output, reload, phases)
    lines += format_commands(_find_commands(source, target, weights, options, output))
    for line in lines:
        log(line)
    return output


@dataclass(frozen=True, slots=True)
class PlannedFiles:
    """The files with tensors that an export will have, in all of its formats."""

    source: Source
    target: TargetModel
    weights: Weights
    options: ExportOptions
    planned_formats: Sequence[PlannedFormat]  # the formats other than safetensors

    @property
    def has_safetensors(self) -> bool:
        """Whether a Hugging Face folder of safetensors is among the formats."""
        return SAFETENSORS in self.options.formats

    @property
    def compares_logits(self) -> bool:
        """Whether the checkpoint's logits are computed, and the result's compared with them."""
        return self.options.verify and bool(self.weights.model)

    @property
    def byte_count(self) -> int:
        """The largest number of bytes that the export holds on disk at once."""
        byte_count = self.weights.byte_count if self.has_safetensors else 0
        return byte_count + sum(planned.byte_count for planned in self.planned_formats)

    def write(
        self, folder: Path, output: Path, reload: ReloadProcess | None, phases: Phases
    ) -> list[str]:
        """Writes and verifies all files, and returns the lines that say what was made.

        Args:
            folder: Where the files are written.
            output: What `folder` will be renamed to, for the lines.
            reload: The separate process of the verification; None: one is started if it is needed.
            phases: Takes the seconds of the verification.
        """
        lines = []
        checkpoint_logits: AbstractContextManager[Any] = nullcontext()
        if self.compares_logits:
            trust_remote_code = self.options.trust_remote_code
            checkpoint_logits = start_logits(
                self.source, self.target, self.weights, trust_remote_code
            )
        with checkpoint_logits as logits:
            if self.has_safetensors:
                verdict = self._write_folder(folder, logits, reload, phases)
                lines.append(f"{output}: {_describe_result(self.source, self.weights)}{verdict}")
                lines += [f"base    {sentence}" for sentence in self.weights.account.sentences]
            if self.source.has_critic:
                path = self.source.path
                lines.append(f"critic  left out; {path} keeps it, and only training reads it")
            for planned in self.planned_formats:
                lines += [f"{output}/{line}" for line in planned.write(folder, logits)]
        return lines

    def _write_folder(
        self,
        folder: Path,
        logits: CheckpointLogits | None,
        reload: ReloadProcess | None,
        phases: Phases,
    ) -> str:
        """Writes and verifies the weights of the Hugging Face folder.

        Returns the verdict, which ends the line on the folder. Raises `UserError` if the weights
        are wrong, or if they lack a tensor of the base that the card does not name.
        """
        make_files(folder, self.weights)
        with start_verification(folder, self.weights, self.options, logits, reload) as (
            on_disk,
            verify,
        ):
            written = write_weights(folder, self.weights, on_disk)
            with phases.timed("check"):
                verdict = verify(written)
        if self.compares_logits:
            exported = read_files(folder / shard.name for shard in self.weights.model)
            card = (folder / CARD_FILE).read_text(encoding="utf-8")
            self.weights.account.refuse_lost(exported.keys(), card)
        return verdict


def export_for_vllm(folder: Path, output: Path) -> Path:
    """Returns a folder from which vLLM can load the adapter that the PEFT folder `folder` holds.

    That is `folder`, unless vLLM has other names for some adapted modules. Then it is `output`, and
    a copy of the adapter with these names is written there.
    """
    source = open_source(folder, log=lambda line: None)
    config = read_json_object(source.description / CONFIG_FILE)
    if not has_other_names(source.adapter_shapes, str(config.get("model_type"))):
        return folder
    options = ExportOptions(model=False, verify=False, overwrite=True, adapter_names="vllm")
    return export_source(source, output, options, log=lambda line: None)


def _find_commands(
    source: Source, target: TargetModel, weights: Weights, options: ExportOptions, output: Path
) -> dict[str, str]:
    """Finds the commands that use the export: {program: command}. Empty if there are none."""
    if source.method.masks:
        return {}  # the programs write one token after another, and cannot sample from this model
    file_commands = _find_file_commands(weights, options, output)
    if not weights.model:
        if source.adapter is None or SAFETENSORS not in options.formats:
            return file_commands
        if has_scores(target.model) or source.method.embeds:
            return {}  # the programs write text, and this adapter's model writes none
        model_type = str(target.config_json.get("model_type"))
        adapter_commands = _list_adapter_commands(
            output,
            source.base_model,
            dict(weights.adapter_config),
            model_type,
            other_names=has_other_names(source.adapter.tensors, model_type),
        )
        return adapter_commands | file_commands
    folder_formats = [name for name in options.formats if EXPORT_FORMATS[name].is_folder]
    if not folder_formats:
        return file_commands
    # Safetensors lie in `output`. Any other format lies there if it is the only one, else in a
    # folder of its own.
    is_quantized = SAFETENSORS not in folder_formats
    first_format = folder_formats[0]
    is_nested = is_quantized and not is_alone(first_format, options)
    folder = output / first_format if is_nested else output
    if source.method.ranks:
        call = f"rank('{QUESTION}', ['Yes.', 'Why?'])"
        return {"sentence-transformers": _make_library_command("CrossEncoder", folder, call)}
    if has_scores(target.model):
        command = _make_scoring_command(folder, scores_tokens(target.model.config))
        return {"transformers": command}
    if source.method.embeds:
        call = f"encode_query('{QUESTION}')"
        return {"sentence-transformers": _make_library_command("SentenceTransformer", folder, call)}
    return _list_model_commands(source, target, folder, is_quantized=is_quantized) | file_commands


def _find_file_commands(weights: Weights, options: ExportOptions, output: Path) -> dict[str, str]:
    """Finds the commands for formats that are single files, such as GGUF: {program: command}.

    A command names the first file of its format in `output`, which must be written already.
    """
    commands = dict[str, str]()
    for name in options.formats:
        row = EXPORT_FORMATS[name]
        files = sorted(output.glob(f"*{row.suffix}")) if row.suffix is not None else []
        if files:
            commands |= row.use(files[0], not weights.model)
    return commands


def _refuse_other_formats(source: Source, target: TargetModel, options: ExportOptions) -> None:
    """Raises `UserError` if the model has a head of scores or a pooling, and a format other than
    safetensors is asked for: only safetensors can hold them.
    """
    others = sorted(set(options.formats) - {SAFETENSORS})
    missing = "pooling" if source.method.embeds else ""
    if has_scores(target.model):
        missing = "head of scores"
    if others and missing:
        raise UserError(
            f"{source.path}: {others[0]} has no {missing}; export safetensors, and no other format"
        )


def _check_output_is_apart(source: Source, output: Path) -> None:
    """Raises `UserError` if `output` holds a file of the source, or of the base under its adapter.

    Replacing `output` would remove that file.
    """
    tensors = list(source.tensors.values())
    if source.adapter is not None:
        tensors += source.adapter.tensors.values()
    files = {part.path for tensor in tensors for part in tensor.parts}
    if any(
        path.resolve().is_relative_to(output.resolve())
        for path in (source.path, source.description, *files)
    ):
        raise UserError(f"{output}: holds what is exported; choose another --output")


def _describe_result(source: Source, weights: Weights) -> str:
    """Describes the export for the line on its folder: its size, its dtype, and whether a tokenizer
    is missing.
    """
    if not weights.model:
        return f"an adapter of {disk_size(weights.byte_count)}"
    size = disk_size(sum(shard.byte_count for shard in weights.model))
    has_own = has_tokenizer(source.tokenizer)
    tokenizer = "" if has_own else ", without a tokenizer, since the source has none"
    return f"{size} in {str(weights.dtype).removeprefix('torch.')}{tokenizer}"


QUESTION = "What can you do?"  # the text in commands


def _run_python(code: str) -> str:
    """Makes the command that runs a line of Python."""
    return shlex.join(["python", "-c", code])


def _make_scoring_command(folder: Path, scores_tokens: bool) -> str:
    """Makes the command that scores a text by an exported reward model or classifier.

    `scores_tokens`: whether the model scores each token instead of the whole text.
    """
    if scores_tokens:
        pipeline = f"pipeline('token-classification', {str(folder)!r}, ignore_labels=[])"
    else:
        pipeline = (
            f"pipeline('text-classification', {str(folder)!r}, top_k=None, "
            "function_to_apply='none')"
        )
    return _run_python(f"from transformers import pipeline; print({pipeline}('{QUESTION}'))")


def _make_library_command(class_name: str, folder: Path, call: str) -> str:
    """Makes the command that opens `folder` by sentence-transformers and prints a method's result.

    Args:
        class_name: The class of sentence-transformers.
        folder: The export.
        call: The method with its arguments.
    """
    return _run_python(
        f"from sentence_transformers import {class_name}; "
        f"print({class_name}({str(folder)!r}).{call})"
    )


def _list_model_commands(
    source: Source, target: TargetModel, folder: Path, *, is_quantized: bool
) -> dict[str, str]:
    """Lists the commands for a folder with a model that writes text: {program: command}."""
    config = target.config_json
    model_type = str(config.get("model_type"))
    kinds = list_kinds_of_model(config, bool(source.recipe.get("added_tokens")))
    is_served = not is_quantized and was_served(model_type, kinds)
    # mlx-lm ignores YaRN's attention_factor, and fails on LongRoPE.
    has_mlx_rope = not {"attention_factor", "long_factor"} & find_main_rope(config).keys()
    opens_in_mlx = not is_quantized and find_family(model_type).opens_in_mlx and has_mlx_rope
    is_vision_language = bool(target.beside)
    if has_chat_template(source.tokenizer):
        prompt = f"[dict(role='user', content='{QUESTION}')]"
        index_of_answer = "[0]['generated_text'][-1]['content']"
    else:
        prompt = f"'{QUESTION}'"
        index_of_answer = "[0]['generated_text']"
    code = (
        "from transformers import pipeline; print(pipeline('text-generation', "
        f"{str(folder)!r})({prompt}){index_of_answer})"
    )
    # Double quotes are easier to read, but a shell interprets these characters between them.
    if set(code) & set('"$`\\!'):
        commands = {"transformers": _run_python(code)}
    else:
        commands = {"transformers": f'python -c "{code}"'}
    # transformers opens it by another pipeline, whose messages with images are too long for a line.
    if is_vision_language:
        chat = ["finetune", "chat", str(folder), "--image", "IMAGE", "--prompt", "What is this?"]
        commands = {"finetune": shlex.join(chat)}
    if is_served:
        commands["vLLM"] = shlex.join(serve_model(folder))
    if opens_in_mlx and not is_vision_language:
        commands["MLX"] = shlex.join(
            ["mlx_lm.generate", "--model", str(folder), "--prompt", QUESTION]
        )
    return commands


def _list_adapter_commands(
    folder: Path, base: str | None, config: Mapping[str, Any], model_type: str, *, other_names: bool
) -> dict[str, str]:
    """Lists the commands that use an adapter's folder on its base: {program: command}.

    vLLM is among them only if it was seen to serve such an adapter of this family.

    Args:
        folder: The adapter's folder.
        base: A folder or hub name of the base; None if it is not known.
        config: The content of adapter_config.json.
        model_type: The base's family.
        other_names: Whether vLLM needs a copy of the adapter with other names than PEFT's.
    """
    commands = dict[str, str]()
    served_folder = folder
    rename_first = ""
    has_peft_names = NAMES_KEY not in config
    if has_peft_names:
        commands["finetune"] = f"finetune chat {shlex.quote(str(folder))}"
    if other_names and has_peft_names:
        served_folder = folder.with_name(f"{folder.name}-vllm")
        rename = ["finetune", "export", str(folder), "--output", str(served_folder)]
        rename_first = f"{shlex.join([*rename, '--adapter-only', '--adapter-names', 'vllm'])} && "
    serve = serve_adapter(served_folder, base, config)
    if serve is not None and was_served(model_type, list_kinds_of_adapter(config)):
        commands["vLLM"] = rename_first + shlex.join(serve)
    return commands


def format_commands(commands: Mapping[str, str]) -> list[str]:
    """Formats {program: command} as lines for the terminal; the first one begins with "use".

    >>> format_commands({"vLLM": "vllm serve out"})
    ['use     vLLM          vllm serve out']
    """
    if not commands:
        return []
    width = max(14, *(len(program) + 2 for program in commands))
    lines = [f"{program:<{width}}{command}" for program, command in commands.items()]
    return [f"{'use' if number == 0 else '':<8}{line}" for number, line in enumerate(lines)]
