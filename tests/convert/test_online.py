"""Files of TRL's GRPO trainer: their meaning here, what is refused, and a converted file that trains."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.config.schema import recipe_keys
from finetune.convert.async_grpo import DRAWN, NEWEST
from finetune.convert.conversion import convert_file
from finetune.convert.counterparts import GRPO, list_counterparts
from finetune.convert.recognize import Refusal
from finetune.convert.value_conversion import Conversion
from finetune.errors import UserError
from tests.training.layouts import steps_of, train_all, write_config

TRL = "model_name_or_path: a/model\ndataset_name: a/prompts\nreward_funcs: [think_format_reward]\n"


def convert(text: str, tmp_path: Path) -> Conversion:
    (tmp_path / "theirs.yaml").write_text(text)
    return convert_file(tmp_path / "theirs.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"method": "grpo", "rewards": ["think_format"], "learning_rate": 1e-6, "max_completion_length": 256, "max_length": 768, "global_batch_size": 1}),
        ("max_completion_length: 1024\nmax_prompt_length: 256\n", {"max_completion_length": 1024, "max_length": 1280}),
        ("per_device_train_batch_size: 16\ngradient_accumulation_steps: 4\nnum_generations: 4\n", {"global_batch_size": 16, "num_generations": 4}),
        ("gradient_accumulation_steps: 2\nsteps_per_generation: 8\n", {"steps_per_generation": 4}),
        ("gradient_accumulation_steps: 2\ngeneration_batch_size: 64\n", {"steps_per_generation": 4}),
        ("scale_rewards: false\nloss_type: dr_grpo\n", {"scale_rewards": "none", "loss_type": "dr_grpo"}),
        ("scale_rewards: batch\nnum_iterations: 3\nbeta: 0.04\n", {"scale_rewards": "batch", "num_iterations": 3, "beta": 0.04}),
        ("epsilon_high: 5.0\nloss_type: cispo\ntemperature: 0.7\n", {"epsilon_high": 5.0, "loss_type": "cispo", "temperature": 0.7}),
        ("scale_rewards: none\nchat_template_kwargs: {enable_thinking: false}\n", {"scale_rewards": "none", "datasets": [{"path": "a/prompts", "chat_template_kwargs": {"enable_thinking": False}}]}),
        ("loss_type: bnpo\nmask_truncated_completions: true\n", {"loss_type": "dapo", "mask_truncated_completions": True}),
        ("top_p: 1.0\ntop_k: -1\nrepetition_penalty: 1.0\nuse_vllm: true\nvllm_importance_sampling_cap: 2.0\n", {"method": "grpo"}),
        ("reward_weights: [2.0]\nuse_peft: true\nlora_dropout: 0.1\ndisable_dropout: true\n", {"reward_weights": [2.0], "lora_dropout": 0.0}),
    ],
)  # fmt: skip
def test_values_mean_the_same_here(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = convert(TRL + text, tmp_path)
    assert expected.items() <= found.recipe.items()
    assert not found.differences and not found.to_do and found.recipe.get("packing", True)


@pytest.mark.parametrize(
    ("bounds", "theirs"), [("", "0.2"), ("epsilon: 0.1\n", "0.1"), ("epsilon_high: 0.28\n", "0.28")]
)
def test_a_bound_of_ratios_below_1_is_listed(bounds: str, theirs: str, tmp_path: Path) -> None:
    found = convert(TRL + "loss_type: cispo\n" + bounds, tmp_path)
    assert found.recipe["epsilon_high"] == 5.0 and "epsilon" not in found.recipe
    assert found.differences[0].startswith(f"epsilon_high: {theirs} ")


def test_a_punishment_is_no_longer_than_a_completion(tmp_path: Path) -> None:
    text = TRL.replace("think_format_reward", "get_soft_overlong_punishment")
    found = convert(text + "max_completion_length: 64\n", tmp_path)
    assert found.recipe["soft_punish_cache"] == 64


@pytest.mark.parametrize("loss", ["dapo", "cispo", "grpo"])
def test_a_sum_over_a_generations_mean_is_a_remark(loss: str, tmp_path: Path) -> None:
    found = convert(TRL + f"loss_type: {loss}\nsteps_per_generation: 4\n", tmp_path)
    is_said = any("all steps that share" in line for line in found.remarks)
    assert is_said == (loss != "grpo")


def test_what_is_done_otherwise_is_listed(tmp_path: Path) -> None:
    found = convert(
        TRL + "top_p: 0.9\ntop_k: 50\ndelta: 2.0\ntop_entropy_quantile: 0.2\n", tmp_path
    )
    assert sorted(line.split(":")[0] for line in found.differences) == [
        "delta",
        "top_entropy_quantile",
        "top_p",
    ]
    assert {"GRPO with delta", "GRPO with top_entropy_quantile"} <= set(found.missing_capabilities)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_completion_length", "null"), ("max_prompt_length", "auto"), ("num_generations", "0"),
        ("per_device_train_batch_size", "[1]"), ("gradient_accumulation_steps", "auto"), ("scale_rewards", "[1]"),
        ("reward_funcs", "true"), ("generation_batch_size", "auto"), ("steps_per_generation", "{a: 1}"),
        ("vllm_server_timeout", "auto"),
    ],
)  # fmt: skip
def test_a_value_that_the_tool_does_not_read_is_one_sentence(
    key: str, value: str, tmp_path: Path
) -> None:
    server = {"use_vllm": True, "vllm_mode": "server"}
    text = yaml.safe_dump(yaml.safe_load(TRL) | server | {key: yaml.safe_load(value)})
    with pytest.raises(
        UserError,
        match=rf"^\S+theirs.yaml: {key}: .* is expected, found .*; write one, such as {key}: ",
    ):
        convert(text, tmp_path)


def test_a_server_that_samples_is_one_here(tmp_path: Path) -> None:
    """With TRL's own correction, which is on unless the file says otherwise; a colocated vLLM is the model itself here."""
    server = "use_vllm: true\nvllm_mode: server\n"
    found = convert(
        TRL + server + "vllm_server_host: gpu3\nvllm_server_port: 8001\nvllm_server_timeout: 30\n",
        tmp_path,
    )
    expected = {"vllm_server_base_url": "http://gpu3:8001", "vllm_server_timeout": 30.0}
    assert (
        expected | {"importance_sampling_correction": "sequence_mask"}
    ).items() <= found.recipe.items()
    (to_do,) = found.to_do
    assert (
        to_do == "vllm_server_base_url: start the server of http://gpu3:8001 as docs/online.md says"
    )
    own = "vllm_server_base_url: http://a:1\nvllm_importance_sampling_mode: token_truncate\nvllm_importance_sampling_cap: 2.0\n"
    found = convert(TRL + server + own, tmp_path)
    assert found.recipe["vllm_server_base_url"] == "http://a:1"
    assert found.recipe["importance_sampling_correction"] == "token_truncate"
    assert found.recipe["importance_sampling_clip_max"] == 2.0
    found = convert(TRL + server + "vllm_importance_sampling_correction: false\n", tmp_path)
    assert "importance_sampling_correction" not in found.recipe
    assert (
        "vllm_server_base_url"
        not in convert(TRL + "use_vllm: true\nvllm_mode: colocate\n", tmp_path).recipe
    )


