"""What only several keys of a LLaMA-Factory file together determine."""

from finetune.convert.counterparts import ToolFile
from finetune.convert.factory_v1 import adapt_v1
from finetune.convert.foreign_values import read_number
from finetune.convert.model_names import has_tower, name_model
from finetune.convert.shared import FIRST_TRAINED, MICRO_BATCHES_ALIKE
from finetune.convert.value_conversion import Conversion, convert_names

JOINED = (
    "documents are joined there, cut into blocks of cutoff_len, and attend to those before; each "
    "is apart here"
)
# PackedSupervisedDatasetProcessor of LLaMA-Factory, whose mask has ones alone without neat_packing
NOT_NEAT = (
    "without neat_packing documents in a packed row attend to those before there; each is apart "
    "here"
)
SHARED_CUT = (
    "cutoff_len: {}   (of a longer row its prompt and its answer are both cut there, by share; its "
    "end here)"
)


def adapt_factory(settings: ToolFile, conversion: Conversion) -> None:
    """Sets and reports what several keys of a LLaMA-Factory file ask for together."""
    if settings.get("finetuning_type") == "oft":
        block = read_number("oft_block_size", settings.get("oft_block_size", 32), "32", 0)
        conversion.recipe["oft_block_size"] = int(block)
    asks = settings.get("packing") or settings.get("neat_packing")
    packs = asks and settings.get("stage", "sft") == "sft"
    if packs and settings.get("train_on_prompt"):
        conversion.remarks.append(FIRST_TRAINED)
    if conversion.is_factory_v1:
        adapt_v1(settings, conversion)
    else:
        _adapt_v0(settings, conversion, packs=bool(packs))
    _adapt_factorys_adapters(settings, conversion)


def _adapt_v0(settings: ToolFile, conversion: Conversion, *, packs: bool) -> None:
    """Sets and reports what v1 no longer does."""
    recipe = conversion.recipe
    stage = settings.get("stage")
    _report_loaded_dtype(settings, conversion)
    if stage == "pt" and settings.get("packing", True):
        conversion.add_difference("stage", "pt", JOINED)
    elif stage == "pt":
        recipe["overlength"] = "truncate"
    elif stage != "rm":
        conversion.remarks.append(SHARED_CUT.format(recipe.get("max_length", 2048)))
    reads_images = conversion.images is not None or has_tower(name_model(settings))
    if reads_images and stage in ("pt", "sft"):
        conversion.remarks.append(MICRO_BATCHES_ALIKE)
    if packs and not settings.get("neat_packing"):
        conversion.add_difference("packing", True, NOT_NEAT)


# torch_dtype "auto" of LLaMA-Factory's model/loader.py, and init_adapter of its model/adapter.py
LOADED_IN_16_BITS = (
    "without bf16 and fp16 what is not trained has the dtype of the model's files there, as a rule "
    "16 bits, and is computed in it; all is in float32 here"
)
TRAINED_IN_16_BITS = (
    "without bf16 and fp16 all weights have the dtype of the model's files there, those that BAdam "
    "trains too, and are computed in it; all is in float32 here"
)


def _report_loaded_dtype(settings: ToolFile, conversion: Conversion) -> None:
    """Reports which weights are in 16 bits in a file of LLaMA-Factory that names no precision."""
    if any(map(settings.get, ("bf16", "fp16", "pure_bf16", "deepspeed"))):
        return
    asked = settings.get("bf16")
    if settings.get("use_badam"):
        conversion.add_remark("bf16", asked, TRAINED_IN_16_BITS)
    elif settings.get("finetuning_type", "lora") != "full":
        conversion.add_remark("bf16", asked, LOADED_IN_16_BITS)


# create_ref_model of its train/trainer_utils.py
BASE_IS_REFERENCE = (
    "the reference is the base without this adapter there; here the model before training, of "
    "which it is a part"
)
ALL_BUT_LAST = "all but the last one are merged into the base there; the last is trained further"


def _adapt_factorys_adapters(settings: ToolFile, conversion: Conversion) -> None:
    """Names the adapter that is trained further, and says what else LLaMA-Factory does with it."""
    names = convert_names(settings.get("adapter_name_or_path")) or []
    if len(names) > 1:
        conversion.recipe["adapter_name_or_path"] = names[-1]
        conversion.add_difference(
            "adapter_name_or_path", names, ALL_BUT_LAST, "several adapters at once"
        )
    has_reference = settings.get("stage") in ("dpo", "kto") and not settings.get("ref_model")
    if names and has_reference and settings.get("pref_loss") not in ("orpo", "simpo"):
        conversion.add_difference("adapter_name_or_path", names[-1], BASE_IS_REFERENCE)
