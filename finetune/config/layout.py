"""The layout of a run as one value: what an Accelerate file says, interpreted. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from math import lcm, prod
from typing import Any, Literal

from finetune.config.schema import Lora, Model, PipelineSchedule
from finetune.constants import COMPUTE_DTYPE, Names, Shape
from finetune.units import counted

Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

FP8_MULTIPLE = 16  # tensor cores take so many 8-bit numbers at a time


@dataclass(frozen=True, slots=True)
class Fp8:
    """How linear layers multiply in 8-bit floats, in torchao's terms.

    All else is computed in bf16.
    """

    recipe_name: Fp8Recipe = "tensorwise"
    enable_fsdp_float8_all_gather: bool = True  # where it applies: see `gathers_fp8`
    pad_inner_dim: bool = True

    @property
    def multiplies_weight_gradients(self) -> bool:
        """Whether a weight's gradient is a product in FP8 too."""
        return self.recipe_name != "rowwise_with_gw_hp"


def is_multiplied_in_fp8(shape: Shape) -> bool:
    """Whether a GPU multiplies by a weight of `shape` [out, in] in FP8; tensor cores take 16
    numbers at a time.
    """
    return all(size % FP8_MULTIPLE == 0 for size in shape)


def gathers_fp8(sharding: "Sharding") -> bool:
    """Whether FSDP gathers these layers' weights in 8 bits: torchao does it for FSDP2 and one scale
    a weight.

    Not under CPU offload, where a weight's scale, computed ahead, does not survive the copy to the
    device.
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

# Keys of an Accelerate file's mesh for ranks that share rows -> what they are here, and what those
# ranks divide.
DIVISIONS: Mapping[str, tuple[str, str]] = {
    "cp_size": ("sequence_parallel_size", "the tokens of a row"),
    "tp_size": ("tensor_parallel_size", "the matrices of each layer"),
}
UNDIVIDED: Mapping[str, Any] = {name: 1 for name, _ in DIVISIONS.values()}
CHUNKS_PER_RANK: Mapping[PipelineSchedule, int] = {"1f1b": 1, "interleaved_1f1b": 2}
UNTRAINED_STAGE = (
    "pipeline_parallel_size: {}: a rank would hold no parameter that is trained; choose a smaller "
    "size, or train more layers"
)
GROUP_KEYS = ("tp_size", "cp_size", "sp_size")
DEFAULT_MIN_NUM_PARAMS = 100_000_000
PLAIN_LAUNCH = "a plain launch (no Accelerate file)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How parameters, gradients and optimizer state are distributed, and the precision of the
    computation.

    Read from an Accelerate YAML, or from the environment that the launcher made of one; `source`
    names it.
    """

    layout: Layout
    # under fp8 bf16: that of all that is not multiplied in FP8
    mixed_precision: MixedPrecision = "no"
    fp8: Fp8 | None = None
    # under HYBRID_SHARD: shards in groups of shard_size, replicas of those
    strategy: Strategy = "FULL_SHARD"
    replicate_size: int | None = None  # ranks; None: FSDP1 takes the nodes
    shard_size: int | None = None  # ranks; None: FSDP1 takes the ranks of a node
    sequence_parallel_size: int = 1  # ranks that divide the tokens of a row between them
    tensor_parallel_size: int = 1  # ranks that divide the matrices of a layer between them
    # ranks that divide the experts of a layer between them; a recipe's key
    expert_parallel_size: int = 1
    # groups of ranks that have the layers one after another; a recipe's key
    pipeline_parallel_size: int = 1
    pipeline_schedule: PipelineSchedule = "1f1b"  # a recipe's key
    wrapping: Wrapping = "TRANSFORMER_BASED_WRAP"
    wrap_classes: Names = ()  # empty: inferred from the model
    min_num_params: int = DEFAULT_MIN_NUM_PARAMS  # parameters of a unit, where wrapping is by size
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    forward_prefetch: bool = False  # FSDP1 only
    use_cpu: bool = False
    num_machines: int = 1
    source: str = PLAIN_LAUNCH
    # a line for each DeepSpeed setting: what does the same here, if anything
    translated: tuple[str, ...] = ()
    # (a recipe's key, the number that a DeepSpeed file gives for it)
    asked: tuple[tuple[str, float], ...] = ()
    # Keys of the file, without prefixes -> their places.
    places: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def place_of(self, key: str) -> str:
        """Where `key` of the Accelerate file stands: the file and its line, or the source alone."""
        return self.places.get(key.removeprefix("fsdp_"), self.source)

    @property
    def is_fsdp(self) -> bool:
        return self.layout in ("fsdp1", "fsdp2")

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that train on the same rows: they share their tokens, the layers' matrices, or the
        layers.
        """
        return self.ranks_per_row * self.pipeline_parallel_size

    @property
    def ranks_per_row(self) -> int:
        """Ranks that have the same layers and train on the same rows."""
        return self.sequence_parallel_size * self.tensor_parallel_size

    @property
    def pipeline_chunks(self) -> int:
        """Into how many groups of neighboring layers the model is cut."""
        stages = self.pipeline_parallel_size
        if stages == 1:
            return 1
        return stages * CHUNKS_PER_RANK[self.pipeline_schedule]

    @property
    def group_sizes(self) -> dict[str, int]:
        """The sizes of DIVISIONS, by the Accelerate file's keys."""
        return {key: getattr(self, name) for key, (name, _) in DIVISIONS.items()}

    @property
    def divides_matrices(self) -> bool:
        return self.tensor_parallel_size > 1

    def tensor_group_of(self, rank: int) -> int:
        """Returns the tensor parallel group of a rank, whose ranks compute the same activations and
        losses.

        Without tensor parallelism it is the rank itself. For the number of ranks it is the number
        of groups.
        """
        return rank // self.tensor_parallel_size

    def count_replica_ranks(self, ranks: int, ranks_per_node: int) -> int:
        """Counts the `ranks` that share one replica of the model: all, one, or under hybrid
        sharding a group.
        """
        if self.strategy == "HYBRID_SHARD":
            replicas = self.replicate_size if self.layout == "fsdp2" else None
            if replicas:
                return ranks // replicas
            return min(ranks, ranks_per_node)
        if self.is_fsdp and self.strategy != "NO_SHARD":
            return ranks
        return 1

    def describe_sequences(self, ranks: int) -> str | None:
        """Says in a line how the tokens of a row are sharded; None where they are not."""
        size = self.sequence_parallel_size
        if size == 1:
            return None
        return (
            f"sequence parallelism (for cp_size and sp_size alike): {size} ranks divide the tokens "
            f"of a row; rows go to {counted(ranks // self.ranks_per_batch, 'group')}"
        )

    @property
    def mesh_sizes(self) -> dict[str, int] | None:
        """The mesh's dimensions from the outermost, by the Accelerate file's keys; None without
        such a mesh.
        """
        sizes = {
            "dp_replicate_size": self.replicate_size or 1,
            "dp_shard_size": self.shard_size or 1,
            "sp_size": self.sequence_parallel_size,
            "tp_size": self.tensor_parallel_size,
        }
        is_divided = self.layout == "fsdp2" and (
            self.shard_size is not None or prod(sizes.values()) > 1
        )
        return sizes if is_divided else None

    @property
    def smallest_world(self) -> int:
        """The number of ranks that the layout's replicas and groups need at least; it works on
        multiples of it.
        """
        replicas = (self.mesh_sizes or {}).get("dp_replicate_size", 1)
        return (
            replicas
            * self.pipeline_parallel_size
            * lcm(self.ranks_per_row, self.expert_parallel_size)
        )


