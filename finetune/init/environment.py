"""`finetune env`: prints what this machine has installed, its devices and kernels, and what a
recipe lacks here. Imports no torch.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from finetune import __version__
from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import FLASH_GPUS, FLASH_ON_INDEX, FLASH_PACKAGES, find_problems
from finetune.config.facts import MachineFacts, has_compiler, with_recipe_keys
from finetune.config.pretrained import complete_lora
from finetune.config.reader import read_recipe, split_adapters
from finetune.config.schema import DatasetSource
from finetune.constants import PACKAGES, Names, count_cores
from finetune.errors import EXIT_USER_ERROR, UserError, install_command
from finetune.plan.architecture import find_local_facts
from finetune.units import counted, gib

# Name of an optional dependency group in pyproject.toml -> (its distributions, what needs them).
OPTIONAL: Mapping[str, tuple[Names, str]] = {
    "tensorboard": (("tensorboard",), "report_to: tensorboard"),
    "wandb": (("wandb",), "report_to: wandb"),
    "mlflow": (("mlflow",), "report_to: mlflow"),
    "trackio": (("trackio",), "report_to: trackio"),
    "plots": (("matplotlib",), "the report's loss.png"),
    "evaluate": (("lm-eval",), "finetune evaluate"),
    "liger": (("liger-kernel",), "use_liger_kernel"),
    "quantized": (("bitsandbytes",), "load_in_4bit, load_in_8bit"),
    "torchao": (("torchao",), "FP8, 8-bit AdamW, quantization_aware_training"),
    "compressed-tensors": (("compressed-tensors", "torchao"), "quantized exports"),
    "images": (("pillow", "num2words"), "images"),
    "serve": (("starlette", "uvicorn", "protobuf"), "finetune serve-training"),
    "math-verify": (("math-verify",), "the reward math_verify"),
    "gguf": (("gguf",), "exports as GGUF"),
    "llama-cpp": (("gguf", "llama-cpp-python"), "GGUF's smaller types, and their proof"),
}
# Module of a package with kernels -> what the kernels compute. FlashAttention 3 and 4 are in
# FLASH_PACKAGES.
KERNELS: Mapping[str, str] = {
    "flash_attn": "FlashAttention 2, of transformers",
    "fla": "linear attention of hybrids",
    "causal_conv1d": "convolutions of hybrids",
    "mamba_ssm": "Mamba's scan",
    "kernels": "kernels from the hub",
}
CPU_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # as /proc/cpuinfo names them
GPU_FIELDS = "name,compute_cap,memory.total,driver_version"  # as nvidia-smi names them


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    name: str
    capability: tuple[int, int]  # compute capability: (major, minor)
    mebibytes: int  # of memory
    driver: str


def list_gpus() -> list[Gpu]:
    """Lists the GPUs of this machine; [] if there is no nvidia-smi, or it fails or finds none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
    gpus = []
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
        for line in output.splitlines():
            name, capability, mebibytes, driver = [field.strip() for field in line.split(",")]
            major, minor = capability.split(".")
            gpus.append(Gpu(name, (int(major), int(minor)), int(mebibytes), driver))
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return gpus


def environment_command(options: argparse.Namespace) -> int:
    """Prints the environment, and what the recipe of --recipe lacks on this machine.

    Returns the exit code: 2 if the recipe lacks something or does not run here, else 0.
    """
    if options.recipe is None and (options.config or options.num_processes or options.overrides):
        raise UserError(
            "env: --config, --num-processes and key=value are for a recipe; name one with --recipe"
        )
    gpus = list_gpus()
    if options.recipe is None:
        missing = None
    else:
        missing = _find_missing(options, gpus)
    for label, lines in _describe_all(gpus):
        for index, line in enumerate(lines):  # the label stands only before the first line
            print(f"{'' if index else label:<11} {line}")
    if missing is None:  # there is no recipe to check
        return 0
    print(
        f"{'recipe':<11} {options.recipe}: "
        f"{'lacks nothing here' if not missing else 'does not run here'}"
    )
    for problem in missing:
        print(f"{'missing':<11} {problem}")
    return EXIT_USER_ERROR if missing else 0


def _find_missing(options: argparse.Namespace, gpus: list[Gpu]) -> list[str]:
    """Lists why the recipe does not run on this machine; each problem comes with its fix.

    The rules check every adapter's recipe for as many ranks as --num-processes, else one for each
    GPU. Raises `UserError` if --num-processes is below 1, or the recipe cannot be read.
    """
    if options.num_processes is not None and options.num_processes < 1:
        raise UserError(f"--num-processes {options.num_processes}: a run has at least one rank")
    ranks = options.num_processes or max(1, len(gpus))
    recipe = read_recipe(options.recipe, options.overrides)
    sharding = read_sharding(
        options.config, recipe.run.accelerate_config, {"WORLD_SIZE": str(ranks)}
    )
    machine = describe_machine([] if sharding.use_cpu else gpus)
    layout = with_recipe_keys(sharding, recipe)
    facts = find_local_facts(recipe.model)
    problems = [
        problem
        for adapter_recipe in map(complete_lora, split_adapters(recipe))
        for problem in find_problems(adapter_recipe, layout, facts, ranks, machine=machine)
    ]
    missing = [str(problem) for problem in problems if not problem.is_note]
    if not _is_found("PIL") and any(map(_begins_with_images, recipe.data.datasets)):
        missing.append(f"datasets: rows with images need Pillow; {install_command('images')}")
    return list(dict.fromkeys(missing))