def test_tools_are_to_be_named(tmp_path: Path) -> None:
    found = convert(TRL + "max_tool_calling_iterations: 3\n", tmp_path)
    assert "max_tool_calling_iterations" not in found.recipe
    assert found.to_do == [
        "tools: they have no key there; name your functions, such as my_tools.py:multiply, and set "
        "max_tool_calling_iterations: 3"
    ]


def test_rewards_of_trl_and_of_the_user_are_named(tmp_path: Path) -> None:
    names = "[accuracy_reward, my_lib.rewards.short, get_soft_overlong_punishment]"
    found = convert(
        TRL.replace("[think_format_reward]", names) + "max_completion_length: 1280\n", tmp_path
    )
    rewards = [
        "my_rewards.py:accuracy_reward",
        "my_lib/rewards.py:short",
        "soft_overlong_punishment",
    ]
    assert found.recipe["rewards"] == rewards and found.recipe["soft_punish_cache"] == 256
    assert found.to_do == [
        "reward_funcs: accuracy_reward: write my_rewards.py: from trl.rewards import accuracy_reward"
    ]
    none = convert(
        "model_name_or_path: a/model\ndataset_name: a/prompts\nnum_generations: 8\n", tmp_path
    )
    assert none.to_do == [
        "rewards: the file names none; name your functions, such as my_rewards.py:right"
    ]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("loss_type: sapo\n", "another loss (SAPO)"),
        ("reward_model_name_or_path: a/rm\n", "a reward model"),
    ],
)
def test_what_has_no_loss_here_is_refused_by_name(text: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="not supported") as refusal:
        convert(TRL + text, tmp_path)
    assert cause in str(refusal.value)


