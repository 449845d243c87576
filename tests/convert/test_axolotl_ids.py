"""Rows of Axolotl's prompt strategies, converted: its token ids and trained tokens, on SentencePiece and on byte BPE.

Axolotl gives the tokenizer prompt and answer one after the other: `tokenizer(prompt)`, and `tokenizer(answer)` without its BOS
and with an EOS (InstructionPromptTokenizingStrategy.tokenize_prompt). `type: completion` gives it one text.
test_token_ids.py holds the same rows against Axolotl's own classes.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer, LlamaTokenizer

from finetune.config.schema import Data, DatasetSource
from finetune.constants import IGNORE_INDEX
from finetune.convert.chat_templates import EARLIER_ENDS, EARLIER_THOUGHTS
from finetune.convert.conversion import convert_file
from finetune.data.formats import Conversation
from finetune.data.render import render_turns
from finetune.data.source_tokens import SourceStats, tokenize_rows
from finetune.data.sources import RowBatch
from finetune.data.tokenizer import fit_template, make_renderer, read_template
from tests.ranks import ROOT

SHARED = ROOT.parent / "shared"
VOCABULARIES = {
    "SentencePiece": SHARED / "models" / "stories260k",
    # as transformers 5 loads Llama 2's, which puts a space before a text alone, not behind BOS
    "SentencePiece of Llama 2": SHARED / "models" / "stories260k",
    "byte BPE": SHARED / "tokenizers" / "llama3",
    "byte BPE without BOS": SHARED / "tokenizers" / "llama3",  # as GPT-2's, which has one
}
HEAD = "Below is an instruction that describes a task"
REST = "Write a response that appropriately completes the request.\n\n"
WORDS = st.text(st.sampled_from("aB1 .\n<é▁"), min_size=1, max_size=12).filter(
    lambda text: text.strip()
)
STRATEGIES: dict[str, dict[str, Any]] = {
    "alpaca": {"type": "alpaca"},
    "columns": {
        "type": {
            "field_instruction": "instruction",
            "field_output": "output",
            "format": "{instruction}",
        }
    },
    "completion": {"type": "completion", "field": "output"},
}


@cache
def load(vocabulary: str) -> Any:
    if not VOCABULARIES[vocabulary].is_dir():
        pytest.skip(f"{VOCABULARIES[vocabulary]} is not here")
    loader = LlamaTokenizer if vocabulary.endswith("of Llama 2") else AutoTokenizer
    tokenizer = loader.from_pretrained(VOCABULARIES[vocabulary], add_bos_token=True)
    if vocabulary.endswith("without BOS"):
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def expect(
    name: str, row: dict[str, str], tokenizer: Any, *, trains_prompt: bool
) -> tuple[list[int], list[bool]]:
    """What Axolotl makes of a row, by its own rule."""
    end = tokenizer.eos_token_id
    if name == "completion":
        ids = [*tokenizer(row["output"]).input_ids, end]
        return ids, [True] * len(ids)
    prompt = row["instruction"]
    if name == "alpaca" and row["input"]:
        further = ", paired with an input that provides further context. "
        prompt = f"{HEAD}{further}{REST}### Instruction:\n{prompt}\n\n### Input:\n{row['input']}\n\n### Response:\n"
    elif name == "alpaca":
        prompt = f"{HEAD}. {REST}### Instruction:\n{prompt}\n\n### Response:\n"
    prompt_ids = tokenizer(prompt).input_ids
    answer_ids = [*tokenizer(row["output"]).input_ids, end]
    answer_ids = answer_ids[answer_ids[0] == tokenizer.bos_token_id :]
    return prompt_ids + answer_ids, [trains_prompt] * len(prompt_ids) + [True] * len(answer_ids)


def convert_strategy(
    name: str, folder: Path, tokenizer: Any, *, trains_prompt: bool
) -> tuple[DatasetSource, Data, str | None]:
    """The source, its data and the template of the converted recipe, for a tokenizer."""
    file = folder / "theirs.yaml"
    entry = {"path": "rows.jsonl", **STRATEGIES[name]}
    file.write_text(
        yaml.safe_dump(
            {"base_model": "org/llama", "train_on_inputs": trains_prompt, "datasets": [entry]}
        )
    )
    recipe = convert_file(file).recipe
    named = recipe.get("chat_template")
    template = fit_template(named, tokenizer) if named else None
    source = DatasetSource(**recipe["datasets"][0])
    assert source.answers_apart or name != "alpaca"
    data = Data(
        datasets=(source,),
        assistant_only_loss=recipe.get("assistant_only_loss", True),
        dataset_num_proc=1,
    )
    return source, data, template


def make_ours(
    row: dict[str, str], source: DatasetSource, data: Data, tokenizer: Any
) -> tuple[list[int], list[bool]]:
    """(ids, trained) of a row by the converted recipe."""
    batch = RowBatch("rows.jsonl", (0,), (row,))
    (tokens,) = tokenize_rows([(source, batch)], data, tokenizer, SourceStats())
    return tokens.input_ids.tolist(), [False, *(tokens.labels[:-1] != IGNORE_INDEX).tolist()]


@pytest.mark.parametrize("trains_prompt", [False, True])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_prompt_strategy_gives_axolotls_ids(
    name: str, vocabulary: str, trains_prompt: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = load(vocabulary)
    source, data, tokenizer.chat_template = convert_strategy(
        name, tmp_path_factory.mktemp("file"), tokenizer, trains_prompt=trains_prompt
    )

    @settings(max_examples=15, deadline=None)
    @given(WORDS, st.one_of(st.just(""), WORDS), WORDS)
    def check(instruction: str, further: str, answer: str) -> None:
        row = {"instruction": instruction, "input": further, "output": answer}
        whole_prompt = (
            trains_prompt and name != "columns"
        )  # of two columns the prompt is never trained on, as it says
        ids, trained = expect(name, row, tokenizer, trains_prompt=whole_prompt)
        ours, ours_trained = make_ours(row, source, data, tokenizer)
        assert ours == ids
        assert ours_trained == [False, *trained[1:]]  # nothing predicts the first token

    check()


@pytest.mark.parametrize(
    ("thinking", "untrained"),
    [({"reasoning_content": "Add."}, "<|channel|>"), ({}, "<|channel|>final<|message|>")],
)
def test_what_of_gpt_oss_is_untrained_is_listed(
    thinking: dict[str, str], untrained: str, tmp_path: Path
) -> None:
    """Axolotl trains where the text differs from that with another answer without thinking (find_turn), here all after the prompt."""
    tokenizer = load("byte BPE")
    tokenizer.chat_template = read_template("gpt-oss")
    prompt = [{"role": "user", "content": "1 + 1?"}]
    answers = [{"content": "2.", **thinking}, {"content": "[[dummy_message]]"}]
    texts = [
        tokenizer.apply_chat_template([*prompt, {"role": "assistant", **each}], tokenize=False)
        for each in answers
    ]
    asked = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    alike = asked + untrained
    assert all(text.startswith(alike) for text in texts)
    assert len({text[len(alike)] for text in texts}) == 2
    file = tmp_path / "theirs.yaml"
    entry = {"path": "rows.jsonl", "type": "chat_template", "field_thinking": "thinking"}
    file.write_text(yaml.safe_dump({"base_model": "openai/gpt-oss-20b", "datasets": [entry]}))
    (said,) = (line for line in convert_file(file).differences if "<|channel|>" in line)
    assert "nor the name and <|message|> after it where a row has no thinking" in said


def test_brackets_that_axolotl_leaves_untrained_are_listed(tmp_path: Path) -> None:
    """find_turn trains from the first token that is not that of [[dummy_message]] to the last."""
    tokenizer = load("byte BPE")
    answer, other = (tokenizer.tokenize(text) for text in ("[[1, 2]]", "[[dummy_message]]"))
    assert answer[0] == other[0] == "[[" and answer[-1] == other[-1] == "]]"
    file = tmp_path / "theirs.yaml"
    entry = {"path": "rows.jsonl", "type": "chat_template"}
    file.write_text(yaml.safe_dump({"base_model": "org/model", "datasets": [entry]}))
    assert any("nor do [[ at the start" in line for line in convert_file(file).remarks)


def test_a_token_that_ends_the_thought_of_gpt_oss_stops_no_answer(tmp_path: Path) -> None:
    """Generation stops at our eot_tokens; Axolotl's say what is trained, and the answer itself follows its thought."""
    tokenizer = load("byte BPE")
    tokenizer.chat_template = read_template("gpt-oss")
    answer = {"role": "assistant", "content": "2.", "reasoning_content": "Add."}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1?"}, answer], tokenize=False
    )
    assert text.partition("Add.")[2].startswith("<|end|>") and text.endswith("2.<|return|>")
    file = tmp_path / "theirs.yaml"
    rows = {"path": "rows.jsonl", "type": "chat_template"}
    for model, ends, ours in (
        ("openai/gpt-oss-20b", ["<|end|>"], None),
        ("openai/gpt-oss-20b", ["<|end|>", "<|call|>"], ["<|call|>"]),
        ("microsoft/Phi-4-mini-instruct", ["<|end|>"], ["<|end|>"]),
    ):
        theirs = {"base_model": model, "datasets": [rows], "eot_tokens": ends}
        file.write_text(yaml.safe_dump(theirs))
        found = convert_file(file)
        assert found.recipe.get("eot_tokens") == ours
        assert ("eot_tokens" in found.ignored) == (ours is None)


