"""Tokens and labels: for any text and spans, the labels are the next tokens of exactly those spans."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from finetune.config.schema import DatasetSource
from finetune.constants import IGNORE_INDEX
from finetune.data.formats import Conversation, parse_row
from finetune.data.groups import render_group
from finetune.data.messages import BadRow
from finetune.data.preferences import parse_prompt
from finetune.data.render import RenderedText, render
from finetune.data.tokenize import tokenize
from finetune.data.tokenizer import PLAIN, make_encoder, make_renderer
from finetune.errors import UserError, exit_code
from tests.conftest import make_tokenizer

CORPUS = [
    "What is two plus two? It is four.\n\n",
    "It is what it is, said the wise, and four is four.\n",
] * 20


def byte_level() -> Tokenizer:
    """BPE over bytes with merges, as in Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=alphabet,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """BPE over characters with byte fallback and a space put before the text, as in Llama 2 and Mistral."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "sentencepiece": sentencepiece_like()}
ENCODERS = {
    name: make_encoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    for name, backend in TOKENIZERS.items()
}


def test_rows_that_are_tokens_already_keep_their_ids_and_labels() -> None:
    """The same row, by a tokenizer's own ids and masks: labels are shifted as everywhere, padding is left out."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS["byte level"])
    ids = tokenizer("What is two plus two? It is four.").input_ids
    labels = [IGNORE_INDEX] * 9 + ids[9:]
    rows = [
        {
            "input_ids": [0, *ids],
            "labels": [IGNORE_INDEX, *labels],
            "attention_mask": [0, *[1] * len(ids)],
        },
        {"input_ids": ids},
    ]
    renderer = make_renderer(tokenizer, True)
    rendered = [
        render(parse_row(row, DatasetSource(path="rows")).document, renderer) for row in rows
    ]
    tokens = tokenize(rendered, [(0, 1), (0, 2)], ENCODERS["byte level"])
    assert tokens.input_ids.tolist() == ids + ids and tokens.lengths.tolist() == [len(ids)] * 2
    assert tokens.labels.tolist() == [*labels[1:], IGNORE_INDEX, *ids[1:], IGNORE_INDEX]
    with pytest.raises(BadRow, match=r"input_ids: 100000 is no token: the tokenizer has \d+"):
        render(parse_row({"input_ids": [100000]}, DatasetSource(path="rows")).document, renderer)


# No private-use or control characters: SentencePiece-like tokenizers have no bytes for half of them in this tiny vocabulary.
PIECES = st.lists(
    st.text(st.sampled_from("It is four. \nüé漢🙂?"), min_size=1, max_size=12),
    min_size=1,
    max_size=5,
)


@given(st.lists(st.tuples(PIECES, st.integers(0, 1), st.booleans()), min_size=1, max_size=5))
def test_labels_decode_to_the_trained_spans(documents: list[tuple[list[str], int, bool]]) -> None:
    backend = TOKENIZERS["byte level"]
    rendered = []
    for pieces, first, special in documents:  # every second piece is trained on, from `first` on
        bounds = np.concatenate(([0], np.cumsum([len(piece) for piece in pieces]))).tolist()
        spans = tuple((bounds[i], bounds[i + 1]) for i in range(first, len(pieces), 2))
        rendered.append(RenderedText("".join(pieces), spans, special))
    tokens = tokenize(rendered, [(0, i) for i in range(len(rendered))], ENCODERS["byte level"])
    ends = np.cumsum(tokens.lengths)
    for i, (document, end, length) in enumerate(zip(rendered, ends, tokens.lengths, strict=True)):
        ids, labels = (
            tokens.input_ids[end - length : end].tolist(),
            tokens.labels[end - length : end].tolist(),
        )
        assert backend.decode(ids) == document.text
        assert all(
            label in (IGNORE_INDEX, following)
            for label, following in zip(labels, [*ids[1:], IGNORE_INDEX], strict=True)
        )
        assert tokens.trained[i] == sum(label != IGNORE_INDEX for label in labels)
        targets = [
            ids[0]
            if document.spans and document.spans[0][0] == 0 and not document.is_plain
            else None,
            *labels[:-1],
        ]
        spoken = backend.decode([token for token in targets if token not in (None, IGNORE_INDEX)])
        wanted = "".join(document.text[a:b] for a, b in document.spans)
        assert spoken == wanted


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_prompt_is_encoded_as_at_inference(name: str) -> None:
    backend: Any = TOKENIZERS[name]
    for prompt, answer in [
        ("What is it?", "It is four."),
        ("It", " is"),
        ("It is\n", "\nfour"),
        ("fo", "ur is four"),
        ("", "four"),
    ]:
        tokens = tokenize(
            [RenderedText(prompt + answer, ((len(prompt), len(prompt + answer)),), True)],
            [(0, 1)],
            ENCODERS[name],
        )
        asked = backend.encode(prompt).ids
        first = int(np.flatnonzero(tokens.labels != IGNORE_INDEX)[0]) + 1
        assert tokens.input_ids[:first].tolist() == asked, prompt
        assert backend.decode(tokens.input_ids.tolist()).replace(" ", "") == (
            prompt + answer
        ).replace(" ", "")


TEMPLATES = {
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "llama2": "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "plain": PLAIN,
}


