"""The plan of sampling: its cache and its forwards beside what the engine allocates."""

from collections.abc import Mapping
from itertools import accumulate, product
from types import MappingProxyType
from typing import Any

import pytest
import torch

from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.models.decoder_layers import checkpoint_activations
from finetune.models.documents import install_attention
from finetune.models.gating import install_gating
from finetune.plan.activations import kept_bytes, recomputed_bytes, working_bytes
from finetune.plan.architecture import read_architecture
from finetune.plan.forward_memory import _most_prompts
from finetune.plan.peaks import plan_phases
from finetune.plan.plan import make_plan
from finetune.plan.run_spec import RunSpec
from finetune.rollout.embedded import EmbeddedEngine
from finetune.rollout.engine import Request, Sampling
from tests.plan.traced import allocated_peak

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
# (vocabulary, prompts, generations, prompt tokens, completion tokens): a large cache; many prompts; long ones; large logits.
CASES = [
    (512, 2, 16, 64, 64),
    (512, 32, 2, 64, 64),
    (512, 40, 2, 192, 32),
    (24_000, 4, 8, 48, 16),
    (2048, 4, 4, 16, 72),
]
QUICK = [CASES[0], CASES[3]]
HELD_OUT = 40  # prompts


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_sampling_takes_what_it_allocates(
    case: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    _, prompts, generations, tokens, _ = case
    requests = [
        Request(tuple(range(i, i + tokens)), (i, j))
        for i in range(prompts)
        for j in range(generations)
    ]
    planned, taken = _plan_and_sample(case, "rollout", requests)
    with capsys.disabled():
        print(
            f"\nsampling {case}: planned {planned / 2**20:.1f} MiB, taken {taken / 2**20:.1f}, {planned / taken - 1:+.1%}"
        )
    assert planned == pytest.approx(taken, rel=0.02)


@pytest.mark.parametrize("tokens, most", [(64, 64), pytest.param(192, 32, marks=pytest.mark.slow)])
def test_an_evaluation_samples_one_completion_of_each_of_more_prompts_than_a_step_has(
    tokens: int, most: int
) -> None:
    case = (512, 2, 16, tokens, most)  # a step has two prompts
    requests = [Request(tuple(range(i, i + tokens)), (i, 0)) for i in range(HELD_OUT)]
    planned, taken = _plan_and_sample(case, "evaluation", requests)
    assert planned == pytest.approx(taken, rel=0.1)


def test_completions_sampled_together_may_begin_within_a_prompts_completions() -> None:
    """Of four at once, the second four are the last two of one prompt and the first two of another."""
    requests = [Request(tuple(range(i, i + 64)), (i, j)) for i in range(2) for j in range(6)]
    planned, taken = _plan_and_sample((512, 2, 6, 64, 8), "rollout", requests, together=4)
    assert planned == pytest.approx(taken, rel=0.1)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_prompts_of_a_model_with_sliding_windows_are_read_together_under_masks(family: str) -> None:
    """All 32 prompts of 64 completions, though a model without windows reads 16 at a time."""
    requests = [
        Request(tuple(range(i, i + 96 + i % 2)), (i, j)) for i in range(32) for j in range(2)
    ]
    window = {"model_type": family, "sliding_window": 48, "head_dim": 32}
    planned, taken = _plan_and_sample((512, 32, 2, 97, 8), "rollout", requests, family=window)
    assert 1 <= planned / taken < 1.3


def test_a_plan_says_that_the_states_of_recurrent_layers_are_not_counted() -> None:
    keys = [
        *("model_config={model_type: lfm2, num_hidden_layers: 2, hidden_size: 64}",),
        *("tokenizer_name_or_path=a/b", "datasets=[{path: a/b}]", "method=grpo"),
        *("rewards=[length]", "dtype=bfloat16"),
    ]
    layout = Sharding(layout="single", mixed_precision="no")
    plan = make_plan(read_recipe(None, keys), layout, ranks=1)
    assert any("recurrent layers keep a state of each completion" in each for each in plan.remarks)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_repeats_the_keys_and_values_of_a_shared_prompt(checkpointing: bool) -> None:
    """For each of 16 short completions, in a row that they fill with their prompt."""
    from transformers import AutoConfig, AutoModelForCausalLM

    prompt, completion, generations = 448, 4, 16
    tokens = prompt + generations * completion
    config = {"model_type": "llama", **WIDE, "num_key_value_heads": 8, "vocab_size": 64}
    keys = [
        *("model_name_or_path=a/b", "datasets=[{path: a/b}]", "method=grpo", "rewards=[length]"),
        *(f"num_generations={generations}", f"max_completion_length={completion}"),
        *(f"max_length={prompt + completion}", "global_batch_size=1"),
    ]
    layout = Sharding(layout="single", mixed_precision="no", activation_checkpointing=checkpointing)
    spec = RunSpec(
        architecture=read_architecture(config, "config.json"),
        recipe=read_recipe(None, keys),
        sharding=layout,
        ranks=1,
        device="cpu",
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).train()
    install_attention(model)
    install_gating(model)
    if checkpointing:
        checkpoint_activations(model, 1)
    lengths = (prompt, *[completion] * generations)
    starts = (0, *[prompt] * generations)
    pairs = zip(starts, lengths, strict=True)
    inputs = {
        "input_ids": torch.zeros(1, tokens, dtype=torch.int64),
        "position_ids": torch.cat([start + torch.arange(length) for start, length in pairs])[None],
        "cu_seq_lens": torch.tensor((0, *accumulate(lengths)), dtype=torch.int32),
        "max_document_length": prompt,
        "packed_lengths": lengths,
        "continued": (None, *[0] * generations),
    }
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    taken = allocated_peak(lambda: model.model(**inputs, use_cache=False)[0].sum().backward())
    layers = recomputed_bytes(spec.architecture, spec.computation)
    layers += sum(kept_bytes(spec.architecture, spec.computation).values())
    planned = tokens * (layers + working_bytes(spec.architecture, spec.computation))
    assert 1 <= planned / taken < 1.3


def test_the_prompts_of_any_completions_sampled_together_are_planned() -> None:
    """Counted from the shares that ranks sample (`sample_shares`) and the rows within them."""
    for ranks, prompts, generations, together in product((1, 2, 4), (4, 12), (2, 4, 6), (3, 4, 8)):
        recipe = read_recipe(
            None,
            [
                *("model_name_or_path=a/b", "datasets=[{path: a/b}]", "method=grpo"),
                *("rewards=[length]", f"num_generations={generations}"),
                *(f"global_batch_size={prompts}", f"per_device_generation_batch_size={together}"),
            ],
        )
        config = {"model_type": "llama", **WIDE, "vocab_size": 512}
        sharding = Sharding(layout="ddp", mixed_precision="no")
        spec = RunSpec(
            architecture=read_architecture(config, "config.json"),
            recipe=recipe,
            sharding=sharding,
            ranks=ranks,
        )
        size = prompts * generations // ranks
        counts = [
            len({completion // generations for completion in range(first, first + together)})
            for share in range(0, prompts * generations, size)
            for first in range(share, share + size - together + 1, together)
        ]
        if counts:
            planned = _most_prompts(spec, together, size, generations)
            assert max(counts) <= planned <= max(counts) + 1


def _plan_and_sample(
    case: tuple[int, ...],
    phase: str,
    requests: list[Request],
    together: int = 64,
    family: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[int, int]:
    """The bytes that the plan counts for sampling in `phase`, and those that `requests` take."""
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary, prompts, generations, tokens, most = case
    config: dict[str, Any] = {
        "model_type": "llama",
        **WIDE,
        "num_key_value_heads": 4,
        "vocab_size": vocabulary,
        **family,
    }
    keys = [
        "method=grpo",
        "rewards=[length]",
        f"num_generations={generations}",
        f"max_completion_length={most}",
        f"max_length={tokens + most}",
        f"global_batch_size={prompts}",
        f"per_device_generation_batch_size={together}",
        f"eval_split_size={HELD_OUT}",
    ]
    recipe = read_recipe(None, ["model_name_or_path=a/b", "datasets=[{path: a/b}]", *keys])
    sharding = Sharding(layout="single", mixed_precision="no")
    spec = RunSpec(
        architecture=read_architecture(config, "config.json"),
        recipe=recipe,
        sharding=sharding,
        ranks=1,
        device="cpu",
    )
    peak = next(planned.peak for planned in plan_phases(spec) if planned.name == phase)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    install_attention(model)

    class Alone:
        device = torch.device("cpu")

    # now and then a row ends
    engine = EmbeddedEngine(model, Alone(), [7], together)  # type: ignore[arg-type]
    taken = allocated_peak(lambda: engine.sample(requests, Sampling(max_tokens=most)))
    return peak.activations + peak.loss + peak.temporaries, taken