def test_what_of_gpt_oss_is_written_otherwise_in_earlier_turns_is_listed(tmp_path: Path) -> None:
    """Axolotl renders a row once, and trains its answers there; here each follows the prompt of inference."""
    tokenizer = load("byte BPE")
    tokenizer.chat_template = read_template("gpt-oss")
    messages = tuple(
        message
        for i in (1, 2)
        for message in (
            {"role": "user", "content": f"{i} + {i}?"},
            {"role": "assistant", "content": f"{2 * i}.", "reasoning_content": "Add."},
        )
    )
    theirs = tokenizer.apply_chat_template(list(messages), tokenize=False)
    assert theirs.count("Add.") == 1 and "2.<|end|>" in theirs and theirs.endswith("4.<|return|>")
    conversation = Conversation(messages, (False, True, False, True))
    ours = render_turns(conversation, make_renderer(tokenizer, True))
    assert [len(each.spans) for each in ours] == [1, 1]
    trained = [each.text[start:end] for each in ours for start, end in each.spans]
    assert all("Add." in each and each.endswith("<|return|>") for each in trained)
    file = tmp_path / "theirs.yaml"
    entry = {"path": "rows.jsonl", "type": "chat_template"}
    file.write_text(yaml.safe_dump({"base_model": "openai/gpt-oss-20b", "datasets": [entry]}))
    said = "\n".join(convert_file(file).differences)
    assert EARLIER_THOUGHTS in said and EARLIER_ENDS in said
