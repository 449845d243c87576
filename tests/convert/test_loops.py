"""What other tools' loops, packing and classes of models do otherwise than a run here, with or without a key that says so."""

import inspect
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from torch.utils.data.distributed import DistributedSampler
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
)
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.masking_utils import create_causal_mask
from transformers.models.falcon_h1.configuration_falcon_h1 import FalconH1Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearTopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
from transformers.quantizers.quantizers_utils import should_convert_module

from finetune.config.facts import find_biased_layers, read_family_source
from finetune.config.module_names import find_alias
from finetune.config.optimization import Optimization
from finetune.config.schedules import compute_learning_rate
from finetune.config.schema import DatasetSource
from finetune.constants import ALL_LINEAR
from finetune.convert.asked_layout import EXAMPLE_SIZES, NUMBER_OF_GROUPS, WRITTEN_FILE
from finetune.convert.automodel import (
    ADDED_IN_FP32,
    AS_FILED,
    AS_FILED_BUT_IN_06,
    CLIPPED_BY_RANK_IN_06,
    CUT_BEFORE_ANSWER,
    DOCUMENTS_NOT_APART,
    ENDS_WITH_EPOCHS,
    FP32_BIAS_FAMILIES,
    GATE_IN_FP32,
    GATED_IN_16_BITS,
    GATED_IN_16_BITS_IN_06,
    GATES_IN_FP32,
    GRADIENTS_ROUNDED,
    HEAD_APART,
    HEAD_IN_4_BITS,
    HELD_OUT_ROWS_LEFT,
    HELD_OUT_UNBOUNDED,
    KEEPS_BIASES,
    LAST_ROWS_LEFT_OUT,
    LONGEST,
    MASKED_AS_FIRST,
    MAYBE_WIDENED,
    MEASURED_WITH_SAVES,
    NEXT_IN_PLACE,
    NORMS_OF_RANKS_IN_06,
    NOTHING_SAVED,
    OVERLONG_WAYS,
    PACKED_ROWS_UNMASKED,
    PADDED_ROWS,
    ROUNDED_BIASES,
    ROUTERS_IN_16_BITS,
    ROUTERS_IN_16_BITS_IN_06,
    ROUTERS_IN_32_BITS,
    ROUTERS_IN_32_BITS_SINCE_07,
    ROUTERS_IN_OWN_DTYPE,
    ROWS_READ_AGAIN,
    SAVED_WITH_EPOCHS,
    SCALES_FOLDED,
    SCORES_UNBIASED,
    SCORES_UNSCALED,
    SCORES_UNSCALED_BUT_IN_06,
    SEES_LATER,
    SHUFFLED_BEFORE,
    SHUFFLED_ONCE,
    UNEVEN_ROWS_LEFT_OUT,
    UNFILLED_LEFT_OUT,
    UNKNOWN_CLASS,
    UNMEASURED_IN_STAGES,
    UNREAD_IN_06,
    WARMUP_FROM_A_TENTH,
    WARMUP_OF_A_TENTH,
    WHERE_NO_ENGINE,
    WIDENED,
    WIDER_WINDOW,
    WITHOUT_ENGINE,
)
from finetune.convert.axolotl import (
    ADAPTERS_AS_BASE,
    ADAPTERS_BESIDE_NVFP4,
    BY_SOFTMAX,
    COPIES_AS_LOADED,
    ENDS_FROZEN,
    EXPERTS_ADAPTED,
    FIRST_ENTRY,
    LAST_HELD_OUT,
    LAST_UNMEASURED,
    PIECES_ALONE,
    PIECES_OVERLAP,
    TEXTS_CUT,
)
from finetune.convert.base_model import INPUTS_IN_4_BITS, KEPT_IN_FP8, MAYBE_KEPT_IN_FP8
from finetune.convert.by_tool import (
    ADAPTERS_IN_16_BITS,
    ADAPTERS_UNDER_ZERO_3,
    BEST_AMONG_KEPT,
    CARRIED_IN_06,
    CARRIED_OVER,
    IMAGES_SHRUNK,
    MAGNITUDES_DECAYED,
    PARTS_IN_FP32,
)
from finetune.convert.chat_templates import (
    AFTER_PROMPT,
    EARLIER_ENDS,
    EARLIER_THOUGHTS,
    OTHER_ENDS,
    OTHER_PROMPTS,
    OTHER_SPACE,
    OTHER_TOOLS,
    OTHER_TURNS,
    OWN_THOUGHT,
    PROMPT_ENDS,
)
from finetune.convert.conversion import (
    ALL_IN_FP8,
    BASE_IN_FP32,
    BASE_IN_FP32_BEFORE_5,
    OPTIMIZERS_COPY,
    REDUCED_ALONE,
    REDUCED_IN_16_BITS,
    convert_file,
)
from finetune.convert.counterparts import NOTES
from finetune.convert.datasets import (
    AUTOMODEL_ENDS,
    CALLS_AS_TEXTS,
    HEADER_THERE,
    MARKED_THERE,
    OF_CHATS,
    ONE_TEXT_OF_CHAT,
    PARTS_APART,
    SPLIT_BY_PACKING,
)
from finetune.convert.defaults import WARMUP_THERE
from finetune.convert.factory import NOT_NEAT
from finetune.convert.factory_v1 import (
    AS_MANY_AS_FIT,
    COUNTED_BY_ROWS,
    FILLED_UP,
    ONE_LONG_ROW,
    SEEN_THROUGH_CACHE,
    V1_SPECIAL,
)
from finetune.convert.image_models import (
    ALL_OF_IMAGES,
    ATTENTION_IN_16_BITS,
    IMAGE_LABELS,
    IMAGES_UNCUT,
    QUANTIZED_TOWER,
    UNKNOWN_IMAGES,
)
from finetune.convert.model_names import guess_family
from finetune.convert.numbers import EMPTY_TEXTS
from finetune.convert.objectives import (
    ADAPTED_ALONE,
    BIASES_FIXED,
    CHOSEN_BY_MICRO_BATCH,
    EMBEDDING_ROUNDED,
    FROM_THE_START,
    HEAD_ROUNDED,
    INPUTS_PUT_OFF,
    KTO_OF_MICRO_BATCHES,
    MIN_TO_MAX,
    SLICED_AGAIN,
)
from finetune.convert.recognize import Refusal
from finetune.convert.runnable import NO_LAYER, OWN_CODE, ROUTERS, WORDS_THERE
from finetune.convert.shared import (
    IN_ORDER,
    PACKED_IN_ORDER,
    ROTATED_WHOLE,
    ROTATION_ROUNDED,
    SUMMED_IN_16_BITS,
    UNMULTIPLIED,
    WHOLE_STEPS,
)
from finetune.convert.torchtune import METAS_FILES, SHARED_EXPERT_ADDED, SUMMED_IN_06
from finetune.convert.trained_layers import (
    ADAPTERS_FROZEN,
    ALL_WITH_EXPERTS,
    AUXILIARY,
    BY_LAYER,
    DROPOUT_ON_EXPERTS,
    FUSED_OTHERWISE,
    HALF_OF_FUSED,
    HEAD_UNNAMED,
    MLP_NAMES,
    NO_AUXILIARY,
    NO_SUCH_LAYER,
    ONTO_EXPERTS,
    OTHER_EXPERTS,
    ROUTER_UNADAPTED,
    TWICE_THE_RANK,
)
from finetune.convert.value_conversion import Conversion
from finetune.data.formats import parse_row
from finetune.data.messages import BadRow, parse_messages
from finetune.data.render import render_turns
from finetune.data.tokenizer import make_renderer
from finetune.optim.optimizers import make_parameter_groups
from tests.convert.conftest import Convert, said
from tests.models.families import build

MODEL = {
    "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
    "pretrained_model_name_or_path": "Qwen/Qwen3-8B",
}
HELLASWAG = {
    "_target_": "nemo_automodel.components.datasets.llm.hellaswag.HellaSwag",
    "path_or_dataset": "rowan/hellaswag",
}
AUTOMODEL = {
    "model": MODEL,
    "dataset": HELLASWAG,
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-5},
    "step_scheduler": {"local_batch_size": 1, "ckpt_every_steps": 50},
}
COLLATERS = "nemo_automodel.components.datasets.utils.packed_sequence_thd_collater"
IMAGES = {
    "recipe": "FinetuneRecipeForVLM",
    "dataset": {
        "_target_": "nemo_automodel.components.datasets.vlm.datasets.make_medpix_dataset",
        "path_or_dataset": "mmoukouba/MedPix-VQA",
    },
}
AXOLOTL = {
    "base_model": "Qwen/Qwen3-8B",
    "datasets": [{"path": "a/rows", "type": "chat_template"}],
    "micro_batch_size": 1,
    "learning_rate": 1e-5,
    "bf16": True,
    "attn_implementation": "flash_attention_2",
}
TUNE = {
    "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer"},
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "meta-llama/Meta-Llama-3-8B",
    },
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5},
}


TUNE_LORA = {
    "_component_": "torchtune.models.llama3.lora_llama3_8b",
    "lora_attn_modules": ["q_proj"],
    "apply_lora_to_mlp": False,
    "lora_rank": 8,
    "lora_alpha": 16,
}
TEXTS = {
    "_component_": "torchtune.datasets.text_completion_dataset",
    "source": "a/texts",
    "packed": True,
}


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    """Converts a file that has these keys, a section's beside those that it has."""

    def convert(file: Mapping[str, Any], **keys: Any) -> Conversion:
        source = tmp_path / "theirs.yaml"
        merged = {
            key: file[key] | value if isinstance(value, dict) and key in file else value
            for key, value in keys.items()
        }
        source.write_text(yaml.safe_dump({**file, **merged}))
        return convert_file(source)

    return convert


@pytest.mark.parametrize(
    ("keys", "leaves_out"),
    [
        ({}, False),
        ({"dataloader": {"drop_last": True}}, True),
        ({"distributed": {"pp_size": 2}}, True),
        ({"distributed": {"pp_size": 1}}, False),
        ({"distributed": {"pp_size": {"a": 1}}}, False),
    ],
)
def test_automodels_rows_that_fill_no_micro_batch_are_left_out_with_stages_too(
    keys: dict[str, Any], leaves_out: bool, convert: Convert
) -> None:
    assert (LAST_ROWS_LEFT_OUT in said(convert(AUTOMODEL, **keys))) == leaves_out


def test_automodels_run_ends_with_what_comes_first(convert: Convert) -> None:
    line = ENDS_WITH_EPOCHS.format(2)
    both = convert(AUTOMODEL, step_scheduler={"max_steps": 100, "num_epochs": 2})
    assert line in said(both)
    one = convert(AUTOMODEL, step_scheduler={"max_steps": 100})
    assert line not in said(one)


@pytest.mark.parametrize(("steps", "measured"), [({"val_every_steps": 10}, 10), ({}, 50)])
def test_automodel_measures_with_each_save(
    steps: dict[str, int], measured: int, convert: Convert
) -> None:
    made = convert(AUTOMODEL, validation_dataset=dict(HELLASWAG), step_scheduler=steps)
    assert made.recipe["eval_steps"] == measured
    assert MEASURED_WITH_SAVES in said(made)
    assert MEASURED_WITH_SAVES not in said(convert(AUTOMODEL, step_scheduler=steps))
    # translate_value of its components/config/loader.py takes the word as null
    nothing = convert(AUTOMODEL, step_scheduler=steps, validation_dataset="none")
    assert MEASURED_WITH_SAVES not in said(nothing)


def test_automodel_measures_at_steps_alone_where_its_file_says_so(convert: Convert) -> None:
    """is_val_step of its components/training/step_scheduler.py, since 0.7."""
    for steps in ({"val_every_steps": 10}, {}):
        schedule = {"ckpt_every_steps": 50, "validate_on_checkpoint": False, **steps}
        made = convert(AUTOMODEL, validation_dataset=dict(HELLASWAG), step_scheduler=schedule)
        assert made.recipe.get("eval_steps") == steps.get("val_every_steps")
        assert MEASURED_WITH_SAVES not in said(made)


def test_the_dtype_of_automodels_weights_has_two_names(convert: Convert) -> None:
    """from_pretrained of its _transformers/auto_model.py, since 0.7, where dtype comes first."""
    for asked in ({"torch_dtype": "float32"}, {"dtype": "float32", "torch_dtype": "bfloat16"}):
        made = convert(AUTOMODEL, model=asked)
        assert made.recipe.get("dtype", "float32") == "float32"
        assert "model.dtype" not in said(made)


@pytest.mark.parametrize(
    ("keys", "leaves_out"),
    [
        ({}, False),
        ({"validation_dataloader": {"drop_last": True}}, True),
        ({"dataloader": {"drop_last": True}}, False),
        ({"distributed": {"pp_size": 2}}, True),
    ],
)
def test_automodels_held_out_rows_that_fill_no_micro_batch_are_left_out_too(
    keys: dict[str, Any], leaves_out: bool, convert: Convert
) -> None:
    made = convert(AUTOMODEL, validation_dataset=dict(HELLASWAG), **keys)
    assert (HELD_OUT_ROWS_LEFT in said(made)) == leaves_out
    assert HELD_OUT_ROWS_LEFT not in said(convert(AUTOMODEL, **keys))


@pytest.mark.parametrize(("stages", "line"), [(1, MEASURED_WITH_SAVES), (2, UNMEASURED_IN_STAGES)])
def test_automodel_measures_no_images_between_stages(
    stages: int, line: str, convert: Convert
) -> None:
    rows = {
        "_target_": "nemo_automodel.components.datasets.vlm.datasets.make_medpix_dataset",
        "path_or_dataset": "mmoukouba/MedPix-VQA",
    }
    model = {
        "_target_": "nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained",
        "pretrained_model_name_or_path": "google/gemma-4-E4B-it",
    }
    keys = {"model": model, "distributed": {"pp_size": stages}}
    made = convert(AUTOMODEL, dataset=rows, validation_dataset=dict(rows), **keys)
    lines = {MEASURED_WITH_SAVES, UNMEASURED_IN_STAGES}
    assert lines.intersection(made.remarks) == {line}
    taught = {
        "teacher_model": {"pretrained_model_name_or_path": "Qwen/Qwen3-14B"},
        "kd_loss_fn": {"_target_": "nemo_automodel.components.loss.kd_loss.KDLoss"},
        "distributed": {"pp_size": stages},
    }
    made = convert(AUTOMODEL, validation_dataset=dict(HELLASWAG), **taught)
    assert lines.intersection(made.remarks) == {line}


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_how_automodels_squad_ends_without_a_template_is_said(
    template: str | None, convert: Convert
) -> None:
    rows = {
        "_target_": "nemo_automodel.components.datasets.llm.squad.make_squad_dataset",
        "path_or_dataset": "rajpurkar/squad",
        "chat_template": template,
    }
    made = convert({key: AUTOMODEL[key] for key in ("model", "optimizer")}, dataset=rows)
    assert (AUTOMODEL_ENDS["squad"] in said(made)) == (template is None)


@pytest.mark.parametrize("name", ["lm_head", "*lm_head*"])
def test_the_head_that_automodels_adapters_leave_out_gets_none_here(
    name: str, convert: Convert
) -> None:
    made = convert(AUTOMODEL, peft={"exclude_modules": [name], "dim": 8})
    assert made.recipe["lora_target_modules"] == ALL_LINEAR
    assert "they get adapters here" not in said(made)


@pytest.mark.parametrize(
    ("dataset", "size", "is_padded"),
    [({}, 1024, True), ({"pad_to_max_length": False}, 1024, False), ({}, 0, False)],
)
def test_automodels_rows_of_hellaswag_are_padded_before_they_are_packed(
    dataset: dict[str, Any], size: int, is_padded: bool, convert: Convert
) -> None:
    made = convert(AUTOMODEL, dataset=dataset, packed_sequence={"packed_sequence_size": size})
    assert (PADDED_ROWS.format(LONGEST) in said(made)) == is_padded


@pytest.mark.parametrize("padding", ["max_length", "do_not_pad", None])
def test_automodels_rows_that_are_padded_to_their_length_are_packed_so(
    padding: str | None, convert: Convert
) -> None:
    """_package_tokenized_example of its components/datasets/llm/formatting_utils.py."""
    rows = {
        "_target_": "nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset",
        "path_or_dataset_id": "org/rows",
        "seq_length": 256,
        "padding": padding,
    }
    keys = {key: AUTOMODEL[key] for key in ("model", "optimizer")}
    made = convert(keys, dataset=rows, packed_sequence={"packed_sequence_size": 1024})
    note = PADDED_ROWS.format("seq_length (256)")
    assert (note in said(made)) == (padding == "max_length")


def test_automodels_recipe_for_images_packs_by_pack_size_alone(convert: Convert) -> None:
    """resolve_vlm_dataloader of its recipes/_typed_config.py."""
    model = MODEL | {"pretrained_model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct"}
    packed = {"packed_sequence_size": 1024}
    made = convert(AUTOMODEL | IMAGES, model=model, packed_sequence=packed)
    assert not made.recipe["packing"]
    packed = {"pack_size": 1024}
    assert convert(AUTOMODEL | IMAGES, model=model, packed_sequence=packed).recipe["packing"]


