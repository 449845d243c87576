"""The Tinker SDK and its cookbook, as their users have them, against `finetune serve-training`: slow, and skipped where they are not installed."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT, free_port
from tests.service.sdk import NAME, environment, make_home, run_script, server, state_of

pytestmark = pytest.mark.slow


@pytest.fixture
def home(shared: Path, tmp_path: Path) -> Path:
    return make_home(tmp_path, shared)


CALLS = """
import sys, json, torch, tinker
from tinker import types
MODEL, URL = sys.argv[1:]
service = tinker.ServiceClient(base_url=URL)
assert [m.model_name for m in service.get_server_capabilities().supported_models] == [MODEL]
client = service.create_lora_training_client(base_model=MODEL, rank=4, seed=3).result()
info = client.get_info()
assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 4, MODEL)
tokenizer = client.get_tokenizer()
ids = tokenizer.encode("Once upon a time there was a little dog.")
prompt = types.ModelInput.from_ints(ids[:5])

def datum(**inputs):
    count = len(ids) - 1
    given = {"target_tokens": torch.tensor(ids[1:])}
    given |= {name: torch.full((count,), value) for name, value in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={k: types.TensorData.from_torch(v) for k, v in given.items()})

data = [datum(weights=1.0)] * 2
first = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
for _ in range(3):
    passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(types.AdamParams(learning_rate=1e-3))
    out = passed.result()
    assert len(out.loss_fn_outputs) == 2 and len(out.loss_fn_outputs[0]["logprobs"].data) == len(ids) - 1
    assert stepped.result().metrics["grad_norm:mean"] > 0
trained = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
assert trained < first
for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
    more = {"sequence_ratio_mask": 1.0} if loss == "gspo" else {}
    bounds = {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}
    numbers = {"dro": {"beta": 0.05}, "gspo": bounds}.get(loss)
    client.forward_backward([datum(logprobs=-1.0, advantages=1.0, **more)], loss, numbers).result()
