"""Keys and layers that several tools name alike, and what is said of each of these tools."""

import re

from finetune.convert.counterparts import ToolFile

OF_PAIRS = ("rl", "reward_model")  # keys of Axolotl's trainers that average pairs, not labels
IN_ORDER = "rows are trained on in their order there, shuffled with the seed here"
MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
# for which Axolotl casts the embedding and the head to 16 bits (attn_needs_dtype_cast)
SWITCHES_IN_16_BITS = ("xformers_attention", "sage_attention", "flex_attention", "flash_attention")
# labels of a packed row are shifted as those of one text: V2BatchSamplerDataCollatorForSeq2Seq of
# Axolotl, PackedSupervisedDatasetProcessor of LLaMA-Factory
FIRST_TRAINED = (
    "packing: the first token of a packed document is trained too there, after the end of the one "
    "before it"
)
MICRO_BATCHES_ALIKE = (
    "loss: the mean of each micro-batch over its labels counts alike there; here it is the mean "
    "over those of the whole step"
)
LIGERS_LOSS = "liger_fused_linear_cross_entropy"
# lce_forward of Liger's transformers/model/falcon_h1.py
UNMULTIPLIED_BY_LIGER = ("falcon_h1",)
UNMULTIPLIED = (
    "Liger's forward gives scores without lm_head_multiplier of the config there; here they are "
    "multiplied by it"
)
# LigerRopeFunction of Liger's ops/rope.py, which takes no narrower cos and sin
ROTATED_IN_PART = re.compile(r"phi-?4-mini(?!-flash)")
ROTATED_WHOLE = (
    "Liger's kernel turns whole heads by position there, and by other angles than the model's "
    "config says, whose partial_rotary_factor is 0.75; here as it says"
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
# greedy_knapsack of LLaMA-Factory, by its data/loader.py, and pack_dataset of TRL's data_utils.py,
# by datasets' map
PACKED_AT_A_TIME = (
    "packing: {} rows at a time{} are packed there; here all together: fewer packed rows, and "
    "fewer steps"
)
# of datasets' map and ms-swift's PackingDataset, whose processes have a share of the rows each
OF_SHARES = ", of each of {} shares by itself ({}),"
# drop_last of core/utils/batching.py of LLaMA-Factory's v1, and _steps_per_epoch of torchtune
WHOLE_STEPS = "epochs: rows that fill no step are left out there; here they are a last, short step"
# of torchtune, whose parameters are in 16 bits and shards without another reduce_dtype, and
# grad_reduce_in_fp32 of mcore_adapter's trainer.py
SUMMED_IN_16_BITS = (
    "gradients: added over the ranks, and over a step's micro-batches, in 16 bits there; in "
    "float32 here"
)
NORMS_IN_FP32 = "norms are in float32 there; all weights are in bfloat16 here"


def describe_shares(settings: ToolFile, key: str) -> str:
    """Says of how many shares of the rows each is packed by itself, by the key of processes.

    >>> describe_shares({"dataset_num_proc": 4}, "dataset_num_proc")
    ', of each of 4 shares by itself (dataset_num_proc),'
    >>> describe_shares({"dataset_num_proc": 4, "streaming": True}, "dataset_num_proc")
    ''
    """
    count = settings.get(key)
    is_streamed = settings.get("streaming") or settings.get("dataset_streaming")
    is_shared = isinstance(count, int) and count > 1 and not is_streamed
    return OF_SHARES.format(count, key) if is_shared else ""
