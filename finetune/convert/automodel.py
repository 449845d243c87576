"""What NeMo Automodel's loop, its packing and its own classes of models do otherwise than a run
here.
"""

import re
from collections.abc import Mapping
from typing import Any

from finetune.config.facts import read_family_source
from finetune.config.optimization import OPTIMIZERS
from finetune.convert.counterparts import ToolFile
from finetune.convert.defaults import set_optimizers_defaults
from finetune.convert.foreign_values import convert_number
from finetune.convert.model_names import guess_family, has_tower, name_model
from finetune.convert.shared import IN_ORDER, PACKED_IN_ORDER
from finetune.convert.value_conversion import Conversion, read_section

# drop_last of its components/datasets/llm/loader.py, which pipeline parallelism sets
LAST_ROWS = (
    "epochs: the rows of a rank that fill no micro-batch are left out there; here they are a last, "
    "short step"
)
# _load_openai_messages of its components/datasets/llm/chat_dataset.py
SHUFFLED_BEFORE = "the slice is one of the rows in the order of this seed there, in their own here"
SHUFFLED_ONCE = "each epoch has the order of shuffle_seed there, another one by the seed here"
# is_ckpt_step of its StepScheduler
SAVED_WITH_EPOCHS = "a checkpoint is saved at the end of each epoch too there"
NOTHING_SAVED = "nothing is saved there; here a checkpoint and an export at the end"
# num_epochs and max_steps of its StepScheduler
FIRST_TO_COME = (
    "the run ends with its last epoch there (num_epochs: {}), where that comes first; here "
    "max_steps counts on into the next one"
)
# of its StepSchedulerConfig, where a file names no key
EPOCHS = 10
SAVE_STEPS = 100
SAVED_IN_EPOCHS = f"a checkpoint is saved every {SAVE_STEPS} steps too there, its default"
# its is_val_step
MEASURED_WITH_SAVES = (
    "eval_loss: measured at each checkpoint and at the end of each epoch too there, whatever "
    "val_every_steps says"
)
HELD_OUT_ROWS_LEFT = (
    "eval_loss: the held-out rows of a rank that fill no micro-batch are left out there"
)
# of its recipes/vlm/finetune.py
UNMEASURED_IN_STAGES = "eval_loss: not measured between pipeline stages there; measured here"
# pad_to_max_length of its components/datasets/llm/hellaswag.py
PADDED_ROWS = (
    "each row is padded to the longest of the data before it is packed there: a packed row has "
    "fewer rows, and an epoch more steps"
)
# transformers' _is_packed_sequence, which looks at one row alone
NOT_APART = (
    "documents in a packed row attend to those before under flash attention there, its default, "
    "where local_batch_size is above 1; each is apart here"
)
# get_wd of its OptimizerParamScheduler
RISING_DECAY = "the weight decay rises from {} to it there; weight_decay stays the same here"
NOT_FLASH = ("sdpa", "eager", "flex_attention")  # values of attn_implementation
# update_moe_gate_bias of its own classes of these families, and gate_bias_update_factor
BIASES_MOVED = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "mistral4")
MOVED_BIASES = (
    "each step moves the routers' biases by 0.001 toward an even load there; they stay as they are "
    "here"
)

