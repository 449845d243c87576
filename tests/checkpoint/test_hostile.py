"""Nothing that is read can run code: no pickle in the source, and none taken from a checkpoint."""

import ast
import hashlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.checkpoint import folders, manifest
from finetune.checkpoint.folders import summarize_checkpoints
from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.resume import find_resume_checkpoint, load_checkpoint
from finetune.checkpoint.save import Saver
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.distributed.join import join, leave
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.files import durable
from tests.checkpoint.tiny_run import build
from tests.conftest import make_chat, make_model, make_tokenizer
from tests.ranks import ROOT

UNPICKLING_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
}
UNPICKLING_CALLS = {
    "torch.load",
    "torch.save",
    "np.load",
    "numpy.load",
    "pd.read_pickle",
    "dist.broadcast_object_list",
}
UNPICKLING_CALLS |= {"dist.all_gather_object", "dist.gather_object", "dist.scatter_object_list"}


# What a script gives to load_recipe, which is written as a Python file of the user's and loaded as one. And files that
# torch wrote with pickle, for export only and never of a checkpoint: through unpicklers that admit no
# code (tests/export/test_torch_files.py holds it to that).
ADMITTED = {
    "finetune/config/given.py": {"dill"},
    "finetune/export/torch_files.py": {"pickle"},
    # from one process of a recipe's own code to another
    "finetune/rollout/environment_processes.py": {"dill", "pickle"},
}


def unpickling(source: str) -> Iterator[str]:
    """Every import of a module and every call that can unpickle, as `LINE: NAME`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            yield from (
                f"{node.lineno}: {name}"
                for name in module
                if name.split(".")[0] in UNPICKLING_MODULES
            )
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords}
            if name in UNPICKLING_CALLS and "allow_pickle=False" not in keywords:
                safe = "(weights_only=True)" if "weights_only=True" in keywords else ""
                yield f"{node.lineno}: {name}{safe}"


def test_no_module_of_ours_unpickles() -> None:
    found = {
        str(path.relative_to(ROOT)): hits
        for path in sorted((ROOT / "finetune").rglob("*.py"))
        if (hits := {hit.split(": ")[1] for hit in unpickling(path.read_text())})
    }
    assert found == ADMITTED


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import numpy as np\nnp.load('x')",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(unpickling(source))


class Payload:
    """Writes a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = join(Sharding(layout="single", use_cpu=True))
    yield world
    leave(world)


def test_a_checkpoint_made_by_an_enemy_runs_nothing_and_is_never_loaded_in_part(
    tmp_path: Path, world: World
) -> None:
    """In place of each file in turn a pickle, with a manifest that vouches for it."""
    model_folder, run_folder, marker = (
        make_model(tmp_path / "model"),
        tmp_path / "run",
        tmp_path / "it ran",
    )
    make_chat(tmp_path / "chat.jsonl", rows=4)
    recipe_file = tmp_path / "recipe.yaml"
    content = {
        "model_name_or_path": str(model_folder),
        "datasets": [{"path": str(tmp_path / "chat.jsonl")}],
    }
    recipe_file.write_text(json.dumps(content | {"output_dir": str(run_folder)}))
    recipe = read_recipe(str(recipe_file))
    model, optimizer = build(str(model_folder), False, world)
    Saver(run_folder, model, optimizer, world, recipe, make_tokenizer()).save(Progress(step=3))
    checkpoint = folders.step_folder(run_folder, 3)
    hostile = pickle.dumps(Payload(marker))
    refused = set()
    for path in [p for p in sorted(checkpoint.rglob("*")) if p.is_file()]:
        good, original = path.read_bytes(), (checkpoint / manifest.MANIFEST).read_bytes()
        path.write_bytes(hostile)
        if path.name != manifest.MANIFEST:
            vouch_for(checkpoint, path)
            found = ["state.json is damaged"] if path.name == manifest.STATE else []
            assert manifest.find_damage(checkpoint) == found, "the enemy's checksums are right"
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        summarize_checkpoints(run_folder, checksums=True)
        try:
            load_checkpoint(
                find_resume_checkpoint(recipe, run_folder, world), model, optimizer, world
            )
        except UserError as error:
            refused.add(path.name.split("-")[0])
            assert path.name in str(error)
            assert all(bool((before[name] == p).all()) for name, p in model.named_parameters()), (
                "nothing was loaded"
            )
        (checkpoint / manifest.MANIFEST).write_bytes(original)
        path.write_bytes(good)
        assert not marker.exists(), f"{path.name} ran code"
    assert refused == {"pieces", manifest.STATE, manifest.MANIFEST}, (
        "the others are read by nobody here"
    )
    (checkpoint / manifest.MODEL / ".metadata").write_bytes(
        hostile
    )  # what torch's own format would unpickle
    with pytest.raises(UserError, match="does not belong to it"):
        load_checkpoint(find_resume_checkpoint(recipe, run_folder, world), model, optimizer, world)
    pickle.loads(hostile)  # noqa: S301
    assert marker.exists(), "the payload works"


def vouch_for(checkpoint: Path, path: Path) -> None:
    """A manifest with the right size and checksum of the changed file."""
    content = json.loads((checkpoint / manifest.MANIFEST).read_text())
    content["files"][path.relative_to(checkpoint).as_posix()] = durable.checksum(path)
    del content["checksum"]
    plain = json.dumps(content, sort_keys=True, indent=1)
    content["checksum"] = hashlib.sha256(plain.encode()).hexdigest()
    (checkpoint / manifest.MANIFEST).write_text(json.dumps(content, sort_keys=True, indent=1))


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    staging = folders.staging_folder(tmp_path, 1)
    folders.make_staging(staging)
    (tmp_path / "elsewhere").write_bytes(b"")
    names = {"../../elsewhere": durable.checksum(tmp_path / "elsewhere")}
    outside = manifest.Manifest(
        step=1, layout="single", ranks=1, recipe_sha256="", packages={}, files=names
    )
    with pytest.raises(
        UserError, match=r"manifest.json names a file outside the checkpoint: '../../elsewhere'"
    ):
        manifest.complete(staging, outside)
