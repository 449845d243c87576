"""The rulebook: what works together, and the only function that refuses a combination.

Imports no torch.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from finetune.config import exclusions, layout_rules, method_rules, model_rules, recipe_rules
from finetune.config.export_formats import EXPORT_FORMATS
from finetune.config.facts import MachineFacts, ModelFacts
from finetune.config.layout import Sharding
from finetune.config.optimization import OPTIMIZERS, SMALLEST_WITHOUT_PACKAGE
from finetune.config.quantization import LOAD_KEYS
from finetune.config.reward_names import REWARD_PACKAGES
from finetune.config.rule import (
    BF16,
    Case,
    Condition,
    Need,
    Problem,
    Rule,
    has_fp8,
    is_quantized,
    is_set,
)
from finetune.config.schema import Recipe
from finetune.errors import UserError, install_command

TRACKERS: Mapping[str, str] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
# The least compute capability: Ada's (L40S, RTX 4090) and MI300's.
CUDA_FP8 = (8, 9)
HIP_FP8 = (9, 4)
FLASH_GPUS: Mapping[str, tuple[int, ...]] = {  # major versions of the compute capability
    "flash_attention_2": (8, 9, 10, 11, 12),
    "flash_attention_3": (9,),
    "flash_attention_4": (9, 10),
}
# A recipe's name -> the module of its package, torch's name for it.
FLASH_PACKAGES: Mapping[str, tuple[str, str]] = {
    "flash_attention_3": ("flash_attn_interface", "FA3"),
    "flash_attention_4": ("flash_attn.cute", "FA4"),
}
FLASH_ON_INDEX = "flash-attn-4"  # FlashAttention 3 has no wheel there


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
    """Lists what does not work together, the most important first, and then the notes.

    Args:
        recipe: As it was read.
        layout: With the recipe's expert_parallel_size. None, like `facts` and `machine`: not known,
            so that no rule about it applies.
        facts: The model's.
        ranks: Number of ranks of the run.
        teacher: The facts of the recipe's teacher.
        machine: The machine that trains.
        steps: Steps of the run, once they are known.
        images: The model_type of the whole model, once rows with images have been read.
    """
    unknown: Any = None
    case = Case(
        recipe=recipe,
        layout=layout or unknown,
        model=facts or unknown,
        machine=machine or unknown,
        ranks=ranks,
        steps=steps,
        images=images,
    )
    problems = _judge(case, RULES)
    if teacher is not None and layout is not None:
        of_teacher = replace(case, model=teacher, is_teacher=True)
        problems += _judge(of_teacher, (rule for rule in RULES if rule.of_teacher))
    return sorted(problems, key=lambda problem: problem.is_note)


def find_recipe_problems(recipe: Recipe, unusable: Collection[str]) -> list[Problem]:
    """Lists the problems of a recipe just read, without notes.

    Skips rules that read an `unusable` key.
    """
    unknown: Any = None
    case = Case(recipe=recipe, layout=unknown, model=unknown, machine=unknown)
    rules = (*recipe_rules.REQUIRED, *RULES)
    return _judge(
        case,
        (rule for rule in rules if not rule.is_note and not {*unusable}.intersection(rule.keys)),
    )


def _judge(case: Case, rules: Iterable[Rule]) -> list[Problem]:
    """Applies the rules that need no more than is known of the case."""
    known = {need for need in get_args(Need) if getattr(case, need) is not None}
    problems: list[Problem] = []
    for rule in rules:
        if known.issuperset(rule.needs):
            problems += rule.check(case)
    return problems


def refuse_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Returns the notes among `problems`.

    Raises:
        UserError: With every problem that is no note, a line each.
    """
    problems = list(problems)
    wrong = dict.fromkeys(str(problem) for problem in problems if not problem.is_note)
    if wrong:
        raise UserError.of(wrong)
    return problems


def _machine_rule(name: str, *keys: str, **others: Any) -> Rule:
    return Rule(name=name, keys=keys, needs=("layout", "machine"), **others)


def _package(
    name: str,
    keys: tuple[str, ...],
    when: Condition,
    package: str,
    what: Callable[[Case], str] | str,
    else_: str,
    *,
    install: str = "",
    of_teacher: bool = False,
) -> Rule:
    shown = what if callable(what) else lambda _: what
    return _machine_rule(
        name,
        *keys,
        when=lambda c: when(c) and not c.machine.has_package(package),
        message=lambda c: f"{shown(c)} needs {package}",
        advice=f"pip install {install or package}, or {else_}",
        of_teacher=of_teacher,
    )


def _rewards_by(name: str, case: Case) -> bool:
    return name in case["rewards"]


def _has_old_gpu(case: Case) -> bool:
    capability = case.machine.capability
    return (
        has_fp8(case)
        and capability is not None
        and capability < (HIP_FP8 if case.machine.is_hip else CUDA_FP8)
    )


def _describe_old_gpu(case: Case) -> str:
    needed = HIP_FP8 if case.machine.is_hip else CUDA_FP8
    has = ".".join(map(str, case.machine.capability or (0, 0)))
    needs = ".".join(map(str, needed))
    return (
        f"mixed_precision: fp8: {case.machine.gpu} has compute capability {has}, and FP8 needs "
        f"{needs}"
    )


