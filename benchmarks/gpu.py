"""Tokens per second, MFU and peak memory on one GPU, ours and TRL's, in under ten minutes for the lot.

    python benchmarks/gpu.py --data train.jsonl --tokenizer llama3 --output benchmarks/results
    python benchmarks/gpu.py --smoke                                      # tiny, also on a CPU: does it still run?

Weights are random and made on the device, so nothing is downloaded. Rows are real text, packed as in training; without
--data, random ids in documents of random length. Each case is a process of its own, so that one that runs out of memory
takes no other with it. MFU counts 6N + 12 L H Q T FLOP a token (4N + ... under LoRA; N without an untied input embedding)
against the device's dense bf16 peak; recomputed activations are not counted.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

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
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 2}


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    name: str
    model: dict[str, Any]
    length: int  # tokens in a row
    rows: int  # in a step
    use_peft: bool = False
    checkpointed: bool = False  # activations of every layer
    optim: str = "adamw_torch_fused"
    torch_compile: bool = True
    goal: float | None = None  # tokens per second on an H200


CASES = (
    Case("1B full, 4096", LLAMA_1B, length=4096, rows=4, goal=50_000),
    Case("1B full, 4096, not compiled", LLAMA_1B, length=4096, rows=4, torch_compile=False),
    Case("8B LoRA r16, 4096", LLAMA_8B, length=4096, rows=2, use_peft=True, goal=13_500),
    Case("8B full, 8192", LLAMA_8B, 8192, rows=2, checkpointed=True, optim="adamw_bf16_moments", goal=8_200),
)


@dataclass(frozen=True)
class Result:
    """What a case came to. `failure` says why there is nothing else."""

    case: str
    who: str
    tokens_per_second: float | None = None
    spread: tuple[float, float] | None = None  # of the steps' tokens per second: 25th and 75th percentile
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    seconds_to_first_step: float | None = None
    loss: float | None = None
    waits_for_device: str | None = None  # what synchronizes in a step, by torch's own check
    failure: str | None = None


def tiny(case: Case) -> Case:
    """`case` at a size that any machine runs in seconds."""
    model = case.model | TINY
    values = asdict(case) | {"model": model, "length": 64, "rows": 2, "torch_compile": False, "goal": None}
    return Case(**values)


def documents(data: Path | None, tokenizer: Path | None, vocabulary: int) -> Iterator[list[int]]:
    """Documents as ids, without end: a file's rows, round and round, or random ones."""
    if data is None or tokenizer is None:
        random.seed(0)
        while True:
            yield random.choices(range(3, vocabulary), k=max(2, int(random.lognormvariate(5.5, 1.0))))
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    lines = [line for line in data.read_text().splitlines() if line.strip()]
    for line in itertools.cycle(lines):
        ids = encode("\n".join(str(value) for value in json.loads(line).values()))["input_ids"]
        yield [i % vocabulary for i in (*ids, encode.eos_token_id)]


def rows(case: Case, count: int, data: Path | None, tokenizer: Path | None) -> list[list[list[int]]]:
    """`count` full rows of documents; a row's last document is cut where the row is full."""
    source = documents(data, tokenizer, case.model["vocab_size"])
    made = []
    for _ in range(count):
        row: list[list[int]] = []
        while (room := case.length - sum(map(len, row))) > 0:
            row.append(next(source)[:room])
        made.append(row)
    return made


def step_batches(case: Case, steps: int, data: Path | None, tokenizer: Path | None) -> list[Any]:
    """Packed step batches of one micro-batch each, every token trained, as the data room makes them."""
    import torch

    from finetune.constants import IGNORE_INDEX
    from finetune.data.batches import StepBatch
    from finetune.data.collate import MicroBatch

    packed = rows(case, steps * case.rows, data, tokenizer)
    batches = []
    for step in range(steps):
        examples = [ids for row in packed[step * case.rows : (step + 1) * case.rows] for ids in row]
        lengths = torch.tensor([len(ids) for ids in examples])
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        labels = torch.tensor([i for ids in examples for i in [*ids[1:], IGNORE_INDEX]])[None]
        micro_batch = MicroBatch(
            input_ids=torch.tensor([i for ids in examples for i in ids])[None],
            labels=labels,
            position_ids=torch.cat([torch.arange(len(ids)) for ids in examples])[None],
            trained_positions=(labels.flatten() != IGNORE_INDEX).nonzero().flatten(),
            cu_seq_lens=ends.to(torch.int32),
            max_document_length=int(lengths.max()),
            example_ids=(),
        )
        trained = len(micro_batch.trained_positions)
        if torch.cuda.is_available():
            micro_batch = micro_batch.pin_memory()
        batches.append(StepBatch(step, 0.0, (micro_batch,), tokens=int(ends[-1]), trained_tokens=trained))
    return batches


