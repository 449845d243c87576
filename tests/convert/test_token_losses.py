"""token_loss and ASFT's sum against the functions in LLaMA-Factory's own file, which is read from its package."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
import yaml

from finetune.convert.conversion import convert_file
from finetune.models.cross_entropy import linear_cross_entropy
from finetune.models.log_probabilities import DivergenceOptions, TeacherScores, linear_divergence
from finetune.models.loss_chunks import ChunkOptions, HeadProduct, LogitTransform, TokenWeights
from tests.convert.test_token_ids import axolotls  # noqa: F401
from tests.models.test_loss import problem

pytestmark = pytest.mark.slow
PACKAGE = "llamafactory==0.9.5"
FILE = Path("llamafactory") / "train" / "trainer_utils.py"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The loss functions of LLaMA-Factory; TEMPLATE_TOOLS names a folder with it installed, else pip installs it."""
    folder = Path(os.environ.get("TEMPLATE_TOOLS") or tmp_path_factory.mktemp("tools"))
    if not (folder / FILE).is_file():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(folder),
            PACKAGE,
        ]
        installed = subprocess.run(command, capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"pip cannot install {PACKAGE}: {installed.stderr[-300:]}")
    functions = [
        node
        for node in ast.parse((folder / FILE).read_text()).body
        if isinstance(node, ast.FunctionDef)
        and ("cross_entropy" in node.name or node.name == "_kl_divergence")
    ]
    names: dict[str, Any] = {"torch": torch, "F": F, "Optional": Optional}
    exec(compile(ast.Module(functions, []), str(FILE), "exec"), names)
    return names


@pytest.mark.parametrize(("kind", "alpha"), [("dft", 1.0), ("eaft", 1.0), ("eaft", 0.5)])
def test_a_weighted_loss_is_llama_factorys(theirs: dict[str, Any], kind: Any, alpha: float) -> None:
    hidden, weight, bias, labels = problem()
    sources, count = [hidden, weight, bias], int((labels != -100).sum())
    more = {"alpha": alpha} if kind == "eaft" else {}
    expected = theirs[f"_{kind}_cross_entropy"](
        F.linear(hidden, weight, bias), labels, torch.tensor(count), **more
    )
    chunks = ChunkOptions(tokens=7, weigh=TokenWeights(kind, alpha))
    found = linear_cross_entropy(HeadProduct(hidden, weight, bias), labels, chunks) / count
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, sources), torch.autograd.grad(expected, sources)
    )


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_axolotls_eaft_is_llama_factorys_without_the_division(
    request: pytest.FixtureRequest, tmp_path: Path, alpha: float
) -> None:
    """Its loss is ours times 3 ** alpha; gradients are clipped at the bound over the same."""
    names: dict[str, Any] = {}
    templates: Path = request.getfixturevalue("axolotls")
    source = templates.parents[2] / "monkeypatch" / "loss" / "eaft.py"
    exec(compile(source.read_text(), str(source), "exec"), names)
    path = tmp_path / "eaft.yaml"
    file = {"base_model": "org/model", "datasets": [{"path": "a/rows", "type": "chat_template"}]}
    path.write_text(yaml.safe_dump(file | {"use_eaft": True, "eaft_alpha": alpha}))
    recipe = convert_file(path).recipe
    assert recipe["max_grad_norm"] == pytest.approx(1.0 / 3**alpha)
    hidden, weight, bias, labels = problem()
    sources, count = [hidden, weight, bias], int((labels != -100).sum())
    # which compares a token's logits with the next token
    outputs = SimpleNamespace(logits=F.pad(F.linear(*sources), (0, 0, 0, 1))[None])
    expected = names["eaft_loss"](outputs, F.pad(labels, (1, 0))[None], count, alpha=alpha)
    chunks = ChunkOptions(tokens=7, weigh=TokenWeights("eaft", recipe["eaft_alpha"]))
    found = (
        3**alpha * linear_cross_entropy(HeadProduct(hidden, weight, bias), labels, chunks) / count
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, sources), torch.autograd.grad(expected, sources)
    )


def test_asft_is_a_distillation_from_the_model_before_training(
    theirs: dict[str, Any], tmp_path: Path
) -> None:
    """Their dft + asft_alpha x KL is ours times 1 + asft_alpha; gradients are clipped at the bound over the same."""
    path = tmp_path / "asft.yaml"
    file = {"model_name_or_path": "org/model", "stage": "sft", "do_train": True, "finetuning_type": "full",
            "template": "qwen", "dataset": "rows", "use_asft_loss": True, "asft_alpha": 0.05}  # fmt: skip
    path.write_text(yaml.safe_dump(file))
    recipe = convert_file(path).recipe
    assert (recipe["method"], recipe["teacher_model_name_or_path"], recipe["token_loss"]) == (
        "distill",
        "org/model",
        "dft",
    )
    assert recipe["max_grad_norm"] == pytest.approx(1.0 / 1.05)
    path.write_text(yaml.safe_dump(file | {"gradient_accumulation_steps": 4}))
    # no loss of a compute_loss_func is divided by it in Trainer's training_step
    assert convert_file(path).recipe["max_grad_norm"] == pytest.approx(1.0 / 1.05 / 4)
    hidden, weight, bias, labels = problem()
    sources, count = [hidden, weight, bias], int((labels != -100).sum())
    before = weight.detach() + 0.3 * torch.randn_like(weight), bias.detach()
    reference = F.linear(hidden.detach(), *before)
    expected = theirs["_asft_cross_entropy"](F.linear(*sources), labels, reference, asft_alpha=0.05)
    options = DivergenceOptions(recipe["distill_beta"], 1.0, recipe["distill_alpha"])
    teacher = TeacherScores(hidden.detach(), *before, LogitTransform())
    chunks = ChunkOptions(weigh=TokenWeights("dft"))
    sums = linear_divergence(HeadProduct(hidden, weight, bias), labels, teacher, options, chunks)
    found = 1.05 * sums[0] / count
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, sources), torch.autograd.grad(expected, sources)
    )
