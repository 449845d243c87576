"""A point of a run, and the bytes that one rank holds there."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Bytes that one rank holds at one point of a run."""

    name: str
    parameters: int = 0  # trained and frozen, as sharded
    teacher: int = 0  # its parameters, as sharded
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0  # FSDP units gathered for the computation, or weights cast by autocast
    activations: int = 0
    loss: int = 0  # the chunk of logits, and the gradients that the loss computes in its forward
    communication: int = 0  # unsharded gradients that are being reduced
    temporaries: int = 0  # of the optimizer; of a quantized base, what is dequantized; of FP8, what is cast
    slack: int = 0
    context: int = 0

    @property
    def allocated(self) -> int:
        """What torch.cuda.max_memory_allocated counts."""
        return (
            self.parameters
            + self.teacher
            + self.gradients
            + self.optimizer
            + self.gathered
            + self.activations
            + self.loss
            + self.communication
            + self.temporaries
        )

    @property
    def total(self) -> int:
        """What the device needs to have."""
        return self.allocated + self.slack + self.context
