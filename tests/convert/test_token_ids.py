"""The chat template that convert writes, against the tool's own rendering: the same token ids, or a line that says what differs.

torchtune and LLaMA-Factory write the conversations themselves, in a process of their own (tests/convert/tool_rendering.py).
TEMPLATE_TOOLS names a folder with both installed; else pip installs them for the test.
"""

import copy
import itertools
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer

from finetune.config.schema import Data, DatasetSource
from finetune.constants import IGNORE_INDEX
from finetune.convert.chat_templates import (
    ASKED_WITH_THOUGHT,
    EMPTY_SYSTEM,
    ONE_TEXT,
    OTHER_PROMPTS,
    OTHER_SPACE,
    OTHER_TOOLS,
    OTHER_TURNS,
    OWN_THOUGHT,
    PROMPT_ENDS,
    SAME_TOOLS,
    SECOND_BOS,
    SPACE_TRAINED,
    SYSTEM_OF_IMAGES,
    TEMPLATES,
    TOKENIZERS,
    TOKENIZERS_BOS,
    TURN_ENDS,
)
from finetune.convert.conversion import convert_file
from finetune.convert.datasets import STARTS_TWICE
from finetune.convert.value_conversion import Conversion
from finetune.data.formats import parse_row
from finetune.data.render import render_turns
from finetune.data.source_tokens import SourceStats, tokenize_rows
from finetune.data.sources import RowBatch
from finetune.data.tokenize import tokenize
from finetune.data.tokenizer import FOLDER, make_encoder, make_renderer, read_template
from tests.convert import tool_rendering
from tests.convert.test_axolotl_ids import VOCABULARIES, convert_strategy, load, make_ours
from tests.ranks import ROOT

