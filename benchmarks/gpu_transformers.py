"""Plain transformers' side of `gpu.py`: the loop of its language modeling examples, with nothing of ours."""

import argparse
import itertools
import time

from benchmarks.gpu_cases import Case, Result, rows, summarize

WHO = "transformers, rows cut from one text"


def train_transformers(case: Case, steps: int, warm_up: int, options: argparse.Namespace) -> Result:
    """The same model and tokens: rows of `length`, documents not kept apart (SDPA is fastest so), bf16 autocast, fused AdamW."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.training.throughput import peak_flops, peak_memory_bytes

    if case.method != "sft" or case.fp8 or case.load_in_4bit:
        return Result(case.name, WHO, failure="not compared here: its examples have no such recipe")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if case.use_peft else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.model), dtype=dtype)
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
    packed = rows(case, 4 * case.rows, options.data, options.tokenizer)
    ids = torch.tensor([list(itertools.chain(*row)) for row in packed]).view(4, case.rows, case.length).to(device)

    def step(index: int) -> None:
        batch = ids[index % 4]
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = []
    for index in range(warm_up + steps):
        began = time.perf_counter()
        step(index)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    speeds = [case.rows * case.length / each for each in seconds[warm_up:]]
    return summarize(case, WHO, speeds, peak_flops(device), peak_memory_bytes(device))
