"""Keys and values that people write and published files rarely have: null, other defaults beside a key, several keys together."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.convert.asked_layout import read_layout
from finetune.convert.by_tool import NOT_MEASURED
from finetune.convert.conversion import TRAINED_AS_FILED, convert_file, read_back
from finetune.convert.datasets import FIRST_MESSAGE, QUERY_JOINED, THOUGHTS_SWITCHED
from finetune.convert.factory import ONE_LESS, UNTRAINED_THOUGHT
from finetune.convert.objectives import ANSWER_CUT_ALONE, PAIRS_SMOOTHED
from finetune.convert.recognize import Refusal
from finetune.errors import UserError
from tests.convert.conftest import Convert, said
from tests.convert.test_loops import TUNE

AXOLOTL = {
    "base_model": "org/model",
    "datasets": [{"path": "a/rows", "type": "completion"}],
    "micro_batch_size": 2,
    "learning_rate": 1e-5,
    "num_epochs": 3,
}


@pytest.mark.parametrize(
    ("keys", "steps", "epochs"),
    [
        ({"batch_size": 8}, 1, 0.75),
        ({"batch_size": 2}, 1, 3),
        ({"batch_size": 8, "max_steps": 9}, 1, 3),
        ({"batch_size": 8, "gradient_accumulation_steps": None}, 4, 3),
        ({"gradient_accumulation_steps": None}, None, 3),
    ],
)
def test_batch_size_of_axolotl_counts_steps_unless_the_accumulation_is_null(
    keys: dict[str, Any], steps: int | None, epochs: float, convert: Convert
) -> None:
    """Source: validate_config and normalize_config of Axolotl 0.19 and 0.21, as run on these keys; and
    calculate_total_num_steps, whose steps Trainer gets as max_steps.
    """
    found = convert(AXOLOTL, **keys)
    assert found.recipe.get("gradient_accumulation_steps") == steps
    assert found.recipe["num_train_epochs"] == epochs
    assert ("batch_size: 8" in said(found)) is (epochs == 0.75)


TRL = {"model_name_or_path": "org/model", "dataset_name": "a/rows"}
COMMAND = "trl {} --model_name_or_path org/model --dataset_name a/rows "


def test_the_command_cpo_is_simpo_with_its_loss_and_refused_without() -> None:
    """Source: CPOConfig of TRL, whose loss_type may be simpo."""
    options = COMMAND.format("cpo")
    found = convert_file(Path(options + "--loss_type simpo --cpo_alpha 0 --simpo_gamma 1.2"))
    assert (found.recipe["method"], found.recipe["simpo_gamma"]) == ("simpo", 1.2)
    for loss in ("", "--loss_type sigmoid"):
        with pytest.raises(Refusal, match=r"another loss \(CPO\)"):
            convert_file(Path(options + loss))


@pytest.mark.parametrize(
    ("keys", "length"),
    [({"loss_type": "simpo"}, 512), ({"desirable_weight": 1.0}, 8192), ({"beta": 0.1}, 8192)],
)
def test_null_as_max_length_is_512_in_trls_experimental_trainers(
    keys: dict[str, Any], length: int, convert: Convert
) -> None:
    """Source: __init__ of CPOTrainer and ORPOTrainer. KTOTrainer did so before 0.27, DPOTrainer cuts nothing."""
    found = convert(TRL, max_length=None, **keys)
    assert found.recipe["max_length"] == length
    assert ("row of over 512 tokens" in said(found)) is ("beta" not in keys)


@pytest.mark.parametrize("command", ["orpo", "kto", "sft"])
def test_none_on_a_command_line_of_trl_is_null(command: str) -> None:
    """Source: _accept_none of TRL's scripts/_hf_argparser.py."""
    found = convert_file(Path(COMMAND.format(command) + "--max_length None"))
    assert found.recipe["max_length"] == (512 if command == "orpo" else 8192)