@pytest.mark.parametrize(
    ("rows", "model", "strategy", "is_joined"),
    [
        (2, {"force_hf": True}, "thd", True),
        (2, {"attn_implementation": "sdpa", "force_hf": True}, "thd", True),
        (
            2,
            {"attn_implementation": "sdpa", "pretrained_model_name_or_path": "a/phi-4"},
            "thd",
            True,
        ),
        (2, {"pretrained_model_name_or_path": "a/model"}, "thd", True),
        (
            2,
            {"attn_implementation": "sdpa", "pretrained_model_name_or_path": "a/model"},
            "thd",
            False,
        ),
        (1, {"force_hf": True}, "thd", False),
        # an own class has Transformer Engine's attention, a dense one where it is installed
        (2, {"pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B"}, "thd", False),
        (2, {}, "thd", True),
        (2, {"backend": {"attn": "sdpa"}}, "thd", True),
        (2, {"backend": {"attn": "sdpa"}, "attn_implementation": "sdpa"}, "thd", False),
        (2, {"backend": {"attn": "te"}}, "thd", False),
        (2, {"force_hf": True, "backend": {"attn": "te"}}, "thd", False),
        (2, {"force_hf": True}, "neat", False),
    ],
)
def test_documents_that_see_each_other_in_several_packed_rows_are_said(
    rows: int, model: dict[str, Any], strategy: str, is_joined: bool, convert: Convert
) -> None:
    packed = {"packed_sequence_size": 1024, "packing_strategy": strategy}
    made = convert(
        AUTOMODEL, model=model, packed_sequence=packed, step_scheduler={"local_batch_size": rows}
    )
    assert (DOCUMENTS_NOT_APART in said(made)) == is_joined
    joined_by_default = f"{WHERE_NO_ENGINE}{DOCUMENTS_NOT_APART}" in said(made)
    assert joined_by_default == (is_joined and not model)


@pytest.mark.parametrize("packed", [{}, {"pack_size": 1024}, {"packed_sequence_size": 0}])
def test_rows_that_are_not_packed_have_no_line_of_packed_rows(
    packed: dict[str, int], convert: Convert
) -> None:
    model = {
        "pretrained_model_name_or_path": "google/gemma-3-1b-it",
        "attn_implementation": "eager",
    }
    keys = {"packing_strategy": "neat"} | packed
    made = convert(AUTOMODEL, model=AUTOMODEL["model"] | model, packed_sequence=keys)
    assert PACKED_ROWS_UNMASKED not in said(made)
    keys["packed_sequence_size"] = 1024
    made = convert(AUTOMODEL, model=AUTOMODEL["model"] | model, packed_sequence=keys)
    assert PACKED_ROWS_UNMASKED in said(made)


@pytest.mark.parametrize(("part", "is_joined"), [({}, False), ({"pp_microbatch_size": 2}, True)])
def test_pipeline_stages_of_automodel_see_the_rows_of_a_part(
    part: dict[str, int], is_joined: bool, convert: Convert
) -> None:
    made = convert(
        AUTOMODEL,
        model={"force_hf": True},
        distributed={"pp_size": 2, "pipeline": part},
        packed_sequence={"packed_sequence_size": 1024},
        dataset={"pad_to_max_length": False},
        step_scheduler={"local_batch_size": 4},
    )
    assert (DOCUMENTS_NOT_APART in said(made)) == is_joined


def test_a_mask_kept_by_its_size_is_that_of_the_first_packed_row() -> None:
    """What Automodel's stages keep by size holds the first row's documents: the masks differ."""
    config = LlamaConfig(attn_implementation="sdpa")
    masks = [
        create_causal_mask(
            config,
            inputs_embeds=torch.empty(1, 6, 1),
            attention_mask=None,
            cache=None,
            position_ids=torch.tensor([positions]),
        )
        for positions in ([0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1])
    ]
    assert masks[0].shape == masks[1].shape and not torch.equal(*masks)


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        ({}, "packing: where flash attention is not installed, "),
        ({"model": {"attn_implementation": "sdpa"}}, 'model.attn_implementation: "sdpa"   ('),
        ({"model": {"attn_implementation": "flash_attention_2"}}, None),
        ({"model": {"force_hf": True}}, None),
        ({"model": {"pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B"}}, None),
        ({"packed_sequence": {"packed_sequence_size": 0}}, None),
        ({"packed_sequence": {"packing_strategy": "neat", "packed_sequence_size": 1024}}, None),
        ({"distributed": {"pp_size": 1}}, None),
        ({"distributed": {"pp_size": 2, "pipeline": {"patch_inner_model": False}}}, None),
    ],
)
def test_pipeline_stages_of_automodel_mask_packed_rows_as_the_first_one(
    keys: dict[str, Any], start: str | None, convert: Convert
) -> None:
    packed = {"packed_sequence": {"packed_sequence_size": 1024}, "distributed": {"pp_size": 2}}
    lines = said(convert(AUTOMODEL, **packed | keys)).split("\n")
    starts = [line.split(MASKED_AS_FIRST)[0] for line in lines if MASKED_AS_FIRST in line]
    assert starts == ([] if start is None else [start])


def test_automodels_rank_of_experts_raises_their_scale_too(convert: Convert) -> None:
    """patch_moe_module of Automodel's lora.py gets the smaller rank and the same alpha."""
    made = convert(AUTOMODEL, peft={"dim": 64, "alpha": 32, "moe_rank_scaling": True})
    assert (made.recipe["lora_r"], made.recipe["lora_alpha"]) == (64, 32)
    experts_of_a_token = 8
    assert 32 / (64 // experts_of_a_token) == experts_of_a_token * 32 / 64
    assert "and their scale multiplied by it" in said(made)


@pytest.mark.parametrize(
    ("keys", "held_out", "way"),
    [
        ({}, {}, "left out"),
        ({"packed_sequence": {"pack_size": 0}}, {}, None),
        (
            {
                "packed_sequence": {"pack_size": 0},
                "dataloader": {"collate_fn": {"max_length": 2048, "drop_overlong": True}},
            },
            {},
            "left out",
        ),
        ({"validation_dataloader": {"collate_fn": {"max_length": 2048}}}, {}, None),
        ({}, {"max_length": 2048}, None),
        ({"distributed": {"pp_size": 2}}, {}, None),
    ],
)
def test_held_out_rows_of_images_have_a_limit_of_their_own_in_automodel(
    keys: dict[str, object], held_out: dict[str, int], way: str | None, convert: Convert
) -> None:
    rows = {
        "_target_": "nemo_automodel.components.datasets.vlm.datasets.make_medpix_dataset",
        "path_or_dataset": "mmoukouba/MedPix-VQA",
    }
    file = {
        "model": MODEL | {"pretrained_model_name_or_path": "google/gemma-3-4b-it"},
        "packed_sequence": {"pack_size": 2048, "drop_long_samples": True},
        "validation_dataset": rows | held_out,
    }
    made = convert(AUTOMODEL | IMAGES | file, **keys)
    is_said = [HELD_OUT_UNBOUNDED.format(each) in said(made) for each in OVERLONG_WAYS.values()]
    assert is_said == [each == way for each in OVERLONG_WAYS.values()]


@pytest.mark.parametrize(
    ("name", "keys", "is_said"),
    [
        ("google/gemma-3-1b-it", {"distributed": {"pp_size": 2}}, True),
        ("meta-llama/Llama-3.2-1B", {"distributed": {"pp_size": 2}}, True),
        ("meta-llama/Llama-3.2-1B", {"distributed": {"pp_size": 2}, "peft": {"dim": 8}}, False),
        ("meta-llama/Llama-3.2-1B", {}, False),
        ("meta-llama/Llama-3.1-8B", {"distributed": {"pp_size": 2}}, False),
    ],
)
def test_automodels_stages_train_a_head_that_is_the_embedding_apart(
    name: str, keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    model = MODEL | {"pretrained_model_name_or_path": name}
    made = convert(AUTOMODEL, model=model, **keys)
    assert any(HEAD_APART in line for line in made.differences) == is_said


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, UNEVEN_ROWS_LEFT_OUT),
        (
            IMAGES | {"model": MODEL | {"pretrained_model_name_or_path": "google/gemma-3-4b-it"}},
            ROWS_READ_AGAIN,
        ),
        ({"dataloader": {"drop_last": True}}, None),  # which leaves out more
        ({"distributed": {"pp_size": 2}}, None),
    ],
)
def test_automodels_ranks_have_as_many_rows_each(
    keys: dict[str, Any], line: str | None, convert: Convert
) -> None:
    """The DistributedSampler that its own one is made of, with drop_last, leaves out the tail; that
    of rows with images is without it, and repeats the head.
    """
    sampler: Any = DistributedSampler(range(7), 3, 0, shuffle=False, drop_last=True)  # type: ignore[arg-type]
    assert sampler.total_size == 6
    repeating: Any = DistributedSampler(range(7), 3, 1, shuffle=False)  # type: ignore[arg-type]
    assert list(repeating) == [1, 4, 0]
    text = said(convert(AUTOMODEL, **keys))
    assert [each for each in (UNEVEN_ROWS_LEFT_OUT, ROWS_READ_AGAIN) if each in text] == [
        line
    ] * bool(line)


def test_automodels_ranks_read_rows_of_images_again_and_may_leave_out_those_of_no_micro_batch(
    convert: Convert,
) -> None:
    images = IMAGES | {"model": MODEL | {"pretrained_model_name_or_path": "google/gemma-3-4b-it"}}
    text = said(convert(AUTOMODEL, **images, dataloader={"drop_last": True}))
    assert ROWS_READ_AGAIN in text and UNFILLED_LEFT_OUT in text and LAST_ROWS_LEFT_OUT not in text
    assert UNFILLED_LEFT_OUT not in said(convert(AUTOMODEL, **images))


@pytest.mark.parametrize(
    ("batch_size", "rows", "local_rows"), [(None, 32, 2), (2, 32, 2), (4, 64, 4), (1, 16, 1)]
)
def test_automodels_batches_of_another_size_make_other_steps(
    batch_size: int | None, rows: int, local_rows: int, convert: Convert
) -> None:
    """batch_size of its DataloaderConfig; StepScheduler counts by local_batch_size."""
    schedule = {"global_batch_size": 32, "local_batch_size": 2}
    made = convert(AUTOMODEL, step_scheduler=schedule, dataloader={"batch_size": batch_size})
    assert made.recipe["global_batch_size"] == rows
    assert made.recipe["per_device_train_batch_size"] == local_rows


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("MiniMaxAI/MiniMax-M2.5", [ROUTERS_IN_32_BITS_SINCE_07, ROUNDED_BIASES]),
        ("poolside/Laguna-S-2.1", [ROUTERS_IN_32_BITS, ROUNDED_BIASES]),
        ("XiaomiMiMo/MiMo-V2-Flash", [NOTES["SINKS_FROZEN"], NOTES["MIMO_IN_06"]]),
        ("google/gemma-4-26B-A4B-it", [ROUTERS_IN_32_BITS, SCALES_FOLDED]),
        ("google/gemma-4-31B-it", []),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", [NOTES["STEPS_UNCLAMPED"]]),
        ("org/own", [UNKNOWN_CLASS]),
        ("zai-org/GLM-4.7-Flash", [NOTES["LATENTS_IN_06"]]),
        ("moonshotai/Moonlight-16B-A3B", [NOTES["LATENTS_IN_06"]]),
        ("deepseek-ai/DeepSeek-V3", []),  # whose config has an rms_norm_eps of 1e-6
        ("meta-llama/Llama-3.1-8B", []),
    ],
)
def test_what_automodels_own_classes_do_with_attention_and_biases_is_said(
    name: str, lines: list[str], convert: Convert
) -> None:
    def find(**keys: Any) -> list[str]:
        text = said(convert(AUTOMODEL, model={"pretrained_model_name_or_path": name, **keys}))
        return [each for each in known if f"{each})" in text or f"{each}\n" in f"{text}\n"]

    known = (
        ROUTERS_IN_32_BITS_SINCE_07,
        ROUTERS_IN_32_BITS,
        ROUNDED_BIASES,
        NOTES["SINKS_FROZEN"],
        NOTES["MIMO_IN_06"],
        ROTATION_ROUNDED,
        SCALES_FOLDED,
        UNKNOWN_CLASS,
        NOTES["STEPS_UNCLAMPED"],
        NOTES["LATENTS_IN_06"],
    )
    assert find() == lines
    assert find(force_hf=True) == []


@pytest.mark.parametrize(
    ("backend", "is_said"),
    [(None, False), ({"attn": "flex"}, False), ({"dispatcher": "torch"}, True)],
)
@pytest.mark.parametrize("force_hf", [False, True])
def test_automodels_gpt_oss_has_a_wider_window_by_a_backends_default(
    backend: dict[str, str] | None, is_said: bool, force_hf: bool, convert: Convert
) -> None:
    """Without a backend its class takes flex attention."""
    model = {"pretrained_model_name_or_path": "openai/gpt-oss-20b", "force_hf": force_hf}
    text = said(convert(AUTOMODEL, model=model | {"backend": backend}))
    assert (WIDER_WINDOW in text) == (is_said and not force_hf)


@pytest.mark.parametrize(
    ("name", "keys", "recipe", "is_said"),
    [
        ("mistralai/Mistral-Small-4-119B-2603", {"torch_dtype": "float32"}, IMAGES, False),
        ("mistralai/Mistral-Small-4-119B-2603", {"torch_dtype": "bf16"}, IMAGES, True),
        ("mistralai/Mistral-Small-4-119B-2603", {"torch_dtype": "bf16"}, {}, False),
        ("mistralai/Ministral-3-3B-Instruct-2512", {"torch_dtype": "bf16"}, IMAGES, False),
    ],
)
def test_rotary_frequencies_that_automodel_rounds_are_said(
    name: str, keys: dict[str, Any], recipe: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    """By runs of its classes on a CPU: that of Mistral 4 with images writes them again, and casts."""
    model = {"pretrained_model_name_or_path": name} | keys
    assert (ROTATION_ROUNDED in said(convert(AUTOMODEL | recipe, model=model))) == is_said


def test_transformers_adds_one_to_the_window_of_mimo() -> None:
    """Its files have both keys, and the masks of Automodel 0.6 are of the first."""
    config = AutoConfig.for_model("mimo_v2_flash", sliding_window=128, sliding_window_size=128)
    assert config.sliding_window == 129


@pytest.mark.parametrize(
    ("name", "attention", "line"),
    [
        ("deepseek-ai/DeepSeek-V3.2", "sdpa", SEES_LATER.format("")),
        ("deepseek-ai/DeepSeek-V3.2", None, SEES_LATER.format(WITHOUT_ENGINE)),
        ("deepseek-ai/DeepSeek-V3.2", "te", None),
        ("zai-org/GLM-5.2", "sdpa", None),
        ("deepseek-ai/DeepSeek-V3", "sdpa", None),
    ],
)
def test_automodels_deepseek_v32_sees_later_tokens_under_sdpa(
    name: str, attention: str | None, line: str | None, convert: Convert
) -> None:
    """By a run of its class on a CPU: another last token changes the scores of all before it."""
    end = SEES_LATER.partition("{}")[2]
    model: dict[str, Any] = {"pretrained_model_name_or_path": name, "backend": {"attn": attention}}
    text = said(convert(AUTOMODEL, model=model))
    assert end not in text if line is None else line in text
    assert end not in said(convert(AUTOMODEL, model=model | {"force_hf": True}))


@pytest.mark.parametrize(
    ("name", "is_said"), [("MiniMaxAI/MiniMax-M2.5", False), ("poolside/Laguna-S-2.1", True)]
)
def test_biases_of_routers_that_are_buffers_are_not_rounded_in_float32(
    name: str, is_said: bool, convert: Convert
) -> None:
    """FSDP casts what a layer has of parameters, and leaves its buffers."""
    optimizer = {"_target_": "flashoptim.FlashAdamW", "lr": 1e-5}
    made = convert(AUTOMODEL, model={"pretrained_model_name_or_path": name}, optimizer=optimizer)
    assert "dtype" not in made.recipe
    assert (ROUNDED_BIASES in said(made)) == is_said


def test_biases_that_transformers_keeps_in_float32_are_not_said_to_be_rounded(
    convert: Convert,
) -> None:
    model = {"pretrained_model_name_or_path": "moonshotai/Kimi-Linear-48B-A3B-Instruct"}
    is_kept = KEEPS_BIASES.search(read_family_source("kimi_linear")) is not None
    assert (ROUNDED_BIASES in said(convert(AUTOMODEL, model=model))) != is_kept


@pytest.mark.parametrize(
    ("name", "peft", "is_said"),
    [
        ("google/gemma-4-26B-A4B-it", {"match_all_linear": True}, True),
        ("google/gemma-4-26B-A4B-it", {"exclude_modules": ["*lm_head*"]}, True),
        ("google/gemma-4-26B-A4B-it", {"target_modules": ["*_proj"]}, False),
        ("google/gemma-4-31B-it", {"match_all_linear": True}, False),
    ],
)
def test_automodels_own_class_of_gemma_4s_mixture_adapts_no_router(
    name: str, peft: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    """Its Gemma4Gate multiplies by proj.weight itself, so that an adapter has no part in it."""
    assert "self.proj(hidden_states)" in inspect.getsource(Gemma4TextRouter)
    made = convert(AUTOMODEL, model={"pretrained_model_name_or_path": name}, peft=peft)
    assert (ROUTER_UNADAPTED in said(made)) == is_said


@pytest.mark.parametrize(
    ("name", "peft", "layout", "family"),
    [
        ("tiiuae/Falcon-H1-7B-Instruct", {}, {"tp_size": 1, "dp_size": "none"}, "falcon_h1"),
        ("tiiuae/Falcon-H1-7B-Instruct", {}, {"tp_size": 4}, None),
        ("tiiuae/Falcon-H1-7B-Instruct", {"target_modules": ["*.q_proj"]}, {}, None),
        ("tiiuae/Falcon-H1-7B-Instruct", {"use_memory_efficient_lora": False}, {}, None),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", {"match_all_linear": True}, {}, "seed_oss"),
        ("Qwen/Qwen3-8B", {}, {}, None),
    ],
)
def test_what_automodels_fused_mlp_leaves_out_of_a_family_is_said(
    name: str, peft: dict[str, Any], layout: dict[str, Any], family: str | None, convert: Convert
) -> None:
    """It computes down_proj(silu(gate_proj(x)) * up_proj(x)), which these are more than."""
    model = {"pretrained_model_name_or_path": name}
    text = said(convert(AUTOMODEL, model=model, peft={"dim": 8} | peft, distributed=layout))
    assert [each for each, note in FUSED_OTHERWISE.items() if note in text] == [family] * bool(
        family
    )
    config = FalconH1Config(hidden_size=4, intermediate_size=8, mlp_multipliers=[0.5, 0.25])
    mlp = FalconH1MLP(config)
    x = torch.randn(3, 4)
    product = mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(x) * 0.5) * mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), product * 0.25)
    assert "dropout(down_proj, p=self.residual_dropout" in read_family_source("seed_oss")


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ({"_target_": "torch.optim.AdamW"}, "bfloat16"),
        ({"_target_": "flashoptim.FlashAdamW"}, None),  # of 24 bits by default
        ({"_target_": "flashoptim.FlashAdamW", "master_weight_bits": 32}, None),
        ({"_target_": "flashoptim.FlashAdamW", "master_weight_bits": None}, "bfloat16"),
        ({"_target_": "a.fused_adam.FusedAdam"}, "bfloat16"),
        ({"_target_": "a.fused_adam.FusedAdam", "master_weights": True}, None),
    ],
)
def test_weights_of_which_automodels_optimizer_keeps_a_copy_are_in_float32(
    optimizer: dict[str, Any], dtype: str | None, convert: Convert
) -> None:
    for asked in ({}, {"torch_dtype": "bf16"}):
        made = convert(AUTOMODEL, model=asked, optimizer=optimizer)
        assert made.recipe.get("dtype") == dtype
        assert (OPTIMIZERS_COPY in said(made)) == (dtype is None and bool(asked))
        assert (GRADIENTS_ROUNDED in made.remarks) == (dtype is None)
    wide = convert(AUTOMODEL, model={"torch_dtype": "float32"}, optimizer=optimizer)
    assert GRADIENTS_ROUNDED not in wide.remarks


