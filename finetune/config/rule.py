"""Rules on a run: the case that a rule judges, the rule, and the problem that it finds.

Below them are the makers of rules and the conditions that several rules share. Imports no torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from finetune.config.facts import MachineFacts, ModelFacts
from finetune.config.layout import Sharding
from finetune.config.methods import MethodFacts
from finetune.config.quantization import name_load_key
from finetune.config.schema import Quantization, Recipe, compute_global_batch_size, recipe_keys
from finetune.constants import Names


class NotKnown(Exception):
    """Raised where a rule reads a part of a `Case` that is not known yet."""


class _Unknown:
    """Stands for a part of a `Case` that is not known yet: whatever is read of it is `NotKnown`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own question, such as a search for __wrapped__
            raise AttributeError(name)
        raise NotKnown(name)


UNKNOWN: Any = _Unknown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run to judge.

    `layout`, `model` and `machine` are UNKNOWN while they are not known. A rule that reads one of
    them is then skipped.
    """

    recipe: Recipe
    layout: Sharding = UNKNOWN
    model: ModelFacts = UNKNOWN
    machine: MachineFacts = UNKNOWN
    ranks: int = 1
    steps: int | None = None  # optimizer steps of the run; None: not known yet
    is_teacher: bool = False  # whether `model` is the teacher
    # model_type of the whole vision-language model; None: no row with images has been read
    images: str | None = None

    @property
    def shards(self) -> int:
        """Number of ranks that shard one replica of the model under FSDP2.

        With pipeline parallelism it is a replica of one stage's layers.
        """
        return self.ranks // (
            self.layout.pipeline_parallel_size * (self.layout.replicate_size or 1)
        )

    def __getitem__(self, key: str) -> Any:
        """Returns the value of the recipe key `key`; if there is no such key, the attribute.

        Messages use it for {learning_rate}, {name} or {layout.source}.
        """
        recipe_key = recipe_keys().get(key)
        if recipe_key is None:
            return getattr(self, key)
        return getattr(getattr(self.recipe, recipe_key.section), key)

    @property
    def name(self) -> str:
        """The model's name, or the teacher's, for messages; "model_config" if it has none."""
        if self.is_teacher and self.method_facts.needs_teacher:
            name = self.recipe.method.teacher_model_name_or_path
        else:
            name = self.recipe.model.model_name_or_path
        return name or "model_config"

    @property
    def method_facts(self) -> MethodFacts:
        """The facts about the recipe's method."""
        return self.recipe.method_facts

    @property
    def quantization(self) -> Quantization:
        """The model's quantization in memory: that of its files, else the recipe's."""
        if self.model is not UNKNOWN and self.model.quantization is not None:
            return self.model.quantization
        if self.is_teacher:
            return self.recipe.teacher_quantization
        return self.recipe.quantization

    @property
    def is_whole(self) -> bool:
        """Whether the run loads a vision-language model with its vision tower."""
        return self.model.vision and not self.recipe.model.drop_vision

    @property
    def load_key(self) -> str:
        """The recipe key that asks for `quantization`."""
        of_teacher = self.is_teacher and self.method_facts.needs_teacher
        return name_load_key(self.quantization, of_teacher=of_teacher)

    @property
    def global_batch_size(self) -> int:
        """Number of rows in an optimizer step, over all ranks."""
        return compute_global_batch_size(
            self.recipe.batch, self.ranks // self.layout.ranks_per_batch
        )

    @property
    def precision(self) -> str:
        """`mixed_precision` as the Accelerate file writes it: "fp8" if products are in FP8."""
        if self.layout.fp8 is not None:
            return "fp8"
        return self.layout.mixed_precision