def test_a_word_for_false_is_false(convert: Convert) -> None:
    """Source: string_to_bool of HfArgumentParser, which argparse calls for the texts of a file too."""
    found = convert(TRL, completion_only_loss="false", packing="True")
    assert found.recipe["assistant_only_loss"] is False and found.recipe["packing"] is True


def test_a_loss_of_pairs_names_its_trainer_or_is_refused(convert: Convert) -> None:
    assert convert(TRL, loss_type="kto", beta=0.2).recipe["method"] == "kto"
    with pytest.raises(Refusal, match="chosen answers alone"):
        convert(TRL, loss_type="sft")
    without = convert(TRL, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.0])
    assert "rpo_alpha" not in without.recipe | convert(TRL, beta=0.1, rpo_alpha=0).recipe
    smoothed = convert(TRL, loss_type="simpo", label_smoothing=0.1)
    assert PAIRS_SMOOTHED in said(smoothed)
    assert PAIRS_SMOOTHED not in said(convert(TRL, loss_type="simpo", label_smoothing=0))


@pytest.mark.parametrize(
    ("keys", "method", "is_cut"),
    [
        ({"loss_type": "sigmoid"}, "dpo", True),
        ({"desirable_weight": 1.0}, "kto", False),
        ({"loss_type": "simpo"}, "simpo", False),
        ({"reward_funcs": ["think_format_reward"], "beta": 0.0}, "grpo", False),
    ],
)
def test_max_completion_length_is_of_older_preference_trainers_too(
    keys: dict[str, Any], method: str, is_cut: bool, convert: Convert
) -> None:
    """DPO's tokenize_row cuts an answer to it; the others read it of models with an encoder."""
    found = convert(TRL, max_completion_length=64, **keys)
    assert found.recipe["method"] == method
    assert (ANSWER_CUT_ALONE in said(found)) is is_cut


def test_peft_adapts_no_layer_by_itself_beside_named_parameters(convert: Convert) -> None:
    experts = {"lora_target_parameters": ["mlp.experts.gate_up_proj"], "use_peft": True}
    mixture = {**TRL, "model_name_or_path": "Qwen/Qwen3-30B-A3B"}
    assert convert(mixture, **experts).recipe["lora_target_modules"] == []
    both = convert(mixture, lora_target_modules=["q_proj"], **experts)
    assert both.recipe["lora_target_modules"] == ["q_proj"]


@pytest.mark.parametrize(
    ("name", "dtype", "layout", "ours"),
    [
        ("zero3", "bfloat16", "fsdp_full_shard_auto", None),
        ("configs/deepspeed_zero2.yaml", "bfloat16", "fsdp_shard_grad_op", None),
        ("fsdp2", "bfloat16", "fsdp_full_shard_auto", None),
        ("multi_gpu", "bfloat16", "ddp_checkpointing", "bfloat16"),
        ("single_gpu", "auto", "ddp_checkpointing", None),
    ],
)
def test_the_accelerate_file_of_trls_command_is_the_layout(
    name: str, dtype: str, layout: str, ours: str | None, convert: Convert
) -> None:
    """Without FSDP and DeepSpeed nothing makes a copy in float32 of what is loaded in bfloat16."""
    found = convert(TRL, accelerate_config=name, dtype=dtype)
    assert (found.recipe["accelerate_config"], found.recipe.get("dtype")) == (layout, ours)
    assert (found.recipe.get("export_dtype") == "bfloat16") is ("zero" in name)
    assert (TRAINED_AS_FILED in said(found)) is (dtype == "auto")
    script = "examples/scripts/sft.py --model_name_or_path org/model --dataset_name a/rows"
    launched = convert_file(
        Path(f"accelerate launch --config_file={name} {script} --dtype {dtype}")
    )
    assert launched.recipe["accelerate_config"] == layout


