"""What `gpu.py` measures: models, how they are trained, and packed rows of real or random
documents.
"""

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LLAMA_1B = {  # Llama 3.2
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
LLAMA_8B = LLAMA_1B | {  # Llama 3.1
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
LLAMA_70B = LLAMA_8B | {  # Llama 3.3
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LONG = {"max_position_embeddings": 32768}
MIXTURE_7B = {  # OLMoE's sizes: 1.3 B of 6.9 B parameters work on a token
    "model_type": "qwen3_moe",
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
MIXTURE_30B = MIXTURE_7B | {  # Qwen3-30B-A3B
    "vocab_size": 151936,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
STEPS = 4  # with rows of their own; the steps after these train on them again
TINY_MIXTURE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 2,
}


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    name: str
    model: dict[str, Any]
    length: int  # tokens in a row
    rows: int  # in a step
    use_peft: bool = False
    load_in_4bit: bool = False  # QLoRA: NF4, double-quantized
    checkpointed: bool = False  # activations of every layer
    fp8: bool = False  # linear layers multiply in 8-bit floats
    method: str = "sft"  # or dpo, against the model without its adapters
    optim: str = "adamw_torch_fused"
    torch_compile: bool = True
    goal: float | None = None  # tokens per second on an H200


CASES = (
    Case("1B full, 4096", LLAMA_1B, length=4096, rows=4, goal=64_000),
    Case("1B full, 4096, not compiled", LLAMA_1B, length=4096, rows=4, torch_compile=False),
    Case("1B full, 4096, FP8", LLAMA_1B, length=4096, rows=4, fp8=True),
    Case("8B LoRA r16, 4096", LLAMA_8B, length=4096, rows=2, use_peft=True, goal=17_600),
    Case(
        "8B LoRA r16, 4096, checkpointed",
        LLAMA_8B,
        length=4096,
        rows=2,
        use_peft=True,
        checkpointed=True,
        goal=12_400,
    ),
    Case(
        "8B LoRA r16, 32768",
        LLAMA_8B | LONG,
        length=32768,
        rows=1,
        use_peft=True,
        checkpointed=True,
    ),
    Case("8B DPO, LoRA r16, 4096", LLAMA_8B, length=4096, rows=2, use_peft=True, method="dpo"),
    Case("8B QLoRA r16, 4096", LLAMA_8B, length=4096, rows=2, use_peft=True, load_in_4bit=True),
    Case(
        "8B QLoRA r16, 4096, checkpointed",
        LLAMA_8B,
        4096,
        rows=2,
        use_peft=True,
        checkpointed=True,
        load_in_4bit=True,
    ),
    Case(
        "70B QLoRA r16, 4096",
        LLAMA_70B,
        length=4096,
        rows=1,
        use_peft=True,
        checkpointed=True,
        load_in_4bit=True,
        goal=1_400,
    ),
    Case(
        "30B-A3B LoRA r16, 4096",
        MIXTURE_30B,
        length=4096,
        rows=1,
        use_peft=True,
        checkpointed=True,
        goal=9_200,
    ),
    Case(
        "7B mixture of 64 experts, full, 4096",
        MIXTURE_7B,
        length=4096,
        rows=4,
        checkpointed=True,
        optim="adamw_bf16_moments",
        torch_compile=False,
    ),
    Case(
        "8B full, 8192",
        LLAMA_8B,
        8192,
        rows=2,
        checkpointed=True,
        optim="adamw_bf16_moments",
        goal=9_600,
    ),
)


@dataclass(frozen=True)
class Result:
    """What a case came to. `failure` says why there is nothing else."""

    case: str
    who: str
    tokens_per_second: float | None = None
    # of the steps' tokens per second: 25th and 75th percentile
    spread: tuple[float, float] | None = None
    flop_per_second: float | None = None  # of the model's own operations, at the median
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    seconds_to_first_step: float | None = None
    # of the first step, whose weights and tokens are the same for every contestant
    loss: float | None = None
    grad_norm: float | None = None  # of the same step, before clipping
    waits_for_device: str | None = None  # what synchronizes in a step, by torch's own check
    gemm_flop_per_second: float | None = None  # of the row that measures the device itself
    attention_flop_per_second: float | None = None
    failure: str | None = None


def tiny(case: Case) -> Case:
    """`case` at a size that any machine runs in seconds."""
    model = case.model | TINY | (TINY_MIXTURE if "num_experts" in case.model else {})
    values = asdict(case) | {
        "model": model,
        "length": 64,
        "rows": 2,
        "torch_compile": False,
        "goal": None,
    }
    return Case(**values)


def documents(
    data: Path | None, tokenizer: Path | None, vocabulary: int, median: float
) -> Iterator[list[int]]:
    """Documents as ids, without end: a file's rows, round and round, or random ones of `median`
    tokens.
    """
    if data is None or tokenizer is None:
        draw = random.Random(0)
        while True:
            yield draw.choices(
                range(3, vocabulary), k=max(2, int(median * draw.lognormvariate(0.0, 1.0)))
            )
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    lines = [line for line in data.read_text().splitlines() if line.strip()]
    for line in itertools.cycle(lines):
        ids = encode("\n".join(str(value) for value in json.loads(line).values()))["input_ids"]
        yield [i % vocabulary for i in (*ids, encode.eos_token_id)]


def rows(case: Case, options: argparse.Namespace) -> list[list[list[int]]]:
    """The rows of `STEPS` steps, full of documents; a row's last document is cut where the row is
    full.
    """
    source = documents(
        options.data, options.tokenizer, case.model["vocab_size"], case.length / options.documents
    )
    made = []
    for _ in range(STEPS * case.rows):
        row: list[list[int]] = []
        while (room := case.length - sum(map(len, row))) > 0:
            row.append(next(source)[:room])
        made.append(row)
    return made


def flop_per_token(case: Case) -> float:
    """6N + 12LHQT; under LoRA 4N, and by DPO 2N more for the reference."""
    import torch

    from finetune.config.pretrained import load_config
    from finetune.config.schema import Model
    from finetune.flops import flop_per_token_of, forward_flop_per_token_of
    from finetune.models.load import build_on_meta, count_parameters

    config = load_config(Model(model_config=case.model))
    multiplied = count_parameters(build_on_meta(config, torch.float32)).multiplied
    frozen = multiplied if case.use_peft else 0
    flop = flop_per_token_of(config, parameters=multiplied, length=case.length, frozen=frozen)
    if case.method == "dpo":
        flop += forward_flop_per_token_of(config, parameters=multiplied, length=case.length)
    return flop


def summarize(
    case: Case, who: str, speeds: list[float], peak: float | None, memory: int | None, **more: Any
) -> Result:
    """The result of steps at these tokens per second. `peak`: of the device, FLOP per second."""
    median, (low, _, high) = statistics.median(speeds), statistics.quantiles(speeds, n=4)
    flops = median * flop_per_token(case)
    return Result(
        case.name, who, median, (low, high), flops, flops / peak if peak else None, memory, **more
    )