@pytest.mark.slow
def test_every_key_of_trls_own_trainer_is_known() -> None:
    config = pytest.importorskip("trl.trainer.grpo_config")
    known = {
        pair.key for pair in list_counterparts("TRL") + list_counterparts(GRPO)
    } | recipe_keys().keys()
    nested = {"model_init_kwargs"}  # whose keys have rows of their own
    assert config.GRPOConfig.__annotations__.keys() - known == nested


@pytest.mark.slow
def test_a_converted_file_trains_as_trl_counts_its_steps(shared: Path, tmp_path: Path) -> None:
    lines = (shared / "data" / "gsm8k_train.jsonl").read_text().splitlines()[:24]
    rows = [
        {"prompt": json.loads(line)["question"], "answer": json.loads(line)["answer"]}
        for line in lines
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(
        "def short(completion_ids, **_):\n    return [float(len(set(x))) for x in completion_ids]\n"
    )
    theirs = {
        "model_name_or_path": str(shared / "models" / "stories260k"), "dataset_name": str(tmp_path / "prompts.jsonl"),
        "reward_funcs": ["my_rewards.short"], "num_generations": 4, "max_completion_length": 16, "max_prompt_length": 400,
        "per_device_train_batch_size": 16, "num_train_epochs": 2, "num_iterations": 2, "learning_rate": 1e-4, "logging_steps": 1,
    }  # fmt: skip
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    found = convert_file(tmp_path / "theirs.yaml")
    ours = found.recipe | {
        "export_at_end": False,
        "dataset_cache_dir": str(tmp_path / "cache"),
        "save_steps": None,
    }
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(ours))
    train_all(
        tmp_path,
        [
            (
                tmp_path / "ours.yaml",
                write_config(tmp_path, "single"),
                [f"output_dir={tmp_path / 'run'}"],
            )
        ],
        ranks=1,
    )
    steps = steps_of(tmp_path / "run")
    assert (
        len(steps) == 2 * 2 * 6
    )  # 24 prompts, 4 in a step (16 completions, 4 of each), twice each time, in two epochs
    assert (
        steps[-1]["epoch"] == 2.0 and steps[0]["log_ratio/mean"] < 5e-6 < steps[1]["log_ratio/mean"]
    )


def test_an_asynchronous_run_keeps_its_staleness_and_its_server(tmp_path: Path) -> None:
    """AsyncGRPOTrainer has one sampler, a server, and corrects nothing."""
    conversion = convert(TRL + "max_staleness: 2\nmax_inflight_tasks: 8\n", tmp_path)
    assert conversion.recipe["max_staleness"] == 2
    assert conversion.recipe["vllm_server_base_url"] == "http://localhost:8000"
    assert "importance_sampling_correction" not in conversion.recipe
    assert any("start the server of http://localhost:8000" in each for each in conversion.to_do)


