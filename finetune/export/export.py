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
from finetune.config.methods import fills_masks
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
from finetune.export.sentence_transformer import is_embedder, is_reranker
from finetune.export.source import Source, open_source
from finetune.export.target import TargetModel, describe_target
from finetune.export.values import refuse_idle
from finetune.export.verify import start_logits, start_verification
from finetune.export.vllm_names import has_other_names
from finetune.export.write import Weights, make_files, plan_weights, write_weights
from finetune.files.json_files import read_json_object
from finetune.files.network import check_push, push_folder
from finetune.files.phases import Phases
from finetune.files.tensors import read_files
from finetune.models.quantized_weights import one_torch_thread
from finetune.units import disk_size


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
    """Makes the Hugging Face folder `output` from a run, a checkpoint, or another tool's folder
    (see export/source.py).

    One process is enough, without a GPU or a process group. Memory stays bounded: a few blocks of
    rows, and in verification one tensor. `output` appears when it is complete and verified, or not
    at all.

    Args:
        run_or_checkpoint: The source.
        output: The folder to make.
        formats: Of config/export_formats.py.
        adapter_only: LoRA: the PEFT folder alone, nothing merged.
        base_model: The base, where the checkpoint does not name it.
        push_to_hub: The repository to upload to. A failed push is logged, not raised.
        log: Takes the lines that say what was made.
        others: `dtype`, `max_shard_size`, `verify`, `overwrite`, `trust_remote_code`,
            `adapter_names` and `merge_onto` of `ExportOptions`, and the keys of the formats in
            config/export_formats.py.

    Raises:
        UserError: Where the source or the result is wrong, or an argument is unknown.
    """
    given = {
        field.name: others.pop(field.name)
        for field in fields(ExportOptions)
        if field.name in others
    }
    options = ExportOptions(model=not adapter_only, formats=tuple(formats), keys=others, **given)
    check_request(Path(run_or_checkpoint), Path(output), options)
    if push_to_hub is not None:
        check_push(push_to_hub)
    source = open_source(Path(run_or_checkpoint), base_model=base_model, log=log)
    exported = export_source(source, Path(output), options, log)
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
    """Writes a finished run's `export/`, and for LoRA `adapter/`.

    One process calls it, after the last checkpoint.

    The source is `checkpoint`, by default the run's newest. Earlier exports of the run are
    replaced. `phases` gets the seconds of the export and of its check.
    """
    phases = phases or Phases()
    with phases.timed("export"):
        return _export_run(run, checkpoint, verify, log, phases)


def _export_run(
    run: Path, checkpoint: Path | None, verify: bool, log: Callable[[str], object], phases: Phases
) -> Path:
    source = open_source(checkpoint or run, log=log)
    trust_remote_code = bool(source.recipe.get("trust_remote_code"))
    options = ExportOptions(verify=verify, overwrite=True, trust_remote_code=trust_remote_code)
    if source.adapter is not None:
        export_source(source, run / ADAPTER, replace(options, model=False), log, phases=phases)
    formats = tuple(source.recipe.get("export_formats") or options.formats)
    keys = {key.name: source.recipe.get(key.recipe_key) for key in list_keys() if key.recipe_key}
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
    """Exports an open source, as `export` does.

    The model card's title is the name of `output`, or of the run that it belongs to.

    Args:
        source: The model, opened by `open_source`.
        output: The folder to make.
        options: What to export, and how.
        log: Takes the lines that say what was made.
        reload: The separate process of the verification; None starts one.
        phases: Takes the seconds of the verification.
    """
    phases = phases or Phases()
    output = output.absolute()
    _check_output_is_apart(source, output)
    title = output.parent.name if output.parent == source.run else output.name
    target = describe_target(
        source.description,
        trust_remote_code=options.trust_remote_code,
        adapter=source.adapter_names,
    )
    _refuse_other_formats(source, target, options)
    if source.adapter is not None and options.verify:
        refuse_idle(source.adapter, str(source.path))
    # With all of torch's threads: this computes more than it reads.
    merge = choose_merge(source, target, options, log)
    # An export works in several threads and a process: torch's own for each of them would outnumber
    # the cores and wait for each other, and on busy cores a cast takes eight times its CPU time.
    with one_torch_thread(), publish(output, overwrite=options.overwrite) as folder:
        account = NOTHING_CARRIED  # of the base's tensors that were not trained
        if options.model:
            account = account_for_base(source, target, options.formats)
        target = account.target or target
        weights = plan_weights(source, target, options, merge, account)
        others = [
            plan(source, target, weights, options, title, log)
            for plan in load_planners(options.formats)
        ]
        planned = PlannedFiles(source, target, weights, options, others)
        check_disk_space(folder, planned.byte_count)
        write_metadata(folder, source, target, weights, title, options)
        lines = planned.write(folder, output, reload, phases)
    lines += describe_use(_find_commands(source, target, weights, options, output))
    for line in lines:
        log(line)
    return output


