"""From a run or a checkpoint to a Hugging Face folder: the order of events."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from finetune.durable import write_file
from finetune.errors import UserError
from finetune.export import lora_merge as lora
from finetune.export import target as architecture
from finetune.export.metadata import (
    copy_tokenizer,
    has_tokenizer,
    refuse_tokenizer_code,
    write_descriptions,
    write_json,
)
from finetune.export.model_card import model_card
from finetune.export.preflight import refuse_mistakes
from finetune.export.progress import progress_bar
from finetune.export.publish import refuse_full_disk, staged
from finetune.export.push import push
from finetune.export.reload_process import fresh_process
from finetune.export.source import Source, open_source, wanted_dtype
from finetune.export.target import Architecture
from finetune.export.values import Value, matched, stored_value
from finetune.export.verify import checkpoint_logits, logits_bound, verify_logits, verify_weights
from finetune.export.writing import Shard, shards_of, write_weights
from finetune.units import disk_size, read_size

CARD_FILE = "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What of a source is exported, and how."""

    dtype: str | None = None  # left out, the base checkpoint's
    max_shard_size: str = "5GB"
    verify: bool = True
    overwrite: bool = False
    merged: bool = True  # LoRA: the merged model
    adapter: bool = True  # LoRA: the adapter as a PEFT folder; in `adapter/` beside a merged model
    trust_remote_code: bool = False


def export(
    run_or_checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    verify: bool = True,
    overwrite: bool = False,
    adapter_only: bool = False,
    base_model: str | None = None,
    trust_remote_code: bool = False,
    push_to_hub: str | None = None,
    tell: Callable[[str], object] = print,
) -> Path:
    """Makes the Hugging Face folder `output` from a run, a checkpoint, or a folder of others (`sources` lists them).

    One process is enough, without a GPU or a process group. Memory stays bounded: a few blocks of rows, and in
    verification one tensor. `output` appears when it is complete and verified, or not at all.

    Raises `UserError` where the source or the result is not right. A hub that does not answer is told, not raised.
    """
    refuse_mistakes(
        Path(run_or_checkpoint), Path(output), dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite
    )
    source = open_source(Path(run_or_checkpoint), base_model=base_model, tell=tell)
    options = Options(
        dtype=dtype,
        max_shard_size=max_shard_size,
        verify=verify,
        overwrite=overwrite,
        merged=not adapter_only,
        trust_remote_code=trust_remote_code,
    )
    made = export_source(source, Path(output), options, tell)
    if push_to_hub is not None:
        push(made, push_to_hub, tell)
    return made


def export_run(
    run: Path, *, checkpoint: Path | None = None, verify: bool = True, tell: Callable[[str], object] = print
) -> Path:
    """What a run leaves at its end: `export/`, and for LoRA `adapter/`. One process calls it, after the last checkpoint.

    It is made from `checkpoint`; left out, from the run's newest. What an earlier end of the same run has left is replaced.
    """
    source = open_source(checkpoint or run, tell=tell)
    options = Options(verify=verify, overwrite=True, trust_remote_code=bool(source.recipe.get("trust_remote_code")))
    if source.adapter is not None:
        export_source(source, run / "adapter", replace(options, merged=False), tell)
    return export_source(source, run / "export", replace(options, adapter=False), tell)


def export_source(source: Source, output: Path, options: Options, tell: Callable[[str], object]) -> Path:
    """`export` of a source that has been opened. The name of `output`, or of the run that it is a part of, is the card's."""
    output = output.absolute()
    name = output.parent.name if output.parent == source.run else output.name
    if source.adapter is None and not options.merged:
        raise UserError(f"{source.path}: holds no adapter; leave --adapter-only out")
    _refuse_loss(source, output)
    built = architecture.build(source.description, trust_remote_code=options.trust_remote_code)
    with _without_torch_threads(), staged(output, overwrite=options.overwrite) as staging:
        if options.merged:
            told = _export_model(source, built, staging, name, options)
        if source.adapter is not None and options.adapter:
            folder = staging / "adapter" if options.merged else staging
            folder.mkdir(exist_ok=True)
            adapter_told = _export_adapter(source, source.adapter, built, folder, name, options)
            told = told if options.merged else adapter_told
    tell(f"{output}: {told}")
    return output


def _refuse_loss(source: Source, output: Path) -> None:
    """Raises `UserError` where replacing `output` would remove what is exported, or the base that it stands on."""
    adapter = source.adapter.tensors.values() if source.adapter is not None else ()
    files = {piece.path for tensor in (*source.tensors.values(), *adapter) for piece in tensor.pieces}
    if any(path.resolve().is_relative_to(output.resolve()) for path in (source.path, source.description, *files)):
        raise UserError(f"{output}: holds what is exported; choose another --output")


