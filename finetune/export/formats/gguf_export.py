"""The format GGUF: plans, writes and verifies the files of a model, or those of an adapter."""

import re
from collections.abc import Callable, Sequence
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
from finetune.export.metadata import find_ends
from finetune.export.publish import ExportOptions
from finetune.export.source import Adapter, Source
from finetune.export.target import TargetModel, Value, stored_value
from finetune.export.values import find_scale
from finetune.export.verify import refuse_differences
from finetune.export.write import Weights
from finetune.files.tensors import StoredTensor
from finetune.units import counted, disk_size

# The largest ‖llama.cpp − checkpoint‖ / ‖checkpoint‖ of the logits that a type of file explains:
# llama.cpp rounds the weights, and also the inputs that it multiplies with them.
BOUNDS = {"f32": 1e-3, "f16": 0.02, "bf16": 0.1, "q8_0": 0.1}
# The same for the types that llama.cpp makes. Their errors are printed; only an error as large as
# that of a wrong tensor is refused.
QUANTIZED_BOUND = 1.0
INCOMPLETE = "not exported: the file does not hold what the model needs"
# the type of file that holds numbers of a dtype without rounding
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# The conversation and the text that llama.cpp and transformers must cut into the same tokens.
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
    """The files of a model. Returned by `plan_gguf`."""

    files: tuple[PlannedFile, ...]  # written here; llama.cpp quantizes the first one
    types: Names  # the type of each of `files`
    quantized: tuple[tuple[str, str], ...]  # (name, type) of each file that llama.cpp makes
    # names of the files that the user asks for; the others are removed in the end
    requested: frozenset[str]
    tokenizer: Any  # of transformers
    vocab_size: int  # the rows of the model's embedding

    @property
    def byte_count(self) -> int:
        """The most bytes on disk: a quantized file counts as much as the file it is made from."""
        return (
            sum(file.byte_count for file in self.files)
            + len(self.quantized) * self.files[0].byte_count
        )

    def write(self, folder: Path, logits: CheckpointLogits | None) -> list[str]:
        """Writes and verifies the files, and returns a line for each requested file.

        Args:
            folder: The folder to write into.
            logits: The checkpoint's logits; None: nothing is verified.

        Raises:
            UserError: The values that were read back differ, or llama.cpp computes other tokens or
                logits.
        """
        descriptions = list[tuple[str, str]]()  # (name of a file, what is said of it)
        with progress_bar("writing GGUF", sum(file.byte_count for file in self.files)) as advance:
            for file, file_type in zip(self.files, self.types, strict=True):
                written = write_file(folder, file, advance)
                verdict = "not verified"
                if logits is not None:
                    refuse_differences(
                        find_differences(folder / file.name, file, written),
                        f"{file.name}: {INCOMPLETE}",
                    )
                    if file.name in self.requested:
                        agreement = _compare_with_llama_cpp(
                            folder / file.name, self, logits, BOUNDS[file_type]
                        )
                        verdict = f"verified: every tensor, {agreement}"
                descriptions.append((file.name, f"{disk_size(file.byte_count)}, {verdict}"))
        for name, file_type in self.quantized:
            quantize(folder / self.files[0].name, folder / name, file_type)
            verdict = "not verified"
            if logits is not None:
                error = _find_largest_error(folder / name, self.files[0])
                agreement = _compare_with_llama_cpp(folder / name, self, logits, QUANTIZED_BOUND)
                verdict = f"verified: every tensor within {error:.2g} of its norm, {agreement}"
            size = disk_size((folder / name).stat().st_size)
            descriptions.append((name, f"{size}, {verdict}"))
        for file in self.files:
            if file.name not in self.requested:
                (folder / file.name).unlink()
        return [f"{name}: {text}" for name, text in descriptions if name in self.requested]


