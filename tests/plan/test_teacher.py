"""The plan of a distillation: the teacher's weights, its forward, the logits that meet, and its share of the time."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from finetune.cli import main
from finetune.config.layout import Sharding
from finetune.config.schema import Method, Quantization
from finetune.models.log_probabilities import DivergenceOptions, TeacherScores, linear_divergence
from finetune.models.loss_chunks import ChunkOptions, HeadProduct, LogitTransform
from finetune.plan.architecture import read_architecture
from finetune.plan.loss_memory import loss_bytes
from finetune.plan.peaks import plan_phases
from finetune.plan.run_spec import RunSpec, TeacherSpec
from finetune.plan.speed import estimate_speed
from tests.conftest import slow_but
from tests.plan.run_specs import FULL_SHARD, LLAMA_31_8B, LLAMA_31_70B, make_spec
from tests.plan.traced import allocated_peak

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def with_teacher(
    spec: RunSpec, config: dict[str, Any], quantization: Quantization | None = None, **keys: Any
) -> RunSpec:
    teacher = TeacherSpec(
        architecture=read_architecture(config, "config.json"),
        quantization=quantization or Quantization(),
    )
    return replace(
        spec, teacher=teacher, recipe=replace(spec.recipe, method=Method(method="distill", **keys))
    )


# a CPU without AVX-512 multiplies bf16 slowly
@pytest.mark.parametrize("dtype", slow_but([torch.float32], [torch.float32, torch.bfloat16]))
def test_the_loss_takes_what_it_allocates(
    dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {}
    for family, vocabulary, rows, tokens, beta, temperature, alpha in (
        ("llama", 12_000, 12_000, 1024, 0.5, 1.0, 0.5),
        ("llama", 12_000, 12_064, 512, 0.0, 1.0, 1.0),
        ("llama", 12_000, 12_000, 1024, 1.0, 2.0, 0.5),
        ("llama", 32_000, 32_000, 256, 0.0, 0.7, 1.0),
        ("gemma2", 12_000, 12_000, 512, 0.0, 0.7, 0.5),
    ):
        config = {"model_type": family, **SMALL, "vocab_size": vocabulary}
        logits = LogitTransform(softcap=30.0 if family == "gemma2" else None)
        sharding = Sharding(
            layout="fsdp2", mixed_precision="no" if dtype == torch.float32 else "bf16"
        )
        spec = replace(
            make_spec(config, ranks=1, sharding=sharding, max_length=tokens), device="cpu"
        )
        wide = config | {"vocab_size": rows, "hidden_size": 96}
        spec = with_teacher(
            spec, wide, distill_beta=beta, temperature=temperature, distill_alpha=alpha
        )
        hidden, head = torch.randn(tokens, 64).to(dtype), torch.randn(vocabulary, 64).to(dtype)
        labels, own = torch.randint(0, vocabulary, (tokens,)), torch.randn(rows, 96).to(dtype)
        product = HeadProduct(hidden.requires_grad_(), head.requires_grad_())

        def run() -> None:
            scores = TeacherScores(torch.randn(tokens, 96).to(dtype), own, None, logits)  # noqa: B023
            options = DivergenceOptions(beta, temperature, alpha)  # noqa: B023
            linear_divergence(product, labels, scores, options, ChunkOptions(logits))  # noqa: B023

        errors[family, vocabulary, tokens, beta, temperature, alpha] = (
            loss_bytes(spec) / allocated_peak(run) - 1
        )
    worst = max(errors, key=lambda case: abs(errors[case]))
    with capsys.disabled():
        print(
            f"\ndivergence: worst error {errors[worst]:+.1%} (family, vocabulary, tokens, beta, temperature, alpha {worst})"
        )
    assert abs(errors[worst]) < 0.02, errors


def test_the_teachers_weights_are_those_of_the_model_that_transformers_builds() -> None:
    from finetune.models.load import build_on_meta

    for tied in (False, True):
        sizes = {
            "model_type": "qwen3",
            **SMALL,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 512,
        }
        model = build_on_meta(
            AutoConfig.for_model(**sizes, tie_word_embeddings=tied), torch.bfloat16
        )
        spec = with_teacher(make_spec(LLAMA_31_8B, ranks=1), sizes | {"tie_word_embeddings": tied})
        built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert {tensor.name: tensor.shape for tensor in spec.teacher_tensors} == built
        assert spec.teacher_bytes == sum(2 * parameter.numel() for parameter in model.parameters())


def test_ddps_buckets_are_there_in_every_phase_and_in_the_teachers_forward() -> None:
    few = {"vocab_size": 512}
    alone = make_spec(
        SMALL | few | {"model_type": "llama"}, ranks=2, sharding=Sharding(layout="ddp")
    )
    spec = with_teacher(alone, LLAMA_31_8B | few)
    phases = {phase.name: phase.peak for phase in plan_phases(spec)}
    assert phases["evaluation"].name == "forward of the teacher"
    assert {peak.communication for peak in phases.values()} == {4 * spec.trained_numel}


def test_a_teacher_adds_its_shards_its_forward_and_its_time() -> None:
    alone = make_spec(LLAMA_31_8B, ranks=8, max_length=4096)
    spec = with_teacher(alone, LLAMA_31_70B)
    phases = {phase.name: phase.peak for phase in plan_phases(spec)}
    assert all(peak.teacher == spec.teacher_bytes for peak in phases.values())
    assert spec.teacher_bytes == pytest.approx(70.55e9 * 2 / 8, rel=1e-3)
    before = {phase.name: phase.peak for phase in plan_phases(alone)}
    assert phases["save"].total == before["save"].total + spec.teacher_bytes
    evaluation, heads = phases["evaluation"], 128256 * (4096 + 8192)
    assert (
        evaluation.name == "a held-out batch"
    )  # both heads, in bf16, each with its all-gather's buffer
    assert evaluation.gathered == pytest.approx(2 * 2 * heads, rel=1e-3)
    few = {"vocab_size": 512}
    deep = with_teacher(
        make_spec(SMALL | few | {"model_type": "llama"}, ranks=8), LLAMA_31_70B | few
    )
    forward = next(phase.peak for phase in plan_phases(deep) if phase.name == "evaluation")
    assert (
        forward.name == "forward of the teacher"
    )  # a layer of 0.856 billion numbers, and the buffers of its all-gather and the next one's
    assert forward.gathered == pytest.approx(3 * 2 * 0.856e9, rel=1e-2)
    assert phases["steady step"].total > before["steady step"].total + spec.teacher_bytes

    in_4_bits = with_teacher(alone, LLAMA_31_70B, Quantization(load_in_4bit=True))
    assert 0.28 < in_4_bits.teacher_bytes / spec.teacher_bytes < 0.32
    offloaded = replace(spec, sharding=replace(FULL_SHARD, cpu_offload=True))
    assert all(phase.peak.teacher == 0 for phase in plan_phases(offloaded))

    teachers = 2 * (70.55e9 - 128256 * 8192) + 4 * 80 * 64 * 128 * 4096  # a forward: 2N + 4LHQT
    added = estimate_speed(spec, 0.4).flop_per_token - estimate_speed(alone, 0.4).flop_per_token
    assert added == pytest.approx(teachers, rel=1e-3)


def test_the_command_shows_it_and_refuses_what_the_run_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoConfig.for_model(**LLAMA_31_8B, dtype="bfloat16").save_pretrained(tmp_path)
    command = ["plan", "--recipe", "quickstart", "--num-processes", "2", "method=distill"]
    assert main([*command, f"teacher_model_name_or_path={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert f"teacher    {tmp_path}: llama, 8.03 B parameters, frozen in bfloat16" in shown
    assert "GiB on one rank  weights  teacher  " in shown
    assert main([*command, f"teacher_model_name_or_path={tmp_path}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["teacher_parameters"] == 8_030_261_248

    assert (
        main([*command, f"teacher_model_name_or_path={tmp_path}", "--config", "fsdp1_full_shard"])
        == 2
    )
    assert "method: distill cannot be combined with fsdp_version: 1" in capsys.readouterr().err
    assert main([*command, "teacher_model_name_or_path=runs/quickstart_x/export"]) == 2
    assert (
        "teacher_model_name_or_path: runs/quickstart_x/export: no such folder: runs/quickstart_x has not been"
        in capsys.readouterr().err
    )