FUSED = {"_target_": "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy"}


@pytest.mark.parametrize(
    ("name", "keys", "targets"),
    [
        ("Qwen/Qwen2.5-3B", {}, [ALL_LINEAR, "lm_head"]),
        ("Qwen/Qwen2.5-3B", {"loss_fn": FUSED}, ALL_LINEAR),
        ("baichuan-inc/Baichuan2-7B-Chat", {}, ALL_LINEAR),  # whose head is no linear layer
    ],
)
def test_a_head_that_automodel_trains_no_adapter_of_has_none(
    name: str, keys: dict[str, Any], targets: Any, convert: Convert
) -> None:
    """_get_lm_head_weight of its components/loss/utils.py: the weight, without its adapter."""
    model = {"pretrained_model_name_or_path": name}
    made = convert(AUTOMODEL, model=model, peft={"match_all_linear": True}, **keys)
    assert made.recipe["lora_target_modules"] == targets


@pytest.mark.parametrize(
    ("name", "loss", "is_said"),
    [
        ("ibm-granite/granite-3.3-2b-instruct", FUSED, True),
        ("ibm-granite/granite-3.3-2b-instruct", FUSED | {"logit_softcapping": 30.0}, False),
        ("ibm-granite/granite-3.3-2b-instruct", {}, False),
        ("Qwen/Qwen2.5-3B", FUSED, False),
        ("tiiuae/Falcon-H1-0.5B-Instruct", FUSED, True),
    ],
)
def test_scores_that_automodels_fused_loss_does_not_scale_are_said(
    name: str, loss: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    model = {"pretrained_model_name_or_path": name}
    assert (SCORES_UNSCALED in said(convert(AUTOMODEL, model=model, loss_fn=loss))) == is_said


@pytest.mark.parametrize(
    ("name", "keys", "line"),
    [
        ("tiiuae/Falcon-H1-0.5B-Instruct", {}, UNMULTIPLIED),
        ("tiiuae/Falcon-H1-0.5B-Instruct", {"loss_fn": FUSED}, None),  # said of that loss
        ("tiiuae/Falcon-H1-34B-Instruct", {"distributed": {"tp_size": 4}}, None),
        ("microsoft/Phi-4-mini-instruct", {}, ROTATED_WHOLE),
        ("microsoft/phi-4", {}, None),
    ],
)
def test_what_liger_computes_otherwise_is_said_of_automodel_which_takes_it_by_default(
    name: str, keys: dict[str, Any], line: str | None, convert: Convert
) -> None:
    """_apply_preload_overrides of its _transformers/kernel_patches.py: not where tp or cp is on."""
    model = {"pretrained_model_name_or_path": name}
    lines = [UNMULTIPLIED, ROTATED_WHOLE]
    text = said(convert(AUTOMODEL, model=model, **keys))
    assert [each for each in lines if each in text] == [line] * bool(line)
    text = said(convert(AUTOMODEL, model=model | {"use_liger_kernel": False}, **keys))
    assert not any(each in text for each in lines)


@pytest.mark.parametrize(
    ("name", "is_said"),
    [("microsoft/phi-2", True), ("EleutherAI/gpt-j-6b", True), ("Qwen/Qwen2.5-3B", False)],
)
def test_a_heads_bias_that_automodels_fused_loss_leaves_out_is_said(
    name: str, is_said: bool, convert: Convert
) -> None:
    """Its function takes the hidden states and the head's weight."""
    model = {"pretrained_model_name_or_path": name}
    assert (SCORES_UNBIASED in said(convert(AUTOMODEL, model=model, loss_fn=FUSED))) == is_said
    assert SCORES_UNBIASED not in said(convert(AUTOMODEL, model=model))


@pytest.mark.parametrize(
    ("name", "is_said"),
    [
        ("ibm-granite/granite-3.3-2b-instruct", True),
        ("CohereLabs/c4ai-command-r7b-12-2024", True),
        ("google/gemma-2-2b-it", False),  # whose cap it refuses
        ("Qwen/Qwen2.5-3B", False),
    ],
)
def test_scores_that_automodels_chunked_loss_does_not_scale_since_0_7_are_said(
    name: str, is_said: bool, convert: Convert
) -> None:
    model = {"pretrained_model_name_or_path": name}
    loss = {"_target_": "nemo_automodel.components.loss.chunked_ce.ChunkedCrossEntropy"}
    assert (
        SCORES_UNSCALED_BUT_IN_06 in said(convert(AUTOMODEL, model=model, loss_fn=loss))
    ) == is_said


@pytest.mark.parametrize(
    ("name", "is_said"), [("Qwen/Qwen3.5-4B", True), ("Qwen/Qwen2.5-3B", False)]
)
def test_automodels_recipe_for_texts_reads_its_freeze_config_since_0_7(
    name: str, is_said: bool, convert: Convert
) -> None:
    """A model of texts alone has no part that is called so."""
    model = {"pretrained_model_name_or_path": name}
    made = convert(AUTOMODEL, model=model, freeze_config={"freeze_language_model": True})
    assert any(line.startswith("freeze_language_model") for line in made.differences) == is_said


def test_biases_of_routers_that_automodel_has_in_float32_are_in_16_bits_in_transformers() -> None:
    for family in FP32_BIAS_FAMILIES:
        source = read_family_source(family)
        bias = re.search(r"e_score_correction_bias = nn\.\w+\(torch\.zeros\(([^)]*)\)", source)
        assert bias
        assert ("float32" in bias.group(1)) == (KEEPS_BIASES.search(source) is not None)
    clamped = "self.time_step_limit = (config.time_step_min,"
    assert clamped in read_family_source("nemotron_h")
    assert "self.sinks = nn.Parameter" in read_family_source("mimo_v2_flash")
    assert "sigmoid(router_logits.float())" in read_family_source("minimax_m2")


@pytest.mark.parametrize(
    ("name", "keys", "is_said"),
    [
        ("Qwen/Qwen3-8B", {}, True),
        ("Qwen/Qwen3-8B", {"force_hf": True}, False),
        ("mistralai/Mixtral-8x7B-v0.1", {}, False),  # whose weights are converted as they are read
    ],
)
def test_automodel_quantizes_the_head_too(
    name: str, keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    """Source: replace_with_bnb_linear without layers to leave out converts all."""
    assert should_convert_module("lm_head", None)
    model = {"pretrained_model_name_or_path": name, **keys}
    adapted = {"peft": {"dim": 8}, "model": model}
    made = convert(AUTOMODEL, quantization={"load_in_4bit": True}, **adapted)
    assert (HEAD_IN_4_BITS in said(made)) == is_said
    assert HEAD_IN_4_BITS not in said(convert(AUTOMODEL, **adapted))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("zai-org/GLM-5.2", NOTES["MOVED_BIASES"]),
        ("zai-org/GLM-5.3-Flash", NOTES["MOVED_BIASES"]),
        ("moonshotai/Moonlight-16B-A3B", NOTES["MOVED_BIASES"]),
        ("deepseek-ai/DeepSeek-V3.2", NOTES["MOVED_BIASES"]),
        ("mistralai/Mistral-Small-4-119B-2603", NOTES["MOVED_BIASES_IN_06"]),
        ("zai-org/GLM-4.7-Flash", None),
        ("baidu/ERNIE-4.5-21B-A3B-PT", AUXILIARY.format(OTHER_EXPERTS["ernie4_5_moe"])),
        ("poolside/Laguna-S-2.1", AUXILIARY.format(OTHER_EXPERTS["laguna"])),
        ("Qwen/Qwen3-30B-A3B", AUXILIARY.format(BY_LAYER)),
        ("Qwen/Qwen3.8-Flash-Next", AUXILIARY.format(BY_LAYER)),
        ("baidu/ERNIE-4.5-0.3B-PT", None),
    ],
)
def test_what_automodels_own_classes_do_with_routers_is_said(
    name: str, line: str | None, convert: Convert
) -> None:
    lines = [
        NOTES["MOVED_BIASES"],
        NOTES["MOVED_BIASES_IN_06"],
        *map(AUXILIARY.format, (BY_LAYER, *OTHER_EXPERTS.values())),
    ]
    text = said(convert(AUTOMODEL, model={"pretrained_model_name_or_path": name}))
    assert [each for each in lines if f"({each})" in text] == [line] * bool(line)
    plain = convert(AUTOMODEL, model={"pretrained_model_name_or_path": name, "force_hf": True})
    assert not any(each in said(plain) for each in lines)


MARKED = "{{ m }}{% generation %}{{ a }}{%- endgeneration -%}"


@pytest.mark.parametrize("kind", ["chat_dataset.ChatDataset", "squad.make_squad_dataset"])
def test_how_automodel_writes_calls_and_parts_of_a_chat_is_said(
    kind: str, convert: Convert
) -> None:
    """Source: _normalize_messages of its components/datasets/llm/chat_dataset.py."""
    dataset = {"_target_": f"nemo_automodel.components.datasets.llm.{kind}"}
    text = said(convert(AUTOMODEL, dataset=dataset | {"path_or_dataset_id": "a/rows"}))
    notes = [CALLS_AS_TEXTS, OF_CHATS, PARTS_APART]
    assert [note in text for note in notes] == [kind.endswith("ChatDataset")] * 3
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": each} for each in ("Add", " 1.")]
    turns = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    question, answer = parse_messages(turns)[0]
    assert question["content"] == "Add 1."
    assert answer["tool_calls"][0]["function"]["arguments"] == {"a": 1}


CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{{ '<|start|>assistant' if add_generation_prompt else '' }}"
)


@pytest.mark.parametrize(
    ("name", "template", "lines"),
    [
        ("openai/gpt-oss-20b", None, [ONE_TEXT_OF_CHAT, EARLIER_ENDS]),
        ("openai/gpt-oss-20b", "not/at/hand.jinja", [ONE_TEXT_OF_CHAT, EARLIER_ENDS]),
        ("org/model", CHANNELS, [ONE_TEXT_OF_CHAT, EARLIER_ENDS]),
        ("org/model", "{{ m.reasoning_content }}{{ m.content }}", [ONE_TEXT_OF_CHAT]),
        ("Qwen/Qwen3-4B", None, [ONE_TEXT_OF_CHAT]),
        ("Qwen/Qwen3-4B", "{{ m.content }}", []),
        ("Qwen/Qwen2.5-7B-Instruct", None, []),
    ],
)
def test_what_automodel_makes_of_an_earlier_answer_that_a_template_writes_otherwise_is_said(
    name: str, template: str | None, lines: list[str], convert: Convert
) -> None:
    """Source: _build_multiturn_assistant_mask of components/datasets/llm/formatting_utils.py of
    nemo-automodel 0.7. By it the ids of CHANNELS are one text, of which `<|start|>assistant
    <|message|>Four.<|end|>` is trained, beside the last answer; by thinking in an earlier answer of
    gpt-oss's own template it ends the run.
    """
    dataset = {"_target_": "nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset"}
    keys = {"path_or_dataset_id": "a/rows"} | ({"chat_template": template} if template else {})
    made = convert(AUTOMODEL, dataset=dataset | keys, model={"pretrained_model_name_or_path": name})
    said_here = [each for each in (ONE_TEXT_OF_CHAT, EARLIER_ENDS) if each in said(made)]
    assert said_here == lines


def test_each_answer_of_gpt_oss_ends_as_inference_ends_it(shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama3")
    tokenizer.chat_template = CHANNELS
    turns = [
        {"role": role, "content": content}
        for role, content in (("user", "2+2?"), ("assistant", "4"), ("user", "3+3?"))
    ]
    row = {"messages": [*turns, {"role": "assistant", "content": "6"}]}
    document = parse_row(row, DatasetSource(path="rows.jsonl")).document
    assert document is not None
    texts = render_turns(document, make_renderer(tokenizer, True))
    ends = [text.text[start:end] for text in texts for start, end in text.spans]
    assert ends == ["<|message|>4<|return|>", "<|message|>6<|return|>"]


@pytest.mark.parametrize(
    ("ranks", "plan", "is_said"),
    [(2, "decoder_only_tp_plan", True), (1, "decoder_only_tp_plan", False), (2, "other", False)],
)
def test_the_shared_expert_that_torchtune_adds_for_each_rank_is_said(
    ranks: int, plan: str, is_said: bool, convert: Convert
) -> None:
    """torchtune 0.7, on two ranks: the output of llama4_moe under this plan is that without it and
    the shared expert's once more, to 2e-7.
    """
    keys = {
        "tensor_parallel_dim": ranks,
        "tensor_parallel_plan": {"_component_": f"torchtune.models.llama4.{plan}"},
    }
    made = convert(TUNE, **keys)
    line = SHARED_EXPERT_ADDED.format(ranks, ranks)
    assert any(line in each for each in made.differences) == is_said


@pytest.mark.parametrize("kind", ["chat_dataset.ChatDataset", "squad.make_squad_dataset"])
@pytest.mark.parametrize("is_file", [True, False])
def test_the_blocks_of_a_template_that_automodel_trains_are_said(
    kind: str, is_file: bool, tmp_path: Path, convert: Convert
) -> None:
    """Source: GENERATION_REGEX of its components/datasets/llm/formatting_utils.py."""
    dataset = {"_target_": f"nemo_automodel.components.datasets.llm.{kind}"}
    for template in (MARKED, "{{ m }}{{ a }}{# generation #}"):
        (tmp_path / "own.jinja").write_text(template)
        named = str(tmp_path / "own.jinja") if is_file else template
        keys = {"path_or_dataset_id": "a/rows", "chat_template": named}
        made = convert(AUTOMODEL, dataset=dataset | keys)
        assert made.recipe["chat_template"] == named
        notes = [each for each in (MARKED_THERE, HEADER_THERE) if each in said(made)]
        assert notes == [MARKED_THERE if template == MARKED else HEADER_THERE]
        assert AFTER_PROMPT in said(made)


@pytest.mark.parametrize(
    ("keys", "line", "coefficient"),
    [
        ({}, AUXILIARY.format(BY_LAYER), None),
        ({"router_aux_loss_coef": 1e-5}, BY_LAYER, 1e-5),
        ({"router_aux_loss_coef": 0.0}, None, 0.0),
        ({"router_aux_loss_coef": 1e-5, "force_hf": True}, NO_AUXILIARY, None),
    ],
)
def test_how_much_of_the_auxiliary_loss_automodel_adds_is_said(
    keys: dict[str, Any], line: str | None, coefficient: float | None, convert: Convert
) -> None:
    made = convert(AUTOMODEL, model={"pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B"} | keys)
    added = AUXILIARY.format(BY_LAYER)
    lines = [each for each in (added, f"   ({BY_LAYER})", NO_AUXILIARY) if each in said(made)]
    assert lines == ([line if line != BY_LAYER else f"   ({BY_LAYER})"] if line else [])
    assert made.recipe.get("router_aux_loss_coef") == coefficient


def test_the_auxiliary_losses_of_layers_are_as_many_times_that_of_all() -> None:
    """Source: Gate._compute_aux_loss of Automodel's components/moe/layers.py."""
    layers, tokens, experts, chosen = 6, 64, 8, 2
    scores = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))
    probabilities = scores.softmax(-1)
    load = torch.bincount(probabilities.topk(chosen).indices.flatten(), minlength=experts)
    of_layer = (load * experts / (chosen * tokens) * probabilities.mean(0)).sum()
    of_all = load_balancing_loss_func((scores,) * layers, experts, chosen)
    torch.testing.assert_close(layers * of_layer, layers / chosen * of_all)
    assert all(note.startswith(BY_LAYER) for note in OTHER_EXPERTS.values())  # with biases, too