def plan_gguf(
    source: Source,
    target: TargetModel,
    weights: Weights,
    options: ExportOptions,
    title: str,
    log: Callable[[str], object],
) -> "GgufPlan | AdapterPlan":
    """Plans the files of the model, or of the adapter alone, and makes their headers.

    It reads no values, and logs what llama.cpp does differently.

    Args:
        source: What is exported.
        target: The model to write.
        weights: The weights of the Hugging Face folder.
        options: What to export.
        title: The model's name in the files.
        log: Takes the notes.

    Raises:
        UserError: llama.cpp would compute a different model, or has no such tokenizer.
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
        tokenizer,
        config.vocab_size,
        source.tokenizer,
        options["gguf_pre_tokenizer"],
        find_ends(source, target),
    )
    if weights.account.carried:
        carried = counted(len(weights.account.carried), "tensor")
        notes.append(
            f"GGUF is written without {carried} of the base that {target.class_name} has no place "
            "for"
        )
    notes += vocabulary.notes
    # Otherwise llama.cpp itself is run, and its tokens are compared.
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
    names = {
        file_type: f"{file_name(title)}-{file_type.upper()}.gguf"
        for file_type in (*types.written, *types.quantized)
    }
    return GgufPlan(
        files=tuple(
            plan_file(names[file_type], architecture, tensors, file_type, write_keys)
            for file_type in types.written
        ),
        types=types.written,
        quantized=tuple((names[file_type], file_type) for file_type in types.quantized),
        requested=frozenset(names[file_type] for file_type in types.requested),
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
    )


def _load_tokenizer(source: Source, options: ExportOptions) -> Any:
    """Loads the source's tokenizer by transformers. Raises `UserError` if it does not load."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            source.tokenizer, trust_remote_code=options.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(
            f"{source.tokenizer}: --format gguf: needs a tokenizer, which does not load: {reason}"
        ) from None


@dataclass(frozen=True, slots=True)
class _Types:
    """The types of the GGUF files of an export."""

    requested: Names  # by the user
    written: Names  # that this package writes; llama.cpp quantizes the first one
    quantized: Names  # that llama.cpp makes


def _choose_types(options: ExportOptions, exact: str) -> _Types:
    """Chooses the types to write for the requested ones; without a request, `exact`.

    `exact`: the type that rounds no weight. llama.cpp quantizes a file of this type, which may
    therefore be written without being requested.
    """
    requested = tuple(options["gguf_types"]) or (exact,)
    quantized = tuple(name for name in requested if name not in FILE_TYPES)
    written = [name for name in requested if name in FILE_TYPES and name != exact]
    if exact in requested or quantized:
        written.insert(0, exact)
    return _Types(requested, tuple(written), quantized)


def _adapt_title(title: str, vocabulary: GgufVocabulary) -> str:
    """Returns `title` with "phi-3" in it if the tokenizer strips spaces after special tokens, else
    without.

    llama.cpp decides by the model's name: if "phi-3" is in it, llama.cpp strips these spaces, and
    fails without the needed tokens.
    """
    needed_tokens = {"</s>", "<unk>", "<s>", "<|endoftext|>"}
    if vocabulary.strips_after and needed_tokens <= set(vocabulary.tokens):
        if re.search("phi-?3", title, re.IGNORECASE):
            return title
        return f"{title} (phi-3)"
    return re.sub("(phi)-?3", r"\1 3", title, flags=re.IGNORECASE)


def _write_keys(
    writer: Any, config: Any, vocabulary: GgufVocabulary, title: str, where: str
) -> list[FileTensor]:
    """Adds a model's keys to a `gguf.GGUFWriter`, and returns the tensors that RoPE needs."""
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(_adapt_title(title, vocabulary))
    write_sizes(writer, config)
    write_tokenizer(writer, vocabulary)
    return write_rope(writer, config, where)


def _compare_with_llama_cpp(
    path: Path, plan: GgufPlan, logits: CheckpointLogits, bound: float
) -> str:
    """Runs a file under llama.cpp, and compares tokens and logits with those of the checkpoint.

    Args:
        path: The file.
        plan: The plan of the files.
        logits: The checkpoint's logits.
        bound: The largest relative difference of the logits that is allowed.

    Returns:
        What agrees, or that llama.cpp is not installed, for the file's line.

    Raises:
        UserError: The tokens differ, or the logits differ by more than `bound`.
    """
    if not is_installed("llama_cpp"):
        return f"not run under llama.cpp, which is not installed ({LLAMA_CPP})"
    texts = [(TEXT, True)]
    if plan.tokenizer.chat_template:
        # A chat template writes BOS itself.
        texts.append((plan.tokenizer.apply_chat_template(CONVERSATION, tokenize=False), False))
    prompts = make_prompts(plan.vocab_size).tolist()
    prompt_logits, tokens = run_llama_cpp(path, prompts, texts)
    for (text, begins_document), llama_ids in zip(texts, tokens, strict=True):
        ids = plan.tokenizer.encode(
            text,
            add_special_tokens=begins_document,
            verbose=False,  # no warning about the text's length
        )
        _compare_tokens(path.name, plan.tokenizer, ids, llama_ids)
    expected = logits.result()
    computed = Logits(torch.from_numpy(np.stack(prompt_logits)), [])
    difference = computed.relative_difference(expected)
    agreement = "logits"
    if expected.choices and difference > bound:
        # In a mixture rounding sends some tokens to other experts, and llama.cpp does not report
        # which. Then at least half of the tokens must agree.
        difference = computed.median_difference(expected)
        agreement = "logits of half of the tokens"
    if not difference <= bound:  # also if it is NaN
        raise UserError(
            f"{path.name}: not exported: under llama.cpp the logits differ by {difference:.2g} "
            f"from the checkpoint's; its type explains at most {bound:g}"
        )
    return f"and under llama.cpp the same tokens, and {agreement} within {difference:.1g}"


