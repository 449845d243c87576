"""What each technique gains on a CPU: the same model and batches with one technique taken away at a
time, in turns.

    python benchmarks/techniques.py --data gsm8k_train.jsonl --tokenizer stories260k [--compile]
    python benchmarks/techniques.py --checkpointing    # what is kept of a layer; no data
    python benchmarks/techniques.py --compiled-loss    # beside the eager loss; no data
    python benchmarks/techniques.py --expert-adapters  # beside peft's way; no data
    python benchmarks/techniques.py --gated            # an MLP beside transformers' own; no data

One thread, CPU seconds: what other jobs on the machine take is not counted. The loss's memory is
that of a process of its own at a vocabulary of 128,256.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)


def variants(workspace: Path, compiled: bool) -> dict[str, tuple[Any, Any]]:
    """Name -> (model, optimizer).

    Everything on is the first; the others lack what their name says.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from finetune.config.schema import Optimization
    from finetune.models.cross_entropy import install_loss
    from finetune.models.decoder_layers import compile_layers
    from finetune.models.documents import install_attention
    from finetune.optim.optimizers import build_optimizer

    def make(
        attention: str = "auto",
        loss: str = "ours",
        optim: str = "adamw_torch_fused",
        compile_: bool = False,
    ) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            workspace / "model", dtype=torch.float32
        ).train()
        install_attention(model, attention)
        install_loss(model)
        if loss == "whole":
            _whole_logits(model)
        if compile_:
            compile_layers(model)
        return model, build_optimizer(model, Optimization(optim=optim, learning_rate=1e-3))  # type: ignore[arg-type]

    made = {
        "everything": make(),
        "attention under transformers' O(tokens^2) mask": make(attention="sdpa"),
        "whole logits of all positions": make(loss="whole"),
        "foreach AdamW (adamw_torch)": make(optim="adamw_torch"),
        "bf16 moments (adamw_bf16_moments)": make(optim="adamw_bf16_moments"),
    }
    return made | ({"everything, and torch_compile": make(compile_=True)} if compiled else {})


def _whole_logits(model: Any) -> None:
    """The loss as transformers computes it."""
    import torch.nn.functional as F

    def forward(hidden: Any, labels: Any, *_: Any) -> Any:
        logits = F.linear(hidden, head.weight).float()
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )

    head = model.get_output_embeddings()
    head.forward = forward


def step_of(model: Any, optimizer: Any) -> Callable[[Any], None]:
    """One optimizer step on one step batch."""
    import torch

    def step(batch: Any) -> None:
        for micro_batch in batch.micro_batches:
            (model(**micro_batch.inputs) / batch.trained_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def loss_memory(
    kind: str, vocabulary: int = 128_256, hidden: int = 512, tokens: int = 2048
) -> None:
    """Prints the most memory, in bytes, that a loss and its gradients take beyond their inputs."""
    import torch
    import torch.nn.functional as F

    from benchmarks.layouts import peak, reset_peak
    from finetune.models.cross_entropy import linear_cross_entropy
    from finetune.models.loss_chunks import HeadProduct

    torch.set_num_threads(1)
    states = torch.randn(tokens, hidden, requires_grad=True)
    # in place: a copy would be the peak
    weight = torch.empty(vocabulary, hidden).normal_(std=0.02).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,))
    before = reset_peak(states.device)
    if kind == "chunked":
        linear_cross_entropy(HeadProduct(states, weight), labels).backward()
    else:
        F.cross_entropy(F.linear(states, weight), labels, reduction="sum").backward()
    print(peak(states.device) - before)