def _lacks_flash_gpu(case: Case) -> bool:
    needed = FLASH_GPUS.get(case["attn_implementation"])
    capability = case.machine.capability
    return needed is not None and (capability is None or capability[0] not in needed)


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
        _machine_rule(
            f"report_to: {name}",
            "report_to",
            when=lambda c, name=name, package=package: (
                name in (c["report_to"], *c["report_to"]) and not c.machine.has_package(package)
            ),
            message=f"report_to: {name}: its package is not installed",
            advice=(
                f"{install_command(name)}, or set report_to: none (metrics.jsonl is always written)"
            ),
            fix={"report_to": "none"},
        )
        for name, package in TRACKERS.items()
    ),
    *(
        _package(
            f"the package of {name}",
            ("rewards",),
            partial(_rewards_by, name),
            package,
            f"rewards: {name}",
            "use number",
            install=package.replace("_", "-"),
        )
        for name, package in REWARD_PACKAGES.items()
    ),
    _package(
        "bitsandbytes",
        LOAD_KEYS,
        is_quantized,
        "bitsandbytes",
        lambda c: c.load_key,
        "remove it and name an unquantized model",
        of_teacher=True,
    ),
    _package(
        "torchao for FP8",
        ("mixed_precision",),
        has_fp8,
        "torchao",
        "mixed_precision: fp8",
        "set mixed_precision: bf16",
    ),
    _package(
        "torchao for QAT",
        (recipe_rules.QAT,),
        recipe_rules.has_qat,
        "torchao",
        recipe_rules.QAT,
        "remove the key",
    ),
    *(
        _package(
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
        _package(
            f"{facts.package} for {name}",
            ("optim",),
            is_set("optim", name),
            facts.package,
            f"optim: {name}",
            f"set optim: {SMALLEST_WITHOUT_PACKAGE}",
        )
        for name, facts in OPTIMIZERS.items()
        if facts.package is not None
    ),
    _package(
        "liger-kernel",
        ("use_liger_kernel",),
        lambda c: c["use_liger_kernel"] and c.machine.device == "cuda",
        "liger_kernel",
        "use_liger_kernel",
        "remove it",
        install="liger-kernel",
    ),
    _machine_rule(
        "Liger on a CPU",
        "use_liger_kernel",
        when=lambda c: c["use_liger_kernel"] and c.machine.device == "cpu",
        message="use_liger_kernel: Liger's kernels run on CUDA only, and this is a CPU run",
        advice="remove it",
        fix={"use_liger_kernel": False},
    ),
    Rule(
        name="Liger's families",
        keys=("use_liger_kernel",),
        needs=("model", "machine"),
        when=lambda c: (
            c["use_liger_kernel"]
            and c.machine.liger_families is not None
            and c.model.model_type not in c.machine.liger_families
        ),
        message="use_liger_kernel: Liger has no kernels for {model.model_type}",
        advice="remove it",
        fix={"use_liger_kernel": False},
    ),
    _machine_rule(
        "no compiler",
        "torch_compile",
        when=lambda c: c["torch_compile"] and not c.machine.has_compiler,
        message="torch_compile: torch.compile needs a C++ compiler, and none is on the PATH",
        advice="install one (g++), or set torch_compile: false",
        fix={"torch_compile": False},
    ),
    _machine_rule(
        "activation_offload on a CPU",
        "activation_offload",
        when=lambda c: c["activation_offload"] and c.machine.device == "cpu",
        message="activation_offload: on a CPU activations are in host memory already",
        fix={"activation_offload": False},
    ),
    _machine_rule(
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
    _machine_rule(
        "fp16 on a CPU",
        "mixed_precision",
        when=lambda c: c.precision == "fp16" and c.machine.device == "cpu",
        message="mixed_precision: fp16 does not train on a CPU",
        advice="use bf16 or no",
        fix=BF16,
    ),
    _machine_rule(
        "FP8 on an older GPU",
        "mixed_precision",
        when=_has_old_gpu,
        message=_describe_old_gpu,
        fix=BF16,
    ),
    _machine_rule(
        "flash attention on this GPU",
        "attn_implementation",
        when=_lacks_flash_gpu,
        message=_describe_flash_gpu,
        advice="remove the key",
        fix={"attn_implementation": "auto"},
    ),
    _machine_rule(
        "state in files without Linux",
        "optim_offload",
        when=lambda c: c["optim_offload"] == "nvme" and c.machine.system != "linux",
        message="optim_offload: nvme needs Linux",
        advice="remove optim_offload",
    ),
    _machine_rule(
        "tf32 on a CPU",
        "tf32",
        when=lambda c: c["tf32"] and c.machine.device == "cpu",
        message="tf32 has no effect on a CPU",
        is_note=True,
    ),
)

# The most important first: problems are reported in this order.
RULES: tuple[Rule, ...] = (
    *layout_rules.POSSIBLE,
    *method_rules.RULES,
    *recipe_rules.RULES,
    *model_rules.RULES,
    *exclusions.RULES,
    *layout_rules.RULES,
    *MACHINE,
)
