"""`finetune convert` on command lines: those of TRL, ms-swift, LLaMA-Factory and Axolotl, from scripts and as an argument."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli import main
from finetune.convert.conversion import EXIT_TO_DO, convert_file
from finetune.convert.value_conversion import Conversion
from finetune.errors import UserError

TRL = "model_name_or_path: org/model\ndataset_name: org/rows\nlearning_rate: 1.0e-5\nmax_length: 512\npacking: true\n"
SWIFT = """\
# 17.2GiB
MODEL=Qwen/Qwen2.5-7B-Instruct
n=4
CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=$n \\
swift sft \\
    --model $MODEL \\
    --tuner_type lora \\
    --dataset 'org/rows:default#500' data.jsonl \\
    --torch_dtype bfloat16 \\
    --target_modules q_proj v_proj \\
    --gradient_accumulation_steps $(expr 16 / $n) \\
    --loss_scale last_round \\
    --model_author swift \\
    --deepspeed zero3
"""


def convert(command: str) -> Conversion:
    return convert_file(Path(command))


def same(one: Conversion, other: Conversion) -> bool:
    return (one.recipe, one.differences) == (other.recipe, other.differences)


def test_a_command_line_of_trl_is_its_file(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(TRL)
    by_file = convert_file(tmp_path / "theirs.yaml")
    options = (
        "--model_name_or_path org/model --dataset_name org/rows --learning-rate=1.0e-5 --packing"
    )
    assert same(convert(f"trl sft {options} --max_length 512"), by_file)
    script = f"accelerate launch --num_processes 2 examples/scripts/sft.py {options} \\\n  --max_length 512\n"
    (tmp_path / "train.sh").write_text(f"#!/bin/bash\nset -e\n{script}")
    assert same(convert_file(tmp_path / "train.sh"), by_file)
    assert same(convert(f"trl sft --config {tmp_path / 'theirs.yaml'}"), by_file)


def test_an_equals_sign_in_the_value_of_an_option_sets_no_other_key() -> None:
    """Source: HfArgumentParser of transformers, by which --optim_args takes the word after it."""
    options = "--model_name_or_path org/model --dataset_name org/rows --weight_decay 0.1"
    made = convert(f"trl sft {options} --optim_args weight_decay=0.5")
    assert made.recipe["weight_decay"] == 0.1
    lines = [*made.differences, *made.remarks]
    assert any(line.startswith('optim_args: "weight_decay=0.5"') for line in lines)


def test_what_stands_on_the_command_line_prevails(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(TRL)
    assert (
        convert(f"trl sft --config {tmp_path / 'theirs.yaml'} --no_packing").recipe["packing"]
        is False
    )
    factory = {
        "model_name_or_path": "org/model",
        "stage": "sft",
        "template": "llama3",
        "dataset": "rows",
    }
    (tmp_path / "factory.yaml").write_text(yaml.safe_dump(factory))
    command = f"llamafactory-cli train {tmp_path / 'factory.yaml'} learning_rate=2e-5 lora_rank=16"
    recipe = convert(command).recipe
    assert (recipe["learning_rate"], recipe["lora_r"]) == (2e-5, 16)
    axolotl = {
        "base_model": "org/model",
        "sequence_len": 64,
        "datasets": [{"path": "a", "type": "completion"}],
    }
    (tmp_path / "axolotl.yaml").write_text(yaml.safe_dump(axolotl))
    launch = f"accelerate launch -m axolotl.cli.train {tmp_path / 'axolotl.yaml'}"
    with pytest.raises(UserError):
        convert(launch)
    assert (
        convert(f"axolotl train {tmp_path / 'axolotl.yaml'} --learning-rate 3e-4").recipe[
            "learning_rate"
        ]
        == 3e-4
    )


def test_every_flat_file_of_llama_factory_is_its_command_line(shared: Path) -> None:
    compared = 0
    for path in sorted((shared / "peer_configs" / "llama_factory").glob("*.yaml")):
        theirs = yaml.safe_load(path.read_text())
        if any(isinstance(value, list | dict) for value in theirs.values()):
            continue
        options = [f"--{key}={yaml_word(value)}" for key, value in theirs.items()]
        command = f"llamafactory-cli train {shlex.join(options)}"
        try:
            by_file = convert_file(path)
        except UserError:
            with pytest.raises(UserError):
                convert(command)
            continue
        by_command = convert(command)
        # a comment of the file may name the Accelerate file beside which it is launched
        for each in (by_file, by_command):
            each.recipe.pop("accelerate_config", None)
        assert same(by_file, by_command), path
        compared += 1
    assert compared > 10


def yaml_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_a_typed_command_names_files_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text('{"mine": {"file_name": "mine.jsonl"}}')
    (tmp_path / "data" / "mine.jsonl").write_text('{"instruction": "a", "output": "b"}')
    monkeypatch.chdir(tmp_path)
    options = "--model_name_or_path org/model --stage sft --template llama3 --dataset mine"
    made = convert(f"llamafactory-cli train {options} --output_dir saves/dpo/first")
    assert made.recipe["datasets"][0]["path"] == "data/mine.jsonl"
    refused = f"llamafactory-cli train {options} --mixture_of_depths convert"
    with pytest.raises(UserError, match=r"^the command line: "):
        convert(refused)


@pytest.mark.parametrize("method", ["dpo", "kto", "orpo", "reward"])
def test_trl_names_the_method_on_its_command_line(method: str) -> None:
    found = convert(f"trl {method} --model_name_or_path org/model --dataset_name org/rows")
    assert found.recipe["method"] == method and "does not say which trainer" not in str(
        found.remarks
    )


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("trl prm --model_name_or_path a/b --dataset_name c/d", "another trainer of TRL's"),
        ("trl distillation --model_name_or_path a/b --dataset_name c/d", "distillation"),
        ("trl vllm-serve --model a/b", "vllm-serve, not a training recipe"),
        ("swift rlhf --rlhf_type grpo --model a/b --dataset c/d", "GRPO by ms-swift"),
        ("swift rlhf --rlhf_type rm --model a/b --dataset c/d", "reward model"),
        ("swift pt --model a/b --dataset c/d", "pretraining by ms-swift"),
        ("swift infer --adapters a/b", "infer, not a training recipe"),
        ("swift sft --model Qwen/Qwen2-VL-7B-Instruct --dataset c/d", "images by ms-swift"),
        (
            "swift sft --model a/b --dataset c/d --task_type embedding --loss_type infonce",
            "embeddings by ms-swift, whose rows have messages and lists of positive_messages",
        ),
        ("swift sft --model a/b --dataset c/d --task_type generative_reranker", "a reranker by"),
        ("swift sft --model a/b --dataset c/d --task_type seq_cls", "a classifier by ms-swift"),
        ("swift sft --model a/b --dataset c/d --num_labels 3", "a classifier by ms-swift"),
        ("swift sft --model a/b --dataset c/d --tuner_type adalora", "ADALORA"),
        ("swift sft --model $MODEL --dataset c/d", "only the shell knows"),
        ("swift sft --model 'a/b --dataset c/d", "close the quotes"),
    ],
)
def test_what_is_not_converted_is_refused_by_its_name(command: str, cause: str) -> None:
    with pytest.raises(UserError) as said:
        convert(command)
    assert cause in str(said.value)


def test_a_script_of_ms_swift(tmp_path: Path) -> None:
    """Its defaults: arguments/sft_args.py, arguments/tuner_args.py and trainers/arguments.py of ms-swift 4.6."""
    (tmp_path / "train.sh").write_text(SWIFT)
    found = convert_file(tmp_path / "train.sh")
    expected: dict[str, Any] = {
        "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
        "datasets": [
            {"path": "org/rows", "name": "default", "max_samples": 500},
            {"path": "data.jsonl"},
        ],
        "lora_target_modules": ["q_proj", "v_proj"],
        "gradient_accumulation_steps": 4,
        "turns": "last",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "learning_rate": 1e-4,
        "lora_dropout": 0.05,
        "accelerate_config": "fsdp_full_shard_auto",
    }
    assert {key: found.recipe.get(key) for key in expected} == expected
    said = "\n".join(found.differences)
    assert "template: null" in said and "not known here" not in said
    assert "model_author" not in said, "the rows are not about the model itself"
    assert any(
        "names of ModelScope's hub" in line and "data.jsonl" not in line for line in found.to_do
    )


def test_a_hash_within_a_word_begins_no_comment(tmp_path: Path) -> None:
    """As in a shell: of `rows#500 # all`, the comment is `# all`."""
    command = (
        "swift sft --model Qwen/Qwen3-8B --tuner_type full --dataset {} \\\n --learning_rate 5e-5"
    )
    quoted, bare = tmp_path / "quoted.sh", tmp_path / "bare.sh"
    quoted.write_text(command.format("'org/rows#500' 'a # b'") + "\n")
    bare.write_text("# it's one\n" + command.format('org/rows#500 "a # b"') + " # --seed 3\n")
    found = convert_file(bare)
    assert same(found, convert_file(quoted)) and "seed" not in found.recipe
    assert found.recipe["datasets"][0] == {"path": "org/rows", "max_samples": 500}
    assert found.recipe["learning_rate"] == 5e-5


@pytest.mark.parametrize(
    "after",
    ["2>&1 | tee log.txt", "&", "> log.txt 2>&1 &", "&& swift infer --learning_rate 1", "; done"],
)
def test_an_option_ends_where_the_command_does(after: str, tmp_path: Path) -> None:
    command = "cd a && swift sft --model Qwen/Qwen3-8B --tuner_type full --learning_rate 5e-5 --dataset a/b"
    (tmp_path / "train.sh").write_text(f"{command} {after}\n")
    assert same(convert_file(tmp_path / "train.sh"), convert(command.removeprefix("cd a && ")))


def test_a_file_of_ms_swift_and_its_defaults_of_full_training(tmp_path: Path) -> None:
    file = {
        "model": "org/model",
        "tuner_type": "full",
        "dataset": ["rows.jsonl"],
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file | {"per_device_train_batch_size": 4}))
    found = convert_file(tmp_path / "theirs.yaml")
    assert found.tool == "ms-swift"
    keys = ("learning_rate", "gradient_accumulation_steps", "dtype")
    assert [found.recipe.get(key) for key in keys] == [1e-5, 4, "bfloat16"]
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file | {"micro_batch_size": 4}))
    with pytest.raises(UserError, match="Megatron-SWIFT"):
        convert_file(tmp_path / "theirs.yaml")


def test_the_command_megatron_is_of_ms_swifts_other_trainer(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("megatron sft --model a/b --dataset rows.jsonl --lr 1e-4\n")
    with pytest.raises(UserError, match="megatron sft: Megatron-SWIFT: not supported"):
        convert_file(tmp_path / "run.sh")


def test_the_command_takes_a_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["convert", "trl sft --model_name_or_path ./models/a --dataset_name b.jsonl"])
    assert code in (0, EXIT_TO_DO)
    assert capsys.readouterr().out.startswith("# From a command line (TRL) by finetune convert.\n")