@pytest.mark.parametrize(
    ("name", "is_said"),
    [
        ("Qwen/Qwen3.5-4B", True),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", True),
        ("Qwen/Qwen3.8-Flash-Next", True),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", True),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", True),
        ("Qwen/Qwen3-4B", False),
    ],
)
def test_weights_of_recurrent_layers_that_automodel_keeps_in_float32_are_said(
    name: str, is_said: bool, convert: Convert
) -> None:
    """transformers' class keeps A_log in no other dtype than the rest."""
    strict = re.findall(
        r"_keep_in_fp32_modules(?:_strict)? = \[[^\]]*\]",
        read_family_source(guess_family(name) or ""),
    )
    assert "A_log" not in "".join(strict)
    assert ("A_log" in read_family_source(guess_family(name) or "")) == is_said
    model = {"pretrained_model_name_or_path": name}
    assert (NOTES["RATES_IN_FP32"] in said(convert(AUTOMODEL, model=model))) == is_said
    assert NOTES["RATES_IN_FP32"] not in said(convert(AUTOMODEL, model={**model, "force_hf": True}))


@pytest.mark.parametrize(
    ("name", "asked", "line"),
    [
        ("zai-org/GLM-5.2", None, ROUTERS_IN_16_BITS_IN_06),
        ("zai-org/GLM-5.2", "float32", None),
        ("zai-org/GLM-5.2", "torch.float32", None),
        ("zai-org/GLM-5.2", "bfloat16", ROUTERS_IN_OWN_DTYPE),
        ("zai-org/GLM-4.7-Flash", None, ROUTERS_IN_16_BITS_IN_06),
        ("moonshotai/Moonlight-16B-A3B", None, None),  # whose class there has float32 by default
        ("Qwen/Qwen3-30B-A3B", "float32", ROUTERS_IN_OWN_DTYPE),
        ("Qwen/Qwen3-30B-A3B", None, None),
        ("tencent/Hy-MT2-30B-A3B", "float32", None),
        ("tencent/Hy-MT2-30B-A3B", None, ROUTERS_IN_16_BITS),
    ],
)
def test_the_dtype_of_automodels_routers_is_said(
    name: str, asked: str | None, line: str | None, convert: Convert
) -> None:
    """F.linear in the dtype of gate_precision, else of its input, in Gate of its components/moe/layers.py."""
    backend = {} if asked is None else {"gate_precision": asked}
    text = said(
        convert(AUTOMODEL, model={"pretrained_model_name_or_path": name, "backend": backend})
    )
    known = (ROUTERS_IN_16_BITS, ROUTERS_IN_16_BITS_IN_06, ROUTERS_IN_OWN_DTYPE)
    assert [each for each in known if each in text] == [line] * bool(line)
    forced = {"pretrained_model_name_or_path": name, "backend": backend, "force_hf": True}
    plain = said(convert(AUTOMODEL, model=forced))
    assert ROUTERS_IN_16_BITS not in plain and ROUTERS_IN_16_BITS_IN_06 not in plain


@pytest.mark.parametrize(
    ("backend", "keys", "is_said"),
    [
        ({"experts": "te"}, {"distributed": {"ep_size": 8}}, True),
        ({"experts": "te", "dispatcher": "hybridep"}, {"distributed": {"ep_size": 8}}, True),
        ({"experts": "te", "dispatcher": "torch"}, {"distributed": {"ep_size": 8}}, False),
        ({"experts": "torch_mm"}, {"distributed": {"ep_size": 8}}, False),
        ({"experts": "te"}, {"distributed": {"ep_size": 1}}, False),
        ({"experts": "te"}, {}, False),
    ],
)
def test_the_norm_by_which_ranks_of_automodel_clipped_their_own_experts_is_said(
    backend: dict[str, str], keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    """Source: _clip_grad_norm_impl of its components/training/utils.py, in 0.6 and in 0.7."""
    model = {"pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B", "backend": backend}
    assert (CLIPPED_BY_RANK_IN_06 in said(convert(AUTOMODEL, model=model, **keys))) == is_said


@pytest.mark.parametrize(
    ("name", "keys", "is_said"),
    [
        ("Qwen/Qwen3-8B", {}, True),
        ("google/gemma-4-31B-it", {}, True),
        ("Qwen/Qwen3-8B", {"peft": {"dim": 8}}, False),
        ("Qwen/Qwen3-8B", {"distributed": {"tp_size": 1}}, False),
        ("Qwen/Qwen3-30B-A3B", {}, False),  # whose attention all ranks compute whole
        ("meta-llama/Llama-3.1-8B", {}, False),
        ("allenai/OLMo-2-1124-7B", {}, False),  # whose norm is of all heads together
    ],
)
def test_norms_of_heads_that_ranks_of_automodel_trained_apart_are_said(
    name: str, keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    """Source: its components/distributed/optimized_tp_plans.py and parallelizer.py, in 0.6 and 0.7."""
    keys = {"model": {"pretrained_model_name_or_path": name}, "distributed": {"tp_size": 2}} | keys
    assert (NORMS_OF_RANKS_IN_06 in said(convert(AUTOMODEL, **keys))) == is_said


@pytest.mark.parametrize(
    ("name", "keys", "is_said"),
    [
        ("meta-llama/Llama-3.2-1B", {"distributed": {"strategy": "ddp"}}, True),
        ("meta-llama/Llama-3.2-1B", {"distributed": {"strategy": "megatron_fsdp"}}, True),
        ("meta-llama/Llama-3.2-1B", {"distributed": {"strategy": "fsdp2"}}, False),
        ("Qwen/Qwen3-VL-4B-Instruct", {"distributed": {"strategy": "ddp"}}, True),
        ("google/gemma-3-4b-it", {"distributed": {"strategy": "ddp"}}, False),  # of transformers
        # after the layers are sharded the weights are read
        (
            "meta-llama/Llama-3.2-1B",
            {"distributed": {"strategy": "megatron_fsdp", "tp_size": 2}},
            False,
        ),
        (
            "meta-llama/Llama-3.2-1B",
            {"distributed": {"strategy": "megatron_fsdp"}, "peft": {"dim": 8}},
            False,
        ),
    ],
)
def test_weights_that_automodel_did_not_read_are_said(
    name: str, keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    """Source: apply_model_infrastructure of its _transformers/infrastructure.py, in 0.6 and in 0.7;
    two ranks of 0.6 under DDP started from other weights than those of the files."""
    keys = {"model": {"pretrained_model_name_or_path": name}} | keys
    assert (UNREAD_IN_06 in said(convert(AUTOMODEL, **keys))) == is_said


def test_routers_that_automodel_computes_in_16_bits_are_in_float32_in_transformers() -> None:
    families = (*GATED_IN_16_BITS, *GATED_IN_16_BITS_IN_06)
    read = [family for family in families if read_family_source(family)]
    assert "glm_moe_dsa" in read
    assert all(GATE_IN_FP32.search(read_family_source(family)) for family in read)


@pytest.mark.parametrize(
    ("name", "keys", "line"),
    [
        ("zai-org/GLM-5.2", {}, None),
        ("baidu/ERNIE-4.5-21B-A3B-PT", {}, GATES_IN_FP32["ernie4_5_moe"]),
        ("baidu/ERNIE-4.5-21B-A3B-PT", {"torch_dtype": "float32"}, None),
        ("MiniMaxAI/MiniMax-M2.5", {}, GATES_IN_FP32["minimax_m2"]),
        ("MiniMaxAI/MiniMax-M2.5", {"torch_dtype": "bf16", "force_hf": True}, None),
        ("Qwen/Qwen3-30B-A3B", {}, None),
    ],
)
def test_routers_weights_that_automodel_keeps_in_float32_are_said(
    name: str, keys: dict[str, Any], line: str | None, convert: Convert
) -> None:
    """Gate.weight of Automodel 0.7 on a CPU: bfloat16 in its classes of GLM 5 and DeepSeek V3.2."""
    model = {"pretrained_model_name_or_path": name, **keys}
    text = said(convert(AUTOMODEL, model=model))
    assert [each for each in GATES_IN_FP32.values() if each in text] == [line] * bool(line)
    with_adapters = said(convert(AUTOMODEL, model=model, peft={"match_all_linear": True}))
    # the frozen base is in 16 bits
    assert not any(each in with_adapters for each in GATES_IN_FP32.values())


@pytest.mark.parametrize(
    ("name", "keys", "line"),
    [
        ("microsoft/phi-2", {"torch_dtype": "bf16"}, WIDENED),  # whose files are in float16
        ("microsoft/phi-2", {}, AS_FILED),
        ("microsoft/phi-2", {"torch_dtype": "float32"}, None),
        ("Qwen/Qwen3-8B", {"torch_dtype": "bf16"}, None),
        ("Qwen/Qwen3-8B", {"torch_dtype": "bf16", "force_hf": True}, WIDENED),
        ("Qwen/Qwen3-8B", {}, AS_FILED),
        ("google/gemma-4-31B-it", {"torch_dtype": "bf16"}, None),
        ("zai-org/GLM-5.3-Flash", {"torch_dtype": "bf16"}, None),
        ("Qwen/Qwen3.8-Flash-Next", {"torch_dtype": "bf16"}, None),
        ("google/gemma-3-4b-it", {"torch_dtype": "bf16"}, WIDENED),  # transformers' own class
        ("thinkingmachines/Inkling-Small", {"torch_dtype": "bf16"}, MAYBE_WIDENED),
        ("org/ours", {"torch_dtype": "bf16", "force_hf": True}, WIDENED),
        ("mistralai/Mistral-Small-4-119B-2603", {"torch_dtype": "bf16"}, None),
        ("mistralai/Mistral-Medium-3.5-128B", {"torch_dtype": "bf16"}, None),
    ],
)
def test_the_dtype_of_weights_that_automodel_loads_is_said(
    name: str, keys: dict[str, Any], line: str | None, convert: Convert
) -> None:
    """Its _restore_loaded_model_dtype gives Phi's weights of float16 and of float32 float32 under bfloat16."""
    made = convert(AUTOMODEL, model={"pretrained_model_name_or_path": name} | keys)
    lines = [f"({each})" for each in (AS_FILED, WIDENED, MAYBE_WIDENED)]
    assert [each for each in lines if each in said(made)] == [f"({line})"] * bool(line)
    adapted = convert(
        AUTOMODEL, model={"pretrained_model_name_or_path": name} | keys, peft={"dim": 8}
    )
    assert AS_FILED not in said(adapted) and WIDENED not in said(adapted)


IN_PARTS = {"wrap_outer_model": False}
OPTIMIZED = {"backend": {"enable_fsdp_optimizations": True}}


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({}, True),
        ({"distributed": {"strategy": "fsdp2", "dp_replicate_size": 1}}, True),
        ({"distributed": {"defer_fsdp_grad_sync": False}}, False),
        ({"distributed": {"ep_size": 8}}, True),
        ({"distributed": {"ep_size": 1, "moe": IN_PARTS}}, True),
        ({"distributed": {"ep_size": 8, "moe": IN_PARTS}}, False),
        ({"distributed": {"ep_size": 8, "moe": IN_PARTS}, "model": MODEL | OPTIMIZED}, True),
        ({"distributed": {"dp_replicate_size": 2}}, False),
        ({"distributed": {"strategy": "ddp"}}, False),
        ({"distributed": {"mp_policy": {"reduce_dtype": "bfloat16"}}}, False),
        ({"step_scheduler": {"global_batch_size": 4, "local_batch_size": 4}}, False),
        ({"model": {**MODEL, "torch_dtype": "float32"}}, False),
        ({"peft": {"dim": 8}}, False),
    ],
)
def test_gradients_that_automodel_adds_in_float32_are_said(
    keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    """Source: get_sync_ctx of its components/distributed/utils.py, and its MoEFSDPSyncMixin."""
    assert (ADDED_IN_FP32 in convert(AUTOMODEL, **keys).remarks) == is_said


@pytest.mark.parametrize(
    ("optimizer", "line"), [("torch.optim.AdamW", AS_FILED_BUT_IN_06), ("dion.NorMuon", AS_FILED)]
)
def test_weights_that_a_student_of_automodels_has_in_float32_in_one_version_are_said(
    optimizer: str, line: str, convert: Convert
) -> None:
    """resolve_storage_dtype of 0.6, which its recipes that distill call, for optimizers of torch."""
    optimizers = {"optimizer": {"_target_": optimizer, "lr": 1e-5}}
    made = convert(AUTOMODEL, **optimizers, teacher_model=dict(MODEL))
    assert f"model.torch_dtype: null   ({line})" in said(made)
    assert AS_FILED_BUT_IN_06 not in said(convert(AUTOMODEL, **optimizers))


@pytest.mark.parametrize(
    ("asked", "ranks", "is_said"),
    [
        ("float32", 2, True),
        ("torch.float32", 2, True),
        ("float32", 1, False),
        ("float16", 2, False),
        ("bfloat16", 2, False),
        (None, 2, False),
    ],
)
def test_a_head_that_automodel_computes_in_float32_is_said(
    asked: str | None, ranks: int, is_said: bool, convert: Convert
) -> None:
    moe = {"reshard_after_forward": False, "lm_head_precision": asked}
    model = MODEL | {"pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B"}
    made = convert(AUTOMODEL, model=model, distributed={"ep_size": ranks, "moe": moe})
    assert ("the output head multiplies in this dtype there" in said(made)) == is_said
    assert "distributed.moe.reshard_after_forward" in made.ignored


def test_sections_that_nothing_of_automodels_reads_are_no_differences(convert: Convert) -> None:
    made = convert(AUTOMODEL, distributed_config={"_target_": "a.B"}, autopipeline={"a": 1})
    assert "not known here" not in said(made)


@pytest.mark.parametrize(
    ("builder", "is_rounded"),
    [("llama3.llama3_8b", True), ("llama3_2.llama3_2_3b", False), ("qwen3.qwen3_4b_base", False)],
)
def test_a_head_that_is_torchtunes_embedding_is_not_rounded(
    builder: str, is_rounded: bool, convert: Convert
) -> None:
    quantizer = {"_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"}
    model = {"_component_": f"torchtune.models.{builder}"}
    made = convert(TUNE, model=model, quantizer=quantizer)
    assert made.recipe["quantization_aware_training"] == "int8-int4"
    assert (HEAD_ROUNDED in said(made)) == is_rounded


@pytest.mark.parametrize(
    ("keys", "is_rounded"),
    [
        ({}, True),
        ({"liger_fused_linear_cross_entropy": True}, False),
        ({"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}, False),
    ],
)
def test_a_head_whose_weight_a_kernel_reads_is_not_rounded(
    keys: dict[str, Any], is_rounded: bool, convert: Convert
) -> None:
    """lm_head.weight in Axolotl's integrations/liger/models/base.py."""
    qat = {"activation_dtype": "nvfp4", "weight_dtype": "nvfp4"}
    assert (HEAD_ROUNDED in said(convert(AXOLOTL, qat=qat, **keys))) == is_rounded


@pytest.mark.parametrize(
    ("model", "dtype", "adapter", "is_said"),
    [
        ("Qwen/Qwen2.5-72B", "nvfp4", None, True),
        ("Qwen/Qwen1.5-MoE-A2.7B", "mxfp4", None, True),  # by its config's default
        ("Qwen/Qwen2.5-72B", "nvfp4", "lora", False),
        ("Qwen/Qwen2.5-72B", "int4", None, False),
        ("meta-llama/Llama-3.2-3B", "nvfp4", None, False),
    ],
)
def test_biases_under_rounding_to_floats_of_4_bits_are_not_trained_by_axolotl(
    model: str, dtype: str, adapter: str | None, is_said: bool, convert: Convert
) -> None:
    inputs = "int8" if dtype == "int4" else dtype
    qat = {"activation_dtype": inputs, "weight_dtype": dtype}
    made = convert(AXOLOTL, base_model=model, qat=qat, adapter=adapter)
    assert (BIASES_FIXED in said(made)) == is_said


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen2_moe", "phi", "gpt_neox", "starcoder2", "gemma2", "gpt_oss"]
)
def test_the_layers_with_a_bias_are_those_of_the_family(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family))
    named = {
        name.rpartition(".")[2]
        for name, layer in model.base_model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer.bias is not None
    }
    assert find_biased_layers(family) == named


def test_torchao_gives_a_bias_no_gradient_under_mxfp4() -> None:
    from torchao.prototype.qat import MXFakeQuantizeConfig
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    layer = torch.nn.Sequential(torch.nn.Linear(64, 32)).bfloat16()
    keys = MXFakeQuantizeConfig(dtype=torch.float4_e2m1fn_x2, block_size=32)
    quantize_(layer, QATConfig(activation_config=keys, weight_config=keys))
    layer(torch.randn(2, 4, 64).bfloat16()).sum().backward()
    assert layer[0].weight.grad is not None and layer[0].bias.grad is None


@pytest.mark.parametrize(
    ("inputs", "weights", "note"),
    [
        ("nvfp4", "nvfp4", FROM_THE_START),
        ("mxfp4", "mxfp4", FROM_THE_START),
        ("int8", "int4", INPUTS_PUT_OFF),
    ],
)
def test_the_rounding_of_weights_is_not_put_off_by_axolotl(
    inputs: str, weights: str, note: str, convert: Convert
) -> None:
    """toggle_fake_quant of its utils/callbacks/qat.py, by the attributes of torchao's layers in 0.17."""
    qat = {"activation_dtype": inputs, "weight_dtype": weights, "fake_quant_after_n_steps": 9}
    made = convert(AXOLOTL, qat=qat)
    assert "fake_quant_after_n_steps" not in made.recipe
    lines = made.differences if note == INPUTS_PUT_OFF else made.remarks
    assert f"fake_quant_after_n_steps: 9   ({note})" in lines


@pytest.mark.parametrize("is_rounded", [True, False])
def test_an_embedding_that_axolotl_rounds_is_said(is_rounded: bool, convert: Convert) -> None:
    """prepare_model_for_qat of its utils/quantization.py."""
    qat = {"activation_dtype": "int8", "weight_dtype": "int4", "quantize_embedding": is_rounded}
    assert (EMBEDDING_ROUNDED in said(convert(AXOLOTL, qat=qat))) == is_rounded


@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        ({"lora_attn_modules": ["q_proj"]}, [ADAPTED_ALONE]),
        (
            {
                "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
                "apply_lora_to_mlp": True,
                "apply_lora_to_output": True,
            },
            [HEAD_ROUNDED],
        ),
    ],
)
def test_torchtune_rounds_the_layers_that_get_adapters(
    keys: dict[str, Any], lines: list[str], convert: Convert
) -> None:
    """swap_lora_linear_with_qat, of LoRALinear alone."""
    quantizer = {"_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"}
    model = {"_component_": "torchtune.models.llama3.lora_llama3_8b", **keys}
    text = said(convert(TUNE, model=model, quantizer=quantizer))
    assert [each for each in (ADAPTED_ALONE, HEAD_ROUNDED) if each in text] == lines


