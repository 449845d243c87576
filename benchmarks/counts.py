"""What a step does, counted on a CPU: bytes kept, operations of inductor's code, and waits of a
token's step.

    python benchmarks/counts.py     # dense full, LoRA, QLoRA, a mixture; then sampling

A layer's bytes are those that autograd keeps for the backward beside the parameters, eager and
compiled. Of the code that inductor writes for the layers, forward and backward, it counts the
products, those among them that copy what they add to (`addmm` out of place, which LoRA needs none
of), and the fused kernels. On a CPU attention is no part of what is compiled. A token's step is the
one that a GPU captures as a graph: operations that wait for the device must be none.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from finetune.errors import set_library_environment  # noqa: E402

set_library_environment()

import torch  # noqa: E402
from torch._inductor.utils import run_and_get_code  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from benchmarks.gpu_cases import Case  # noqa: E402
from benchmarks.gpu_ours import prepare, step_batches  # noqa: E402
from finetune.distributed.join import leave  # noqa: E402
from finetune.distributed.model_parts import local_part, unwrap  # noqa: E402
from finetune.rollout.embedded import _PromptReader, _Wave  # noqa: E402
from finetune.rollout.engine import Request, Sampling  # noqa: E402

LAYERS = 2
TOKENS = 256
DENSE = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
MIXTURE = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
CASES = {
    "dense, full": Case("", DENSE, TOKENS, rows=1),
    "dense, LoRA": Case("", DENSE, TOKENS, rows=1, use_peft=True),
    "dense, QLoRA": Case("", DENSE, TOKENS, rows=1, use_peft=True, load_in_4bit=True),
    "mixture, LoRA": Case("", DENSE | MIXTURE, TOKENS, rows=1, use_peft=True),
}
OPTIONS = argparse.Namespace(data=None, tokenizer=None, documents=4)
WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique")


def count_layer(case: Case) -> dict[str, int]:
    """Bytes that a layer keeps, and the operations of inductor's code where the case is
    compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        _, world, model, _ = prepare(case, Path(folder))
    inputs = step_batches(case, OPTIONS)[0].micro_batches[0].inputs
    parameters = {
        local_part(parameter).untyped_storage().data_ptr() for parameter in model.parameters()
    }
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def step() -> None:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(**inputs)
        loss.backward()

    _, codes = run_and_get_code(step)
    calls = [
        re.search(r"def call\(self, args\):.*?\n        return ", code, re.DOTALL) for code in codes
    ]
    text = "\n".join(call.group() for call in calls if call)
    leave(world)
    torch._dynamo.reset()
    return {
        "kept": sum(kept.values()) // LAYERS,
        "products": len(re.findall(r"extern_kernels\.\w*mm\w*\(|add_product", text)),
        "copies": len(re.findall(r"extern_kernels\.addmm\(", text)),
        "kernels": len(re.findall(r"cpp_fused_\w+\(", text)),
    }


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names[function.name().removeprefix("aten::").partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def count_token_step(tokens: int = 64) -> str:
    """Of a token's step in its captured form: operations, and those that wait for the device."""
    with tempfile.TemporaryDirectory() as folder:
        _, world, model, _ = prepare(
            Case("", DENSE, TOKENS, rows=1, torch_compile=False), Path(folder)
        )
    requests = [Request(tuple(range(3, 3 + length)), (0, length)) for length in range(8, 24)]
    with torch.no_grad():
        wave = _Wave(
            _PromptReader(unwrap(model.eval()), None, torch.device("cpu")),
            requests,
            Sampling(max_tokens=tokens),
            torch.tensor([511]),
            can_capture=False,
        )
        wave._draw(wave._logits)
        shown = wave._mask.shape[-1]
        with Operations() as operations:
            wave._advance_captured(shown)
    leave(world)
    waits = sum(operations.names[name] for name in WAITS)
    return (
        f"{operations.names.total()} operations, {waits} of them wait for the device; on a GPU one "
        "call replays them"
    )


def main() -> None:
    """Prints all counts."""
    print("| case | kept by a layer, bytes: eager | compiled | products | copies | fused kernels |")
    print("|---|---|---|---|---|---|")
    for name, case in CASES.items():
        eager = count_layer(Case(**vars_of(case) | {"torch_compile": False}))
        compiled = count_layer(case)
        row = [
            eager["kept"],
            compiled["kept"],
            compiled["products"],
            compiled["copies"],
            compiled["kernels"],
        ]
        print(f"| {name} | {' | '.join(f'{number:,}' for number in row)} |", flush=True)
    print(f"a token's step of 16 rows: {count_token_step()}")


def vars_of(case: Case) -> dict[str, Any]:
    """The fields of a case."""
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


if __name__ == "__main__":
    main()