PACKAGES = ("torchtune==0.6.1", "torchao==0.11.0", "llamafactory==0.9.5", "nemo-automodel==0.7.0")
TOKENS = [
    *("<|im_start|>", "<|im_sep|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|header_start|>", "<|header_end|>"),
    *("<|eot|>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "[INST]"),
    *("<|SYSTEM_TOKEN|>", "<|start_of_role|>", "<|end_of_role|>", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<|endoftext|>", "<|step_id|>", "<|image|>", "<|finetune_right_pad_id|>"),
    "<|dummy_85|>",
]  # fmt: skip
# Phi-3's, whose tokenizer leaves out the white space after each.
OF_TURNS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>")
# Vocabularies of SentencePiece, which puts a space before every text that it is given; the others are of bytes.
PIECES = ("llama2", "llama2_tokenizer", "mistral_tokenizer", "gemma_tokenizer", "HellaSwag+pieces")
EOS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "granite3": "<|end_of_text|>",
}  # of the models, where it is part of a turn
NAMES = {
    "torchtune": [name for name in TOKENIZERS if not name.startswith("qwen3")],  # of a later version
    "LLaMA-Factory": ["llama3", "llama4", "chatml", "yi", "smollm", "qwen", "qwen3", "qwen3_nothink", "qwen3_5_nothink", "qwen3_5", "qwen3_6", "gemma", "gemma2", "gemma3",
                      "gemma3n", "gemma4", "falcon_h1", "mistral", "mistral_small", "phi", "phi4", "deepseek3", "cohere", "granite3", "llama2"],
}  # fmt: skip
# of torchtune: with a max_seq_len that no conversation reaches
LIMITED = [f"{name}+999" for name in ("qwen2_tokenizer", "llama3_tokenizer")]
AXOLOTL = ("axolotl==0.21.0", "addict==2.4.0")
AXOLOTLS = ["aya", "chatml", "cohere", "deepseek_v2", "deepseek_v3", "falcon_h1", "gemma", "gemma3", "gemma3n", "gemma4",
            "gemma4_unified", "llama3", "llama4", "mistral_v1", "mistral_v2v3", "mistral_v3_tekken", "mistral_v7_tekken",
            "nemotron_h", "phi_3", "phi_35", "phi_4", "qwen3", "qwen3_5", "qwen_25"]  # fmt: skip
SAID = [name for tool, name in OTHER_TURNS if tool == "Axolotl"]
EOS_OF_AXOLOTL = {
    "aya": "<|END_OF_TURN_TOKEN|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
}
TURNS = [
    ("user", "What is two and two?"),
    ("assistant", "It is four."),
    ("user", "Who are you?"),
    ("assistant", "A model\nthat counts"),
]
SQUAD = {
    "context": "Numbers.",
    "question": "What is two and two?",
    "answers": {"text": [" Four. "], "answer_start": [0]},
}
HELLASWAG = {"ctx": "A man sits down", "endings": ["on a roof.", "on a chair."], "label": "1"}
CHAT = {"messages": [{"role": role, "content": content} for role, content in TURNS]}
# Automodel's data classes; +turns: with a tokenizer that has a chat template; +bos: that says add_bos_token;
# +pieces: of SentencePiece.
AUTOMODELS: dict[str, list[dict[str, Any]]] = {
    "make_squad_dataset": [SQUAD] * 2,
    "make_squad_dataset+turns": [SQUAD] * 2,
    "make_squad_dataset+bos": [SQUAD] * 2,
    "HellaSwag": [HELLASWAG] * 2,
    "HellaSwag+turns": [HELLASWAG] * 2,
    "HellaSwag+pieces": [HELLASWAG] * 2,
    "ChatDataset+turns": [CHAT] * 2,
}
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What?"}]
OF_TOOLS: dict[str, list[dict[str, Any]]] = {
    "a description": [*QUESTION, {"role": "assistant", "content": "It is 2."}],
    "a call": [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": CALL["id"], "name": "add"},
        {"role": "assistant", "content": "It is 2."},
    ],
}
# The same by LLaMA-Factory's roles.
OF_ITS_TOOLS = [
    [{"role": "tools", "content": json.dumps([ADD])}, *turns]
    for turns in (
        OF_TOOLS["a description"],
        [
            *QUESTION,
            {"role": "function", "content": json.dumps(CALL["function"])},
            {"role": "observation", "content": "2"},
            {"role": "assistant", "content": "It is 2."},
        ],
    )
]
Rendered = dict[str, dict[str, list[tuple[list[int], list[bool]]]]]
pytestmark = pytest.mark.slow


def conversations(name: str) -> list[list[dict[str, str]]]:
    """One question, two, and two after a system message, which torchtune's Mistral refuses."""
    turns = [{"role": role, "content": content} for role, content in TURNS]
    system = (
        []
        if name == "mistral_tokenizer"
        else [[{"role": "system", "content": "Be brief."}, *turns]]
    )
    return [turns[:2], turns, *system]


@pytest.fixture(scope="module")
def vocabulary(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the tokenizer that a name is tried with."""
    folder, made = tmp_path_factory.mktemp("tokenizers"), {}
    of_phi3 = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    of_phi3.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, rstrip=True) for token in OF_TURNS]}
    )
    of_phi3.save_pretrained(folder / "phi3")

    def find(name: str) -> Path:
        if name.startswith("phi3"):
            return folder / "phi3"
        if name in PIECES:
            return shared / "models" / "stories260k"
        eos = EOS.get(name)
        if eos not in made:
            tokenizer = copy.deepcopy(bytes_alone)
            tokenizer.add_special_tokens(
                {"additional_special_tokens": TOKENS, **({"eos_token": eos} if eos else {})}
            )
            made[eos] = folder / str(len(made))
            tokenizer.save_pretrained(made[eos])
        return made[eos]

    bytes_alone = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama3")
    return find


@pytest.fixture(scope="module")
def theirs(vocabulary: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """What each tool writes, by name: ids, and which of them it trains on."""
    folder = Path(os.environ.get("TEMPLATE_TOOLS") or tmp_path_factory.mktemp("tools"))
    if not (folder / "nemo_automodel").is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(folder),
            *PACKAGES,
        ]
        installed = subprocess.run(command, capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"pip cannot install {', '.join(PACKAGES)}: {installed.stderr[-300:]}")
    asked = {**NAMES, "torchtune": [*NAMES["torchtune"], *LIMITED]}
    cases = [
        {
            "tool": tool,
            "name": name,
            "tokenizer": str(vocabulary(name)),
            "conversations": [
                *conversations(name),
                *(OF_ITS_TOOLS if tool == "LLaMA-Factory" else []),
            ],
        }
        for tool, names in asked.items()
        for name in names
    ]
    cases += [
        {
            "tool": "Automodel",
            "name": name,
            "tokenizer": str(vocabulary(name)),
            "conversations": [rows],
        }
        for name, rows in AUTOMODELS.items()
    ]
    script, environment = (
        Path(__file__).with_name("tool_rendering.py"),
        os.environ | {"DISABLE_VERSION_CHECK": "1"},
    )
    finished = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(folder)},
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    return json.loads(finished.stdout.splitlines()[-1])


def convert_name(tool: str, name: str, folder: Path) -> Conversion:
    """The conversion of a small file of that tool which names the template, or torchtune's tokenizer."""
    factory = {
        "model_name_or_path": "org/model",
        "stage": "sft",
        "do_train": True,
        "template": name,
        "dataset": "rows",
    }
    tune = {
        "tokenizer": {"_component_": f"torchtune.models.family.{name}"},
        "model": {"_component_": "torchtune.models.family.one_7b"},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": "org/model",
        },
        "dataset": {
            "_component_": "torchtune.datasets.chat_dataset",
            "source": "org/rows",
            "conversation_column": "messages",
        },
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5},
    }
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump(tune if tool == "torchtune" else factory))
    return convert_file(path)


def render_ours(
    template: str, turns: list[dict[str, str]], tokenizer: Any, answers_alone: bool = True
) -> tuple[list[int], list[bool]]:
    """(ids, which of them are trained on) of a conversation under a named template."""
    tokenizer.chat_template = read_template(template)
    document = parse_row({"messages": turns}, DatasetSource(path="rows.jsonl")).document
    assert document is not None
    texts = render_turns(document, make_renderer(tokenizer, answers_alone))
    tokens = tokenize(texts, [(0, 0)] * len(texts), make_encoder(tokenizer))
    return tokens.input_ids.tolist(), [False, *(tokens.labels[:-1] != IGNORE_INDEX).tolist()]