def _compare_tokens(
    name: str, tokenizer: Any, ids: Sequence[int], llama_ids: Sequence[int]
) -> None:
    """Raises `UserError` if llama.cpp cuts a text into other tokens than transformers.

    Args:
        name: The file's name.
        tokenizer: The tokenizer, of transformers.
        ids: The tokens of transformers.
        llama_ids: The tokens of llama.cpp.
    """
    if list(ids) == list(llama_ids):
        return
    pairs = enumerate(zip(ids, llama_ids, strict=False))
    # If one list is the beginning of the other, they differ where llama.cpp's ends.
    start = next((index for index, (one, other) in pairs if one != other), len(llama_ids))
    tokens = tokenizer.convert_ids_to_tokens(list(ids[start : start + 3]))
    llama_tokens = tokenizer.convert_ids_to_tokens(list(llama_ids[start : start + 3]))
    raise UserError(
        f"{name}: not exported: after {tokenizer.decode(ids[:start])[-20:]!r} llama.cpp reads the "
        f"tokens {llama_tokens}, the tokenizer {tokens}; it cuts texts in a way that llama.cpp "
        "does not have"
    )


def _find_largest_error(path: Path, unquantized: PlannedFile) -> float:
    """Finds the largest ‖quantized − value‖ / ‖value‖ of a tensor in a file that llama.cpp made.

    Args:
        path: The file that llama.cpp made.
        unquantized: The file that llama.cpp quantized.

    Raises:
        UserError: A tensor is missing or unexpected, has another shape, or differs so much that it
            must be another one.
    """
    quantized_tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = {tensor.name for tensor, _ in unquantized.tensors}
    problems = [f"{name}: in one file only" for name in sorted(names ^ quantized_tensors.keys())]
    refuse_differences(problems, f"{path.name}: {INCOMPLETE}")
    largest = 0.0
    for tensor, _ in unquantized.tensors:
        quantized = quantized_tensors[tensor.name]
        start = 0
        square_sum = 0.0  # of the values
        error_sum = 0.0  # of the squared errors
        quantized_rows = quantized.data.reshape(-1, quantized.data.shape[-1])
        for block in tensor.blocks():
            block = block.reshape(-1, tensor.shape[-1])
            rows = gguf.quants.dequantize(
                quantized_rows[start : start + len(block)], quantized.tensor_type
            )
            if rows.shape != tuple(block.shape):
                raise UserError(
                    f"{path.name}: not exported: {tensor.name}: the file has rows of "
                    f"{rows.shape[-1]} numbers, the checkpoint of {block.shape[-1]}"
                )
            square_sum += float(block.square().sum())
            difference = torch.from_numpy(np.array(rows, dtype=np.float32)) - block
            error_sum += float(difference.square().sum())
            start += len(block)
        # A tensor of zeros has no norm to divide by.
        error = (error_sum / square_sum) ** 0.5 if square_sum else error_sum
        if error > QUANTIZED_BOUND / 2:
            raise UserError(
                f"{path.name}: not exported: {tensor.name}: differs by {error:.2g} from the "
                "checkpoint"
            )
        largest = max(largest, error)
    return largest