@pytest.mark.parametrize(
    "stripping",
    [(), ("</s>",), ("</s>", "<|user|>", "<|assistant|>")],
    ids=["", "the end token takes the space behind it", "so do those of headers, as Phi-3's"],
)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_turn_has_the_ids_of_apply_chat_template_under_sentencepiece(
    template: str, stripping: tuple[str, ...]
) -> None:
    backend = sentencepiece_like()
    for name in ("</s>", *stripping):
        token = AddedToken(name, special=True, normalized=False, rstrip=name in stripping)
        backend.add_special_tokens([token])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATES[template],
    )
    words = [
        "What is two?",
        "It is four.",
        "is it?",
        "It is what it is.",
        "four\n\nis four",
        "four",
    ]
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(words)
    ]
    rendered = render(
        parse_row({"messages": messages}, DatasetSource(path="chat.jsonl")).document,
        make_renderer(tokenizer, True),
    )
    tokens = tokenize([rendered], [(0, 1)], make_encoder(tokenizer))
    assert tokens.input_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    starts = np.flatnonzero(
        np.diff(np.concatenate(([IGNORE_INDEX], tokens.labels)) != IGNORE_INDEX)
    )
    spans = [
        [int(label) for label in part if label != IGNORE_INDEX]
        for part in np.split(tokens.labels, starts)
    ]
    assert [backend.decode(part).strip() for part in spans if part] == words[1::2]


@pytest.mark.parametrize("name", [*ENCODERS, pytest.param("llama3", marks=pytest.mark.slow)])
def test_a_long_text_is_encoded_in_parts_as_in_one(
    name: str, request: pytest.FixtureRequest
) -> None:
    if name == "llama3":
        folder = request.getfixturevalue("shared") / "tokenizers" / "llama3"
        encoder = make_encoder(AutoTokenizer.from_pretrained(folder))
    else:
        encoder = ENCODERS[name]
    text = "".join(CORPUS) * 300 + "x" * 300_000 + " and it is\n\n  four ü漢. " * 10_000
    encoded, sizes = encoder.backend.encode_batch_fast, []

    class Backend:
        encode = staticmethod(encoder.backend.encode)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            sizes.append(sum(map(len, texts)))
            return encoded(texts, **options)

    document = RenderedText(text, ((len(text) // 2, len(text)),), is_plain=True)
    parts = tokenize([document], [(0, 1)], replace(encoder, backend=Backend()))
    newline = "\n" if encoder.newline_ids else ""
    halves = text[: len(text) // 2], newline + text[len(text) // 2 :]
    first, second = (encoder.backend.encode(half, add_special_tokens=False).ids for half in halves)
    assert parts.input_ids.tolist() == [
        *encoder.bos_ids,
        *first,
        *second[len(encoder.newline_ids) :],
    ]
    assert max(sizes) < 600_000 < len(text), "only the long word stays whole"


def test_a_tokenizer_whose_pattern_panics_ends_in_a_sentence(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    assert exit_code(lambda: tokenizer.encode("x" * 60)) == 2
    said = capfd.readouterr().err
    assert (
        said.splitlines()[-1].startswith("a library's own code failed: ")
        and "stack backtrace" not in said
    )


def test_documents_without_a_token_are_handled() -> None:
    tokens = tokenize([RenderedText("", (), False), RenderedText("four", ((0, 4),), True), RenderedText("", (), False)], [(0, i) for i in range(3)], ENCODERS["byte level"])  # fmt: skip
    assert tokens.lengths.tolist()[0] == tokens.lengths.tolist()[2] == 0
    assert tokens.trained.tolist() == [0, int(tokens.lengths[1]) - 1, 0]


@pytest.mark.parametrize("spans", [((3, 11),), ((3, 3), (3, 11))])  # the second: an empty one first
def test_a_span_is_trained_beyond_a_fresh_start(spans: tuple[tuple[int, int], ...]) -> None:
    backend = TOKENIZERS["byte level"]
    document = RenderedText("It is four.", spans, False, fresh_starts=(6,))
    tokens = tokenize([document], [(0, 0)], ENCODERS["byte level"])
    assert backend.decode(tokens.labels[tokens.labels >= 0].tolist()).strip() == "is four."


def test_real_conversations_have_the_ids_of_apply_chat_template(shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "llama3")
    rows = json.loads((shared / "data" / "alpaca_en_demo.json").read_text())
    renderer = make_renderer(tokenizer, assistant_only=True)
    documents = [parse_row(row, DatasetSource(path="alpaca.json")).document for row in rows]
    tokens = tokenize(
        [render(document, renderer) for document in documents],
        [(0, 0)] * len(rows),
        make_encoder(tokenizer),
    )
    ours = np.split(tokens.input_ids, np.cumsum(tokens.lengths)[:-1])
    for document, ids in zip(documents, ours, strict=True):
        assert isinstance(document, Conversation)
        assert ids.tolist() == tokenizer.apply_chat_template(
            list(document.messages), return_dict=False
        )


def test_half_a_surrogate_pair_in_another_column_of_a_prompt_is_a_bad_row() -> None:
    renderer = make_renderer(make_tokenizer(), assistant_only=True)
    good, bad = (
        parse_prompt({"prompt": "Q", "note": note}, DatasetSource(path="a.jsonl"))
        for note in ("é", "\ud800")
    )
    assert len(render_group(good.groups[0], renderer)[0]) == 1
    with pytest.raises(BadRow, match="not valid Unicode"):
        render_group(bad.groups[0], renderer)


def test_a_step_that_has_no_tokens_is_refused() -> None:
    """Words alone are tokens here, so that a separator of white space has none."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = make_encoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    document = RenderedText("one two\n", ((7, 8),), is_plain=True, step_labels=(1,))
    with pytest.raises(UserError, match="step_separator: 0 of a row's 1 steps end with tokens"):
        tokenize([document], [(0, 1)], encoder)