@pytest.mark.parametrize(
    ("tool", "name"), [(tool, name) for tool, names in NAMES.items() for name in names]
)
def test_a_template_writes_the_tools_own_ids_or_convert_says_what_differs(
    theirs: Rendered, vocabulary: Callable[[str], Path], tmp_path: Path, tool: str, name: str
) -> None:
    found = convert_name(tool, name, tmp_path)
    template = found.recipe["chat_template"]
    assert template == (TOKENIZERS if tool == "torchtune" else TEMPLATES)[name]
    tokenizer, same, more = AutoTokenizer.from_pretrained(vocabulary(name)), [], set()
    for turns, (ids, trained) in zip(
        conversations(name), theirs[tool][name][: len(conversations(name))], strict=True
    ):
        ours, ours_trained = render_ours(template, turns, tokenizer)
        both = min(len(ids), len(ours))
        # What follows the last trained token changes no gradient: an end of text, a line break.
        same.append(
            ids[:both] == ours[:both] and not any(trained[both:]) and not any(ours_trained[both:])
        )
        assert not same[-1] or all(
            there for there, here in zip(trained, ours_trained, strict=False) if here
        )
        more |= (
            {tokenizer.decode([ids[i]]) for i in range(both) if trained[i] and not ours_trained[i]}
            if same[-1]
            else set()
        )
    differs = any(OTHER_TURNS.get((tool, name), "?") in line for line in found.differences)
    assert all(same) != differs, f"{same}: {found.differences}"
    if differs:
        return
    says_header = any(
        "the header of an answer is trained too there" in line for line in found.remarks
    )
    says_break = any(
        "the line break after an answer is trained too there" in line for line in found.remarks
    )
    assert says_header == ("<|start_header_id|>" in more or "<|im_start|>" in more)
    assert says_break == (more == {"\n"})
    assert says_header or says_break or not more


@pytest.mark.parametrize("name", LIMITED)
def test_a_length_takes_the_end_of_an_answer_from_what_torchtune_trains_of_qwens_alone(
    theirs: Rendered, name: str
) -> None:
    whole = theirs["torchtune"][name.partition("+")[0]]
    for (ids, trained), (limited_ids, limited) in zip(
        whole, theirs["torchtune"][name], strict=True
    ):
        is_qwens = name.startswith("qwen")
        assert limited_ids == ids
        assert limited == [*trained[:-1], trained[-1] and not is_qwens]


@pytest.mark.parametrize("answers_alone", [True, False])
def test_breaks_and_first_words_are_all_that_differs_inside_a_row_of_torchtunes_phi3(
    theirs: Rendered, vocabulary: Callable[[str], Path], answers_alone: bool
) -> None:
    name = "phi3_mini_tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(vocabulary(name))
    for turns, (ids, _) in zip(conversations(name), theirs["torchtune"][name], strict=True):
        there, here = (
            "".join(tokenizer.convert_ids_to_tokens(each))
            for each in (ids, render_ours("phi3", turns, tokenizer, answers_alone)[0])
        )
        assert all(f"<|{turn['role']}|>▁" in here for turn in turns)
        with_breaks = re.sub(r"(<\|\w+\|>)▁?", r"\1▁<0x0A>", here.removesuffix("</s>"))
        assert there == f"<s>{with_breaks}"