FACTORY = {
    "model_name_or_path": "org/model",
    "stage": "sft",
    "finetuning_type": "full",
    "dataset": "rows",
    "cutoff_len": 512,
}


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({"packing": True}, 511),
        ({"neat_packing": True, "packing": False}, 511),
        ({"stage": "pt"}, 512),
        ({"stage": "pt", "packing": True}, 511),
        ({"packing": False}, 512),
        ({"max_length": 64}, 512),
    ],
)
def test_packed_rows_of_llama_factory_have_one_token_less_than_cutoff_len(
    keys: dict[str, Any], length: int, convert: Convert
) -> None:
    """Source: __post_init__ of DataArguments; max_length is one of GeneratingArguments."""
    found = convert(FACTORY, **keys)
    assert found.recipe["max_length"] == length
    assert (ONE_LESS in said(found)) is (length == 511)


def test_the_default_to_mix_data_sets_asks_for_nothing(convert: Convert) -> None:
    assert "mix_strategy" not in said(convert(FACTORY, mix_strategy="concat"))
    assert "mix_strategy" in said(convert(FACTORY, mix_strategy="interleave_under"))


@pytest.mark.parametrize(("rl", "loss"), [("ipo", "ipo"), ("dpo", "hinge")])
def test_axolotl_reads_the_loss_of_dpo_under_that_name_alone(
    rl: str, loss: str, convert: Convert
) -> None:
    """Source: set_training_args_kwargs of DPOStrategy in 0.19 and 0.21."""
    pairs = {"datasets": [{"path": "a/pairs", "type": "chatml.intel"}], "rl": rl}
    found = convert(AXOLOTL | pairs, dpo_loss_type=["hinge"], dpo_label_smoothing=0.1)
    assert found.recipe["loss_type"] == loss
    assert ("label_smoothing" in found.recipe) is (rl == "dpo")


def test_the_command_of_axolotl_that_trains_is_converted(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(AXOLOTL))
    script = tmp_path / "run.sh"
    command = f"axolotl preprocess {tmp_path}/theirs.yaml\n"
    script.write_text(f"{command}axolotl train {tmp_path}/theirs.yaml --learning-rate 3e-4\n")
    assert convert_file(script).recipe["learning_rate"] == 3e-4
    script.write_text(command)
    with pytest.raises(UserError, match="no command"):
        convert_file(script)


AUTOMODEL = {
    "model": {"pretrained_model_name_or_path": "org/model"},
    "dataset": {
        "_target_": "nemo_automodel.components.datasets.llm.squad.make_squad_dataset",
        "dataset_name": "a/rows",
    },
    "step_scheduler": {"local_batch_size": 1},
}


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("my_losses.FocalLoss", True),
        ("torch.nn.CrossEntropyLoss", False),
        ("torchtune.modules.loss.CEWithChunkedOutputLoss", False),
        ("nemo_automodel.components.loss.te_parallel_ce.TEParallelCrossEntropy", False),
    ],
)
def test_a_loss_that_is_no_cross_entropy_is_said(name: str, is_own: bool, convert: Convert) -> None:
    for file, section, key in ((TUNE, "loss", "_component_"), (AUTOMODEL, "loss_fn", "_target_")):
        assert (name in said(convert(file, **{section: {key: name}}))) is is_own


