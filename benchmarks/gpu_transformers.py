"""Plain transformers' side of `gpu.py`: the loop of its language modeling examples, with nothing of
ours.
"""

import argparse
import itertools
import time

from benchmarks.gpu_cases import STEPS, Case, Result, rows, summarize
from benchmarks.gpu_weights import fill

WHO = "transformers, rows cut from one text"


def train_transformers(case: Case, steps: int, warm_up: int, options: argparse.Namespace) -> Result:
    """The same model and tokens: rows of `length`, documents not kept apart (SDPA is fastest so),
    bf16 autocast, fused AdamW.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.training.metrics import peak_flops, peak_memory_bytes

    if case.method != "sft" or case.fp8 or case.load_in_4bit:
        return Result(case.name, WHO, failure="not compared here: its examples have no such recipe")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if case.use_peft else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.model), dtype=dtype)
    fill(model)
    if case.use_peft:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
        model.enable_input_require_grads()
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    packed = [list(itertools.chain(*row)) for row in rows(case, options)]
    ids = torch.tensor(packed).view(STEPS, case.rows, case.length).to(device)

    def step(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = ids[index % STEPS]
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    loss, norm = (each.item() for each in step(0))
    seconds = []
    for index in range(1, warm_up + steps):
        began = time.perf_counter()
        step(index)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    speeds = [case.rows * case.length / each for each in seconds[warm_up - 1 :]]
    device_facts = peak_flops(device), peak_memory_bytes(device)
    return summarize(case, WHO, speeds, *device_facts, loss=loss, grad_norm=norm)
