"""The rulebook: the rules about what works together, and the one function that refuses a run.

Imports no torch.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from finetune.config import exclusions, layout_rules, method_rules, model_rules, recipe_rules
from finetune.config.export_formats import EXPORT_FORMATS
from finetune.config.facts import MachineFacts, ModelFacts
from finetune.config.layout import Sharding
from finetune.config.optimization import OPTIMIZERS, SMALLEST_WITHOUT_PACKAGE
from finetune.config.quantization import LOAD_KEYS
from finetune.config.reward_names import REWARD_PACKAGES
from finetune.config.rule import (
    BF16,
    UNKNOWN,
    Case,
    Condition,
    NotKnown,
    Problem,
    Rule,
    has_fp8,
    is_quantized,
    is_set,
    make_rule,
    no_effect,
)
from finetune.config.schema import Recipe
from finetune.errors import UserError, install_command

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")  # values of report_to, and packages
# The lowest compute capability with FP8: Ada's (L40S, RTX 4090), and under ROCm MI300's.
CUDA_FP8 = (8, 9)
HIP_FP8 = (9, 4)
# attn_implementation -> the major versions of the compute capability that it runs on.
FLASH_GPUS: Mapping[str, tuple[int, ...]] = {
    "flash_attention_2": (8, 9, 10, 11, 12),
    "flash_attention_3": (9,),
    "flash_attention_4": (9, 10),
}
# attn_implementation -> (the module of its package, torch's name for the implementation).
FLASH_PACKAGES: Mapping[str, tuple[str, str]] = {
    "flash_attention_3": ("flash_attn_interface", "FA3"),
    "flash_attention_4": ("flash_attn.cute", "FA4"),
}
FLASH_ON_INDEX = "flash-attn-4"  # on PyPI, where FlashAttention 3 has no wheel


def find_problems(
    recipe: Recipe,
    layout: Sharding | None = None,
    facts: ModelFacts | None = None,
    ranks: int = 1,
    *,
    teacher: ModelFacts | None = None,
    machine: MachineFacts | None = None,
    steps: int | None = None,
    images: str | None = None,
) -> list[Problem]:
    """Lists the problems of a run, the most important first, and after them the notes.

    `layout`, `facts` and `machine` are None if they are not known yet; the rules that need them are
    then skipped.

    Args:
        recipe: The recipe of the run.
        layout: The layout, with the recipe's keys added by `with_recipe_keys`.
        facts: The facts of the model.
        ranks: Number of ranks of the run.
        teacher: The facts of the teacher; None: no teacher, or it is not known yet.
        machine: The facts of the machine that trains.
        steps: Optimizer steps of the run; None: not known yet.
        images: The model_type of the whole vision-language model; None: no row with images has
            been read.
    """
    case = Case(
        recipe=recipe,
        layout=layout or UNKNOWN,
        model=facts or UNKNOWN,
        machine=machine or UNKNOWN,
        ranks=ranks,
        steps=steps,
        images=images,
    )
    problems = _judge(case, RULES)
    if teacher is not None and layout is not None:
        teacher_case = replace(case, model=teacher, is_teacher=True)
        problems += _judge(teacher_case, (rule for rule in RULES if rule.of_teacher))
    return sorted(problems, key=lambda problem: problem.is_note)


def find_recipe_problems(recipe: Recipe, unusable: Collection[str]) -> list[Problem]:
    """Lists the problems, without notes, that a recipe has by itself: no layout or model is known.

    `unusable`: keys whose values are wrong already; rules that read one of them are skipped.
    """
    rules = (
        rule
        for rule in (*recipe_rules.REQUIRED, *RULES)
        if not rule.is_note and not {*unusable}.intersection(rule.keys)
    )
    return _judge(Case(recipe=recipe), rules)


def _judge(case: Case, rules: Iterable[Rule]) -> list[Problem]:
    """Applies `rules`, but for those that read a part of `case` that is not known."""
    problems: list[Problem] = []
    for rule in rules:
        with suppress(NotKnown):
            problems += rule.check(case)
    return problems


def refuse_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Raises `UserError` if a problem is more than a note; otherwise returns `problems`, all notes.

    The error has one line for each such problem; equal lines are joined.
    """
    problems = list(problems)
    lines = dict.fromkeys(str(problem) for problem in problems if not problem.is_note)
    if lines:
        raise UserError.of(lines)
    return problems


