"""What a rank of a pipeline keeps, by plan, by autograd's own hooks, and by torch's own schedules."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.config.layout import split_layers
from finetune.config.reader import read_recipe
from finetune.config.schema import Lora, Model, PipelineSchedule
from finetune.distributed.model_parts import decoder_layers
from finetune.distributed.pipeline import _count_matrix_numbers, find_pipeline, keep_own_layers
from finetune.errors import UserError
from finetune.models.cross_entropy import install_loss
from finetune.models.documents import install_attention
from finetune.models.gating import install_gating
from finetune.models.lora import add_adapters
from finetune.plan.activations import Computation, kept_bytes
from finetune.plan.peaks import plan_phases
from finetune.plan.plan import make_plan
from finetune.plan.run_spec import RunSpec
from finetune.plan.speed import Links, count_communication
from finetune.plan.table import name_layout
from tests.conftest import make_chat
from tests.plan.run_specs import FULL_SHARD, LLAMA_31_70B, make_spec
from tests.plan.test_activations import CONFIG, DOCUMENTS, make_adapted_head, packed_inputs
from tests.plan.traced import saved_for_backward

STAGES = 2


@pytest.fixture(params=range(STAGES))
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A pipeline of which only one rank is there, each in its turn."""
    dist.init_process_group("fake", rank=request.param, world_size=STAGES, store=FakeStore())
    yield init_device_mesh(
        "cpu", (STAGES, 1, 1, 1), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")
    )
    dist.destroy_process_group()


def test_layers_are_split_as_planned_under_an_adapted_head() -> None:
    """By the same cost of the head."""
    spec = make_spec({"model_type": "llama", **CONFIG, "num_hidden_layers": 1}, ranks=1)
    weight = torch.randn(CONFIG["vocab_size"], CONFIG["hidden_size"])
    layer = sum(t.numel for t in spec.architecture.layer(0) if len(t.shape) > 1)
    assert _count_matrix_numbers(make_adapted_head(weight)) == spec.layer_costs[0] - layer


def plan_of(
    stages: int = STAGES, schedule: PipelineSchedule = "1f1b", layers: int = 4, **keys: Any
) -> RunSpec:
    sharding = replace(FULL_SHARD, pipeline_parallel_size=stages, pipeline_schedule=schedule)
    config = {"model_type": "llama", **CONFIG, "num_hidden_layers": layers}
    return make_spec(config, ranks=stages, sharding=sharding, **keys)


