"""Sampling ahead of training, against the stand-in for a vLLM server: which weights have sampled each token, what becomes of
requests when the weights change, and what a run that was killed learns from."""

import json
import signal
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from finetune.checkpoint.folders import list_checkpoints
from finetune.errors import UserError
from finetune.report.run_data import _ratio_histogram, read_run
from finetune.rollout import in_flight
from finetune.rollout.engine import Ended, Request, Sampled, Sampling
from finetune.rollout.in_flight import LOST, DaemonPool, InFlight, read_lines
from tests.ranks import launch_ranks
from tests.rollout.stand_in_vllm import StandInVllm, serving
from tests.rollout.test_vllm import (
    GENERATIONS,
    KILLED,
    LORA,
    PROMPTS,
    lines_of,
    open_engine,
    write_recipe,
)
from tests.training.layouts import steps_of, train_all, write_config

STEPS = 5
KEYS = [f"max_steps={STEPS}", "save_steps=100", "learning_rate=1e-4"]


@pytest.fixture(scope="module")
def model(shared: Path) -> Path:
    return shared / "models" / "stories260k"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("in-flight")


@pytest.fixture(scope="module")
def recipe(folder: Path, model: Path) -> Path:
    return write_recipe(folder, model)


def read_answers(run: Path) -> list[dict[str, Any]]:
    """What the run has kept of the server's answers."""
    files = (run / "rollouts").glob("*/answers-*.jsonl")
    return [json.loads(line)["sampled"] for path in files for line in path.read_text().splitlines()]


def train(
    folder: Path, recipe: Path, server: StandInVllm, name: str, *keys: str, ranks: int = 1
) -> Path:
    run = folder / name
    keys = (*KEYS, f"vllm_server_base_url={server.url}", f"output_dir={run}", *keys)
    config = write_config(folder, "single" if ranks == 1 else "full_shard")
    train_all(folder, [(recipe, config, list(keys))], ranks=ranks)
    return run


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_ahead_is_sampled_by_the_weights_of_the_step_before(
    ranks: int, folder: Path, recipe: Path, model: Path
) -> None:
    with serving(model) as server:
        run = train(folder, recipe, server, f"ahead-{ranks}", "max_staleness=1", ranks=ranks)
        steps = steps_of(run)
        assert [line["staleness/mean"] for line in steps] == [0, *[1] * (STEPS - 1)]
        assert [line["staleness/max"] for line in steps] == [0, *[1] * (STEPS - 1)]
        for line in steps:
            age = int(line["staleness/mean"])
            assert line[f"staleness/{age}/share"] == 1 and line[f"staleness/{1 - age}/share"] == 0
            shares = [v for k, v in line.items() if k.startswith(f"staleness/{age}/ratio/share/")]
            assert sum(shares) == pytest.approx(1) and line["hand_over_seconds"] > 0
            assert line[f"staleness/{age}/ratio/effective_sample_size"] == pytest.approx(
                line["ratio/effective_sample_size"]
            )
        assert steps[0]["log_ratio/mean"] < 5e-6 < 1e-5 < steps[2]["log_ratio/mean"]
        histogram = _ratio_histogram(read_run(run))
        heads = ["First tenth", "Last tenth", "Whole run", "0 behind", "1 behind"]
        assert [head for head, _ in histogram[0][1]] == heads and len(histogram) == 12
        for column in range(len(heads)):
            assert sum(row[column][1] for _, row in histogram[1:]) == pytest.approx(100, abs=0.1)
        drawn = [
            (name, choice)
            for name, (body, choice) in zip(server.versions, server.asked, strict=True)
            if body["temperature"] > 0
        ]
        assert len(drawn) == STEPS * PROMPTS * GENERATIONS, "each once"
        trained = sorted(line["token_ids"] for line in lines_of(run))
        assert trained == sorted(choice["token_ids"] for _, choice in drawn)
        # the names of weights in order: the first two steps have the first weights
        names = [name for name, _ in drawn]
        assert [names.count(name) for name in dict.fromkeys(names)] == [
            2 * PROMPTS * GENERATIONS,
            *[PROMPTS * GENERATIONS] * (STEPS - 2),
        ]


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["keep", "restart"])
def test_a_change_of_weights_cuts_what_is_in_flight(
    in_flight: str, folder: Path, recipe: Path, model: Path
) -> None:
    with serving(model) as server:
        server.seconds_a_token = 0.02
        keys = ["max_staleness=2", f"in_flight={in_flight}", "eval_datasets=[]"]
        run = train(folder, recipe, server, in_flight, *keys)
        steps = steps_of(run)
        cut = [choice for _, choice in server.asked if choice["finish_reason"] == "abort"]
        assert any(choice["token_ids"] for choice in cut), "none was cut"
        kept = read_answers(run)
        assert len(kept) == STEPS * PROMPTS * GENERATIONS
        assert sum(each["cuts"] for each in kept) == len(cut)
        assert sum(line["in_flight/cuts"] for line in steps) == pytest.approx(
            len(cut) / (PROMPTS * GENERATIONS)
        )
        dropped = sum(line["in_flight/dropped_tokens"] for line in steps) * PROMPTS * GENERATIONS
        lost = sum(len(choice["token_ids"]) for choice in cut)
        assert dropped == pytest.approx(0 if in_flight == "keep" else lost)
        for line in steps:
            assert 0 <= line["staleness/mean"] <= line["staleness/max"] <= 2
        # each part of a completion was sampled by one version, and no later part by an earlier one
        names = list(dict.fromkeys(server.versions))
        by_tokens = defaultdict[tuple[int, ...], set[int]](set)  # short parts may be alike
        for name, (_, choice) in zip(server.versions, server.asked, strict=True):
            by_tokens[tuple(choice["token_ids"])].add(names.index(name))
        mixed = 0
        for each in kept:
            versions = each["versions"]
            assert len(versions) == len(each["token_ids"]) and versions == sorted(versions)
            mixed += len(set(versions)) > 1
            for version in set(versions):
                part = [t for t, v in zip(each["token_ids"], versions, strict=True) if v == version]
                assert version in by_tokens[tuple(part)]
        assert (mixed > 0) is (in_flight == "keep")
        assert {tuple(line["token_ids"]) for line in lines_of(run)} == {
            tuple(each["token_ids"]) for each in kept
        }


