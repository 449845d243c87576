"""Token ids by another tool's own template and tokenizer classes; run by test_token_ids.py, with the tools on PYTHONPATH.

Reads [{"tool": ..., "name": ..., "tokenizer": folder, "conversations": [[{"role": ..., "content": ...}]]}] from stdin and writes
{tool: {name: [[ids, trained]]}}: `trained` is a list of bools, one for each id. Imports nothing of ours.
"""

import copy
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from transformers import AutoTokenizer

# What the tools import and do not need to write a conversation.
UNUSED = (
    "torchaudio",
    "omegaconf",
    "sentencepiece",
    "tiktoken",
    "blobfile",
    "kagglehub",
    "torchdata",
    "av",
    "matplotlib",
)
IGNORED = -100


class Unused(MetaPathFinder, Loader):
    """Imports each of UNUSED as a stub."""

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return (
            ModuleSpec(fullname, self, is_package=True)
            if fullname.partition(".")[0] in UNUSED
            else None
        )

    def create_module(self, spec: ModuleSpec) -> Any:
        module = MagicMock(name=spec.name, __spec__=spec)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class Shared:
    """The shared vocabulary behind the names of sentencepiece's and tiktoken's classes, which torchtune's tokenizers call."""

    tokenizer: Any

    def __init__(self, *_: Any, **__: Any) -> None:
        self.n_vocab = len(self.tokenizer)

    def load(self, path: str) -> None:
        """It is loaded."""

    def vocab_size(self) -> int:
        return len(self.tokenizer)

    def bos_id(self) -> int:
        return int(self.tokenizer.bos_token_id)

    def eos_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def pad_id(self) -> int:
        return 0

    def encode(
        self, text: str, add_bos: bool = False, add_eos: bool = False, **_: Any
    ) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [self.bos_id()] * add_bos + list(ids) + [self.eos_id()] * add_eos


CLASSES = {
    "llama2": "Llama2Tokenizer",
    "mistral": "MistralTokenizer",
    "gemma": "GemmaTokenizer",
    "llama3": "Llama3Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen2_5": "Qwen2_5Tokenizer",
    "phi3": "Phi3MiniTokenizer",
    "phi4": "Phi4Tokenizer",
}


def make_torchtune(name: str, tokenizer: Any, folder: Path) -> Any:
    """torchtune's tokenizer of that name, over the shared vocabulary."""
    from torchtune.modules.transforms.tokenizers import _sentencepiece, _tiktoken

    family = name.removesuffix("_tokenizer").removesuffix("_mini")
    module: Any = importlib.import_module(f"torchtune.models.{family}._tokenizer")
    made = getattr(module, CLASSES[family])
    shared, special = (
        type("Shared", (Shared,), {"tokenizer": tokenizer}),
        dict(tokenizer.get_added_vocab()),
    )
    _sentencepiece.SentencePieceProcessor = _tiktoken.Encoding = shared
    _tiktoken.load_tiktoken_bpe = lambda path: {}
    if family == "phi4":
        module.GPT2BaseTokenizer = shared
        return made("", "", special_tokens=special)
    if not family.startswith("qwen"):
        return made("", special_tokens=special) if family in ("llama3", "phi3") else made("")
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    qwen = made(str(folder / "vocab.json"), str(folder / "merges.txt"), special_tokens=special)
    qwen.encode = shared().encode
    return qwen


def by_torchtune(
    name: str, tokenizer: Any, conversation: Sequence[dict[str, str]], folder: Path
) -> Any:
    """A conversation by the tokenizer of that name; one that ends in +999 has that max_seq_len."""
    from torchtune.data import Message

    turns = [
        Message(role=t["role"], content=t["content"], masked=t["role"] != "assistant")
        for t in conversation
    ]
    kind, _, longest = name.partition("+")
    made = make_torchtune(kind, tokenizer, folder)
    made.max_seq_len = int(longest) if longest else None
    row = made({"messages": turns})
    return row["tokens"], [not hidden for hidden in row["mask"]]


def by_llama_factory(
    name: str, tokenizer: Any, conversation: Sequence[dict[str, str]], folder: Path
) -> Any:
    from llamafactory.data.mm_plugin import get_mm_plugin
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    arguments = DataArguments(template=name, cutoff_len=1 << 20)
    template = get_template_and_fix_tokenizer(tokenizer, arguments)
    template.mm_plugin = get_mm_plugin("base")  # text alone, without a processor of images
    first = {turn["role"]: turn["content"] for turn in conversation[:1]}
    system, tools = first.get("system"), first.get("tools")
    turns = [turn for turn in conversation if turn["role"] not in ("system", "tools")]
    processor = SupervisedDatasetProcessor(template, tokenizer, None, arguments)
    ids, labels = processor._encode_data_example(turns[:-1], turns[-1:], system, tools, [], [], [])
    return ids, [label != IGNORED for label in labels]


def by_automodel(name: str, tokenizer: Any, rows: Sequence[dict[str, Any]], folder: Path) -> Any:
    """The first row by the data class of that name; a name that ends in +turns has a chat template, in +bos a tokenizer that says
    add_bos_token.
    """
    from nemo_automodel.components.datasets.llm import ChatDataset, make_squad_dataset
    from nemo_automodel.components.datasets.llm.hellaswag import HellaSwag

    kind, _, given = name.partition("+")
    tokenizer.chat_template = TURNS if given == "turns" else None
    if given == "bos":
        tokenizer.add_bos_token = True
    place = folder / f"{kind}-{len(list(folder.iterdir()))}"
    place.mkdir()
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = {
        "make_squad_dataset": make_squad_dataset,
        "HellaSwag": HellaSwag,
        "ChatDataset": ChatDataset,
    }[kind]
    paths = {"make_squad_dataset": "dataset_name", "HellaSwag": "path_or_dataset"}
    path = str(place / "train.jsonl") if kind == "ChatDataset" else str(place)
    row = made(**{paths.get(kind, "path_or_dataset_id"): path}, tokenizer=tokenizer, split="train")[
        0
    ]
    ids = [
        token
        for token, attended in zip(row["input_ids"], row["attention_mask"], strict=True)
        if attended
    ]
    labels = row["labels"][: len(ids)]  # what follows each token
    ids += labels[-1:] if labels[-1] != IGNORED else []
    return ids, [False, *(label != IGNORED for label in labels)][: len(ids)]


TURNS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = {"torchtune": by_torchtune, "LLaMA-Factory": by_llama_factory, "Automodel": by_automodel}


def main() -> None:
    """Renders what stdin asks for."""
    sys.meta_path.append(Unused())
    tokenizers: dict[str, Any] = {}
    written: dict[str, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in json.load(sys.stdin):
            place = case["tokenizer"]
            tokenizers[place] = tokenizers.get(place) or AutoTokenizer.from_pretrained(place)
            given = copy.deepcopy(
                tokenizers[place]
            )  # LLaMA-Factory sets tokens of the one that it is given
            written.setdefault(case["tool"], {})[case["name"]] = [
                TOOLS[case["tool"]](case["name"], given, turns, Path(folder))
                for turns in case["conversations"]
            ]
    print(json.dumps(written))


if __name__ == "__main__":
    main()
