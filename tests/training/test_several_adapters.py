"""Several adapters in one recipe: each is what a run of it alone is, bit for bit, on one base in memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import finetune
from finetune.config.reader import read_recipe, split_adapters
from finetune.errors import UserError
from finetune.models import load
from finetune.session import Session
from tests.conftest import make_chat
from tests.ranks import launch_ranks
from tests.training.layouts import train_all, write_config

SCRIPT = Path(__file__).with_name("runs_on_ranks.py")

PLAIN = {"name": "plain"}
OTHER = {
    "name": "other",
    "learning_rate": 2e-3,
    "lr_scheduler_type": "linear",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "lora_target_modules": ["q_proj", "up_proj"],
    "seed": 5,
    "max_steps": 5,
}
WHOLE = {"name": "whole", "modules_to_save": ["lm_head"], "use_rslora": True}
AGAIN = {"name": "again", "use_dora": True, "eval_split_size": 0.2}
Make = Callable[..., Path]


def list_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics, without what is measured by the clock."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "eval_loss")
    return [{k: line[k] for k in kept if k in line} for line in lines if "phase" not in line]


def assert_same_run(folder: Path, alone: Path) -> None:
    """The same metrics, and the same weights and optimizer state in the last checkpoint."""
    assert list_lines(folder) == list_lines(alone)
    checkpoints = [sorted((each / "checkpoints").glob("step-*")) for each in (folder, alone)]
    assert checkpoints[0][-1].name == checkpoints[1][-1].name
    found = [sorted(each[-1].rglob("*.safetensors")) for each in checkpoints]
    assert [path.name for path in found[0]] == [path.name for path in found[1]]
    assert found[0]
    for path, other in zip(*found, strict=True):
        tensors = load_file(path)
        others = load_file(other)
        assert tensors.keys() == others.keys()
        assert all(tensors[name].equal(others[name]) for name in tensors), path


def train_alone(make: Make, adapter: dict[str, Any], folder: Path, **keys: Any) -> Path:
    own = {key: value for key, value in adapter.items() if key != "name"}
    finetune.train(make("alone", **{**keys, **own, "output_dir": str(folder)}))
    return folder


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="plain"),
        pytest.param({"load_in_4bit": True}, id="quantized", marks=pytest.mark.slow),
        pytest.param({"method": "dpo"}, id="pairs", marks=pytest.mark.slow),
    ],
)
def test_each_adapter_is_a_run_alone(
    tiny_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    """Losses, gradients, weights and optimizer states are equal; the base is read once."""
    other = {**OTHER, "datasets": [{"path": str(make_chat(tmp_path / "other.jsonl", rows=16))}]}
    adapters = [PLAIN, other, AGAIN] if "load_in_4bit" in keys else [PLAIN, other, WHOLE, AGAIN]
    if "method" in keys:
        path = str(make_pairs(tmp_path / "pairs.jsonl"))
        keys = {**keys, "datasets": [{"path": path}]}
        adapters = [PLAIN, {**OTHER, "datasets": [{"path": path, "max_samples": 12}]}]
    keys = {"use_peft": True, "export_at_end": False, **keys}
    read: list[tuple[str, ...]] = []
    parallelize = load.parallelize

    def watch(model: Any, values: Any, *rest: Any, **keys: Any) -> Any:
        names: list[str] = []

        def count(name: str, slices: Any) -> Any:
            names.append(name)
            return values(name, slices)

        made = parallelize(model, count, *rest, **keys)
        read.append(tuple(name for name in names if ".lora_" not in name))
        return made

    monkeypatch.setattr(load, "parallelize", watch)
    finetune.train(tiny_recipe(**keys, adapters=adapters))
    assert len(read[0]) > len(adapters)
    # a head that is trained whole is read, and again after it
    expected = [(), ("lm_head.weight",), ("lm_head.weight",)] if WHOLE in adapters else None
    assert read[1:] == (expected or [()] * (len(adapters) - 1))
    for adapter in adapters:
        alone = train_alone(tiny_recipe, adapter, tmp_path / "alone" / adapter["name"], **keys)
        assert_same_run(tmp_path / "run" / adapter["name"], alone)


def make_pairs(path: Path) -> Path:
    rows = [
        {"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": f"No {n * 7}."}
        for n in range(16)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "full_shard"])
def test_killed_ranks_resume_to_the_bits_of_runs_alone(
    tiny_recipe: Make, tiny_llama: Make, tmp_path: Path, layout: str
) -> None:
    """On two ranks, killed in the second adapter, of which a step is saved; the first is not trained again."""
    keys: dict[str, Any] = {"use_peft": True, "export_at_end": False, "save_steps": 1}
    if layout == "full_shard":
        keys["model_name_or_path"] = str(tiny_llama("tied", tie_word_embeddings=True))
    config = write_config(tmp_path, layout)
    recipe = tiny_recipe(**keys, adapters=[PLAIN, OTHER])
    listing = tmp_path / "killed.json"
    listing.write_text(json.dumps([[str(recipe), str(config), []]]))
    killed = launch_ranks(SCRIPT, [str(listing), "6"], timeout=300)
    assert killed.returncodes == (-9, -9), killed.outputs[0][-3000:]
    first = (tmp_path / "run" / "plain" / "metrics.jsonl").read_bytes()
    begun = sorted((tmp_path / "run" / "other" / "checkpoints").glob("step-*"))
    assert [path.name for path in begun] == ["step-00000001", "step-00000002"]
    alone = [
        (
            tiny_recipe(**{**keys, **each}),
            config,
            [f"output_dir={tmp_path / 'alone' / str(each['name'])}"],
        )
        for each in (PLAIN, OTHER)
    ]
    train_all(tmp_path, [(recipe, config, []), *alone], ranks=2)
    assert (tmp_path / "run" / "plain" / "metrics.jsonl").read_bytes().startswith(first)
    for each in (PLAIN, OTHER):
        name = str(each["name"])
        assert_same_run(tmp_path / "run" / name, tmp_path / "alone" / name)


def test_peft_opens_each_export(tiny_recipe: Make, tmp_path: Path) -> None:
    """Plain PEFT opens both adapters beside each other on the base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result = finetune.train(tiny_recipe(use_peft=True, adapters=[PLAIN, OTHER]))
    assert [*result.adapters] == ["other", "plain"]
    folders = {name: each.adapter for name, each in result.adapters.items()}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-llama")
    opened = PeftModel.from_pretrained(base, folders["plain"], adapter_name="plain")
    opened.load_adapter(folders["other"], adapter_name="other")
    assert [opened.peft_config[name].r for name in ("plain", "other")] == [16, 4]
    stored = load_file(folders["other"] / "adapter_model.safetensors")
    state = opened.state_dict()
    for name, tensor in stored.items():
        assert state[name.replace(".weight", ".other.weight")].equal(tensor)