@pytest.mark.slow
def test_without_staleness_a_correction_changes_no_number(
    folder: Path, recipe: Path, model: Path
) -> None:
    """At the first update the proximal policy is the one in training: all weights are training over sampling, 1 but for rounding,
    and within the bounds."""
    losses = []
    with serving(model) as server:
        for kind in ("none", "token_truncate", "decoupled"):
            keys = [f"importance_sampling_correction={kind}", "eval_datasets=[]"]
            losses.append(
                [line["loss"] for line in steps_of(train(folder, recipe, server, kind, *keys))]
            )
    assert losses[1] == losses[2] and losses[0] == pytest.approx(losses[1], abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("heeds_seeds", "ahead"), [(True, 1), (False, 2)])
def test_a_killed_run_learns_from_what_was_sampled_ahead(
    heeds_seeds: bool, ahead: int, folder: Path, recipe: Path, model: Path
) -> None:
    """Killed two steps after its checkpoint: what was in flight then is in it, or was answered since, and is not asked for
    again; the steps have the numbers of a run that was not killed where the server heeds seeds and no change of
    weights cuts a request."""
    run = folder / f"killed-{heeds_seeds}"
    with serving(model, heeds_seeds=heeds_seeds) as server:
        keys = [*KEYS, f"vllm_server_base_url={server.url}", f"output_dir={run}"]
        keys += ["eval_datasets=[]", f"max_staleness={ahead}", "in_flight=restart", "save_steps=2"]
        config = write_config(folder, "single")

        def live(where: str) -> int:
            return launch_ranks(
                KILLED, [where, str(recipe), str(config), *keys], ranks=1
            ).returncodes[0]

        assert live("step,4") == -signal.SIGKILL
        [(_, checkpoint)] = list_checkpoints(run)
        saved = [json.loads(x) for x in (checkpoint / "in_flight.jsonl").read_text().splitlines()]
        assert len(saved) == ahead * PROMPTS * GENERATIONS
        assert {line["prompts_step"] for line in saved} == set(range(2, 2 + ahead))
        while server.answering:  # what nobody waits for any more
            time.sleep(0.1)
        kept, asked = len(read_answers(run)), len(server.asked)
        assert kept > 2 * PROMPTS * GENERATIONS
        assert live("nowhere,1") == 0
        again = [choice for _, choice in server.asked[asked:] if choice["finish_reason"] != "abort"]
        lines = lines_of(run)
        assert len(lines) == STEPS * PROMPTS * GENERATIONS == kept + len(again), "asked again"
        made = Counter(tuple(choice["token_ids"]) for _, choice in server.asked)
        assert Counter(tuple(line["token_ids"]) for line in lines) <= made, "trained twice"
        if heeds_seeds:
            whole = train(folder, recipe, server, "alive", "max_staleness=1", "eval_datasets=[]")
            for line, truth in zip(steps_of(run), steps_of(whole), strict=True):
                for name in ("loss", "grad_norm", "reward", "staleness/mean", "log_ratio/mean"):
                    assert line[name] == truth[name], name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_several_updates_of_a_generation_that_was_sampled_ahead(
    kind: str, folder: Path, recipe: Path, model: Path
) -> None:
    """Staleness counts steps, the ages of ratios generations; a run that stops within a generation continues with the same numbers."""
    run = folder / f"updates-{kind}"
    keys = ["max_staleness=1", "num_iterations=2", "importance_sampling_correction=decoupled"]
    keys += ["eval_datasets=[]", "max_steps=6", *(LORA if kind == "lora" else [])]
    with serving(model) as server:
        given = [*KEYS, f"vllm_server_base_url={server.url}", f"output_dir={run}", *keys]
        given += ["save_steps=3"]
        config = write_config(folder, "single")
        arguments = [str(recipe), str(config), *given]
        assert launch_ranks(KILLED, ["step,5", *arguments], ranks=1).returncodes == (-9,)
        [(_, checkpoint)] = list_checkpoints(run)
        assert {path.name for path in checkpoint.glob("*.jsonl")} >= {
            "in_flight.jsonl",
            "rollouts.jsonl",
        }
        assert launch_ranks(KILLED, ["nowhere,1", *arguments], ranks=1).returncodes == (0,)
        steps = steps_of(run)
        assert [line["staleness/max"] for line in steps] == [0, 1, 2, 3, 2, 3]
        assert [line["staleness/1/share"] for line in steps] == [0, 0, 1, 1, 1, 1]
        assert all(0.5 < line["importance_sampling/ratio"] < 2 for line in steps)
        whole = train(folder, recipe, server, f"whole-{kind}", *keys)
    for line, truth in zip(steps, steps_of(whole), strict=True):
        for name in ("loss", "grad_norm", "reward", "importance_sampling/ratio", "ratio/mean"):
            assert line[name] == truth[name], name


