"""Masked diffusion: the loss of LLaDA (arXiv:2502.09992) and of Axolotl, and the same on every layout, packed and padded."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import finetune
from finetune.config.methods import METHODS
from finetune.config.schema import Data, DatasetSource
from finetune.data.data_report import select_examples
from finetune.data.examples import make_generator
from finetune.data.packing import BatchConfig, make_batches, make_filler
from finetune.data.tokenizer import find_mask_id
from finetune.errors import UserError
from finetune.inference.inputs import find_model, refuse_other_use
from finetune.models import attention_kernels
from finetune.training.objectives.masked_diffusion import MaskedDiffusion
from tests.conftest import make_chat, make_model, make_tokenizer, slow_but
from tests.cuda_without_gpu.varlen_on_cpu import register_cpu_kernels, takes_varlen
from tests.data.world import Rank, store_of
from tests.models.families import build, gradients, ours, relative_error
from tests.session_on_ranks import ROWS
from tests.training.documents import collate, examples_of, held_out, train_kinds, train_plainly
from tests.training.layouts import (
    assert_last_step_again_is_bit_equal,
    steps_of,
    train_all,
    write_config,
    write_recipe,
)

MASK, EPS, SEED, STEP = 2, 0.05, 11, 4
LENGTHS = (13, 1, 22, 7, 8, 5)
MODEL = {"num_hidden_layers": 2, "hidden_size": 72, "tie_word_embeddings": True}
STEPS = 4


def draw(example_id: int, length: int, noise: str = str(STEP)) -> tuple[float, np.ndarray]:
    """(t, a number from 0 to 1 for each token) of a document."""
    random = make_generator(SEED, f"mask {noise}", example_id)
    return random.random(), random.random(length)


def mask(ids: torch.Tensor, labels: torch.Tensor, t: float, u: np.ndarray, eps: float = EPS) -> tuple[torch.Tensor, torch.Tensor, float]:  # fmt: skip
    """(noisy ids, bool: which tokens are masked, with which probability), as the paper's appendix A has it."""
    p = (1 - eps) * t + eps
    is_trained = F.pad(labels[:-1] != -100, (1, 0))
    is_masked = torch.from_numpy(u < p) & is_trained
    return torch.where(is_masked, MASK, ids), is_masked, p


def full_mask(length: int) -> torch.Tensor:
    """Of transformers: what is added to the scores of a document that sees itself whole."""
    return torch.zeros(1, 1, length, length)


def plain_loss(model: Any, examples: list[Any]) -> torch.Tensor:
    """The paper's, one document at a time through transformers' own forward, whose states before a token predict it."""
    total = torch.zeros(())
    for number, example in enumerate(examples):
        ids, labels = (
            torch.from_numpy(each).long() for each in (example.input_ids, example.labels)
        )
        noisy, is_masked, p = mask(ids, labels, *draw(number, len(ids)))
        logits = model(
            input_ids=noisy[None], attention_mask=full_mask(len(ids)), use_cache=False
        ).logits[0]
        shifted = torch.cat([logits[:1], logits[:-1]])
        losses = F.cross_entropy(shifted[is_masked].float(), ids[is_masked], reduction="none")
        total = total + (losses / p).sum()
    return total


def measure(model: Any, batch: Any, **keys: Any) -> Any:
    objective = MaskedDiffusion(MASK, EPS, SEED, **keys)
    return objective.measure(model, batch, batch.inputs, SimpleNamespace(draws=str(STEP)))  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("overlength", ["split", "truncate"])
def test_every_token_that_the_loss_is_divided_by_can_be_masked(
    packing: bool, overlength: Literal["split", "truncate"]
) -> None:
    store = store_of([list(range(10, 24)), list(range(10, 16)), list(range(10, 14))])
    masks = METHODS["masked_diffusion"].masks
    data = Data(max_length=5, overlength=overlength)
    examples, _ = select_examples(store, DatasetSource(path="p"), data, masks)
    config = BatchConfig(seed=1, packing=packing, max_length=5, global_batch_size=8)
    objective = MaskedDiffusion(MASK, 1.0, SEED)  # masks every token that can be
    (batch,) = make_batches(examples, config, Rank(), 8).batches()
    masked = 0
    for micro_batch in batch.micro_batches:
        is_drawn, _ = objective.draw(micro_batch, "0")
        masked += int((is_drawn & (micro_batch.labels != -100)).sum())
    assert masked == batch.trained_tokens > 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "granite"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_loss_and_gradients_are_those_of_transformers_under_a_full_mask(family: str, is_packed: bool) -> None:  # fmt: skip
    """Softcapped scores (gemma2) and sinks (gpt_oss) too; windows are wider than the documents."""
    config = {"gemma2": {"sliding_window": 64}, "gpt_oss": {"sliding_window": 64}}.get(family, {})
    model, examples = build(family, **config), examples_of(LENGTHS)
    model.set_attn_implementation("eager")
    true_loss = plain_loss(model, examples)
    true_gradients = gradients(model, true_loss)
    ours(model)
    measured = measure(model, collate(examples, is_packed=is_packed))
    assert measured.loss_sum.item() == pytest.approx(true_loss.item(), rel=1e-6)
    found = gradients(model, measured.loss_sum)
    assert found.keys() == true_gradients.keys()
    worst = max((relative_error(found[name], true_gradients[name]), name) for name in found)
    assert worst[0] <= 2e-5, worst


