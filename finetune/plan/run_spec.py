"""A run as far as its needs go: the model, the recipe, the layout and the ranks, and what follows from them at once."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from finetune.constants import COMPUTE_DTYPE, ITEMSIZE, ROUND_TOKENS, global_batch_size
from finetune.distributed.accelerate_config import Sharding
from finetune.plan.activations import Computation
from finetune.plan.architecture import Architecture
from finetune.plan.state import StateTensor, shards, state_tensors
from finetune.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is planned. `ranks_per_node` matters to hybrid sharding and to a host's memory."""

    architecture: Architecture
    recipe: Recipe
    sharding: Sharding
    ranks: int
    ranks_per_node: int = 8
    device: Literal["cuda", "cpu"] = "cuda"
    grouped_attention: bool = True  # see Computation

    @cached_property
    def tensors(self) -> tuple[StateTensor, ...]:
        """Every parameter as it is trained, adapters included."""
        return state_tensors(self.architecture, self.recipe.model, self.recipe.lora, self.sharding)

    @property
    def pieces(self) -> int:
        """Over how many ranks a parameter is cut."""
        return shards(self.sharding, self.ranks, self.ranks_per_node)

    @property
    def trained_dtype(self) -> str:
        """The type of the trained parameters: adapters are float32, all else has the recipe's `dtype`."""
        return "float32" if self.recipe.lora.use_peft else self.recipe.model.dtype

    @property
    def compute_dtype(self) -> str:
        """What mixed precision computes in; without it, the type of the parameters."""
        mixed = self.sharding.mixed_precision
        return self.trained_dtype if mixed == "no" else COMPUTE_DTYPE[mixed]

    @property
    def reduced_dtype(self) -> str:
        """The type in which gradients are summed over ranks: FSDP's policy says float32, DDP reduces them as they are."""
        mixed = self.sharding.is_fsdp and self.sharding.mixed_precision != "no"
        return "float32" if mixed else self.trained_dtype

    @property
    def computation(self) -> Computation:
        """How a training forward is run."""
        itemsize = ITEMSIZE[self.compute_dtype]
        return Computation(
            itemsize=itemsize,
            autocast=not self.sharding.is_fsdp and itemsize < 4,
            checkpoint_every=(
                self.recipe.model.activation_checkpointing_every if self.sharding.activation_checkpointing else None
            ),
            lora=self.recipe.lora if self.recipe.lora.use_peft else None,
            document_length=self.recipe.data.max_length,
            cpu=self.device == "cpu",
            grouped_attention=self.grouped_attention or self.device == "cpu",
        )

    @property
    def rows(self) -> int:
        """Rows in a micro-batch on one rank."""
        return self.recipe.batch.per_device_train_batch_size

    @property
    def tokens(self) -> int:
        """Tokens in a micro-batch on one rank, every row full: what packing makes, and the most that padding can."""
        tokens = self.rows * self.recipe.data.max_length
        return -(-tokens // ROUND_TOKENS) * ROUND_TOKENS if self.recipe.data.packing else tokens

    @property
    def global_batch_size(self) -> int:
        """Rows in an optimizer step over all ranks."""
        return global_batch_size(self.recipe.batch, self.ranks)

    @property
    def accumulation(self) -> int:
        """Micro-batches in a step on one rank; the last may hold fillers."""
        return -(-self.global_batch_size // (self.rows * self.ranks))