def checkpointing(rounds: int, tokens: int = 4096) -> None:
    """Prints the CPU time of forward and backward over one document, by what checkpointed layers
    keep.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune.models.cross_entropy import install_loss
    from finetune.models.decoder_layers import checkpoint_activations
    from finetune.models.documents import install_attention

    def make(keeps: Any) -> Any:
        sizes = {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "vocab_size": 512,
        }
        model: Any = LlamaForCausalLM(
            LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
        ).train()
        install_attention(model)
        install_loss(model)
        if keeps is not None:
            checkpoint_activations(model, 1, keeps)
        return model

    torch.set_num_threads(1)
    ids = torch.randint(0, 512, (1, tokens))
    boundaries = torch.tensor([0, tokens], dtype=torch.int32)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.arange(tokens)[None],
        "cu_seq_lens": boundaries,
    }
    kept = (None, "nothing", "attention", "attention_and_projections")
    models = {keeps: make(keeps) for keeps in kept}
    seconds: dict[Any, list[float]] = {keeps: [] for keeps in kept}
    for index in range(rounds + 1):
        for keeps, model in models.items():
            began = time.process_time()
            model(**batch, max_document_length=tokens).backward()
            if index:
                seconds[keeps].append(time.process_time() - began)
    print("| a checkpointed layer keeps | CPU s, median | x no checkpointing |\n|---|---|---|")
    for keeps, measured in seconds.items():
        ratio = statistics.median(m / b for m, b in zip(measured, seconds[None], strict=True))
        print(
            f"| {keeps or '(no checkpointing)'} | {statistics.median(measured):.2f} | {ratio:.2f} |"
        )


def expert_adapters(rounds: int) -> None:
    """Prints what LoRA on a layer of experts takes, in turns with peft's way: CPU time, and the
    most memory of each.
    """
    seconds: dict[str, list[float]] = {way: [] for way in ("peft", "ours")}
    steps = {way: adapted_layer(way) for way in seconds}
    for index in range(rounds + 1):
        for way, step in steps.items():
            began = time.process_time()
            step()
            if index:
                seconds[way].append(time.process_time() - began)
    print(
        "| LoRA on experts | CPU s, median | x peft | MiB beyond the weights | x peft |\n"
        "|---|---|---|---|---|"
    )
    taken = {}
    for way, measured in seconds.items():
        # What is freed must be returned, to be seen: glibc else keeps tensors below 32 MiB.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, __file__, "--expert-adapters-memory", way]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        taken[way] = json.loads(done.stdout.splitlines()[-1])
        ratio = statistics.median(m / b for m, b in zip(measured, seconds["peft"], strict=True))
        memory = f"{taken[way] / 2**20:,.0f} | {taken[way] / taken['peft']:.2f}"
        print(f"| {way} | {statistics.median(measured):.2f} | {ratio:.2f} | {memory} |")


def adapted_layer(way: str, tokens: int = 512) -> Callable[[], None]:
    """Forward and backward of a layer of 32 experts, 4 for each token, with adapters of rank 16 on
    both weights.
    """
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from finetune.models.experts import multiply_by_factors

    torch.set_num_threads(1)
    sizes = {
        "hidden_size": 512,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 1,
        "vocab_size": 64,
    }
    config: Any = Qwen3MoeConfig(
        **sizes, num_experts=32, num_experts_per_tok=4, num_attention_heads=4
    )
    model: Any = Qwen3MoeForCausalLM(config).requires_grad_(False)
    model.set_experts_implementation("grouped_mm")
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    inject_adapter_in_model(LoraConfig(r=16, target_modules=[], target_parameters=targets), model)
    if way == "ours":
        multiply_by_factors(model)
    layer = model.model.layers[0].mlp
    hidden = torch.randn(1, tokens, 512, requires_grad=True)

    def step() -> None:
        output = layer(hidden)
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()
        layer.zero_grad()
        hidden.grad = None

    return step


def expert_adapters_memory(way: str) -> None:
    """Prints the most memory of a step, in bytes beyond what was there before."""
    import torch

    from benchmarks.layouts import peak, reset_peak

    step = adapted_layer(way)
    step()
    before = reset_peak(torch.device("cpu"))
    step()
    print(peak(torch.device("cpu")) - before)


def compiled_loss(rounds: int, tokens: int = 1024, hidden: int = 256) -> None:
    """Prints the CPU time of the loss in bf16, forward with its gradients, and of one chunk of it,
    eager and compiled.
    """
    import torch

    from finetune.constants import loss_chunk_tokens
    from finetune.models.cross_entropy import linear_cross_entropy
    from finetune.models.loss_chunks import (
        UNCHANGED,
        ChunkOptions,
        HeadProduct,
        compute_chunk,
        compute_fused_chunk,
    )

    torch.set_num_threads(1)
    torch.fx.experimental._config.use_duck_shape = False
    functions = {
        "eager": compute_chunk,
        "compiled": torch.compile(compute_fused_chunk, dynamic=True),
    }
    print(
        "| vocabulary | what | eager, CPU ms | compiled, CPU ms | x eager |\n|---|---|---|---|---|"
    )
    for vocabulary in (32_000, 128_256):
        states = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = (
            torch.empty(vocabulary, hidden, dtype=torch.bfloat16).normal_(std=0.02).requires_grad_()
        )
        chunk = loss_chunk_tokens(vocabulary, "cpu")
        scores = (states[:chunk] @ weight.T).detach()
        labels = torch.randint(0, vocabulary, (tokens,))
        seconds: dict[str, list[list[float]]] = {
            "one chunk": [[], []],
            "the loss and its gradients": [[], []],
        }
        for index in range(rounds + 1):
            for which, function in enumerate(functions.values()):
                began = time.process_time()
                function(scores, labels[: len(scores)], None, UNCHANGED, 0.0, torch.bfloat16)
                middle = time.process_time()
                linear_cross_entropy(
                    HeadProduct(states, weight), labels, ChunkOptions(function=function)
                )
                if index:
                    seconds["one chunk"][which].append(middle - began)
                    seconds["the loss and its gradients"][which].append(
                        time.process_time() - middle
                    )
        for what, (eager, compiled) in seconds.items():
            what = (
                f"one chunk, {len(scores)} tokens"
                if what == "one chunk"
                else f"{what}, {tokens:,} tokens"
            )
            ratio = statistics.median(c / e for c, e in zip(compiled, eager, strict=True))
            times = " | ".join(
                f"{1e3 * statistics.median(each):,.0f}" for each in (eager, compiled)
            )
            print(f"| {vocabulary:,} | {what} | {times} | {ratio:.2f} |")


def gated(rounds: int, tokens: int = 1024) -> None:
    """Prints the CPU time of an MLP's forward and backward in fp32, what it keeps and its peak, in
    tensors [tokens, intermediate size], by transformers' forward and as models/gating.py.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from finetune.models.gating import install_gating
    from tests.plan.traced import allocated_after, allocated_peak

    torch.set_num_threads(1)
    print("| hidden, intermediate | way | CPU ms | kept | peak |\n|---|---|---|---|---|")
    for hidden, width in ((256, 1024), (1024, 3584)):
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=width, num_hidden_layers=1, vocab_size=64
        )
        own: Any = AutoModelForCausalLM.from_config(config).requires_grad_(False)
        ours: Any = AutoModelForCausalLM.from_config(config).requires_grad_(False)
        install_gating(ours)
        layers = {"transformers": own.model.layers[0].mlp, "ours": ours.model.layers[0].mlp}
        x = torch.randn(tokens, hidden, requires_grad=True)

        def train(mlp: Any, x: Any = x) -> None:
            mlp(x).backward(x.detach())

        seconds: dict[str, list[float]] = {way: [] for way in layers}
        for _ in range(rounds):
            for way, mlp in layers.items():
                began = time.process_time()
                train(mlp)
                seconds[way].append(time.process_time() - began)
        size = 4 * tokens * width
        for way, mlp in layers.items():
            kept = allocated_after(partial(mlp, x)) / size
            peak = allocated_peak(partial(train, mlp)) / size
            spent = 1e3 * statistics.median(seconds[way])
            print(f"| {hidden}, {width} | {way} | {spent:.1f} | {kept:.2f} | {peak:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--compile", action="store_true", help="also torch_compile, which takes a minute to start"
    )
    parser.add_argument("--loss-memory", choices=["chunked", "whole"], help=argparse.SUPPRESS)
    parser.add_argument(
        "--checkpointing", action="store_true", help="measure what checkpointed layers keep, alone"
    )
    parser.add_argument(
        "--compiled-loss", action="store_true", help="measure the compiled loss, alone"
    )
    parser.add_argument(
        "--expert-adapters", action="store_true", help="measure LoRA on experts, alone"
    )
    parser.add_argument("--gated", action="store_true", help="measure gated MLPs, alone")
    parser.add_argument(
        "--expert-adapters-memory", choices=["peft", "ours"], help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.loss_memory:
        loss_memory(options.loss_memory)
        return
    if options.expert_adapters_memory:
        expert_adapters_memory(options.expert_adapters_memory)
        return
    if options.expert_adapters:
        expert_adapters(options.steps)
        return
    if options.gated:
        gated(options.steps)
        return
    if options.checkpointing:
        checkpointing(options.steps)
        return
    if options.compiled_loss:
        compiled_loss(options.steps)
        return
    import torch

    from benchmarks.contestant import step_batches
    from benchmarks.speed import MODEL, prepare

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="finetune-techniques-") as folder:
        workspace = Path(folder)
        prepare(workspace, options.data, options.tokenizer, MODEL)
        batches = step_batches(workspace)
        steps = {
            name: step_of(*made) for name, made in variants(workspace, options.compile).items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for index in range(options.steps + 3):
            batch = batches.step_batch(index)
            for name, step in steps.items():
                began = time.process_time()
                step(batch)
                if index >= 3:
                    seconds[name].append(time.process_time() - began)
    base = seconds["everything"]
    print(
        "| step with | CPU s, median | x everything (median of the steps' ratios) |\n|---|---|---|"
    )
    for name, measured in seconds.items():
        ratio = statistics.median(m / b for m, b in zip(measured, base, strict=True))
        print(f"| {name} | {statistics.median(measured):.3f} | {ratio:.3f} |")
    for kind in ("chunked", "whole"):
        command = [sys.executable, __file__, "--loss-memory", kind]
        taken = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
        print(
            f"| loss of 2,048 tokens, vocabulary 128,256, {kind}: peak memory | "
            f"{taken / 2**20:,.0f} MiB | |"
        )


if __name__ == "__main__":
    main()