def prepare(case: Case, workspace: Path) -> tuple[Any, Any, Any, float]:
    """(world, sharded model, optimizer, FLOP per token), made by the same functions as a run's."""
    import torch
    import yaml

    from finetune.distributed.accelerate_config import read_sharding
    from finetune.distributed.parallelize import Values, parallelize
    from finetune.distributed.world import join
    from finetune.flops import flop_per_token_of
    from finetune.models.attention import install_attention
    from finetune.models.build import build_on_meta
    from finetune.models.layers import checkpoint_activations, compile_layers
    from finetune.models.load import count_parameters
    from finetune.models.lora import add_adapters, is_adapter, with_adapters
    from finetune.models.loss import install_loss
    from finetune.optim.optimizer import build_optimizer
    from finetune.pretrained_config import load_config
    from finetune.recipe.schema import Lora, Model, Optimization

    config_file = workspace / "accelerate.yaml"
    layout = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16"}
    config_file.write_text(yaml.safe_dump(layout | {"fsdp_config": {"fsdp_version": 2}}))
    world = join(read_sharding(str(config_file), None, {}))
    config = load_config(Model(model_config=case.model))
    model = build_on_meta(config, torch.float32)
    install_attention(model)
    install_loss(model)
    torch.manual_seed(0)

    def random_values(name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        shape = [part.stop - part.start for part in slices]
        if "norm" in name:
            return torch.ones(shape, device=world.device)
        return torch.randn(shape, device=world.device) * 0.02

    values: Values = random_values
    if case.use_peft:
        add_adapters(model, Lora(use_peft=True, lora_r=16), torch.bfloat16)
        shapes = {name: p.shape for name, p in model.named_parameters() if is_adapter(name)}
        values = with_adapters(values, shapes, seed=0)
    if case.checkpointed:
        checkpoint_activations(model, every=1)
    multiplied = count_parameters(model).multiplied
    flop = flop_per_token_of(
        config, parameters=multiplied, length=case.length, frozen=multiplied if case.use_peft else 0
    )
    model = parallelize(model, values, world).train()
    if case.torch_compile:
        compile_layers(model)
    return world, model, build_optimizer(model, Optimization(optim=case.optim, learning_rate=1e-5)), flop  # type: ignore[arg-type]


def train_ours(case: Case, steps: int, warm_up: int, options: argparse.Namespace) -> Result:
    """Trains `steps` steps after `warm_up`; the clock is the device's own."""
    import torch

    from finetune.distributed.parallelize import clip_gradients
    from finetune.training.loop import accumulate_gradients
    from finetune.training.throughput import peak_flops, peak_memory_bytes

    began = time.perf_counter()
    batches = step_batches(case, 4, options.data, options.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        world, model, optimizer, flop = prepare(case, Path(folder))

    def step(index: int) -> torch.Tensor:
        batch = batches[index % len(batches)]
        loss_sum = accumulate_gradients(model, batch, world)
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss_sum / batch.trained_tokens

    loss = step(0).item()
    first = time.perf_counter() - began
    for index in range(1, warm_up):
        step(index)
    waits = synchronizations(lambda: step(warm_up)) if world.device.type == "cuda" else None
    seconds = timed(step, warm_up, steps, world.device.type)
    speeds = [batches[(warm_up + i) % len(batches)].tokens / s for i, s in enumerate(seconds)]
    median, peak = statistics.median(speeds), peak_flops(world.device)
    low, _, high = statistics.quantiles(speeds, n=4)
    return Result(
        case=case.name,
        who="finetune",
        tokens_per_second=median,
        spread=(low, high),
        mfu=median * flop / peak if peak else None,
        peak_memory_bytes=peak_memory_bytes(world.device),
        seconds_to_first_step=first,
        loss=loss,
        waits_for_device=waits,
    )


def timed(step: Callable[[int], Any], start: int, steps: int, device: str) -> list[float]:
    """Seconds of each step, by events in the device's queue: the host never waits in between."""
    import torch

    if device != "cuda":
        seconds = []
        for index in range(start, start + steps):
            began = time.perf_counter()
            step(index)
            seconds.append(time.perf_counter() - began)
        return seconds
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for index, mark in enumerate(marks[1:]):
        step(start + index)
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def synchronizations(step: Callable[[], Any]) -> str:
    """Runs a step that is warned of every wait for the device; "nothing", or the first place that waits.

    Warned, not stopped: an error in the middle of a step would leave gradients and sharded weights half done for the
    steps that are timed after it.
    """
    import traceback
    import warnings

    import torch

    waits: list[str] = []

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(ROOT / "finetune")]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
        if "synchronizing" in str(message):
            waits.append(place + str(message).splitlines()[0])

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return waits[0] if waits else "nothing"


def train_trl(case: Case, steps: int, warm_up: int, options: argparse.Namespace) -> Result:
    """The same model and rows under TRL's SFTTrainer, packed, bf16, its own defaults otherwise."""
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from finetune.flops import flop_per_token_of
    from finetune.training.throughput import peak_flops, peak_memory_bytes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.for_model(**case.model)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if case.use_peft else torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    multiplied = parameters - (0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel())
    flop = flop_per_token_of(
        config, parameters=multiplied, length=case.length, frozen=multiplied if case.use_peft else 0
    )
    needed = (steps + warm_up + 1) * case.rows
    examples = [ids for row in rows(case, needed, options.data, options.tokenizer) for ids in row if len(ids) > 1]
    seconds: list[float] = []

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.began)

    peft_config = None
    if case.use_peft:
        from peft import LoraConfig

        peft_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=case.rows,
            max_steps=steps + warm_up,
            max_length=case.length,
            packing=True,
            bf16=True,
            use_cpu=device.type == "cpu",
            gradient_checkpointing=case.checkpointed,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=device.type == "cuda",
        )
        tokenizer = _word_tokenizer(case.model["vocab_size"])
        dataset = Dataset.from_dict({"input_ids": examples})
        run = SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer, peft_config=peft_config)
        run.add_callback(Clock())
        run.train()
    speeds = [case.rows * case.length / s for s in seconds[warm_up:]]
    median, peak = statistics.median(speeds), peak_flops(device)
    low, _, high = statistics.quantiles(speeds, n=4)
    memory = peak_memory_bytes(device)
    return Result(case.name, "TRL, packed", median, (low, high), median * flop / peak if peak else None, memory)