@dataclass(frozen=True, slots=True)
class PlannedFiles:
    """The files with values that an export will have."""

    source: Source
    target: TargetModel
    weights: Weights
    options: ExportOptions
    others: Sequence[PlannedFormat]  # formats beside or without the Hugging Face folder

    @property
    def is_folder(self) -> bool:
        """Whether a Hugging Face folder is written."""
        return SAFETENSORS in self.options.formats

    @property
    def is_proven(self) -> bool:
        """Whether the model's logits are compared with the checkpoint's."""
        return self.options.verify and bool(self.weights.model)

    @property
    def byte_count(self) -> int:
        of_folder = self.weights.byte_count if self.is_folder else 0
        return of_folder + sum(planned.byte_count for planned in self.others)

    def write(
        self, folder: Path, output: Path, reload: ReloadProcess | None, phases: Phases
    ) -> list[str]:
        """Writes and verifies all files; returns the lines that say what was made.

        Args:
            folder: Where they are written.
            output: What `folder` will be renamed to.
            reload: The separate process of the verification; None starts one.
            phases: Takes the seconds of the verification.
        """
        lines = []
        computed_logits: AbstractContextManager[Any] = nullcontext()
        if self.is_proven:
            trusted = self.options.trust_remote_code
            computed_logits = start_logits(self.source, self.target, self.weights, trusted)
        with computed_logits as logits:
            if self.is_folder:
                verdict = self._write_folder(folder, logits, reload, phases)
                lines.append(f"{output}: {_describe(self.source, self.weights)}{verdict}")
                lines += [f"base    {sentence}" for sentence in self.weights.account.sentences]
            if self.source.has_critic:
                place = self.source.path
                lines.append(f"critic  left out; {place} keeps it, and only training reads it")
            for planned in self.others:
                lines += [f"{output}/{line}" for line in planned.write(folder, logits)]
        return lines

    def _write_folder(
        self,
        folder: Path,
        logits: CheckpointLogits | None,
        reload: ReloadProcess | None,
        phases: Phases,
    ) -> str:
        """Writes the values of a Hugging Face folder, verifies them, and returns the verdict."""
        make_files(folder, self.weights)
        with start_verification(folder, self.weights, self.options, logits, reload) as (
            on_disk,
            verify,
        ):
            written = write_weights(folder, self.weights, on_disk)
            with phases.timed("check"):
                verdict = verify(written)
        if self.is_proven:
            exported = read_files(folder / shard.name for shard in self.weights.model)
            # the card must name what is not written
            card = (folder / CARD_FILE).read_text(encoding="utf-8")
            self.weights.account.refuse_lost(exported.keys(), card)
        return verdict


def export_for_vllm(folder: Path, output: Path) -> Path:
    """Returns a folder from which vLLM loads the adapter in the PEFT folder `folder`.

    It is `folder`, unless vLLM has other names for the adapted modules; then it is `output`, a copy
    under these names.
    """
    source = open_source(folder, log=lambda line: None)
    config = read_json_object(source.description / CONFIG_FILE)
    if not has_other_names(source.adapter_names, str(config.get("model_type"))):
        return folder
    options = ExportOptions(model=False, verify=False, overwrite=True, adapter_names="vllm")
    return export_source(source, output, options, log=lambda line: None)


