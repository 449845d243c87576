"""Rows per second from a file to masked tokens: ours beside the tokenizer's raw `encode_batch` and
TRL's preparation.

    python benchmarks/data.py --data gsm8k_train.jsonl --tokenizer llama3 --rows 100000

The same rows (question, answer; repeated to `--rows`) and the same tokenizer in every measurement.
Each round takes all of them in turn, so that a slow minute of the machine slows all alike; medians
are compared, of the time on the clock and of the processor's (which other programs disturb less).
Raw encoding starts from texts in memory and ends with encodings; ours and TRL's start from the
file, read, render and mask, and end with tokens on disk. TRL is measured where it is installed
(`pip install trl`).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

from finetune.config.reader import read_recipe
from finetune.constants import count_cores
from finetune.data.prepare import open_cached_store, prepare_data
from finetune.data.tokenizer import load_tokenizer
from tests.data.world import Rank

# The Llama 3 template with the markers that TRL asks for; ours needs none.
MARKED = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] | trim + '<|eot_id|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] | trim + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
CHUNK = 5000  # texts in a call of encode_batch; its encodings are thrown away before the next


@dataclass(frozen=True)
class Format:
    """A way to put the rows: as plain prompts and completions, or as conversations that the chat
    template renders.
    """

    title: str
    to_row: Callable[[dict[str, str]], dict[str, Any]]
    to_text: Callable[[dict[str, str], Any], str]


def _messages(row: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": row["answer"]},
    ]


FORMATS = (
    Format(
        "prompt and completion",
        lambda row: {"prompt": row["question"], "completion": row["answer"]},
        lambda row, tokenizer: row["question"] + row["answer"] + tokenizer.eos_token,
    ),
    Format(
        "conversations",
        lambda row: {"messages": _messages(row)},
        lambda row, tokenizer: tokenizer.apply_chat_template(_messages(row), tokenize=False),
    ),
)


Seconds = tuple[float, float]  # on the clock, and of the processor (children included)


@contextmanager
def timed() -> Iterator[list[float]]:
    """Puts the seconds that its block took into the list that it gives."""
    seconds: list[float] = []
    before = sum(os.times()[:4])
    started = time.perf_counter()
    yield seconds
    seconds += [time.perf_counter() - started, sum(os.times()[:4]) - before]


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", required=True, type=Path, help="JSON Lines with question and answer"
    )
    parser.add_argument(
        "--tokenizer", required=True, type=Path, help="a folder with tokenizer.json"
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--trl-rounds",
        type=int,
        default=1,
        help="of the rounds, those in which TRL takes part: it is slow",
    )
    options = parser.parse_args()
    rows = list(islice(cycle(map(json.loads, options.data.read_text().splitlines())), options.rows))
    print(
        f"{options.rows:,} rows, {options.rounds} rounds, {count_cores()} cores, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    print(
        "| rows as | way | rows/s | of raw encode_batch | rows per CPU second | of raw |\n"
        "|---|---|---|---|---|---|"
    )
    for kind in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            measure(kind, rows, options, Path(folder))


def measure(
    kind: Format, rows: list[dict[str, str]], options: argparse.Namespace, folder: Path
) -> None:
    """Prints one line for each way to prepare rows of one kind."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(kind.to_row(row)) + "\n" for row in rows))
    recipe_file = folder / "recipe.yaml"
    recipe_file.write_text(
        json.dumps(
            {
                "model_config": {"model_type": "llama"},
                "tokenizer_name_or_path": str(options.tokenizer.resolve()),
                "datasets": [{"path": str(data)}],
                "dataset_cache_dir": str(folder / "cache"),
            }
        )
    )
    recipe = read_recipe(str(recipe_file))
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    marked = load_tokenizer(recipe.model, recipe.data)
    marked.chat_template = MARKED
    texts = [kind.to_text(row, tokenizer) for row in rows]
    ways: dict[str, Callable[[int], Seconds]] = {
        "raw encode_batch": lambda _: raw(texts, tokenizer),
        "finetune": lambda number: ours(recipe, tokenizer, folder / f"cache-{number}"),
        "finetune, single thread": lambda number: ours(
            recipe, tokenizer, folder / f"one-{number}", threads=1
        ),
    }
    if has_trl() and options.trl_rounds:
        ways["TRL, 1 process"] = lambda number: trl(kind, data, marked, folder / f"trl-{number}", 1)
        ways["TRL, 2 processes"] = lambda number: trl(
            kind, data, marked, folder / f"trl2-{number}", 2
        )
    seconds: dict[str, list[Seconds]] = {way: [] for way in ways}
    for number in range(options.rounds):
        for way, run in ways.items():
            if not way.startswith("TRL") or number < options.trl_rounds:
                seconds[way].append(run(number))
    clock, cpu = (
        {way: statistics.median(t[i] for t in taken) for way, taken in seconds.items()}
        for i in (0, 1)
    )
    for way in ways:
        columns = [
            f"{len(rows) / taken[way]:,.0f} | {taken['raw encode_batch'] / taken[way]:.2f}"
            for taken in (clock, cpu)
        ]
        print(f"| {kind.title} | {way} | {' | '.join(columns)} |", flush=True)
    prepare_data(recipe, tokenizer, Rank())
    start = time.perf_counter()
    prepare_data(recipe, tokenizer, Rank())
    print(
        f"| {kind.title} | start from the cache: {time.perf_counter() - start:.2f} s | | | | |",
        flush=True,
    )