def _require_package(
    name: str,
    keys: tuple[str, ...],
    when: Condition,
    package: str,
    feature: Callable[[Case], str] | str,
    otherwise: str,
    *,
    install: str = "",
    of_teacher: bool = False,
) -> Rule:
    """Makes a rule: a run that uses a feature needs a Python package.

    Args:
        name: The rule's name.
        keys: The keys of the recipe or the Accelerate file that ask for the feature.
        when: Whether a case uses the feature.
        package: The package's import name.
        feature: The feature as the message names it, or a function that names it for a case.
        otherwise: The advice for a run without the package.
        install: The package's name for pip; empty: the import name.
        of_teacher: Whether the rule is applied to the teacher too.
    """
    describe = feature if callable(feature) else lambda _: feature
    return make_rule(
        name,
        *keys,
        when=lambda c: when(c) and not c.machine.has_package(package),
        message=lambda c: f"{describe(c)} needs {package}",
        advice=f"pip install {install or package}, or {otherwise}",
        of_teacher=of_teacher,
    )


def _has_reward(name: str, case: Case) -> bool:
    return name in case["rewards"]


def _lacks_tracker(name: str, case: Case) -> bool:
    """Whether report_to names the tracker `name` and the package of this name is not installed."""
    report_to = case["report_to"]
    trackers = (report_to,) if isinstance(report_to, str) else report_to
    return name in trackers and not case.machine.has_package(name)


def _find_fp8_capability(case: Case) -> tuple[int, int]:
    return HIP_FP8 if case.machine.is_hip else CUDA_FP8


def _lacks_fp8_gpu(case: Case) -> bool:
    """Whether FP8 is asked for on a GPU that is too old for it; False on a CPU."""
    capability = case.machine.capability
    return has_fp8(case) and capability is not None and capability < _find_fp8_capability(case)


def _describe_fp8_gpu(case: Case) -> str:
    has = ".".join(map(str, case.machine.capability or (0, 0)))
    needs = ".".join(map(str, _find_fp8_capability(case)))
    return (
        f"mixed_precision: fp8: {case.machine.gpu} has compute capability {has}, and FP8 needs "
        f"{needs}"
    )


def _lacks_flash_gpu(case: Case) -> bool:
    """Whether attn_implementation names a FlashAttention that does not run on this machine."""
    major_versions = FLASH_GPUS.get(case["attn_implementation"])
    if major_versions is None:
        return False
    capability = case.machine.capability
    return capability is None or capability[0] not in major_versions


def _describe_flash_gpu(case: Case) -> str:
    name = case["attn_implementation"]
    capability = case.machine.capability
    if capability is None:
        here = "this is a CPU run"
    else:
        here = f"this GPU has {capability[0]}.{capability[1]}"
    needed = " or ".join(f"{major}.x" for major in FLASH_GPUS[name])
    return f"attn_implementation: {name} needs a GPU of compute capability {needed}, and {here}"


