"""A LoRA run on a tiny model, once for every test that looks at what it leaves."""

from pathlib import Path

import pytest
import yaml

from tests.conftest import make_chat, make_model
from tests.ranks import run_python

LORA_STEPS = 8


@pytest.fixture(scope="session")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder, with adapter/ and export/; the base is `tiny-llama` beside it."""
    from finetune.export.export import export_run

    folder = tmp_path_factory.mktemp("lora")
    recipe = {
        "model_name_or_path": str(make_model(folder / "tiny-llama")),
        "datasets": [{"path": str(make_chat(folder / "chat.jsonl", rows=24))}],
        "max_length": 64,
        "global_batch_size": 4,
        "max_steps": LORA_STEPS,
        "learning_rate": 0.05,  # so that a few steps change the answers
        "use_peft": True,
        "eot_tokens": ["<|user|>"],
        "export_at_end": False,
        "output_dir": str(folder / "run"),
    }
    (folder / "lora.yaml").write_text(yaml.safe_dump(recipe))
    trained = run_python(["finetune/run.py", "--recipe", str(folder / "lora.yaml")])
    assert trained.returncode == 0, trained.stderr
    export_run(folder / "run", verify=False, log=lambda _: None)
    return folder / "run"
