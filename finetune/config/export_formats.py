"""The formats of an export: one row for each, with everything that other code asks about a format.

The rules, the commands, the export, the model card and the servers read the rows.
"""

import importlib.util
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from finetune.config.quantization import EXPORTED, SCHEMES
from finetune.config.served import CONTEXT, list_server_options, serve_model
from finetune.constants import CONFIG_FILE, Names
from finetune.errors import UserError

SAFETENSORS = "safetensors"
COMPRESSED = "compressed-tensors"
# GGUF types that this package writes, and those that it lets llama.cpp write.
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0")
GGUF_K_TYPES = (
    "q6_k",
    "q5_k_m",
    "q5_k_s",
    "q4_k_m",
    "q4_k_s",
    "q3_k_l",
    "q3_k_m",
    "q3_k_s",
    "q2_k",
)
LLAMA_CPP = 'pip install -e ".[llama-cpp]"'
NO_FORMATS = {  # a name that is no format here -> what to do instead
    "mlx": (
        "MLX opens an export of safetensors as it is, and mlx_lm.convert -q quantizes it; leave "
        "mlx out"
    )
}


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def split_list(text: str | None) -> Names:
    """Splits a list that is written with commas.

    >>> split_list("safetensors, gguf"), split_list(None)
    (('safetensors', 'gguf'), ())
    """
    return tuple(filter(None, (part.strip() for part in (text or "").split(","))))


