"""Preference files of other tools: their method, values and data, and what is refused of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from finetune.config.schema import Data, DatasetSource
from finetune.constants import IGNORE_INDEX
from finetune.convert.by_tool import ROWS_BY_LENGTH
from finetune.convert.chat_templates import EMPTY_SYSTEM, SAVED_TEMPLATE, SPACE_DOUBLED
from finetune.convert.conversion import convert_file, read_back
from finetune.convert.datasets import OF_LLAMA3
from finetune.convert.objectives import ALWAYS_SIGMOID, ANSWERS_OF_PROMPTS, CPO_SIMPO, PACKED_BY_SUM
from finetune.convert.recognize import Refusal
from finetune.convert.shared import IN_ORDER
from finetune.convert.swift import SWIFT_TURNS
from finetune.convert.value_conversion import Conversion
from finetune.data.source_tokens import SourceStats, tokenize_rows
from finetune.data.sources import RowBatch
from finetune.data.tokenizer import read_template
from finetune.errors import UserError
from tests.convert.conftest import said

TRL = "model_name_or_path: a/model\ndataset_name: a/pairs\n"
AXOLOTL = "base_model: a/model\nsequence_len: 1024\nlearning_rate: 1e-5\nbf16: false\n"
AXOLOTL_DATA = "datasets:\n  - {path: a/pairs, type: %s}\n"
FACTORY = "model_name_or_path: a/model\ntemplate: llama3\nfinetuning_type: full\ncutoff_len: 1024\ndataset: ours\n"
SWIFT = "model: meta-llama/Llama-3.1-8B\ntuner_type: lora\nmax_length: 1024\ndataset: rows.jsonl\n"
TORCHTUNE = """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 1024}
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/model}
optimizer: {_component_: torch.optim.AdamW, lr: 5e-7}
epochs: 1
batch_size: 4
"""


def convert(text: str, tmp_path: Path, name: str = "theirs.yaml") -> Conversion:
    """The conversion of a file's text, which our reader accepts but for local paths."""
    (tmp_path / name).write_text(text)
    found = convert_file(tmp_path / name)
    assert not [line for line in read_back(found.recipe) if "no such file" not in line]
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TRL + "beta: 0.3\n", {"method": "dpo", "beta": 0.3, "learning_rate": 1e-6, "max_length": 1024}),
        (TRL + "loss_type: apo_zero\n", {"method": "dpo", "loss_type": "apo_zero"}),
        (TRL + "loss_type: hinge\nlabel_smoothing: 0.0\n", {"method": "dpo", "loss_type": "hinge"}),
        (TRL + "loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.2]\n", {"loss_type": "sigmoid", "rpo_alpha": 0.2}),
        (TRL + "loss_type: ipo\nmax_length: 512\n", {"method": "dpo", "loss_type": "ipo", "max_length": 512}),
        (TRL + "desirable_weight: 1.5\n", {"method": "kto", "desirable_weight": 1.5}),
        (TRL + "loss_type: simpo\ncpo_alpha: 0\nsimpo_gamma: 1.0\n", {"method": "simpo", "simpo_gamma": 1.0}),
        (TRL + "beta: 0.1\nuse_peft: true\n", {"lora_dropout": 0.0}),
        (TRL + "beta: 0.1\nuse_peft: true\nlora_dropout: 0.1\ndisable_dropout: false\n", {"lora_dropout": 0.1}),
        (AXOLOTL + "rl: ipo\nrl_beta: 0.2\n" + AXOLOTL_DATA % "chatml.ultra", {"loss_type": "ipo", "beta": 0.2, "chat_template": "chatml"}),
        (AXOLOTL + "rl: kto\nkto_undesirable_weight: 0.5\n" + AXOLOTL_DATA % "llama3.ultra", {"method": "kto", "undesirable_weight": 0.5, "overlength": "drop"}),
        (AXOLOTL + "rl: simpo\nrl_beta: 2\nsimpo_gamma: 1.2\ncpo_alpha: 0\n" + AXOLOTL_DATA % "chatml.intel", {"method": "simpo", "simpo_gamma": 1.2}),
        (AXOLOTL + "rl: dpo\nrpo_alpha: 0.5\nexcess_length_strategy: truncate\n" + AXOLOTL_DATA % "chatml.icr", {"rpo_alpha": 0.5, "overlength": "truncate"}),
        (FACTORY + "stage: dpo\npref_loss: orpo\npref_beta: 0.2\n", {"method": "orpo", "beta": 0.2}),
        (FACTORY + "stage: dpo\npref_loss: simpo\nsimpo_gamma: 1.0\n", {"method": "simpo", "simpo_gamma": 1.0}),
        (FACTORY + "stage: dpo\npref_loss: sigmoid\npref_ftx: 0.1\ndpo_label_smoothing: 0.0\n", {"loss_type": "sigmoid", "rpo_alpha": 0.1}),
        (FACTORY + "stage: kto\nkto_chosen_weight: 2.0\n", {"method": "kto", "desirable_weight": 2.0}),
        (TORCHTUNE + "loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.05, label_smoothing: 0.1}\n"
         "ref_checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/model}\n"
         "dataset: {_component_: torchtune.datasets.hh_rlhf_helpful_dataset}\n", {"beta": 0.05, "label_smoothing": 0.1}),
    ],
)  # fmt: skip
def test_values_mean_the_same_here(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = convert(text, tmp_path)
    assert expected.items() <= found.recipe.items()
    assert not [
        line
        for line in found.differences
        if IN_ORDER not in line and "each answer is sliced by" not in line
    ]
    assert found.recipe.get("packing", True) is False
    assert "assistant_only_loss" not in found.recipe


@pytest.mark.parametrize(
    ("text", "expected", "differs"),
    [
        ("rlhf_type: dpo\nbeta: 0.2\nloss_type: [sigmoid, sft]\nloss_weights: [1, 0.5]\n", {"method": "dpo", "beta": 0.2, "rpo_alpha": 0.5}, ""),
        ("rlhf_type: dpo\npacking: true\n", {"method": "dpo"}, PACKED_BY_SUM.format("both answers of a pair")),
        ("rlhf_type: orpo\nloss_scale: last_round\n", {"method": "orpo"}, ""),
        ("rlhf_type: orpo\n", {"method": "orpo"}, ANSWERS_OF_PROMPTS),
        ("rlhf_type: simpo\ncpo_alpha: 0\n", {"method": "simpo", "beta": 2.0, "simpo_gamma": 1.0}, ""),
        ("rlhf_type: cpo\nloss_type: simpo\n", {"method": "simpo", "beta": 0.1}, CPO_SIMPO),
        ("rlhf_type: kto\nundesirable_weight: 2\n", {"method": "kto", "undesirable_weight": 2.0}, ""),
    ],
)  # fmt: skip
def test_preferences_by_ms_swift(
    text: str, expected: dict[str, Any], differs: str, tmp_path: Path
) -> None:
    found = convert(SWIFT + text, tmp_path)
    assert (expected | {"lora_dropout": 0.0}).items() <= found.recipe.items()
    assert found.recipe.get("packing", True) is ("packing" in text)
    assert not {"turns", "assistant_only_loss"} & found.recipe.keys()
    notes = [line for line in found.differences if SWIFT_TURNS not in line]
    assert len(notes) == bool(differs)
    assert differs in "".join(notes)


def test_a_loss_that_llama_factory_does_not_give_on_is_said(tmp_path: Path) -> None:
    found = convert(FACTORY + "stage: dpo\npref_loss: hinge\n", tmp_path)
    assert found.recipe["loss_type"] == "hinge"
    assert found.differences == [f'pref_loss: "hinge"   ({ALWAYS_SIGMOID})']


@pytest.mark.parametrize(
    "line",
    ["ld_alpha: 1.0", "discopop_tau: 0.1", "ref_model_sync_steps: 4", "label_smoothing: 0.0"],
)
def test_a_key_of_trls_preference_trainers_alone_makes_a_file_one_of_pairs(
    line: str, tmp_path: Path
) -> None:
    found = convert(f"{TRL}{line}\n", tmp_path)
    assert found.recipe["method"] == "dpo"
    assert not found.differences


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (TRL + "loss_type: apo_down\n", "another loss (APO_DOWN)"),
        (TRL + "beta: 0.1\nloss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\n", "another loss (BCO_PAIR)"),
        (TRL + "loss_type: [sigmoid, hinge]\n", "several losses at once"),
        (TRL + "loss_weights: [0.5]\n", "a weight of the loss"),
        (TRL + "loss_type: ipo\nloss_weights: [2.0]\n", "a weight of the loss"),
        (TRL + "cpo_alpha: 1.0\n", "another loss (CPO)"),
        (TRL + "beta: 0.1\nf_divergence_type: js_divergence\n", "another loss (JS_DIVERGENCE)"),
        (AXOLOTL + "rl: grpo\n", "online RL"),
        (AXOLOTL + "rl: dpo\ndpo_loss_type: [nca_pair]\n", "another loss (NCA_PAIR)"),
        (FACTORY + "stage: dpo\npref_loss: kto_pair\n", "another loss (KTO_PAIR)"),
        (FACTORY + "stage: ppo\n", "online RL"),
        (SWIFT + "rlhf_type: cpo\n", "another loss (CPO)"),
        (SWIFT + "rlhf_type: dpo\nloss_type: [sigmoid, hinge]\n", "several losses at once"),
        (TORCHTUNE + "loss: {_component_: torchtune.rlhf.loss.RSOLoss}\ndataset: {_component_: a}\n", "another loss (RSO)"),
        (TORCHTUNE + "loss: {_component_: torchtune.rlhf.loss.PPOLoss}\nppo_epochs: 2\ndataset: {_component_: a}\n", "online RL"),
    ],
)  # fmt: skip
def test_what_has_no_loss_here_is_refused_by_name(text: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refusal:
        convert(text, tmp_path)
    assert refusal.value.cause == cause


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        (TRL + "beta: 0.1\nmax_prompt_length: 512\n", "max_prompt_length: 512"),
        (TRL + "ld_alpha: 0.0\n", "another loss (LD-DPO)"),
        (TRL + "beta: 0.1\ntruncation_mode: keep_end\n", "truncation_mode"),
        (TRL + "loss_type: simpo\n", "CPO-SimPO"),
        (AXOLOTL + "rl: orpo\n" + AXOLOTL_DATA % "chatml.ultra", "the cross entropy is over prompt and answer there"),
        (AXOLOTL + "rl: dpo\n" + AXOLOTL_DATA % "zephyr.nectar", "zephyr.nectar"),
        (FACTORY + "stage: dpo\npref_loss: simpo\npref_ftx: 0.1\n", "pref_ftx: 0.1"),
        (FACTORY + "stage: dpo\nref_model: b/model\n", "another reference model"),
        (TORCHTUNE + "loss: {_component_: torchtune.rlhf.loss.DPOLoss}\nref_checkpointer: {checkpoint_dir: /tmp/other}\n"
         "dataset: {_component_: torchtune.datasets.hh_rlhf_helpful_dataset}\n", "/tmp/other"),
    ],
)  # fmt: skip
def test_what_works_differently_is_listed(text: str, listed: str, tmp_path: Path) -> None:
    assert any(listed in line for line in convert(text, tmp_path).differences)