@pytest.mark.parametrize(
    ("decoder", "encoder", "fusion", "parts", "is_tower"),
    [
        ("frozen", "lora", "lora", ["layers of text"], True),
        ("lora", "frozen", "frozen", ["layers that read images"], False),
        ("lora", "frozen", "lora", [], True),
    ],
)
def test_the_parts_that_qlora_of_torchtune_leaves_in_16_bits_are_said(
    decoder: str, encoder: str, fusion: str, parts: list[str], is_tower: bool, convert: Convert
) -> None:
    """lora_llama3_2_vision_11b: quantize_base is for the layers of parts with adapters."""
    model = {
        "_component_": "torchtune.models.llama3_2_vision.qlora_llama3_2_vision_11b",
        "decoder_trainable": decoder,
        "encoder_trainable": encoder,
        "fusion_trainable": fusion,
        "lora_attn_modules": ["q_proj"],
    }
    text = said(convert(TUNE, model=model))
    named = ("layers of text", "layers that read images")
    assert [each for each in named if ATTENTION_IN_16_BITS.format(each) in text] == parts
    assert (QUANTIZED_TOWER in text) == is_tower


@pytest.mark.parametrize(
    ("epochs", "micro_batches", "model", "line"),
    [
        (1, 8, TUNE_LORA, WHOLE_STEPS),
        (3, 8, TUNE_LORA, CARRIED_OVER),
        (3, 8, TUNE["model"], CARRIED_IN_06),
        (3, 1, TUNE_LORA, WHOLE_STEPS),
        (1, 8, TUNE["model"], WHOLE_STEPS),
    ],
)
def test_torchtunes_left_over_micro_batches_are_added_to_the_next_epoch(
    epochs: int, micro_batches: int, model: dict[str, Any], line: str, convert: Convert
) -> None:
    """`while inner_step_count < self._steps_per_epoch` of its newest recipes/full_finetune_*.py."""
    text = said(
        convert(TUNE, epochs=epochs, gradient_accumulation_steps=micro_batches, model=model)
    )
    known = (WHOLE_STEPS, CARRIED_OVER, CARRIED_IN_06)
    assert [each for each in known if each in text] == [line]


@pytest.mark.parametrize(
    ("recipe", "is_in_backward", "is_said"),
    [
        ("full_finetune_single_device", True, True),
        ("full_finetune_single_device", False, False),
        ("full_finetune_distributed", True, False),  # it divides by the tokens before the backward
    ],
)
def test_gradients_of_sums_in_the_backward_of_torchtune_are_said(
    recipe: str, is_in_backward: bool, is_said: bool, tmp_path: Path
) -> None:
    """torchtune 0.6.1 calls scale_grads under `if not self._optimizer_in_bwd`."""
    source = tmp_path / "theirs.yaml"
    keys = {"optimizer_in_bwd": is_in_backward}
    source.write_text(f"# tune run {recipe} --config a/b\n" + yaml.safe_dump(TUNE | keys))
    assert (SUMMED_IN_06 in said(convert_file(source))) == is_said


def test_torchtunes_folder_of_metas_files_is_that_of_a_model_of_the_hub(tmp_path: Path) -> None:
    """checkpoint_dir: /tmp/Meta-Llama-3-8B/original of its recipes/configs/dev/8B_full_experimental.yaml."""
    folder = {
        "checkpoint_dir": "/tmp/Llama/original/",
        "_component_": "torchtune.training.FullModelMetaCheckpointer",
    }
    source = tmp_path / "theirs.yaml"
    command = (
        "# tune download meta-llama/Meta-Llama-3-8B --output-dir /tmp/Llama --hf-token <TOKEN>\n"
    )
    source.write_text(command + yaml.safe_dump(TUNE | {"checkpointer": folder}))
    made = convert_file(source)
    assert made.recipe["model_name_or_path"] == "meta-llama/Meta-Llama-3-8B"
    assert METAS_FILES in said(made)
    source.write_text(command + yaml.safe_dump(TUNE))
    assert METAS_FILES not in said(convert_file(source))


TRL = {"model_name_or_path": "org/model", "dataset_name": "org/rows", "max_length": 64}
LORA = {"use_peft": True, "load_in_4bit": True}
QLORA = {"adapter": "qlora", "load_in_4bit": True, "lora_r": 8, "lora_target_linear": True}


@pytest.mark.parametrize(
    ("file", "keys", "is_said"),
    [
        (TRL, LORA, True),
        (TRL, {"use_peft": True}, False),
        (TRL, LORA | {"beta": 0.1}, True),
        (AXOLOTL, QLORA, False),
        (AXOLOTL, QLORA | {"rl": "dpo"}, True),
        (AXOLOTL, QLORA | {"rl": "orpo"}, False),
        (AXOLOTL, QLORA | {"rl": "simpo"}, False),
    ],
)
def test_adapters_in_bfloat16_over_a_quantized_base_are_said(
    file: dict[str, Any], keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    assert (ADAPTERS_IN_16_BITS in said(convert(file, **keys))) == is_said


KIMI = "moonshotai/Kimi-Linear-48B-A3B-Instruct"
MOONLIGHT = "moonshotai/Moonlight-16B-A3B"
OF_MOONLIGHT = {"pretrained_model_name_or_path": MOONLIGHT, "trust_remote_code": True}
UNTRUSTED = {"trust_remote_code": False}


def test_automodels_kimi_linear_weighs_experts_with_the_routers_biases(convert: Convert) -> None:
    """Beside transformers' own router, which leaves the biases out of the weights."""
    for name in (KIMI, MOONLIGHT):
        text = said(convert(AUTOMODEL, model=MODEL | {"pretrained_model_name_or_path": name}))
        assert (NOTES["WEIGHTS_WITH_BIAS"] in text) == (name == KIMI)
    config = KimiLinearConfig(hidden_size=4, num_local_experts=4, num_experts_per_tok=2, n_group=1)
    router = KimiLinearTopkRouter(config)
    router.e_score_correction_bias += torch.tensor([3.0, 1.0, 0.0, 0.0])
    _, weights, chosen = router(torch.randn(3, 4))  # its weight is zero: each score is a half
    assert chosen.sort().values.tolist() == [[0, 1]] * 3
    torch.testing.assert_close(weights, torch.full((3, 2), config.routed_scaling_factor / 2))


def test_axolotls_own_kimi_linear_routes_otherwise_and_has_linear_experts(convert: Convert) -> None:
    keys = {"adapter": "lora", "load_in_8bit": True, "lora_r": 8, "lora_target_modules": ["q_proj"]}
    experts = "experts are quantized here too"
    text = said(convert(AXOLOTL, **keys, base_model="moonshotai/Kimi-Linear-48B-A3B-Instruct"))
    assert BY_SOFTMAX in text and experts not in text and EXPERTS_ADAPTED not in text
    linear = keys | {"lora_target_modules": None, "lora_target_linear": True}
    assert EXPERTS_ADAPTED in said(convert(AXOLOTL, **linear, base_model=KIMI))
    text = said(convert(AXOLOTL, **keys, base_model="Qwen/Qwen3-30B-A3B"))
    assert BY_SOFTMAX not in text and experts in text


@pytest.mark.parametrize(
    ("file", "keys", "is_said"),
    [
        (AXOLOTL, {"base_model": KIMI}, True),
        (AXOLOTL, {"base_model": MOONLIGHT}, False),
        (AXOLOTL, {"base_model": MOONLIGHT, "trust_remote_code": True}, True),
        (AXOLOTL, {"base_model": "Qwen/Qwen3-8B", "trust_remote_code": True}, False),
        (AUTOMODEL, {"model": MODEL | {"pretrained_model_name_or_path": KIMI}}, False),
        (
            AUTOMODEL,
            {"model": MODEL | {"pretrained_model_name_or_path": KIMI, "trust_remote_code": True}},
            True,
        ),
        (AUTOMODEL, {"dataset": HELLASWAG | {"tokenizer": OF_MOONLIGHT}}, True),
        (AUTOMODEL, {"dataset": HELLASWAG | {"tokenizer": OF_MOONLIGHT | UNTRUSTED}}, False),
    ],
)
def test_the_words_of_kimis_own_tokenizer_are_said(
    file: dict[str, Any], keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    """Source: pat_str of Axolotl's model_support/kimi_linear/tokenization_kimi.py, where user's is one word."""
    assert (WORDS_THERE in said(convert(file, **keys))) == is_said
    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    words = Split(Regex(pattern), behavior="isolated").pre_tokenize_str("a user's getName 你好abc")
    assert [word for word, _ in words] == ["a", " user", "'s", " getName", " 你好abc"]


NEMOTRON = "nvidia/NVIDIA-Nemotron-Nano-9B-v2"


@pytest.mark.parametrize(
    ("file", "keys", "is_said"),
    [
        (AXOLOTL, {"base_model": NEMOTRON, "trust_remote_code": True}, True),
        (AXOLOTL, {"base_model": NEMOTRON}, False),
        (AUTOMODEL, {"force_hf": True, "trust_remote_code": True}, True),
        (AUTOMODEL, {"force_hf": True}, False),
        (AUTOMODEL, {"trust_remote_code": True}, True),
    ],
)
def test_the_steps_of_the_code_beside_nemotron_h_are_said_once(
    file: dict[str, Any], keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    """AutoModel runs that code where trust_remote_code is true; a run here has transformers' class."""
    if file is AUTOMODEL:
        keys = {"model": MODEL | {"pretrained_model_name_or_path": NEMOTRON} | keys}
    assert said(convert(file, **keys)).count(NOTES["STEPS_UNCLAMPED"]) == is_said


@pytest.mark.parametrize(
    ("entries", "length", "note"),
    [
        ([{"path": "a/texts", "type": "pretrain"}], 1024, PIECES_OVERLAP.format(256)),
        ([{"path": "a/texts"}], 512, PIECES_OVERLAP.format(255)),  # by 0.21's own strategy
        ([{"path": "a/texts"}], 64, PIECES_OVERLAP.format(31)),
        ([{"path": "a/texts", "type": "completion", "field": "text"}], 512, TEXTS_CUT),
    ],
)
def test_axolotls_texts_of_pretraining_overlap(
    entries: object, length: int, note: str, convert: Convert
) -> None:
    file = {key: value for key, value in AXOLOTL.items() if key != "datasets"}
    keys = {"pretraining_dataset": entries, "max_steps": 10, "sequence_len": length}
    text = said(convert(file, **keys, sample_packing=True))
    assert note in text
    assert ("repeats the" in text) == (note != TEXTS_CUT) and FIRST_ENTRY not in text
    plain = said(convert(file, **keys, sample_packing=False))
    assert PIECES_ALONE.format(length - 2) in plain
    assert "repeats the" not in plain and TEXTS_CUT not in plain


def test_axolotl_pretrains_on_its_first_entry_alone(convert: Convert) -> None:
    file = {key: value for key, value in AXOLOTL.items() if key != "datasets"}
    entries = [{"path": "a/texts", "type": "pretrain"}, {"path": "b/texts", "type": "pretrain"}]
    made = convert(file, pretraining_dataset=entries, max_steps=10, sample_packing=True)
    assert FIRST_ENTRY in said(made) and len(made.recipe["datasets"]) == 2


def test_only_a_text_of_completions_is_not_said_to_overlap(convert: Convert) -> None:
    plain = [{"path": "a/texts", "type": "completion"}]
    text = said(convert(AXOLOTL, datasets=plain, sample_packing=True))
    assert "repeats the" not in text and TEXTS_CUT in text


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"shuffle_merged_datasets": False, "val_set_size": 0.1}, True),
        ({"shuffle_merged_datasets": False}, False),
        ({"curriculum_sampling": True, "val_set_size": 0.1}, True),
        ({"shuffle_merged_datasets": True, "val_set_size": 0.1}, False),
    ],
)
def test_the_last_rows_are_held_out_of_what_axolotl_does_not_shuffle(
    keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    assert (LAST_HELD_OUT in said(convert(AXOLOTL, **keys))) == is_said


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"dtype": "bf16"}, REDUCED_ALONE),  # gradients keep the dtype of the weights here too
        ({"dtype": "bf16", "model": TUNE_LORA}, SUMMED_IN_16_BITS),
        ({"dtype": "fp32"}, None),
    ],
)
def test_gradients_that_torchtune_sums_in_16_bits_are_said(
    keys: dict[str, Any], line: str | None, convert: Convert
) -> None:
    """Source: shard_model of its training/_distributed.py, which names no reduce_dtype."""
    remarks = convert(TUNE, **keys).remarks
    lines = (REDUCED_ALONE, SUMMED_IN_16_BITS, REDUCED_IN_16_BITS)
    assert [each for each in lines if each in remarks] == ([line] if line else [])


@pytest.mark.parametrize(("packed", "is_said"), [(False, True), (True, False), (None, False)])
def test_the_last_batch_is_not_measured_where_held_out_rows_are_not_packed(
    packed: bool | None, is_said: bool, convert: Convert
) -> None:
    keys = {"sample_packing": True, "eval_sample_packing": packed}
    made = convert(AXOLOTL, **keys, val_set_size=0.1, eval_steps=10)
    assert (LAST_UNMEASURED in said(made)) == is_said
    assert LAST_UNMEASURED not in said(convert(AXOLOTL, **keys))


def test_axolotl_computes_in_bfloat16_unasked(convert: Convert) -> None:
    file = {key: value for key, value in AXOLOTL.items() if key != "bf16"}
    made = convert(file)
    assert made.recipe["dtype"] == "bfloat16"
    assert made.recipe["accelerate_config"] == "ddp"
    eight = convert(file, fp8=True, fsdp_version=2, fsdp_config={"reshard_after_forward": True})
    assert "mixed_precision: fp8" in str(eight.accelerate_file)
    assert "dtype" not in convert(AXOLOTL, bf16=False).recipe


@pytest.mark.parametrize("keys", [{"llama4_linearized_experts": True}, {"accelerator_config": {"even_batches": True}}])  # fmt: skip
def test_keys_of_axolotls_that_change_nothing_here_are_no_differences(
    keys: dict[str, Any], convert: Convert
) -> None:
    assert "not known here" not in said(convert(AXOLOTL, **keys))
    split = convert(AXOLOTL, accelerator_config={"split_batches": True})
    assert "accelerator_config.split_batches: true" in said(split)


def test_llama_factorys_kto_estimates_by_the_answer_before(convert: Convert) -> None:
    file = {
        "model_name_or_path": "Qwen/Qwen3-8B",
        "stage": "kto",
        "do_train": True,
        "finetuning_type": "lora",
        "dataset": "rows",
        "template": "qwen3",
        "pref_beta": 0.1,
        "bf16": True,
    }
    assert KTO_OF_MICRO_BATCHES in said(convert(file))
    assert KTO_OF_MICRO_BATCHES not in said(convert(AXOLOTL, rl="kto"))


LORA_THERE = {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "dim": 8, "alpha": 16}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize(
    ("model", "patterns", "layers", "experts"),
    [
        ("Qwen/Qwen3-30B-A3B", ["*"], ["all-linear", "lm_head"], EXPERTS),
        ("Qwen/Qwen3-30B-A3B", "*_proj", "all-linear", None),
        ("zai-org/GLM-5.2", ["*.self_attn.q_a_proj", "*.self_attn.kv_b_proj", "*.mlp.experts"], ["q_a_proj", "kv_b_proj"], EXPERTS),
        ("Qwen/Qwen3-8B", ["*q_proj", "model.layers.*.mlp.up_proj"], ["q_proj", "up_proj"], None),
    ],
)  # fmt: skip
def test_automodels_patterns_name_the_familys_layers_and_its_experts(
    model: str, patterns: Any, layers: Any, experts: list[str] | None, convert: Convert
) -> None:
    peft = LORA_THERE | {"target_modules": patterns}
    made = convert(AUTOMODEL, model={"pretrained_model_name_or_path": model}, peft=peft)
    assert made.recipe["lora_target_modules"] == layers
    assert made.recipe.get("lora_target_parameters") == experts
    assert NO_SUCH_LAYER not in said(made)


def test_a_pattern_of_automodels_that_names_no_layer_is_said(convert: Convert) -> None:
    peft = LORA_THERE | {"target_modules": ["*.self_attn.output_gate_proj", "*.q_proj"]}
    made = convert(AUTOMODEL, peft=peft)
    assert f'"*.self_attn.output_gate_proj"   ({NO_SUCH_LAYER})' in said(made)
    assert made.recipe["lora_target_modules"] == ["q_proj"]


CHATS = {
    "_target_": "nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset",
    "path_or_dataset_id": "org/chats",
}


