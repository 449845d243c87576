"""A judge behind an OpenAI-compatible server, which a real small HTTP server stands for: scores, faults, retries, and a whole run."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import finetune
from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.judge import write_judge
from finetune.config.methods import RolloutKeys
from finetune.config.reader import RECIPES, read_recipe
from finetune.errors import UserError
from finetune.rollout.reward_process import Functions
from finetune.rollout.rewards import Rewards, Scores
from finetune.run import fine_tune

PROMPT = "Question: {prompt}\nAnswer: {completion}\nTruth: {answer}"


class Judging(BaseHTTPRequestHandler):
    """Answers by the line `Answer:` of what it is asked."""

    def do_POST(self) -> None:
        server: Any = self.server
        with server.lock:
            server.now += 1
            server.most = max(server.most, server.now)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        server.asked.append((self.path, self.headers.get("Authorization"), body["model"], question))
        word = question.partition("Answer: ")[2].partition("\n")[0]
        status = 200
        content = f"It has 3 parts. Score: {len(word)}.5"
        if word == "broken" or (word == "flaky" and server.failures > 0):
            server.failures -= 1
            status = 500
        time.sleep({"late": 2.0, "steady": 0.2}.get(word, 0.0))
        if word == "silent":
            content = "I cannot say"
        answer = json.dumps({"choices": [{"message": {"content": content}}]})
        if word == "html":
            answer = "<html>not a judge</html>"
        with server.lock:
            server.now -= 1
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    serving: Any = ThreadingHTTPServer(("127.0.0.1", 0), Judging)
    serving.lock = threading.Lock()
    serving.now = serving.most = 0
    serving.failures = 1
    serving.asked = []
    serving.url = f"http://127.0.0.1:{serving.server_port}"
    serve = partial(
        serving.serve_forever, poll_interval=0.02
    )  # so often asked whether it is to end
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield serving
    serving.shutdown()
    serving.server_close()


def ask(url: str, completions: list[str], judge: dict[str, Any], **keys: Any) -> Scores:
    entry = {"url": url, "model": "org/wise", "prompt": PROMPT, "timeout_seconds": 1.0} | judge
    rewards = Rewards(RolloutKeys(rewards=(write_judge(entry),), **keys))
    count = len(completions)
    try:
        assert rewards.names == [judge.get("name", "wise")]
        columns = {"answer": [f"truth {n}" for n in range(count)], "unread": [0] * count}
        messages = [[{"role": "assistant", "content": text}] for text in completions]
        prompts = [[{"role": "user", "content": f"question {n}"}] for n in range(count)]
        state = {"global_step": 0, "max_steps": 2, "max_completion_length": 4}
        return rewards.score(prompts, messages, [[1]] * count, columns, state)
    finally:
        rewards.close()


def test_each_completion_is_asked_about_and_the_last_number_is_its_score(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    said = ["a {prompt} {answer}", "four", ""]
    scores = ask(f"{server.url}/v1/", said, {"api_key_env": "JUDGE_KEY"})
    assert scores == Scores([[len(text) + 0.5 for text in said]], [])
    expected = [
        (
            "/v1/chat/completions",
            "Bearer secret",
            "org/wise",
            f"Question: question {n}\nAnswer: {text}\nTruth: truth {n}",
        )
        for n, text in enumerate(said)
    ]
    assert sorted(server.asked) == sorted(expected), "what a completion says is not filled again"


def test_a_group_of_the_regex_is_the_score_and_the_judge_has_a_name(server: Any) -> None:
    scores = ask(server.url, ["four"], {"regex": r"has (\d) parts", "name": "parts"})
    assert scores.by_reward == [[3.0]]


@pytest.mark.parametrize("bound", [1, 3])
def test_so_many_are_asked_at_a_time_and_no_more(server: Any, bound: int) -> None:
    ask(server.url, ["steady"] * 6, {"concurrency": bound})
    assert server.most == bound


FAULTS = {
    "broken": "answered 500",
    "html": "no answer of a chat completion: <html>not a judge</html>",
    "silent": r"no number for -?\d+(?:\.\d+)? in 'I cannot say'",
    "late": "no answer: timed out after 1 s",
}


@pytest.mark.parametrize("word", FAULTS)
def test_a_fault_ends_the_run_with_a_sentence_or_is_a_zero_that_is_counted(
    server: Any, word: str
) -> None:
    with pytest.raises(UserError) as error:
        ask(server.url, ["good", word], {}, reward_timeout_seconds=10)
    said = str(error.value)
    assert said.startswith(f"wise: {server.url}/v1/chat/completions: {FAULTS[word]}"), said
    assert "on_bad_reward: zero" in said and "\n" not in said
    counted = ask(server.url, ["good", word, "flaky"], {}, on_bad_reward="zero")
    assert counted == Scores([[4.5, 0.0, 5.5]], [1]), "a fault of one is not that of another"


def test_a_server_that_is_not_there_and_a_key_that_is_not_set(monkeypatch: Any) -> None:
    with pytest.raises(UserError, match=r"wise: http://127.0.0.1:9/v1.*no answer: .*refused"):
        ask("http://127.0.0.1:9", ["good"], {})
    assert ask("http://127.0.0.1:9", ["good"], {}, on_bad_reward="zero").failed == [0]
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(UserError, match="rewards: wise: the environment has no JUDGE_KEY"):
        ask("http://127.0.0.1:9", ["good"], {"api_key_env": "JUDGE_KEY"}, on_bad_reward="zero")


def test_all_together_have_the_time_of_a_reward(server: Any) -> None:
    """Late ones one after another; the time ends between them, and what was answered counts."""
    keys = {"on_bad_reward": "zero", "reward_timeout_seconds": 2.0}
    scores = ask(server.url, ["good", "late", "late", "late"], {"concurrency": 1}, **keys)
    assert scores == Scores([[4.5, 0.0, 0.0, 0.0]], [1, 2, 3])


def test_one_of_several_has_its_share_of_the_time(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is asked after the process was lost; the judge's own deadline comes first, and says which server was slow."""
    judge = write_judge({"url": server.url, "model": "wise", "prompt": PROMPT})
    settings = {"names": [judge], "seconds": 8.0, "counts_failures": True}
    functions = Functions(settings | {"tools": [], "environments": [], "processes": 1})
    step = {"prompts": ["?"] * 8, "completions": ["late"] * 8, "completion_ids": [[1]] * 8}
    step |= {"columns": {"answer": [""] * 8}, "state": {}}
    answer = functions.answer({"function": 0, "place": 3, "step": step})
    assert answer == {"scores": [0.0], "failed": [True]}
    said = capsys.readouterr().err
    assert f"{server.url}/v1/chat/completions: no answer: timed out after 0.4" in said, said