@pytest.mark.parametrize("weights", ["3", "true", "heavy", "{a: 1}"])
def test_weights_of_another_shape_are_no_traceback(weights: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        convert(TRL + f"loss_type: [sigmoid, sft]\nloss_weights: {weights}\n", tmp_path)


def test_axolotls_orpo_alpha_is_beta(tmp_path: Path) -> None:
    found = convert(
        AXOLOTL + "rl: orpo\norpo_alpha: 0.4\n" + AXOLOTL_DATA % "chat_template.argilla", tmp_path
    )
    assert (found.recipe["method"], found.recipe["beta"]) == ("orpo", 0.4)


def test_trl_names_no_trainer_so_the_name_of_the_file_or_its_folder_says_which(
    tmp_path: Path,
) -> None:
    (tmp_path / "orpo").mkdir()
    assert (
        convert(TRL + "beta: 0.1\n", tmp_path, "orpo/config_full.yaml").recipe["method"] == "orpo"
    )
    assert convert(TRL + "beta: 0.1\n", tmp_path, "kto-run.yaml").recipe["method"] == "kto"
    guessed = convert(TRL + "beta: 0.1\n", tmp_path, "run.yaml")
    assert guessed.recipe["method"] == "dpo" and "does not say which trainer" in guessed.remarks[0]
    assert "method" not in convert(TRL + "loss_type: nll\n", tmp_path, "sft.yaml").recipe


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("chatml.intel", {"prompt_column": "question", "type": "messages"}),
        ("chatml.argilla", {"prompt_column": "instruction", "chosen_column": "chosen_response", "rejected_column": "rejected_response", "type": "messages"}),
        ("llama3.argilla_chat", {}),
        ("chat_template.default, field_messages: turns, field_chosen: good, field_rejected: bad",
         {"prompt_column": "turns", "chosen_column": "good", "rejected_column": "bad"}),
        ("{field_prompt: q, field_chosen: good, field_rejected: bad}", {"prompt_column": "q", "chosen_column": "good", "rejected_column": "bad"}),
    ],
)  # fmt: skip
def test_columns_of_axolotls_types(kind: str, expected: dict[str, str], tmp_path: Path) -> None:
    found = convert(AXOLOTL + "rl: dpo\n" + AXOLOTL_DATA % kind, tmp_path)
    assert found.recipe["datasets"] == [{"path": "a/pairs"} | expected] and not found.differences


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("chatml.argilla", {"prompt_column": "instruction", "completion_column": "completion", "type": "messages"}),
        ("llama3.argilla_chat", {"messages_column": "completion"}),
        ("{field_prompt: q, field_completion: a, field_label: good}", {"prompt_column": "q", "completion_column": "a", "label_column": "good"}),
    ],
)  # fmt: skip
def test_columns_of_axolotls_rated_types(
    kind: str, expected: dict[str, str], tmp_path: Path
) -> None:
    found = convert(AXOLOTL + "rl: kto\n" + AXOLOTL_DATA % kind, tmp_path)
    assert found.recipe["datasets"] == [{"path": "a/pairs"} | expected] and not found.differences


