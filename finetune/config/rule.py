"""A rule about what works together: the case that it judges, and the problem that it finds.

Imports no torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from finetune.config.facts import MachineFacts, ModelFacts
from finetune.config.layout import Sharding
from finetune.config.methods import MethodFacts
from finetune.config.quantization import name_load_key, quantize_teacher
from finetune.config.schema import Quantization, Recipe, compute_global_batch_size, recipe_keys
from finetune.constants import Names

Need = Literal["layout", "model", "machine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run to judge.

    A rule reads `layout`, `model` and `machine` only where it says that it needs them.
    """

    recipe: Recipe
    layout: Sharding
    model: ModelFacts
    machine: MachineFacts
    ranks: int = 1
    steps: int | None = None  # of the run, where the data has been read or max_steps says it
    is_teacher: bool = False  # whether `model` is the teacher
    images: str | None = None  # the family of the whole model, once rows with images have been read

    @property
    def shards(self) -> int:
        """Ranks that hold a replica of the model, or of a stage's layers, between them under
        FSDP2.
        """
        return self.ranks // (
            self.layout.pipeline_parallel_size * (self.layout.replicate_size or 1)
        )

    def __getitem__(self, key: str) -> Any:
        """Returns the value of a recipe's key, or the attribute of this name."""
        recipe_key = recipe_keys().get(key)
        if recipe_key is None:
            return getattr(self, key)
        return getattr(getattr(self.recipe, recipe_key.section), key)

    @property
    def name(self) -> str:
        """The model, for messages."""
        if self.is_teacher:
            name = self.recipe.method.teacher_model_name_or_path
        else:
            name = self.recipe.model.model_name_or_path
        return name or "model_config"

    @property
    def method_facts(self) -> MethodFacts:
        return self.recipe.method_facts

    @property
    def quantization(self) -> Quantization:
        """How the model is kept: as its files are quantized, else as the recipe says."""
        stored: Quantization | None = getattr(self.model, "quantization", None)
        if stored:
            return stored
        if self.is_teacher:
            return quantize_teacher(self.recipe.method)
        return self.recipe.quantization

    @property
    def is_whole(self) -> bool:
        """Whether a vision tower is loaded with the model."""
        return self.model.vision and not self.recipe.model.drop_vision

    @property
    def load_key(self) -> str:
        """The key that asks for the quantization."""
        return name_load_key(self.quantization, of_teacher=self.is_teacher)

    @property
    def global_batch_size(self) -> int:
        """Rows in an optimizer step over all ranks."""
        return compute_global_batch_size(
            self.recipe.batch, self.ranks // self.layout.ranks_per_batch
        )

    @property
    def precision(self) -> str:
        """`mixed_precision` as the Accelerate file has it."""
        if self.layout.fp8 is not None:
            return "fp8"
        return self.layout.mixed_precision