ASYNC = """\
base_model_path: /tmp/m
orchestration: {num_inference_workers: 4, num_training_workers: 2, num_steps: 250}
inference: {engine: vllm, temperature: 0.8, max_generated_tokens: 512, batch_size: 1, group_size: 16, steps_before_weight_sync: 1}
postprocessing: {ref_checkpointer: {checkpoint_dir: "${base_model_path}"}}
training:
  checkpointer: {checkpoint_dir: "${base_model_path}"}
  batch_size: 16
  ppo_epochs: 1
  clip_grad_norm: 1.0
  steps_before_weight_sync: 2
  optimizer: {_component_: torch.optim.AdamW, lr: 1e-5}
  loss: {_component_: torchtune.dev.rl.linear_grpo_loss.LinearGRPOLoss, kl_coeff: 0.01, epsilon: 0.2}
reward_functions:
  - {_component_: torchtune.dev.rl.rewards.ThinkingAnswerFormattingReward, think_tag: think, positive_reward: 1.0}
tokenizer: {_component_: torchtune.models.qwen2_5.qwen2_5_tokenizer, max_seq_len: 1024}
dataset: {_component_: torchtune.dev.grpo.gsm8k.gsm8k_dataset, partition: 1-9/10}
shuffle: False
"""


def test_torchtunes_asynchronous_file_keeps_its_meaning(tmp_path: Path) -> None:
    conversion = convert(ASYNC, tmp_path)
    assert {
        "method": "grpo",
        "loss_type": "grpo",
        "beta": 0.01,
        "num_generations": 16,
        "max_completion_length": 512,
        "max_length": 1024,
        "temperature": 0.8,
        "max_steps": 250,
        "max_staleness": 2,
        "global_batch_size": 2,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "rewards": ["my_rewards.py:ThinkingAnswerFormattingReward"],
    }.items() <= conversion.recipe.items()
    assert conversion.recipe["datasets"][0]["path"] == "openai/gsm8k"
    assert not conversion.missing_capabilities
    assert [line.split(":")[0] for line in conversion.differences] == [
        "shuffle",
        "training.loss.epsilon",
        "inference.temperature",
        "training.steps_before_weight_sync",
        "training.batch_size",
        "dataset._component_",
        "dataset.partition",
    ]
    assert "(think_tag='think', positive_reward=1.0)" in conversion.to_do[0]
    assert any(NEWEST in line for line in conversion.differences)


def test_torchtunes_asynchronous_run_gives_vllm_no_top_k(tmp_path: Path) -> None:
    conversion = convert(ASYNC.replace("batch_size: 1,", "batch_size: 1, top_k: 50,"), tmp_path)
    assert "top_k" not in conversion.recipe
    assert not any("top_k" in line for line in conversion.differences)


def test_torchtunes_asynchronous_run_draws_from_as_many_completions_as_its_buffer_holds(
    tmp_path: Path,
) -> None:
    """A buffer of torchrl's that has room for one keeps the last of the completions it is given."""
    text = ASYNC.replace("num_steps: 250", "num_steps: 250, replay_buffer_size: 64")
    listed = "\n".join(convert(text, tmp_path).differences)
    assert DRAWN.format(64) in listed and NEWEST not in listed


@pytest.mark.parametrize(
    ("old", "new", "listed"),
    [
        ("ppo_epochs: 1", "ppo_epochs: 2", "training.ppo_epochs"),
        ("batch_size: 1,", "batch_size: 1, engine_args: {seed: 1},", "inference.engine_args"),
    ],
)
def test_what_torchtunes_asynchronous_file_does_besides_is_listed(
    old: str, new: str, listed: str, tmp_path: Path
) -> None:
    assert old in ASYNC
    conversion = convert(ASYNC.replace(old, new), tmp_path)
    assert any(line.startswith(listed) for line in conversion.differences)