@pytest.mark.parametrize(
    ("adapters", "more", "said"),
    [
        ([{"name": "a"}, {"name": "a"}], {}, 'name: "a" does not fit'),
        ([{"name": "../a"}], {}, 'name: "../a" does not fit'),
        ([{"learning_rate": 1e-4}], {}, 'name: "" does not fit'),
        ([{"name": "a", "max_length": 8}], {}, "a: max_length: is the same for all adapters"),
        ([{"name": "a", "lora_r": 0}], {}, "a: lora_r: 0 does not fit"),
        ([{"name": "a", "lorar": 8}], {}, "a: lorar: no such key; did you mean lora_r?"),
        ([{"name": "a", "datasets": []}], {}, "no data"),
        ([{"name": "a"}], {"use_peft": False}, "adapters has no effect without use_peft: true"),
        (
            [{"name": "a"}],
            {"torch_compile": True},
            "torch_compile cannot be combined with adapters",
        ),
        (
            [{"name": "a", "optim_in_backward": True, "max_grad_norm": None}],
            {},
            "a: optim_in_backward cannot be combined with adapters",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(
    tiny_recipe: Make, adapters: list[dict[str, Any]], more: dict[str, Any], said: str
) -> None:
    path = tiny_recipe(**{"use_peft": True, **more}, adapters=adapters)
    with pytest.raises(UserError) as caught:
        read_recipe(str(path))
    assert said in str(caught.value)
    assert f"{path}:" in str(caught.value)


def test_a_recipe_without_data_of_its_own_reads_those_of_its_adapters(
    tiny_recipe: Make, tmp_path: Path
) -> None:
    """Paths are from the recipe's folder; each recipe is that of a run in a folder of its name."""
    make_chat(tmp_path / "own.jsonl", rows=8)
    adapters = [{"name": "a", "datasets": [{"path": "own.jsonl"}], "eval_split_size": 0.5}]
    recipe = read_recipe(
        str(tiny_recipe(use_peft=True, datasets=None, eval_steps=2, adapters=adapters))
    )
    (own,) = (each.alone for each in split_adapters(recipe))
    assert own.data.datasets[0].path == str(tmp_path / "own.jsonl")
    assert (own.folder, own.name) == (tmp_path / "run" / "a", "tiny-a")
    assert own.lora.adapters == ()
    with pytest.raises(UserError, match="here one adapter is expected"):
        Session(recipe)
