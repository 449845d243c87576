"""Run on ranks by test_loss.py: the loss and its gradients under FSDP2 are those of one process."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.models.load import ModelSize, Teacher
from finetune.models.log_probabilities import DivergenceOptions
from tests.models.families import build, documents, ours, packed, relative_error

MICRO_BATCHES = 2


class Gathers(TorchDispatchMode):
    """Counts the collectives that gather the head's group: those whose result has at least `numel` elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather_base" in str(func):
            self.count += args[0].numel() >= self.numel
        return func(*args, **kwargs or {})


def shard(model: Any, policy: MixedPrecisionPolicy) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    tail = [
        model.model.norm,
        *([model.model.embed_tokens] if is_tied else []),
        model.lm_head,
    ]  # as Accelerate does it
    fully_shard(tail, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def scenario(name: str, tied: bool, dtype: torch.dtype | None, frozen: bool) -> None:
    """Each rank takes every second document of each micro-batch; one process takes all of them."""
    lengths = ((13, 1, 22, 7), (8, 5, 3, 30))
    halves = [documents(each) for each in lengths]
    trained = sum(int((labels != -100).sum()) for half in halves for _, labels in half)

    model = ours(build("llama", vocab_size=1024, tie_word_embeddings=tied, initializer_range=0.1))
    if frozen:
        model.lm_head.weight.requires_grad_(False)
    for half in halves:
        (model(**packed(half)) / trained).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    expected_loss = sum(model(**packed(half)).item() for half in halves) / trained

    sharded = ours(build("llama", vocab_size=1024, tie_word_embeddings=tied, initializer_range=0.1))
    sharded.lm_head.weight.requires_grad_(not frozen)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    shard(sharded, policy)
    assert isinstance(sharded, FSDPModule)
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(())
    for half in halves:
        with Gathers(sharded.lm_head.weight.numel()) as gathers:
            loss = sharded(**packed(half[rank::size]))
            (loss * size / trained).backward()
        large = 1 if tied else 2  # the embedding is as large as the head
        assert gathers.count == large, (
            f"{name}: {gathers.count} gathers of the head's size, where {large} would do"
        )
        assert loss.dtype == torch.float32
        total += loss.detach() / trained
    dist.all_reduce(total)

    exact = 2e-6 if dtype is None else 2e-2
    assert abs(total.item() - expected_loss) <= exact * expected_loss, (
        name,
        total.item(),
        expected_loss,
    )
    found = {n: p.grad.full_tensor() for n, p in sharded.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys(), name
    exact = 5e-6 if dtype is None else 6e-2
    worst = max((relative_error(found[n], expected[n]), n) for n in found)
    assert worst[0] <= exact, (name, worst)
    print(name, "as one process")


def distilled(tied: bool) -> None:
    """A teacher of twice the width: its tail is gathered in its forward and once more where the logits meet, and its head is
    sharded again after each."""
    halves = [documents(lengths) for lengths in ((13, 1, 22, 7), (8, 5, 3, 30))]
    trained = sum(int((labels != -100).sum()) for half in halves for _, labels in half)
    sizes: dict[str, Any] = {"vocab_size": 1024, "initializer_range": 0.1}

    def make_both() -> tuple[Any, Any]:
        wide = (
            ours(build("llama", hidden_size=96, tie_word_embeddings=tied, **sizes))
            .requires_grad_(False)
            .eval()
        )
        return ours(build("llama", **sizes)), wide

    def step(student: Any, wide: Any, half: list[Any], scale: float) -> torch.Tensor:
        teacher = Teacher(wide, ModelSize(0, 0, 0, 0, 0), DivergenceOptions(0.5, 1.5, 0.7))
        inputs = packed(half)
        sums = student(**inputs, head_function=teacher.compare(inputs))
        (sums[0] * scale).backward()
        return sums.detach()  # type: ignore[no-any-return]

    student, wide = make_both()
    expected_sums = sum(step(student, wide, half, 1 / trained) for half in halves)
    expected = {name: p.grad for name, p in student.named_parameters()}

    student, wide = make_both()
    shard(student, MixedPrecisionPolicy())
    shard(wide, MixedPrecisionPolicy()).set_reshard_after_forward(True)
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(3)
    for half in halves:
        with Gathers(wide.lm_head.weight.numel()) as gathers:
            total += step(student, wide, half[rank::size], size / trained)
        assert gathers.count == (2 if tied else 3), (
            f"{gathers.count} gathers of the size of the teacher's head"
        )
        assert all(isinstance(parameter, DTensor) for parameter in wide.parameters()), (
            "the teacher stays gathered"
        )
    dist.all_reduce(total)
    assert relative_error(total, expected_sums) <= 2e-6
    found = {name: p.grad.full_tensor() for name, p in student.named_parameters()}
    assert max(relative_error(found[name], expected[name]) for name in expected) <= 5e-6
    print("distilled", "tied" if tied else "untied", "as one process")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    scenario("untied fp32", tied=False, dtype=None, frozen=False)
    scenario("tied fp32", tied=True, dtype=None, frozen=False)
    scenario("untied bf16", tied=False, dtype=torch.bfloat16, frozen=False)
    scenario("untied frozen", tied=False, dtype=None, frozen=True)
    distilled(tied=False)
    distilled(tied=True)
    dist.destroy_process_group()
