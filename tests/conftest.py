"""Fixtures for every test: real inputs, tiny models, tiny recipes. Ranks are started by `tests.ranks`."""

import atexit
import fcntl
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

gc.disable()  # until all is imported
# A command that is started compiles all of torch and transformers again where bytecode is not kept: 28 s instead of 9.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before any Hugging Face library reads them: no network, and nothing of the user's (caches, Accelerate's default config).
_home = tempfile.mkdtemp(prefix="finetune-tests-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)
os.environ |= {"HF_HOME": _home, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("HF_DATASETS_CACHE", None)

import pytest  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from finetune.export import reload_process, torch_files  # noqa: E402
from tests.ranks import ROOT, run_command  # noqa: E402
from tests.slow_record import SlowRecord  # noqa: E402
from tests.warm_processes import freeze_imports, start_server, warm_reload  # noqa: E402

MANY = 300  # tests, some of which will start ranks

# What a property test checks does not depend on how busy the machine is.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


def pytest_configure(config: pytest.Config) -> None:
    """The process that writes the summary also keeps the record of slow tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(SlowRecord())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked gpu where there is none. Before many tests, the imports of their ranks begin on another core."""
    if len(items) > MANY:
        start_server()
        # Long files first: one that is begun last would leave the other processes without work.
        order = ("training", "models", "cuda_without_gpu", "tests", "checkpoint", "rollout", "service", "inference",
                 "export", "report", "optim", "plan")  # fmt: skip
        place = {name: number for number, name in enumerate(order)}
        items.sort(key=lambda item: place.get(item.path.parent.name, len(order)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """All tests are imported."""
    freeze_imports()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws the same random weights, whichever tests ran before it in its process."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps its caller's stack for CUDA


@pytest.fixture(scope="session", autouse=True)
def reload_warm() -> Iterator[None]:
    """The processes that open an export, or torch's files, do not import all again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reload_process, "subprocess", warm_reload())
        patch.setattr(torch_files, "subprocess", warm_reload())
        yield


@pytest.fixture(autouse=True)
def reload_cold(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Except where a test is marked `cold`."""
    if request.node.get_closest_marker("cold") is not None:
        monkeypatch.setattr(reload_process, "subprocess", subprocess)
        monkeypatch.setattr(torch_files, "subprocess", subprocess)


QUICKSTART = ("accelerate", "launch", "finetune/run.py", "--config", "fsdp_full_shard.yaml")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real inputs (stories260k, GSM8K, the Llama 3 tokenizer); the test skips where it is absent."""
    given = os.environ.get("FINETUNE_SHARED")
    candidates = [Path(given)] if given else [ROOT.parent / "shared", ROOT.parent.parent / "shared"]
    for folder in candidates:
        if (folder / "models" / "stories260k").is_dir():
            return folder
    pytest.skip(
        "the shared inputs (stories260k, GSM8K) are not at hand; FINETUNE_SHARED names their folder"
    )


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` has filled: once for all of pytest's workers, of which the others wait."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder


@pytest.fixture(scope="module")
def slow_too(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests of the file are asked for: what only they look at is not computed for the others."""
    of_file = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker("slow") for item in of_file)


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters: each of `cases`, slow unless it is one of `quick`. A tuple has a value for each argument."""
    return [
        case
        if case in quick
        else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
        for case in cases
    ]


@dataclass(frozen=True, slots=True)
class QuickstartRun:
    """A short run of the quickstart, by Accelerate's own launcher: its folder, and what was said."""

    folder: Path
    said: str


@pytest.fixture(scope="session")
def quickstart_run(tmp_path_factory: pytest.TempPathFactory) -> QuickstartRun:
    """It with four steps instead of all, once for every test that looks at what it leaves."""

    def make(folder: Path) -> None:
        few = (
            "max_steps=4",
            "logging_steps=2",
            "exact_match_samples=2",
            f"output_dir={folder}/runs/quickstart",
        )
        finished = run_command((*QUICKSTART, *few), timeout=300)
        assert finished.returncode == 0, finished.stderr
        (folder / "said.txt").write_text(finished.stdout + finished.stderr)

    folder = make_once(tmp_path_factory, "quickstart", make)
    return QuickstartRun(folder / "runs" / "quickstart", (folder / "said.txt").read_text())


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Callable[..., Path]:
    """A maker of model folders with random weights and a byte-level tokenizer.

    `tiny_llama()` -> a folder with config.json, model.safetensors and tokenizer files.
    `tiny_llama("name", model_type="qwen3", hidden_size=72, tie_word_embeddings=True)`: any key of the config.
    """
    return lambda name="tiny-llama", **config: make_model(tmp_path / name, **config)


@pytest.fixture
def tiny_recipe(tmp_path: Path, tiny_llama: Callable[..., Path]) -> Callable[..., Path]:
    """A maker of recipe files that train a tiny Llama for four steps on 24 chat rows; any key can be given.

    `tiny_recipe(use_peft=True)` -> its path. `output_dir` is tmp_path / "run" unless given; None leaves a key out.
    """

    def make(name: str = "tiny", **keys: Any) -> Path:
        if "model_name_or_path" not in keys and "model_config" not in keys:
            model = tmp_path / "tiny-llama"
            keys["model_name_or_path"] = str(model if model.exists() else tiny_llama())
        recipe = {
            "datasets": [{"path": str(make_chat(tmp_path / "chat.jsonl", rows=24))}],
            "max_length": 64,
            "global_batch_size": 4,
            "max_steps": 4,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "output_dir": str(tmp_path / "run"),
        } | keys
        path = tmp_path / f"{name}.yaml"
        path.write_text(
            yaml.safe_dump({k: v for k, v in recipe.items() if v is not None}, sort_keys=False)
        )
        return path

    return make


def let_states_last(model: Any) -> Any:
    """Gives a random model's gated delta rules states that last for some tokens, as in a trained one. Returns the model.

    transformers draws decays after which a state is gone within a token. What is left to the gradients of the decays is mostly
    rounding: of transformers' own in fp32 up to 3e-4 was off from fp64, and is 1e-5 with these.
    """
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith("linear_attn.A_log"):
            parameter.data.copy_(torch.linspace(0.05, 0.5, len(parameter)).log())
    return model


def make_model(
    folder: Path, *, model_type: str = "llama", seed: int = 0, dtype: str = "float32", **config: Any
) -> Path:
    """A Hugging Face folder of a causal model of `model_type` with random weights, under 200,000 parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **sizes | config), dtype=getattr(torch, dtype)
        )
    let_states_last(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> Any:
    """A byte-level tokenizer of 262 tokens with a chat template (user, assistant, system turns that end in <|end|>)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_chat(path: Path, *, rows: int) -> Path:
    """A messages-format file of `rows` conversations of different lengths."""
    with path.open("w") as file:
        for row in range(rows):
            messages = [
                {"role": "user", "content": f"What is {row} plus {row}?" + " Tell me." * (row % 5)},
                {"role": "assistant", "content": f"It is {2 * row}."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path