@pytest.mark.parametrize(
    ("keys", "overlength"),
    [
        ({"seq_length": 1024, "truncation": True}, "truncate"),
        ({"seq_length": 2048, "truncation": True}, "drop"),
        ({"seq_length": 1024}, "drop"),
    ],
)
def test_rows_that_automodel_cuts_before_it_packs_are_cut_here(
    keys: dict[str, Any], overlength: str, convert: Convert
) -> None:
    made = convert(
        AUTOMODEL | {"dataset": CHATS}, dataset=keys, packed_sequence={"packed_sequence_size": 1024}
    )
    assert made.recipe["overlength"] == overlength and made.recipe["max_length"] == 1024
    assert (CUT_BEFORE_ANSWER in said(made)) == (overlength == "truncate")


def test_rows_that_automodel_cuts_before_their_answers_are_said(convert: Convert) -> None:
    limits = {"seq_length": 64, "truncation": "longest_first"}
    assert CUT_BEFORE_ANSWER in said(convert(AUTOMODEL | {"dataset": CHATS}, dataset=limits))
    columns = {"column_mapping": {"question": "q", "answer": "a"}}
    mapped = said(convert(AUTOMODEL | {"dataset": CHATS}, dataset=limits | columns))
    assert NEXT_IN_PLACE in mapped and "cut off whole" not in mapped


@pytest.mark.parametrize(("strategy", "overlength"), [("thd", "drop"), ("neat", "error")])
def test_automodels_thd_packing_drops_long_rows_whatever_the_file_says(
    strategy: str, overlength: str, convert: Convert
) -> None:
    keys = {"packing_strategy": strategy, "drop_long_samples": False, "packed_sequence_size": 1024}
    assert convert(AUTOMODEL, packed_sequence=keys).recipe["overlength"] == overlength


@pytest.mark.parametrize(
    ("model", "is_known"), [("meta-models/Muse-Glimmer-30B", False), ("google/gemma-3-4b-it", True)]
)
def test_images_of_a_family_that_the_name_does_not_say_are_said(
    model: str, is_known: bool, convert: Convert
) -> None:
    text = said(convert(AXOLOTL, base_model=model, processor_type="AutoProcessor"))
    assert (UNKNOWN_IMAGES in text) != is_known and (IMAGES_UNCUT in text) == is_known
    assert UNKNOWN_IMAGES not in said(convert(AXOLOTL, base_model=model))


@pytest.mark.parametrize(
    ("name", "keys", "trains_all"),
    [
        ("zai-org/GLM-4.6V-Flash", {}, True),
        ("zai-org/GLM-4.6V-Flash", {"train_on_inputs": False}, True),
        ("zai-org/GLM-4.6V-Flash", {"role_boundaries": [{"role": "user"}]}, False),
        ("llava-hf/llava-1.5-7b-hf", {"chat_template": "llava"}, True),
        ("mistral-community/pixtral-12b", {"chat_template": "pixtral"}, False),
        ("Qwen/Qwen3.5-35B-A3B", {"chat_template": "tokenizer_default"}, False),
    ],
)
def test_axolotl_leaves_no_role_out_where_it_knows_none(
    name: str, keys: dict[str, Any], trains_all: bool, convert: Convert
) -> None:
    """_mask_non_assistant_keep of its processing_strategies.py."""
    made = convert(AXOLOTL, base_model=name, processor_type="AutoProcessor", **keys)
    assert (made.recipe.get("assistant_only_loss") is False) == trains_all
    assert (ALL_OF_IMAGES in said(made)) == trains_all
    assert not (trains_all and IMAGE_LABELS in said(made))


@pytest.mark.parametrize(("kind", "is_cut"), [("completion", True), ("chat_template", False)])
def test_axolotl_leaves_the_end_of_very_long_texts_out(
    kind: str, is_cut: bool, convert: Convert
) -> None:
    """max_length of CompletionPromptTokenizingStrategy."""
    made = convert(AXOLOTL, datasets=[{"path": "a/rows", "type": kind}])
    assert (TEXTS_CUT in said(made)) == is_cut


@pytest.mark.parametrize(
    "name", ["microsoft/phi-2", "nvidia/Nemotron-3-Nano-30B-A3B", "Qwen/Qwen3-8B"]
)
def test_trls_default_targets_are_pefts_of_the_family(name: str, convert: Convert) -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[guess_family(name)]
    made = convert(TRL, model_name_or_path=name, use_peft=True)
    assert made.recipe["lora_target_modules"] == targets


@pytest.mark.parametrize(
    ("name", "forgets"), [("zai-org/GLM-4.7-Flash", True), ("Qwen/Qwen3.8-Flash-Next", False)]
)
def test_templates_that_keep_earlier_thinking_are_not_said_to_leave_it_out(
    name: str, forgets: bool, convert: Convert
) -> None:
    assert (EARLIER_THOUGHTS in said(convert(AXOLOTL, base_model=name))) == forgets


def test_nex_has_the_lines_of_its_architecture(convert: Convert) -> None:
    images = convert(AXOLOTL, base_model="nex-agi/Nex-N2.5-mini", processor_type="AutoProcessor")
    assert IMAGES_UNCUT in said(images)
    assert OWN_THOUGHT in said(convert(AXOLOTL, base_model="nex-agi/Nex-N2.5-mini"))


def test_a_llava_whose_code_is_not_transformers_is_refused(convert: Convert) -> None:
    model = MODEL | {"_target_": "nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained"}
    with pytest.raises(Refusal, match="multimodal"):
        name = "lmms-lab/LLaVA-OneVision-1.5-8B-Instruct"
        convert(AUTOMODEL, model=model | {"pretrained_model_name_or_path": name})


@pytest.mark.parametrize(
    ("patterns", "are_frozen"),
    [(["^model.language_model.*", "^lm_head.*"], True), (["^base_model.*lora_"], False)],
)
def test_adapters_that_axolotl_freezes_are_said(
    patterns: list[str], are_frozen: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, **QLORA, unfrozen_parameters=patterns)
    assert (ADAPTERS_FROZEN in said(made)) == are_frozen
    assert ADAPTERS_FROZEN not in said(convert(AXOLOTL, unfrozen_parameters=patterns))


@pytest.mark.parametrize(
    ("filters", "layers"),
    [(["lm_head"], "first linear layer is"), ([], "first linear layer and the output head are")],
)
def test_layers_that_automodel_multiplies_in_fp8_are_said(
    filters: list[str], layers: str, convert: Convert
) -> None:
    line = ALL_IN_FP8.format(layers)
    assert line in said(convert(AUTOMODEL, fp8={"enabled": True, "filter_fqns": filters}))
    assert "in FP8 too there" not in said(convert(AUTOMODEL, fp8={"enabled": False}))
    assert "in FP8 too there" not in said(convert(AXOLOTL, fp8=True))


CHAT = {
    "_target_": "nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset",
    "path_or_dataset_id": "a/rows",
}


@pytest.mark.parametrize(
    ("keys", "is_other_slice"),
    [
        ({"split": "train[:1024]", "shuffle_seed": 0}, True),
        ({"split": "train[:1024]"}, False),
        ({"split": "train", "shuffle_seed": 1111}, False),
    ],
)
def test_automodels_slice_is_of_rows_that_shuffle_seed_has_shuffled(
    keys: dict[str, Any], is_other_slice: bool, convert: Convert
) -> None:
    for section in ("dataset", "validation_dataset"):
        made = convert(AUTOMODEL | {section: CHAT | keys})
        assert (SHUFFLED_BEFORE in said(made)) == is_other_slice
        assert ("shuffle_seed" in said(made)) == is_other_slice


@pytest.mark.parametrize(("keys", "line"), [({}, IN_ORDER), ({"shuffle_seed": 1}, SHUFFLED_ONCE)])
def test_automodels_rows_in_their_order_may_have_been_shuffled_once(
    keys: dict[str, Any], line: str, convert: Convert
) -> None:
    made = convert(AUTOMODEL | {"dataset": CHAT | keys}, dataloader={"shuffle": False})
    assert [each for each in (IN_ORDER, SHUFFLED_ONCE) if each in said(made)] == [line]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, SAVED_WITH_EPOCHS),
        ({"step_scheduler": {"save_checkpoint_every_epoch": False}}, None),
        ({"checkpoint": {"enabled": False}}, NOTHING_SAVED),
        ({"checkpoint": {"enabled": True}}, SAVED_WITH_EPOCHS),
    ],
)
def test_automodel_saves_at_epochs_too_or_not_at_all(
    keys: dict[str, Any], line: str | None, convert: Convert
) -> None:
    made = convert(AUTOMODEL, **keys)
    found = [each for each in (SAVED_WITH_EPOCHS, NOTHING_SAVED) if each in said(made)]
    assert found == ([line] if line else [])
    assert ("save_steps" in made.recipe) == (line != NOTHING_SAVED)
    assert "save_strategy" not in made.recipe


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr_decay_steps", 100),
        ("init_lr", 0.0001),
        ("max_lr", 0.0001),
        ("end_wd", 0.1),
        ("wsd_decay_steps", 10),
        ("lr_wsd_decay_style", "exponential"),
    ],
)
def test_what_automodels_schedule_is_given_beside_its_shape_is_listed(
    key: str, value: Any, convert: Convert
) -> None:
    made = convert(AUTOMODEL, lr_scheduler={"lr_decay_style": "cosine", key: value})
    assert f"lr_scheduler.{key}: " in said(made)


def test_automodels_limit_of_checkpoints_and_the_one_resumed_from_are_ours(
    convert: Convert,
) -> None:
    checkpoint = {"max_recent_checkpoints": 3, "restore_from": "some/checkpoint"}
    recipe = convert(AUTOMODEL, checkpoint=checkpoint).recipe
    assert recipe["save_total_limit"] == 3
    assert recipe["resume_from_checkpoint"] == "some/checkpoint"


@pytest.mark.parametrize(
    ("keys", "targets"),
    [
        ({}, []),
        ({"lora_target_linear": True}, ALL_LINEAR),
        ({"lora_target_modules": ["q_proj"]}, ["q_proj"]),
    ],
)
def test_axolotls_adapters_of_parameters_alone_are_on_no_linear_layer(
    keys: dict[str, Any], targets: Any, convert: Convert
) -> None:
    experts = ["mlp.experts.gate_up_proj"]
    lora = {"adapter": "lora", "lora_target_parameters": experts}
    recipe = convert(AXOLOTL, base_model="Qwen/Qwen3-30B-A3B", **lora, **keys).recipe
    assert recipe["lora_target_modules"] == targets
    assert recipe["lora_target_parameters"] == experts


@pytest.mark.parametrize(
    ("name", "keys", "is_kept"),
    [
        ("Qwen/Qwen3-8B-FP8", {}, True),
        (
            "Qwen/Qwen3-8B-FP8",
            {
                "model_quantization_config": "FineGrainedFP8Config",
                "model_quantization_config_kwargs": {"dequantize": True},
            },
            False,
        ),
        ("axolotl-ai-co/Mistral-Small-4-119B-2603-BF16", {}, False),
        ("Qwen/Qwen3-8B", {}, False),
    ],
)
def test_a_base_in_fp8_is_computed_in_fp8_by_transformers(
    name: str, keys: dict[str, Any], is_kept: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, base_model=name, adapter="lora", lora_target_linear=True, **keys)
    assert (KEPT_IN_FP8 in said(made)) == is_kept
    factory = {"model_name_or_path": name, "stage": "sft", "finetuning_type": "lora"}
    rows = {"dataset": "identity", "template": "qwen3", "output_dir": "out"}
    assert KEPT_IN_FP8 not in said(convert(factory | rows))


@pytest.mark.parametrize(
    ("name", "is_said"),
    [
        ("MiniMaxAI/MiniMax-M2", True),
        ("mistralai/Ministral-3-3B-Instruct-2512", True),
        ("mistralai/Ministral-3-3B-Instruct-2512-BF16", False),
        ("MiniMaxAI/MiniMax-M2-FP8", False),  # whose name says it
        ("deepseek-ai/DeepSeek-R1-0528", True),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", False),
    ],
)
def test_what_only_the_config_of_a_base_says_is_said_on_condition(
    name: str, is_said: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, base_model=name, adapter="lora", lora_target_linear=True)
    assert (MAYBE_KEPT_IN_FP8 in said(made)) == is_said