def _find_commands(
    source: Source, target: TargetModel, weights: Weights, options: ExportOptions, output: Path
) -> dict[str, str]:
    """Finds the commands with which a person uses the export: program -> command."""
    if fills_masks(source.recipe):
        return {}  # these programs write one token after another
    of_files = _find_file_commands(weights, options, output)
    if not weights.model:
        if source.adapter is None or SAFETENSORS not in options.formats:
            return of_files
        model_type = str(target.config_json.get("model_type"))
        of_adapter = use_adapter(
            output,
            source.base_model,
            dict(weights.adapter_config),
            model_type,
            other_names=has_other_names(source.adapter.tensors, model_type),
        )
        return of_adapter | of_files
    folders = [name for name in options.formats if EXPORT_FORMATS[name].is_folder]
    if not folders:
        return of_files
    # Without safetensors the first format's folder is used: `output`, or one in it beside others.
    is_in_output = SAFETENSORS not in folders and not is_alone(folders[0], options)
    folder = output / folders[0] if is_in_output else output
    if is_reranker(source.recipe):
        call = f"rank('{QUESTION}', ['Yes.', 'Why?'])"
        return {"sentence-transformers": _use_library("CrossEncoder", folder, call)}
    if has_scores(target.model):
        return {"transformers": _score_by_pipeline(folder, scores_tokens(target.model.config))}
    if is_embedder(source.recipe):
        call = f"encode_query('{QUESTION}')"
        return {"sentence-transformers": _use_library("SentenceTransformer", folder, call)}
    is_quantized = SAFETENSORS not in folders
    return _find_folder_commands(source, target, folder, is_quantized=is_quantized) | of_files


def _find_file_commands(weights: Weights, options: ExportOptions, output: Path) -> dict[str, str]:
    """Finds the commands for formats of one file, such as GGUF: program -> command."""
    commands = dict[str, str]()
    for name in options.formats:
        row = EXPORT_FORMATS[name]
        files = sorted(output.glob(f"*{row.suffix}")) if row.suffix is not None else []
        if files:
            commands |= row.use(files[0], not weights.model)
    return commands


def _find_folder_commands(
    source: Source, target: TargetModel, folder: Path, *, is_quantized: bool
) -> dict[str, str]:
    """Finds the commands for a folder with a model that writes text: program -> command."""
    config = target.config_json
    model_type = str(config.get("model_type"))
    kinds = list_kinds_of_model(config, bool(source.recipe.get("added_tokens")))
    rope = config.get("rope_parameters") or {}
    has_mlx_rope = not {"attention_factor", "long_factor"} & rope.keys()
    return use_model(
        folder,
        has_template=has_chat_template(source.description),
        is_vision_language=bool(target.beside),
        is_served=not is_quantized and was_served(model_type, kinds),
        opens_in_mlx=not is_quantized and find_family(model_type).opens_in_mlx and has_mlx_rope,
    )


def _refuse_other_formats(source: Source, target: TargetModel, options: ExportOptions) -> None:
    """Raises `UserError` where a format cannot hold the head of scores, or the pooling, of the
    model.
    """
    others = sorted(set(options.formats) - {SAFETENSORS})
    missing = "pooling" if is_embedder(source.recipe) else ""
    if has_scores(target.model):
        missing = "head of scores"
    if others and missing:
        raise UserError(
            f"{source.path}: {others[0]} has no {missing}; export safetensors, and no other format"
        )


def _check_output_is_apart(source: Source, output: Path) -> None:
    """Raises `UserError` where replacing `output` would remove the source, or the base model under
    it.
    """
    adapter = source.adapter.tensors.values() if source.adapter is not None else ()
    files = {part.path for tensor in (*source.tensors.values(), *adapter) for part in tensor.parts}
    if any(
        path.resolve().is_relative_to(output.resolve())
        for path in (source.path, source.description, *files)
    ):
        raise UserError(f"{output}: holds what is exported; choose another --output")


