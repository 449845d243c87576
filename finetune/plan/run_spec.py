"""What is planned: the model, the recipe, the layout and the ranks; and what that takes of disks
and hosts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from finetune.config.compatibility import find_problems
from finetune.config.families import find_family
from finetune.config.layout import (
    PipelineOrder,
    Sharding,
    choose_order,
    compute_dtype,
    count_rounds,
    gathers_fp8,
    is_multiplied_in_fp8,
    split_layers,
)
from finetune.config.methods import choose_layers
from finetune.config.optimization import count_optimizer_bytes
from finetune.config.quantization import SCHEMES
from finetune.config.rule import Problem
from finetune.config.schema import Model, Quantization, Recipe, compute_global_batch_size
from finetune.constants import FP32, ITEMSIZE, ROUND_TOKENS, ceil_div
from finetune.flops import flop_per_token
from finetune.plan.activations import Computation, offloaded_bytes
from finetune.plan.architecture import Architecture
from finetune.plan.state import (
    Files,
    State,
    StateTensor,
    count_files,
    count_state,
    list_frozen_tensors,
    list_state_tensors,
)

PROCESS_BYTES = 2 << 30  # a Python process with torch and CUDA loaded
# Without CUDA, its heap grown by the products that are compiled for each length of a row. Measured,
# less the planned tensors: 477 MiB for the quickstart, 971 MiB after 200 bf16 steps of up to 4,096
# tokens (benchmarks/speed.py).
CPU_PROCESS_BYTES = 1 << 30
EXPORT_SHARD_BYTES = 5 * 10**9  # finetune export --max-shard-size


@dataclass(frozen=True, kw_only=True)
class TeacherSpec:
    """A frozen model beside the trained one, which learns from it: a teacher, or the reference of a
    method that samples. `quantization`: as its files are stored.
    """

    architecture: Architecture
    quantization: Quantization

    def flop_per_token(self, length: int) -> float:
        """FLOP of the forward of one token in rows of `length`: a third of those of training."""
        architecture = self.architecture
        sizes = {
            "parameters": count_multiplied(architecture),
            "layers": architecture.attending_layers,
            "heads": architecture.heads,
        }
        return flop_per_token(**sizes, head_size=architecture.mean_head_size, length=length) / 3


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run to plan.

    `ranks_per_node` matters to hybrid sharding and to a host's memory; `stage` of a pipeline is the
    one whose memory is planned.
    """

    architecture: Architecture
    recipe: Recipe
    sharding: Sharding
    ranks: int
    ranks_per_node: int = 8
    device: Literal["cuda", "cpu"] = "cuda"
    grouped_attention: bool = True  # see Computation
    teacher: TeacherSpec | None = None
    reward_models: tuple[Architecture, ...] = ()
    stage: int = 0
    base_dtype: str = "bfloat16"  # of the base's files
    images: str | None = None  # the family of the whole model, where rows hold images

    def find_problems(self) -> list[Problem]:
        """Finds what keeps the run from starting, as far as a plan knows, and notes."""
        if self.teacher is None:
            teacher = None
        else:
            teacher = self.teacher.architecture.facts
        return find_problems(
            self.recipe, self.sharding, self.architecture.facts, self.ranks, teacher=teacher
        )

    @cached_property
    def tensors(self) -> tuple[StateTensor, ...]:
        """Every parameter as it is trained, adapters included."""
        return self._list_tensors(self.architecture)

    def _list_tensors(self, architecture: Architecture) -> tuple[StateTensor, ...]:
        recipe = self.recipe
        return list_state_tensors(
            architecture, self.model_keys, recipe.lora, self.sharding, recipe.quantization
        )

    @property
    def model_keys(self) -> Model:
        """The recipe's keys of the model. Where the method embeds, no loss reads the output head,
        which is frozen then unless it is the embedding.
        """
        model = self.recipe.model
        if not self.recipe.method_facts.embeds or self.architecture.tied:
            return model
        head = self.architecture.head_name.removesuffix(".weight")
        return replace(model, frozen_modules=(*model.frozen_modules, head))

    @property
    def scored_outputs(self) -> int:
        """The number of layers whose output the head reads in a step, at most: the last one, and
        those of `exit_layers`.
        """
        if not self.recipe.method_facts.exits:
            return 1
        layers = self.architecture.layers
        return min(len(choose_layers(self.recipe.method.exit_layers, layers)) + 1, layers)

    @property
    def stages(self) -> int:
        """The number of a pipeline's stages; 1 without a pipeline."""
        return self.sharding.pipeline_parallel_size

    @property
    def is_last_stage(self) -> bool:
        """Whether the planned stage has the output head."""
        return self.stage == self.stages - 1

    @cached_property
    def layer_costs(self) -> list[int]:
        """For each layer how many numbers its matrix products read, by which a pipeline is cut. The
        last one includes the output head.
        """
        architecture = self.architecture
        costs = [
            sum(t.numel for t in architecture.layer(index) if len(t.shape) > 1)
            for index in range(architecture.layers)
        ]
        return [*costs[:-1], costs[-1] + architecture.head_rows * architecture.hidden]

    @cached_property
    def own_layers(self) -> list[int]:
        """The layers of the planned stage."""
        chunks = split_layers(self.layer_costs, self.sharding.pipeline_chunks)
        return [layer for chunk in chunks[self.stage :: self.stages] for layer in chunk]

    @cached_property
    def part(self) -> Architecture:
        """The part of the model that one rank holds before FSDP shards it: the layers of its stage,
        and its share of each by tensor parallelism.

        All of it where there is neither.
        """
        architecture = self.divided
        if self.stages == 1:
            return architecture
        own = self.own_layers
        mixture = architecture.mixture and replace(
            architecture.mixture,
            layers=frozenset(
                index for index, layer in enumerate(own) if layer in architecture.mixture.layers
            ),
        )
        return replace(
            architecture,
            layers=len(own),
            mixture=mixture,
            tied=architecture.tied and self.is_last_stage,
        )

    @cached_property
    def divided(self) -> Architecture:
        """The part of the model that one rank of a tensor-parallel group holds; all of it where
        there is none.
        """
        ranks = self.tensor_ranks
        architecture = self.architecture
        if ranks == 1:
            return architecture
        return replace(
            architecture,
            heads=architecture.heads // ranks,
            key_value_heads=architecture.key_value_heads // ranks,
            intermediate=architecture.intermediate // ranks,
            vocabulary=ceil_div(architecture.vocabulary, ranks),
        )

    @cached_property
    def computed(self) -> Architecture:
        """The part of the model that one rank computes: `part`, but for the products that
        transformers' plan gathers.
        """
        architecture = self.architecture
        part = self.part
        if architecture.family.tensor_parallel != "products":
            return part
        all_heads = replace(
            part, heads=architecture.heads, key_value_heads=architecture.key_value_heads
        )
        if architecture.family.fused:
            return replace(all_heads, intermediate=architecture.intermediate)
        return all_heads

    @cached_property
    def part_tensors(self) -> tuple[StateTensor, ...]:
        """Every parameter of `part`."""
        tensors = self._list_tensors(self.divided)
        if self.stages == 1:
            return tensors
        units = {f"layer {layer}": f"layer {index}" for index, layer in enumerate(self.own_layers)}
        if self.stage == 0 or self.part.tied:
            units["embedding"] = "embedding"
        if self.is_last_stage:
            units["tail"] = "tail"
        return tuple(
            replace(tensor, unit=units[tensor.unit]) for tensor in tensors if tensor.unit in units
        )

    @cached_property
    def teacher_tensors(self) -> tuple[StateTensor, ...]:
        """Every parameter of the teacher, frozen in the compute dtype; none where there is no
        teacher.
        """
        if self.teacher is None:
            return ()
        return list_frozen_tensors(
            self.teacher.architecture, ITEMSIZE[self.compute_dtype], self.teacher.quantization
        )

    @cached_property
    def fp8_weights(self) -> Mapping[str, int]:
        """How many numbers each weight has that is multiplied in FP8 (models/fp8.py), by name."""
        if self.sharding.fp8 is None:
            return {}
        linears = [
            tensor
            for layer in range(self.architecture.layers)
            for tensor in self.architecture.linears(layer)
        ]
        return {
            tensor.name: tensor.numel
            for tensor in linears[1:]
            if is_multiplied_in_fp8(tensor.shape)
        }

    @property
    def fp8_gathered(self) -> frozenset[str]:
        """The weights that FSDP gathers as 8-bit numbers."""
        return frozenset(self.fp8_weights if gathers_fp8(self.sharding) else ())

    @property
    def teacher_bytes(self) -> int:
        """Bytes of the teacher's parameters on rank 0."""
        return count_state(self.teacher_tensors, self.sharding, self.shards, optim=None).frozen

    @property
    def reward_bytes(self) -> int:
        """Bytes of the parameters of reward models. Every rank holds all of them on its device."""
        return ITEMSIZE[self.compute_dtype] * sum(
            architecture.parameters for architecture in self.reward_models
        )

    @property
    def shards(self) -> int:
        """The number of ranks that FSDP splits a parameter over, or one rank's part of it under
        tensor parallelism.
        """
        return self.sharding.tensor_group_of(self.state_ranks)

    @property
    def state_ranks(self) -> int:
        """The number of ranks that hold one replica of the model, or of a stage's layers, between
        them.
        """
        return self.sharding.count_replica_ranks(self.ranks // self.stages, self.ranks_per_node)

    @property
    def tensor_ranks(self) -> int:
        """The number of ranks that divide the matrices of a layer between them."""
        return self.sharding.tensor_parallel_size

    def state(self, rank: int = 0) -> State:
        """Bytes of parameters, gradients and optimizer state on `rank`; rank 0 holds the most."""
        state = self.loaded_state(rank)
        files = self.files(rank)
        if files is None:
            return state
        # Parameters in the compute dtype, gradients, and buffers: both on a CPU, on a GPU the one
        # of its own.
        trained = state.trained // ITEMSIZE[self.trained_dtype] * ITEMSIZE[self.compute_dtype]
        buffers = files.buffer * (2 if self.device == "cpu" else 1)
        return replace(state, trained=trained, optimizer=buffers + files.counters)

    def loaded_state(self, rank: int = 0) -> State:
        """The state right after loading, when all of it is in memory."""
        return self._fullest_state if rank == 0 else self._count_state(rank)

    @cached_property
    def _fullest_state(self) -> State:
        return self._count_state(0)

    def _count_state(self, rank: int) -> State:
        return count_state(
            self.part_tensors,
            self.sharding,
            self.shards,
            self.recipe.optimization.optim,
            self.sharding.tensor_group_of(rank),
        )

    def files(self, rank: int = 0) -> Files | None:
        """The file of `rank` with the optimizer's state; None where that is in memory."""
        keys = self.recipe.optimization
        if keys.optim_offload == "none" or self.sharding.layout != "fsdp2":
            return None
        dtypes = self.trained_dtype, self.compute_dtype
        return count_files(
            self.part_tensors, self.shards, keys.optim, *dtypes, self.sharding.tensor_group_of(rank)
        )

    @property
    def trained_numel(self) -> int:
        """Numbers in the trained parameters, over all ranks."""
        return sum(tensor.numel for tensor in self.tensors if tensor.trainable)

    @property
    def trained_dtype(self) -> str:
        """The dtype of the trained parameters: adapters are float32, all others have the recipe's
        `dtype`.
        """
        if self.recipe.lora.use_peft:
            return "float32"
        return self.recipe.model.dtype

    @property
    def compute_dtype(self) -> str:
        """The dtype of mixed precision, or the parameters' dtype if there is none."""
        return compute_dtype(self.sharding, self.recipe.model, self.recipe.lora)

    @property
    def reduced_dtype(self) -> str:
        """The dtype in which gradients are summed over ranks: float32 by FSDP's policy, their own
        under DDP.
        """
        mixed = self.sharding.is_fsdp and self.sharding.mixed_precision != "no"
        return "float32" if mixed else self.trained_dtype

    @property
    def computation(self) -> Computation:
        """How a training forward runs."""
        itemsize = ITEMSIZE[self.compute_dtype]
        return Computation(
            itemsize=itemsize,
            autocast=not self.sharding.is_fsdp and itemsize < 4 and not self.recipe.lora.is_fused,
            checkpoint_every=(
                self.recipe.model.activation_checkpointing_every
                if self.sharding.activation_checkpointing
                else None
            ),
            keeps=self.recipe.model.activation_checkpointing_keeps,
            offloads=self.recipe.model.activation_offload
            and self.sharding.activation_checkpointing,
            lora=self.recipe.lora if self.recipe.lora.use_peft else None,
            document_length=self.recipe.data.max_length,
            cpu=self.device == "cpu",
            compiled=self.recipe.model.torch_compile,
            grouped_attention=self.grouped_attention or self.device == "cpu",
            divides_vocabulary=self.sharding.divides_matrices,
            expert_ranks=self.sharding.expert_parallel_size,
            sequence_ranks=self.sharding.sequence_parallel_size,
            drops_attention=self.drops_attention,
            masks_images=self.images is not None and find_family(self.images).images_see_themselves,
        )

    @property
    def uncounted(self) -> str | None:
        """Why the activations of the model, or of its teacher, cannot be counted; None where they
        are.
        """
        if self.teacher is None:
            models = [self.architecture]
        else:
            models = [self.architecture, self.teacher.architecture]
        traces = [architecture.trace(self.computation) for architecture in models]
        return next(
            (trace.failure for trace in traces if trace is not None and trace.failure), None
        )

    @property
    def drops_attention(self) -> bool:
        """Whether attention has dropout while training: the recipe's, else the model's own."""
        ours = self.recipe.model.attention_dropout
        return (self.architecture.attention_dropout if ours is None else ours) > 0

    @property
    def weighs_documents(self) -> bool:
        """Whether the loss weighs log-probabilities one by one or by document, and does not take
        their sum.
        """
        facts = self.recipe.method_facts
        return facts.documents > 1 or facts.samples or facts.scores

    @property
    def reference(self) -> Literal["adapters off", "stored"] | None:
        """Where the method's reference comes from: the model without its new adapters, or numbers
        computed before.
        """
        lora = self.recipe.lora
        if not self.recipe.method_facts.needs_reference:
            return None
        is_new = (
            lora.use_peft
            and lora.adapter_name_or_path is None
            and self.sharding.pipeline_parallel_size == 1
        )
        if is_new and not lora.modules_to_save:
            return "adapters off"
        return "stored"

    @property
    def data_ranks(self) -> int:
        """The number of ranks, or of groups of ranks, that train on rows of their own."""
        return self.ranks // self.sharding.ranks_per_batch

    @property
    def rows(self) -> int:
        """Rows in a micro-batch on one rank."""
        return self.recipe.batch.per_device_train_batch_size

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank if every row is full; ranks of a sequence share
        them.
        """
        return self.share_tokens(self.rows)

    def share_tokens(self, rows: int) -> int:
        """Tokens that one rank has of `rows` full rows."""
        parts = self.sharding.sequence_parallel_size
        tokens = rows * self.recipe.row_tokens
        if self.recipe.data.packing:
            return ceil_div(tokens, ROUND_TOKENS * parts) * ROUND_TOKENS
        return rows * ceil_div(self.recipe.row_tokens, parts)

    @property
    def global_batch_size(self) -> int:
        """Rows in an optimizer step over all ranks."""
        return compute_global_batch_size(self.recipe.batch, self.data_ranks)

    @property
    def rows_per_step(self) -> int:
        """Rows in an optimizer step over all ranks. Where completions are sampled, each counts as a
        row of its own, which is the most there can be.
        """
        sampled = 1
        if self.recipe.method_facts.samples:
            sampled = self.recipe.rollout.num_generations
        return self.global_batch_size * sampled

    @property
    def tokens_per_step(self) -> int:
        """Tokens in an optimizer step over all ranks if every row is full."""
        return self.rows_per_step * self.recipe.row_tokens

    @property
    def pipeline_order(self) -> PipelineOrder:
        """The order of a rank's forwards and backwards."""
        return choose_order(self.accumulation, self.stages, self.sharding.pipeline_chunks)

    @property
    def micro_batches_in_flight(self) -> float:
        """The micro-batches whose activations a rank keeps at once; a share of one counts where a
        stage has several groups of layers.
        """
        behind = self.stages - self.stage
        if self.pipeline_order == "1f1b":  # one for each stage from its own to the last
            return behind
        if self.pipeline_order != "interleaved":  # all forwards come before the first backward
            return self.accumulation
        # Forwards of groups of layers before the first backward, and one more: torch's own count.
        chunks = self.sharding.pipeline_chunks // self.stages
        of_round = self.accumulation // count_rounds(self.accumulation, self.stages)
        forwards = 2 * (behind - 1) + (chunks - 1) * of_round + 1
        return min(self.accumulation, forwards / chunks)

    @property
    def bubble(self) -> float:
        """The share of a step in which a rank of the pipeline waits for others (Narayanan et al.
        2021, section 2.2).
        """
        waits = self.stages - 1
        chunks = self.sharding.pipeline_chunks // self.stages
        return waits / (waits + chunks * self.accumulation)

    @property
    def imbalance(self) -> float:
        """The operations of the stage that computes the most, divided by the mean of all stages."""
        costs = self.layer_costs
        parts = split_layers(self.layer_costs, self.sharding.pipeline_chunks)
        sums = [0] * self.stages
        for chunk, layers in enumerate(parts):
            sums[chunk % self.stages] += sum(costs[layer] for layer in layers)
        return max(sums) * self.stages / sum(sums)

    @property
    def accumulation(self) -> int:
        """Micro-batches in a step on one rank; the last may contain filler rows."""
        return ceil_div(self.rows_per_step, self.rows * self.data_ranks)


def count_multiplied(architecture: Architecture) -> int:
    """Numbers that multiply a token: of a mixture's experts the chosen ones, and no untied input
    embedding.
    """
    active = architecture.parameters - architecture.idle_parameters
    if architecture.tied:
        return active
    return active - architecture.embedding.numel


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes on the run's disk; `offload` is elsewhere."""

    checkpoint: int  # one of them
    checkpoints_kept: int | None  # None: all
    checkpoints: int  # those kept (one of them where all are), and the one being written
    export: int = 0
    adapter: int = 0
    offload: int = 0  # of one node, in offload_dir while it trains
    # weights for a server that samples: the ranks' shards, what is made of them, and those before
    rollouts: int = 0
    keeps_more: bool = False  # checkpoints, which grow with the unknown number of steps

    @property
    def total(self) -> int:
        return self.checkpoints + self.export + self.adapter + self.rollouts


@dataclass(frozen=True, slots=True)
class Host:
    """Bytes of one node's memory."""

    processes: int  # where ranks compute on the CPU, with all their tensors
    offloaded: int  # parameters, gradients and optimizer state where they are offloaded
    activations: int  # what checkpointed layers keep, where it is offloaded
    saving: int  # the copy of the state that is written while training continues
    export: int  # one output file and one tensor, on the first rank
    buffers: int = 0  # beside a GPU: through which state in files passes

    @property
    def total(self) -> int:
        return (
            self.processes
            + self.offloaded
            + self.activations
            + self.buffers
            + max(self.saving, self.export)
        )


def plan_disk(spec: RunSpec) -> Disk:
    """Counts what a run writes: kept checkpoints, exports, an adapter, state in files, and weights
    for a server.

    An export has the recipe's `export_dtype`, or else the dtype of the base's files.
    """
    trained = [tensor for tensor in spec.tensors if tensor.trainable]
    has_adapters = spec.recipe.lora.use_peft
    keys = spec.recipe.checkpoint
    optim = spec.recipe.optimization.optim
    moments = sum(
        count_optimizer_bytes(optim, t.shape, t.itemsize, name=t.name, on_disk=True)
        for t in trained
    )
    # A full model's checkpoint is complete, also where some is frozen.
    stored = trained if has_adapters else spec.tensors
    weights = sum(t.numel * t.itemsize for t in stored)
    checkpoint = weights + moments
    steps = spec.recipe.optimization.max_steps
    kept = keys.save_total_limit
    if kept is not None:
        kept += keys.keep_best_checkpoint
        if keys.keep_every_steps is not None and steps is not None:
            kept += steps // keys.keep_every_steps
    disk = Disk(
        checkpoint=checkpoint,
        checkpoints_kept=kept,
        checkpoints=checkpoint * ((kept or 1) + 1),
        keeps_more=keys.keep_every_steps is not None and steps is None,
    )
    if keys.export_at_end:
        itemsize = ITEMSIZE[keys.export_dtype or spec.base_dtype]
        disk = replace(disk, export=_exported_bytes(spec, itemsize))
    if has_adapters:
        disk = replace(disk, adapter=weights)
    files = spec.files()
    if files is not None:
        disk = replace(disk, offload=files.size * min(spec.ranks, spec.ranks_per_node))
    if spec.recipe.rollout.vllm_server_base_url is not None:
        exported = ITEMSIZE[spec.compute_dtype] * sum(t.numel for t in stored)
        disk = replace(disk, rollouts=weights + 2 * exported)
    return disk


def _exported_bytes(spec: RunSpec, itemsize: int) -> int:
    """Bytes of the exports in all `export_formats`. GGUF carries nothing over from the base."""
    architecture = replace(spec.architecture, has_critic=False)
    keys = spec.recipe.checkpoint
    aware = spec.recipe.quantization_aware
    unquantized = itemsize * architecture.parameters
    quantized = 0
    if spec.recipe.model.model_config is not None:
        carried = 0
    else:
        carried = itemsize * architecture.carried_parameters
    name = keys.export_quantization or aware.quantization_aware_training
    if name is not None:
        group = None
        if name == aware.quantization_aware_training:
            group = aware.qat_group_size
        weights = sum(
            linear.numel
            for layer in range(architecture.layers)
            for linear in architecture.linears(layer)
        )
        quantized = unquantized - int(
            weights * (itemsize - SCHEMES[name].stored_bytes(itemsize, group))
        )
    sizes = {"compressed-tensors": quantized + carried, "safetensors": unquantized + carried}
    return sum(sizes.get(each, unquantized) for each in keys.export_formats)


def _count_bytes(tensors: Iterable[StateTensor]) -> int:
    return sum(tensor.numel * tensor.itemsize for tensor in tensors)


def plan_host(spec: RunSpec, peak_bytes: int) -> Host:
    """The memory of one node, for all its ranks, each of which has `peak_bytes` on its device."""
    ranks = min(spec.ranks, spec.ranks_per_node)
    share = ranks / (spec.state_ranks * spec.stages)  # of the sharded state, on this node
    files = spec.files()
    on_cpu = spec.device == "cpu"
    trained = [tensor for tensor in spec.tensors if tensor.trainable]
    frozen = _count_bytes([tensor for tensor in spec.tensors if not tensor.trainable])
    state = _count_saved_state(spec, trained)
    process = CPU_PROCESS_BYTES + peak_bytes if on_cpu else PROCESS_BYTES
    offloaded = 0
    if spec.sharding.cpu_offload:
        gradients = _count_bytes(trained)
        teacher = _count_bytes(spec.teacher_tensors)
        offloaded = int((state + frozen + gradients + teacher) * share)
    saving = 0
    if files is None and not on_cpu:
        saved = state if spec.recipe.lora.use_peft else state + frozen
        saving = int(saved * min(share, 1))
    buffers = 0
    if files is not None and not on_cpu:
        buffers = 2 * files.buffer * ranks
    exported = 0
    if spec.recipe.checkpoint.export_at_end:
        shard = min(EXPORT_SHARD_BYTES, FP32 * spec.architecture.parameters)
        exported = shard + FP32 * max(tensor.numel for tensor in spec.tensors)
    return Host(
        processes=ranks * process,
        offloaded=offloaded,
        activations=ranks * offloaded_bytes(spec.part, spec.computation, spec.tokens),
        saving=saving,
        export=exported,
        buffers=buffers,
    )


def _count_saved_state(spec: RunSpec, trained: Sequence[StateTensor]) -> int:
    """Bytes of the copy in memory that a checkpoint takes of `trained` parameters and their
    optimizer's state.

    Where the state is in files, they are the parameters in the compute dtype and the counters of
    steps.
    """
    if spec.files() is not None:
        return sum(t.numel * ITEMSIZE[spec.compute_dtype] + FP32 for t in trained)
    optim = spec.recipe.optimization.optim
    moments = (count_optimizer_bytes(optim, t.shape, t.itemsize, name=t.name) for t in trained)
    return _count_bytes(trained) + sum(moments)