@pytest.mark.parametrize(
    ("keys", "losses"),
    [
        ({"use_dft": True}, "dft"),
        ({"use_eaft": True}, "eaft"),
        ({"use_dft_loss": True}, None),
        ({"use_eaft_loss": True}, None),
    ],
)
def test_a_loss_by_another_tools_key_is_none_for_axolotl(
    keys: dict[str, Any], losses: str | None, convert: Convert
) -> None:
    made = convert(AXOLOTL, **keys)
    assert made.recipe.get("token_loss") == losses
    assert ("not known here" in said(made)) == (losses is None)


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"use_peft": True}, True),
        ({"use_peft": True, "dtype": "float32", "load_in_4bit": True}, True),
        ({"use_peft": True, "beta": 0.1}, True),
        ({"use_peft": True, "dtype": "bfloat16"}, False),
        ({"use_peft": True, "deepspeed": "zero2.json"}, False),
        ({"use_peft": True, "bf16": False, "fp16": False}, False),
        ({}, False),
    ],
)
def test_a_base_that_stays_in_float32_is_said(
    keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    """create_model_from_path of TRL's trainer/utils.py, and its ModelConfig."""
    text = said(convert(TRL, **keys))
    assert (BASE_IN_FP32 in text) == is_said
    assert BASE_IN_FP32_BEFORE_5 not in text


def test_a_base_whose_dtype_is_null_stays_in_float32_before_transformers_5(
    convert: Convert,
) -> None:
    assert BASE_IN_FP32_BEFORE_5 in said(convert(TRL, use_peft=True, dtype=None))


def test_autocast_leaves_an_embedding_and_norms_in_float32() -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.autocast("cpu", torch.bfloat16):
        states = model.model(torch.tensor([[1, 2]]), output_hidden_states=True).hidden_states
        product = model.model.layers[0].self_attn.q_proj(states[0])
    assert {each.dtype for each in states} == {torch.float32} and product.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"use_peft": True, "dtype": "bfloat16"}, True),
        ({"use_peft": True, "dtype": "bfloat16", "deepspeed": "zero3.json"}, True),
        ({"use_peft": True, "dtype": "bfloat16", "deepspeed": "zero2.json"}, False),
        ({"use_peft": True, "dtype": "bfloat16", "deepspeed": "ds_z2_offload.json"}, False),
        ({"use_peft": True, "dtype": "bfloat16", "deepspeed": "ds_z3_offload.json"}, True),
        ({"use_peft": True, "dtype": "bfloat16", "load_in_4bit": True}, False),
        ({"use_peft": True}, False),  # loaded in float32
        ({"dtype": "bfloat16"}, False),
    ],
)
def test_adapters_in_bfloat16_under_zero_3_are_said(
    keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    assert (ADAPTERS_UNDER_ZERO_3 in said(convert(TRL, **keys))) == is_said


@pytest.mark.parametrize(
    ("keys", "is_kept"),
    [
        ({}, True),
        ({"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}, False),
        (
            {
                "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
                "cut_cross_entropy": False,
            },
            True,
        ),
    ],
)
def test_axolotls_plugin_of_the_loss_casts_the_embedding_too(
    keys: dict[str, Any], is_kept: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL | {"attn_implementation": "sdpa"}, **keys)
    assert (PARTS_IN_FP32 in said(made)) == is_kept


@pytest.mark.parametrize(
    ("keys", "is_shrunk"),
    [({}, True), ({"image_max_pixels": 262144}, False), ({"stage": "pt"}, False)],
)
def test_llama_factory_bounds_the_size_of_images_without_a_key(
    keys: dict[str, Any], is_shrunk: bool, convert: Convert
) -> None:
    file = {
        "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "template": "qwen2_vl",
        "dataset": "mllm_demo",
        "output_dir": "out",
    }
    assert (IMAGES_SHRUNK in said(convert(file, **keys))) == is_shrunk
    of_text = {"model_name_or_path": "Qwen/Qwen3-8B", "template": "qwen3", "dataset": "identity"}
    assert IMAGES_SHRUNK not in said(convert(file | of_text))


@pytest.mark.parametrize(
    ("keys", "is_among"),
    [
        ({"save_total_limit": 2, "val_dataset": "more/rows"}, True),
        ({"val_dataset": "more/rows"}, False),
        ({"save_total_limit": 2}, False),
    ],
)
def test_ms_swifts_best_checkpoint_is_among_those_that_are_kept(
    keys: dict[str, Any], is_among: bool, convert: Convert
) -> None:
    file = {
        "command": "sft",
        "model": "Qwen/Qwen3-8B",
        "dataset": "a/rows",
        "use_hf": True,
        "train_type": "lora",
        "save_steps": 10,
        "eval_steps": 10,
    }
    assert (BEST_AMONG_KEPT in said(convert(file, **keys))) == is_among


V1 = {
    "model": "Qwen/Qwen3-4B",
    "peft_config": {"name": "lora", "r": 16},
    "dist_config": {"name": "fsdp2"},
    "train_dataset": "data/rows.yaml",
    "max_steps": 10,
}


def test_llama_factorys_v1_leaves_rows_out_adds_gradients_in_float32_and_trains_no_empty_thought(
    convert: Convert,
) -> None:
    """drop_last of its BatchGenerator; reduce_dtype of its FSDP2Engine; enable_thinking of its _render_messages."""
    made = convert(V1)
    lines = said(made)
    assert WHOLE_STEPS in lines and OWN_THOUGHT in lines and "chat_template" not in made.recipe
    assert REDUCED_IN_16_BITS not in lines
    assert REDUCED_IN_16_BITS in said(convert(V1, dist_config={"name": "deepspeed"}))
    assert OWN_THOUGHT not in said(convert(V1, model="Qwen/Qwen3-4B-Instruct-2507"))


@pytest.mark.parametrize(
    ("keys", "packs", "lines"),
    [
        ({}, False, [WHOLE_STEPS]),
        ({"batching_strategy": "padding_free", "flash_attn": "flash_attention_2"}, False, [WHOLE_STEPS]),
        ({"batching_strategy": "dynamic_batching"}, False, [FILLED_UP, AS_MANY_AS_FIT]),
        ({"batching_strategy": "dynamic_padding_free"}, True, [FILLED_UP, PACKED_IN_ORDER]),
        (
            {"batching_strategy": "dynamic_padding_free", "max_steps": None},
            True,
            [FILLED_UP, COUNTED_BY_ROWS, PACKED_IN_ORDER],
        ),
        ({"batching_strategy": "dynamic_padding_free", "micro_batch_size": 4}, True, [FILLED_UP, ONE_LONG_ROW]),
        (
            {"batching_strategy": "dynamic_padding_free", "enable_activation_checkpointing": False},
            True,
            [FILLED_UP, SEEN_THROUGH_CACHE, PACKED_IN_ORDER],
        ),
    ],
)  # fmt: skip
def test_the_batches_of_llama_factorys_v1(
    keys: dict[str, Any], packs: bool, lines: list[str], convert: Convert
) -> None:
    """plugins/trainer_plugins/batching.py: dynamic_padding_free lays rows end to end, each from position 0 and without a
    mask, by which transformers sees where a document begins unless there is a cache; dynamic_batching pads them.
    """
    made = convert(V1, **keys)
    assert made.recipe["packing"] is packs and NOT_NEAT not in said(made)
    known = (
        WHOLE_STEPS,
        FILLED_UP,
        AS_MANY_AS_FIT,
        COUNTED_BY_ROWS,
        SEEN_THROUGH_CACHE,
        PACKED_IN_ORDER,
        ONE_LONG_ROW,
    )
    assert [line for line in known if line in said(made)] == lines


def test_the_data_of_llama_factorys_v1_is_a_path_a_hub_name_or_a_list(convert: Convert) -> None:
    """_get_dataset_info of its core/data_engine.py."""
    named = convert(V1, train_dataset="a/rows")
    assert named.recipe["datasets"] == [{"path": "a/rows"}] and not named.to_do
    (listed,) = convert(V1).to_do
    assert "lists the data sets there" in listed and "dataset_info.json" not in listed


def test_llama_factorys_v1_has_a_row_for_each_answer(convert: Convert) -> None:
    """_prefix_cuts of its core/data_engine.py, and _escape_special of its core/rendering/escape.py."""
    made = convert(V1)
    assert made.recipe["turns"] == "split" and V1_SPECIAL in made.remarks
    older = convert(V1, template="qwen3_nothink")
    assert "turns" not in older.recipe and V1_SPECIAL not in older.remarks


@pytest.mark.parametrize(
    ("file", "keys", "is_said"),
    [
        ("torchtune", {}, True),
        ("torchtune", {"dataset": {"packed": False}}, False),
        ("torchtune", {"dataset": TEXTS}, False),
        ("torchtune", {"dataset": TEXTS | {"split_across_pack": False}}, True),
        ("Automodel", {}, False),
        ("Automodel", {"dataset": {"pad_to_max_length": False}}, True),
        ("Automodel", {"dataset": {"pad_to_max_length": False}, "packed_sequence": {"packing_strategy": "neat"}}, False),
    ],
)  # fmt: skip
def test_rows_that_are_packed_in_their_order_are_said(
    file: str, keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    """_pack of torchtune's PackedDataset, and pack_dataset of Automodel; of rows of one length both pack alike."""
    packed = {
        "torchtune": TUNE
        | {"dataset": TUNE["dataset"] | {"packed": True}, "tokenizer": TUNE["tokenizer"] | {"max_seq_len": 512}},
        "Automodel": AUTOMODEL | {"packed_sequence": {"packed_sequence_size": 512}},
    }[file]  # fmt: skip
    made = convert(packed, **keys)
    assert (PACKED_IN_ORDER in made.remarks) is is_said
    assert (SPLIT_BY_PACKING in said(made)) is (keys.get("dataset") == TEXTS)


def test_all_keys_of_v1s_adapters_are_read(convert: Convert) -> None:
    adapters = {"use_dora": True, "modules_to_save": ["lm_head"], "rank_dropout": 0.5}
    made = convert(V1, peft_config=adapters)
    assert made.recipe["use_dora"] is True and made.recipe["modules_to_save"] == ["lm_head"]
    assert "rank_dropout" in said(made)


@pytest.mark.parametrize(
    ("keys", "is_in_16_bits"),
    [
        ({"adapter": "lora"}, True),
        ({"adapter": "qlora", "load_in_4bit": True}, True),
        ({"adapter": "qlora", "load_in_4bit": True, "fsdp_config": {"version": 2}}, False),
        (
            {
                "adapter": "qlora",
                "load_in_4bit": True,
                "fsdp_config": {"version": 2},
                "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
            },
            True,
        ),
    ],
)
def test_axolotls_copies_of_embeddings_are_in_float32_under_qlora_and_fsdp(
    keys: dict[str, Any], is_in_16_bits: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, lora_modules_to_save=["lm_head"], lora_target_linear=True, **keys)
    assert (COPIES_AS_LOADED in said(made)) == is_in_16_bits


@pytest.mark.parametrize(
    ("dtypes", "is_otherwise"), [(("int8", "int4"), True), (("mxfp4", "mxfp4"), False)]
)
def test_axolotls_weights_in_4_bits_are_rounded_from_the_smallest_to_the_largest(
    dtypes: tuple[str, str], is_otherwise: bool, convert: Convert
) -> None:
    qat = dict(zip(("activation_dtype", "weight_dtype"), dtypes, strict=True))
    assert (MIN_TO_MAX in said(convert(AXOLOTL, qat=qat))) == is_otherwise


def test_that_rounding_is_another_than_ours() -> None:
    """torchao's own, by the configs that Axolotl's _make_qat_config makes."""
    from torchao.quantization.qat.fake_quantize_config import Int4WeightFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import FakeQuantizerBase

    from finetune.config.quantization import QuantizationAware
    from finetune.models.fake_quantize import _make_rounding

    keys = QuantizationAware(quantization_aware_training="int8-int4", qat_group_size=32)
    config = Int4WeightFakeQuantizeConfig(group_size=32, activation_dtype=torch.bfloat16)
    weight = torch.arange(64.0).reshape(2, 32)  # all above 0
    theirs = FakeQuantizerBase.from_config(config)(weight)
    ours = _make_rounding(keys).weight(weight)
    assert (theirs - weight).abs().max() < 31 / 15 and len(theirs[0].unique()) == 16
    assert len(ours[0].unique()) < 10


@pytest.mark.parametrize(
    ("name", "targets", "may_adapt"),
    [
        ("Qwen/Qwen3.5-35B-A3B", ["q_proj", "down_proj"], False),
        ("Qwen/Qwen3.5-35B-A3B", ["q_proj", "proj"], True),
        ("google/gemma-3-4b-it", ["q_proj"], True),
    ],
)
def test_layers_that_a_tower_does_not_have_get_no_adapter_there(
    name: str, targets: list[str], may_adapt: bool, convert: Convert
) -> None:
    images = {"processor_type": "AutoProcessor", "adapter": "lora"}
    made = convert(AXOLOTL, base_model=name, lora_target_modules=targets, **images)
    assert ("layers of the vision tower by these names too there" in said(made)) == may_adapt


@pytest.mark.parametrize(
    ("name", "targets", "are_moved"),
    [
        ("Qwen/Qwen3-30B-A3B", ["q_proj", "gate_proj", "up_proj"], True),
        ("Qwen/Qwen3-30B-A3B", ["q_proj"], False),
        ("Qwen/Qwen3-8B", ["gate_proj", "up_proj"], False),
        ("Qwen/Qwen1.5-MoE-A2.7B", ["gate_proj", "up_proj"], False),
        ("zai-org/GLM-4.5-Air", ALL_LINEAR, True),
    ],
)
def test_peft_takes_names_of_an_mlp_for_those_of_routed_experts(
    name: str, targets: list[str], are_moved: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, base_model=name, adapter="lora", lora_target_modules=targets)
    assert (ONTO_EXPERTS in said(made)) == are_moved


@pytest.mark.parametrize(
    ("layers", "dropout", "error"),
    [
        (["gate_proj", "up_proj"], 0.0, None),
        (["gate_proj", "up_proj"], 0.05, "lora_dropout"),
        (["q_proj", "up_proj"], 0.0, "without also targeting gate_proj"),
    ],
)
def test_peft_refuses_dropout_on_routed_experts_and_half_of_a_parameter(
    layers: list[str], dropout: float, error: str | None
) -> None:
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=1, num_experts=2, head_dim=8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    adapters = LoraConfig(target_modules=layers, lora_dropout=dropout)
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        get_peft_model(model, adapters)


ALL_OF_TRL = TRL | {"use_peft": True, "lora_target_modules": "all-linear"}
ALL_OF_SWIFT = {"command": "sft", "model": "a", "dataset": "a/rows", "train_type": "lora"}
MLPS_OF_AXOLOTL = AXOLOTL | {"adapter": "lora", "lora_target_modules": ["down_proj"]}
HALF_OF_AXOLOTL = MLPS_OF_AXOLOTL | {"lora_target_modules": ["q_proj", "up_proj"]}


@pytest.mark.parametrize(
    ("file", "key", "dropout", "line"),
    [
        (ALL_OF_TRL, "model_name_or_path", None, DROPOUT_ON_EXPERTS),  # 0.05, its default
        (ALL_OF_TRL, "model_name_or_path", 0.0, ALL_WITH_EXPERTS),
        (ALL_OF_SWIFT, "model", None, DROPOUT_ON_EXPERTS),
        (ALL_OF_SWIFT, "model", 0, ONTO_EXPERTS),
        (MLPS_OF_AXOLOTL, "base_model", 0.05, ONTO_EXPERTS),  # it changes peft
        (HALF_OF_AXOLOTL, "base_model", 0.0, HALF_OF_FUSED),
    ],
)
def test_adapters_on_routed_experts_that_peft_refuses_are_said_to_be_refused_there(
    file: Mapping[str, Any], key: str, dropout: float | None, line: str, convert: Convert
) -> None:
    keys = {} if dropout is None else {"lora_dropout": dropout}
    text = said(convert(dict(file) | {key: "Qwen/Qwen3-Next-80B-A3B-Instruct"}, **keys))
    lines = (ALL_WITH_EXPERTS, ONTO_EXPERTS, DROPOUT_ON_EXPERTS, HALF_OF_FUSED)
    assert [each for each in lines if each in text] == [line]


def test_the_families_whose_names_peft_takes_so_are_pefts() -> None:
    from peft.utils.transformers_weight_conversion import (
        _MODEL_TO_CONVERSION_PATTERN,
        _MOE_TARGET_MODULE_MAPPING,
    )

    taken = {
        family: pattern
        for family, pattern in _MODEL_TO_CONVERSION_PATTERN.items()
        if _MOE_TARGET_MODULE_MAPPING.get(pattern, {}).keys() >= MLP_NAMES
    }
    assert taken == {family: find_alias(family) for family in taken}
    assert set(taken.values()) == {"qwen2_moe"} and "qwen2_moe" not in taken


@pytest.mark.parametrize(
    ("keys", "is_unknown"),
    [
        ({"base_model": "arcee-ai/AFM-4.5B"}, True),
        ({"base_model": "arcee-ai/AFM-4.5B", "eot_tokens": ["<|im_end|>"]}, False),
        ({"base_model": "Qwen/Qwen3-8B"}, False),
        ({"base_model": "arcee-ai/AFM-4.5B", "chat_template": "chatml"}, False),
        ({"base_model": "CohereForAI/c4ai-command-r-v01"}, False),
    ],
)
def test_the_end_of_turns_that_no_table_knows_may_be_another_than_eos(
    keys: dict[str, Any], is_unknown: bool, convert: Convert
) -> None:
    assert (OTHER_ENDS in said(convert(AXOLOTL, **keys))) == is_unknown


@pytest.mark.parametrize(
    ("template", "eot_tokens", "untrained"),
    [
        ("llama3", None, "<|eot_id|>"),
        ("llama3", ["<|eot_id|>"], None),
        ("llama3", ["<|im_end|>"], "<|eot_id|>"),
        ("cohere", None, "<|END_OF_TURN_TOKEN|>"),
    ],
)
def test_the_end_of_a_turn_is_untrained_where_eot_tokens_lacks_it(
    template: str, eot_tokens: list[str] | None, untrained: str | None, convert: Convert
) -> None:
    keys = {"base_model": "org/model", "chat_template": template, "eot_tokens": eot_tokens}
    text = said(convert(AXOLOTL, **keys))
    assert ("the EOS token alone ends a trained turn there" in text) == (untrained is not None)
    assert f"{untrained} is not trained" in text or untrained is None


@pytest.mark.parametrize(
    ("modules", "is_said"),
    [(None, True), (["lm_head"], True), (["embed_tokens", "lm_head"], False)],
)
def test_ends_of_the_model_are_frozen_beside_adapters_where_axolotl_does_not_name_them(
    modules: list[str] | None, is_said: bool, convert: Convert
) -> None:
    keys = {
        "adapter": "lora",
        "lora_r": 8,
        "lora_target_linear": True,
        "lora_modules_to_save": modules,
    }
    tokens = {"additional_special_tokens": ["<|tool|>"]}
    made = convert(AXOLOTL, **keys, special_tokens=tokens)
    assert made.recipe["added_tokens"] == ["<|tool|>"]
    assert (ENDS_FROZEN in said(made)) == is_said
    assert ENDS_FROZEN not in said(convert(AXOLOTL, special_tokens=tokens))


@pytest.mark.parametrize(
    ("patterns", "is_said"),
    [
        (["lm_head.weight", "model.norm.weight"], True),
        (["^lm_head.weight$", "^model.embed_tokens.weight$"], False),
        (["model.layers.1."], False),
    ],
)
def test_a_head_that_is_the_embedding_has_no_name_of_its_own_in_axolotl(
    patterns: list[str], is_said: bool, convert: Convert
) -> None:
    model = build("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in dict(model.named_parameters())
    made = convert(AXOLOTL, unfrozen_parameters=patterns)
    assert (HEAD_UNNAMED in said(made)) == is_said


@pytest.mark.parametrize(
    ("tool", "keys", "is_said"),
    [
        (AXOLOTL, {"rl": "dpo", "dpo_loss_type": ["sigmoid", "sft"]}, True),
        (AXOLOTL, {"rl": "dpo"}, False),
        (
            {"model_name_or_path": "org/model", "dataset_name": "org/pairs"},
            {"beta": 0.1, "rpo_alpha": 0.5},
            True,
        ),
    ],
)
def test_micro_batches_count_alike_in_the_cross_entropy_beside_dpo(
    tool: dict[str, Any], keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    pairs = (
        {"datasets": [{"path": "a/pairs", "type": "chat_template.default"}]} if "rl" in keys else {}
    )
    assert (CHOSEN_BY_MICRO_BATCH in said(convert(tool, **keys, **pairs))) == is_said


@pytest.mark.parametrize(
    ("rl", "strategy", "is_said"),
    [
        ("orpo", "truncate", True),
        ("simpo", "Truncate", True),
        ("orpo", "drop", False),
        ("dpo", "truncate", False),
    ],
)
def test_a_cut_pair_of_axolotls_is_sliced_again_by_trls_older_trainers(
    rl: str, strategy: str, is_said: bool, convert: Convert
) -> None:
    pairs = [{"path": "a/pairs", "type": "chat_template.argilla"}]
    made = convert(AXOLOTL, rl=rl, datasets=pairs, excess_length_strategy=strategy)
    assert (SLICED_AGAIN in said(made)) == is_said


def test_a_reward_model_has_no_ends_of_turns(convert: Convert) -> None:
    pairs = [{"path": "a/pairs", "type": "bradley_terry.chat_template"}]
    keys = {
        "reward_model": True,
        "datasets": pairs,
        "chat_template": "gemma",
        "eot_tokens": ["<end_of_turn>"],
    }
    made = convert(AXOLOTL, **keys)
    assert made.recipe["method"] == "reward" and "eot_tokens" in made.ignored


@pytest.mark.parametrize(
    ("keys", "strategy"),
    [
        ({"saves_per_epoch": 1, "max_steps": 2000}, "epoch"),
        ({"saves_per_epoch": 1}, None),
        ({"max_steps": 2000}, "epoch"),
        ({"save_steps": 10, "max_steps": 2000}, None),
        ({"save_strategy": "no", "max_steps": 2000}, None),
    ],
)
def test_axolotl_saves_at_each_epoch_that_max_steps_goes_through(
    keys: dict[str, Any], strategy: str | None, convert: Convert
) -> None:
    """save_strategy: epoch of its _configure_save_and_eval_strategy, which max_steps does not change."""
    assert convert(AXOLOTL, **keys).recipe.get("save_strategy") == strategy


def test_automodel_saves_at_each_epoch_that_max_steps_goes_through(convert: Convert) -> None:
    steps = {"max_steps": 100, "ckpt_every_steps": None}
    assert convert(AUTOMODEL, step_scheduler=steps).recipe["save_strategy"] == "epoch"


@pytest.mark.parametrize(("trusts", "line"), [(True, OWN_CODE), (False, NO_LAYER)])
def test_a_layer_that_transformers_has_not_may_be_in_code_beside_the_files(
    trusts: bool, line: str, convert: Convert
) -> None:
    lora = {"adapter": "lora", "lora_target_modules": ["q_proj", "out_proj"]}
    name = "LnL-AI/dbrx-base-converted-v2"
    made = convert(AXOLOTL, base_model=name, trust_remote_code=trusts, **lora)
    assert [each for each in (OWN_CODE, NO_LAYER) if each in said(made)] == [line]


def test_keys_that_axolotl_does_not_read_have_no_effect(convert: Convert) -> None:
    made = convert(AXOLOTL, adam_eps=1e-9, label_smoothing_factor=0.1, eta_min=7e-7)
    assert not {"adam_epsilon", "label_smoothing"} & made.recipe.keys()
    assert "eta_min" in made.ignored
    assert convert(AXOLOTL, adam_epsilon=1e-9).recipe["adam_epsilon"] == 1e-9


@pytest.mark.parametrize(("steps", "is_said"), [({}, True), ({"lr_warmup_steps": 0}, False)])
def test_automodels_warm_up_begins_at_a_tenth_where_there_is_one(
    steps: dict[str, int], is_said: bool, convert: Convert
) -> None:
    made = convert(AUTOMODEL, lr_scheduler={"lr_decay_style": "cosine", **steps})
    assert (WARMUP_FROM_A_TENTH in said(made)) == is_said


def test_our_warm_up_rises_evenly_to_the_whole_rate_in_its_last_step() -> None:
    """Automodel's get_lr gives 0.1, 0.55 and, in the step after a warm-up of two, 1."""
    schedule = Optimization(learning_rate=1.0, warmup_steps=2).schedule(20)
    assert [compute_learning_rate(step, schedule) for step in range(3)] == [0.5, 1.0, 1.0]
    assert WARMUP_FROM_A_TENTH.endswith("an even share more, and the last one the whole")


def test_automodels_own_warm_up_is_rounded_down_and_ours_up(convert: Convert) -> None:
    """build of LRSchedulerConfig of its components/optim/optimizer.py: min(1000, steps // 10)."""
    assert WARMUP_OF_A_TENTH in said(convert(AUTOMODEL, lr_scheduler={"lr_decay_style": "cosine"}))
    assert Optimization(warmup_ratio=0.1).schedule(1369).warmup_steps == 1369 // 10 + 1


@pytest.mark.parametrize(
    ("name", "keys", "are_rounded"),
    [
        ("nvidia/Qwen3-30B-A3B-NVFP4", {"use_sonicmoe": True}, True),
        ("nvidia/Qwen3-30B-A3B-NVFP4", {"use_scattermoe": True}, False),
        ("Qwen/Qwen3-30B-A3B", {"use_sonicmoe": True}, False),
    ],
)
def test_inputs_of_experts_in_nvfp4_may_be_in_4_bits_in_axolotl(
    name: str, keys: dict[str, Any], are_rounded: bool, convert: Convert
) -> None:
    lora = {"adapter": "lora", "lora_target_modules": ["q_proj"]}
    assert (INPUTS_IN_4_BITS in said(convert(AXOLOTL, base_model=name, **lora, **keys))) == (
        are_rounded
    )


@pytest.mark.parametrize(
    ("keys", "is_default"),
    [({}, True), ({"warmup_ratio": 0.1}, False), ({"warmup_steps": 9}, False)],
)
def test_axolotls_default_warm_up_is_rounded_down_too(
    keys: dict[str, Any], is_default: bool, convert: Convert
) -> None:
    """_configure_warmup_and_logging: min(int(0.03 * total_num_steps), 100)."""
    lines = said(convert(AXOLOTL, **keys))
    assert (WARMUP_THERE in lines) == is_default
    assert "rounded down" in WARMUP_THERE


@pytest.mark.parametrize(
    ("name", "names", "is_said"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", ["q_proj", "w1", "w2", "w3"], True),
        ("mistralai/Mixtral-8x7B-v0.1", ["q_proj"], False),
        ("Qwen/Qwen3-8B", ["q_proj", "w1"], False),
    ],
)
def test_a_mixtrals_names_are_those_of_experts(
    name: str, names: list[str], is_said: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, base_model=name, adapter="lora", lora_target_modules=names)
    assert (TWICE_THE_RANK in said(made)) == is_said
    assert (made.recipe["lora_target_modules"] == names) == (name != "Qwen/Qwen3-8B")
    assert ("nothing is adapted" in said(made)) == (name == "Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("name", "targets", "line"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", "all-linear", ALL_WITH_EXPERTS),
        ("Qwen/Qwen3-30B-A3B", "all-linear", ALL_WITH_EXPERTS),
        ("Qwen/Qwen2-57B-A14B", "all-linear", None),
        ("mistralai/Mixtral-8x7B-v0.1", ["q_proj", "gate"], ROUTERS),
        ("Qwen/Qwen2-57B-A14B", ["q_proj", "gate"], ROUTERS),
        ("Qwen/Qwen3-8B", ["q_proj", "gate"], NO_LAYER),
    ],
)
def test_pefts_experts_and_routers_are_reported(
    name: str, targets: Any, line: str | None, convert: Convert
) -> None:
    """_convert_peft_config_moe: gate is gate.weight, and all-linear all that it maps."""
    keys = {"use_peft": True, "lora_target_modules": targets, "lora_dropout": 0}
    text = said(convert(TRL, model_name_or_path=name, **keys))
    lines = (ALL_WITH_EXPERTS, ONTO_EXPERTS, ROUTERS, NO_LAYER)
    assert [each for each in lines if each in text] == [line] * bool(line)


@pytest.mark.parametrize("start", [True, False])
def test_axolotls_key_for_the_start_of_adapters_asks_for_pefts_own_by_either_word(
    start: bool, convert: Convert
) -> None:
    """Source: _build_lora_config_kwargs of its loaders/adapter.py, which passes on what is true."""
    made = convert(AXOLOTL, adapter="lora", peft_init_lora_weights=start)
    assert "peft_init_lora_weights" in made.ignored and not made.missing_capabilities


@pytest.mark.parametrize("is_on", [True, False])
def test_random_weights_of_a_named_model_are_refused(is_on: bool, convert: Convert) -> None:
    """_load_model_from_config of Axolotl's loaders/model.py: none of the model's own are read."""
    if is_on:
        with pytest.raises(Refusal, match="random weights"):
            convert(AXOLOTL, reinit_weights=True)
    else:
        assert "reinit_weights" not in said(convert(AXOLOTL, reinit_weights=False))


def test_a_key_that_a_line_is_about_is_not_called_without_effect(convert: Convert) -> None:
    conversion = convert(
        AXOLOTL, base_model="Qwen/Qwen3-30B-A3B-NVFP4", use_sonicmoe=True, use_kernels=True
    )
    assert INPUTS_IN_4_BITS in said(conversion)
    assert "use_sonicmoe" not in conversion.ignored
    assert "use_kernels" in conversion.ignored


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"fsdp_config": {"fsdp_version": 2}}, ADAPTERS_BESIDE_NVFP4),
        ({"peft_autocast_adapter_dtype": False}, ADAPTERS_AS_BASE),
        ({"fsdp_config": {"fsdp_version": 2}, "lora_fp32_gradients": True}, None),
        ({"peft_autocast_adapter_dtype": True}, None),
        ({}, None),
    ],
)
def test_axolotls_adapters_may_be_in_16_bits(
    keys: dict[str, Any], expected: str | None, convert: Convert
) -> None:
    """cast_residual_fp32 leaves NF4's adapters alone, and is called under FSDP2."""
    lora = {"adapter": "lora", "lora_target_modules": ["q_proj"]}
    text = said(convert(AXOLOTL, base_model="Qwen/Qwen3-30B-A3B-NVFP4", **lora, **keys))
    for note in (ADAPTERS_BESIDE_NVFP4, ADAPTERS_AS_BASE):
        assert (note in text) == (note == expected)
    plain = said(convert(AXOLOTL, base_model="Qwen/Qwen3-30B-A3B", **lora, **keys))
    assert ADAPTERS_BESIDE_NVFP4 not in plain