@pytest.mark.parametrize("name", AUTOMODELS)
def test_a_data_class_of_automodels_writes_its_ids_and_convert_says_what_is_trained_otherwise(
    theirs: Rendered, vocabulary: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    kind, _, given = name.partition("+")
    turns = given == "turns"
    path = {"make_squad_dataset": "dataset_name", "HellaSwag": "path_or_dataset"}.get(
        kind, "path_or_dataset_id"
    )
    dataset = {
        "_target_": f"nemo_automodel.components.datasets.llm.{kind}",
        path: "org/rows",
        "split": "train",
    }
    model = {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"}
    model |= {"pretrained_model_name_or_path": "org/model"}
    optimizer = {"_target_": "torch.optim.Adam", "lr": 1e-5}
    (tmp_path / "theirs.yaml").write_text(
        yaml.safe_dump(
            {"model": model, "dataset": dataset, "optimizer": optimizer, "step_scheduler": {}}
        )
    )
    found = convert_file(tmp_path / "theirs.yaml")
    tokenizer = AutoTokenizer.from_pretrained(vocabulary(name))
    tokenizer.chat_template = tool_rendering.TURNS if turns else None
    (entry,) = found.recipe["datasets"]
    document = parse_row(
        AUTOMODELS[name][0], DatasetSource(**{**entry, "path": "rows.jsonl"})
    ).document
    assert document is not None
    texts = render_turns(document, make_renderer(tokenizer, True))
    tokens = tokenize(texts, [(0, 0)] * len(texts), make_encoder(tokenizer))
    ours, ours_trained = (
        tokens.input_ids.tolist(),
        [False, *(tokens.labels[:-1] != IGNORE_INDEX).tolist()],
    )
    ((ids, trained),) = theirs["Automodel"][name]
    said, both = " ".join(found.remarks), min(len(ids), len(ours))
    assert ("under a chat template the header of an answer is trained too there" in said) == (
        kind != "HellaSwag"
    )
    assert ("the end-of-text token is trained after each answer here" in said) == (
        kind != "ChatDataset"
    )
    # prompt and answer are one text there: the space goes to the answer's first token
    if kind == "make_squad_dataset" and not turns:
        assert tokenizer.decode(ids) == tokenizer.decode(ours).removesuffix(tokenizer.eos_token)
        assert "the space before an answer is no part of its first token" in said
        answers = [tokenizer.decode([i for i, t in zip(*each, strict=True) if t])
                   for each in ((ids, trained), (ours, ours_trained))]  # fmt: skip
        assert answers == ["." if given == "bos" else " Four.", f"Four.{tokenizer.eos_token}"]
        assert "which is trained there only where the tokenizer begins a text with BOS" in said
        return
    if given == "pieces":
        assert "with the space that SentencePiece's tokenizers write before one" in said
        first = trained.index(True)
        assert tokenizer.convert_ids_to_tokens([ids[first], ours[first]]) == ["▁on", "on"]
        ids[first] = ours[first]
    assert ids[:both] == ours[:both] and not any(trained[both:])
    assert not any(here and not there for there, here in zip(trained, ours_trained, strict=False))
    more = tokenizer.decode([ids[i] for i in range(both) if trained[i] and not ours_trained[i]])
    assert more.startswith("<|im_start|>assistant") == bool(turns and kind != "HellaSwag")
    assert any(ours_trained[both:]) == (kind == "HellaSwag")  # an end-of-text token


@pytest.fixture(scope="module")
def axolotls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Axolotl's template files, which its prompt strategies give to transformers' apply_chat_template."""
    folder = Path(os.environ.get("TEMPLATE_TOOLS") or tmp_path_factory.mktemp("axolotl"))
    templates = folder / "axolotl" / "utils" / "chat_templates" / "templates"
    if not (templates.is_dir() and (folder / "addict").is_dir()):
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--ignore-requires-python",
            "--target",
        ]
        installed = subprocess.run(
            [*command, str(folder), *AXOLOTL], capture_output=True, text=True
        )
        if installed.returncode:
            pytest.skip(f"pip cannot install {AXOLOTL[0]}: {installed.stderr[-300:]}")
    return templates


@pytest.mark.parametrize("name", AXOLOTLS)
def test_a_template_of_axolotls_writes_its_ids_or_convert_says_what_differs(
    axolotls: Path, shared: Path, tmp_path: Path, name: str
) -> None:
    path, tokenizer = (
        tmp_path / "theirs.yaml",
        AutoTokenizer.from_pretrained(shared / "models" / "stories260k"),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*TOKENS, *EOS_OF_AXOLOTL.values()]})
    tokenizer.eos_token = EOS_OF_AXOLOTL.get(name, tokenizer.eos_token)
    rows = {"path": "rows.jsonl", "type": "chat_template"}
    path.write_text(
        yaml.safe_dump({"base_model": "org/model", "chat_template": name, "datasets": [rows]})
    )
    found, text = convert_file(path), (axolotls / f"{name}.jinja").read_text()
    same = []
    for turns in conversations("")[
        : 2 if name == "gemma" else 3
    ]:  # Gemma's refuses system messages
        ids = tokenizer.apply_chat_template(
            turns, chat_template=text, tokenize=True, return_dict=False
        )
        ours, trained = render_ours(str(found.recipe["chat_template"]), turns, tokenizer)
        both = min(len(ids), len(ours))
        same.append(ids[:both] == ours[:both] and not any(trained[both:]) and len(ids) - both < 3)
    assert all(same) != (name in SAID), f"{same}: {found.differences}"
    assert (OTHER_TURNS.get(("Axolotl", name), "?") in " ".join(found.differences)) == (
        name in SAID
    )


@pytest.mark.parametrize("name", AXOLOTLS)
def test_white_space_that_a_template_of_axolotls_keeps_otherwise_is_said(
    axolotls: Path, shared: Path, tmp_path: Path, name: str
) -> None:
    rows = {"path": "rows.jsonl", "type": "chat_template"}
    file = {"base_model": "org/model", "chat_template": name, "datasets": [rows]}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file))
    found = convert_file(tmp_path / "theirs.yaml")
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    templates = (axolotls / f"{name}.jinja").read_text(), read_template(TEMPLATES[name])
    same = []
    for spaced in range(2):
        turns = [{"role": role, "content": content} for role, content in TURNS]
        words = f" \n{turns[spaced]['content']} \n"
        turns[spaced]["content"] = words
        theirs, ours = (
            words in tokenizer.apply_chat_template(turns, chat_template=each, tokenize=False)
            for each in templates
        )
        same.append(theirs == ours)
    said = [line for line in found.remarks if any(n in line for n in OTHER_SPACE.values())]
    assert all(same) == (not said), same


ROLES = {"user": "What?", "assistant": "It is 2."}
OF_IMAGES = ("gemma3", "gemma3n", "gemma4", "llama4", "mistral_v7_tekken", "qwen2_vl", "qwen3_5")


@pytest.mark.parametrize("name", OF_IMAGES)
def test_a_template_for_images_of_axolotls_that_writes_a_system_message_is_known(
    axolotls: Path, shared: Path, name: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": words} for role, words in ROLES.items()],
        chat_template=(axolotls / f"{name}.jinja").read_text(),
        tokenize=False,
    )
    before, _, _ = text.partition(ROLES["user"])
    assert ("system" in before.lower()) == (name in SYSTEM_OF_IMAGES)


def write_tools(template: str, turns: list[dict[str, Any]], tokenizer: Any) -> str | None:
    """A row with tools by a template, without its BOS token; None where it refuses the row."""
    tools = [{"type": "function", "function": ADD}]
    try:
        text = tokenizer.apply_chat_template(
            copy.deepcopy(turns), tools=tools, chat_template=template, tokenize=False
        )
    except (TemplateError, TypeError):
        return None
    return str(text).removeprefix(tokenizer.bos_token)


# Of Phi-4's a line says that it begins every row otherwise.
@pytest.mark.parametrize("name", [name for name in AXOLOTLS if name != "phi_4"])
def test_a_template_of_axolotls_writes_tools_as_ours_or_convert_says_what_differs(
    axolotls: Path, shared: Path, name: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama3")
    tokenizer.eos_token = EOS_OF_AXOLOTL.get(name, tokenizer.eos_token)
    text = (axolotls / f"{name}.jinja").read_text()
    ours = read_template(TEMPLATES[name])
    same = []
    for turns in OF_TOOLS.values():
        theirs, here = (write_tools(template, turns, tokenizer) for template in (text, ours))
        # what follows the last answer changes no gradient
        same.append(
            theirs is None or here is None or theirs.startswith(here) or here.startswith(theirs)
        )
    assert all(same) != (name in OTHER_TOOLS), same


@pytest.mark.parametrize("name", [name for name in NAMES["LLaMA-Factory"] if name not in PIECES])
def test_llama_factory_writes_tools_in_its_own_words_but_for_the_names_that_are_not_said(
    theirs: Rendered, vocabulary: Callable[[str], Path], name: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(vocabulary(name))
    template = read_template(TEMPLATES[name])
    rows = theirs["LLaMA-Factory"][name][-len(OF_ITS_TOOLS) :]
    same = []
    for turns, (ids, _) in zip(OF_TOOLS.values(), rows, strict=True):
        text = tokenizer.decode(ids).removeprefix(tokenizer.bos_token)
        here = write_tools(template, turns, tokenizer)
        same.append(here is not None and (text.startswith(here) or here.startswith(text)))
    assert all(same) == (name in SAME_TOOLS), same


def train_by_axolotl(
    name: str,
    rows: list[dict[str, Any]],
    tokenizer: Any,
    templates: Path,
    eot_tokens: list[str] | None,
) -> list[list[tuple[int, bool]]]:
    """(id, whether it is trained on) of conversations, by the prompt strategy that reads type: chat_template."""
    sys.path.append(str(templates.parents[3]))
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy

    text = (templates / f"{name}.jinja").read_text()
    fields = {"role": "role", "content": "content"}
    prompter = ChatTemplatePrompter(tokenizer, chat_template=text, message_property_mappings=fields)
    options = {
        "train_on_inputs": False,
        "sequence_len": 4096,
        "train_on_eos": "turn",
        "eot_tokens": eot_tokens,
    }
    strategy = ChatTemplateStrategy(prompter, tokenizer, roles_to_train=["assistant"], **options)
    tokenized = [strategy.tokenize_prompt(row) for row in rows]
    return [
        [
            (i, label != IGNORE_INDEX)
            for i, label in zip(row["input_ids"], row["labels"], strict=True)
        ]
        for row in tokenized
    ]


@pytest.mark.parametrize("names_end", [False, True])
@pytest.mark.parametrize("vocabulary", ["models/stories260k", "tokenizers/llama3"])
@pytest.mark.parametrize("name", [name for name in AXOLOTLS if name not in SAID])
def test_a_template_of_axolotls_trains_its_tokens_or_convert_says_which_more(
    axolotls: Path, shared: Path, tmp_path: Path, name: str, vocabulary: str, names_end: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / vocabulary)
    ends = sorted(set(TURN_ENDS.values()))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*TOKENS, *ends, *EOS_OF_AXOLOTL.values()]}
    )
    tokenizer.eos_token = EOS_OF_AXOLOTL.get(name, tokenizer.eos_token)
    end = TURN_ENDS.get(TEMPLATES[name])
    eot_tokens = [end] if names_end and end else None
    file = {
        "base_model": "org/model",
        "chat_template": name,
        "datasets": [{"path": "a", "type": "chat_template"}],
    }
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file | {"eot_tokens": eot_tokens}))
    found = convert_file(tmp_path / "theirs.yaml")
    conversations_of_text = conversations("")[:2]
    rows = [{"messages": turns} for turns in conversations_of_text]
    more = set()
    theirs = train_by_axolotl(name, rows, tokenizer, axolotls, eot_tokens)
    for turns, tokens in zip(conversations_of_text, theirs, strict=True):
        ours = list(
            zip(*render_ours(str(found.recipe["chat_template"]), turns, tokenizer), strict=True)
        )
        both = min(len(ours), len(tokens))
        assert [i for i, _ in ours[:both]] == [i for i, _ in tokens[:both]]
        assert not any(trained for _, trained in [*ours[both:], *tokens[both:]])
        trained = list(zip(ours, tokens, strict=False))
        assert not [i for (i, here), (_, there) in trained if there and not here]
        more |= {tokenizer.decode([i]) for (i, here), (_, there) in trained if here and not there}
    says_end = any(
        "the EOS token alone ends a trained turn there" in line for line in found.differences
    )
    says_space = any(SPACE_TRAINED in line for line in found.remarks)
    has_own_space = vocabulary.startswith("models")
    expected = {end} if says_end and end != tokenizer.eos_token else set()
    assert more == expected | ({""} if says_space and has_own_space else set())


# Models whose tokenizers' own templates are written down here too -> the names of those.
OWN_TEMPLATES = {
    "zai-org/GLM-4.5-Air": "glm4.5",
    "zai-org/GLM-4.7-Flash": "glm4.7",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron3",
    "Qwen/Qwen3.8-27B": "qwen3.8",
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen3.5-27B": "qwen3.5",
    "allenai/OLMo-2-1124-7B": "olmo2",
    "ibm-granite/granite-4.0-h-tiny": "granite4",
    "HuggingFaceTB/SmolLM3-3B": "smollm3",
}


@pytest.mark.parametrize("model", OWN_TEMPLATES)
def test_a_thought_of_a_tokenizers_own_template_is_trained_or_convert_says_not(
    axolotls: Path, shared: Path, tmp_path: Path, model: str
) -> None:
    sys.path.append(str(axolotls.parents[3]))
    name = OWN_TEMPLATES[model]
    rows = {"path": "rows.jsonl", "type": "chat_template"}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({"base_model": model, "datasets": [rows]}))
    found = convert_file(tmp_path / "theirs.yaml")
    # the tokenizer's own, or the same with an end of the last answer
    assert found.recipe.get("chat_template") in (None, name)
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    tokens = re.findall(r"<\|?/?[\w-]+\|?>|\[\w+\]", read_template(name))
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*TOKENS, *tokens})})
    turns = conversations("")[0]
    theirs = train_by_axolotl(name, [{"messages": turns}], tokenizer, FOLDER, None)[0]
    ours = list(zip(*render_ours(name, turns, tokenizer), strict=True))
    assert [i for i, _ in ours[: len(theirs)]] == [i for i, _ in theirs[: len(ours)]]
    both = list(zip(ours, theirs, strict=False))
    more = tokenizer.decode([i for (i, here), (_, there) in both if here and not there])
    says = any(OWN_THOUGHT in line or ONE_TEXT in line for line in found.differences)
    assert says == ("</think>" in more)


def score_ours(found: Conversion, row: dict[str, Any], tokenizer: Any) -> list[list[int]]:
    """The ids of a pair's two texts, whose last tokens a reward model scores."""
    tokenizer.chat_template = read_template(found.recipe["chat_template"])
    source = DatasetSource(**found.recipe["datasets"][0])
    batch = RowBatch("rows.jsonl", (0,), (row,))
    data = Data(datasets=(source,), dataset_num_proc=1)
    (pair,) = tokenize_rows([(source, batch)], data, tokenizer, SourceStats(), kind="scored_pairs")
    ends = (0, *itertools.accumulate(pair.lengths.tolist()))
    return [pair.input_ids[start:end].tolist() for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("name", [name for name in AXOLOTLS if name not in ("gemma", "mistral_v1")])
def test_a_reward_model_of_axolotls_scores_its_ids_or_convert_says_what_differs(
    axolotls: Path, shared: Path, tmp_path: Path, name: str
) -> None:
    sys.path.append(str(axolotls.parents[3]))
    from axolotl.prompt_strategies.bradley_terry.chat_template import BTChatTemplateStrategy
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter

    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama3")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*TOKENS, "<turn|>", *EOS_OF_AXOLOTL.values()]}
    )
    tokenizer.eos_token = EOS_OF_AXOLOTL.get(name, tokenizer.eos_token)
    rows = {"path": "rows.jsonl", "type": "bradley_terry.chat_template"}
    file = {
        "base_model": "org/model",
        "reward_model": True,
        "chat_template": name,
        "datasets": [rows],
    }
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file))
    found = convert_file(tmp_path / "theirs.yaml")
    said = "\n".join(found.differences)
    fields = {"role": "role", "content": "content"}
    text = (axolotls / f"{name}.jinja").read_text()
    prompter = ChatTemplatePrompter(
        tokenizer, chat_template=text, message_property_mappings=fields, max_length=4096
    )
    strategy = BTChatTemplateStrategy(
        prompter, tokenizer, train_on_inputs=False, sequence_len=4096, roles_to_train=[]
    )
    for system in ("Be brief.", ""):
        row = {"system": system, "input": "What is 1+1?", "chosen": "It is 2.", "rejected": "Three"}
        made = strategy._tokenize_single_prompt(dict(row))
        theirs = [made["chosen_ids"], made["rejected_ids"]]
        is_same = score_ours(found, row, copy.deepcopy(tokenizer)) == theirs
        if system and name not in (
            "mistral_v7_tekken",
            "phi_4",
        ):  # of which a line is about rows without one
            assert is_same != bool(re.search(r"^chat_template", said, re.MULTILINE))
        elif not system:
            assert EMPTY_SYSTEM in said and is_same == (
                name == "deepseek_v3"
            )  # whose template writes no role


