"""Rows with images, in every form that people have: the ids and pixels of the model's own processor, and what is wrong with them."""

import base64
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from finetune.cli import main
from finetune.config.reader import read_recipe
from finetune.config.schema import Model
from finetune.constants import IGNORE_INDEX
from finetune.data.images import EncodedImage, ImageProcessor, open_image
from finetune.data.prepare import PreparedData, prepare_data
from finetune.data.tokenizer import load_tokenizer
from finetune.errors import UserError
from tests.data.world import Rank
from tests.ranks import run_command
from tests.vision import IMAGE, add_processor, draw_image, make_vision_model, open_processor

ANSWER = {"role": "assistant", "content": "A fox."}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return add_processor(make_vision_model(folder, "qwen2_5_vl"), "qwen2_5_vl")


def prepare(model: Path, data: Path, **keys: Any) -> PreparedData:
    source = {"path": str(data)} | {key: keys.pop(key) for key in ("image_folder",) if key in keys}
    recipe = {
        "model_name_or_path": str(model),
        "datasets": [source],
        "dataset_cache_dir": str(data.parent / "cache"),
    }
    path = data.parent / "recipe.yaml"
    path.write_text(
        yaml.safe_dump(
            recipe | {"max_length": 128, "global_batch_size": 1, "packing": False} | keys
        )
    )
    read = read_recipe(str(path))
    return prepare_data(read, load_tokenizer(read.model, read.data), Rank())


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}, ANSWER]}


def named(name: str) -> list[dict[str, Any]]:
    """Rows of every form, each with the images `0.png` and `1.png` of the folder around the words of a question."""
    turns = [{"from": "human", "value": "<image>What?<image>"}, {"from": "gpt", "value": "A fox."}]
    places = [{"role": "user", "content": "<image>What?<image>"}, ANSWER]
    both = ["0.png", "1.png"]
    content = [chat({"type": "image"}, "What?", {"type": "image"})["messages"][0], ANSWER]
    forms: dict[str, dict[str, Any]] = {
        "parts": chat(
            {"type": "image", "path": "0.png"}, "What?", {"type": "image", "image": "1.png"}
        ),
        "openai": chat(
            {"type": "image_url", "image_url": {"url": "0.png"}},
            "What?",
            {"type": "image", "url": "1.png"},
        ),
        "trl": {"messages": content, "images": both},
        "llava": {"conversations": turns, "image": both},
        "llama-factory": {"messages": places, "images": both},
        "prompt": {"prompt": content[:1], "completion": [ANSWER], "images": both},
        "alpaca": {"instruction": "<image>What?<image>", "output": "A fox.", "images": both},
    }
    return [forms[name]]


@pytest.mark.parametrize(
    "form",
    [
        "parts",
        "openai",
        "trl",
        "llava",
        "llama-factory",
        "prompt",
        "alpaca",
        "bytes",
        "data",
        "base64",
    ],
)
def test_ids_and_pixels_are_the_processors_own(form: str, model: Path, tmp_path: Path) -> None:
    paths = [draw_image(tmp_path / f"{i}.png", i) for i in range(2)]
    if form == "bytes":  # as `datasets` keeps images in Parquet
        import pyarrow as pa
        import pyarrow.parquet as pq

        data = tmp_path / "data.parquet"
        images = [{"bytes": path.read_bytes(), "path": None} for path in paths]
        row = named("trl")[0] | {"images": images}
        row["messages"][1] = {"role": "assistant", "content": [{"type": "text", "text": "A fox."}]}
        pq.write_table(pa.Table.from_pylist([row]), data)
    elif form == "data":
        urls = [
            "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
            for path in paths
        ]
        data = write_rows(
            tmp_path,
            [chat({"type": "image", "url": urls[0]}, "What?", {"type": "image", "url": urls[1]})],
        )
    elif form == "base64":
        parts = [
            {"type": "image", "base64": base64.b64encode(path.read_bytes()).decode()}
            for path in paths
        ]
        data = write_rows(tmp_path, [chat(parts[0], "What?", parts[1])])
    else:
        data = write_rows(tmp_path, named(form))
    prepared = prepare(model, data)
    processor = open_processor(model, "qwen2_5_vl")
    messages = [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "What?"}, {"type": "image"}],
        },
        ANSWER,
    ]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    own = processor(text=[text], images=[[Image.open(path) for path in paths]], return_tensors="pt")
    (micro_batch,) = prepared.train.step_batch(0).micro_batches  # type: ignore[union-attr]
    assert torch.equal(micro_batch.input_ids, own["input_ids"])
    assert micro_batch.images is not None and micro_batch.image_counts == (2,)
    assert micro_batch.images.keys() == {"pixel_values", "image_grid_thw"}
    assert all(torch.equal(value, own[name]) for name, value in micro_batch.images.items())
    answer = processor.tokenizer.decode(micro_batch.labels[micro_batch.labels != IGNORE_INDEX])
    assert answer == "A fox.<|end|>"