@pytest.mark.parametrize(
    ("kind", "asked", "saved"),
    [
        ("llama3.ultra", None, "the tokenizer's own, where it has one"),
        ("llama3.ultra", "tokenizer_default", "the tokenizer's own, where it has one"),
        ("llama3.ultra", "gemma", "gemma"),
        ("llama3.ultra", "llama3", None),
        ("chatml.ultra", None, "the tokenizer's own, where it has one"),
    ],
)
def test_axolotls_types_write_turns_by_their_own_template_whatever_chat_template_says(
    kind: str, asked: str | None, saved: str | None, tmp_path: Path
) -> None:
    """Its prompt_strategies join texts, and do not strip them; cfg.chat_template is saved."""
    keys = f"chat_template: {asked}\n" if asked else ""
    found = convert(AXOLOTL + "rl: kto\n" + keys + AXOLOTL_DATA % kind, tmp_path)
    template = kind.partition(".")[0]
    assert found.recipe["chat_template"] == template
    line = SAVED_TEMPLATE.format(template, saved)
    of_saving = [each for each in found.remarks if "is saved with the tokenizer here" in each]
    assert of_saving == ([line] if saved else [])
    assert any(OF_LLAMA3 in each for each in found.remarks) == (template == "llama3")


@pytest.mark.parametrize(
    ("text", "is_in_order"),
    [
        (TRL + "desirable_weight: 1.5\n", True),
        (TRL + "beta: 0.1\n", False),
        (AXOLOTL + "rl: kto\n" + AXOLOTL_DATA % "llama3.ultra", False),  # shuffled before
        (AXOLOTL + "rl: kto\nshuffle_merged_datasets: false\n" + AXOLOTL_DATA % "llama3.ultra", True),
        (AXOLOTL + "rl: dpo\nshuffle_merged_datasets: false\n" + AXOLOTL_DATA % "llama3.ultra", False),
        (FACTORY + "stage: kto\n", False),  # whose trainer draws them at random
    ],
)  # fmt: skip
def test_rated_answers_come_in_the_order_of_their_rows_under_trl(
    text: str, is_in_order: bool, tmp_path: Path
) -> None:
    """Source: _get_train_sampler of its KTOTrainer, from 0.19 to 1.14."""
    found = convert(text, tmp_path)
    assert any(IN_ORDER in line for line in found.differences) == is_in_order
    assert (ROWS_BY_LENGTH in found.remarks) != is_in_order