@pytest.mark.parametrize(
    ("entry", "column", "note"),
    [
        ({"columns": {"prompt": "text"}}, "text", ""),
        ({"columns": {"prompt": "text", "response": "output"}}, "text", ""),
        ({}, "instruction", QUERY_JOINED),
        ({"columns": {"prompt": "q", "query": "more"}}, "q", QUERY_JOINED),
        ({"formatting": "sharegpt"}, None, FIRST_MESSAGE),
    ],
)
def test_pretraining_by_llama_factory_trains_the_prompts_alone(
    entry: dict[str, Any], column: str | None, note: str, tmp_path: Path, convert: Convert
) -> None:
    """Source: PretrainDatasetProcessor, whose text is the first message of _prompt."""
    (tmp_path / "data").mkdir()
    info = {"rows": {"hf_hub_url": "a/rows", **entry}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    found = convert(FACTORY, stage="pt")
    assert found.recipe["datasets"][0].get("text_column") == column
    notes = [each for each in (QUERY_JOINED, FIRST_MESSAGE) if each in said(found)]
    assert notes == ([note] if note else [])
    assert note not in said(convert(FACTORY, stage="sft")) or not note


def test_a_mixtures_column_of_messages_is_named_beside_those_read_with_it(convert: Convert) -> None:
    """alignment-handbook's columns: a row's variables and tools are read there and here."""
    entry = {"id": "a/rows", "columns": ["messages", "chat_template_kwargs"], "weight": 0.5}
    file = {"model_name_or_path": "org/model", "dataset_mixture": {"datasets": [entry]}}
    found = convert(file)
    source = {"path": "a/rows", "messages_column": "messages", "weight": 0.5}
    assert found.recipe["datasets"] == [source] and "columns" not in said(found)
    entry["columns"] = ["messages", "score"]
    assert "datasets[0].columns" in said(convert(file))


def test_conversations_in_openais_form_are_read_and_their_system_message_is_said(
    tmp_path: Path, convert: Convert
) -> None:
    """Source: OpenAIDatasetConverter."""
    (tmp_path / "data").mkdir()
    entry = {"hf_hub_url": "a/rows", "formatting": "openai", "columns": {"messages": "turns"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"rows": entry}))
    found = convert(FACTORY)
    assert found.recipe["datasets"][0]["messages_column"] == "turns"
    assert THOUGHTS_SWITCHED in said(found)


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"roles_to_train": []}, True),
        ({"roles_to_train": None}, False),
        ({"roles_to_train": ["assistant"]}, False),
        ({"field_tools": "tools"}, False),
        ({"field_tools": "functions"}, True),
    ],
)
def test_an_empty_list_of_roles_trains_none_in_axolotl(
    keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    """Source: ChatTemplateStrategy, which trains the turns of roles_to_train, and by default the assistant's."""
    entry = {"path": "a/rows", "type": "chat_template", **keys}
    found = convert(AXOLOTL | {"datasets": [entry]})
    assert (f"datasets[0].{next(iter(keys))}: " in said(found)) is is_said


def test_jinja_as_a_template_of_axolotl_says_that_the_other_key_has_it(convert: Convert) -> None:
    found = convert(AXOLOTL, chat_template="jinja", chat_template_jinja="{{ messages }}")
    assert found.recipe["chat_template"] == "{{ messages }}" and "jinja" not in said(found)


@pytest.mark.parametrize(
    ("file", "keys", "precision"),
    [
        (AXOLOTL, {"bf16": "auto", "fp16": True}, "fp16"),
        (AXOLOTL, {"fp16": True}, "fp16"),
        (AXOLOTL, {"float16": True}, "bf16"),
        (AXOLOTL, {"bf16": None}, "no"),
        (AXOLOTL, {"bf16": True, "fp16": True}, "bf16"),
        (TRL, {"bf16": None}, "bf16"),
        (TRL, {"bf16": None, "fp16": True}, "fp16"),
        (TRL, {"bf16": False}, "no"),
    ],
)
def test_the_precision_that_a_file_leaves_open(
    file: dict[str, Any], keys: dict[str, Any], precision: str
) -> None:
    """Source: resolve_dtype of Axolotl 0.19 and 0.21, as run on these keys; __post_init__ of TRL's _BaseConfig."""
    tool = "TRL" if file is TRL else "Axolotl"
    assert read_layout(tool, file | keys, "").precision == precision


def test_steps_without_their_number_are_trainers_in_axolotl(convert: Convert) -> None:
    keys = {"save_strategy": "steps", "eval_strategy": "steps", "val_set_size": 0.1}
    recipe = convert(AXOLOTL, **keys).recipe
    assert (recipe["save_steps"], recipe["eval_steps"]) == (500, 10)
    assert convert(AXOLOTL, logging_steps=3, **keys).recipe["eval_steps"] == 3
    assert convert(AXOLOTL, save_steps=7, **keys).recipe["save_steps"] == 7


@pytest.mark.parametrize(
    ("file", "keys", "is_said"),
    [
        (FACTORY | {"stage": "dpo"}, {"pref_bco_weight": 1.0}, True),
        (FACTORY | {"stage": "dpo"}, {"ld_alpha": 1.0}, False),
        (AXOLOTL, {"lisa_n_layers": 1}, True),
        (AXOLOTL, {"loraplus_lr_ratio": 1}, False),
        (TRL | {"reward_funcs": ["think_format_reward"]}, {"entropy_coef": 1.0}, True),
        (TRL | {"reward_funcs": ["think_format_reward"]}, {"top_p": 1}, False),
    ],
)
def test_a_value_of_1_asks_for_nothing_under_some_keys_alone(
    file: dict[str, Any], keys: dict[str, Any], is_said: bool, convert: Convert
) -> None:
    assert (f"{next(iter(keys))}: 1" in said(convert(file, **keys))) is is_said


def test_thinking_that_is_null_trains_no_empty_thought_in_llama_factory(convert: Convert) -> None:
    """Source: `if not self.enable_thinking` of ReasoningTemplate, whose value is the file's."""
    thinking = FACTORY | {"template": "qwen3"}
    assert UNTRAINED_THOUGHT in said(convert(thinking, enable_thinking=None))
    for keys in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        assert UNTRAINED_THOUGHT not in said(convert(thinking, **keys))


def test_a_mapping_of_omegaconf_needs_no_spaces(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(FACTORY | {"learning_rate": 1e-5}))
    keys = "lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs={min_lr:1e-6}"
    found = convert_file(Path(f"llamafactory-cli train {tmp_path}/theirs.yaml {keys}"))
    assert found.recipe["min_lr_ratio"] == 0.1


def test_a_script_that_trains_again_says_what_is_not_converted(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    command = "swift sft --model org/model --dataset rows.jsonl\n"
    script.write_text(f"{command}swift infer --adapters out\n")
    assert "other_commands" not in said(convert_file(script))
    script.write_text(f"{command}{command}swift rlhf --rlhf_type dpo --model out\n")
    assert 'other_commands: ["ms-swift sft", "ms-swift rlhf"]' in said(convert_file(script))


def test_no_is_a_strategy_of_a_command_and_holds_no_rows_out() -> None:
    """_init_eval_strategy of ms-swift's sft_args.py; YAML reads the word as false."""
    command = "swift sft --model org/model --dataset a.jsonl --split_dataset_ratio 0.1 "
    for key in ("eval_strategy", "save_strategy"):
        recipe = convert_file(Path(f"{command}--{key} no")).recipe
        assert not {"eval_split_size", "eval_steps"} & recipe.keys()
    found = convert_file(Path(f"{command}--val_dataset b.jsonl --eval_strategy no"))
    assert NOT_MEASURED in found.remarks and "eval_steps" not in found.recipe
    assert (
        "eval_datasets"
        not in convert_file(Path(f"{COMMAND.format('sft')}--eval_strategy no")).recipe
    )


@pytest.mark.parametrize("keys", [{}, {"do_eval": True}, {"eval_strategy": "epoch"}])
def test_trainer_measures_held_out_rows_by_a_strategy_or_at_the_end(
    keys: dict[str, Any], convert: Convert
) -> None:
    file = {"model_name_or_path": "org/model", "stage": "sft", "dataset": "a", "val_size": 0.1}
    assert (NOT_MEASURED in said(convert(file, **keys))) is (keys == {})


def test_a_number_in_quotes_is_the_number(convert: Convert) -> None:
    file = {"model_name_or_path": "org/model", "stage": "sft", "dataset": "a", "lora_rank": "16"}
    assert convert(file).recipe["lora_r"] == 16
    swift = {"model": "org/model", "tuner_type": "lora", "dataset": ["a.jsonl"], "packing": "yes"}
    recipe = convert(swift, quant_bits="4", quant_method="bnb").recipe
    assert recipe["load_in_4bit"] is True and recipe["packing"] is True
    assert convert(swift | {"packing": 1}).recipe["packing"] is True


@pytest.mark.parametrize(("tuner", "ratio"), [("lora", 0.01), ("full", 0.1)])
def test_a_lowest_rate_is_a_share_of_the_tools_default_rate(
    tuner: str, ratio: float, convert: Convert
) -> None:
    """1e-4, in full fine-tuning 1e-5: _init_learning_rate of ms-swift's sft_args.py."""
    swift = {"model": "org/model", "tuner_type": tuner, "dataset": ["a.jsonl"]}
    schedule = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}}
    found = convert(swift | schedule)
    assert found.recipe["min_lr_ratio"] == pytest.approx(ratio) and "min_lr: " not in said(found)
    factory = {"model_name_or_path": "org/model", "stage": "sft", "dataset": "a"}
    assert convert(factory | schedule).recipe["min_lr_ratio"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("name", "rate", "decay", "is_adamw"),
    [
        ("dion.Muon", 5e-4, 0.0, False),
        ("nemo_automodel.components.optim.optimizer.MuonConfig", 5e-4, 0.0, False),
        ("nemo_automodel.components.optim.optimizer.FusedAdamConfig", 1e-4, 0.01, True),
    ],
)
def test_the_defaults_of_automodels_optimizers_are_those_of_their_configs(
    name: str, rate: float, decay: float, is_adamw: bool, convert: Convert
) -> None:
    """Its components/optim/optimizer.py."""
    file = {
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": "org/model",
        },
        "dataset": {"_target_": "ChatDataset", "path_or_dataset_id": "a.jsonl"},
    }
    found = convert(file, optimizer={"_target_": name})
    recipe = found.recipe
    assert (recipe["learning_rate"], recipe.get("weight_decay", 0.0)) == (rate, decay)
    assert ("optimizer._target_: " in said(found)) is not is_adamw