# mtp_config of its own classes of these families: _resolve_mtp_num_layers, and MTPConfig
PREDICTING_AHEAD = ("nemotron_h", "qwen3_5_text", "qwen3_5_moe_text")
AHEAD = (
    "where the model's config has layers for it, a tenth of the loss of predicting later tokens is "
    "added there; no such layers are trained here"
)
# _fp32_params of its own classes of these families
DECAYS_IN_FP32 = ("kimi_linear", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
RATES_IN_FP32 = (
    "A_log and dt_bias of the recurrent layers stay in float32 there, and are in the run's 16 bits "
    "here"
)


def _adapt_loop(settings: ToolFile, conversion: Conversion) -> None:
    """Sets when checkpoints are saved and held-out rows measured, and reports how an epoch ends."""
    recipe = conversion.recipe
    schedule = read_section(settings, "step_scheduler")
    stages = recipe.get("pipeline_parallel_size")
    has_stages = isinstance(stages, int) and stages > 1
    drops_last_rows = has_stages and conversion.images is None
    if drops_last_rows or read_section(settings, "dataloader").get("drop_last"):
        conversion.remarks.append(LAST_ROWS)
    epochs = schedule.get("num_epochs", EPOCHS)
    steps = schedule.get("max_steps")
    if epochs is not None and steps is not None:
        conversion.add_remark("step_scheduler.max_steps", steps, FIRST_TO_COME.format(epochs))
    _adapt_saves(settings, conversion)
    if not settings.get("validation_dataset"):
        return
    # after _adapt_saves: rows without steps of their own are measured with each save
    if not schedule.get("val_every_steps") and "save_steps" in recipe:
        recipe["eval_steps"] = recipe["save_steps"]
    if has_stages and conversion.images is not None:
        conversion.remarks.append(UNMEASURED_IN_STAGES)
        return
    conversion.remarks.append(MEASURED_WITH_SAVES)
    if drops_last_rows or read_section(settings, "validation_dataloader").get("drop_last"):
        conversion.remarks.append(HELD_OUT_ROWS_LEFT)


def _adapt_saves(settings: ToolFile, conversion: Conversion) -> None:
    """Sets which checkpoints are saved, and reports those that the file does not name."""
    recipe = conversion.recipe
    schedule = read_section(settings, "step_scheduler")
    at_epochs = schedule.get("save_checkpoint_every_epoch")
    if read_section(settings, "checkpoint").get("enabled", True) is False:
        recipe["save_strategy"] = "no"
        conversion.add_difference("checkpoint.enabled", False, NOTHING_SAVED)
        return
    if "ckpt_every_steps" not in schedule and at_epochs is False:
        recipe["save_steps"] = SAVE_STEPS
    elif "ckpt_every_steps" not in schedule:
        conversion.add_remark("step_scheduler.ckpt_every_steps", None, SAVED_IN_EPOCHS)
    steps = recipe.get("save_steps")
    if steps is not None and at_epochs is not False:
        conversion.add_remark("step_scheduler.ckpt_every_steps", steps, SAVED_WITH_EPOCHS)


def _adapt_decay(schedule: Mapping[str, Any], conversion: Conversion) -> None:
    """Takes over the weight decay of a schedule, or reports that it rises there."""
    start, end = (convert_number(schedule.get(key)) for key in ("start_wd", "end_wd"))
    decay = conversion.recipe["weight_decay"]
    if start is None:
        start = decay
    if end is None:
        end = decay
    if start == end:
        conversion.recipe["weight_decay"] = end
    else:
        conversion.add_difference("lr_scheduler.end_wd", end, RISING_DECAY.format(start))


def _report_packing(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which documents share a packed row, and which of them see each other."""
    size = read_section(settings, "packed_sequence").get("packed_sequence_size") or 0
    if not size:
        return
    dataset = read_section(settings, "dataset")
    is_class = str(dataset.get("_target_")).endswith("HellaSwag")
    is_padded = is_class and dataset.get("pad_to_max_length", True)
    if is_padded:
        conversion.add_difference("packed_sequence.packed_sequence_size", size, PADDED_ROWS)
    rows = read_section(settings, "step_scheduler").get("local_batch_size") or 1
    model = read_section(settings, "model")
    is_thd = read_section(settings, "packed_sequence").get("packing_strategy", "thd") == "thd"
    if is_thd and not is_padded:  # of rows of one length both pack alike
        conversion.remarks.append(PACKED_IN_ORDER)
    is_batch = isinstance(rows, int) and rows > 1
    if is_thd and is_batch and not model.get("backend") and _may_flash(model):
        conversion.add_difference("step_scheduler.local_batch_size", rows, NOT_APART)


def _may_flash(model: Mapping[str, Any]) -> bool:
    """Whether a model's attention is flash attention there, by its key or the default."""
    return model.get("attn_implementation") not in NOT_FLASH


# whose own classes give their Gate, of components/moe/layers.py, no dtype by default
GATED_IN_16_BITS = ("deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3")
IN_16_BITS = (
    "routers are computed in bfloat16 there, in float32 here, and choose some other experts"
)
IN_OWN_DTYPE = "routers are computed in the dtype of the model's own code"
# of transformers' classes
GATE_IN_FP32 = re.compile(
    r"F\.linear\(hidden_states\.(type\(torch\.float32\)|float\(\)), "
    r"self\.weight\.(type\(torch\.float32\)|float\(\))\)"
)
# the indexers of its models/glm_moe_dsa and models/deepseek_v32, and those of transformers
OTHER_TOKENS = (
    "a document of more tokens than the config's index_topk (2048) attends to other ones there: "
    "the indexer rotates "
)
INDEXED_OTHERWISE = {
    "glm_moe_dsa": f"{OTHER_TOKENS}halves of a query there, neighboring pairs here",
    "deepseek_v32": (
        f"{OTHER_TOKENS}neighboring pairs of a query's last numbers there, halves of its first "
        "ones here"
    ),
}
# router_weight_uses_score_correction_bias of its models/kimi_linear, as the model's own code has it
BIASED_WEIGHTS = ("kimi_linear",)
WITH_BIAS = (
    "the weights of a token's experts have the routers' biases in them there; here these choose "
    "the experts, and the weights are without them"
)


# _restore_loaded_model_dtype of its _transformers/model_init.py, for transformers' classes
AS_FILED = "weights have the dtype of the model's files there, as a rule bfloat16; bfloat16 here"
WIDENED = (
    "weights whose files are in float32 or float16 are trained in float32 there; bfloat16 here"
)
# causal language models of its own: MODEL_ARCH_MAPPING of its _transformers/registry.py
OWN_CLASSES = (
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "ernie4_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "hy_v3",
    "kimi_linear",
    "laguna",
    "llama",
    "mimo_v2_flash",
    "minimax_m2",
    "ministral3",
    "mistral4",
    "nemotron_h",
    "qwen2",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
)


def report_loaded_dtype(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which dtype weights are trained in that are all in bfloat16 here."""
    recipe = conversion.recipe
    if recipe.get("use_peft") or recipe.get("dtype") != "bfloat16":
        return
    model = read_section(settings, "model")
    asked = model.get("torch_dtype", "auto")
    name = name_model(settings)
    is_own = guess_family(name) in OWN_CLASSES or has_tower(name)
    if asked == "auto":
        conversion.add_remark("model.torch_dtype", model.get("torch_dtype"), AS_FILED)
    elif model.get("force_hf") or not is_own:
        conversion.add_remark("model.torch_dtype", asked, WIDENED)


def _report_own_class(settings: ToolFile, conversion: Conversion) -> None:
    """Reports where a class of Automodel's own moves the biases of the routers, adds a loss,
    attends to other tokens, or keeps weights in float32.
    """
    name = name_model(settings)
    family = str(guess_family(name))
    _report_gates(family, settings, conversion)
    if read_section(settings, "model").get("force_hf"):
        return
    if family in BIASES_MOVED:
        conversion.add_difference("model", name, MOVED_BIASES)
    if family in BIASED_WEIGHTS:
        conversion.add_difference("model", name, WITH_BIAS)
    if family in INDEXED_OTHERWISE:
        conversion.add_difference("model", name, INDEXED_OTHERWISE[family])
    if family in PREDICTING_AHEAD:
        conversion.add_difference("model", name, AHEAD)
    if family in DECAYS_IN_FP32:
        conversion.add_remark("model", name, RATES_IN_FP32)


def _report_gates(family: str, settings: ToolFile, conversion: Conversion) -> None:
    """Reports where routers are computed in another dtype than by transformers' class."""
    model = read_section(settings, "model")
    asked = read_section(model, "backend").get("gate_precision")
    is_in_fp32 = GATE_IN_FP32.search(read_family_source(family)) is not None
    if asked is not None and not (is_in_fp32 and "float32" in str(asked)):
        conversion.add_difference("model.backend.gate_precision", asked, IN_OWN_DTYPE)
    elif asked is None and family in GATED_IN_16_BITS and not model.get("force_hf"):
        conversion.add_difference("model", name_model(settings), IN_16_BITS)


def adapt_automodel(settings: ToolFile, conversion: Conversion) -> None:
    """Sets and reports what several keys of an Automodel file ask for together."""
    recipe = conversion.recipe
    if read_section(settings, "peft"):
        recipe["use_peft"] = True  # of dim 8, where it says none
    teacher = read_section(settings, "teacher_model").get("pretrained_model_name_or_path")
    if teacher:
        recipe["teacher_model_name_or_path"] = teacher
    _adapt_automodel_optimizer(read_section(settings, "optimizer"), conversion)
    schedule = settings.get("lr_scheduler")
    if isinstance(schedule, dict):
        _adapt_automodel_schedule(schedule, conversion)
    if read_section(settings, "dataloader").get("shuffle") is False:
        is_shuffled = read_section(settings, "dataset").get("shuffle_seed") is not None
        order = SHUFFLED_ONCE if is_shuffled else IN_ORDER
        conversion.add_difference("dataloader.shuffle", False, order)
    _adapt_automodel_lengths(settings, conversion)
    if "max_steps" in recipe and "num_train_epochs" not in recipe:
        recipe["num_train_epochs"] = 1.0  # max_steps decides
    if settings.get("wandb") and read_section(settings, "wandb").get("enable", True):
        recipe["report_to"] = "wandb"
    _adapt_loop(settings, conversion)
    _report_packing(settings, conversion)
    _report_own_class(settings, conversion)


def _adapt_automodel_optimizer(optimizer: Mapping[str, Any], conversion: Conversion) -> None:
    recipe = conversion.recipe
    set_optimizers_defaults(str(optimizer.get("_target_")), recipe)
    if any("bfloat16" in str(optimizer.get(key)) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")):
        recipe["optim"] = next(name for name, row in OPTIMIZERS.items() if row.moment_itemsize)


TENTH = "a tenth of the steps, but at most 1000 there"
SLOW_START = "warm-up: from a tenth of the rate there, from 0 here"


def _adapt_automodel_schedule(schedule: Mapping[str, Any], conversion: Conversion) -> None:
    recipe = conversion.recipe
    recipe.setdefault("lr_scheduler_type", "cosine")
    if schedule.get("lr_warmup_steps") is None:
        recipe["warmup_ratio"] = 0.1
        conversion.add_remark("lr_scheduler.lr_warmup_steps", None, TENTH)
    if schedule.get("lr_warmup_steps") != 0 and schedule.get("init_lr") is None:
        conversion.remarks.append(SLOW_START)
    _adapt_decay(schedule, conversion)
    recipe.setdefault("min_lr_ratio", 0.01)
    lowest = convert_number(schedule.get("min_lr"))
    rate = recipe["learning_rate"]
    if isinstance(lowest, float | int) and isinstance(rate, float) and rate:
        # the schedule may come before the rate in the file
        recipe["min_lr_ratio"] = round(min(1.0, lowest / rate), 9)


NOT_CUT = (None, False, "do_not_truncate")


def _adapt_automodel_lengths(settings: ToolFile, conversion: Conversion) -> None:
    recipe = conversion.recipe
    packed = read_section(settings, "packed_sequence")
    dataset = read_section(settings, "dataset")
    packed_length = packed.get("packed_sequence_size") or 0
    is_cut = dataset.get("truncation") not in NOT_CUT
    row_length = dataset.get("seq_length") if is_cut else None  # else it is the length of padding
    if packed_length:
        if row_length and row_length <= packed_length:
            overlength = "truncate"
        elif packed.get("drop_long_samples", True):
            overlength = "drop"
        else:
            overlength = "error"
        recipe |= {"packing": True, "max_length": packed_length, "overlength": overlength}
    elif row_length:
        recipe["max_length"] = row_length
    elif conversion.images is not None:
        _adapt_image_lengths(settings, conversion)
    if packed_length and row_length and row_length < packed_length:
        note = "a row is cut to it before it is packed there, to max_length here"
        conversion.add_difference("dataset.seq_length", row_length, note)


# default_collate_fn of Automodel's components/datasets/vlm/collate_fns.py
CUT_IN_BATCHES = "a longer row with images is cut there, unless its function drops it; dropped here"


def _adapt_image_lengths(settings: ToolFile, conversion: Conversion) -> None:
    """Takes over the length of rows with images, as they are tokenized before or in a batch."""
    packed = read_section(settings, "packed_sequence")
    length = packed.get("max_length") or packed.get("pack_size")
    collated = read_section(read_section(settings, "dataloader"), "collate_fn")
    if not length and collated.get("max_length"):
        length = collated["max_length"]
        if not collated.get("drop_overlong"):
            conversion.add_difference("dataloader.collate_fn.max_length", length, CUT_IN_BATCHES)
    if length:
        conversion.recipe |= {"max_length": length, "overlength": "drop"}