def _export_model(source: Source, built: Architecture, staging: Path, name: str, options: Options) -> str:
    if not options.trust_remote_code:
        refuse_tokenizer_code(source.description)
    dtype = wanted_dtype(source, built.config_json, options.dtype)
    stored = matched(source.tensors, built, str(source.path), prefixed=source.names_may_be_prefixed)
    updates: dict[str, lora.Update] = {}
    if source.adapter is not None:
        updates = lora.updates(source.adapter, built, str(source.path))
        lora.refuse_unmergeable(source.adapter, updates, built, str(source.path))
        stored |= lora.own_bases(source.adapter)

    def value(name: str) -> Value:
        written_as = built.dtype(name, stored[name].dtype, dtype)
        if name in updates:
            return lora.merged(updates[name], stored[name], name, written_as)
        return stored_value(stored[name], name, written_as)

    shards = shards_of([value(name) for name in built.shapes], read_size(options.max_shard_size))
    trust = options.trust_remote_code
    refuse_full_disk(staging, _byte_count(shards))
    write_descriptions(staging, source, built, dtype, trust_remote_code=trust)
    write_file(staging / CARD_FILE, [model_card(source, name).encode(errors="backslashreplace")])
    told = f"{_size(shards)} in {str(dtype).removeprefix('torch.')}"
    told += "" if has_tokenizer(source.description) else ", without a tokenizer, since there was none"
    if not options.verify:
        _write(staging, shards)
        return f"{told}, not verified"
    bound = logits_bound(stored, dtype, is_merged=source.adapter is not None)
    with fresh_process(staging, trust) as fresh, checkpoint_logits(source, built, stored, trust) as logits:
        digests = _write(staging, shards)
        fresh.open_folder()  # it goes on while the values are read back here
        _verify(staging, shards, digests)
        difference = verify_logits(logits.result(), fresh.logits(), bound)
    agreement = f"logits within {difference:.1g}" if difference else "identical logits"
    return f"{told}, verified: every value, and {agreement} in a fresh process"


def _export_adapter(
    source: Source, adapter: lora.Adapter, built: Architecture, folder: Path, name: str, options: Options
) -> str:
    wanted = getattr(torch, options.dtype) if options.dtype and not options.merged else None
    if lora.why_unmergeable(adapter.config) is None:  # a kind that is understood: is it whole, and of this base?
        lora.updates(adapter, built, str(source.path))
    values = [
        replace(stored_value(tensor, name, wanted or tensor.dtype), name=lora.PEFT_PREFIX + name)
        for name, tensor in sorted(adapter.tensors.items())
    ]
    shards = [Shard(lora.WEIGHTS_FILE, tuple(values))]
    refuse_full_disk(folder, _byte_count(shards))
    digests = _write(folder, shards)
    config = adapter.config | {"base_model_name_or_path": source.base_model, "inference_mode": True}
    write_json(folder / lora.CONFIG_FILE, config)
    write_file(folder / CARD_FILE, [model_card(source, name, is_adapter=True).encode(errors="backslashreplace")])
    if not options.merged:
        copy_tokenizer(source.description, folder)
    if options.verify:
        _verify(folder, shards, digests)
    return f"an adapter of {_size(shards)}" + ("" if options.verify else ", not verified")


def _write(folder: Path, shards: list[Shard]) -> dict[str, bytes]:
    with progress_bar("writing", _byte_count(shards)) as advance:
        return write_weights(folder, shards, advance)


def _verify(folder: Path, shards: list[Shard], digests: dict[str, bytes]) -> None:
    with progress_bar("verifying", _byte_count(shards)) as advance:
        verify_weights(folder, shards, digests, advance)


def _byte_count(shards: list[Shard]) -> int:
    return sum(shard.byte_count for shard in shards)


def _size(shards: list[Shard]) -> str:
    return disk_size(_byte_count(shards))


@contextmanager
def _without_torch_threads() -> Iterator[None]:
    """In this block torch computes in the thread that asks it to, and starts none of its own.

    What an export does goes on side by side already, in three threads and a process. torch's threads, several for each of
    these, would outnumber the cores and wait for each other: on busy cores a cast then takes eight times its CPU time. And
    the order of sums would depend on the machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # for this thread, and for those that are started from now on
    try:
        yield
    finally:
        torch.set_num_threads(before)
