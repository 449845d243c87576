"""GGUF beside or instead of safetensors: the files of a model and of an adapter, and the proof that
they are right.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from finetune.config.export_formats import LLAMA_CPP, is_installed
from finetune.config.pretrained import why_unsupported
from finetune.constants import Names
from finetune.errors import UserError, first_line, progress_bar
from finetune.export.formats.gguf_file import (
    FILE_TYPES,
    PlannedFile,
    file_name,
    find_differences,
    plan_file,
    quantize,
    run_llama_cpp,
    write_file,
)
from finetune.export.formats.gguf_model import (
    FileTensor,
    check_config,
    find_llama_cpp,
    plan_tensors,
    write_rope,
    write_sizes,
)
from finetune.export.formats.gguf_tokenizer import (
    GgufVocabulary,
    describe_tokenizer,
    write_tokenizer,
)
from finetune.export.logits import CheckpointLogits, Logits, make_prompts
from finetune.export.publish import ExportOptions
from finetune.export.source import Adapter, Source
from finetune.export.target import TargetModel, Value, stored_value
from finetune.export.values import scale_of
from finetune.export.verify import refuse_differences
from finetune.export.write import Weights
from finetune.files.tensors import StoredTensor
from finetune.units import counted, disk_size

# The largest ‖llama.cpp − checkpoint‖ / ‖checkpoint‖ of the logits that a type explains: llama.cpp
# rounds not only the weights, but what it multiplies them with. What it quantizes itself is
# printed, and bounded by a wrong tensor's error.
BOUNDS = {"f32": 1e-3, "f16": 0.02, "bf16": 0.1, "q8_0": 0.1}
QUANTIZED_BOUND = 1.0
INCOMPLETE = "not exported: the file does not hold what the model needs"
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
CONVERSATION = [
    {"role": "user", "content": "What's 12,345 + 1?"},
    {"role": "assistant", "content": "It's 12,346."},
]
TEXT = (
    "Once upon a time, in 1989, they'd say: I'LL go!\n\n\t  Tabs,   spaces\n \n and  3.14159 (or "
    "22/7)...\r\nna\u00efve \u041f\u0440\u0438\u0432\u0435\u0442 \u4f60\u597d\uff0c\u4e16\u754c "
    "\U0001f999\U0001f999 "
    'camelCase HTTPServer __init__ "quoted"??!'
)


@dataclass(frozen=True, slots=True)
class GgufPlan:
    """The files of an export. Returned by `plan_gguf`."""

    files: tuple[PlannedFile, ...]  # that are written here; the first is what llama.cpp quantizes
    types: Names  # of `files`
    quantized: tuple[tuple[str, str], ...]  # name and type of the files that llama.cpp makes
    asked: frozenset[str]  # the names that stay
    tokenizer: Any  # transformers'
    vocabulary: int  # the model's

    @property
    def byte_count(self) -> int:
        return (
            sum(file.byte_count for file in self.files)
            + len(self.quantized) * self.files[0].byte_count
        )

    def write(self, folder: Path, logits: CheckpointLogits | None) -> list[str]:
        """Writes the files into `folder`, and returns a line on each.

        `logits`: of `make_prompts`; None: unverified.

        Raises `UserError` where what is read back differs, or llama.cpp computes something else.
        """
        said = []
        with progress_bar("writing GGUF", sum(file.byte_count for file in self.files)) as advance:
            for file, file_type in zip(self.files, self.types, strict=True):
                written = write_file(folder, file, advance)
                verdict = "not verified"
                if logits is not None:
                    refuse_differences(
                        find_differences(folder / file.name, file, written),
                        f"{file.name}: {INCOMPLETE}",
                    )
                    if file.name in self.asked:
                        ran = _compare_with_llama_cpp(
                            folder / file.name, self, logits, BOUNDS[file_type]
                        )
                        verdict = f"verified: every tensor, {ran}"
                said.append((file.name, f"{disk_size(file.byte_count)}, {verdict}"))
        for name, file_type in self.quantized:
            quantize(folder / self.files[0].name, folder / name, file_type)
            verdict = "not verified"
            if logits is not None:
                error = _largest_error(folder / name, self.files[0])
                ran = _compare_with_llama_cpp(folder / name, self, logits, QUANTIZED_BOUND)
                verdict = f"verified: every tensor within {error:.2g} of its norm, {ran}"
            said.append((name, f"{disk_size((folder / name).stat().st_size)}, {verdict}"))
        for file in self.files:
            if file.name not in self.asked:
                (folder / file.name).unlink()
        return [f"{name}: {text}" for name, text in said if name in self.asked]


def plan_gguf(
    source: Source,
    target: TargetModel,
    weights: Weights,
    options: ExportOptions,
    title: str,
    log: Callable[[str], object],
) -> "GgufPlan | AdapterPlan":
    """Plans the files of the model, or of the adapter alone, down to the header of each.

    Reads no values.

    Raises `UserError` where llama.cpp would compute another model, or has no such tokenizer.
    """
    if not options.model:
        return _plan_adapter(source, target, options, title)
    where = str(source.description)
    if target.beside:
        raise UserError(
            f"{where}: --format gguf: a vision-language model; its tower is not exported as GGUF"
        )
    model: Any = target.model
    config = model.config.get_text_config()
    notes = list(check_config(config, where))
    tokenizer = _load_tokenizer(source, options)
    vocabulary = describe_tokenizer(
        tokenizer, config.vocab_size, source.description, options["gguf_pre_tokenizer"]
    )
    if weights.account.carried:
        carried = counted(len(weights.account.carried), "tensor")
        notes.append(
            f"GGUF is written without {carried} of the base that {target.class_name} has no place "
            "for"
        )
    notes += vocabulary.notes
    if not (options.verify and is_installed("llama_cpp")):
        notes += vocabulary.doubts
    for note in notes:
        log(f"note: {note}")

    types = _choose_types(options, DTYPES[weights.dtype])
    tensors = plan_tensors(weights.values, config, where)
    architecture = find_llama_cpp(config.model_type).architecture
    write_keys = partial(
        _write_keys, config=config, vocabulary=vocabulary, title=title, where=where
    )
    names = {each: f"{file_name(title)}-{each.upper()}.gguf" for each in types.all}
    return GgufPlan(
        files=tuple(
            plan_file(names[each], architecture, tensors, each, write_keys)
            for each in types.written
        ),
        types=types.written,
        quantized=tuple((names[each], each) for each in types.quantized),
        asked=frozenset(names[each] for each in types.asked),
        tokenizer=tokenizer,
        vocabulary=config.vocab_size,
    )


def _load_tokenizer(source: Source, options: ExportOptions) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            source.description, trust_remote_code=options.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(
            f"{source.description}: --format gguf: needs a tokenizer, which does not load: {reason}"
        ) from None


@dataclass(frozen=True, slots=True)
class _Types:
    """Types of GGUF files, by who writes them."""

    asked: Names
    written: Names  # here; llama.cpp quantizes the first
    quantized: Names  # by llama.cpp

    @property
    def all(self) -> Names:
        return (*self.written, *self.quantized)


def _choose_types(options: ExportOptions, exact: str) -> _Types:
    """Which types are written for those asked for. `exact`: the one that rounds no weight."""
    asked = tuple(options["gguf_types"]) or (exact,)
    quantized = tuple(each for each in asked if each not in FILE_TYPES)
    written = [each for each in asked if each in FILE_TYPES and each != exact]
    if exact in asked or quantized:
        written.insert(0, exact)
    return _Types(asked, tuple(written), quantized)


def _shown_name(title: str, vocabulary: GgufVocabulary) -> str:
    """`title`, so that llama.cpp strips the spaces after special tokens where the tokenizer does.

    It decides that by whether the name has "phi-3" in it, and fails where these tokens are missing
    then.
    """
    if vocabulary.strips_after and {"</s>", "<unk>", "<s>", "<|endoftext|>"} <= set(
        vocabulary.tokens
    ):
        if re.search("phi-?3", title, re.IGNORECASE):
            return title
        return f"{title} (phi-3)"
    return re.sub("(phi)-?3", r"\1 3", title, flags=re.IGNORECASE)


def _write_keys(
    writer: Any, config: Any, vocabulary: GgufVocabulary, title: str, where: str
) -> list[FileTensor]:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(_shown_name(title, vocabulary))
    write_sizes(writer, config)
    write_tokenizer(writer, vocabulary)
    return write_rope(writer, config, where)


def _compare_with_llama_cpp(
    path: Path, plan: GgufPlan, logits: CheckpointLogits, bound: float
) -> str:
    if not is_installed("llama_cpp"):
        return f"not run under llama.cpp, which is not installed ({LLAMA_CPP})"
    texts = [(TEXT, True)]
    if plan.tokenizer.chat_template:
        texts.append((plan.tokenizer.apply_chat_template(CONVERSATION, tokenize=False), False))
    logits_found, tokens = run_llama_cpp(path, make_prompts(plan.vocabulary).tolist(), texts)
    for (text, begins), theirs in zip(texts, tokens, strict=True):
        # no warning of the length
        ours = plan.tokenizer.encode(text, add_special_tokens=begins, verbose=False)
        _compare_tokens(path.name, plan.tokenizer, text, ours, theirs)
    expected = logits.result()
    found = Logits(torch.from_numpy(np.stack(logits_found)), [])
    difference = found.differ_from(expected)
    agreement = "logits"
    if expected.choices and difference > bound:
        # rounding sends some tokens to other experts, and llama.cpp does not say which
        difference = found.median_difference(expected)
        agreement = "logits of half of the tokens"
    if not difference <= bound:
        raise UserError(
            f"{path.name}: not exported: under llama.cpp the logits differ by {difference:.2g} "
            f"from the checkpoint's; its type explains at most {bound:g}"
        )
    return f"and under llama.cpp the same tokens, and {agreement} within {difference:.1g}"


def _compare_tokens(
    name: str, tokenizer: Any, text: str, ours: Sequence[int], theirs: Sequence[int]
) -> None:
    """Raises `UserError` where llama.cpp cuts a text into other tokens than transformers."""
    if list(ours) == list(theirs):
        return
    place = next(
        (n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        len(theirs),
    )
    shown = [
        tokenizer.convert_ids_to_tokens(list(ids[place : place + 3])) for ids in (ours, theirs)
    ]
    raise UserError(
        f"{name}: not exported: after {tokenizer.decode(ours[:place])[-20:]!r} llama.cpp reads the "
        f"tokens {shown[1]}, the tokenizer {shown[0]}; it cuts texts in a way that llama.cpp does "
        "not have"
    )


def _largest_error(path: Path, of: PlannedFile) -> float:
    """The largest ‖quantized − value‖ / ‖value‖ of a tensor in a file that llama.cpp made.

    Raises `UserError` where a tensor is missing, unexpected, of another shape, or another one.
    """
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = {tensor.name for tensor, _ in of.tensors}
    problems = [f"{name}: in one file only" for name in sorted(names ^ tensors.keys())]
    refuse_differences(problems, f"{path.name}: {INCOMPLETE}")
    worst = 0.0
    for tensor, _ in of.tensors:
        theirs = tensors[tensor.name]
        position = 0
        squares = 0.0
        errors = 0.0
        rows = theirs.data.reshape(-1, theirs.data.shape[-1])
        for block in tensor.blocks():
            block = block.reshape(-1, tensor.shape[-1])
            part = gguf.quants.dequantize(
                rows[position : position + len(block)], theirs.tensor_type
            )
            if part.shape != tuple(block.shape):
                raise UserError(
                    f"{path.name}: not exported: {tensor.name}: the file has rows of "
                    f"{part.shape[-1]} numbers, the checkpoint of {block.shape[-1]}"
                )
            squares += float(block.square().sum())
            errors += float(
                (torch.from_numpy(np.array(part, dtype=np.float32)) - block).square().sum()
            )
            position += len(block)
        relative = (errors / squares) ** 0.5 if squares else errors
        if relative > QUANTIZED_BOUND / 2:
            raise UserError(
                f"{path.name}: not exported: {tensor.name}: differs by {relative:.2g} from the "
                "checkpoint"
            )
        worst = max(worst, relative)
    return worst


A = ".lora_A.weight"
B = ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The files of an adapter, one of each type. Returned by `plan_gguf`."""

    files: tuple[PlannedFile, ...]
    verify: bool

    @property
    def byte_count(self) -> int:
        return sum(file.byte_count for file in self.files)

    def write(self, folder: Path, logits: object) -> list[str]:
        """Writes the files into `folder`, and returns a line on each.

        Logits would need the base in GGUF.
        """
        said = []
        with progress_bar("writing GGUF", self.byte_count) as advance:
            for file in self.files:
                written = write_file(folder, file, advance)
                if self.verify:
                    refuse_differences(
                        find_differences(folder / file.name, file, written),
                        f"{file.name}: not exported: the file does not hold the adapter",
                    )
                if self.verify:
                    verdict = "verified: every tensor"
                else:
                    verdict = "not verified"
                said.append(f"{file.name}: an adapter of {disk_size(file.byte_count)}, {verdict}")
        return said


