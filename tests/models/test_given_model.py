"""A model of a script in place of a folder: trained as the folder is, written once, and refused in a sentence."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import finetune
from tests.ranks import launch_ranks
from tests.training.layouts import write_config

KEYS: dict[str, Any] = {
    "datasets": [{"prompt": f"{n} + {n} = ", "completion": str(2 * n)} for n in range(8)],
    "eval_datasets": [],
    "exact_match_samples": 0,
    "max_steps": 2,
    "global_batch_size": 4,
    "packing": False,
    "export_at_end": False,
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "finetune" / "given"


@pytest.fixture
def model(shared: Path) -> Any:
    """One whose weights are in no file."""
    model = AutoModelForCausalLM.from_pretrained(shared / "models" / "stories260k")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    return model


def losses(recipe: finetune.Recipe) -> list[float]:
    with finetune.Session(recipe) as session:
        found = []
        for batch in session.batches():
            found.append(session.forward_backward(batch).loss)
            session.optim_step()
        return found


def test_a_model_is_trained_as_its_folder_is(
    shared: Path, model: Any, cache: Path, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "saved")
    tokenizer = str(shared / "models" / "stories260k")
    folder = {"model_name_or_path": str(tmp_path / "saved"), "tokenizer_name_or_path": tokenizer}
    before = {name: each.clone() for name, each in model.state_dict().items()}
    given = finetune.load_recipe(model=model, output_dir=tmp_path / "given", **KEYS)
    named = finetune.load_recipe(output_dir=tmp_path / "named", **KEYS, **folder)
    assert losses(given) == losses(named)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_a_folder_is_written_once_for_a_content(model: Any, cache: Path, tmp_path: Path) -> None:
    first, again = (finetune.load_recipe(model=model, output_dir=tmp_path) for _ in range(2))
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    changed = finetune.load_recipe(model=model, output_dir=tmp_path)
    model.generation_config.max_new_tokens = 7
    sampled = finetune.load_recipe(model=model, output_dir=tmp_path)
    names = [each.model.model_name_or_path for each in (first, again, changed, sampled)]
    assert names[0] == names[1] and len(set(names)) == 3
    written = json.loads((Path(str(names[3])) / "generation_config.json").read_text())
    assert written["max_new_tokens"] == 7
    assert sorted(map(str, cache.iterdir())) == sorted({*map(str, names)})


def test_a_resumed_session_finds_the_model_again_and_refuses_another(
    model: Any, cache: Path, tmp_path: Path
) -> None:
    def recipe() -> finetune.Recipe:
        return finetune.load_recipe(model=model, output_dir=tmp_path / "run", **KEYS)

    with finetune.Session(recipe()) as session:
        session.forward_backward(next(session.batches()))
        session.optim_step()
        session.save()
    with finetune.Session(recipe()) as session:
        assert session.load().step == 1
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with (
        pytest.raises(finetune.UserError, match="model_name_or_path"),
        finetune.Session(recipe()) as session,
    ):
        session.load()


ON_RANKS = """
import sys, finetune
from transformers import AutoModelForCausalLM
from tests.models.test_given_model import KEYS, losses
from tests.ranks import open_stores
open_stores()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(losses(finetune.load_recipe(model=model, output_dir=sys.argv[2], accelerate_config=sys.argv[3], **KEYS)))
"""


def test_two_ranks_train_it_under_ddp(shared: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ON_RANKS)
    folder = shared / "models" / "stories260k"
    arguments = [str(folder), str(tmp_path / "run"), str(write_config(tmp_path, "ddp"))]
    environ = {"HF_HOME": str(tmp_path / "cache")}
    done = launch_ranks(tmp_path / "script.py", arguments, env=environ).check()
    alone = losses(
        finetune.load_recipe(
            model=AutoModelForCausalLM.from_pretrained(folder), output_dir=tmp_path / "one", **KEYS
        )
    )
    for output in done.outputs:
        assert json.loads(output.splitlines()[-1]) == pytest.approx(alone, rel=1e-5)
    assert len(list(cache.glob("model-*"))) == 1


def test_what_is_no_model_with_a_tokenizer_is_refused(
    shared: Path, model: Any, cache: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    bare = AutoModelForCausalLM.from_config(copy.deepcopy(model.config))
    bare.config._name_or_path = ""
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig())
    for given, keys, message in (
        (nn.Linear(2, 2), {}, "Linear cannot be written as a folder; give a model of transformers"),
        (model, {"model_name_or_path": "x"}, "model_name_or_path names another; leave one of"),
        (bare, {}, "give tokenizer_name_or_path"),
        (adapted, {}, "holds adapters; save them"),
    ):
        with pytest.raises(finetune.UserError, match=message):
            finetune.load_recipe(model=given, **keys)
    assert not cache.exists()
    assert finetune.load_recipe(model=adapted.merge_and_unload()).model.model_name_or_path
