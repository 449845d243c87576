"""Run on two ranks by test_cpu_products.py: bf16 and fp16 products on a CPU, torch's own and then those in fp32, rounded once."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from finetune.models import cpu_products
from tests.models.families import build

REDUCED = (torch.bfloat16, torch.float16)
STEPS = 8
SUMMED_IN_CHUNKS = ("mm, chunks of the gradient of the input", "addmm, chunks")


def noise(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def list_products(dtype: torch.dtype) -> dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]]:
    """Products by name; each converts its operands by the function that it is given."""
    x, w, g, bias = (noise(*shape, dtype=dtype) for shape in ((40, 24), (56, 24), (40, 56), (56,)))
    head = noise(3000, 1024, dtype=dtype)  # in chunks, as weight and as gradient
    states, scores = noise(40, 1024, dtype=dtype), noise(40, 3000, dtype=dtype)
    of_patch = noise(2, 8, 2, 2, dtype=dtype)
    a, b, c = (noise(*shape, dtype=dtype) for shape in ((300, 8, 96), (300, 96, 80), (300, 8, 80)))
    pixels, patch, row, taps = (
        noise(*s, dtype=dtype) for s in ((2, 3, 28, 28), (8, 3, 14, 14), (2, 6, 32), (6, 1, 4))
    )
    return {
        "mm": lambda to: to(x) @ to(w).t(),
        "mm, gradient of the input": lambda to: to(g) @ to(w),
        "mm, gradient of the weight": lambda to: to(g).t() @ to(x),
        "mm.out": lambda to: torch.mm(to(g), to(w), out=to(g).new_empty(0)),
        "mm, 9 rows": lambda to: to(x[:9]) @ to(w).t(),
        "mm, 2 rows, not transposed": lambda to: to(g[:2]) @ to(w),
        "mm, chunks of columns": lambda to: to(states) @ to(head).t(),
        "mm, chunks of the gradient of the input": lambda to: to(scores) @ to(head),
        "mm, chunks of rows": lambda to: to(scores).t() @ to(states),
        "mm, nothing summed": lambda to: to(x[:, :0]) @ to(w[:, :0]).t(),
        "mm, no rows": lambda to: to(x[:0]) @ to(w).t(),
        "addmm": lambda to: F.linear(to(x), to(w), to(bias)),
        "addmm, scaled": lambda to: torch.addmm(to(g), to(x), to(w).t(), beta=0.5, alpha=2),
        "addmm.out": lambda to: torch.addmm(
            to(g), to(x), to(w).t(), alpha=3, out=to(g).new_empty(40, 56)
        ),
        "addmm, chunks": lambda to: torch.addmm(to(states), to(scores), to(head), alpha=0.25),
        "bmm": lambda to: to(a) @ to(b),
        "bmm.out": lambda to: torch.bmm(to(a), to(b), out=to(c).new_empty(0)),
        "baddbmm": lambda to: torch.baddbmm(to(c), to(a), to(b), beta=2, alpha=0.5),
        "baddbmm.out": lambda to: torch.baddbmm(to(c), to(a), to(b), out=to(c).clone()),
        "convolution of patches": lambda to: F.conv2d(to(pixels), to(patch), stride=14),
        "convolution of each channel": lambda to: F.conv1d(to(row), to(taps), padding=3, groups=6),
        "gradient of a convolution": lambda to: torch.nn.grad.conv2d_weight(
            to(pixels), patch.shape, to(of_patch), 14
        ),
    }


def check_products() -> None:
    """Each product has the bits of the fp32 product, rounded once; fp32 products have those that they had."""
    for dtype in REDUCED:
        for name, product in list_products(dtype).items():
            found, exact = product(lambda operand: operand), product(Tensor.float)
            if name in SUMMED_IN_CHUNKS:  # in fp32, in another order
                rounding = torch.finfo(dtype).eps / 2
                torch.testing.assert_close(
                    found.double(), product(Tensor.double), rtol=rounding, atol=1e-3
                )
                continue
            assert found.dtype is dtype and torch.equal(found, exact.to(dtype)), f"{name}, {dtype}"
    x, w = noise(40, 1024, dtype=torch.bfloat16), noise(3000, 1024, dtype=torch.bfloat16)
    for run in (
        torch.compile(F.linear),
        torch.vmap(F.linear, (0, None)),
        torch.autocast("cpu", torch.bfloat16)(F.linear),
    ):
        assert torch.equal(run(x, w), (x.float() @ w.float().t()).bfloat16()), run
    try:
        x @ x
    except RuntimeError as error:
        assert "mat1 and mat2 shapes cannot be multiplied (40x1024 and 40x1024)" in str(error), (
            error
        )
    else:
        raise AssertionError("operands of wrong shapes were multiplied")


def check_memory() -> None:
    """A head of 64 MiB in bf16 is never copied whole."""
    weight, states = (
        torch.zeros(32 << 10, 1 << 10, dtype=torch.bfloat16),
        noise(64, 1 << 10, dtype=torch.bfloat16),
    )
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.mm(states, weight.t())
    taken = [
        event.nbytes()
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    assert 0 < max(taken) <= 2 * cpu_products.CHUNK_BYTES, taken


def train() -> tuple[list[float], Any]:
    """The losses of a tiny Llama in bf16, sharded over the ranks by FSDP2, and the head's bits at the end."""
    model = build("llama", initializer_range=0.02)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(
        0,
        model.config.vocab_size,
        (4, 24),
        generator=torch.Generator().manual_seed(dist.get_rank()),
    )
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.lm_head.weight.full_tensor()


def main() -> None:
    """Trains with torch's own products, overrides them, checks every one, and trains again."""
    dist.init_process_group("gloo")
    native, _ = train()
    fp32 = {name: product(Tensor.float) for name, product in list_products(torch.bfloat16).items()}
    cpu_products.override_products(REDUCED)
    for name, product in list_products(torch.bfloat16).items():
        assert torch.equal(product(Tensor.float), fp32[name]), f"{name} in fp32"
    check_products()
    check_memory()
    ours, head = train()
    again, same_head = train()
    assert ours == again and torch.equal(head, same_head)
    assert ours != native and max(abs(a - b) for a, b in zip(ours, native, strict=True)) < 1e-3, (
        ours,
        native,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