@pytest.mark.parametrize("trains_prompt", [False, True])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_alpacas_ids_are_those_of_axolotls_own_classes(
    axolotls: Path, tmp_path: Path, vocabulary: str, trains_prompt: bool
) -> None:
    """As in test_axolotl_ids.py, by the code that it writes down."""
    sys.path.append(str(axolotls.parents[3]))
    from axolotl.prompt_tokenizers import AlpacaPromptTokenizingStrategy
    from axolotl.prompters import AlpacaPrompter

    tokenizer = load(vocabulary)
    strategy = AlpacaPromptTokenizingStrategy(
        AlpacaPrompter("instruct"), tokenizer, trains_prompt, 4096
    )
    for further in ("", "2 and 3"):
        row = {"instruction": "Add the numbers.", "input": further, "output": "\nBlue, or 5."}
        made = strategy.tokenize_prompt(row)
        source, data, tokenizer.chat_template = convert_strategy(
            "alpaca", tmp_path, tokenizer, trains_prompt=trains_prompt
        )
        ids, trained = make_ours(row, source, data, tokenizer)
        assert ids == made["input_ids"]
        assert trained[1:] == [label != IGNORE_INDEX for label in made["labels"]][1:]


def test_tokens_before_every_text_are_said_where_prompt_and_answer_are_texts(
    axolotls: Path, tmp_path: Path
) -> None:
    """Axolotl takes a BOS token from an answer; GLM's tokenizers begin a text with two tokens that are none."""
    sys.path.append(str(axolotls.parents[3]))
    from axolotl.prompt_tokenizers import AlpacaPromptTokenizingStrategy
    from axolotl.prompters import AlpacaPrompter

    start = ["[gMASK]", "<sop>"]
    tokenizer = copy.deepcopy(load("byte BPE"))
    tokenizer.add_special_tokens({"additional_special_tokens": start})
    ids = tokenizer.convert_tokens_to_ids(start)
    tokenizer.bos_token = None
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A",
        pair="[gMASK] <sop> $A $B",
        special_tokens=list(zip(start, ids, strict=True)),
    )
    strategy = AlpacaPromptTokenizingStrategy(AlpacaPrompter("instruct"), tokenizer, False, 4096)
    row = {"instruction": "Add the numbers.", "input": "2 and 3", "output": "5"}
    made = strategy.tokenize_prompt(row)
    source, data, tokenizer.chat_template = convert_strategy(
        "alpaca", tmp_path, tokenizer, trains_prompt=False
    )
    ours, trained = make_ours(row, source, data, tokenizer)
    answer = trained.index(True)
    assert made["input_ids"] == [*ours[:answer], *ids, *ours[answer:]]
    assert made["labels"] == [IGNORE_INDEX] * answer + [*ids, *ours[answer:]]
    rows = {"path": "rows.jsonl", "type": "alpaca"}
    file = {"base_model": "THUDM/GLM-4-32B-0414", "datasets": [rows]}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file))
    assert any(STARTS_TWICE in line for line in convert_file(tmp_path / "theirs.yaml").remarks)