MACHINE: tuple[Rule, ...] = (
    *(
        make_rule(
            f"report_to: {name}",
            "report_to",
            when=partial(_lacks_tracker, name),
            message=f"report_to: {name}: its package is not installed",
            advice=(
                f"{install_command(name)}, or set report_to: none (metrics.jsonl is always written)"
            ),
            fix={"report_to": "none"},
        )
        for name in TRACKERS
    ),
    *(
        _require_package(
            f"the package of {name}",
            ("rewards",),
            partial(_has_reward, name),
            package,
            f"rewards: {name}",
            "use number",
            install=package.replace("_", "-"),
        )
        for name, package in REWARD_PACKAGES.items()
    ),
    _require_package(
        "bitsandbytes",
        LOAD_KEYS,
        is_quantized,
        "bitsandbytes",
        lambda c: c.load_key,
        "remove it and name an unquantized model",
        of_teacher=True,
    ),
    _require_package(
        "torchao for FP8",
        ("mixed_precision",),
        has_fp8,
        "torchao",
        "mixed_precision: fp8",
        "set mixed_precision: bf16",
    ),
    _require_package(
        "torchao for QAT",
        (recipe_rules.QAT,),
        recipe_rules.has_qat,
        "torchao",
        recipe_rules.QAT,
        "remove the key",
    ),
    *(
        _require_package(
            f"{row.package} for an export",
            ("export_formats",),
            recipe_rules.exports(name),
            row.package,
            f"export_formats: {name}",
            "remove it",
            install=row.install or "",
        )
        for name, row in EXPORT_FORMATS.items()
        if row.package is not None
    ),
    *(
        _require_package(
            f"{row.package} for {name}",
            ("optim",),
            is_set("optim", name),
            row.package,
            f"optim: {name}",
            f"set optim: {SMALLEST_WITHOUT_PACKAGE}",
        )
        for name, row in OPTIMIZERS.items()
        if row.package is not None
    ),
    _require_package(
        "liger-kernel",
        ("use_liger_kernel",),
        lambda c: c["use_liger_kernel"] and c.machine.device == "cuda",
        "liger_kernel",
        "use_liger_kernel",
        "remove it",
        install="liger-kernel",
    ),
    make_rule(
        "Liger's families",
        "use_liger_kernel",
        when=lambda c: (
            c["use_liger_kernel"]
            and c.machine.liger_families is not None
            and c.model.model_type not in c.machine.liger_families
        ),
        message="use_liger_kernel: Liger has no kernels for {model.model_type}",
        advice="remove it",
        fix={"use_liger_kernel": False},
    ),
    make_rule(
        "no compiler",
        "torch_compile",
        when=lambda c: c["torch_compile"] and not c.machine.has_compiler,
        message="torch_compile: torch.compile needs a C++ compiler, and none is on the PATH",
        advice="install one (g++), or set torch_compile: false",
        fix={"torch_compile": False},
    ),
    make_rule(
        "CPU offload of FSDP1 on a CPU",
        "offload_params",
        when=lambda c: (
            c.layout.layout == "fsdp1" and c.layout.cpu_offload and c.machine.device == "cpu"
        ),
        message="fsdp_offload_params: FSDP1 offloads from a GPU, and this is a CPU run",
        advice="set it to false, or fsdp_version: 2",
    ),
    make_rule(
        "flex_attention of padded rows",
        "attn_implementation",
        "packing",
        when=lambda c: (
            c["attn_implementation"] == "flex_attention"
            and not c["packing"]
            and c.machine.device == "cpu"
        ),
        message=(
            "attn_implementation: flex_attention cannot be combined with packing: false on a CPU: "
            "there transformers' outputs for padded rows are not finite"
        ),
        advice="remove the key",
        fix={"attn_implementation": "auto"},
    ),
    make_rule(
        "FP8 on an older GPU",
        "mixed_precision",
        when=_lacks_fp8_gpu,
        message=_describe_fp8_gpu,
        fix=BF16,
    ),
    make_rule(
        "flash attention on this GPU",
        "attn_implementation",
        when=_lacks_flash_gpu,
        message=_describe_flash_gpu,
        advice="remove the key",
        fix={"attn_implementation": "auto"},
    ),
    make_rule(
        "state in files without Linux",
        "optim_offload",
        when=lambda c: c["optim_offload"] == "nvme" and c.machine.system != "linux",
        message="optim_offload: nvme needs Linux",
        advice="remove optim_offload",
    ),
    no_effect("tf32", "on a CPU", lambda c: c.machine.device == "cpu", is_note=True),
)

# The most important rules first: problems are reported in this order.
RULES: tuple[Rule, ...] = (
    *layout_rules.POSSIBLE,
    *method_rules.RULES,
    *recipe_rules.RULES,
    *model_rules.RULES,
    *exclusions.RULES,
    *layout_rules.RULES,
    *MACHINE,
)