@pytest.mark.parametrize("lora", [None, Lora(use_peft=True, lora_r=8)], ids=["full", "lora"])
def test_a_stage_keeps_what_is_planned(lora: Lora | None, mesh: Any) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    spec, stage = plan_of(), dist.get_rank()
    config = CONFIG_MAPPING["llama"](**CONFIG | {"num_hidden_layers": 4})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    install_attention(model, "auto")
    install_loss(model)
    install_gating(model)
    if lora is not None:
        add_adapters(model, lora, torch.bfloat16)
        model.to(torch.bfloat16)
    world: Any = SimpleNamespace(
        stages=STAGES,
        sharding=spec.sharding,
        mesh=mesh,
        device=torch.device("cpu"),
        any=lambda is_any: is_any,
    )
    keep_own_layers(model.train(), decoder_layers(model), world)
    pipeline, tokens = find_pipeline(model), sum(DOCUMENTS)
    assert pipeline is not None
    hidden = torch.zeros(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with (
        saved_for_backward(iter([*model.parameters(), *model.buffers()])) as kept,
        pipeline._computing(stage, hidden if stage else None),
    ):
        model.model(**packed_inputs(), use_cache=False)
    run = Computation(
        itemsize=2, lora=lora, cpu=True, document_length=sum(n * n for n in DOCUMENTS) // tokens
    )
    spec = replace(spec, stage=stage)
    a = spec.computed
    by_part = kept_bytes(a, run) | ({} if spec.is_last_stage else {"final norm": 0})
    enters_head = a.hidden * run.residual_itemsize if spec.is_last_stage else 0
    planned, measured = tokens * (sum(by_part.values()) - enters_head), sum(kept.values())
    print(f"stage {stage}: {planned / measured - 1:+.1%}")
    assert planned == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("stages", "rows"), [(2, 1), (2, 2), (2, 3), (2, 5), (4, 1), (4, 3), (4, 6), (4, 8), (4, 16)]
)
def test_so_many_forwards_wait_for_their_backward_as_torchs_schedules_have_them(
    stages: int, rows: int
) -> None:
    dist.init_process_group("fake", rank=0, world_size=stages, store=FakeStore())
    try:
        for schedule, chunks, kind in (
            ("1f1b", 1, Schedule1F1B),
            ("interleaved_1f1b", 2, ScheduleInterleaved1F1B),
        ):
            made: list[Any] = [
                PipelineStage(torch.nn.Identity(), index, stages * chunks, torch.device("cpu"))
                for index in range(0, stages * chunks, stages)
            ]
            if chunks == 2 and rows % max(1, rows // stages):
                kind = ScheduleLoopedBFS
            if chunks == 1 and rows < stages:
                kind = ScheduleGPipe
            orders = kind(made if chunks > 1 else made[0], rows).pipeline_order
            for stage in range(stages):
                waiting = most = 0
                for action in (action for action in orders[stage] if action is not None):
                    waiting += {"F": 1, "B": -1}.get(str(action).strip("0123456789"), 0)
                    most = max(most, waiting)
                keys = {"global_batch_size": rows}
                spec = replace(plan_of(stages, schedule, layers=8, **keys), stage=stage)  # type: ignore[arg-type]
                assert spec.accumulation == rows
                assert spec.micro_batches_in_flight * chunks == most, (schedule, stage)
    finally:
        dist.destroy_process_group()


def test_layers_are_cut_where_the_largest_part_is_smallest() -> None:
    assert [len(part) for part in split_layers([1.0] * 12 + [4.0], 4)] == [4, 4, 4, 1]
    assert [len(part) for part in split_layers([3.0, 1.0, 1.0, 1.0], 2)] == [1, 3]
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4"):
        split_layers([1.0] * 3, 4)


def test_a_plan_shows_the_pipeline() -> None:
    sharding = replace(FULL_SHARD, pipeline_parallel_size=4)
    spec = make_spec(LLAMA_31_70B, ranks=32, sharding=sharding, global_batch_size=128)
    assert name_layout(spec) == "fsdp2 FULL_SHARD, a pipeline of 4 stages (1f1b)"
    assert spec.data_ranks == spec.shards == 8 and spec.accumulation == 16
    assert spec.bubble == 3 / 19 and 1 <= spec.imbalance < 1.05
    sends = [each for each in count_communication(spec) if each.kind == "send"]
    assert [(each.calls, each.bytes) for each in sends] == [(32, 32 * 8192 * 8192 * 2)]


def test_stages_are_suggested_where_nodes_wait_for_each_others_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_70B | {"rms_norm_eps": 1e-5}))
    rows = make_chat(tmp_path / "rows.jsonl", rows=4)
    keys = [
        f"model_name_or_path={tmp_path}",
        f"datasets=[{{path: {rows}}}]",
        "global_batch_size=256",
        "use_peft=true",
    ]
    planned = read_recipe(None, keys)
    slow, fast = (
        make_plan(planned, FULL_SHARD, 32, links=Links(between_nodes=rate)).remarks
        for rate in (5e9, 400e9)
    )
    assert any("pipeline_parallel_size=4 puts a stage on each node" in remark for remark in slow)
    assert not any("pipeline_parallel_size" in remark for remark in fast)


def test_a_stage_that_trains_nothing_is_refused_as_the_run_refuses_it() -> None:
    spec = plan_of()
    frozen = ("model.embed_tokens", *(f"model.layers.{layer}" for layer in spec.own_layers))
    recipe = replace(spec.recipe, model=Model(frozen_modules=frozen))
    with pytest.raises(UserError, match="2: a rank would hold no parameter that is trained"):
        plan_phases(replace(spec, recipe=recipe))
