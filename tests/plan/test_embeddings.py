"""The plan of embeddings: held-out vectors are counted where the recipe says how many there are, as much as comparing them allocates."""

from pathlib import Path

import pytest
import torch

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.models.contrast import contrast
from finetune.plan.loss_memory import compared_bytes
from finetune.plan.plan import Plan, make_plan
from tests.plan.traced import allocated_peak

HIDDEN = 64


def plan(folder: Path, *keys: str) -> Plan:
    model = (
        f"model_config={{model_type: llama, vocab_size: 384, hidden_size: {HIDDEN}, intermediate_size: 64, "
        "num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2}"
    )
    data = f"datasets=[{{path: {folder}/rows.jsonl}}]"
    (folder / "rows.jsonl").write_text("{}\n")
    common = ["method=embed", "max_length=64", "tokenizer_name_or_path=quickstart", model, data]
    common += ["global_batch_size=16", "per_device_train_batch_size=8", "num_negatives=2"]
    recipe = read_recipe(None, [*common, *keys])
    return make_plan(recipe, read_sharding(None, None, {}), 1, on_cpu=True)


def evaluation(planned: Plan) -> tuple[int, str]:
    (phase,) = [phase for phase in planned.phases if phase.name == "evaluation"]
    return phase.peak.total, phase.peak.name


@pytest.mark.parametrize(
    "keys",
    [
        "eval_split_size=3000",
        pytest.param("eval_datasets=[{path: ROWS, max_samples: 3000}]", marks=pytest.mark.slow),
    ],
    ids=["split", "samples"],
)
def test_held_out_vectors_are_counted(keys: str, tmp_path: Path) -> None:
    few, _ = evaluation(plan(tmp_path))
    planned = plan(tmp_path, keys.replace("ROWS", str(tmp_path / "rows.jsonl")))
    many, highest = evaluation(planned)
    assert highest == "vectors compared" and many > few
    counted = compared_bytes(planned.spec, 3000)
    vectors = torch.randn(3000 * 4, HIDDEN, dtype=torch.float64)
    allocated = allocated_peak(lambda: contrast(vectors, 4, 0.05)) + vectors.nbytes
    assert 0.7 * allocated <= counted <= 1.3 * allocated
    assert not [remark for remark in planned.remarks if "held-out" in remark]


def test_an_unknown_number_of_them_is_a_remark(tmp_path: Path) -> None:
    planned = plan(tmp_path, "eval_split_size=0.5")
    (remark,) = [remark for remark in planned.remarks if "held-out queries" in remark]
    assert f"{compared_bytes(planned.spec, 1) / 1024:.0f} KiB each" in remark
