"""The layout of a run as one value, `Sharding`: the checked content of an Accelerate file.

Torch-free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from math import lcm, prod
from typing import Any, Literal

from finetune.config.schema import Lora, Model, PipelineSchedule
from finetune.constants import COMPUTE_DTYPE, Names, Shape
from finetune.units import counted

Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

FP8_MULTIPLE = 16  # numbers in 8 bits that tensor cores take at a time


@dataclass(frozen=True, slots=True)
class Fp8:
    """How linear layers multiply in 8-bit floats, by torchao's keys.

    Everything else is computed in bf16.
    """

    recipe_name: Fp8Recipe = "tensorwise"
    enable_fsdp_float8_all_gather: bool = True  # has an effect only if `gathers_fp8`
    pad_inner_dim: bool = True

    @property
    def multiplies_weight_gradients(self) -> bool:
        """Whether the gradients of weights are computed in FP8 too."""
        return self.recipe_name != "rowwise_with_gw_hp"


def is_multiplied_in_fp8(shape: Shape) -> bool:
    """Whether a GPU multiplies by a weight of `shape` [out, in] in FP8.

    It does if both sizes are multiples of FP8_MULTIPLE.
    """
    return all(size % FP8_MULTIPLE == 0 for size in shape)


def gathers_fp8(sharding: "Sharding") -> bool:
    """Whether FSDP gathers the weights of FP8 layers in 8 bits.

    torchao does so for FSDP2 and one scale for each weight (tensorwise). It is off under CPU
    offload: the scale of a weight is computed ahead, and is lost in the copy to the device.
    """
    fp8 = sharding.fp8
    return (
        fp8 is not None
        and fp8.enable_fsdp_float8_all_gather
        and fp8.recipe_name == "tensorwise"
        and sharding.layout == "fsdp2"
        and not sharding.cpu_offload
    )


Layout = Literal["fsdp2", "fsdp1", "ddp", "single"]
Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
Wrapping = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
MixedPrecision = Literal["no", "fp16", "bf16"]

# Key of parallelism_config for ranks that share rows -> (the field of `Sharding`, what those ranks
# divide between them, in messages).
DIVISIONS: Mapping[str, tuple[str, str]] = {
    "cp_size": ("sequence_parallel_size", "the tokens of a row"),
    "tp_size": ("tensor_parallel_size", "the matrices of each layer"),
}
# The same fields for a layout whose ranks share no rows.
UNDIVIDED: Mapping[str, Any] = {name: 1 for name, _ in DIVISIONS.values()}
# Groups of neighboring layers on each rank of a pipeline.
CHUNKS_PER_RANK: Mapping[PipelineSchedule, int] = {"1f1b": 1, "interleaved_1f1b": 2}
UNTRAINED_STAGE = (
    "pipeline_parallel_size: {}: a rank would hold no parameter that is trained; choose a smaller "
    "size, or train more layers"
)
# All keys of parallelism_config for ranks that share rows.
GROUP_KEYS = ("tp_size", "cp_size", "sp_size")
DEFAULT_MIN_NUM_PARAMS = 100_000_000
PLAIN_LAUNCH = "a plain launch (no Accelerate file)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How parameters, gradients and optimizer state are distributed, and in which precision the
    model computes.

    It is read from an Accelerate file or from the launcher's environment; `source` names which.
    """

    layout: Layout
    # with `fp8` it is bf16, for everything that is not multiplied in FP8
    mixed_precision: MixedPrecision = "no"
    fp8: Fp8 | None = None  # None: nothing is multiplied in FP8
    # HYBRID_SHARD: the model is sharded in groups of `shard_size` ranks, and each group is a
    # replica
    strategy: Strategy = "FULL_SHARD"
    replicate_size: int | None = None  # replicas; None under FSDP1: as many as nodes
    shard_size: int | None = None  # ranks; None under FSDP1: the ranks of a node
    sequence_parallel_size: int = 1  # ranks that divide the tokens of a row between them
    tensor_parallel_size: int = 1  # ranks that divide the matrices of a layer between them
    # ranks that divide the experts of a layer between them (key of the recipe)
    expert_parallel_size: int = 1
    pipeline_parallel_size: int = 1  # stages of the pipeline (key of the recipe)
    pipeline_schedule: PipelineSchedule = "1f1b"  # key of the recipe
    wrapping: Wrapping = "TRANSFORMER_BASED_WRAP"
    wrap_classes: Names = ()  # the layer classes that FSDP wraps; empty: inferred from the model
    min_num_params: int = DEFAULT_MIN_NUM_PARAMS  # parameters of a unit under SIZE_BASED_WRAP
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    forward_prefetch: bool = False  # FSDP1 only
    use_cpu: bool = False
    num_machines: int = 1
    source: str = PLAIN_LAUNCH
    # lines for the log: what each DeepSpeed setting was translated into, and what has no effect
    translated: tuple[str, ...] = ()
    # (a recipe's key, the number that a DeepSpeed file gives for it)
    asked: tuple[tuple[str, float], ...] = ()
    # key of the Accelerate file, without its prefix -> FILE:LINE
    places: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def place_of(self, key: str) -> str:
        """Returns FILE:LINE of a key of the Accelerate file, or the source if it is not known."""
        return self.places.get(key.removeprefix("fsdp_"), self.source)

    @property
    def is_fsdp(self) -> bool:
        return self.layout in ("fsdp1", "fsdp2")

    @property
    def ranks_per_batch(self) -> int:
        """Number of ranks that train on the same rows.

        They divide the rows' tokens, the layers' matrices or the layers between them.
        """
        return self.ranks_per_row * self.pipeline_parallel_size

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks of one pipeline stage that train on the same rows."""
        return self.sequence_parallel_size * self.tensor_parallel_size

    @property
    def pipeline_chunks(self) -> int:
        """Number of groups of neighboring layers that the pipeline cuts the model into; else 1."""
        stages = self.pipeline_parallel_size
        if stages == 1:
            return 1
        return stages * CHUNKS_PER_RANK[self.pipeline_schedule]

    @property
    def group_sizes(self) -> dict[str, int]:
        """The sizes of the groups in DIVISIONS: the Accelerate file's key -> number of ranks."""
        return {key: getattr(self, name) for key, (name, _) in DIVISIONS.items()}

    @property
    def divides_matrices(self) -> bool:
        return self.tensor_parallel_size > 1

    def tensor_group_of(self, rank: int) -> int:
        """Returns the number of the tensor parallel group of a rank.

        The ranks of a group compute the same activations and losses. Without tensor parallelism
        each rank is a group. Given the number of ranks, the result is the number of groups.
        """
        return rank // self.tensor_parallel_size

    def count_replica_ranks(self, ranks: int, ranks_per_node: int) -> int:
        """Counts the ranks, out of `ranks`, over which one replica of the model is sharded.

        It is all of them, a group under hybrid sharding, and 1 without sharding.
        """
        if self.strategy == "HYBRID_SHARD":
            if self.layout == "fsdp2" and self.replicate_size:
                return ranks // self.replicate_size
            return min(ranks, ranks_per_node)
        if self.is_fsdp and self.strategy != "NO_SHARD":
            return ranks
        return 1

    def describe_sequences(self, ranks: int) -> str | None:
        """Says in one line how the tokens of a row are sharded; None if they are not."""
        size = self.sequence_parallel_size
        if size == 1:
            return None
        return (
            f"sequence parallelism (for cp_size and sp_size alike): {size} ranks divide the tokens "
            f"of a row; rows go to {counted(ranks // self.ranks_per_batch, 'group')}"
        )

    @property
    def mesh_sizes(self) -> dict[str, int] | None:
        """The mesh's dimensions from the outermost: the Accelerate file's key -> number of ranks.

        None if the layout has no mesh: it is not FSDP2, or its file sets no size above 1 and no
        dp_shard_size.
        """
        sizes = {
            "dp_replicate_size": self.replicate_size or 1,
            "dp_shard_size": self.shard_size or 1,
            "sp_size": self.sequence_parallel_size,
            "tp_size": self.tensor_parallel_size,
        }
        has_mesh = self.layout == "fsdp2" and (
            self.shard_size is not None or prod(sizes.values()) > 1
        )
        return sizes if has_mesh else None

    @property
    def smallest_world(self) -> int:
        """The smallest number of ranks for the layout's replicas and groups.

        The layout works on multiples of it.
        """
        replicas = (self.mesh_sizes or {}).get("dp_replicate_size", 1)
        return (
            replicas
            * self.pipeline_parallel_size
            * lcm(self.ranks_per_row, self.expert_parallel_size)
        )