# how the names of an adapter's two factors end
A_END = ".lora_A.weight"
B_END = ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The files of an adapter, one for each type. Returned by `plan_gguf`."""

    files: tuple[PlannedFile, ...]
    verify: bool  # whether the files are read back and compared

    @property
    def byte_count(self) -> int:
        """The bytes of all files."""
        return sum(file.byte_count for file in self.files)

    def write(self, folder: Path, logits: object) -> list[str]:
        """Writes the files into `folder`, verifies them, and returns a line for each.

        `logits` are not compared: llama.cpp would need the base as GGUF to compute them.

        Raises `UserError` if the values that were read back differ.
        """
        lines = []
        with progress_bar("writing GGUF", self.byte_count) as advance:
            for file in self.files:
                written = write_file(folder, file, advance)
                verdict = "not verified"
                if self.verify:
                    refuse_differences(
                        find_differences(folder / file.name, file, written),
                        f"{file.name}: not exported: the file does not hold the adapter",
                    )
                    verdict = "verified: every tensor"
                lines.append(f"{file.name}: an adapter of {disk_size(file.byte_count)}, {verdict}")
        return lines


def _plan_adapter(
    source: Source, target: TargetModel, options: ExportOptions, title: str
) -> AdapterPlan:
    """Plans the files of the source's adapter, one for each requested type; by default f32.

    Raises `UserError` if llama.cpp would apply a different adapter, or none: it knows only the
    factors A and B of linear layers, and no output head that is tied to the embedding.
    """
    adapter = source.adapter
    where = str(source.path)
    model: Any = target.model
    assert adapter is not None
    config = model.config.get_text_config()
    _refuse_unknown_adapter(adapter, options, where)
    if target.untied:
        raise UserError(
            f"{where}: {next(iter(target.untied))}: adapted, but a GGUF of this base has no such "
            "tensor, since it is tied to the embedding; export the merged model as GGUF"
        )
    modules = [name.removesuffix(A_END) for name in adapter.tensors if name.endswith(A_END)]
    scales = {module: find_scale(adapter.config, module, where) for module in modules}
    # llama.cpp has one alpha for all modules. If they differ, each B is scaled in the file instead.
    alphas = {scale * rank for scale, rank in scales.values()}
    alpha = alphas.pop() if len(alphas) == 1 else None
    # Planning the base's weights gives their names and the order of their rows; they are not read.
    names = [f"{module}.weight" for module in modules]
    bases = [Value(name, target.shapes[name], torch.float32, _refuse_to_read) for name in names]
    tensors = []
    for module, base in zip(modules, plan_tensors(bases, config, where), strict=True):
        scale, _ = scales[module]
        if alpha is not None:
            scale = 1.0  # llama.cpp itself scales by alpha / rank
        tensors += _plan_factors(
            adapter.tensors[module + A_END], adapter.tensors[module + B_END], base, scale
        )
    types = tuple(options["gguf_types"]) or ("f32",)
    architecture = find_llama_cpp(config.model_type).architecture
    write_keys = partial(_write_adapter_keys, title=title, alpha=alpha)
    files = []
    for file_type in types:
        name = f"{file_name(title)}-lora-{file_type.upper()}.gguf"
        files.append(plan_file(name, architecture, tensors, file_type, write_keys))
    return AdapterPlan(tuple(files), options.verify)


def _refuse_unknown_adapter(adapter: Adapter, options: ExportOptions, where: str) -> None:
    """Raises `UserError` if llama.cpp does not know this kind of adapter, or if a requested type is
    none in which adapters are written.
    """
    unknown = [name for name in sorted(adapter.tensors) if not name.endswith((A_END, B_END))]
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
    wrong_types = [file_type for file_type in options["gguf_types"] if file_type not in FILE_TYPES]
    if wrong_types:
        raise UserError(
            f"--gguf-type: {wrong_types[0]}: an adapter is written as {', '.join(FILE_TYPES)}"
        )


def _plan_factors(
    a: StoredTensor, b: StoredTensor, base: FileTensor, scale: float
) -> list[FileTensor]:
    """Plans the tensors of the factors A and B of one linear layer.

    Args:
        a: A, as it is stored.
        b: B, as it is stored.
        base: The layer's weight as a file of the model would hold it. B's rows get the same order.
        scale: What B is multiplied by.
    """
    a_values = (stored_value(a, a.name, torch.float32),)
    b_values = (stored_value(b, b.name, torch.float32),)
    change = partial(_change_and_scale, scale, base.change)
    return [
        FileTensor(f"{base.name}.lora_a", a.shape, a_values),
        replace(base, name=f"{base.name}.lora_b", shape=b.shape, values=b_values, change=change),
    ]


def _refuse_to_read(start: int, stop: int) -> Tensor:
    """Stands in for the rows of the base's weights, of which only the names are needed."""
    raise AssertionError("the base is not read")


def _change_and_scale(
    scale: float, change: Callable[[Tensor], Tensor] | None, rows: Tensor
) -> Tensor:
    """Returns the rows of B as the file holds them: changed as the base's rows are, and scaled."""
    changed_rows = change(rows) if change is not None else rows
    return changed_rows * scale


def _write_adapter_keys(writer: Any, title: str, alpha: float | None) -> list[FileTensor]:
    """Adds an adapter's keys to a `gguf.GGUFWriter`; there are no tensors that go with them."""
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(title)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    if alpha is not None:
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    return []
