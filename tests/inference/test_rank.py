"""`finetune chat --rank`: the lines of a file by their cosines, which are those of a plain loop over transformers' AutoModel."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.run import fine_tune
from tests.conftest import make_model
from tests.training.test_embedding import embed_alone

LINES = ["Ten is 5 and 5.", "", "Seven", "a longer line, " * 30 + "which ends", "eleven is 11"]
QUERIES = ["What is ten?", "7"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exports of two runs, which pool otherwise, and a file to rank."""
    folder = tmp_path_factory.mktemp("ranked")
    model = make_model(folder / "model", initializer_range=0.2)
    rows = [{"query": f"what is {n}", "positive": f"{n} is {n}"} for n in range(8)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "lines.txt").write_text("\n".join(LINES))
    for pooling in ("lasttoken", "mean"):
        keys = {
            "method": "embed",
            "model_name_or_path": str(model),
            "pooling": pooling,
            "query_prompt": "Q: ",
            "document_prompt": "D: ",
            "datasets": [{"path": str(data)}],
            "dataset_cache_dir": str(folder / "cache"),
            "max_length": 1024,
            "max_steps": 1,
            "global_batch_size": 4,
            "per_device_train_batch_size": 4,
            "output_dir": str(folder / pooling),
        }
        overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        fine_tune(read_recipe(None, overrides), read_sharding(None, None, {}))
    return folder


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_the_nearest_lines_come_with_their_cosines(
    pooling: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["chat", str(folder / pooling), "--rank", str(folder / "lines.txt"), "--nearest", "3"]
    asked = [word for query in QUERIES for word in ("--prompt", query)]
    capsys.readouterr()
    assert main([*command, *asked, "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["query"] for line in said] == QUERIES

    export = folder / pooling / "export"
    model = AutoModel.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    kept = [number for number, line in enumerate(LINES, 1) if line]
    with torch.no_grad():
        alone = {
            text: F.normalize(embed_alone(model, tokenizer, text, pooling), dim=0)
            for text in [f"Q: {query}" for query in QUERIES]
            + [f"D: {line}" for line in LINES if line]
        }
    for line in said:
        query = alone[f"Q: {line['query']}"]
        cosines = {number: float(query @ alone[f"D: {LINES[number - 1]}"]) for number in kept}
        expected = sorted(cosines, key=cosines.__getitem__, reverse=True)[:3]
        assert [each["line"] for each in line["ranked"]] == expected
        for each in line["ranked"]:
            assert each["cosine"] == pytest.approx(cosines[each["line"]], abs=1e-5)
            assert each["text"] == LINES[each["line"] - 1]

    assert main([*command, *asked]) == 0
    assert f"> {QUERIES[0]}\n" in (text := capsys.readouterr().out)
    best = said[0]["ranked"][0]
    shown = " ".join(best["text"].split())
    assert f"{best['cosine']:7.4f}  {best['line']}: {shown}\n" in text


def test_what_cannot_be_ranked_is_a_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = str(folder / "lines.txt")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "one"}\n{"title": "two"}\n')
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    cases = {
        (str(folder / "model"), lines): "no export of embeddings (it has no modules.json)",
        (str(folder / "mean"), str(bad)): "bad.jsonl:2: no document; its columns are title",
        (str(folder / "mean"), str(empty)): "holds no lines to rank",
        (str(folder / "mean"), lines, "--compare"): "--compare: is for answers",
        (str(folder / "mean"), lines, "--nearest", "0"): "--nearest 0: at least one line",
    }
    for (model, file, *flags), said in cases.items():
        assert main(["chat", model, "--rank", file, "--prompt", "x", *flags]) == 2
        assert said in capsys.readouterr().err