own = client.forward_backward_custom(data, lambda data, scores: (-sum(s.sum() for s in scores), {"mine": 2.0})).result().metrics
assert abs(own["loss:sum"] - trained) < 1e-3 and own["mine"] == 2.0
count = len(ids) - 1
six = torch.tensor([[token, 5, 0, 0, 0, 0] for token in ids[1:]])
shares = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]] * count)
soft = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": six, "weights": shares})
assert soft.loss_fn_inputs["weights"].sparse_crow_indices is not None
mixed = client.forward_backward([soft, data[0]], "cross_entropy").result()
assert [each["logprobs"].shape for each in mixed.loss_fn_outputs] == [[count, 6], [count]]
assert abs(mixed.metrics["loss:sum"] - trained) < 1e-3
own = client.forward_backward_custom([soft], lambda data, scores: (-(scores[0] * shares).sum(), {})).result()
assert abs(own.metrics["loss:sum"] - trained / 2) < 1e-3
client.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)).result()
path = client.save_state("here").result().path
sampler_path = client.save_weights_for_sampler("there").result().path
sampler = client.save_weights_and_get_sampling_client().result()
answer = sampler.sample(prompt, 3, types.SamplingParams(max_tokens=8, seed=5, temperature=1.0), include_prompt_logprobs=True).result()
assert len(answer.sequences) == 3 and answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == 5
again = sampler.sample(prompt, 3, types.SamplingParams(max_tokens=8, seed=5, temperature=1.0)).result()
assert [s.tokens for s in again.sequences] == [s.tokens for s in answer.sequences]
scored = sampler.compute_logprobs(prompt).result()
top = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1), topk_prompt_logprobs=4).result().topk_prompt_logprobs
assert top[0] is None and [len(row) for row in top[1:]] == [4] * 4
assert all(row[0][1] >= score - 1e-4 for row, score in zip(top[1:], scored[1:], strict=True))
named = [(dict(row).get(token), score) for row, token, score in zip(top[1:], ids[1:5], scored[1:], strict=True)]
assert all(found is None or abs(found - score) < 1e-4 for found, score in named)
assert service.create_sampling_client(model_path=sampler_path).result().compute_logprobs(prompt).result() == scored
assert service.create_sampling_client(base_model=MODEL).result().compute_logprobs(prompt).result() != scored
other = service.create_training_client_from_state_with_optimizer(path).result()
assert abs(other.forward(data, "cross_entropy").result().metrics["loss:sum"] - client.forward(data, "cross_entropy").result().metrics["loss:sum"]) < 1e-5
rest = service.create_rest_client()
assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
assert {c.checkpoint_type for c in rest.list_checkpoints(client.model_id).result().checkpoints} == {"training", "sampler"}
def refused(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("not refused")
assert "is not served" in refused(tinker.NotFoundError, lambda: rest.publish_checkpoint_from_tinker_path(path).result())
assert "is not served" in refused(tinker.APIStatusError, lambda: service.create_lora_training_client(base_model="other").result())
assert "stable_reinforce" in refused(tinker.RequestFailedError, lambda: client.forward(data, "stable_reinforce").result())
assert "weights" in refused(tinker.RequestFailedError, lambda: client.forward([datum()], "cross_entropy").result())
assert client.forward(data, "cross_entropy").result().metrics["loss:sum"] > 0
rest.delete_checkpoint_from_tinker_path(path).result()
assert "not known" in refused(tinker.NotFoundError, lambda: rest.get_weights_info_by_tinker_path(path).result())
service.close("success").result()
print("all answered")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_call_of_the_sdk_is_answered_and_others_are_refused(home: Path, ranks: int) -> None:
    port = free_port()
    more = ["--config", "two.yaml", "--num-processes", "2"] if ranks == 2 else []
    (home / "calls.py").write_text(CALLS)
    with server(home, port, *more) as process:
        assert "all answered" in run_script(home, "calls.py", NAME, f"http://127.0.0.1:{port}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


STEPS = """
import sys, torch, tinker
from tinker import types
MODEL, URL = sys.argv[1:]
client = tinker.ServiceClient(base_url=URL).create_lora_training_client(base_model=MODEL, rank=4, seed=3).result()
for step in range(25):
    ids = [1, 403, 407, 261, 378, 383, 300 + step]
    data = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * 6})
    passed = [client.forward_backward([data] * n, "cross_entropy") for n in (1, 2)]
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-3))
    print(step, *[each.result().metrics["loss:sum"] for each in passed], stepped.result().metrics["grad_norm:mean"], flush=True)
print(client.save_state("end").result().path)
"""
KILLS = 3  # of each seed


def count_lines(log: Path) -> int:
    return log.read_bytes().count(b"\n")


def end_of(home: Path, run: str, printed: str) -> tuple[list[str], list[bytes]]:
    """The numbers that STEPS has printed, and the weights and optimizer that it has saved."""
    *steps, path = printed.splitlines()
    state = state_of(home, run, path)
    names = ("adapter_model.safetensors", "optimizer.safetensors")
    return steps, [(state / name).read_bytes() for name in names]


def test_a_client_goes_on_with_the_same_weights_after_kills_at_random_places(home: Path) -> None:
    (home / "steps.py").write_text(STEPS)
    port = free_port()
    arguments = ("steps.py", NAME, f"http://127.0.0.1:{port}")
    with server(home, port, "output_dir=calm"):
        calm = end_of(home, "calm", run_script(home, *arguments))
    assert len(calm[0]) == 25
    killed_in: list[int] = []
    for seed in range(2):
        draw = random.Random(seed)
        log = home / f"steps{seed}.log"
        client: Any = None
        for kill in range(KILLS + 1):
            with server(home, port, f"output_dir=run{seed}"), log.open("ab") as output:
                client = client or subprocess.Popen(
                    [sys.executable, "-W", "ignore", *arguments],
                    cwd=home,
                    env=environment(),
                    stdout=output,
                )
                if kill == KILLS:
                    assert client.wait(120) == 0
                    break
                lines = count_lines(log) + draw.randint(1, 6)
                while count_lines(log) < lines:
                    assert client.poll() is None
                    time.sleep(0.01)
                time.sleep(draw.random() / 5)  # of a step, which takes about as long
                killed_in.append(count_lines(log))
        assert end_of(home, f"run{seed}", log.read_text()) == calm
    assert len(killed_in) == 2 * KILLS and max(killed_in) < 25


def cookbook(home: Path, port: int, log_path: str) -> dict[str, list[dict[str, Any]]]:
    """The supervised loop, the loop by rewards from where it has ended, and the trainer by rewards on arithmetic; their metrics."""
    keys = (f"base_url=http://127.0.0.1:{port}", f"model_name={NAME}")
    log = home / log_path
    run_script(
        home, "-m", "tinker_cookbook.recipes.sl_loop", *keys, f"log_path={log}", "batch_size=8", "max_length=512", "learning_rate=4e-3",
        "save_every=0", "train_on_what=last_assistant_message",
    )  # fmt: skip
    taught = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])["state_path"]
    run_script(
        home, "-m", "tinker_cookbook.recipes.rl_loop", *keys, f"log_path={log}", "batch_size=4", "group_size=8", "max_tokens=16",
        "max_steps=42", "loss_fn=importance_sampling",
    )  # fmt: skip
    run_script(
        home, "-m", "tinker_cookbook.recipes.math_rl.train", "env=arithmetic", *keys, f"log_path={log}-math", "group_size=8",
        "groups_per_batch=4", "max_tokens=16", "max_steps=3", "eval_every=0", "save_every=0", "loss_fn=importance_sampling",
        f"load_checkpoint_path={taught}",
    )  # fmt: skip
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    math = [
        json.loads(line)
        for line in (home / f"{log_path}-math" / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        "losses": [line["train_mean_nll"] for line in lines if "train_mean_nll" in line],
        "rewards": [line["reward/total"] for line in lines if "reward/total" in line],
        "math": [line for line in math if "env/all/total_episodes" in line],
    }


def test_the_cookbooks_recipes_run_unchanged_on_one_rank_and_on_two(
    home: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tinker_cookbook", "pylatexenc", "sympy", "math_verify"):
        pytest.importorskip(name)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(home / "cache"))
    draw = random.Random(0)
    shown = [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}]
    taught = []
    for _ in range(320):
        a = draw.randrange(100)
        asked = [
            {"role": "user", "content": f"What is {a} + 1?"},
            {"role": "assistant", "content": str(a + 1)},
        ]
        taught.append({"messages": shown + asked})
    questions = [
        json.loads(line)["question"][:20]
        for line in (shared / "data" / "gsm8k_train.jsonl").read_text().splitlines()[:320]
    ]
    for folder, rows in (
        ("HuggingFaceH4/no_robots", taught),
        ("openai/gsm8k", [{"question": each, "answer": "#### 3"} for each in questions]),
    ):
        (home / folder).mkdir(parents=True)
        (home / folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"
    )
    found = {}
    for ranks in (1, 2):
        port = free_port()
        more = ["--config", "two.yaml", "--num-processes", "2"] if ranks == 2 else []
        with server(home, port, f"output_dir=run{ranks}", *more):
            found[ranks] = cookbook(home, port, f"log{ranks}")
    assert found[1]["losses"][:5] == pytest.approx(found[2]["losses"][:5], abs=1e-4)
    for each in found.values():
        assert len(each["losses"]) == 40 and each["losses"][-1] < each["losses"][0] / 4
        assert len(each["rewards"]) == 2 and len(each["math"]) == 3
        # What was sampled and what is trained are the same distribution.
        assert all(
            abs(line["optim/kl_sample_train_v1"]) < 1e-4 and "grad_norm:mean" in line
            for line in each["math"]
        )


def test_the_pages_example_runs(home: Path) -> None:
    """With the port of its server, and no other change."""
    page = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    example = page.partition("```python\n")[2].partition("```")[0]
    assert "http://127.0.0.1:8010" in example
    port = free_port()
    (home / "example.py").write_text(example.replace(":8010", f":{port}"))
    with server(home, port):
        lines = run_script(home, "example.py").splitlines()
        assert (
            f"clients TINKER_BASE_URL=http://127.0.0.1:{port} " in (home / "server.log").read_text()
        )
    losses = [json.loads(line) for line in lines[:10]]
    assert losses[-1][0] < losses[0][0] and losses[-1][1] < losses[0][1]
    assert lines[10]
