"""Keys, layers and notes that the files of several tools share.

A comment above a text names the code of the tools whose behavior the text describes.
"""

import re
from collections.abc import Mapping
from typing import Any

from finetune.config.module_names import find_alias
from finetune.config.optimization import OPTIMIZERS
from finetune.convert.counterparts import ToolFile

# keys of an Axolotl file whose trainer averages a loss over pairs, not over labels
OF_PAIRS = ("rl", "reward_model")
# methods whose trainers TRL has in its experimental/
EXPERIMENTAL_METHODS = ("orpo", "simpo")
IN_ORDER = "rows are trained on in their order there, shuffled with the seed here"
MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
# Axolotl's switches of attention that make it cast the embedding and the head to 16 bits
# (attn_needs_dtype_cast)
SWITCHES_IN_16_BITS = ("xformers_attention", "sage_attention", "flex_attention", "flash_attention")
# V2BatchSamplerDataCollatorForSeq2Seq of Axolotl and PackedSupervisedDatasetProcessor of
# LLaMA-Factory: the labels of a packed row are shifted as if it were one text.
FIRST_TRAINED = (
    "packing: the first token of a packed document is trained too there, after the end of the one "
    "before it"
)
MICRO_BATCHES_ALIKE = (
    "loss: the mean of each micro-batch over its labels counts alike there; here it is the mean "
    "over those of the whole step"
)
LIGERS_LOSS = "liger_fused_linear_cross_entropy"
# families whose scores Liger does not multiply: lce_forward of its transformers/model/falcon_h1.py
UNMULTIPLIED_BY_LIGER = ("falcon_h1",)
UNMULTIPLIED = (
    "Liger's forward gives scores without lm_head_multiplier of the config there; here they are "
    "multiplied by it"
)
# models that rotate a part of each head; LigerRopeFunction of Liger's ops/rope.py takes cos and sin
# of a whole head alone
ROTATED_IN_PART = re.compile(r"phi-?4-mini(?!-flash)")
ROTATED_WHOLE = (
    "Liger's kernel turns whole heads by position there, and by other angles than the model's "
    "config says, whose partial_rotary_factor is 0.75; here as it says"
)
ROTATION_ROUNDED = (
    "positions are rotated by frequencies that are rounded to bfloat16 there, in float32 here"
)
# load_best_model_at_end of Axolotl's core/builders/causal.py
BEST_AT_END = (
    "of the checkpoints that are saved the best one is kept there, of all evaluations here"
)
# pack_dataset of Automodel's datasets/llm/packed_sequence.py, torchtune's PackedDataset, and
# allocate_sequentially of Axolotl's utils/samplers/multipack.py
PACKED_IN_ORDER = (
    "packing: rows are packed as they come there, a new packed row for each that does not fit; "
    "here each where it fits best: fewer packed rows, with more in them, and fewer steps"
)
# greedy_knapsack of LLaMA-Factory, and pack_dataset of TRL's data_utils.py under datasets' map: a
# call packs one batch of rows. {}: number of rows, and the text of `describe_shares`.
PACKED_AT_A_TIME = (
    "packing: {} rows at a time{} are packed there; here all together: fewer packed rows, and "
    "fewer steps"
)
# Each process of datasets' map, or of ms-swift's PackingDataset, packs a share of the rows. {}:
# number of processes, and the key that sets it.
OF_SHARES = ", of each of {} shares by itself ({}),"
# drop_last of core/utils/batching.py of LLaMA-Factory's v1, and _steps_per_epoch of torchtune
WHOLE_STEPS = "epochs: rows that fill no step are left out there; here they are a last, short step"
# torchtune's parameters are in 16 bits, and it shards them without a reduce_dtype of its own;
# grad_reduce_in_fp32 of mcore_adapter's trainer.py
SUMMED_IN_16_BITS = (
    "gradients: added over the ranks, and over a step's micro-batches, in 16 bits there; in "
    "float32 here"
)
NORMS_IN_FP32 = "norms are in float32 there; all weights are in bfloat16 here"

# find_all_linears of ms-swift's utils/transformers_utils.py, and find_all_linear_modules of
# LLaMA-Factory's model/model_utils/misc.py, on the classes of transformers 4
EXPERTS_UNDER_4 = (
    "under transformers 4, which runs there too, experts and routers are linear layers, which get "
    "adapters; under 5, and here, they are none"
)


def has_linear_experts(family: str) -> bool:
    """Whether experts of a family's mixtures are linear layers in transformers 4."""
    return find_alias(family) in ("qwen2_moe", "mixtral")


def describe_shares(settings: ToolFile, key: str) -> str:
    """Describes the shares of the rows that are packed apart, for a remark; "" if all are packed
    together.

    `key`: the tool's number of processes, each of which packs one share.

    >>> describe_shares({"dataset_num_proc": 4}, "dataset_num_proc")
    ', of each of 4 shares by itself (dataset_num_proc),'
    >>> describe_shares({"dataset_num_proc": 4, "streaming": True}, "dataset_num_proc")
    ''
    """
    count = settings.get(key)
    is_streamed = settings.get("streaming") or settings.get("dataset_streaming")
    is_shared = isinstance(count, int) and count > 1 and not is_streamed
    return OF_SHARES.format(count, key) if is_shared else ""


# Tool -> the key that may ask for Moonlight's Muon: third_party/muon of LLaMA-Factory, and
# optimizers/muon.py of ms-swift
MUON_KEYS = {"LLaMA-Factory": "use_muon", "ms-swift": "optimizer"}


def find_muon_key(tool: str, settings: ToolFile, recipe: Mapping[str, Any]) -> str | None:
    """Returns the key by which a file asks for Moonlight's Muon; None if it does not.

    `recipe` has its optimizer already.
    """
    key = MUON_KEYS.get(tool, "")
    facts = OPTIMIZERS.get(str(recipe.get("optim")))
    is_of_matrices = facts is not None and facts.count_matrix
    return key if settings.get(key) and is_of_matrices else None