def test_no_part_of_an_image_is_trained_on(model: Path, tmp_path: Path) -> None:
    draw_image(tmp_path / "0.png", 0)
    answer = {
        "role": "assistant",
        "content": [{"type": "text", "text": "Here:"}, {"type": "image", "path": "0.png"}],
    }
    data = write_rows(tmp_path, [{"messages": [{"role": "user", "content": "Draw."}, answer]}])
    for keys in ({}, {"assistant_only_loss": False}):
        (micro_batch,) = prepare(model, data, **keys).train.step_batch(0).micro_batches  # type: ignore[union-attr]
        token = load_ids(model)[0]
        assert (micro_batch.input_ids == token).sum() > 0 and (
            micro_batch.labels == token
        ).sum() == 0
        assert (micro_batch.labels != IGNORE_INDEX).sum() > 5


@pytest.mark.parametrize(
    ("name", "size", "keys"),
    [
        ("flat.png", (4_700, 4_700), {}),  # a screenshot, say
        ("photo.jpg", (4_000, 3_000), {"progressive": True}),
        ("panorama.png", (6_000, 60), {}),
        (
            "upright.jpg",
            (30, 20),
            {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"},
        ),
    ],
)
def test_an_image_in_proportion_is_opened_as_transformers_opens_it(
    name: str, size: tuple[int, int], keys: dict[str, Any], tmp_path: Path
) -> None:
    from transformers.image_utils import load_image

    Image.radial_gradient("L").resize(size).convert("RGB").save(tmp_path / name, **keys)
    with (tmp_path / name).open("ab") as file:
        file.write(
            b"\xff\xda" * 500 if name == "photo.jpg" else b""
        )  # as a film that follows a photo may hold
    ours = open_image(EncodedImage((tmp_path / name).read_bytes()))
    theirs = load_image(str(tmp_path / name))
    assert (ours.size, ours.mode) == (
        theirs.size,
        theirs.mode,
    ) and ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_an_image_takes_little_more_memory_than_its_pixels(kind: str, tmp_path: Path) -> None:
    """Measured in a process of its own, whose largest size is the kernel's."""
    Image.new("RGB", (4_700, 4_700)).save(tmp_path / f"a.{kind}", lossless=True)
    code = """
import resource, sys
from pathlib import Path
from finetune.data.images import EncodedImage, open_image
size = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
open_image(EncodedImage(Path(sys.argv[1]).with_name("small.png").read_bytes()))
before = size()
open_image(EncodedImage(Path(sys.argv[1]).read_bytes()))
print((size() - before) * 1024)
"""
    Image.new("RGB", (9, 9)).save(tmp_path / "small.png")
    Image.new("RGB", (9, 9)).save(tmp_path / "small.webp")
    done = run_command(["python", "-c", code, str(tmp_path / f"a.{kind}")])
    assert int(done.stdout) < {"png": 2, "webp": 6}[kind] * 3 * 4_700**2, done.stderr


def test_pictures_of_an_arrow_file_are_bounded_too(model: Path, tmp_path: Path) -> None:
    """The `datasets` library would decode them before they are looked at."""
    import datasets

    Image.new("1", (9_400, 9_400)).save(tmp_path / "flat.png")
    draw_image(tmp_path / "0.png", 0)
    for name, words in (
        ("0.png", None),
        ("flat.png", "9,400 x 9,400 pixels unpack to more than 64 MiB"),
    ):
        row = {
            "messages": [
                {"role": "user", "content": "What?"},
                {"role": "assistant", "content": "A fox."},
            ]
        }
        rows = datasets.Dataset.from_list(
            [row | {"images": [{"path": None, "bytes": (tmp_path / name).read_bytes()}]}]
        )
        rows.cast_column("images", datasets.List(datasets.Image())).save_to_disk(
            tmp_path / f"of-{name}"
        )
        if words is None:
            assert prepare(model, tmp_path / f"of-{name}").report.sources[0].images == 1
            continue
        with pytest.raises(UserError, match=words):
            prepare(model, tmp_path / f"of-{name}")


def load_ids(model: Path) -> list[int]:
    return list(open_processor(model, "qwen2_5_vl").image_token_ids)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image", "path": "none.png"}, "none.png: no such file"),
        ({"type": "image", "path": "text.png"}, "text.png: cannot be read as an image"),
        ({"type": "image", "path": "torn.png"}, "torn.png: cannot be read as an image"),
        (
            {"type": "image", "path": "thin.png"},
            "1 x 300 pixels: one side is more than 200 times the other; cut it",
        ),
        ({"type": "image", "path": "moving.gif"}, "moving.gif: animated; save one of its 2 frames"),
        (
            {"type": "image", "path": "bomb.png"},
            "bomb.png: 30,000 x 3,000 pixels, more than 89,478,485",
        ),
        (
            {"type": "image", "path": "flat.png"},
            "flat.png: 9,400 x 9,400 pixels unpack to more than 64 MiB, the most for",
        ),
        (
            {"type": "image", "path": "vast.png"},
            "vast.png: more than 178,956,970 pixels; shrink it",
        ),
        (
            {"type": "image", "path": "long.png"},
            "long.png: 40,000 x 1 pixels: one side is more than 200 times the other",
        ),
        (
            {"type": "image", "path": "scans.jpg"},
            "scans.jpg: a JPEG of more than 100 scans; save it again",
        ),
        (
            {"type": "image", "url": "https://example.org/fox.png"},
            "an address is not downloaded; save the image as a file",
        ),
        ({"type": "image"}, "its messages have 1 place for an image, and the row has 0 images"),
        ({"type": "image", "image": 5}, "a path or bytes are expected, found 5 (int)"),
        (
            {"type": "text", "text": "What is <|image|>?"},
            "holds a token of an image, and the row has no image",
        ),
    ],
)
def test_an_image_that_cannot_be_used_is_named_with_its_row(
    part: dict[str, Any], words: str, model: Path, tmp_path: Path
) -> None:
    draw_image(tmp_path / "good.png", 1)
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "torn.png").write_bytes((tmp_path / "good.png").read_bytes()[:-40])
    Image.new("L", (1, 300)).save(tmp_path / "thin.png")
    frames = [Image.new("L", (9, 9), color) for color in (0, 200)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    sizes = {
        "bomb": (30_000, 3_000),
        "flat": (9_400, 9_400),
        "vast": (20_000, 20_000),
        "long": (40_000, 1),
    }
    for name, size in sizes.items():
        if name in str(part):
            Image.new("1", size).save(tmp_path / f"{name}.png")
    Image.new("RGB", (640, 640)).save(tmp_path / "scans.jpg", progressive=True)
    progressive = (tmp_path / "scans.jpg").read_bytes()
    last_scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    (tmp_path / "scans.jpg").write_bytes(progressive[:-2] + last_scan * 200 + progressive[-2:])
    good = chat({"type": "image", "path": "good.png"}, "What?")
    data = write_rows(tmp_path, [good, chat(part, "What?")])
    with pytest.raises(UserError) as problem:
        prepare(model, data)
    assert words in str(problem.value) and "data.jsonl:2" in str(problem.value)
    if "token of an image" not in words:
        skipped = prepare(model, data, on_bad_row="skip").report
        assert skipped.sources[0].rows_skipped == 1 and "skipped" in {
            finding.name for finding in skipped.findings
        }


def test_paths_begin_at_the_image_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    draw_image(tmp_path / "pictures" / "0.png", 0)
    data = write_rows(tmp_path, [chat({"type": "image", "path": "0.png"}, "What?")])
    assert (
        prepare(model, data, image_folder=str(tmp_path / "pictures")).report.sources[0].images == 1
    )


def test_an_image_is_never_cut(model: Path, tmp_path: Path) -> None:
    draw_image(tmp_path / "0.png", 0)
    image = {"type": "image", "path": "0.png"}
    long = chat("What is this? " * 5, image, "?")
    data = write_rows(tmp_path, [chat(image, "What?"), long])
    for overlength in ("truncate", "split", None):
        with pytest.raises(
            UserError, match=r"data.jsonl:2: an image that max_length = 60 tokens would cut"
        ):
            prepare(model, data, max_length=60, overlength=overlength)
    report = prepare(model, data, max_length=60, overlength="drop").report
    assert report.examples == 1
    after = chat(image, "What is this? " * 5)  # the answer alone is cut off
    after["messages"][1] = {"role": "assistant", "content": "A fox. " * 20}
    examples = prepare(model, write_rows(tmp_path, [after]), max_length=140).train.examples  # type: ignore[union-attr]
    assert len(examples[0].input_ids) == 140 and examples.count_images(0) == 1


def test_a_changed_image_is_read_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path, [chat({"type": "image", "path": "0.png"}, "What?")])
    draw_image(tmp_path / "0.png", 0)
    first = prepare(model, data).train
    draw_image(tmp_path / "0.png", 2)
    with pytest.raises(UserError, match="it has changed since it was read"):
        first.step_batch(0)  # type: ignore[union-attr]
    capsys.readouterr()
    second = prepare(model, data).train
    assert (
        "it has changed since it was read; the rows are tokenized again" in capsys.readouterr().err
    )
    assert first.fingerprint != second.fingerprint
    second.step_batch(0)  # type: ignore[union-attr]


