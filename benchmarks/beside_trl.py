"""TRL's trainers beside a run of the recipe that `finetune convert` makes of the same file: the
loss, gradient norm and rate of each step, and the weights after the last one.

    pip install --no-deps --target /tmp/trl trl==1.16.0
    python benchmarks/beside_trl.py --trl /tmp/trl [--only dpo_ipo ...]
    python benchmarks/beside_trl.py --trl /tmp/trl --draw SEED COUNT    # keys drawn at random

A Llama of random weights, float32, one process on the CPU. A step is all rows, so that their order
changes nothing; under GRPO both get the same completions, drawn here. A case that differs is
printed with what the conversion says of its file: a reader decides whether that says why.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import chdir
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ["ACCELERATE_USE_CPU"] = "true"

import torch  # noqa: E402
import yaml  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig  # noqa: E402

import finetune  # noqa: E402
from finetune.convert.conversion import convert_file  # noqa: E402
from finetune.rollout.embedded import EmbeddedEngine  # noqa: E402
from finetune.rollout.engine import Ended, Request, Sampled, Sampling  # noqa: E402

QUICKSTART = Path(__file__).resolve().parents[1] / "recipes" / "quickstart"
ROWS = 8
SIZES = """
{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 3, num_attention_heads: 4,
num_key_value_heads: 2, initializer_range: 0.08}
"""
TOLERANCE = 1e-3  # relative; of the weights to their update
LORA = {"use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0}
COMMON = """
{bf16: false, dtype: float32, report_to: none, save_strategy: "no", logging_steps: 1,
num_train_epochs: 3, per_device_train_batch_size: 8, max_length: 128, learning_rate: 0.001}
"""
# of files for grpo, beside COMMON
GRPO = """
{reward_funcs: [vowels.count], num_generations: 4, max_completion_length: 16,
use_bias_correction_kl: false, max_steps: 3}
"""
VOWELS = """
def count(completions, **columns):
    return [sum(map(answer[0]["content"].count, "aeiou")) % 5 for answer in completions]
