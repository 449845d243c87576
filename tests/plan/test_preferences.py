"""The plan of preference training, against what its loss and a real step of it allocate."""

import json
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.config.layout import MixedPrecision, Sharding
from finetune.config.methods import Method
from finetune.config.schema import Data, DatasetSource, Lora
from finetune.constants import VALUE_WEIGHT
from finetune.data.batches import MicroBatch, StepBatch
from finetune.models.cross_entropy import CrossEntropyHead, install_loss
from finetune.models.decoder_layers import checkpoint_activations
from finetune.models.documents import install_attention
from finetune.models.gating import install_gating
from finetune.models.log_probabilities import head_log_probabilities, linear_log_probabilities
from finetune.models.lora import add_adapters
from finetune.models.loss_chunks import ChunkOptions, HeadProduct, LogitTransform
from finetune.models.value_head import head_log_probabilities_and_values
from finetune.plan.loss_memory import loss_backward_bytes, loss_bytes
from finetune.plan.peaks import plan_phases
from finetune.plan.run_spec import RunSpec
from finetune.plan.speed import estimate_epoch_tokens, estimate_speed
from finetune.plan.table import format_header, format_speed
from finetune.training.objectives.preference import PreferenceObjective, RatingObjective
from finetune.training.reference import without_adapters
from tests.conftest import slow_but
from tests.plan.run_specs import LLAMA_31_8B, make_spec
from tests.plan.test_activations import make_adapted_head
from tests.plan.traced import allocated_after, allocated_peak

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "head_dim": 16,
}  # fmt: skip
LENGTH = 256  # of each answer; a row holds two