@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_the_kernel_of_cuda_sees_all_of_a_document(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own operator with a kernel for the CPU, forward and backward."""
    register_cpu_kernels()
    calls = []

    def takes(*arguments: Any) -> bool:
        calls.append(arguments)
        return takes_varlen(*arguments)

    monkeypatch.setattr(attention_kernels, "_can_use_varlen", takes)
    model, examples = build(family), examples_of(LENGTHS)
    model.set_attn_implementation("eager")
    true_loss = plain_loss(model, examples)
    true_gradients = gradients(model, true_loss)
    ours(model)
    measured = measure(model, collate(examples, is_packed=True))
    assert calls and measured.loss_sum.item() == pytest.approx(true_loss.item(), rel=1e-6)
    found = gradients(model, measured.loss_sum)
    assert max(relative_error(found[name], true_gradients[name]) for name in found) <= 2e-5


def test_a_token_sees_what_is_after_it_in_its_own_document_alone() -> None:
    model, examples = ours(build("llama")).eval(), examples_of((9, 12))
    batch = collate(examples, is_packed=True)
    visible = {"visible_tokens": batch.token_mask, "head_function": lambda head, hidden, *_: hidden}

    def states(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(**batch.inputs | {"input_ids": ids} | visible)

    changed = batch.input_ids.clone()
    changed[0, 8] += 1  # the last of the first document
    before, after = states(batch.input_ids), states(changed)
    differs = (before != after).any(-1)
    assert differs[:9].all() and not differs[9:].any()


def test_noise_is_of_the_document_whatever_lies_beside_it_and_stays_for_held_out_data() -> None:
    examples = examples_of(LENGTHS)
    objective = MaskedDiffusion(MASK, EPS, SEED)
    together, _ = objective.draw(collate(examples, is_packed=True), "3")
    alone, weights = objective.draw(collate(examples[2:3], is_packed=False, first=2), "3")
    assert torch.equal(alone[0, :22], together[0, 14:36]) and alone.any()
    t, u = draw(2, 22, "3")
    p = EPS + (1 - EPS) * t
    assert torch.equal(alone[0, :21], torch.from_numpy(u[1:] < p)) and not alone[0, 21]
    assert weights[0, 0].item() == pytest.approx(1 / p)
    other, _ = objective.draw(collate(examples[2:3], is_packed=False, first=2), "4")
    assert not torch.equal(other, alone)
    model = ours(build("llama"))
    losses = [
        objective.for_evaluation()
        .measure(model, batch, batch.inputs, SimpleNamespace(draws=str(step)))
        .loss_sum  # type: ignore[arg-type]
        for step, batch in (
            (0, collate(examples, is_packed=True)),
            (7, collate(examples, is_packed=True)),
        )
    ]
    assert losses[0].item() == losses[1].item()


def test_a_filler_takes_part_and_adds_nothing() -> None:
    model = ours(build("llama"))
    for is_packed in (True, False):
        measured = measure(model, make_filler(is_packed))
        measured.loss_sum.backward()
        assert measured.loss_sum.item() == 0.0
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        model.zero_grad()


# Axolotl's own code, from its source package.
@pytest.fixture(scope="module")
def axolotl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its trainer; TEMPLATE_TOOLS names a folder with it installed, else pip installs it."""
    folder = Path(os.environ.get("TEMPLATE_TOOLS") or tmp_path_factory.mktemp("axolotl"))
    trainer = folder / "axolotl" / "core" / "trainers" / "diffusion_lm"
    if not trainer.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-requires-python", "--target", str(folder), "axolotl==0.21.0"]  # fmt: skip
        installed = subprocess.run(command, capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"pip cannot install axolotl: {installed.stderr[-300:]}")
    return trainer


def take_functions(file: Path, names: tuple[str, ...], known: dict[str, Any]) -> dict[str, Any]:
    """The functions and methods of a file by name, without what it imports."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef) and node.name in names]  # fmt: skip
    exec(compile(ast.Module(nodes, []), str(file), "exec"), known)
    return known


@pytest.mark.slow
@pytest.mark.parametrize("length", [22, 16, 40])
def test_axolotls_own_trainer_computes_the_loss_of_a_document(axolotl: Path, length: int, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    spec = importlib.util.spec_from_file_location("full_sequence", axolotl / "backends" / "full_sequence.py")  # fmt: skip
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (example,) = examples_of((length,))
    ids = torch.from_numpy(example.input_ids).long()[None]
    labels = F.pad(torch.from_numpy(example.labels[:-1]).long(), (1, 0), value=-100)[None]
    t, u = draw(0, length)
    numbers = iter([torch.tensor([t]), torch.from_numpy(u)[None]])
    monkeypatch.setattr(torch, "rand", lambda *_, **__: next(numbers))
    model = build("llama")
    model.set_attn_implementation("sdpa")
    settings = SimpleNamespace(eps=EPS, importance_weighting=True)
    backend = module.FullSequenceBackend(mask_token_id=MASK)
    known = take_functions(
        axolotl / "trainer.py",
        ("normalized_sft_loss", "_compute_diffusion_loss"),
        {"torch": torch, "F": F, "nn": torch.nn, "Any": Any, "get_diffusion_config": lambda _: settings, "Literal": Literal},
    )  # fmt: skip
    said: dict[str, Any] = {}
    trainer = SimpleNamespace(
        axolotl_cfg=SimpleNamespace(datasets=None),
        _forward_process=lambda input_ids, seen, given, eps: backend.corrupt(input_ids, seen, given, eps),
        _full_sequence_backend=lambda: backend,
        store_metrics=lambda metrics, train_eval: said.update(metrics),
    )  # fmt: skip
    loss, _ = known["_compute_diffusion_loss"](trainer, model, ids, torch.ones_like(ids), labels)
    true_gradients = gradients(model, loss)
    ours(model)
    measured = measure(model, collate([example], is_packed=True))
    count = int((labels != -100).sum())
    assert (measured.loss_sum / count).item() == pytest.approx(loss.item(), rel=1e-6)
    found = gradients(model, measured.loss_sum / count)
    assert max(relative_error(found[name], true_gradients[name]) for name in found) <= 2e-5
    masked, plain = measured.metrics["mask_ratio"][0], measured.metrics["masked_loss"]
    assert said["num_masked_tokens"][0] == masked.item() > 0
    assert (plain[0] / plain[1]).item() == pytest.approx(said["ce_loss"], rel=1e-6)


# A run.
KEYS: dict[str, Any] = {"method": "masked_diffusion", "mask_token": "<|system|>", "mask_eps": EPS, "seed": SEED, "max_length": 128, "global_batch_size": 6, "max_steps": STEPS}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": True, "global_batch_size": 3},
    "lora": {"use_peft": True, "lora_r": 4},
}
RUNS = {  # name -> kind, layout, ranks
    "padded": ("padded", "single", 1),
    "packed": ("packed", "single", 1),
    "packed-ddp": ("packed", "ddp", 2),
    "padded-ddp": ("padded", "ddp", 2),
    "packed-fsdp2": ("packed", "full_shard", 2),
    "packed-fsdp1": ("packed", "FULL_SHARD", 2),
    "lora": ("lora", "single", 1),
    "lora-fsdp2": ("lora", "full_shard", 2),
    "packed-tp": ("packed", "tp_size", 2),
}
QUICK = ("padded", "packed", "packed-fsdp2")
MEASURED = ("padded", "packed", "packed-fsdp2")  # on held-out data too


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    model, data = make_model(folder / "model", **MODEL), make_chat(folder / "chat.jsonl", rows=26)
    return {
        kind: write_recipe(folder / f"{kind}.yaml", model, data, **KEYS | keys)
        for kind, keys in KINDS.items()
    }


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Path:
    wanted = {name: RUNS[name] for name in (RUNS if slow_too else QUICK)}
    train_kinds(folder, recipes, wanted, measured=MEASURED)
    return folder


def masked_loss(_recipe: Any, tokenizer: Any, model: Any, example: Any, number: int, step: int) -> torch.Tensor:  # fmt: skip
    """fp32[1]: a document's loss by transformers' forward under a full mask."""
    ids, labels = (torch.from_numpy(each.astype("int64")) for each in (example.input_ids, example.labels))  # fmt: skip
    _, is_masked, p = mask(ids, labels, *draw(number, len(ids), str(step)))
    noisy = torch.where(is_masked, tokenizer.convert_tokens_to_ids("<|system|>"), ids)
    logits = model(input_ids=noisy[None], attention_mask=full_mask(len(ids)), use_cache=False).logits[0]  # fmt: skip
    losses = F.cross_entropy(logits[:-1], ids[1:], reduction="none")[is_masked[1:]]
    return losses.sum()[None] / p


Steps = list[tuple[float, list[float], float]]


@pytest.fixture(scope="module")
def expected(recipes: dict[str, Path], slow_too: bool) -> dict[str, Steps]:
    kinds = {RUNS[name][0] for name in (RUNS if slow_too else QUICK)}
    return {kind: train_plainly(recipes[kind], STEPS, masked_loss) for kind in kinds}


@pytest.mark.parametrize("name", slow_but(QUICK, RUNS))
def test_every_layout_gives_the_losses_of_a_plain_loop(name: str, runs: Path, expected: dict[str, Steps]) -> None:  # fmt: skip
    lines = steps_of(runs / f"run-{name}")
    for line, (loss, _, norm) in zip(lines, expected[RUNS[name][0]], strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_held_out_loss_is_the_same_on_one_rank_and_two_packed_and_padded(runs: Path) -> None:
    two, alone = held_out(runs / "run-packed-fsdp2"), held_out(runs / "run-packed")
    assert len(alone) == 3 and two == pytest.approx(alone, rel=1e-5)
    assert held_out(runs / "run-padded")[0] == pytest.approx(alone[0], rel=1e-6)
    assert alone[-1] < alone[0]


def test_a_resumed_run_is_bit_equal(runs: Path) -> None:
    recipe = runs / "again.yaml"
    recipe.write_text((runs / "run-packed" / "recipe.yaml").read_text())
    assert_last_step_again_is_bit_equal(runs / "run-packed", recipe, runs, STEPS)


def test_a_mask_token_is_named_by_text_or_id_and_else_refused() -> None:
    tokenizer = make_tokenizer()
    named = tokenizer.convert_tokens_to_ids("<|system|>")
    assert find_mask_id(tokenizer, "<|system|>") == find_mask_id(tokenizer, named) == named
    for wrong in (None, "<|nowhere|>", len(tokenizer), -1):
        with pytest.raises(UserError, match="added_tokens"):
            find_mask_id(tokenizer, wrong)
    tokenizer.add_special_tokens({"mask_token": "<|user|>"})
    assert find_mask_id(tokenizer, None) == tokenizer.convert_tokens_to_ids("<|user|>")


def test_an_export_is_a_plain_model_and_no_command_samples_from_it(runs: Path, folder: Path, recipes: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    out = folder / "exported"
    said = train_all(folder, [(recipes["packed"], write_config(folder, "single"), [f"output_dir={out}", "export_at_end=True", "max_steps=1"])], ranks=1)  # fmt: skip
    assert "text-generation" not in said and "vllm" not in said
    card = (out / "export" / "README.md").read_text()
    assert "do not sample from it" in card and "pipeline_tag" not in card
    config = json.loads((out / "export" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(UserError, match="fills in masked tokens"):
        refuse_other_use(find_model(str(out)))


def test_a_session_trains_on_rows_and_refuses_what_reads_from_left_to_right(
    tmp_path: Path, tiny_recipe: Callable[..., Path]
) -> None:
    path = tiny_recipe(method="masked_diffusion", mask_token="<|system|>")
    with finetune.Session(str(path), str(write_config(tmp_path, "single"))) as session:
        losses = []
        for _ in range(2):
            losses.append(session.forward_backward(ROWS).loss)
            gradients = session.take_gradients()
        assert losses[0] == losses[1] > 0  # the noise of a step's first batch
        session.give_gradients(gradients)
        session.optim_step()
        assert session.forward_backward(ROWS).loss != losses[0]
        for call in (
            lambda: session.sample(["Hi"]),
            lambda: session.log_probabilities(session.batch(ROWS)),
            lambda: session.forward_backward(ROWS, lambda found, _: -found.sum()),
        ):
            with pytest.raises(UserError, match="from both sides"):
                call()