def _describe(source: Source, weights: Weights) -> str:
    """Describes the export for the last line: its size, its dtype, and a missing tokenizer."""
    if not weights.model:
        return f"an adapter of {disk_size(weights.byte_count)}"
    size = disk_size(sum(shard.byte_count for shard in weights.model))
    has_own = has_tokenizer(source.description)
    tokenizer = "" if has_own else ", without a tokenizer, since the source has none"
    return f"{size} in {str(weights.dtype).removeprefix('torch.')}{tokenizer}"


QUESTION = "What can you do?"


def _score_by_pipeline(folder: Path, scores_tokens: bool) -> str:
    """The command that scores a text by an exported reward model or classifier."""
    if scores_tokens:
        scored = f"pipeline('token-classification', {str(folder)!r}, ignore_labels=[])"
    else:
        scored = (
            f"pipeline('text-classification', {str(folder)!r}, top_k=None, "
            "function_to_apply='none')"
        )
    return shlex.join(
        ["python", "-c", f"from transformers import pipeline; print({scored}('{QUESTION}'))"]
    )


def _use_library(name: str, folder: Path, call: str) -> str:
    """The command that embeds a text by an exported embedder, or ranks documents by a reranker."""
    code = f"from sentence_transformers import {name}; print({name}({str(folder)!r}).{call})"
    return shlex.join(["python", "-c", code])


def use_model(
    folder: Path,
    *,
    has_template: bool,
    is_vision_language: bool,
    is_served: bool,
    opens_in_mlx: bool,
) -> dict[str, str]:
    """Returns the commands that use a Hugging Face folder, by the program.

    Args:
        folder: The export.
        has_template: Whether its tokenizer has a chat template.
        is_vision_language: Whether it reads images.
        is_served: Whether vLLM was seen to serve its family.
        opens_in_mlx: Whether mlx-lm opens it.
    """
    if has_template:
        asked = f"[dict(role='user', content='{QUESTION}')]"
        answer = "[0]['generated_text'][-1]['content']"
    else:
        asked = f"'{QUESTION}'"
        answer = "[0]['generated_text']"
    code = (
        "from transformers import pipeline; print(pipeline('text-generation', "
        f"{str(folder)!r})({asked}){answer})"
    )
    if set(code) & set('"$`\\!'):  # characters that a shell reads within double quotes
        commands = {"transformers": shlex.join(["python", "-c", code])}
    else:
        commands = {"transformers": f'python -c "{code}"'}
    # another pipeline, which an image's message fits better than a line of a shell
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


def use_adapter(
    folder: Path, base: str | None, config: Mapping[str, Any], family: str, *, other_names: bool
) -> dict[str, str]:
    """The commands that use an adapter's folder on its base, of the model_type `family`; vLLM's
    where it was seen to work.

    other_names: Whether vLLM loads the adapter under other names than peft, from a copy beside it.
    """
    commands = dict[str, str]()
    served = folder
    before = ""
    has_peft_names = NAMES_KEY not in config
    if has_peft_names:
        commands["finetune"] = f"finetune chat {shlex.quote(str(folder))}"
    if other_names and has_peft_names:
        served = folder.with_name(f"{folder.name}-vllm")
        rename = ["finetune", "export", str(folder), "--output", str(served)]
        before = f"{shlex.join([*rename, '--adapter-only', '--adapter-names', 'vllm'])} && "
    serve = serve_adapter(served, base, config)
    if serve is not None and was_served(family, list_kinds_of_adapter(config)):
        commands["vLLM"] = before + shlex.join(serve)
    return commands


def describe_use(commands: Mapping[str, str]) -> list[str]:
    """The commands, for the terminal.

    >>> describe_use({"vLLM": "vllm serve out"})
    ['use     vLLM          vllm serve out']
    """
    width = 0
    if commands:
        width = max(14, *(len(program) + 2 for program in commands))
    lines = [f"{program:<{width}}{command}" for program, command in commands.items()]
    return [f"{'use' if number == 0 else '':<8}{line}" for number, line in enumerate(lines)]