def divides_heads(heads: int, ranks: int) -> bool:
    """Whether ranks that share a row trade its tokens for heads in attention; else they gather the
    row's keys.
    """
    return heads % ranks == 0


PipelineOrder = Literal["1f1b", "gpipe", "interleaved", "looped_bfs"]


def choose_order(micro_batches: int, stages: int, chunks: int) -> PipelineOrder:
    """Chooses the order of a rank's forwards and backwards in a pipeline.

    1F1B needs a micro-batch for each stage. torch interleaves micro-batches in rounds of equal
    numbers. Where that cannot be, all forwards come before the backwards.

    Args:
        micro_batches: Of a step.
        stages: The ranks of the pipeline.
        chunks: The groups of layers on all ranks.
    """
    if chunks == stages:
        return "1f1b" if micro_batches >= stages else "gpipe"
    is_even = micro_batches % count_rounds(micro_batches, stages) == 0
    return "interleaved" if is_even else "looped_bfs"


def count_rounds(micro_batches: int, stages: int) -> int:
    """Counts the rounds in which torch interleaves micro-batches: of `stages` or more each."""
    return max(1, micro_batches // stages)


def split_layers(costs: Sequence[float], parts: int) -> list[range]:
    """Cuts layers into groups of neighbors, so that the largest sum of costs in a group is as small
    as it can be.

    >>> split_layers([1, 1, 1, 1, 4], 2)
    [range(0, 4), range(4, 5)]

    Raises:
        ValueError: There are fewer layers than parts.
    """
    if len(costs) < parts:
        raise ValueError(f"{len(costs)} layers cannot be cut into {parts} parts")
    sums = [0.0, *accumulate(costs)]
    # The smallest possible maximum for the first `end` layers in so many parts, and where its last
    # part begins.
    best: list[list[tuple[float, int]]] = [[(total, 0) for total in sums]]
    for used in range(1, parts):
        before = best[-1]
        rows = [(float("inf"), 0)] * (used + 1)
        for end in range(used + 1, len(sums)):
            rows.append(
                min(
                    (max(before[start][0], sums[end] - sums[start]), start)
                    for start in range(used, end)
                )
            )
        best.append(rows)
    ranges = []
    end = len(costs)
    for row in reversed(best):
        ranges.append(range(row[end][1], end))
        end = row[end][1]
    return ranges[::-1]


def shard_experts(shape: Shape, size: int, shards: int) -> Shape | None:
    """Returns the shape that one rank holds of a parameter [experts, rows, ...] under expert
    parallelism.

    `size` ranks share the experts, and FSDP shards each over `shards` ranks. Whole experts where
    they divide evenly, else some rows of each; None where neither does.

    >>> (
    ...     shard_experts((8, 64, 32), 2, 2),
    ...     shard_experts((8, 64, 32), 2, 8),
    ...     shard_experts((8, 63, 32), 2, 8),
    ... )
    ((2, 64, 32), (4, 8, 32), None)
    """
    own = shape[0] // size
    if own % shards == 0:
        return (own // shards, *shape[1:])
    if shape[1] % shards == 0:
        return (own, shape[1] // shards, *shape[2:])
    return None


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Returns the product of `Sharding.mesh_sizes`, without factors of 1.

    >>> describe_sizes({"dp_replicate_size": 1, "dp_shard_size": 1, "sp_size": 2, "tp_size": 2})
    'dp_shard_size 1 x cp_size (or sp_size) 2 x tp_size 2'
    """
    # Either key divides the tokens of a row; which of them the file has is not kept.
    names = {"sp_size": "cp_size (or sp_size)"}
    shown = {
        names.get(key, key): size
        for key, size in sizes.items()
        if size > 1 or key == "dp_shard_size"
    }
    return " x ".join(f"{key} {size}" for key, size in shown.items())


def to_accelerate_config(sharding: Sharding, ranks: int) -> dict[str, Any]:
    """Returns the layout as an Accelerate config, every key filled in: what accelerate.yaml of a
    run holds.
    """
    file: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": {"ddp": "MULTI_GPU", "single": "NO"}.get(sharding.layout, "FSDP"),
        "mixed_precision": sharding.mixed_precision if sharding.fp8 is None else "fp8",
        "num_machines": 1,
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
    # cp_size, since Accelerate itself takes sp_size with DeepSpeed only
    if sharding.mesh_sizes is not None:
        sizes = dict(sharding.mesh_sizes)
        if sharding.replicate_size is None:
            del sizes["dp_replicate_size"]
        prefix = "parallelism_config_"
        file["parallelism_config"] = {
            prefix + key.replace("sp_size", "cp_size"): size for key, size in sizes.items()
        }
    return file


def frozen_dtype(sharding: Sharding, lora: Lora) -> str:
    """Returns the dtype of a frozen base model: that of the computation, for it needs no more
    precision.

    But FSDP1 has one dtype in a unit. DoRA reads its adapters outside their own forward, and a tied
    head is in two modules, so that neither can be a unit of its own: there the base stays in the
    adapters' float32.
    """
    if sharding.layout == "fsdp1" and (lora.use_dora or lora.modules_to_save):
        return "float32"
    return COMPUTE_DTYPE[sharding.mixed_precision]


def compute_dtype(sharding: Sharding, model: Model, lora: Lora) -> str:
    """Returns the dtype of mixed precision, else of trained parameters: float32 for adapters,
    `dtype` for others.
    """
    trained = "float32" if lora.use_peft else model.dtype
    if sharding.mixed_precision == "no":
        return trained
    return COMPUTE_DTYPE[sharding.mixed_precision]
