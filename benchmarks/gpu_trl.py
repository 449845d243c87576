"""TRL's side of `gpu.py`: the same model and rows under SFTTrainer, as its users call it, but in
our order.
"""

import argparse
import tempfile
import time
from typing import Any

from benchmarks.gpu_cases import STEPS, Case, Result, rows, summarize
from benchmarks.gpu_weights import fill, random_weight

WHO = "TRL, packed"


def train_trl(case: Case, steps: int, warm_up: int, options: argparse.Namespace) -> Result:
    """The same model and rows under TRL's SFTTrainer, packed, bf16, its own defaults otherwise."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if case.method != "sft" or case.fp8:
        return Result(
            case.name, WHO, failure="not compared here; DPO is in benchmarks/preferences.py"
        )
    config = AutoConfig.for_model(**case.model)
    if case.load_in_4bit:
        model = _quantized_model(config, device)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16 if case.use_peft else torch.float32
            )
        fill(model)
    adapters = None
    if case.use_peft:
        from peft import LoraConfig

        adapters = LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    return train_packed(
        case,
        WHO,
        model,
        steps,
        warm_up,
        options,
        gradient_checkpointing=case.checkpointed,
        peft_config=adapters,
    )


def train_packed(
    case: Case,
    who: str,
    model: Any,
    steps: int,
    warm_up: int,
    options: argparse.Namespace,
    *,
    gradient_checkpointing: bool,
    peft_config: Any = None,
) -> Result:
    """Trains `model` on the case's packed rows by SFTTrainer; times the steps after `warm_up`."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from finetune.training.metrics import peak_flops, peak_memory_bytes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packed = rows(case, options) * (1 + (steps + warm_up) // STEPS)
    seconds: list[float] = []

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.began)

    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=case.rows,
            max_steps=steps + warm_up,
            max_length=case.length,
            packing=True,
            # packed already, into the rows of all contestants
            dataset_kwargs={"skip_prepare_dataset": True},
            train_sampling_strategy="sequential",
            learning_rate=1e-5,
            bf16=True,
            use_cpu=device.type == "cpu",
            gradient_checkpointing=gradient_checkpointing,
            logging_first_step=True,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=device.type == "cuda",
        )
        tokenizer = word_tokenizer(case.model["vocab_size"])
        columns = {
            "input_ids": [[token for ids in row for token in ids] for row in packed],
            "seq_lengths": [[len(ids) for ids in row] for row in packed],
        }
        dataset = Dataset.from_dict(columns)
        run = SFTTrainer(
            model,
            arguments,
            train_dataset=dataset,
            processing_class=tokenizer,
            peft_config=peft_config,
        )
        run.add_callback(Clock())
        run.train()
    speeds = [case.rows * case.length / s for s in seconds[warm_up:]]
    first = run.state.log_history[0]
    seen = {"loss": first["loss"], "grad_norm": first["grad_norm"]}
    return summarize(case, who, speeds, peak_flops(device), peak_memory_bytes(device), **seen)


def _quantized_model(config: Any, device: Any) -> Any:
    """A model of random weights in NF4, made a layer at a time: 70 billion of them in bf16 fit no
    device.
    """
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit
    from torch import nn
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names = [
        name
        for name, m in model.named_modules()
        if type(m) is nn.Linear and m is not model.get_output_embeddings()
    ]
    for name in names:
        linear = model.get_submodule(name)
        weight = random_weight(f"{name}.weight", linear.weight.shape, device).bfloat16()
        with torch.device("meta"):
            made = Linear4bit(
                linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16
            )
        made.weight = Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=True, module=made
        )
        made.weight = made.weight.to(device)
        model.set_submodule(name, made)
    with torch.device(device):
        rest = AutoModelForCausalLM.from_config(_without_layers(config), dtype=torch.bfloat16)
    fill(rest)
    model.model.embed_tokens = rest.model.embed_tokens
    model.lm_head = rest.lm_head
    model.model.norm = rest.model.norm
    model.model.rotary_emb = rest.model.rotary_emb
    for module in model.model.layers.modules():
        if type(module).__name__.endswith("Norm"):
            module.weight = nn.Parameter(
                torch.ones(module.weight.shape, dtype=torch.bfloat16, device=device)
            )
    model.is_loaded_in_4bit = True
    return model


def _without_layers(config: Any) -> Any:
    import copy

    smaller = copy.deepcopy(config)
    smaller.num_hidden_layers = 0
    return smaller


def word_tokenizer(vocabulary: int) -> Any:
    """SFTTrainer wants a tokenizer, although the rows are ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0"
    )
