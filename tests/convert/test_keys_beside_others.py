"""Keys that mean something else, or nothing, beside the file's optimizer, launch or method."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate.utils.deepspeed as accelerates_deepspeed
import pytest
import torch
import yaml
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer
from transformers.hf_argparser import string_to_bool
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from finetune.config.schema import recipe_keys
from finetune.convert.as_read import ADAM_ON_CPU, DECAY_ADDED
from finetune.convert.axolotl import CLIPPED_BY_RANK, LOSS_WATCHED
from finetune.convert.by_tool import ALL_DECAYED, EMBEDDING_MOMENTS, WHOLE_STEPS_COUNTED
from finetune.convert.conversion import DEEPSPEED_UNREAD, convert_file
from finetune.convert.datasets import PROMPT_REPEATED, SECOND_IS_ANSWER
from finetune.convert.defaults import WARMUP_THERE
from tests.convert.conftest import Convert, said

AXOLOTL = {
    "base_model": "Qwen/Qwen3-0.6B",
    "datasets": [{"path": "a/rows", "type": "alpaca"}],
    "sequence_len": 1024,
    "learning_rate": 1e-5,
}
FACTORY = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "stage": "sft",
    "dataset": "rows",
    "template": "qwen",
}
SWIFT = {"model": "Qwen/Qwen3-0.6B", "dataset": ["a/rows.jsonl"], "tuner_type": "full"}
ZERO2 = {"deepspeed": "deepspeed_configs/zero2.json"}
ADAMW = recipe_keys()["optim"].default
INLINE = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("file", "keys", "line"),
    [
        (AXOLOTL, {"optimizer": "adamw_bnb_8bit", **ZERO2}, ADAM_ON_CPU),
        (AXOLOTL, {"optimizer": "adamw_bnb_8bit", "weight_decay": 0.1, **ZERO2}, DECAY_ADDED),
        (AXOLOTL, {"optimizer": "adamw_torch_8bit", "deepspeed": "configs/zero2.json"}, None),
        (AXOLOTL, {"optimizer": "adamw_torch_fused", **ZERO2}, None),
        (AXOLOTL, {"optimizer": "paged_adamw_32bit", **ZERO2}, None),
        (AXOLOTL, {"optimizer": "muon", **ZERO2}, None),  # refused
        (AXOLOTL, ZERO2, None),
        # whose zero_force_ds_cpu_optimizer is false
        (
            AXOLOTL,
            {
                "optimizer": "adamw_bnb_8bit",
                "deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json",
            },
            None,
        ),
        (FACTORY, {"optim": "adamw_8bit", "deepspeed": "ds_z3_offload_config.json"}, ADAM_ON_CPU),
        (FACTORY, {"optim": "adamw_8bit", "deepspeed": "ds_z3_config.json"}, None),
        (FACTORY, {"optim": "adamw_8bit", "deepspeed": {"zero_optimization": INLINE}}, ADAM_ON_CPU),
        (SWIFT, {"optim": "adamw_8bit", "deepspeed": "zero2_offload"}, ADAM_ON_CPU),
    ],
)
def test_an_optimizer_on_the_cpu_is_deepspeeds_adam(
    file: dict[str, Any], keys: dict[str, Any], line: str | None, convert: Convert
) -> None:
    made = convert(file, **keys)
    text = said(made)
    lines = [note for note in (ADAM_ON_CPU, DECAY_ADDED) if f"({note})" in text]
    assert lines == [line] * (line is not None)
    if line is not None:
        assert made.recipe.get("optim", ADAMW) == ADAMW
        assert "8-bit moments" not in text


@pytest.mark.parametrize(
    ("make", "is_adamw"), [(torch.optim.AdamW, True), (partial(torch.optim.SGD, lr=1.0), False)]
)
def test_accelerate_makes_deepspeeds_adam_of_optimizers_that_are_no_adamw(
    make: Callable[..., torch.optim.Optimizer], is_adamw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `adamw_mode`, weight decay is added to the gradient."""
    asked: dict[str, Any] = {}
    for name in ("adam", "adagrad", "lion"):
        module = ModuleType(f"deepspeed.ops.{name}")
        for made in ("DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"):
            setattr(module, made, lambda groups, _name=made, **keys: asked.update(keys, is_=_name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(accelerates_deepspeed, "compare_versions", lambda *_: True)
    weights = [torch.nn.Parameter(torch.zeros(2))]
    accelerates_deepspeed.map_pytorch_optim_to_deepspeed(make(weights))
    assert asked["is_"] == "DeepSpeedCPUAdam" and asked["adamw_mode"] == is_adamw


FIRST_FSDP = {"fsdp": ["full_shard", "auto_wrap"], "weight_decay": 0.1}
FLAT = {"fsdp_config": {"fsdp_use_orig_params": False}}


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        (FIRST_FSDP | FLAT, True),
        (FIRST_FSDP | FLAT | {"weight_decay": 0.0}, False),
        (FIRST_FSDP | FLAT | {"adapter": "lora"}, False),
        (FIRST_FSDP | FLAT | {"fsdp_version": 2}, False),
        (FIRST_FSDP | {"fsdp_config": {"fsdp_use_orig_params": True}}, False),
        (FIRST_FSDP, False),
    ],
)
def test_flat_parameters_decay_norms_too(
    keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    assert (ALL_DECAYED in said(convert(AXOLOTL, **keys))) == is_said


@pytest.mark.parametrize("is_flat", [True, False])
def test_trainer_finds_no_norms_in_flat_parameters(is_flat: bool) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
        model = FullyShardedDataParallel(
            LlamaForCausalLM(LlamaConfig(**sizes, **heads)),
            auto_wrap_policy=partial(
                transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
            ),
            use_orig_params=not is_flat,
            device_id=torch.device("cpu"),
        )
        decayed = Trainer.get_decay_parameter_names(None, model)
        names = {name for name, _ in model.named_parameters()}
    finally:
        torch.distributed.destroy_process_group()
    assert (names == set(decayed)) == is_flat


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"expert_parallel_size": 2}, True),
        ({"expert_parallel_size": 1}, False),
        ({"expert_parallel_size": 2, "fsdp_config": {"reshard_after_forward": True}}, False),
        ({"expert_parallel_size": 2, "adapter": "lora"}, False),
    ],
)
def test_axolotls_experts_on_ranks_without_fsdp_are_clipped_by_rank(
    keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    mixture = AXOLOTL | {"base_model": "Qwen/Qwen3-30B-A3B"}
    assert (CLIPPED_BY_RANK in said(convert(mixture, **keys))) == is_said


@pytest.mark.parametrize("method", [None, "dpo"])
def test_axolotl_watches_the_loss_of_answers_alone(method: str | None, convert: Convert) -> None:
    """Source: get_callbacks of core/builders/causal.py, and of rl.py, which lacks this one."""
    pairs = {"rl": method, "datasets": [{"path": "a/pairs", "type": "chat_template.default"}]}
    made = convert(AXOLOTL | (pairs if method else {}), loss_watchdog_threshold=5.0)
    assert (LOSS_WATCHED in said(made)) == (method is None)


@pytest.mark.parametrize(
    ("method", "kind", "line"),
    [
        ("dpo", "chatml.ultra", SECOND_IS_ANSWER.format("the column prompt")),
        ("dpo", "llama3.argilla_chat", SECOND_IS_ANSWER.format("the first one alone")),
        ("kto", "llama3.ultra", None),  # an answer is a text
        ("dpo", "chat_template.argilla_chat", None),
        ("orpo", "chat_template.argilla", PROMPT_REPEATED),
    ],
)
def test_axolotls_types_of_pairs_may_read_one_exchange_alone(
    method: str, kind: str, line: str | None, convert: Convert
) -> None:
    made = convert(AXOLOTL, rl=method, datasets=[{"path": "a/pairs", "type": kind}])
    known = [
        *(SECOND_IS_ANSWER.format(part) for part in ("the column prompt", "the first one alone")),
        PROMPT_REPEATED,
    ]
    assert [each for each in known if each in said(made)] == [line] * (line is not None)


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        (FIRST_FSDP, True),
        (FIRST_FSDP | FLAT, False),
        (FIRST_FSDP | FLAT | {"fsdp_version": 2}, True),
    ],
)
def test_flat_parameters_have_no_embedding_with_moments_in_32_bits(
    keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    made = convert(AXOLOTL, optimizer="adamw_bnb_8bit", **keys)
    assert (EMBEDDING_MOMENTS in said(made)) == is_said


def test_axolotl_counts_no_steps_of_a_negative_number(convert: Convert) -> None:
    """_configure_warmup_and_logging of its core/builders/base.py: min(int(0.03 * -1), 100)."""
    made = convert(AXOLOTL, max_steps=-1, num_epochs=2)
    assert made.recipe["warmup_ratio"] == int(0.03 * -1) == 0
    assert WARMUP_THERE not in said(made) and WHOLE_STEPS_COUNTED not in said(made)
    counted = convert(AXOLOTL, num_epochs=2)
    assert WARMUP_THERE in said(counted) and WHOLE_STEPS_COUNTED in said(counted)


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "bfloat16"),
        ({"bf16": True}, "bfloat16"),
        ({"fsdp": "full_shard auto_wrap"}, "bfloat16"),
        ({"bf16": True, "fsdp": "full_shard auto_wrap"}, None),
        ({"bf16": True, "deepspeed": "ds_z2_config.json"}, None),
    ],
)
def test_factorys_pure_bf16_ends_where_weights_are_copied(
    keys: dict[str, Any], dtype: str | None, convert: Convert
) -> None:
    made = convert(FACTORY, finetuning_type="full", pure_bf16=True, **keys)
    assert made.recipe.get("dtype") == dtype