"""
SCHEDULE = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
ADAMW = {"weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "max_grad_norm": 0.2}
# name -> keys of the file; it begins with the command that reads it
CASES: Mapping[str, dict[str, Any]] = {
    "sft": {},
    "sft_accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "sft_cosine_with_min_lr": SCHEDULE,
    "sft_adamw": ADAMW,
    "sft_adafactor": {"optim": "adafactor"},
    "sft_dft": {"loss_type": "dft"},
    "sft_label_smoothing": {"label_smoothing_factor": 0.1},
    "sft_warmup": {"warmup_steps": 2},
    "sft_lora": LORA,
    "sft_rslora": LORA | {"use_rslora": True, "lora_target_modules": "all-linear"},
    "sft_dora": LORA | {"use_dora": True, "lora_target_modules": ["q_proj", "o_proj"]},
    "dpo": {"beta": 0.1},
    "dpo_ipo": {"loss_type": "ipo", "beta": 0.1},
    "dpo_hinge": {"loss_type": "hinge", "beta": 0.1},
    "dpo_apo_zero": {"loss_type": "apo_zero", "beta": 0.1},
    "dpo_sft": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]},
    "dpo_lora": LORA | {"beta": 0.3},
    "dpo_label_smoothing": {"beta": 0.1, "label_smoothing": 0.1},
    "grpo": {},
    "grpo_iterations": {"num_iterations": 3, "learning_rate": 0.01, "epsilon_high": 0.05},
    "grpo_kl": {"beta": 0.2, "loss_type": "dr_grpo", "scale_rewards": "none"},
    "grpo_sequence": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "grpo_cispo": {"loss_type": "cispo", "epsilon_high": 1.05, "num_iterations": 2},
    "grpo_cut": {"mask_truncated_completions": True, "max_completion_length": 8},
    "grpo_lora": LORA | {"temperature": 0.7},
}
# command -> key -> values of which a drawn case may have one; "": of every command
DRAWN: Mapping[str, dict[str, list[Any]]] = {
    "": {
        "per_device_train_batch_size": [8, 4, 2],
        "optim": ["adamw_torch", "adafactor", "sgd", "rmsprop"],
        "lr_scheduler_type": ["cosine", "constant", "polynomial", "inverse_sqrt"],
        "warmup_steps": [1, 0.3],
        "weight_decay": [0.01, 0.1],
        "max_grad_norm": [0, 0.1],
        "adam_beta1": [0.8],
        "adam_epsilon": [1e-6],
        "optim_args": ["weight_decay=0.3"],
        "label_smoothing_factor": [0, 0.1],
        "max_length": [24, 40],
        "max_steps": [2, 5],
        "num_train_epochs": [1, 2.5],
        "activation_checkpointing": [True, False],
        "dataloader_drop_last": [True],
        "train_sampling_strategy": ["sequential"],
        "model_init_kwargs": [{"attn_implementation": "eager"}],
        "lora_r": [4, 16],
        "use_rslora": [True],
        "lora_target_modules": ["all-linear", ["q_proj", "v_proj"], ".*q_proj"],
    },
    "sft": {
        "packing": [True],
        "packing_strategy": ["bfd", "wrapped"],
        "completion_only_loss": [True, False],
        "assistant_only_loss": [True],
        "loss_type": ["nll", "dft", "chunked_nll"],
        "truncation_mode": ["keep_end"],
        "shuffle_dataset": [True],
    },
    "dpo": {
        "beta": [0.01, 0.5],
        "loss_type": ["sigmoid", "hinge", "ipo", "apo_zero", ["sigmoid", "sft"], "robust"],
        "loss_weights": [[0.5], [1.0, 0.3]],
        "label_smoothing": [0.1],
        "ld_alpha": [0.0, 0.5],
        "discopop_tau": [0.1],
        "precompute_ref_log_probs": [True],
        "ref_model_sync_steps": [1],
    },
    "grpo": {
        "num_generations": [2, 8],
        "loss_type": ["grpo", "dr_grpo", "dapo", "bnpo", "cispo"],
        "beta": [0.04, 0.2],
        "epsilon": [0.02],
        "epsilon_high": [0.05, 5],
        "scale_rewards": ["group", "batch", "none"],
        "importance_sampling_level": ["token", "sequence"],
        "mask_truncated_completions": [True],
        "max_completion_length": [8, 64],
        "num_iterations": [2, 3],
        "reward_weights": [[0.5]],
        "temperature": [0.7, 1.3],
        "use_bias_correction_kl": [True],
    },
}
# keys of both supervised training and pairs that grpo has not
NOT_SAMPLED = {
    *("label_smoothing_factor", "max_length", "dataloader_drop_last", "max_steps"),
    *("train_sampling_strategy", "num_train_epochs", "per_device_train_batch_size"),
}


class Trained(NamedTuple):
    """A run, step by step, with the trained weights before and after it."""

    steps: list[tuple[float, float, float]]  # loss, gradient norm, rate
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", required=True, help="the folder with TRL")
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--draw", nargs=2, type=int, metavar=("SEED", "COUNT"))
    options = parser.parse_args()
    sys.path.append(str(Path(options.trl).resolve()))
    cases = {name: CASES[name] for name in options.only}
    if options.draw:
        seed, count = options.draw
        rng = random.Random(seed)
        cases = dict(draw_case(rng, number) for number in range(count))
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        write_model(Path(folder) / "model")
        write_rows(Path(folder))
        (Path(folder) / "vowels.py").write_text(VOWELS)
        sys.path.append(folder)
        for name, keys in cases.items():
            print(compare(name, keys, Path(folder)), flush=True)


def draw_case(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    """Draws a command's name with a number, and one to five keys of its file."""
    command = rng.choice(("sft", "dpo", "grpo"))
    own = DRAWN[command]
    others = DRAWN[""].keys() - (NOT_SAMPLED if command == "grpo" else set())
    names = rng.sample(sorted(own), rng.randint(1, 2))
    names += rng.sample(sorted(others), rng.randint(0, 3))
    choices = DRAWN[""] | own
    keys = {name: rng.choice(choices[name]) for name in names}
    if any(name in keys for name in ("lora_r", "use_rslora", "lora_target_modules")):
        keys = LORA | keys
    rows = keys.get("per_device_train_batch_size", ROWS)
    return f"{command}_{number}", keys | {"gradient_accumulation_steps": ROWS // rows}


class Answers:
    """Completions of random tokens, for both trainers: a prompt's first one is the same in both."""

    def __init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
        self._asked: Counter[tuple[int, ...]] = Counter()

    def draw(self, prompt_ids: Sequence[int], limit: int) -> list[int]:
        """Draws the prompt's next completion, which is cut to `limit` tokens."""
        prompt = tuple(prompt_ids)
        self._asked[prompt] += 1
        rng = random.Random(repr((prompt, self._asked[prompt])))
        words = range(20, len(self._tokenizer) - 40)  # no special tokens
        tokens = rng.choices(words, k=rng.randint(3, 20))
        return [*tokens, self._tokenizer.eos_token_id][:limit]

    def of_trl(self) -> Any:
        """The function that samples in TRL's GRPOTrainer."""

        def sample(trainer: Any, prompts: Any, *_: Any, **__: Any) -> Any:
            limit = trainer.max_completion_length
            return [self.draw(prompt, limit) for prompt in prompts], None

        return sample

    def of_ours(self) -> Any:
        """The function that samples in our EmbeddedEngine."""

        def sample(engine: Any, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
            model = engine._model
            return [self._sample(model, request, sampling) for request in requests]

        return sample

    @torch.no_grad()
    def _sample(self, model: nn.Module, request: Request, sampling: Sampling) -> Sampled:
        """Draws a completion, with the model's log-probabilities of its tokens."""
        tokens = self.draw(request.prompt_ids, sampling.limit(request))
        ids = torch.tensor([[*request.prompt_ids, *tokens]])
        logits = model(input_ids=ids).logits[0, -len(tokens) - 1 : -1] / sampling.temperature
        of_tokens = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
        is_stopped = tokens[-1] == self._tokenizer.eos_token_id
        ended = Ended.STOPPED if is_stopped else Ended.CUT
        return Sampled(tokens, of_tokens[:, 0].tolist(), 0.0, ended)


def write_model(folder: Path) -> None:
    """Writes a Llama of random weights with quickstart's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), **yaml.safe_load(SIZES))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_rows(folder: Path) -> None:
    """Writes conversations, pairs of answers of several lengths for dpo, and prompts for grpo."""
    lines = (QUICKSTART / "heldout.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines[: ROWS + 1]]
    for command in ("sft", "dpo", "grpo"):
        (folder / command).mkdir()
        with (folder / command / "train.jsonl").open("w") as file:
            for chat, other in pairwise(chats):
                prompt = {"prompt": chat[:-1]}
                rows = {
                    "sft": {"messages": chat},
                    "dpo": prompt | {"chosen": chat[-1:], "rejected": other[-1:]},
                    "grpo": prompt,
                }
                file.write(json.dumps(rows[command]) + "\n")


def compare(name: str, keys: Mapping[str, Any], folder: Path) -> str:
    """Trains a case by both, and says whether they are equal, or which of them stops."""
    command = name.partition("_")[0]
    path = folder / command / f"{name}.yaml"
    names = {"model_name_or_path": "model", "dataset_name": command, "output_dir": name}
    paths = {key: str(folder / value) for key, value in names.items()}
    common = yaml.safe_load(COMMON)
    if command == "grpo":
        common |= yaml.safe_load(GRPO)
        common["per_device_train_batch_size"] = ROWS * keys.get("num_generations", 4)
        del common["max_length"]
    path.write_text(yaml.safe_dump(paths | common | dict(keys)))
    title = name if name in CASES else f"{name} {json.dumps(keys)}"
    try:
        theirs = train_trl(command, path)
    except Exception as error:  # whatever TRL makes of a combination of keys
        return f"{title:24} TRL stops: {str(error).splitlines()[0][:100]}"
    try:
        conversion = convert_file(path)
        ours = train_ours(conversion.recipe, theirs.before)
    except finetune.UserError as error:
        return f"{title:24} refused here: {str(error).splitlines()[0][:200]}"
    pairs = zip(theirs.steps, ours.steps, strict=False)
    losses = " ".join(f"{step[0]:.5g}/{other[0]:.5g}" for step, other in pairs)
    has_same_steps = len(theirs.steps) == len(ours.steps)
    apart = find_difference(theirs, ours) if has_same_steps else float("inf")
    if apart < TOLERANCE:
        return f"{title:24} equal   {apart:.1e}  losses {losses}"
    line = f"{title:24} differs {apart:.1e}  losses {losses}"
    return "\n    ".join([line, *conversion.differences, *conversion.remarks])


def train_trl(command: str, path: Path) -> Trained:
    """Trains by TRL's trainer, as its command would."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    trl = import_module("trl")
    parser = import_module(f"trl.scripts.{command}").make_parser()
    script, arguments, model, _ = parser.parse_args_and_config(["--config", str(path)])
    rows = import_module("datasets").load_dataset(script.dataset_name)
    arguments.model_init_kwargs = {"dtype": model.dtype} | (arguments.model_init_kwargs or {})
    trainer_class = getattr(trl, f"{command.upper()}Trainer")
    rewards = {"reward_funcs": import_module("vowels").count} if command == "grpo" else {}
    trainer = trainer_class(
        model=model.model_name_or_path,
        args=arguments,
        train_dataset=rows["train"],
        peft_config=trl.get_peft_config(model),
        **rewards,
    )
    before = copy_trained(trainer.model)
    with patch.object(trl.GRPOTrainer, "_generate_single_turn", Answers().of_trl()):
        trainer.train()
    logs = trainer.state.log_history
    steps = [(log["loss"], log["grad_norm"], log["learning_rate"]) for log in logs[:-1]]
    return Trained(steps, before, copy_trained(trainer.model))


def train_ours(recipe: Mapping[str, Any], start: Mapping[str, Tensor]) -> Trained:
    """Trains the converted recipe from the weights `start`, which adapters draw at random."""
    AcceleratorState._reset_state(True)
    keys = {key: value for key, value in recipe.items() if key != "accelerate_config"}
    steps = []
    sampling = patch.object(EmbeddedEngine, "sample", Answers().of_ours())
    with sampling, finetune.Session(finetune.load_recipe(**keys), saves=False) as session:
        with torch.no_grad():
            for name, parameter in session.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(start[shorten(name)])
        for batch in session.batches():
            loss = session.forward_backward(batch).loss
            update = session.optim_step()
            steps.append((loss, update.grad_norm, update.learning_rate))
        return Trained(steps, dict(start), copy_trained(session.model))


def copy_trained(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters, by names that are the same in both."""
    return {
        shorten(name): parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def shorten(name: str) -> str:
    return name.removeprefix("base_model.model.").removeprefix("model.")


def find_difference(theirs: Trained, ours: Trained) -> float:
    """The greatest relative difference of the steps' numbers, or of the weights to their update."""
    mine = torch.tensor(ours.steps, dtype=torch.float64)
    others = torch.tensor(theirs.steps, dtype=torch.float64)
    apart = (mine - others).abs() / torch.maximum(mine.abs(), others.abs()).clamp(min=1e-12)
    before, after, of_ours = (
        torch.cat([weights[name].flatten() for name in theirs.after])
        for weights in (theirs.before, theirs.after, ours.after)
    )
    return max(float(apart.max()), float((after - of_ours).norm() / (after - before).norm()))


if __name__ == "__main__":
    main()