def test_a_checkpoint_has_what_was_there_and_counts_what_was_not() -> None:
    answered = threading.Event()

    def ask(request: Request, _: Sampling) -> Sampled:
        if request.prompt_ids == (2,):
            answered.wait(20)
        return Sampled([5, 6], [-1.0, -2.0], 3.0, Ended.STOPPED)

    flights = InFlight(ask, DaemonPool(4), keeps_tokens=True)
    requests = {"one": Request((1,), (0,)), "two": Request((2,), (1,))}
    flights.open(7)
    flights.submit(3, "w", requests, Sampling(max_tokens=4), {}, lambda *_: None)
    deadline = time.monotonic() + 20
    while not flights.flights[3].submitted[0].answer.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    recalled = read_lines(json.loads(json.dumps(list(flights.describe_lines()))))
    assert recalled["one"].versions == [7, 7] and recalled["two"] == LOST
    answered.set()
    again = InFlight(ask, DaemonPool(4), keeps_tokens=True)
    again.open(9)
    again.submit(3, "w", requests, Sampling(max_tokens=4), recalled, lambda *_: None)
    one, two = again.take(3, lambda: None)
    assert one == recalled["one"] and two.versions == [9, 9] and two.cuts == 1


def test_a_conversation_that_submits_at_once_is_in_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where its thread is faster than the one that starts it."""

    def run_at_once(action: Any) -> Any:
        done: Future[Any] = Future()
        done.set_result(action())
        return done

    monkeypatch.setattr(in_flight, "start", run_at_once)
    flights = InFlight(
        lambda *_: Sampled([5], [-1.0], 1.0, Ended.STOPPED), DaemonPool(2), keeps_tokens=True
    )
    flights.open(0)

    def converse() -> list[Sampled]:
        sampling = Sampling(max_tokens=4)
        requests = {"first": Request((1,), (0,))}
        answers = flights.submit(3, "w", requests, sampling, {}, lambda *_: None)
        return [each.result(20) for each in answers]

    flights.converse(3, converse)
    assert [line["request"] for line in flights.describe_lines()] == ["first"]
    assert [each.token_ids for each in flights.take(3, lambda: None)] == [[5]]


def test_a_completion_goes_on_from_where_it_was_cut_with_other_random_numbers() -> None:
    """No request is on its way while the gate is closed, however the requests and the changes fall together."""
    asked: list[tuple[Request, int]] = []
    aborts, running, weights = threading.Event(), threading.Lock(), [0]

    def ask(request: Request, sampling: Sampling) -> Sampled:
        with running:
            version = weights[0]
        asked.append((request, version))
        tokens = []
        for _ in range(sampling.limit(request)):
            time.sleep(0.002)
            if aborts.is_set():
                assert weights[0] == version
                return Sampled(tokens, [-1.0] * len(tokens), 0.0, Ended.ABORTED)
            tokens.append(version)
        assert weights[0] == version, "it was on its way while they changed"
        return Sampled(tokens, [-1.0] * len(tokens), 0.0, Ended.CUT)

    flights = InFlight(ask, DaemonPool(8), keeps_tokens=True)
    requests = {str(i): Request((i,), (i,)) for i in range(16)}
    flights.open(0)
    flights.submit(0, "w", requests, Sampling(max_tokens=20), {}, lambda *_: None)
    for version in range(1, 6):
        time.sleep(0.015)
        flights.close(aborts.set, 20)
        weights[0] = version
        aborts.clear()
        flights.open(version)
    taken = flights.take(0, lambda: None)
    assert all(each.token_ids == each.versions and len(each.token_ids) == 20 for each in taken)
    assert any(each.cuts > 1 for each in taken)
    assert len({request.seed for request, _ in asked}) == len(
        {(request.seed[0], len(request.prompt_ids)) for request, _ in asked}
    )


def test_a_server_that_does_not_cut_is_a_sentence() -> None:
    hangs = threading.Event()

    def ask(_: Request, __: Sampling) -> Sampled:
        hangs.wait(20)
        return LOST

    flights = InFlight(ask, DaemonPool(1), keeps_tokens=True)
    flights.open(0)
    flights.submit(0, "w", {"a": Request((1,), (0,))}, Sampling(max_tokens=4), {}, lambda *_: None)
    time.sleep(0.1)
    with pytest.raises(UserError, match=r"1 completions were not cut within 0\.5 s of a change"):
        flights.close(lambda: None, 0.5)
    hangs.set()


@pytest.mark.parametrize("fault", ["hangs", "ends", "refuses"])
def test_a_failed_hand_over_is_a_sentence(
    fault: str, recipe: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that hangs while it loads weights is noticed long before its timeout of 600 s; one that only takes long is not."""
    monkeypatch.setattr("finetune.rollout.in_flight.SILENT_SECONDS", 0.3)
    monkeypatch.setattr("finetune.rollout.vllm.GONE_SECONDS", 0.3)
    loads = threading.Event()
    with serving(model) as server:
        served = server.answer

        def answer(path: str, body: dict[str, Any]) -> Any:
            if path == "/collective_rpc":
                loads.set()
                time.sleep(1.5)
                if fault == "refuses":
                    return 500, {"error": {"message": "no room"}}
            if loads.is_set() and fault == "hangs":
                time.sleep(5)
            return served(path, body)

        engine = open_engine(recipe, model, tmp_path, f"vllm_server_base_url={server.url}")
        server.answer = answer  # type: ignore[method-assign]
        sentences = {
            "hangs": r"/v1/models: no answer: timed out after 0\.3 s",
            "refuses": "/collective_rpc: answered 500: no room",
            "ends": "no answer: ",
        }
        if fault == "ends":
            server.shutdown()
            server.server_close()
        started = time.monotonic()
        with pytest.raises(UserError, match=sentences[fault]) as error:
            engine.hand_over()
        assert time.monotonic() - started < 4 and server.url in str(error.value)