@pytest.mark.parametrize(
    ("word", "is_packed"),
    [("yes", True), ("y", True), ("t", True), ("no", False), ("n", False), ("f", False)],
)
def test_swift_reads_words_for_true_and_false(word: str, is_packed: bool, convert: Convert) -> None:
    """string_to_bool of transformers' hf_argparser.py."""
    assert string_to_bool(word) == is_packed
    made = convert(SWIFT, packing=word, save_strategy="no")
    assert made.recipe["packing"] == is_packed
    assert "save_steps" not in made.recipe and "save_steps" in convert(SWIFT).recipe


def test_a_subset_of_swift_may_have_a_dot(convert: Convert) -> None:
    made = convert(SWIFT, dataset="a/rows:zh-v1.1#9")
    assert made.recipe["datasets"] == [{"path": "a/rows", "name": "zh-v1.1", "max_samples": 9}]


@pytest.mark.parametrize(
    ("file", "is_said"), [("my/own.json", True), ("my/zero3.json", False), ({}, False)]
)
def test_a_file_of_deepspeed_that_names_no_stage_is_said(
    file: Any, is_said: bool, convert: Convert
) -> None:
    made = convert(FACTORY, finetuning_type="full", deepspeed=file)
    assert (DEEPSPEED_UNREAD in said(made)) == is_said


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_length_of_completions_is_of_the_trainer_that_the_file_is_named_for(
    method: str, tmp_path: Path
) -> None:
    """The DPO trainer of TRL had a max_completion_length until 0.29."""
    path = tmp_path / f"{method}.yaml"
    keys = {"model_name_or_path": "a/b", "dataset_name": "a/rows", "beta": 0.1}
    path.write_text(yaml.safe_dump(keys | {"max_completion_length": 256}))
    assert convert_file(path).recipe["method"] == method
    path.write_text(yaml.safe_dump(keys | {"num_generations": 4}))
    assert convert_file(path).recipe["method"] == "grpo"