def _plan_adapter(
    source: Source, target: TargetModel, options: ExportOptions, title: str
) -> AdapterPlan:
    """Plans the files of the adapter of `source`.

    Raises `UserError` where llama.cpp would apply another adapter: it knows A and B of linear
    layers alone.
    """
    adapter = source.adapter
    where = str(source.path)
    model: Any = target.model
    assert adapter is not None
    config = model.config.get_text_config()
    _refuse_unknown_adapter(adapter, options, where)
    modules = [name.removesuffix(A) for name in adapter.tensors if name.endswith(A)]
    scales = {module: scale_of(adapter.config, module, where) for module in modules}
    alpha = _find_common_alpha(scales.values())
    names = [f"{module}.weight" for module in modules]
    bases = [Value(name, target.shapes[name], torch.float32, _no_rows) for name in names]
    tensors = []
    for module, base in zip(modules, plan_tensors(bases, config, where), strict=True):
        scale = 1.0 if alpha is not None else scales[module][0]
        tensors += _plan_factors(
            adapter.tensors[module + A], adapter.tensors[module + B], base, scale
        )
    types = tuple(options["gguf_types"]) or ("f32",)
    architecture = find_llama_cpp(config.model_type).architecture
    keys = partial(_write_adapter_keys, title=title, alpha=alpha)
    files = []
    for file_type in types:
        name = f"{file_name(title)}-lora-{file_type.upper()}.gguf"
        files.append(plan_file(name, architecture, tensors, file_type, keys))
    return AdapterPlan(tuple(files), options.verify)