def _begins_with_images(source: DatasetSource) -> bool:
    """Whether the first row of a source's first local file holds an image.

    False for a data set of the hub, a function, or a file that cannot be read as rows.
    """
    # these import transformers, which is slow, so they are imported only if Pillow is missing
    from finetune.data.images import holds_images
    from finetune.data.sources import list_files, read_file

    try:
        first_file = list_files(source)[:1]
        rows = (row for file in first_file for _, row in read_file(file) if isinstance(row, dict))
        row = next(rows, {})
    except (OSError, UserError):  # the run reports it
        return False
    has_column = any(holds_images(column, value) for column, value in row.items())
    # content of the type image or image_url
    return has_column or '"type": "image' in json.dumps(row, default=str)


def describe_machine(gpus: list[Gpu]) -> MachineFacts:
    """Makes the facts about this machine that the rules check, for these GPUs or the CPU."""
    if not gpus:
        return MachineFacts(device="cpu", system=sys.platform, has_compiler=has_compiler())
    return MachineFacts(
        device="cuda",
        system=sys.platform,
        has_compiler=has_compiler(),
        gpu=gpus[0].name,
        capability=gpus[0].capability,
    )


def _describe_all(gpus: list[Gpu]) -> Iterator[tuple[str, list[str]]]:
    """Yields the parts of the printed environment: (label, lines)."""
    yield "finetune", [f"{__version__} in {Path(__file__).parents[1]}"]
    yield "python", [f"{platform.python_version()} on {platform.platform()}"]
    yield "packages", [f"{name} {_version_of(name) or 'is not installed'}" for name in PACKAGES]
    yield "torch", [_describe_torch(gpus)]
    yield "devices", [*_describe_gpus(gpus), _describe_cpu()]
    yield "kernels", list(_describe_kernels(gpus))
    yield "optional", list(_describe_optional())


def _version_of(distribution: str) -> str | None:
    """Returns the installed version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_torch(gpus: list[Gpu]) -> str:
    """Says whether the installed torch was built for CUDA, HIP or the CPU alone.

    It reads torch's version.py, because importing torch would take seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "is not installed; pip install -e . in a clone of the repository"
    text = ""
    with suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    # such as "cuda: Optional[str] = '12.8'"
    builds = re.findall(r"^(cuda|hip)\b[^=\n]*= '([^']+)'", text, re.MULTILINE)
    if builds:
        return "built for " + " and ".join(f"{name.upper()} {version}" for name, version in builds)
    advice = ""
    if gpus:
        advice = "; install one for your driver, else no GPU is used"
    return f"built for the CPU alone{advice}"


def _describe_gpus(gpus: list[Gpu]) -> list[str]:
    """Describes the GPUs, with one line for all that are equal."""
    if not gpus:
        return ["no GPU: nvidia-smi lists none"]
    lines = []
    for gpu in dict.fromkeys(gpus):
        capability = ".".join(map(str, gpu.capability))
        lines.append(
            f"{gpus.count(gpu)} x {gpu.name}: {gib(gpu.mebibytes << 20)} GiB, compute capability "
            f"{capability}, driver {gpu.driver}"
        )
    return lines


def _describe_cpu() -> str:
    """Describes the CPU: cores, host memory, and which of CPU_INSTRUCTIONS it has."""
    flags: set[str] = set()
    with suppress(OSError):
        flags.update(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    instructions = " ".join(name for name in CPU_INSTRUCTIONS if name in flags)
    memory = gib(psutil.virtual_memory().total)
    return (
        f"{counted(count_cores(), 'core')}, {memory} GiB of host "
        f"memory{f', {instructions}' if instructions else ''}"
    )


def _is_found(module: str) -> bool:
    """Whether a module is installed. It is not imported, but the packages above it are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the package that holds the module is missing
        return False


def _describe_kernels(gpus: list[Gpu]) -> Iterator[str]:
    """Yields a line on the C compiler and on each installed package of kernels.

    If FlashAttention 4 would run on the first GPU and is not installed, a line suggests it.
    """
    yield (
        "a C compiler for torch_compile"
        if has_compiler()
        else "no C compiler: torch_compile needs one (g++)"
    )
    for module, torch_name in FLASH_PACKAGES.values():
        if _is_found(module):
            version = torch_name.removeprefix("FA")
            yield f"{module}: FlashAttention {version}"
    for module, purpose in KERNELS.items():
        if _is_found(module):
            yield f"{module}: {purpose}"
    module, _ = FLASH_PACKAGES["flash_attention_4"]
    if gpus and not _is_found(module):
        major, _ = gpus[0].capability
        if major in FLASH_GPUS["flash_attention_4"]:
            yield (
                f"attention by torch's FlashAttention 2; pip install {FLASH_ON_INDEX} for a faster "
                "one"
            )


def _describe_optional() -> Iterator[str]:
    """Yields a line on each optional dependency group: its versions, or how to install it."""
    for extra, (distributions, purpose) in OPTIONAL.items():
        versions = {name: _version_of(name) for name in distributions}
        if all(versions.values()):
            yield (
                f"{', '.join(f'{name} {version}' for name, version in versions.items())} "
                f"({purpose})"
            )
        else:
            missing = [name for name, version in versions.items() if version is None]
            verb = "is" if len(missing) == 1 else "are"
            yield (
                f"{' and '.join(missing)} {verb} not installed ({purpose}): "
                f"{install_command(extra)}"
            )