def test_columns_of_factorys_dataset_info(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for entry, expected in (
        ({"formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"}, "tags": {"role_tag": "role"}}, {}),
        ({"columns": {"kto_tag": "good"}}, {"label_column": "good"}),
        ({"columns": {"prompt": "q", "response": "a", "kto_tag": "kto_tag"}}, {"type": "messages", "prompt_column": "q", "completion_column": "a"}),
        ({"ranking": True, "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}}, {}),
        ({"ranking": True, "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}},
         {"prompt_column": "q", "type": "messages", "chosen_column": "good", "rejected_column": "bad"}),
        ({"ranking": True, "formatting": "sharegpt", "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}}, {}),
    ):  # fmt: skip
        (tmp_path / "data" / "dataset_info.json").write_text(
            json.dumps({"ours": {"hf_hub_url": "a/pairs"} | entry})
        )
        stage = "dpo" if "ranking" in entry else "kto"
        found = convert(FACTORY + f"stage: {stage}\n", tmp_path)
        assert (
            found.recipe["datasets"] == [{"path": "a/pairs"} | expected] and not found.differences
        )


def test_a_query_is_joined_to_instruction_alone(tmp_path: Path) -> None:
    """A run here joins `input` to no other prompt, so that it is to be said."""
    (tmp_path / "data").mkdir()
    columns = {"prompt": "q", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    entry = {"hf_hub_url": "a/pairs", "ranking": True, "columns": columns}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"ours": entry}))
    found = convert(FACTORY + "stage: dpo\n", tmp_path)
    assert any("columns.query" in line for line in found.differences)


REWARD_AXOLOTL = (
    AXOLOTL
    + "reward_model: true\nchat_template: llama3\n"
    + AXOLOTL_DATA % "bradley_terry.chat_template"
)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (
            TRL + "center_rewards_coefficient: 0.01\n",
            "a.yaml",
            {"learning_rate": 1e-4, "max_length": 1024},
        ),
        (TRL + "use_peft: true\nlora_dropout: 0.1\n", "reward.yaml", {"lora_dropout": 0.0}),
        (
            FACTORY + "stage: rm\nlearning_rate: 1e-5\npref_beta: 0.2\n",
            "a.yaml",
            {"learning_rate": 1e-5},
        ),
        (
            REWARD_AXOLOTL + "center_rewards_coefficient: 0.01\n",
            "a.yaml",
            {"center_rewards_coefficient": 0.01},
        ),
        (
            REWARD_AXOLOTL,
            "a.yaml",
            {"datasets": [{"path": "a/pairs", "prompt_column": "input", "type": "messages"}]},
        ),
    ],
)
def test_reward_models(text: str, name: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = convert(text, tmp_path, name)
    assert found.recipe["method"] == "reward" and not found.missing_capabilities
    assert {key: found.recipe[key] for key in expected} == expected
    assert (
        not {"beta", "assistant_only_loss"} & found.recipe.keys()
        and found.recipe.get("overlength", "drop") == "drop"
    )


def test_what_a_reward_model_does_otherwise_is_said(tmp_path: Path) -> None:
    """LoRA of TRL trains no head under CAUSAL_LM (peft's modules_to_save), LLaMA-Factory's head is TRL's value head."""
    adapters = TRL + "center_rewards_coefficient: 0.01\nuse_peft: true\n"
    assert "is drawn with" in str(convert(adapters, tmp_path).differences)
    for key in ("lora_task_type: SEQ_CLS\n", "lora_modules_to_save: [score]\n"):
        assert not convert(adapters + key, tmp_path).differences
    assert not convert(TRL + "center_rewards_coefficient: 0.01\n", tmp_path).differences
    assert "v_head" in str(convert(FACTORY + "stage: rm\n", tmp_path).differences)
    by_name = convert(TRL, tmp_path, "reward.yaml")
    assert "the name of the file says so" in str(by_name.remarks)
    assert convert(TRL, tmp_path, "rewarding.yaml").recipe.get("method", "sft") == "sft"


def tokenize_pair(tokenizer: Any, template: str) -> tuple[list[int], list[int]]:
    """(the ids of a pair's chosen side, those that are scored), of a row with an empty system column."""
    tokenizer.chat_template = read_template(template)
    row = {"system": "", "input": "Who?", "chosen": "Once", "rejected": "Never"}
    source = DatasetSource(path="rows.jsonl", type="messages", prompt_column="input")
    batch = RowBatch("rows.jsonl", (0,), (row,))
    data = Data(datasets=(source,), dataset_num_proc=1)
    (pair,) = tokenize_rows([(source, batch)], data, tokenizer, SourceStats(), kind="pairs")
    labels = pair.labels[: pair.lengths[0]]
    return pair.input_ids[: pair.lengths[0]].tolist(), labels[labels != IGNORE_INDEX].tolist()


@pytest.mark.parametrize("folder", ["models/stories260k", "tokenizers/llama3"])
def test_an_answer_of_a_pair_is_no_text_of_its_own(folder: str, shared: Path) -> None:
    """tokenize_row of TRL's older DPOTrainer makes it one: SentencePiece then begins it with a space."""
    tokenizer = AutoTokenizer.from_pretrained(shared / folder)
    _, scored = tokenize_pair(tokenizer, "zephyr")
    alone = tokenizer("Once", add_special_tokens=False).input_ids
    assert (scored[: len(alone)] == alone) == (folder == "tokenizers/llama3")


def test_a_row_without_a_system_message_may_have_the_templates_own(shared: Path) -> None:
    """So that an empty column is not always no message here."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama3")
    texts = [tokenizer.decode(tokenize_pair(tokenizer, name)[0]) for name in ("qwen", "chatml")]
    assert ["You are" in text for text in texts] == [True, False]
    assert EMPTY_SYSTEM.endswith("none, or its own")


@pytest.mark.parametrize("marks", [(), ("[INST]", "[/INST]")])
def test_an_answer_of_llama_factorys_mistral_begins_with_a_space_of_its_own(
    marks: tuple[str, ...], shared: Path, tmp_path: Path
) -> None:
    """Its data/template.py encodes " {{content}}" alone, before which SentencePiece puts a space; behind a token too."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    _, scored = tokenize_pair(tokenizer, "mistral")
    theirs = tokenizer(" Once", add_special_tokens=False).input_ids
    assert (scored[: len(theirs)] == theirs) == bool(marks)
    assert SPACE_DOUBLED in said(convert(FACTORY.replace("llama3", "mistral"), tmp_path))
    assert SPACE_DOUBLED not in said(convert(FACTORY.replace("llama3", "llama2"), tmp_path))