Condition = Callable[[Case], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem that a rule found."""

    rule: str  # the rule's name
    place: str  # FILE:LINE, a file, or the command line
    sentence: str  # what is wrong and what to do
    fix: Mapping[str, Any] | None = None  # key -> a value that solves it; None: none is known
    is_note: bool = False  # worth a line, but no reason to stop

    def __str__(self) -> str:
        return f"{self.place}: {self.sentence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that does not work, or has no effect."""

    name: str
    # the keys of the recipe or the Accelerate file that the rule reads; a problem is reported at
    # the first that is set
    keys: Names
    when: Condition  # whether `case` has the problem
    # what is wrong: a text in which {key} is `case[key]`, or a function that may return several
    message: str | Callable[[Case], str | list[str]]
    advice: str | Callable[[Case], str] = ""  # what to do; empty: set the keys of `fix`
    fix: Mapping[str, Any] | None = None  # key -> a value that solves the problem
    of_teacher: bool = False  # whether the rule applies to the teacher too
    is_note: bool = False  # worth a line, but no reason to stop

    def check(self, case: Case) -> Iterable[Problem]:
        """Returns the problems that the rule finds in `case`; empty if `when` does not hold.

        Raises `NotKnown` if the rule reads a part of `case` that is not known.
        """
        if not self.when(case):
            return []
        if isinstance(self.message, str):
            messages = [self.message.format_map(case)]
        else:
            text = self.message(case)
            messages = [text] if isinstance(text, str) else text
        if isinstance(self.advice, str):
            advice = self.advice
        else:
            advice = self.advice(case)
        if not advice and self.fix is not None:
            advice = "set " + " and ".join(
                f"{key}: {_format_yaml(value)}" for key, value in self.fix.items()
            )
        end = f"; {advice}" if advice else ""
        start = f"{case.recipe.teacher_key}: " if case.is_teacher else ""
        place = _find_place(self.keys, case)
        make_problem = partial(
            Problem, rule=self.name, place=place, fix=self.fix, is_note=self.is_note
        )
        return [make_problem(sentence=start + message + end) for message in messages]


def _find_place(keys: Names, case: Case) -> str:
    """Returns the place of the first of `keys` that is set.

    If all have their defaults, returns the file to which the first key belongs: the recipe or the
    Accelerate file. A problem of the teacher is reported at the teacher's key.
    """
    recipe = case.recipe
    layout = case.layout
    looked_up = (recipe.teacher_key, *keys) if case.is_teacher else keys
    for key in looked_up:
        if key in recipe.places:
            return recipe.places[key]
        if layout is not UNKNOWN and layout.place_of(key) != layout.source:
            return layout.place_of(key)
    if layout is not UNKNOWN and (not keys or keys[0] not in recipe_keys()):
        return layout.source
    return recipe.path


def _format_yaml(value: Any) -> str:
    """Writes a value of a recipe as YAML, for an advice."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def make_rule(name: str, *keys: str, **fields: Any) -> Rule:
    """Makes a rule. `fields`: those of `Rule` beside `name` and `keys`."""
    return Rule(name=name, keys=keys, **fields)


def no_effect(
    key: str, without: str, when: Condition, *other_keys: str, is_note: bool = False
) -> Rule:
    """Makes the rule that a key that is set has no effect.

    Args:
        key: The key.
        without: Why, as the end of the sentence "KEY has no effect ...". If it begins with
            "without", the advice is to set what it names or to remove the key.
        when: When the key has no effect.
        other_keys: The keys that `when` reads.
        is_note: See `Rule`.
    """
    return Rule(
        name=f"{key} without effect: {without}",
        keys=(key, *other_keys),
        when=lambda case: is_set(key)(case) and when(case),
        message=f"{key} has no effect {without}",
        advice=f"set it, or remove {key}" if without.startswith("without") else f"remove {key}",
        is_note=is_note,
    )


def is_set(key: str, to: Any = ...) -> Callable[[Case], bool]:
    """Makes the condition that `key` is `to`; without `to`, that it is not its default."""

    def check(case: Case) -> bool:
        value = case[key]
        if to is ...:
            return bool(value != recipe_keys()[key].default)
        return bool(value == to)

    return check


def all_of(*conditions: Condition) -> Callable[[Case], bool]:
    """Makes the condition that all of `conditions` hold."""
    return lambda case: all(condition(case) for condition in conditions)


def has_tp(case: Case) -> bool:
    """Whether the layout has tensor parallelism."""
    return case.layout.divides_matrices


def has_sp(case: Case) -> bool:
    """Whether the layout has sequence parallelism."""
    return case.layout.sequence_parallel_size > 1


def has_ep(case: Case) -> bool:
    """Whether the layout has expert parallelism."""
    return case.layout.expert_parallel_size > 1


def has_pp(case: Case) -> bool:
    """Whether the layout has pipeline parallelism."""
    return case.layout.pipeline_parallel_size > 1


def is_fsdp1(case: Case) -> bool:
    return case.layout.layout == "fsdp1"


def has_fp8(case: Case) -> bool:
    return case.layout.fp8 is not None


def is_quantized(case: Case) -> bool:
    """Whether the model, or the teacher if the case is its, is kept in 4 or 8 bits."""
    return case.quantization.bits is not None


def samples(case: Case) -> bool:
    """Whether the recipe's method samples completions."""
    return case.method_facts.samples


def samples_itself(case: Case) -> bool:
    """Whether the model in training samples the completions, rather than a vLLM server."""
    return case.recipe.samples_itself


BF16 = {"mixed_precision": "bf16"}  # the `fix` of several rules