def refuse_unknown(flag: str, names: Names, known: Names) -> None:
    """Raises `UserError` if one of the `names` given to the option `flag` is not `known`."""
    for name in names:
        if name not in known:
            raise UserError(
                f"{flag}: {name}: one or more of {', '.join(known)} are expected, with commas "
                "between"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportKey:
    """A key of one format: an argument of `export`, and an option of `finetune export`."""

    name: str  # the argument's name
    flag: str
    metavar: str
    help: str
    default: Any = None
    read: Callable[[str], Any] = str  # converts the option's text
    recipe_key: str | None = None  # the recipe's key that sets the value for a run's own export


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """All facts about an export format.

    A new format is a row in `EXPORT_FORMATS` and a file in export/formats/.
    """

    title: str  # as people write it
    # MODULE:FUNCTION that plans the format's files; None: the Hugging Face folder itself
    plan: str | None = None
    package: str | None = None  # import name of the package that writes the format
    install: str | None = None  # the package's name for pip; None: the import name
    is_folder: bool = False  # whether it is a folder that transformers and vLLM open
    # whether it can hold tensors of the base that the model has no parameter for
    holds_base: bool = False
    keys: tuple[ExportKey, ...] = ()
    without: str = ""  # message about one of its keys if the format is not asked for
    # raises `UserError` for a wrong value; gets the values of all `list_keys` by name
    check: Callable[[Mapping[str, Any], bool], None] = lambda keys, is_model: None
    # a condition of the rulebook: whether the model of a case cannot be written in this format
    refuses: Callable[[Any], object] = lambda case: False
    refused: str = ""  # the message if `refuses` holds; empty: there is no such rule
    suffix: str | None = None  # how the format's files end
    card: str = ""  # Markdown for the model card: how to use the files
    # (file, whether it is an adapter) -> {program: command}
    use: Callable[[Path, bool], Mapping[str, str]] = lambda file, is_adapter: {}
    server: str | None = None  # the --server that serves the format
    # (folder, file, port) -> the server's command
    start: Callable[[Path, Path | None, int], list[str]] | None = None


def _check_gguf(keys: Mapping[str, Any], is_model: bool) -> None:
    """Raises `UserError` if a GGUF type is unknown, or if llama.cpp is missing for one."""
    types = tuple(keys["gguf_types"])
    refuse_unknown("--gguf-type", types, GGUF_TYPES + GGUF_K_TYPES)
    k_types = [gguf_type for gguf_type in types if gguf_type in GGUF_K_TYPES]
    if k_types and not is_installed("llama_cpp"):
        raise UserError(
            f"--gguf-type: {k_types[0]}: llama.cpp makes it, which is not installed: {LLAMA_CPP}; "
            f"without it there are {', '.join(GGUF_TYPES)}"
        )


def _use_gguf(file: Path, is_adapter: bool) -> Mapping[str, str]:
    """Returns {program: shell command that uses the GGUF file}.

    An adapter needs its base too: the command names the base's file BASE.gguf.
    """
    if is_adapter:
        return {"llama.cpp": f"llama-server -m BASE.gguf --lora {shlex.quote(str(file))}"}
    name = file.stem.lower()
    ollama = (
        f"echo {shlex.quote(f'FROM {file}')} > Modelfile && ollama create {shlex.quote(name)} -f "
        "Modelfile"
    )
    return {"llama.cpp": f"llama-server -m {shlex.quote(str(file))}", "Ollama": ollama}


def _start_llama_cpp(folder: Path, file: Path | None, port: int) -> list[str]:
    """Returns the command of llama-server, or of llama-cpp-python's server if that is missing.

    Raises:
        UserError: `folder` holds no GGUF file (`file` is None), or no such server is installed.
    """
    if file is None:
        raise UserError(
            f"{folder}: holds no GGUF file; write one with finetune export --format gguf, and name "
            "it with --gguf"
        )
    if binary := shutil.which("llama-server"):
        return [binary, "-m", str(file), "--port", str(port), "-c", str(CONTEXT)]
    if not all(is_installed(package) for package in ("llama_cpp", "fastapi", "uvicorn")):
        raise UserError(
            '--server llama.cpp: not installed; pip install "llama-cpp-python[server]", or put '
            "llama-server on PATH"
        )
    options = ["--port", str(port), "--n_ctx", str(CONTEXT), "--logits_all", "true"]
    return [sys.executable, "-m", "llama_cpp.server", "--model", str(file), *options]


def _start_vllm(folder: Path, file: Path | None, port: int) -> list[str]:
    """Returns the command of vLLM's server for an exported folder; `file` is not used.

    Raises:
        UserError: vLLM is not installed, or `folder` has no config.json.
    """
    if shutil.which("vllm") is None:
        raise UserError(
            "--server vllm: not installed; pip install vllm, or name a running server by its URL"
        )
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(
            f"{folder}: vLLM serves exports and adapters; make one with finetune export"
        )
    return [*serve_model(folder), *list_server_options(folder, port)]


def _check_compressed(keys: Mapping[str, Any], is_model: bool) -> None:
    """Raises `UserError` for a wrong scheme or group size, or for an adapter.

    A group size needs a scheme of integers: a float scheme fixes the numbers under one scale.
    """
    scheme = keys["quantization"]
    group_size = keys["group_size"]
    if scheme not in (None, *EXPORTED):
        raise UserError(f"--quantization: {scheme}: one of {', '.join(EXPORTED)} is expected")
    if group_size is not None and group_size < 1:
        raise UserError(f"--group-size: {group_size}: a number above 0 is expected")
    if group_size is not None and scheme is None:
        raise UserError("--group-size: name the scheme too, with --quantization")
    if group_size is not None and SCHEMES[scheme].is_float:
        block = SCHEMES[scheme].block
        scales = f"a scale for {block} numbers" if block else "one scale a row"
        raise UserError(f"--group-size: {scheme} has {scales}; omit it")
    if not is_model:
        raise UserError(f"--format {COMPRESSED}: an adapter is not quantized; omit --adapter-only")


EXPORT_FORMATS: Mapping[str, ExportFormat] = {
    SAFETENSORS: ExportFormat(
        title="safetensors", is_folder=True, holds_base=True, server="vllm", start=_start_vllm
    ),
    "gguf": ExportFormat(
        title="GGUF",
        plan="finetune.export.formats.gguf_export:plan_gguf",
        package="gguf",
        keys=(
            ExportKey(
                name="gguf_types",
                flag="--gguf-type",
                metavar="TYPES",
                help=(
                    "of GGUF: f32, f16, bf16, q8_0; q6_k, q5_k_m, q4_k_m and others that "
                    "llama.cpp makes (default: as --dtype)"
                ),
                default=(),
                read=lambda text: split_list(text.lower()),  # as q4_k_m or Q4_K_M
            ),
            ExportKey(
                name="gguf_pre_tokenizer",
                flag="--gguf-pre-tokenizer",
                metavar="NAME",
                help="how a text is cut, by llama.cpp's name (default: found)",
            ),
        ),
        without="nothing is written as GGUF",
        check=_check_gguf,
        refuses=lambda case: case.model.family.llama_cpp is None or case.is_whole,
        refused="{model.model_type} is not among the families that are exported as GGUF",
        suffix=".gguf",
        card="```sh\nllama-server -m FILE.gguf\n```",
        use=_use_gguf,
        server="llama.cpp",
        start=_start_llama_cpp,
    ),
    COMPRESSED: ExportFormat(
        title=COMPRESSED,
        plan="finetune.export.formats.compressed_tensors_export:plan_compressed",
        package="compressed_tensors",
        install=COMPRESSED,
        is_folder=True,
        holds_base=True,
        keys=(
            ExportKey(
                name="quantization",
                flag="--quantization",
                metavar="SCHEME",
                help=(
                    "of compressed-tensors: fp8-fp8, int8-int8, int8, int8-int4, int4 (default: "
                    "what the run was trained for)"
                ),
                recipe_key="export_quantization",
            ),
            ExportKey(
                name="group_size",
                flag="--group-size",
                metavar="N",
                help="numbers of a row under one scale (default: the row)",
                read=int,
            ),
            ExportKey(
                name="max_loss_increase",
                flag="--max-loss-increase",
                metavar="NATS",
                help="export nothing where quantization raises the loss on the run's rows by more",
                read=float,
            ),
        ),
        without="nothing is quantized",
        check=_check_compressed,
        refuses=lambda case: case.model.experts or case.is_whole,
        refused="{name} is a mixture or has a vision tower, which is not quantized",
    ),
}
if TYPE_CHECKING:
    ExportFormatName = str
else:
    ExportFormatName = Literal[tuple(EXPORT_FORMATS)]


def list_keys() -> list[ExportKey]:
    """Lists the keys of all formats."""
    return [key for row in EXPORT_FORMATS.values() for key in row.keys]


def find_format_of(path: Path) -> ExportFormat | None:
    """Returns the format of the file at `path` by its suffix.

    None if `path` is no file, or if no format has this suffix.
    """
    suffix = path.suffix.lower()
    return next(
        (row for row in EXPORT_FORMATS.values() if row.suffix == suffix and path.is_file()), None
    )


def check_formats(formats: Names, keys: Mapping[str, Any], *, is_model: bool) -> None:
    """Checks the formats of an export and the values of their keys.

    Imports no torch and reads no file.

    Args:
        formats: Names in EXPORT_FORMATS.
        keys: The values of `list_keys`, by name.
        is_model: Whether a whole model is exported; False: only an adapter.

    Raises:
        UserError: A format is unknown, a key has a wrong value or belongs to a format that is not
            asked for, or a package is missing.
    """
    for name, advice in NO_FORMATS.items():
        if name in formats:
            raise UserError(f"--format: {name}: {advice}")
    refuse_unknown("--format", formats, tuple(EXPORT_FORMATS))
    if not formats:
        raise UserError(f"--format: empty; one or more of {', '.join(EXPORT_FORMATS)} are expected")
    for name, row in EXPORT_FORMATS.items():
        if name in formats:
            row.check(keys, is_model)
            if row.package is not None and not is_installed(row.package):
                raise UserError(
                    f"--format {name}: needs the package: pip install {row.install or row.package}"
                )
            continue
        for key in row.keys:
            if keys[key.name] not in (None, (), []):
                raise UserError(f"{key.flag}: {row.without}; add --format {name}")