def pair_by_axolotl(name: str, row: dict[str, Any], tokenizer: Any) -> list[list[int]]:
    """The ids of both sides by Axolotl's DPO strategy, and by what TRL's trainer makes of its texts."""
    texts = types.ModuleType("axolotl.utils.data.utils")
    texts.is_vision_dataset = lambda columns: False  # type: ignore[attr-defined]
    parent = types.ModuleType("axolotl.utils.data")
    with pytest.MonkeyPatch.context() as patch:  # their own import a telemetry client
        patch.setitem(sys.modules, "axolotl.utils.data", parent)
        patch.setitem(sys.modules, "axolotl.utils.data.utils", texts)
        from axolotl.prompt_strategies.dpo.chat_template import default
        from axolotl.utils.dict import DictDefault

        transform, _ = default(DictDefault({"chat_template": name, "datasets": PAIRS}))
        made = transform(row, tokenizer=tokenizer)
    eos, sides = tokenizer.eos_token, []
    for side in ("chosen", "rejected"):
        answer = made[side] if made[side].endswith(eos) else made[side] + eos  # add_eos
        ids = tokenizer(made["prompt"] + answer).input_ids
        sides.append(ids)
    return sides


@pytest.mark.parametrize("name", AXOLOTLS)
def test_a_prompt_of_axolotls_for_inference_ends_as_ours_or_convert_says_how(
    axolotls: Path, shared: Path, tmp_path: Path, name: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    rows = {"path": "rows.jsonl", "type": "chat_template"}
    file = {"base_model": "org/model", "chat_template": name, "datasets": [rows]}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file))
    found = convert_file(tmp_path / "theirs.yaml")
    texts = (axolotls / f"{name}.jinja").read_text(), read_template(TEMPLATES[name])
    asked: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    turns = [{"role": "user", "content": "Who?"}]
    theirs, ours = (
        tokenizer.apply_chat_template(turns, chat_template=text, **asked).rpartition("Who?")[2]
        for text in texts
    )
    said = " ".join(found.remarks)
    assert (theirs != ours) == (PROMPT_ENDS.format(OTHER_PROMPTS.get(name)) in said)


