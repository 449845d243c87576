"""Eight LoRA adapters on one base: their `forward_backward` one after the other beside one pass of
all, as `finetune serve-training` does them, and beside PEFT's mixed batches.

    python benchmarks/adapters.py [--model FOLDER] [--datums 1 4] [--tokens 32 128]

Without a model, a Llama with random weights (hidden size 512, 4 layers). One process; fp32 on the
CPU, bf16 on a GPU. Every row is of one run, its times the median of `--rounds` that take turns.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch import nn  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast  # noqa: E402

import finetune  # noqa: E402
from finetune.plan.table import align_columns  # noqa: E402
from finetune.service.operations import Operations  # noqa: E402
from finetune.service.serve import prepare  # noqa: E402

ADAPTERS = 8
RANK = 16
ROOM = 2048  # tokens of a micro-batch
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CROSS_ENTROPY = {"loss": "cross_entropy", "options": {}}
HEADINGS = ("datums", "tokens", "in turn, ms", "one pass", "PEFT mixed", "loss differs by")
Data = list[dict[str, Any]]
Losses = list[float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--datums", type=int, nargs="+", default=[1, 4], help="of each adapter")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128], help="of a datum")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = options.model or make_model(folder / "model")
        recipe = finetune.load_recipe(
            model_name_or_path=str(base),
            output_dir=folder / "run",
            use_peft=True,
            lora_r=RANK,
            lora_alpha=RANK,
            max_length=ROOM,
        )
        with finetune.Session(prepare(recipe)) as session:
            service = Service(session, folder)
            contestants = {"turn": service.in_turn, "together": service.together}
            contestants["mixed"] = partial(mixed, make_mixed(str(base)))
            rows = [HEADINGS]
            vocabulary = AutoConfig.from_pretrained(base).vocab_size
            for datums in options.datums:
                for tokens in options.tokens:
                    every = make_data(vocabulary, datums, tokens)
                    rows.append(compare(contestants, every, options.rounds))
    print(align_columns(rows, ()))


def make_model(folder: Path) -> Path:
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        vocab_size=8192,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    return folder


def make_data(vocabulary: int, datums: int, tokens: int) -> list[Data]:
    """The datums of each adapter."""
    ids = torch.randint(0, vocabulary, (ADAPTERS, datums, tokens + 1)).tolist()
    return [[as_datum(row) for row in own] for own in ids]


def as_datum(ids: list[int]) -> dict[str, Any]:
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return {"tokens": ids[:-1], "inputs": inputs}


def compare(
    contestants: dict[str, Callable[[list[Data]], Losses]], every: list[Data], rounds: int
) -> tuple[str, ...]:
    """A row of the table."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, Losses] = {}
    for _ in range(rounds + 1):  # of which the first does not count
        for name, contestant in contestants.items():
            begun = time.perf_counter()
            losses[name] = contestant(every)
            times[name].append(time.perf_counter() - begun)
    alone = median(times["turn"][1:])
    pairs = zip(losses["together"], losses["turn"], strict=True)
    far = max(abs(one - other) / other for one, other in pairs)
    return (
        str(len(every[0])),
        str(len(every[0][0]["tokens"])),
        f"{alone * 1000:.1f}",
        *(f"{alone / median(times[name][1:]):.2f}x" for name in ("together", "mixed")),
        f"{far:.1e}",
    )


class Service:
    """The operations of a service on this process. Reading a loss waits for the device."""

    def __init__(self, session: finetune.Session, folder: Path) -> None:
        self.operations = Operations(session, folder / "states")
        self.models = []
        for number in range(ADAPTERS):
            target = f"{number}/0"
            own = {"model": str(number), "form": {"rank": RANK, "seed": number}}
            self.operations.run("create", {"state": None, "target": target, **own})
            self.models.append({"state": target, **own})

    def in_turn(self, every: list[Data]) -> Losses:
        parts = self.list_parts(every)
        answers = [self.operations.run("forward_backward", own | CROSS_ENTROPY) for own in parts]
        return [answer["loss"] for answer in answers]

    def together(self, every: list[Data]) -> Losses:
        asked = {"parts": self.list_parts(every)} | CROSS_ENTROPY
        answer = self.operations.run("forward_backward_together", asked)
        return [own["loss"] for own in answer["answers"]]

    def list_parts(self, every: list[Data]) -> list[dict[str, Any]]:
        self.operations._gradients.clear()
        return [model | {"data": own} for model, own in zip(self.models, every, strict=True)]


def make_mixed(base: str) -> Any:
    """The base with as many adapters of PEFT."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).to(DEVICE)
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
    mixing = get_peft_model(model, config, adapter_name="0")
    for number in range(1, ADAPTERS):
        mixing.add_adapter(str(number), config)
    for name, parameter in mixing.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return mixing.eval()  # PEFT mixes adapters in this mode alone; there is no dropout


def mixed(model: Any, every: list[Data]) -> Losses:
    model.zero_grad()
    data = [datum for own in every for datum in own]
    ids = torch.tensor([datum["tokens"] for datum in data], device=DEVICE)
    targets = torch.tensor([datum["inputs"]["target_tokens"] for datum in data], device=DEVICE)
    names = [str(number) for number, own in enumerate(every) for _ in own]
    logits = model(ids, use_cache=False, adapter_names=names).logits.float()
    scores = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    scores.sum().backward()
    losses: Losses = scores.detach().view(ADAPTERS, -1).sum(1).tolist()
    return losses


if __name__ == "__main__":
    main()