def test_null_of_torchtune_is_false_or_nothing(convert: Convert) -> None:
    """Source: alpaca_dataset of torchtune 0.6.1, whose train_on_input is true by default;
    config.instantiate, which makes nothing of null.
    """
    rows = {"_component_": "torchtune.datasets.alpaca_dataset"}
    whole = convert(TUNE, dataset=rows, quantizer=None, teacher_model=None)
    assert whole.recipe["assistant_only_loss"] is False
    answers = convert(TUNE, dataset={**rows, "train_on_input": None})
    assert answers.recipe.get("assistant_only_loss") is not False


@pytest.mark.parametrize("keys", [{}, {"gradient_checkpointing": False}])
def test_llama_factory_checkpoints_unless_its_own_key_disables_it(keys: dict[str, Any]) -> None:
    """Source: prepare_model_for_training in its model_utils/checkpointing.py, which reads
    disable_gradient_checkpointing alone.
    """
    disabled = keys | {"disable_gradient_checkpointing": True}
    assert read_layout("LLaMA-Factory", FACTORY | keys, "").checkpointing
    assert not read_layout("LLaMA-Factory", FACTORY | disabled, "").checkpointing


def test_replicas_of_torchtune_are_kept_where_it_keeps_gathered_weights() -> None:
    """Source: parallelize of its ParallelDims and recipes/full_finetune_distributed.py."""
    file = {"data_parallel_replicate_dim": 2, "data_parallel_shard_dim": 4}
    layout = read_layout("torchtune", file | {"fsdp_reshard_after_forward": False}, "distributed")
    assert (layout.sharding, layout.replicas, layout.shards) == ("hybrid", 2, 4)


def test_a_lowest_rate_above_the_rate_is_refused_as_by_automodel(convert: Convert) -> None:
    """Source: __init__ of its OptimizerParamScheduler asserts that max_lr is at least min_lr."""
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 1e-5}
    schedule = {"lr_decay_style": "cosine", "lr_warmup_steps": 0, "min_lr": 1e-2}
    found = convert(AUTOMODEL, lr_scheduler=schedule, optimizer=optimizer)
    assert any("min_lr_ratio: 1000.0 does not fit" in line for line in read_back(found.recipe))