PAIRS = [{"path": "rows.jsonl", "type": "chat_template.default"}]
ENDS_IT = [*sorted(set(TURN_ENDS.values())), *EOS_OF_AXOLOTL.values()]


@pytest.mark.parametrize("eos", [None, "its own"])
@pytest.mark.parametrize("name", [name for name in AXOLOTLS if name not in SAID])
def test_a_pair_of_axolotls_has_its_ids_or_convert_says_what_differs(
    axolotls: Path, shared: Path, tmp_path: Path, name: str, eos: str | None
) -> None:
    sys.path.append(str(axolotls.parents[3]))
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama3")
    tokenizer.add_special_tokens({"additional_special_tokens": [*TOKENS, *ENDS_IT]})
    tokenizer.eos_token = EOS_OF_AXOLOTL.get(name, tokenizer.eos_token)
    end = TURN_ENDS.get(TEMPLATES[name])
    if eos and end:
        tokenizer.eos_token = end
    file = {"base_model": "org/model", "rl": "dpo", "chat_template": name, "datasets": PAIRS}
    file["special_tokens"] = {"eos_token": tokenizer.eos_token}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file))
    found = convert_file(tmp_path / "theirs.yaml")
    sides = {side: {"role": "assistant", "content": side} for side in ("chosen", "rejected")}
    row = {"messages": [{"role": "user", "content": "Who?"}], **sides}
    theirs = pair_by_axolotl(name, row, tokenizer)
    tokenizer.chat_template = read_template(str(found.recipe["chat_template"]))
    source = DatasetSource(path="rows.jsonl")
    batch = RowBatch("rows.jsonl", (0,), (row,))
    data = Data(datasets=(source,), dataset_num_proc=1)
    (pair,) = tokenize_rows([(source, batch)], data, tokenizer, SourceStats(), kind="pairs")
    ends = (0, *itertools.accumulate(pair.lengths.tolist()))
    said = " ".join(found.remarks)
    for ids, (first, last) in zip(theirs, itertools.pairwise(ends), strict=True):
        ours = pair.input_ids[first:last].tolist()
        scored = pair.labels[first:last].tolist()
        until = max(i for i, label in enumerate(scored) if label != IGNORE_INDEX) + 2
        ours = ours[:until]
        begins_twice = ids[:2] == [tokenizer.bos_token_id] * 2
        assert begins_twice == (SECOND_BOS in said)
        ids = ids[begins_twice:]
        begins = ids[0] == tokenizer.bos_token_id != ours[0]
        assert begins == (TOKENIZERS_BOS in said)
        follows = ids[-1] == tokenizer.eos_token_id != ours[-1]
        assert follows == ("the EOS token follows" in said)
        is_same = ids[begins : len(ids) - follows] == ours
        assert is_same != any(ASKED_WITH_THOUGHT in line for line in found.differences)


@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        "gemma",
        "mistral",
        "cohere",
        "chatml",
        "qwen",
        "phi4",
        "deepseek3",
        "granite3",
        "llama4",
    ],
)
def test_white_space_that_our_template_trims_is_said(
    vocabulary: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """LLaMA-Factory's templates keep it: its formatters insert a text as it is."""
    found, tokenizer = (
        convert_name("LLaMA-Factory", name, tmp_path),
        AutoTokenizer.from_pretrained(vocabulary(name)),
    )
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there \n"}]
    text = tokenizer.decode(render_ours(found.recipe["chat_template"], turns, tokenizer)[0])
    assert any("white space around a turn is kept there" in line for line in found.remarks) == (
        "Hi there \n" not in text
    )