def divides_heads(heads: int, ranks: int) -> bool:
    """Whether `heads` divide evenly over `ranks` that share a row.

    If so, the ranks trade the row's tokens for heads in attention. Otherwise they gather its keys
    and values.
    """
    return heads % ranks == 0


PipelineOrder = Literal["1f1b", "gpipe", "interleaved", "looped_bfs"]


def choose_order(micro_batches: int, stages: int, chunks: int) -> PipelineOrder:
    """Chooses the order of a rank's forwards and backwards in a pipeline.

    With one chunk a rank it is 1f1b, which needs a micro-batch for each stage. With several it is
    interleaved: torch interleaves micro-batches in rounds, all of the same number. Where these are
    impossible, all forwards come before all backwards: gpipe, or looped_bfs with several chunks.

    Args:
        micro_batches: Micro-batches of a step.
        stages: Ranks of the pipeline.
        chunks: Groups of layers on all ranks together.
    """
    if chunks == stages:
        return "1f1b" if micro_batches >= stages else "gpipe"
    is_even = micro_batches % count_rounds(micro_batches, stages) == 0
    return "interleaved" if is_even else "looped_bfs"


def count_rounds(micro_batches: int, stages: int) -> int:
    """Counts the rounds in which torch interleaves the micro-batches of a step.

    A round has `stages` micro-batches or more; if the step has fewer, it is one round.
    """
    return max(1, micro_batches // stages)


def split_layers(costs: Sequence[float], parts: int) -> list[range]:
    """Cuts layers into `parts` groups of neighbors so that the costliest group costs least.

    The groups are the chunks of a pipeline: its stages, times the chunks of each rank.

    `costs`: the cost of each layer, in any unit, such as elements of its weight matrices.

    >>> split_layers([1, 1, 1, 1, 4], 2)
    [range(0, 4), range(4, 5)]

    Raises:
        ValueError: There are fewer layers than parts.
    """
    if len(costs) < parts:
        raise ValueError(f"{len(costs)} layers cannot be cut into {parts} parts")
    sums = [0.0, *accumulate(costs)]
    # best[k][end] is the best cut of the first `end` layers into k + 1 groups: (the cost of its
    # costliest group, the layer at which its last group starts).
    best: list[list[tuple[float, int]]] = [[(total, 0) for total in sums]]
    for groups_before in range(1, parts):
        cuts_before = best[-1]
        # With fewer layers than groups there is no cut.
        cuts = [(float("inf"), 0)] * (groups_before + 1)
        for end in range(groups_before + 1, len(sums)):
            cuts.append(
                min(
                    (max(cuts_before[start][0], sums[end] - sums[start]), start)
                    for start in range(groups_before, end)
                )
            )
        best.append(cuts)
    ranges = []
    end = len(costs)
    for cuts in reversed(best):
        _, start = cuts[end]
        ranges.append(range(start, end))
        end = start
    return ranges[::-1]


def shard_experts(shape: Shape, size: int, shards: int) -> Shape | None:
    """Returns the shape of one rank's shard of the experts' parameter under expert parallelism.

    FSDP shards whole experts if they divide evenly, otherwise rows of each expert. None: neither
    divides evenly.

    Args:
        shape: The parameter's shape [experts, rows, ...].
        size: Ranks that divide the experts between them.
        shards: Ranks over which FSDP shards the experts of one such rank.

    >>> (
    ...     shard_experts((8, 64, 32), 2, 2),
    ...     shard_experts((8, 64, 32), 2, 8),
    ...     shard_experts((8, 63, 32), 2, 8),
    ... )
    ((2, 64, 32), (4, 8, 32), None)
    """
    local_experts = shape[0] // size
    if local_experts % shards == 0:
        return (local_experts // shards, *shape[1:])
    rows = shape[1]
    if rows % shards == 0:
        return (local_experts, rows // shards, *shape[2:])
    return None


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Writes `Sharding.mesh_sizes` as a product, without factors of 1 except dp_shard_size.

    >>> describe_sizes({"dp_replicate_size": 1, "dp_shard_size": 1, "sp_size": 2, "tp_size": 2})
    'dp_shard_size 1 x cp_size (or sp_size) 2 x tp_size 2'
    """
    # Either key divides the tokens of a row; `Sharding` does not keep which one the file has.
    names = {"sp_size": "cp_size (or sp_size)"}
    return " x ".join(
        f"{names.get(key, key)} {size}"
        for key, size in sizes.items()
        if size > 1 or key == "dp_shard_size"
    )


def to_accelerate_config(sharding: Sharding, ranks: int, machines: int = 1) -> dict[str, Any]:
    """Returns the layout as an Accelerate config with every key filled in.

    It is the content of accelerate.yaml in a run's folder.

    Args:
        sharding: The layout.
        ranks: The ranks of the run, on all machines.
        machines: The machines that share the ranks.
    """
    file: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": {"ddp": "MULTI_GPU", "single": "NO"}.get(sharding.layout, "FSDP"),
        "mixed_precision": sharding.mixed_precision if sharding.fp8 is None else "fp8",
        "num_machines": machines,
        "num_processes": ranks,
        "use_cpu": sharding.use_cpu,
    }
    if sharding.fp8 is not None:
        file["fp8_config"] = {"backend": "AO"} | asdict(sharding.fp8)
    if not sharding.is_fsdp:
        return file | {
            "fsdp_config": {"fsdp_activation_checkpointing": sharding.activation_checkpointing}
        }
    fsdp: dict[str, Any] = {
        "fsdp_version": 2 if sharding.layout == "fsdp2" else 1,
        "fsdp_auto_wrap_policy": sharding.wrapping,
        "fsdp_activation_checkpointing": sharding.activation_checkpointing,
        "fsdp_offload_params": sharding.cpu_offload,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if sharding.wrap_classes:
        fsdp["fsdp_transformer_layer_cls_to_wrap"] = ",".join(sharding.wrap_classes)
    if sharding.wrapping == "SIZE_BASED_WRAP":
        fsdp["fsdp_min_num_params"] = sharding.min_num_params
    if sharding.layout == "fsdp1":
        fsdp |= {
            "fsdp_sharding_strategy": sharding.strategy,
            "fsdp_forward_prefetch": sharding.forward_prefetch,
        }
    else:
        fsdp["fsdp_reshard_after_forward"] = sharding.strategy != "SHARD_GRAD_OP"
    file["fsdp_config"] = fsdp
    if sharding.mesh_sizes is not None:
        sizes = dict(sharding.mesh_sizes)
        if sharding.replicate_size is None:
            del sizes["dp_replicate_size"]
        prefix = "parallelism_config_"
        # cp_size instead of sp_size, which Accelerate itself takes only with DeepSpeed
        file["parallelism_config"] = {
            prefix + key.replace("sp_size", "cp_size"): size for key, size in sizes.items()
        }
    return file


def find_frozen_dtype(sharding: Sharding, lora: Lora) -> str:
    """Returns the dtype of a frozen base model: the compute dtype, as it needs no more precision.

    Under FSDP1 all parameters of a unit have one dtype. DoRA reads its adapters outside their own
    forward, and a tied head is in two modules, so neither can be a unit by itself: the base then
    has the adapters' float32.
    """
    if sharding.layout == "fsdp1" and (lora.use_dora or lora.modules_to_save):
        return "float32"
    return COMPUTE_DTYPE[sharding.mixed_precision]


def find_compute_dtype(sharding: Sharding, model: Model, lora: Lora) -> str:
    """Returns the dtype in which the model computes: that of mixed precision, if there is any.

    Otherwise it is that of the trained parameters: float32 for adapters, else the recipe's `dtype`.
    """
    trained = "float32" if lora.use_peft else model.dtype
    if sharding.mixed_precision == "no":
        return trained
    return COMPUTE_DTYPE[sharding.mixed_precision]