@pytest.mark.parametrize(
    ("name", "is_divided"),
    [("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", False), ("Qwen/Qwen3-8B", True)],
)
def test_no_group_of_ranks_is_left_where_rows_are_whole(
    name: str, is_divided: bool, convert: Convert
) -> None:
    """Layers that need the whole row on a rank: the shipped Accelerate file does it."""
    conversion = convert(AXOLOTL, base_model=name, context_parallel_size=2)
    assert (conversion.accelerate_file is not None) == is_divided
    assert (NUMBER_OF_GROUPS.format(1, "1 group") in said(conversion)) == is_divided
    assert str(conversion.recipe["accelerate_config"]).startswith("fsdp_full_shard_auto")


@pytest.mark.parametrize(
    ("keys", "mesh", "line"),
    [
        ({"dp_shard_size": 4, "tensor_parallel_size": 2}, {"dp_shard": 4, "tp": 2}, None),
        ({"dp_shard_size": 4}, {"dp_shard": 4}, None),
        ({"tensor_parallel_size": 2}, {"dp_shard": 1, "tp": 2}, EXAMPLE_SIZES.format(WRITTEN_FILE)),
        ({}, None, EXAMPLE_SIZES.format("fsdp_hybrid_shard.yaml")),
    ],
)
def test_groups_of_hybrid_sharding_have_the_files_sizes(
    keys: dict[str, Any], mesh: dict[str, int] | None, line: str | None, convert: Convert
) -> None:
    sharded = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    conversion = convert(AXOLOTL, **sharded, dp_replicate_size=2, **keys)
    sizes = mesh and {"dp_replicate": 2} | mesh
    written = yaml.safe_load(conversion.accelerate_file or "{}").get("parallelism_config")
    assert written == (sizes and {f"parallelism_config_{k}_size": n for k, n in sizes.items()})
    lines = [EXAMPLE_SIZES.format(WRITTEN_FILE), EXAMPLE_SIZES.format("fsdp_hybrid_shard.yaml")]
    assert [each for each in lines if each in said(conversion)] == [line] * bool(line)


def test_automodels_experts_on_more_ranks_than_share_a_row_have_as_many_groups(
    convert: Convert,
) -> None:
    """Its mesh of experts is laid over that of rows' parts, too: 8 ranks here, of 4 groups of 2."""
    model = {"pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B"}
    layout = {"cp_size": 2, "ep_size": 8}
    conversion = convert(AUTOMODEL, model=model, distributed=layout)
    mesh = yaml.safe_load(str(conversion.accelerate_file))["parallelism_config"]
    assert mesh == {"parallelism_config_dp_shard_size": 4, "parallelism_config_cp_size": 2}
    assert conversion.recipe["expert_parallel_size"] == 8
    assert NUMBER_OF_GROUPS.format(4, "4 groups") in said(conversion)


@pytest.mark.parametrize(
    ("keys", "saved"),
    [
        ({}, "the tokenizer's own"),
        ({"chat_template": "tokenizer_default"}, "the tokenizer's own"),
        ({"chat_template": "gemma3"}, "gemma3's"),
    ],
)
def test_the_template_that_axolotl_saves_beside_alpaca_rows_is_listed(
    convert: Convert, keys: dict[str, str], saved: str
) -> None:
    """load_tokenizer of its loaders/tokenizer.py, which sets a template for chat_template alone."""
    line = "is saved with the tokenizer"
    rows = [{"path": "a/rows", "type": "alpaca"}]
    made = convert(AXOLOTL, datasets=rows, **keys)
    assert made.recipe["chat_template"] == "alpaca"
    (listed,) = (remark for remark in made.remarks if line in remark)
    assert listed.endswith(f"there {saved}")
    assert line not in said(convert(AXOLOTL, **keys))
    assert line not in said(convert(AXOLOTL, datasets=rows, chat_template="alpaca"))


@pytest.mark.parametrize(
    ("kind", "is_written", "names_prompt"),
    [
        ("alpaca", False, False),
        ("alpaca:phi", False, True),
        ("completion", False, True),
        ({"field_instruction": "a", "field_output": "b", "format": "{instruction}"}, False, True),
        ("chatml.ultra", False, False),
        ("chat_template", True, True),
    ],
)
@pytest.mark.parametrize("template", ["phi_3", "qwen3_5", "mistral_v7_tekken", "mistral_v2v3"])
def test_of_rows_that_no_template_writes_axolotls_turns_are_not_compared(
    template: str, kind: Any, is_written: bool, names_prompt: bool, convert: Convert
) -> None:
    """DATASET_HANDLERS of its utils/data/wrappers.py, and ultra of prompt_strategies/dpo/chatml.py."""
    rows: dict[str, Any] = {"datasets": [{"path": "a/rows", "type": kind}]}
    if kind == "chatml.ultra":
        rows["rl"] = "dpo"
    text = said(convert(AXOLOTL | rows, chat_template=template))
    assert (OTHER_TURNS["Axolotl", template] in text) == is_written
    assert (OTHER_SPACE.get(template, "?") in text) == (is_written and template in OTHER_SPACE)
    assert (OTHER_TOOLS.get(template, "?") in text) == (is_written and template in OTHER_TOOLS)
    prompt = PROMPT_ENDS.format(OTHER_PROMPTS.get(template))
    assert (prompt in text) == (names_prompt and template in OTHER_PROMPTS)


def test_masked_diffusion_has_no_line_of_a_mean_over_a_ranks_labels(convert: Convert) -> None:
    """compute_loss of Axolotl's core/trainers/diffusion_lm/trainer.py reads no count of labels."""
    line = "the mean of each over its labels counts alike there"
    assert line in said(convert(AXOLOTL))
    made = convert(AXOLOTL, diffusion_lm={"from_causal_lm": True})
    assert line not in said(made) and "each row is divided by its trained tokens" in said(made)


def test_doras_magnitudes_decay_under_trainer_and_not_here() -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    adapters = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    ((name, magnitude),) = (
        (name, parameter) for name, parameter in model.named_parameters() if "magnitude" in name
    )
    trainer = Trainer.__new__(Trainer)
    assert name in trainer.get_decay_parameter_names(model)
    (group,) = (
        group
        for group in make_parameter_groups(model, 0.1)
        if any(parameter is magnitude for parameter in group["params"])
    )
    assert group["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        (AXOLOTL, {"adapter": "lora", "lora_target_linear": True, "peft_use_dora": True}),
        (
            TUNE,
            {
                "model": {
                    "_component_": "torchtune.models.llama3.lora_llama3_8b",
                    "lora_attn_modules": ["q_proj"],
                    "use_dora": True,
                }
            },
        ),
    ],
)
def test_the_decay_of_doras_magnitudes_is_listed(
    convert: Convert, file: Mapping[str, Any], keys: dict[str, Any]
) -> None:
    """torchtune's recipes give torch's AdamW all parameters, in one group."""
    decay = {"optimizer": {"weight_decay": 0.01}} if file is TUNE else {"weight_decay": 0.01}
    none = {"optimizer": {"weight_decay": 0.0}} if file is TUNE else {"weight_decay": 0.0}
    assert MAGNITUDES_DECAYED in convert(file, **keys, **decay).remarks
    assert MAGNITUDES_DECAYED not in convert(file, **keys, **none).remarks
    assert MAGNITUDES_DECAYED not in convert(file, **decay).remarks


@pytest.mark.parametrize(
    ("section", "bound"), [({"max_norm": None}, 1.0), ({"max_norm": 0.5}, 0.5)]
)
def test_no_bound_of_gradients_is_automodels_default(
    section: dict[str, float | None], bound: float, convert: Convert
) -> None:
    made = convert(AUTOMODEL, clip_grad_norm=section)
    assert made.recipe.get("max_grad_norm", 1.0) == bound
    assert "clip_grad_norm" not in said(made)


def test_masked_diffusion_of_pretraining_sees_all_of_a_row_and_what_fills_it(
    convert: Convert,
) -> None:
    """create_bidirectional_attention_mask of Axolotl's full_sequence.py, by a mask of ones or none."""
    rows = [{"path": "a/rows", "type": "completion"}]
    keys: dict[str, object] = {
        "pretraining_dataset": rows,
        "datasets": None,
        "sample_packing": True,
        "max_steps": 8,
        "attn_implementation": "sdpa",
    }
    causal = "attend to those before there under sdpa"
    seen = "what fills up a row is seen there"
    assert causal in said(convert(AXOLOTL, **keys))
    keys["diffusion_lm"] = {"from_causal_lm": True, "mask_token_id": 5}
    text = said(convert(AXOLOTL, **keys))
    assert "documents of a row see each other there" in text and seen in text
    assert causal not in text
    assert seen not in said(convert(AXOLOTL, **keys, pretrain_multipack_attn=False))


def test_an_empty_text_that_axolotl_leaves_out_is_said_to_stop_a_run(convert: Convert) -> None:
    assert EMPTY_TEXTS not in said(convert(AXOLOTL))
    rows = [{"path": "a/rows", "type": "completion"}]
    assert EMPTY_TEXTS in said(convert(AXOLOTL, datasets=rows))
    source = DatasetSource(path="rows.jsonl", type="text")
    with pytest.raises(BadRow, match="empty"):
        parse_row({"text": ""}, source)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"embedding_row_repair": {"min_norm": 1e-4}}, "embedding_row_repair: {"),
        ({"dataloader": {"collate_fn": {"_target_": f"{COLLATERS}_vlm"}}}, None),
        ({"dataloader": {"collate_fn": {"_target_": COLLATERS}}}, None),
        ({"dataset": HELLASWAG | {"filter_overlong": True}}, "dataset.filter_overlong: true   ("),
        ({"dataset": HELLASWAG | {"truncate_history": True}}, "dataset.truncate_history: true   ("),
    ],
)
def test_what_automodels_rarer_keys_do_is_said_and_padding_is_not(
    keys: dict[str, Any], line: str | None, convert: Convert
) -> None:
    made = convert(AUTOMODEL, **keys)
    assert line is None or any(each.startswith(line) for each in made.differences)
    assert not any("not known here" in each or "collate" in each for each in made.differences)