def raw(texts: list[str], tokenizer: Any) -> Seconds:
    """Seconds that the tokenizer's own batch encoding takes, with all cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with timed() as seconds:
        for begin in range(0, len(texts), CHUNK):
            tokenizer.backend_tokenizer.encode_batch(texts[begin : begin + CHUNK])
    return seconds[0], seconds[1]


def ours(recipe: Any, tokenizer: Any, folder: Path, threads: int | None = None) -> Seconds:
    """Seconds from the file to tokens and masks in a new cache."""
    data = replace(recipe.data, dataset_cache_dir=str(folder), dataset_num_proc=threads)
    with timed() as seconds:
        open_cached_store(recipe.data.datasets[0], data, tokenizer, local_rank=0)
    return seconds[0], seconds[1]


def has_trl() -> bool:
    """Whether TRL can be imported."""
    from importlib.util import find_spec

    return find_spec("trl") is not None


def trl(kind: Format, data: Path, tokenizer: Any, folder: Path, processes: int) -> Seconds:
    """Seconds that SFTTrainer's own preparation takes from the file, with the same mask."""
    import datasets
    from transformers import AutoModelForCausalLM, LlamaConfig
    from trl import SFTConfig, SFTTrainer

    os.environ["TOKENIZERS_PARALLELISM"] = "true" if processes == 1 else "false"
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    chat = "messages" in kind.to_row({"question": "", "answer": ""})
    arguments = SFTConfig(
        output_dir=str(folder),
        max_length=2048,
        report_to="none",
        use_cpu=True,
        bf16=False,
        dataset_num_proc=processes if processes > 1 else None,
        **({"assistant_only_loss": True} if chat else {"completion_only_loss": True}),
    )
    preparing: list[float] = []
    prepare = SFTTrainer._prepare_dataset

    def watched(*given: Any, **named: Any) -> Any:
        nonlocal preparing
        with timed() as preparing:
            return prepare(*given, **named)

    SFTTrainer._prepare_dataset = watched
    try:
        with timed() as loading:
            rows = datasets.load_dataset(
                "json", data_files=str(data), split="train", cache_dir=str(folder / "datasets")
            )
        SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    finally:
        SFTTrainer._prepare_dataset = prepare
    return loading[0] + preparing[0], loading[1] + preparing[1]


if __name__ == "__main__":
    main()