def preferences(config: dict[str, Any], *, method: str = "dpo", **keys: Any) -> RunSpec:
    """A spec of preference training on a CPU."""
    spec = make_spec(config, ranks=1, **keys)
    return replace(spec, recipe=replace(spec.recipe, method=Method(method=method)), device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mixed_precision", "lora"),
    slow_but(
        [("no", True), ("no", False), ("bf16", False)], product(["bf16", "no"], [False, True])
    ),
)
def test_log_probabilities_allocate_what_is_planned(
    mixed_precision: MixedPrecision, lora: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one chunk of logits, in several, and in one that the product of the weight outweighs, forward and backward: nothing of
    the head's weight in the forward."""
    dtype, errors = {"bf16": torch.bfloat16, "no": torch.float32}[mixed_precision], {}
    for vocabulary, hidden, tokens in ((4096, 64, 1024), (32768, 64, 768), (4096, 1024, 256)):
        weight = torch.randn(vocabulary, hidden, dtype=dtype).requires_grad_(not lora)
        states = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
        labels, positions = torch.randint(0, vocabulary, (tokens,)), torch.arange(tokens)
        sharding = Sharding(layout="fsdp2", mixed_precision=mixed_precision)
        config = TINY | {"vocab_size": vocabulary, "hidden_size": hidden}
        spec = preferences(config, sharding=sharding, max_length=tokens // 2, lora=lora)
        assert spec.tokens == tokens, "each answer has max_length"
        found: list[torch.Tensor] = []

        def forward() -> None:
            found[:] = [linear_log_probabilities(HeadProduct(states, weight), labels, positions)]  # noqa: B023

        errors[vocabulary, "forward"] = loss_bytes(spec) / allocated_peak(forward) - 1
        # Of the forward, the hidden states' gradient and the trained positions lie there already.
        kept = states.numel() * dtype.itemsize * (1 if lora else 2)
        measured = kept + allocated_peak(found[0].sum().backward)
        errors[vocabulary, "backward"] = loss_backward_bytes(spec) / measured - 1
    worst = max(errors, key=lambda case: abs(errors[case]))
    with capsys.disabled():
        print(f"\nlog-probabilities: worst error {errors[worst]:+.1%} {worst}")
    assert abs(errors[worst]) < 0.02, errors


@pytest.mark.parametrize(
    ("method", "config", "logits"),
    [
        (Method(method="grpo", temperature=0.7), {}, LogitTransform(temperature=0.7)),
        (Method(method="dpo"), {"model_type": "granite", "logits_scaling": 8.0}, LogitTransform(1 / 8)),
        (Method(method="dpo"), {"model_type": "gemma2"}, LogitTransform(softcap=30.0)),
    ],
    ids=["temperature", "scale", "softcap"],
)  # fmt: skip
def test_what_turns_scores_into_logits_is_planned(
    method: Method, config: dict[str, Any], logits: LogitTransform
) -> None:
    sharding = Sharding(layout="fsdp2", mixed_precision="no")
    spec = preferences(TINY | config, sharding=sharding, max_length=LENGTH)
    spec = replace(spec, recipe=replace(spec.recipe, method=method))
    weight = torch.randn(4096, 64, requires_grad=True)
    states = torch.randn(spec.tokens, 64, requires_grad=True)
    labels, positions = torch.randint(0, 4096, (spec.tokens,)), torch.arange(spec.tokens)
    product, chunks, found = HeadProduct(states, weight), ChunkOptions(logits), []

    def forward() -> None:
        found[:] = [linear_log_probabilities(product, labels, positions, chunks)]

    assert loss_bytes(spec) == pytest.approx(allocated_peak(forward), rel=0.02)
    # Of the forward, the hidden states' gradient and the trained positions lie there already.
    measured = 2 * states.nbytes + allocated_peak(found[0].sum().backward)
    assert loss_backward_bytes(spec) == pytest.approx(measured, rel=0.02)


def test_the_backward_computes_the_chunks_again_for_an_adapted_head() -> None:
    lora = Lora(use_peft=True, lora_target_modules=("all-linear", "lm_head"))
    sharding = Sharding(layout="fsdp2", mixed_precision="no")
    spec = preferences(TINY, sharding=sharding, max_length=LENGTH)
    spec = replace(spec, recipe=replace(spec.recipe, lora=lora))
    head = make_adapted_head(torch.randn(4096, 64))
    states = torch.randn(spec.tokens, 64, requires_grad=True)
    labels, positions = torch.randint(0, 4096, (spec.tokens,)), torch.arange(spec.tokens)
    forward = partial(head, states, labels, positions, head_log_probabilities)
    measured = allocated_after(forward) + allocated_peak(forward().sum().backward)
    assert loss_backward_bytes(spec) == pytest.approx(measured, rel=0.02)


def test_the_gradient_of_a_critic_waits_for_that_of_the_log_probabilities() -> None:
    """With so few logits that the backward takes more than the forward."""
    sharding = Sharding(layout="fsdp2", mixed_precision="no")
    sizes = {"vocab_size": 64, "hidden_size": 256}
    spec = preferences(TINY | sizes, method="ppo", sharding=sharding, max_length=LENGTH, lora=True)
    head: Any = torch.nn.Linear(256, 64, bias=False).requires_grad_(False)
    head.__class__, head.logits = CrossEntropyHead, LogitTransform()
    setattr(head, VALUE_WEIGHT, torch.nn.Parameter(torch.randn(256)))
    states = torch.randn(spec.tokens, 256, requires_grad=True)
    labels, positions = torch.randint(0, 64, (spec.tokens,)), torch.arange(spec.tokens)

    def run() -> None:
        head_log_probabilities_and_values(head, states, labels, positions).sum().backward()

    assert loss_backward_bytes(spec) == pytest.approx(allocated_peak(run), rel=0.02)
    assert loss_backward_bytes(spec) > loss_bytes(spec)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_step_of_answers_allocates_what_is_planned(
    method: str, checkpointing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """LoRA: the forward of the reference, that of the model, and the backward; one packed row of two full answers. KTO trains on
    one of them."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    lora = Lora(use_peft=True, lora_r=8)
    config = {name: value for name, value in TINY.items() if name != "model_type"}
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=torch.float32)
    install_attention(model)
    install_loss(model)
    install_gating(model)
    add_adapters(model, lora, torch.float32)
    if checkpointing:
        checkpoint_activations(model, 1)
    model.train()
    tokens = 2 * LENGTH
    pair = MicroBatch(
        input_ids=torch.randint(3, 4096, (1, tokens)),
        labels=torch.randint(3, 4096, (1, tokens)),
        position_ids=torch.arange(LENGTH).repeat(2)[None],
        trained_positions=torch.arange(tokens),
        cu_seq_lens=torch.tensor([0, LENGTH, tokens], dtype=torch.int32),
        max_document_length=LENGTH,
        example_ids=(0, 1),
        trained_documents=torch.arange(2).repeat_interleave(LENGTH),
    )
    answer = replace(
        pair,
        input_ids=pair.input_ids[:, :LENGTH],
        labels=pair.labels[:, :LENGTH],
        position_ids=pair.position_ids[:, :LENGTH],
        trained_positions=torch.arange(LENGTH),
        cu_seq_lens=torch.tensor([0, LENGTH], dtype=torch.int32),
        example_ids=(0,),
        trained_documents=torch.zeros(LENGTH, dtype=torch.int64),
        desirable=torch.tensor([True]),
    )
    objectives: dict[str, Any] = {
        "dpo": PreferenceObjective(Method(method="dpo"), without_adapters),
        "kto": RatingObjective(Method(method="kto"), without_adapters, kl=torch.zeros(())),
    }
    batch = pair if method == "dpo" else answer
    step = StepBatch(0, 1.0, (batch,), tokens, tokens, chosen_tokens=LENGTH, groups=1)

    def run() -> None:
        loss: Any = objectives[method].measure(model, batch, batch.inputs, step).loss_sum
        loss.backward()

    run()  # what is allocated once, such as the rotary embedding
    for parameter in model.parameters():
        parameter.grad = None
    sharding = Sharding(
        layout="fsdp2", mixed_precision="no", activation_checkpointing=checkpointing
    )
    spec = preferences(TINY, method=method, sharding=sharding, max_length=LENGTH, lora=True)
    spec = replace(spec, recipe=replace(spec.recipe, lora=lora))
    phase = next(phase for phase in plan_phases(spec) if phase.name == "first step")
    planned = phase.peak.activations + phase.peak.loss + phase.peak.gradients
    measured = allocated_peak(run)
    with capsys.disabled():
        print(f"\na step of {method}: {planned / measured - 1:+.1%} at {phase.peak.name}")
    assert abs(planned / measured - 1) < 0.1, (planned, measured)


def test_an_epoch_reads_a_prompt_with_both_answers(tmp_path: Path) -> None:
    row = {"question": "a" * 400, "chosen": "b" * 40, "rejected": "c" * 80}
    turns = [{"role": "user", "content": "a" * 400}, {"role": "assistant", "content": "b" * 40}]
    for name, rows, texts in (
        ("texts", row, 400 + 40 + 400 + 80),
        ("messages", {"chosen": turns, "rejected": turns}, 2 * (400 + 40 + len("userassistant"))),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(10 * f"{json.dumps(rows)}\n")
        data = Data(datasets=(DatasetSource(path=str(path)),))
        assert estimate_epoch_tokens(data, "pairs") == pytest.approx(10 * texts / 4, abs=1)


def test_the_reference_costs_a_forward_of_each_step_or_one_of_the_data() -> None:
    for lora, modules, line, phases in (
        (True, (), "the model with its adapters off", 0),
        (True, ("lm_head",), "computed once before training", 1),
        (False, (), "computed once before training", 1),
    ):
        spec = preferences(LLAMA_31_8B, max_length=2048, lora=lora)
        spec = replace(
            spec,
            recipe=replace(spec.recipe, lora=replace(spec.recipe.lora, modules_to_save=modules)),
        )
        sft = replace(spec, recipe=replace(spec.recipe, method=Method()))
        header = format_header(spec, ranks_assumed=False)
        assert (
            line in header
            and "1 row x 4,096 tokens a step" in header
            and "method     dpo: a row holds pairs" in header
        )
        assert "reference" not in format_header(sft, ranks_assumed=False)
        assert [phase.name for phase in plan_phases(spec)].count("reference") == phases
        read = (10_000_000, 100)
        found, plain = estimate_speed(spec, 0.4, read), estimate_speed(sft, 0.4, read)
        forward = (
            2 * (spec.architecture.parameters - spec.architecture.embedding.numel)
            + 4 * 32 * 4096 * 2048
        )
        share = forward / (plain.flop_per_token + forward) if not phases else 0.0
        assert found.reference_share == pytest.approx(share) and (
            "33%" in format_speed(found, 1)
        ) == (lora and not phases)
        # 100 steps of 4,096 tokens come to fewer than an epoch has
        seconds = 100 * 4096 * forward / (0.4 * 989e12)
        assert found.reference_seconds == (pytest.approx(seconds) if phases else None)
    assert "reference" not in format_header(
        preferences(LLAMA_31_8B, method="orpo"), ranks_assumed=False
    )