GIVEN = {"url": "http://localhost:8000", "model": "m", "prompt": "{completion}"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "http://localhost"}, "a judge without model, prompt; it has url"),
        (GIVEN | {"key": "x"}, "a judge with key; it has url"),
        (GIVEN | {"prompt": "{prompt}"}, "prompt: does not show the completion"),
        (GIVEN | {"url": "file:///etc/passwd"}, "url: file:///etc/passwd: an address is expected"),
        (GIVEN | {"regex": "("}, r"regex: (: no regular expression"),
        (GIVEN | {"concurrency": 0}, "concurrency: Input should be greater than 0"),
        (GIVEN | {"model": 3}, "model: Input should be a valid string"),
    ],
)
def test_a_mistake_in_a_recipe_is_a_sentence(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"method": "grpo", "rewards": ["number", given]}))
    with pytest.raises(UserError) as error:
        read_recipe(str(path), needs_data=False)
    assert f"rewards: {said}" in str(error.value)


def test_a_run_is_paid_by_it_and_resumes_from_its_own_recipe(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart = RECIPES / "quickstart"
    judge = {"url": server.url, "model": "org/wise", "prompt": PROMPT}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    recipe = {
        "model_config": {"model_type": "llama", "vocab_size": 384, **sizes, **heads},
        "tokenizer_name_or_path": str(quickstart),
        "method": "grpo",
        "rewards": ["number", judge],
        "reward_weights": [1, 0.5],
        "datasets": [{"path": str(quickstart / "spoken_train.jsonl")}],
        "dataset_cache_dir": str(tmp_path / "cache"),
        "max_length": 64,
        "global_batch_size": 2,
        "per_device_train_batch_size": 2,
        "max_completion_length": 4,
        "num_generations": 2,
        "max_steps": 2,
        "save_steps": 1,
        "logging_steps": 1,
        "export_at_end": False,
        "output_dir": str(tmp_path / "run"),
    }
    path = tmp_path / "judged.yaml"
    path.write_text(yaml.safe_dump(recipe))
    assert main(["plan", "--recipe", str(path), "--num-processes", "1"]) == 0
    assert f"wise: org/wise asked at {server.url}, 8 requests" in capsys.readouterr().out
    first = read_recipe(str(path))
    sharding = read_sharding(None, None, {})
    fine_tune(first, sharding)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, metrics) if "rewards/number" in line]
    assert len(steps) == 2
    for line in steps:
        paid = line["rewards/number"] + 0.5 * line["rewards/wise"]
        assert line["reward"] == pytest.approx(paid, rel=1e-6)
        assert line["rewards/wise"] > 0
    asked = {question for *_, question in server.asked}
    assert all(" in digits" in question or "Digits for" in question for question in asked)
    again = read_recipe(str(tmp_path / "run" / "recipe.yaml"))
    assert again.rollout == first.rollout
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    fine_tune(again, sharding)
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def test_inspect_shows_what_it_would_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    rows = RECIPES / "quickstart" / "spoken_train.jsonl"
    judge = {"url": "http://127.0.0.1:9", "model": "org/wise", "prompt": PROMPT}
    keys = {"rewards": [judge], "datasets": [{"path": str(rows)}]}
    overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    recipe = ["--recipe", "quickstart_grpo", "model_name_or_path=null"]
    recipe += ["model_config={model_type: llama, vocab_size: 384}"]
    recipe += [f"tokenizer_name_or_path={RECIPES / 'quickstart'}", "eval_datasets=[]"]
    assert main(["inspect", *recipe, *overrides, "--rows", "1"]) == 0
    row = json.loads(rows.read_text().splitlines()[0])
    question = row["prompt"][0]["content"]
    asked = f"Question: {question}\nAnswer: {row['answer']}\nTruth: {row['answer']}\n"
    said = capsys.readouterr().out
    assert f"  wise would read of a completion like the answer:\n{asked}" in said


def test_a_column_that_no_row_has_is_found_before_a_model_is_loaded(server: Any) -> None:
    entry = {"url": server.url, "model": "wise", "prompt": "{completion} {solution}"}
    rewards = Rewards(RolloutKeys(rewards=(write_judge(entry),)))
    try:
        with pytest.raises(UserError, match="wise: takes solution, and the data have no such"):
            rewards.check_arguments(["answer"])
    finally:
        rewards.close()


def test_a_script_names_it_as_a_recipe_does() -> None:
    recipe = finetune.load_recipe("quickstart_grpo", rewards=[GIVEN])
    (judge,) = recipe.rollout.judges
    assert judge.url == GIVEN["url"] and recipe.rollout.reward_files == ()