def test_a_server_that_ends_with_requests_in_flight_is_a_sentence(
    recipe: Path, model: Path, tmp_path: Path
) -> None:
    with serving(model) as server:
        server.seconds_a_token = 0.05
        keys = [f"vllm_server_base_url={server.url}", "max_staleness=1"]
        engine = open_engine(recipe, model, tmp_path, *keys)
        engine.hand_over()
        requests = [Request((1, 403), (0, 0, i, 0)) for i in range(6)]
        engine.submit(0, requests, Sampling(max_tokens=12, temperature=1.3))
        assert len(engine.take(0)) == 6
        engine.submit(1, requests, Sampling(max_tokens=11, temperature=1.3))
        time.sleep(0.2)
        server.shutdown()
        server.server_close()
        server.changes["/v1/completions"] = (500, {"error": {"message": "it ends"}})
    with pytest.raises(UserError, match=f"{server.url}/(v1/completions|weight_info): "):
        engine.take(1)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_server_that_takes_no_more_requests_is_not_waited_for(
    staleness: int, recipe: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM after a SIGTERM: a connection that is open stays open, and nothing more is said in it."""
    monkeypatch.setattr(in_flight, "SILENT_SECONDS", 0.2)
    is_over = threading.Event()
    with serving(model) as server:
        served = server.answer

        def answer(path: str, body: dict[str, Any]) -> Any:
            if path != "/v1/completions":
                return served(path, body)
            server.shutdown()
            server.server_close()
            is_over.wait()
            return 500, {"error": {"message": "it ends"}}

        keys = [f"vllm_server_base_url={server.url}", f"max_staleness={staleness}"]
        engine = open_engine(recipe, model, tmp_path, *keys)
        server.answer = answer  # type: ignore[method-assign]
        # one, since a second could be refused before it is read
        requests = [Request((1, 403), (0, 0, 0, 0))]
        try:
            with pytest.raises(UserError, match=f"{server.url}/v1/models: "):
                engine.sample(requests, Sampling(max_tokens=12, temperature=1.3))
        finally:
            is_over.set()