def _word_tokenizer(vocabulary: int) -> Any:
    """SFTTrainer wants a tokenizer, although the rows are ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")


def run_case(case: Case, who: str, options: argparse.Namespace) -> Result:
    """One case in this process; what it fails of is its result."""
    steps, warm_up = (4, 2) if options.smoke else (options.steps, 5)
    try:
        return (train_ours if who == "finetune" else train_trl)(case, steps, warm_up, options)
    except ImportError as error:
        return Result(case.name, who, failure=f"not installed: {error}")
    except RuntimeError as error:  # out of memory, mostly
        text = "does not fit in memory" if "out of memory" in str(error) else str(error).splitlines()[0]
        return Result(case.name, who, failure=text)


def in_process_of_its_own(number: int, who: str, arguments: list[str], timeout: float) -> Result:
    """Runs a case by starting this script again; its last line on stdout is the result."""
    name = CASES[number].name
    command = [sys.executable, __file__, *arguments, "--case", str(number), "--who", who]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Result(name, who, failure=f"took more than {timeout:.0f} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return Result(name, who, failure=f"ended with {done.returncode}; its messages stand above")
    return Result(**json.loads(lines[-1]))


def table(results: list[Result]) -> list[str]:
    lines = [
        "| case | who | tokens/s, median | middle half | MFU | peak memory | goal | to first step | a step waits for |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    goals = {case.name: case.goal for case in CASES}
    for r in results:
        if r.failure or r.tokens_per_second is None or r.spread is None:
            lines.append(f"| {r.case} | {r.who} | {r.failure} | | | | | | |")
            continue
        goal = goals.get(r.case)
        lines.append(
            f"| {r.case} | {r.who} | {r.tokens_per_second:,.0f} | {r.spread[0]:,.0f} to {r.spread[1]:,.0f} "
            f"| {f'{r.mfu:.1%}' if r.mfu else ''} | {(r.peak_memory_bytes or 0) / 2**30:.1f} GiB "
            f"| {f'{goal:,.0f}' if goal and r.who == 'finetune' else ''} "
            f"| {f'{r.seconds_to_first_step:.0f} s' if r.seconds_to_first_step else ''} | {r.waits_for_device or ''} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSON lines; the texts of a line are one document")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer, for --data")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each case")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only to see that everything runs")
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for one case")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--who", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        case = tiny(CASES[options.case]) if options.smoke else CASES[options.case]
        answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # libraries print; stdout is for the result
        answers.write(json.dumps(asdict(run_case(case, options.who, options))) + "\n")
        answers.flush()
        os._exit(0)  # process groups and compile workers need no farewell

    results = []
    for who in ("finetune",) if options.without_trl else ("finetune", "TRL, packed"):
        for number, case in enumerate(CASES):
            if who != "finetune" and not case.torch_compile:
                continue  # the same to TRL as the case before it
            results.append(in_process_of_its_own(number, who, sys.argv[1:], options.timeout))
            print(table(results)[-1], file=sys.stderr, flush=True)
    print("\n".join(table(results)))
    options.output.mkdir(parents=True, exist_ok=True)
    name = "gpu-smoke" if options.smoke else "gpu"
    (options.output / f"{name}.md").write_text("\n".join(table(results)) + "\n")
    (options.output / f"{name}.json").write_text(json.dumps([asdict(r) for r in results], indent=1))


if __name__ == "__main__":
    main()