def _refuse_unknown_adapter(adapter: Adapter, options: ExportOptions, where: str) -> None:
    """Raises `UserError` for an adapter that llama.cpp does not know, and for types in which none
    is written.
    """
    unknown = [name for name in sorted(adapter.tensors) if not name.endswith((A, B))]
    if adapter.config.get("target_parameters"):
        unknown.append("target_parameters")
    if adapter.config.get("use_dora"):
        unknown.insert(0, "use_dora")
    reason = why_unsupported(adapter.config) or next(iter(unknown), None)
    if reason is not None:
        raise UserError(
            f"{where}: {reason}: llama.cpp has no adapter of this kind; export the merged model as "
            "GGUF"
        )
    wrong = [file_type for file_type in options["gguf_types"] if file_type not in FILE_TYPES]
    if wrong:
        raise UserError(
            f"--gguf-type: {wrong[0]}: an adapter is written as {', '.join(FILE_TYPES)}"
        )


def _find_common_alpha(scales: Iterable[tuple[float, int]]) -> float | None:
    """The alpha of all modules, by their (scale, rank); None where they differ, and B is scaled
    instead.

    llama.cpp has one alpha for all modules.
    """
    alphas = {scale * rank for scale, rank in scales}
    return alphas.pop() if len(alphas) == 1 else None


def _plan_factors(
    a: StoredTensor, b: StoredTensor, base: FileTensor, scale: float
) -> list[FileTensor]:
    """A and B of the linear layer `base`, in fp32; B is scaled, and its rows are in the order of
    the base's rows.
    """
    a_values = (stored_value(a, a.name, torch.float32),)
    b_values = (stored_value(b, b.name, torch.float32),)
    change = partial(_scaled, scale, base.change)
    return [
        FileTensor(f"{base.name}.lora_a", a.shape, a_values),
        replace(base, name=f"{base.name}.lora_b", shape=b.shape, values=b_values, change=change),
    ]


def _no_rows(start: int, stop: int) -> Tensor:
    raise AssertionError("the base is not read")


def _scaled(scale: float, change: Callable[[Tensor], Tensor] | None, rows: Tensor) -> Tensor:
    return (change(rows) if change is not None else rows) * scale


def _write_adapter_keys(writer: Any, title: str, alpha: float | None) -> list[FileTensor]:
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(title)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    if alpha is not None:
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    return []