def test_equal_questions_about_other_images_are_no_duplicates(model: Path, tmp_path: Path) -> None:
    for i in range(3):
        draw_image(tmp_path / f"{i % 2}.png", i % 2)
    rows = [chat({"type": "image", "path": f"{i % 2}.png"}, "What?") for i in range(3)]
    assert prepare(model, write_rows(tmp_path, rows)).report.sources[0].duplicates == 1


def test_a_micro_batch_without_an_image_gets_a_blank_one(model: Path, tmp_path: Path) -> None:
    draw_image(tmp_path / "0.png", 0)
    data = write_rows(tmp_path, [chat({"type": "image", "path": "0.png"}, "What?"), chat("What?")])
    batches = prepare(model, data).train
    found = [batch.micro_batches[0] for batch in batches.batches()]
    assert sorted(each.image_counts for each in found) == [(0,), (1,)]
    assert all(each.images is not None and each.images["pixel_values"].numel() for each in found)
    assert all(
        (each.input_ids == load_ids(model)[0]).any() == (each.image_counts == (1,))
        for each in found
    )


def test_inspect_shows_where_images_stand(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_image(tmp_path / "0.png", 0)
    data = write_rows(tmp_path, [chat({"type": "image", "path": "0.png"}, "What?")])
    prepare(model, data)
    assert main(["inspect", "--recipe", str(tmp_path / "recipe.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "<|img|>[image: 2 tokens]<|/img|>What?" in printed
    assert "1 image, which take 2 (" in printed


@pytest.mark.parametrize("names_folder", [False, True])
def test_inspect_finds_the_images_of_turns_where_training_does(
    names_folder: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pictures" if names_folder else tmp_path
    folder.mkdir(exist_ok=True)
    draw_image(folder / "0.png", 0)
    data = write_rows(tmp_path, [chat({"type": "image", "path": "0.png"}, "What?")])
    prepare(model, data, **{"image_folder": str(folder)} if names_folder else {})
    assert main(["inspect", "--recipe", str(tmp_path / "recipe.yaml"), "--turns", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert [turn["answer"][0]["text"] for turn in row["turns"]] == ["A fox.<|end|>"]


SAMPLED = {"method": "grpo", "rewards": ["length"], "max_completion_length": 16}


def test_what_images_cannot_be_combined_with_is_refused(model: Path, tmp_path: Path) -> None:
    draw_image(tmp_path / "0.png", 0)
    row = chat({"type": "image", "path": "0.png"}, "What?")
    draw_image(tmp_path / "1.png", 1)
    rated = [
        row | {"label": True},
        chat({"type": "image", "path": "1.png"}, "Who?") | {"label": False},
    ]
    refused: list[tuple[str, dict[str, Any]]] = [
        (
            "does not keep packed documents with images apart",
            {"packing": True, "attn_implementation": "sdpa"},
        ),
        ("method: kto cannot be combined with rows with images", {"method": "kto"}),
        ("torch_compile cannot be combined with rows with images", {"torch_compile": True}),
        (
            "vllm_server_base_url cannot be combined with rows with images",
            SAMPLED | {"vllm_server_base_url": "http://127.0.0.1:1"},
        ),
        (
            "environment cannot be combined with rows with images",
            SAMPLED | {"environment": "openenv:http://127.0.0.1:1"},
        ),
    ]
    for words, keys in refused:
        data = write_rows(tmp_path, rated if keys.get("method") == "kto" else [row])
        with pytest.raises(UserError, match=words):
            prepare(model, data, **keys)


@pytest.mark.parametrize("keys", [{}, {"chat_template": "chatml"}], ids=["own template", "named"])
def test_a_model_without_a_tower_takes_no_images(
    keys: dict[str, str], tmp_path: Path, model: Path
) -> None:
    draw_image(tmp_path / "0.png", 0)
    data = write_rows(tmp_path, [chat({"type": "image", "path": "0.png"}, "What?")])
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with pytest.raises(UserError, match="a row holds an image, and this model takes none"):
        prepare(
            model,
            data,
            model_name_or_path=None,
            model_config=config,
            tokenizer_name_or_path=str(model),
            **keys,
        )


def test_a_tokenizer_whose_images_the_model_does_not_know_is_refused(
    model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"image_token_id": 5}))
    draw_image(tmp_path / "0.png", 0)
    data = write_rows(tmp_path, [chat({"type": "image", "path": "0.png"}, "What?")])
    with pytest.raises(
        UserError, match=rf"image_token_id is 5 in the model's config, .* have the ids \[{IMAGE}\]"
    ):
        prepare(tmp_path / "model", data)


def test_images_do_not_depend_on_the_number_of_threads(model: Path, tmp_path: Path) -> None:
    for i in range(4):
        draw_image(tmp_path / f"{i}.png", i)
    rows = [chat({"type": "image", "path": f"{i}.png"}, f"What {i}?") for i in range(4)]
    data = write_rows(tmp_path, rows)
    one, two = (
        [
            batch.micro_batches[0]
            for batch in prepare(model, data, dataloader_num_workers=threads).train.batches()
        ]
        for threads in (0, 2)
    )
    for a, b in zip(one, two, strict=True):
        assert a.images is not None and b.images is not None
        assert np.array_equal(a.images["pixel_values"], b.images["pixel_values"])


UNREAD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prompt": "What?", "completion": " A fox.", "images": ["0.png"]}, {}),
    ({"text": "A fox.", "photo": "0.png"}, {}),
    (
        {
            "messages": [{"role": "user", "content": "What?"}, ANSWER],
            "picture": {"bytes": None, "path": "0.png"},
        },
        {},
    ),
    (
        {"prompt": "What?", "chosen": " A fox.", "rejected": " A hen.", "image": "0.png"},
        {"method": "dpo"},
    ),
    (
        {"prompt": "What?", "image": "0.png"},
        {"method": "grpo", "rewards": ["format"], "max_completion_length": 16},
    ),
]


@pytest.mark.parametrize(("row", "keys"), UNREAD)
def test_images_that_nothing_reads_are_fatal_for_a_model_that_would_see_them(
    row: dict[str, Any], keys: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    draw_image(tmp_path / "0.png", 0)
    data = write_rows(tmp_path, [row, row | {"prompt": "Who?"}])
    column = next(name for name in row if name in ("images", "photo", "picture", "image"))
    with pytest.raises(
        UserError, match=rf"fatal: images_dropped: .*; first: the column {column} "
    ) as problem:
        prepare(tmp_path / "model", data, **keys)
    assert f"{data}:1" in str(problem.value)


def test_images_that_nothing_reads_are_a_warning_for_a_model_without_a_tower(
    model: Path, tmp_path: Path
) -> None:
    draw_image(tmp_path / "0.png", 0)
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    keys = {
        "model_name_or_path": None,
        "model_config": config,
        "tokenizer_name_or_path": str(model),
    }
    rows: list[dict[str, Any]] = [
        {"text": "A fox.", "photo": "0.png"},
        {"text": "A hen.", "photo_id": 7, "images": []},
    ]
    report = prepare(model, write_rows(tmp_path, rows), **keys).report
    assert [(f.severity, f.rows) for f in report.findings if f.name == "images_unread"] == [
        ("warning", 1)
    ]
    assert "images_dropped" not in {f.name for f in report.findings}


def test_without_pillow_an_image_and_its_processor_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_processor(make_vision_model(tmp_path / "model", "qwen2_5_vl"), "qwen2_5_vl")
    processor = ImageProcessor(Model(model_name_or_path=str(folder)), None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"^images need Pillow; pip install -e"):
        open_image(EncodedImage(b""))
    with pytest.raises(UserError, match=r"^images need Pillow; pip install -e"):
        _ = processor._processor
