"""Opens a run: reads all that it needs before the weights, which is the folder, the tokenizer, the
config and the data.

Each of them may complete the recipe.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.facts import MachineFacts, adopt_quantization
from finetune.config.module_names import adopt_published_names
from finetune.config.pretrained import Vocabulary, load_config, read_facts, set_head, trained_config
from finetune.config.schema import Recipe
from finetune.data.prepare import PreparedData, prepare_data
from finetune.data.retrieval import write_pair_template
from finetune.data.tokenizer import (
    encode_bos,
    find_mask_id,
    find_pad_id,
    load_tokenizer,
    plan_vocabulary,
    refuse_unnamed_tokens,
)
from finetune.distributed.model_parts import trains_tower, unwrap
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.export.logits import check_streamed_logits
from finetune.files.phases import Phases
from finetune.models.load import BuildOptions
from finetune.models.reach import ONLY_IMAGES, BlankDocument
from finetune.plan.architecture import read_reward_model
from finetune.training.lifecycle import fix_template_date, open_run_folder
from finetune.training.objectives.distill import read_teacher_facts
from finetune.training.objectives.online import check_rewards
from finetune.training.screens import check_offload_dir


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """All that a run needs but its weights."""

    recipe: Recipe  # completed by the tokenizer, the config and the data
    folder: Path | None  # None if nothing is saved
    tokenizer: Any
    vocabulary: Vocabulary | None  # None if the recipe adds no tokens
    data: PreparedData | None  # None if the recipe names none: a script gives all rows

    @property
    def build_options(self) -> BuildOptions:
        """The options to build the model by: those of the method, the tokenizer and the data."""
        return BuildOptions(
            vocabulary=self.vocabulary,
            scores=(self.recipe.score_head, find_pad_id(self.tokenizer)),
            trains_head=not self.recipe.method_facts.embeds,
            blank_document=self._blank_document,
        )

    @property
    def _blank_document(self) -> BlankDocument | None:
        """The function that makes a document of one small image; None if no row holds an image."""
        if self._holds_no_image:
            return None
        make: BlankDocument | None = self.tokenizer.images.make_blank_document
        return make

    @property
    def _holds_no_image(self) -> bool:
        """Whether it is known that no row holds an image: all rows have been read."""
        data = self.data
        return data is not None and data.report.is_complete and data.images is None

    def refuse_unreached_tower(self, model: nn.Module) -> None:
        """Raises `UserError` if parts of `model` are trained that only images reach, and no row
        holds an image.
        """
        if self._holds_no_image and trains_tower(unwrap(model)):
            raise UserError(f"trainable_modules: {ONLY_IMAGES}")


def open_run(
    recipe: Recipe, world: World, machine: MachineFacts, phases: Phases, *, saves: bool
) -> OpenedRun:
    """Reads all that a run needs but its weights, and applies the rules that need the config.

    All ranks call it.

    Args:
        recipe: Before tokenizer, config and data complete it.
        world: The ranks of the run.
        machine: What rules ask about this machine.
        phases: Counts the seconds of reading the data.
        saves: Whether the run has a folder.

    Returns:
        The opened run, with the completed recipe.

    Raises:
        UserError: A rule refuses the recipe, a file cannot be read, the data has a fatal finding,
            or the folder cannot be written or is in use.
    """
    folder = open_run_folder(recipe, world) if saves else None
    tokenizer = load_tokenizer(
        recipe.model, recipe.data, recipe.rollout.tools, recipe.rollout.environments
    )
    if recipe.method_facts.reads_queries and tokenizer.pad_token is None:
        # The saved tokenizer needs one: other tools pad the texts of a batch with it.
        tokenizer.pad_token = tokenizer.eos_token
    if recipe.method_facts.ranks:
        # By it other tools write a query and a document as the text that the model is trained on.
        tokenizer.chat_template = write_pair_template(
            recipe.data, tokenizer.decode(encode_bos(tokenizer)), tokenizer.eos_token or ""
        )
    if recipe.method_facts.masks:
        find_mask_id(tokenizer, recipe.method.mask_token)  # raises if there is none
    if folder is not None:
        recipe = fix_template_date(recipe, folder, tokenizer, world)
    refuse_unnamed_tokens(recipe)
    vocabulary = plan_vocabulary(tokenizer, recipe.model)
    recipe = _adopt_config(recipe, tokenizer, vocabulary, world, machine)
    check_offload_dir(recipe, world)
    data = None
    if recipe.data.datasets:
        data, recipe = _read_data(recipe, tokenizer, world, phases)
    return OpenedRun(recipe, folder, tokenizer, vocabulary, data)


def _adopt_config(
    recipe: Recipe,
    tokenizer: Any,
    vocabulary: Vocabulary | None,
    world: World,
    machine: MachineFacts,
) -> Recipe:
    """Reads the model's config, applies the rules that need it, and completes the recipe.

    Returns:
        The recipe with the names that modules have in the loaded model, and with the quantization
        of the model's files.

    Raises:
        UserError: A rule refuses the recipe, a reward model gives no score, or an export of the
            model could not be checked.
    """
    config = load_config(recipe.model, vocabulary)
    facts = read_facts(config, recipe.model.model_name_or_path, len(tokenizer))
    recipe = adopt_published_names(recipe, facts.model_type)
    teacher = read_teacher_facts(recipe, tokenizer)
    refuse_problems(
        find_problems(recipe, world.sharding, facts, world.size, teacher=teacher, machine=machine)
    )
    for name in recipe.rollout.reward_models:
        read_reward_model(name)  # raises if it gives no score
    # A run whose export could not be checked must not start.
    exported_config = trained_config(config, recipe.model)
    set_head(exported_config, recipe.score_head, find_pad_id(tokenizer))
    RankGroup(world).on_main(
        lambda: check_streamed_logits(exported_config, recipe.model.trust_remote_code)
    )
    return adopt_quantization(recipe, facts)


def _read_data(
    recipe: Recipe, tokenizer: Any, world: World, phases: Phases
) -> tuple[PreparedData, Recipe]:
    """Reads the data. All ranks call it.

    Returns (the data, the recipe that the data completes). Raises `UserError` if the data has a
    fatal finding, or lacks columns that rewards need.
    """
    with phases.timed("data"):
        data = prepare_data(recipe, tokenizer, world.data_parallel)
    recipe = data.complete_recipe(recipe)
    if recipe.rollout.reward_functions or recipe.rollout.takes_turns:
        check_rewards(recipe, world, data)
    return data, recipe