Condition = Callable[[Case], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem that a rule found. `place` is a file with its line, or the command line."""

    rule: str
    place: str
    sentence: str
    fix: Mapping[str, Any] | None = None
    is_note: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.sentence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that does not work, or has no effect.

    `keys` are those that it reads, of the recipe or the Accelerate file; the problem is reported at
    the first that was set. `message` says what is wrong; `{key}` in it is the value of a Case. What
    to do is `advice`, else "set" each key of `fix`.
    """

    name: str
    keys: Names
    when: Condition
    message: str | Callable[[Case], str | list[str]]
    advice: str | Callable[[Case], str] = ""
    fix: Mapping[str, Any] | None = None
    needs: tuple[Need, ...] = ()
    of_teacher: bool = False  # whether a teacher must keep it too
    is_note: bool = False  # worth a line, no reason to stop

    def check(self, case: Case) -> Iterable[Problem]:
        """Returns the problems of `case` by this rule."""
        if not self.when(case):
            return []
        if isinstance(self.message, str):
            messages: str | list[str] = self.message.format_map(case)
        else:
            messages = self.message(case)
        if isinstance(messages, str):
            messages = [messages]
        if isinstance(self.advice, str):
            advice = self.advice
        else:
            advice = self.advice(case)
        if not advice and self.fix is not None:
            advice = "set " + " and ".join(
                f"{key}: {_in_yaml(value)}" for key, value in self.fix.items()
            )
        end = f"; {advice}" if advice else ""
        start = "teacher_model_name_or_path: " if case.is_teacher else ""
        place = _find_place(self.keys, case)
        make = partial(Problem, rule=self.name, place=place, fix=self.fix, is_note=self.is_note)
        return [make(sentence=start + message + end) for message in messages]


def _find_place(keys: Names, case: Case) -> str:
    """Returns where the first of `keys` stands that somebody set; the file where all are
    defaults.
    """
    recipe = case.recipe
    layout = case.layout
    of_teacher = ("teacher_model_name_or_path",) if case.is_teacher else ()
    for key in (*of_teacher, *keys):
        if key in recipe.places:
            return recipe.places[key]
        if layout is not None and layout.place_of(key) != layout.source:
            return layout.place_of(key)
    of_layout = layout is not None and all(key not in recipe_keys() for key in keys[:1])
    return layout.source if of_layout else recipe.path


def _in_yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def recipe_rule(name: str, *keys: str, **others: Any) -> Rule:
    """Returns a rule on the recipe alone."""
    return Rule(name=name, keys=keys, **others)


def layout_rule(name: str, *keys: str, **others: Any) -> Rule:
    """Returns a rule on the layout."""
    return Rule(name=name, keys=keys, needs=("layout",), **others)


def model_rule(name: str, *keys: str, **others: Any) -> Rule:
    """Returns a rule on the model."""
    return Rule(name=name, keys=keys, needs=("model",), **others)


def model_layout_rule(name: str, *keys: str, **others: Any) -> Rule:
    """Returns a rule on the model under a layout."""
    return Rule(name=name, keys=keys, needs=("layout", "model"), **others)


def no_effect(key: str, without: str, when: Condition, *reads: str, is_note: bool = False) -> Rule:
    """A rule: `key` has no effect; `without` says why, and what would give it one."""
    return Rule(
        name=f"{key} without effect: {without}",
        keys=(key, *reads),
        when=lambda case: is_set(key)(case) and when(case),
        message=f"{key} has no effect {without}",
        advice=f"set it, or remove {key}" if without.startswith("without") else f"remove {key}",
        is_note=is_note,
    )


def is_set(key: str, to: Any = ...) -> Callable[[Case], bool]:
    """A condition: `key` has the value `to`, or without one any other value than its default."""

    def check(case: Case) -> bool:
        value = case[key]
        if to is ...:
            return bool(value != recipe_keys()[key].default)
        return bool(value == to)

    return check


def all_of(*conditions: Condition) -> Callable[[Case], bool]:
    """A condition: all of `conditions` hold."""
    return lambda case: all(condition(case) for condition in conditions)


def has_tp(case: Case) -> bool:
    return case.layout.divides_matrices


def has_sp(case: Case) -> bool:
    return case.layout.sequence_parallel_size > 1


def has_ep(case: Case) -> bool:
    return case.layout.expert_parallel_size > 1


def has_pp(case: Case) -> bool:
    return case.layout.pipeline_parallel_size > 1


def is_fsdp1(case: Case) -> bool:
    return case.layout.layout == "fsdp1"


def has_fp8(case: Case) -> bool:
    return case.layout.fp8 is not None


def is_quantized(case: Case) -> bool:
    return case.quantization.bits is not None


def samples(case: Case) -> bool:
    """Whether the recipe's method samples completions."""
    return case.method_facts.samples


def samples_itself(case: Case) -> bool:
    """Whether the model in training samples them, not a server."""
    return case.recipe.samples_itself


BF16 = {"mixed_precision": "bf16"}
