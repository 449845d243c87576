"""The run that is planned: its model, recipe, layout and ranks, and the sizes that they give.

`plan_disk` and `plan_host` count what the run needs on disk and in a node's memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from finetune.config.compatibility import FLASH_PACKAGES, find_problems
from finetune.config.facts import attends_by_mask
from finetune.config.families import find_family
from finetune.config.layout import (
    PipelineOrder,
    Sharding,
    choose_order,
    count_rounds,
    find_compute_dtype,
    gathers_fp8,
    is_multiplied_in_fp8,
    split_layers,
)
from finetune.config.methods import choose_layers
from finetune.config.optimization import count_optimizer_bytes
from finetune.config.quantization import SCHEMES
from finetune.config.rule import Problem
from finetune.config.schema import Model, Quantization, Recipe, compute_global_batch_size
from finetune.constants import (
    FP32,
    ITEMSIZE,
    ROUND_TOKENS,
    STORED_PIECE_BYTES,
    ceil_div,
    stored_token_bytes,
)
from finetune.flops import flop_per_token
from finetune.plan.activations import MASKED, Computation, offloaded_bytes
from finetune.plan.architecture import Architecture
from finetune.plan.state import (
    OptimizerFile,
    State,
    StateTensor,
    count_optimizer_file,
    count_state,
    list_frozen_tensors,
    list_state_tensors,
)

PROCESS_BYTES = 2 << 30  # a Python process with torch and CUDA loaded
# A Python process without CUDA. Its heap grows by the matmuls that are compiled for each length of
# a row. Measured, less the planned tensors: 477 MiB for the quickstart, 971 MiB after 200 bf16
# steps of up to 4,096 tokens (benchmarks/speed.py).
CPU_PROCESS_BYTES = 1 << 30
EXPORT_SHARD_BYTES = 5 * 10**9  # the default of finetune export --max-shard-size
RANKS_PER_NODE = 8  # assumed where the launch does not say


@dataclass(frozen=True, kw_only=True)
class TeacherSpec:
    """A second, frozen model: a teacher, or the reference of a method that samples."""

    architecture: Architecture
    quantization: Quantization  # how the teacher's files are stored

    def flop_per_token(self, length: int) -> float:
        """FLOP of one token's forward in rows of `length` tokens: a third of those of training."""
        architecture = self.architecture
        training = flop_per_token(
            parameters=count_multiplied(architecture),
            layers=architecture.attending_layers,
            heads=architecture.heads,
            head_size=architecture.mean_head_size,
            length=length,
        )
        return training / 3


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run to plan."""

    architecture: Architecture
    recipe: Recipe
    sharding: Sharding
    ranks: int
    ranks_per_node: int = RANKS_PER_NODE
    device: Literal["cuda", "cpu"] = "cuda"
    grouped_attention: bool = True  # see `Computation`
    teacher: TeacherSpec | None = None
    reward_models: tuple[Architecture, ...] = ()
    stage: int = 0  # the pipeline stage whose memory is planned; 0 without a pipeline
    base_dtype: str = "bfloat16"  # the dtype of the base's files
    # the model_type of the whole model if rows hold images; None if they do not
    images: str | None = None
    other_adapters_bytes: int = 0  # what the recipe's other adapters write to the disk

    def find_problems(self) -> list[Problem]:
        """Finds the problems that keep the run from starting, as far as a plan knows, and notes."""
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
        """Lists the run's parameters of `architecture`: the whole model, or a rank's part of it."""
        recipe = self.recipe
        return list_state_tensors(
            architecture, self.model_keys, recipe.lora, self.sharding, recipe.quantization
        )

    @property
    def model_keys(self) -> Model:
        """The recipe's section on the model, with the head frozen if the method embeds.

        No loss of such a method reads the head. A tied head stays as it is: it is the embedding.
        """
        model = self.recipe.model
        if not self.recipe.method_facts.embeds or self.architecture.tied:
            return model
        head = self.architecture.head_name.removesuffix(".weight")
        return replace(model, frozen_modules=(*model.frozen_modules, head))

    @property
    def scored_outputs(self) -> int:
        """How many layers' outputs the head reads in a step, at most.

        They are the last layer's and those of `exit_layers`; 1 if the method has no early exits.
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
        """For each layer, how many elements its weight matrices have. Pipeline stages are balanced
        by these costs.

        The last layer's cost includes the output head.
        """
        architecture = self.architecture
        costs = [
            sum(t.numel for t in architecture.layer(index) if len(t.shape) > 1)
            for index in range(architecture.layers)
        ]
        return [*costs[:-1], costs[-1] + architecture.head_rows * architecture.hidden]

    @cached_property
    def own_layers(self) -> list[int]:
        """The model's layers that are in the planned stage, by their index in the model."""
        # a stage has every `stages`-th chunk
        chunks = split_layers(self.layer_costs, self.sharding.pipeline_chunks)
        return [layer for chunk in chunks[self.stage :: self.stages] for layer in chunk]

    @cached_property
    def part(self) -> Architecture:
        """The part of the model that one rank holds before FSDP shards it.

        It is the layers of the planned stage, and of each layer the rank's share under tensor
        parallelism. Without pipeline and tensor parallelism it is the whole model.
        """
        architecture = self.divided
        if self.stages == 1:
            return architecture
        layers = self.own_layers
        mixture = architecture.mixture
        if mixture is not None:  # renumber the layers with experts from the stage's first layer
            with_experts = frozenset(
                index for index, layer in enumerate(layers) if layer in mixture.layers
            )
            mixture = replace(mixture, layers=with_experts)
        return replace(
            architecture,
            layers=len(layers),
            mixture=mixture,
            tied=architecture.tied and self.is_last_stage,
        )

    @cached_property
    def divided(self) -> Architecture:
        """The part of the model that one rank of a tensor-parallel group holds, over all stages.

        Without tensor parallelism it is the whole model.
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
        """The part of the model that one rank computes.

        It is `part`, except in families whose tensor-parallel plan in transformers gathers the
        outputs of matmuls: there a rank computes with all heads and, if gate and up are fused, with
        all of the intermediate size.
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
        """Every parameter of `part`, adapters included."""
        tensors = self._list_tensors(self.divided)
        if self.stages == 1:
            return tensors
        # unit of the model -> unit of the stage, whose layers are numbered from 0
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
        """Every parameter of the teacher, frozen in the compute dtype; empty without a teacher."""
        if self.teacher is None:
            return ()
        recipe = self.recipe
        return list_frozen_tensors(
            self.teacher.architecture,
            ITEMSIZE[self.compute_dtype],
            self.teacher.quantization,
            recipe.lora.modules_to_save if recipe.has_reference else (),
        )

    @cached_property
    def fp8_weights(self) -> Mapping[str, int]:
        """The weights that are multiplied in FP8 (models/fp8.py): name -> number of elements."""
        if self.sharding.fp8 is None:
            return {}
        linears = [
            tensor
            for layer in range(self.architecture.layers)
            for tensor in self.architecture.linears(layer)
        ]
        all_but_first = linears[1:]  # the model's first linear layer keeps the compute dtype
        return {
            tensor.name: tensor.numel
            for tensor in all_but_first
            if is_multiplied_in_fp8(tensor.shape)
        }

    @property
    def fp8_gathered(self) -> frozenset[str]:
        """The names of the weights that FSDP gathers in 8 bits."""
        return frozenset(self.fp8_weights if gathers_fp8(self.sharding) else ())

    @property
    def teacher_bytes(self) -> int:
        """Bytes of the teacher's parameters on rank 0; 0 without a teacher."""
        return count_state(self.teacher_tensors, self.sharding, self.shards, optim=None).frozen

    @property
    def reward_bytes(self) -> int:
        """Bytes of the parameters of all reward models. Every rank holds them whole."""
        return ITEMSIZE[self.compute_dtype] * sum(
            architecture.parameters for architecture in self.reward_models
        )

    @property
    def shards(self) -> int:
        """How many ranks FSDP shards a parameter over.

        Under tensor parallelism FSDP shards one rank's part of the parameter.
        """
        return self.sharding.tensor_group_of(self.state_ranks)

    @property
    def state_ranks(self) -> int:
        """How many ranks hold one replica of the model together; in a pipeline, one replica of a
        stage.
        """
        return self.sharding.count_replica_ranks(self.ranks // self.stages, self.ranks_per_node)

    @property
    def tensor_ranks(self) -> int:
        """How many ranks shard the matrices of a layer by tensor parallelism; 1 without it."""
        return self.sharding.tensor_parallel_size

    def state(self, rank: int = 0) -> State:
        """Bytes that stay on `rank` while it trains: parameters, gradients and optimizer state.

        Rank 0 holds the most. If the optimizer's state is in files, so are the master weights: the
        parameters in memory are in the compute dtype, and `optimizer` is the buffers in device
        memory and the step counters.
        """
        state = self.loaded_state(rank)
        optimizer_file = self.optimizer_file(rank)
        if optimizer_file is None:
            return state
        trained = state.trained // ITEMSIZE[self.trained_dtype] * ITEMSIZE[self.compute_dtype]
        # The state passes through two buffers in host memory, which is the device's memory on a
        # CPU. A GPU has a third, of its own, and only that counts here.
        buffers = optimizer_file.buffer * (2 if self.device == "cpu" else 1)
        return replace(state, trained=trained, optimizer=buffers + optimizer_file.counters)

    def loaded_state(self, rank: int = 0) -> State:
        """Bytes of parameters, gradients and optimizer state on `rank`, if all are in memory.

        The parameters are in the dtype of training, as they are right after loading.
        """
        return self._state_of_first_rank if rank == 0 else self._count_state(rank)

    @cached_property
    def _state_of_first_rank(self) -> State:
        return self._count_state(0)

    def _count_state(self, rank: int) -> State:
        """Counts `loaded_state` of `rank`."""
        return count_state(
            self.part_tensors,
            self.sharding,
            self.shards,
            self.recipe.optimization.optim,
            self.sharding.tensor_group_of(rank),
        )

    def optimizer_file(self, rank: int = 0) -> OptimizerFile | None:
        """The file of `rank` with the optimizer's state; None if that state is in memory."""
        keys = self.recipe.optimization
        if keys.optim_offload == "none" or self.sharding.layout != "fsdp2":
            return None
        return count_optimizer_file(
            self.part_tensors,
            self.shards,
            keys.optim,
            dtype=self.trained_dtype,
            compute_dtype=self.compute_dtype,
            rank=self.sharding.tensor_group_of(rank),
        )

    @property
    def trained_numel(self) -> int:
        """How many elements the trained parameters have, over all ranks."""
        return sum(tensor.numel for tensor in self.tensors if tensor.trainable)

    @property
    def trained_dtype(self) -> str:
        """The dtype of the trained parameters: float32 with adapters, else the recipe's `dtype`."""
        if self.recipe.lora.use_peft:
            return "float32"
        return self.recipe.model.dtype

    @property
    def compute_dtype(self) -> str:
        """The dtype of mixed precision, or the parameters' dtype if there is none."""
        return find_compute_dtype(self.sharding, self.recipe.model, self.recipe.lora)

    @property
    def reduced_dtype(self) -> str:
        """The dtype in which gradients are summed over ranks.

        It is float32 under FSDP's mixed precision, and else the parameters' dtype.
        """
        mixed = self.sharding.is_fsdp and self.sharding.mixed_precision != "no"
        return "float32" if mixed else self.trained_dtype

    @property
    def computation(self) -> Computation:
        """The settings of a forward in training that affect its memory."""
        itemsize = ITEMSIZE[self.compute_dtype]
        return Computation(
            itemsize=itemsize,
            autocast=self.sharding.mixed_precision != "no"
            and not self.sharding.is_fsdp
            and itemsize < FP32
            and not self.recipe.lora.is_fused,
            checkpoint_every=(
                self.recipe.model.activation_checkpointing_every
                if self.sharding.activation_checkpointing
                else None
            ),
            keeps=self.recipe.model.activation_checkpointing_keeps,
            offloads=self.recipe.model.activation_offload
            and self.sharding.activation_checkpointing,
            lora=self.recipe.lora if self.recipe.lora.use_peft else None,
            document_length=self.count_attended(self.tokens),
            attention=self.recipe.model.attn_implementation,
            cpu=self.device == "cpu",
            compiled=self.recipe.model.torch_compile,
            grouped_attention=self.grouped_attention or self.device == "cpu",
            divides_vocabulary=self.sharding.divides_matrices,
            expert_ranks=self.sharding.expert_parallel_size,
            sequence_ranks=self.sharding.sequence_parallel_size,
            drops_attention=self.drops_attention,
            masks_images=self.images is not None and find_family(self.images).images_see_themselves,
            # as `choose_experts_implementation` chooses
            loops_experts=not self.recipe.model.torch_compile
            and (self.device == "cpu" or itemsize >= FP32),
            masks_padding=self.recipe.method_facts.masks and not self.recipe.data.packing,
            repeated_prompts=self.repeated_prompts,
        )

    def count_attended(self, tokens: int) -> int:
        """Counts the tokens that each token of a forward of `tokens` tokens has scores for.

        They are those of a full document. Under transformers' own attention, which masks the scores
        of a whole row, they are those of the packed row.
        """
        facts = self.architecture.facts
        masks_rows = self.recipe.model.attn_implementation in MASKED or attends_by_mask(
            facts.model_type, facts.layer_types
        )
        return tokens if masks_rows and self.recipe.data.packing else self.recipe.data.max_length

    @property
    def repeated_prompts(self) -> float:
        """The most tokens of shared prompts that attention repeats, for each token of a row.

        That many are repeated if the prompt is as long as it may be and each of its completions has
        a single token, behind the prompt's last. 0 if completions share no prompts
        (`can_continue`).
        """
        recipe = self.recipe
        completions = recipe.rollout.num_generations
        can_share = (
            recipe.method_facts.samples
            and recipe.data.packing
            and completions > 1
            and recipe.model.attn_implementation in ("auto", *FLASH_PACKAGES)
            and self.images is None
            and self.architecture.family.recurrence is None
        )
        if not can_share:
            return 0.0
        prompt = recipe.data.max_length - recipe.rollout.max_completion_length
        return completions * prompt / (prompt + 2 * completions)

    @property
    def uncounted(self) -> str | None:
        """Why the activations of the model or its teacher cannot be counted; None if they can."""
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
        """Whether attention has dropout in training, by the recipe or else the model's config."""
        dropout = self.recipe.model.attention_dropout
        if dropout is None:
            dropout = self.architecture.attention_dropout
        return dropout > 0

    @property
    def weighs_documents(self) -> bool:
        """Whether the loss needs separate log-probabilities (or scores), of tokens or documents.

        If not, the loss is the sum over all trained tokens.
        """
        facts = self.recipe.method_facts
        return facts.documents > 1 or facts.samples or facts.scores

    @property
    def reference(self) -> Literal["adapters off", "stored"] | None:
        """Where the log-probabilities of the reference model of a preference method come from.

        "adapters off": from a forward in each step with the new adapters switched off, which is
        the base. "stored": computed once before training. None: for any other method; the reference
        of one that samples is planned as the teacher.
        """
        if not self.recipe.method_facts.needs_reference:
            return None
        if self.recipe.trains_base or self.sharding.pipeline_parallel_size > 1:
            return "stored"
        return "adapters off"

    @property
    def data_ranks(self) -> int:
        """How many ranks, or groups of ranks that share rows, train on different rows."""
        return self.ranks // self.sharding.ranks_per_batch

    @property
    def rows(self) -> int:
        """Rows in a micro-batch on one rank."""
        return self.recipe.batch.per_device_train_batch_size

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch's forward on one rank if every row is full.

        Under sequence parallelism it is the rank's share of the tokens.
        """
        return self.share_tokens(self.rows)

    def share_tokens(self, rows: int) -> int:
        """Tokens of `rows` full rows that one rank has, sharing them with its sequence group."""
        sequence_ranks = self.sharding.sequence_parallel_size
        row_tokens = self.recipe.row_tokens
        if self.recipe.method_facts.rows == "ratings":  # mismatched answers have their own forward
            row_tokens = self.recipe.data.max_length
        if self.recipe.data.packing:  # a rank's tokens are rounded up to a multiple of ROUND_TOKENS
            return ceil_div(rows * row_tokens, ROUND_TOKENS * sequence_ranks) * ROUND_TOKENS
        return rows * ceil_div(row_tokens, sequence_ranks)

    @property
    def global_batch_size(self) -> int:
        """Rows in an optimizer step over all ranks; prompts, if completions are sampled."""
        return compute_global_batch_size(self.recipe.batch, self.data_ranks)

    @property
    def rows_per_step(self) -> int:
        """Rows in an optimizer step over all ranks.

        Each sampled completion counts as a row, which is an upper bound: rows may hold several.
        """
        completions = 1
        if self.recipe.method_facts.samples:
            completions = self.recipe.rollout.num_generations
        return self.global_batch_size * completions

    @property
    def tokens_per_step(self) -> int:
        """Tokens in an optimizer step over all ranks if every row is full."""
        return self.rows_per_step * self.recipe.row_tokens

    @property
    def pipeline_order(self) -> PipelineOrder:
        """The order of a pipeline rank's forwards and backwards."""
        return choose_order(self.accumulation, self.stages, self.sharding.pipeline_chunks)

    @property
    def chunks_per_rank(self) -> int:
        """How many chunks of layers each pipeline rank has."""
        return self.sharding.pipeline_chunks // self.stages

    @property
    def micro_batches_in_flight(self) -> float:
        """How many micro-batches' activations a pipeline rank keeps at once, at most.

        A fraction if a stage has several chunks: one forward is that of one chunk only.
        """
        stages_from_here = self.stages - self.stage  # this stage included
        if self.pipeline_order == "1f1b":
            return stages_from_here
        if self.pipeline_order != "interleaved":  # all forwards come before the first backward
            return self.accumulation
        # ScheduleInterleaved1F1B of torch: forwards of chunks that warm up, and one more before the
        # first backward
        per_round = self.accumulation // count_rounds(self.accumulation, self.stages)
        later_stages = stages_from_here - 1
        warmup = 2 * later_stages + (self.chunks_per_rank - 1) * per_round
        return min(self.accumulation, (warmup + 1) / self.chunks_per_rank)

    @property
    def bubble(self) -> float:
        """The share of a step in which a pipeline rank waits for other ranks; 0 without a pipeline
        (Narayanan et al. 2021, section 2.2).
        """
        waits = self.stages - 1
        return waits / (waits + self.chunks_per_rank * self.accumulation)

    @property
    def imbalance(self) -> float:
        """The cost of the stage that computes the most, divided by the mean cost of a stage."""
        costs = self.layer_costs
        chunks = split_layers(self.layer_costs, self.sharding.pipeline_chunks)
        cost_of_stage = [0] * self.stages
        for chunk, layers in enumerate(chunks):
            cost_of_stage[chunk % self.stages] += sum(costs[layer] for layer in layers)
        return max(cost_of_stage) * self.stages / sum(cost_of_stage)

    @property
    def accumulation(self) -> int:
        """How many micro-batches a rank has in a step; the last one may contain filler rows."""
        return ceil_div(self.rows_per_step, self.rows * self.data_ranks)


def count_multiplied(architecture: Architecture) -> int:
    """Counts the elements of the parameters that multiply one token.

    Experts that are not chosen are left out, and an untied input embedding, which is looked up.
    """
    active = architecture.parameters - architecture.idle_parameters
    if architecture.tied:
        return active
    return active - architecture.embedding.numel


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes on the run's disk. `total` leaves out `offload`, which is not in the run's folder."""

    checkpoint: int  # of one checkpoint
    checkpoints_kept: int | None  # how many are kept; None: all
    # of the kept checkpoints (counted as one if all are kept) and the one that is being written
    checkpoints: int
    export: int = 0
    adapter: int = 0
    offload: int = 0  # of one node's files in offload_dir, during training
    # of the weights for a server that samples: the ranks' shards, the exported weights, and the
    # exported weights of the step before
    rollouts: int = 0
    other_adapters: int = 0  # of all that the recipe's other adapters write
    # more checkpoints are kept than are counted: their number depends on unknown steps
    keeps_more: bool = False

    @property
    def total(self) -> int:
        own = self.checkpoints + self.export + self.adapter + self.rollouts
        return own + self.other_adapters


@dataclass(frozen=True, slots=True)
class Host:
    """Bytes of one node's memory."""

    processes: int  # the ranks' processes, and on a CPU all tensors of the ranks
    offloaded: int  # parameters, gradients and optimizer state, under CPU offload
    activations: int  # the activations that checkpointed layers offload
    saving: int  # the copy of the state from which a checkpoint is written during training
    export: int  # one output file and one tensor, on the first rank
    buffers: int = 0  # with a GPU: the buffers through which optimizer state in files passes
    teacher: int = 0  # before training: its likeliest tokens that are not yet written

    @property
    def total(self) -> int:
        return (
            self.processes
            + self.offloaded
            + self.activations
            + self.buffers
            + max(self.saving, self.export, self.teacher)
        )


def plan_disk(spec: RunSpec) -> Disk:
    """Counts the bytes that a run writes to disk.

    They are checkpoints, exports, an adapter, optimizer state in files, and weights for a server.
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
    # Without adapters a checkpoint has all parameters, the frozen ones too.
    stored = trained if has_adapters else spec.tensors
    weights = _count_bytes(stored)
    checkpoint = weights + moments
    steps = spec.recipe.optimization.max_steps
    kept = keys.count_kept(steps)
    counted = (kept or 1) + 1  # one more is being written
    if kept is None and steps is not None:
        counted = max(counted, len(spec.recipe.list_saves(steps, steps_per_epoch=None)))
    disk = Disk(
        checkpoint=checkpoint,
        checkpoints_kept=kept,
        checkpoints=checkpoint * counted,
        other_adapters=spec.other_adapters_bytes,
        keeps_more=_keeps_unknown_steps(spec.recipe, kept),
    )
    if keys.export_at_end:
        itemsize = ITEMSIZE[keys.export_dtype or spec.base_dtype]
        disk = replace(disk, export=_exported_bytes(spec, itemsize))
    if has_adapters:
        disk = replace(disk, adapter=weights)
    optimizer_file = spec.optimizer_file()
    if optimizer_file is not None:
        disk = replace(disk, offload=optimizer_file.size * min(spec.ranks, spec.ranks_per_node))
    if spec.recipe.rollout.vllm_server_base_url is not None:
        exported = ITEMSIZE[spec.compute_dtype] * sum(t.numel for t in stored)
        disk = replace(disk, rollouts=weights + 2 * exported)
    return disk


def _keeps_unknown_steps(recipe: Recipe, kept: int | None) -> bool:
    """Whether the number of checkpoints that the run keeps depends on steps that are not known.

    `kept`: how many are kept; None: all.
    """
    keys = recipe.checkpoint
    steps_are_known = recipe.optimization.max_steps is not None
    if kept is not None:
        return keys.keep_every_steps is not None and not steps_are_known
    saves_by_epoch = keys.save_strategy == "epoch"
    if keys.keep_best_checkpoint:
        saves_by_epoch |= recipe.run.eval_strategy == "epoch"
    return saves_by_epoch or not steps_are_known


def _exported_bytes(spec: RunSpec, itemsize: int) -> int:
    """Bytes of the exports in all `export_formats`; `itemsize`: bytes of an unquantized element.

    Layers for multi-token prediction are carried over from the base's files, except into GGUF, or
    if the model starts from no files.
    """
    architecture = replace(spec.architecture, has_critic=False)
    keys = spec.recipe.checkpoint
    aware = spec.recipe.quantization_aware
    unquantized = itemsize * architecture.parameters
    quantized = 0
    if spec.recipe.model.model_config is not None:
        carried = 0
    else:
        carried = itemsize * architecture.carried_parameters
    scheme = keys.export_quantization or aware.quantization_aware_training
    if scheme is not None:
        group = None
        if scheme == aware.quantization_aware_training:
            group = aware.qat_group_size
        elements = sum(
            linear.numel
            for layer in range(architecture.layers)
            for linear in architecture.linears(layer)
        )
        saved_per_element = itemsize - SCHEMES[scheme].stored_bytes(itemsize, group)
        quantized = unquantized - int(elements * saved_per_element)
    sizes = {"compressed-tensors": quantized + carried, "safetensors": unquantized + carried}
    return sum(sizes.get(each, unquantized) for each in keys.export_formats)


def _count_bytes(tensors: Iterable[StateTensor]) -> int:
    """Counts the bytes of whole parameters, over all ranks."""
    return sum(tensor.numel * tensor.itemsize for tensor in tensors)


def plan_host(spec: RunSpec, peak_bytes: int) -> Host:
    """Plans the memory of one node with all its ranks.

    `peak_bytes`: the peak of one rank on its device, which is the node's memory if that is the CPU.
    """
    ranks = min(spec.ranks, spec.ranks_per_node)
    # replicas of the sharded state that this node's ranks hold together, a fraction or several
    share = ranks / (spec.state_ranks * spec.stages)
    optimizer_file = spec.optimizer_file()
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
    buffers = 0
    if optimizer_file is not None and not on_cpu:
        buffers = 2 * optimizer_file.buffer * ranks
    exported = 0
    if spec.recipe.checkpoint.export_at_end:
        shard = min(EXPORT_SHARD_BYTES, FP32 * spec.architecture.parameters)
        exported = shard + FP32 * max(tensor.numel for tensor in spec.tensors)
    return Host(
        processes=ranks * process,
        offloaded=offloaded,
        activations=ranks * offloaded_bytes(spec.part, spec.computation, spec.tokens),
        saving=int(_count_copied(spec, trained, state, frozen) * min(share, 1)),
        export=exported,
        buffers=buffers,
        teacher=ranks * _count_unwritten(spec),
    )


def _count_unwritten(spec: RunSpec) -> int:
    """Bytes of the teacher's likeliest tokens that a rank holds before it writes them, at most.

    A rank writes once it has STORED_PIECE_BYTES, after a step. 0 without `distill_top_k`.
    """
    top_k = spec.recipe.method.distill_top_k
    if top_k is None:
        return 0
    return STORED_PIECE_BYTES + spec.accumulation * spec.tokens * stored_token_bytes(top_k)


def _count_copied(spec: RunSpec, trained: Sequence[StateTensor], state: int, frozen: int) -> int:
    """Bytes that all ranks copy to host memory at once while a checkpoint is written.

    An async save copies all that the checkpoint holds. Any other save copies one tensor of the
    model and one of the optimizer at a time, in fp32 at most. On a CPU, or if the optimizer's state
    is in files, it writes them from where they are.

    Args:
        spec: The run.
        trained: The trained parameters.
        state: Bytes of the trained parameters and their optimizer state.
        frozen: Bytes of the frozen parameters.
    """
    has_adapters = spec.recipe.lora.use_peft
    if spec.recipe.saves_async(spec.device):
        return state if has_adapters else state + frozen
    if spec.device == "cpu" or spec.optimizer_file() is not None:
        return 0
    saved = trained if has_adapters else spec.tensors
    return 2 * FP32 * max(tensor.numel for tensor in saved)


def _count_saved_state(spec: RunSpec, trained: Sequence[StateTensor]) -> int:
    """Bytes of the `trained` parameters and their optimizer state that are in memory, all ranks'.

    A checkpoint copies them. If the optimizer's state is in files, only the parameters in the
    compute dtype and the step counters are in memory.
    """
    if spec.optimizer_file() is not None:
        step_counter = FP32
        return sum(t.numel * ITEMSIZE[spec.compute_dtype] + step_counter for t in trained)
    optim = spec.recipe.optimization.optim
    moments = (count_optimizer_bytes(optim, t.shape, t.itemsize, name=t.name) for t in trained)
    return _count_bytes(trained) + sum(moments)
