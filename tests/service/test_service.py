"""A service against plain torch and peft, against runs alone, and through restarts."""

import random
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main
from finetune.config.layout import Sharding
from finetune.errors import UserError
from finetune.service import adapters, operations
from finetune.service.endpoints import delete_checkpoint, join_sampler, list_checkpoints
from finetune.service.ledger import RESULTS_KEPT_SECONDS, Ledger, Result
from finetune.service.losses import LOSSES
from finetune.service.serve import refuse_layout
from finetune.service.service import Service
from tests.conftest import slow_but
from tests.service.served import (
    Client,
    Model,
    datum,
    read_outputs,
    read_samples,
    read_top,
    refusing_changes,
    sample,
    serving,
)

TEXTS = (
    "Once upon a time there was a little dog.",
    "The sun was warm and the sky was blue.",
    "Tom had a red ball.",
)


@pytest.fixture(scope="module")
def base(shared: Path) -> Path:
    return shared / "models" / "stories260k"


@pytest.fixture(scope="module")
def rows(base: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    return [tokenizer.encode(text) for text in TEXTS]


def weighted(rows: list[list[int]], draw: random.Random) -> list[dict[str, Any]]:
    return [datum(ids, weights=[draw.random() for _ in ids[1:]]) for ids in rows]


def state_of(service: Service, model: Model) -> Path:
    return service._states / service.ledger.find("model", model.name)["state"]


def plain_step(
    model: Any, optimizer: Any, data: list[dict[str, Any]], loss: str, clip: float
) -> tuple[float, list[list[float]]]:
    """What a script in plain torch computes: the loss of all datums, and one update."""
    total = torch.zeros(())
    scored = []
    for each in data:
        logits = model(torch.tensor([each["tokens"]])).logits[0].float()
        targets = torch.tensor(each["inputs"]["target_tokens"])
        every = torch.log_softmax(logits, -1)
        new = every.gather(1, targets.view(len(targets), -1)).view_as(targets)
        given = {
            name: torch.tensor(values, dtype=torch.float32)
            for name, values in each["inputs"].items()
        }
        if loss == "cross_entropy":
            total = total - (new * given["weights"]).sum()
        else:
            total = total - ((new - given["logprobs"]).exp() * given["advantages"]).sum()
        scored.append(new.tolist())
    total.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip)
    optimizer.step()
    optimizer.zero_grad()
    return total.item(), scored


def with_targets(ids: list[int], count: int, draw: random.Random) -> dict[str, Any]:
    """A datum with so many targets for each token, of its own tokens."""
    rows = range(len(ids) - 1)
    inputs = {
        "target_tokens": [draw.choices(ids, k=count) for _ in rows],
        "weights": [[draw.random() for _ in range(count)] for _ in rows],
    }
    return {"tokens": ids[:-1], "inputs": inputs}


KINDS = ("cross_entropy", "several targets", "importance_sampling")


def draw_data(kind: str, rows: list[list[int]], draw: random.Random) -> list[dict[str, Any]]:
    if kind == "cross_entropy":
        return weighted(rows, draw)
    if kind == "several targets":
        counts = (3, 1, 5)
        every = [with_targets(ids, n, draw) for ids, n in zip(rows, counts, strict=True)]
        return [*every[:2], *weighted(rows[:1], draw), *every[2:]]
    return [
        datum(
            ids,
            logprobs=[-draw.random() * 4 for _ in ids[1:]],
            advantages=[draw.uniform(-1, 1) for _ in ids[1:]],
        )
        for ids in rows
    ]


@pytest.mark.parametrize(
    ("kind", "packing"),
    slow_but(
        [(kind, True) for kind in KINDS] + [("cross_entropy", False)], product(KINDS, [True, False])
    ),
)
def test_losses_and_weights_are_those_of_a_plain_loop_in_torch_and_peft(
    base: Path, rows: list[list[int]], tmp_path: Path, kind: str, packing: bool
) -> None:
    draw = random.Random(kind)
    loss = "cross_entropy" if kind == "several targets" else kind
    # An eps well above a gradient's rounding, which Adam would else blow up to a whole step.
    params = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-2, "weight_decay": 0.1, "grad_clip_norm": 0.5}
    with serving(tmp_path / "run", base, packing=packing) as service:
        client = Client(service)
        model = client.model(rank=4, seed=3)
        plain = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), state_of(service, model), is_trainable=True
        )
        assert plain.peft_config["default"].r == 4
        trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=0.02, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.1
        )
        for _ in range(4):
            data = draw_data(kind, rows, draw)
            passed = model.pass_data(data, loss)
            stepped = model.step(0.02, **params)
            found, scored = read_outputs(client.result(passed))
            assert "error" not in client.result(stepped)
            expected, plain_scored = plain_step(plain, optimizer, data, loss, 0.5)
            assert found == pytest.approx(expected, abs=1e-5 * max(1.0, abs(expected)))
            for one, other in zip(scored, plain_scored, strict=True):
                torch.testing.assert_close(
                    torch.tensor(one), torch.tensor(other), rtol=0, atol=2e-5
                )
        reopened = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), state_of(service, model)
        )
    values = dict(reopened.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(
                values[name], parameter, rtol=0, atol=2e-5, check_device=False
            )


def watch_operations(service: Service) -> list[str]:
    """The names of the operations that are done from now on."""
    done: list[str] = []
    run = service._run

    def watched(operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        done.append(operation)
        return run(operation, arguments)

    service._run = watched
    return done


def train(client: Client, model: Model, data: list[list[dict[str, Any]]]) -> list[float]:
    losses = []
    for each in data:
        passed = model.pass_data(each)
        stepped = model.step()
        losses.append(read_outputs(client.result(passed))[0])
        client.result(stepped)
    return losses


RANKS = (1, 2, 3, 4, 5, 6, 7, 8)


def train_at_once(
    service: Service, data: Mapping[int, list[list[dict[str, Any]]]]
) -> dict[int, list[float]]:
    """The losses of a model of each rank, all of whose requests wait at the same time."""
    draw = random.Random(0)
    clients = [Client(service), Client(service)]
    models = {rank: clients[rank % 2].model(rank, seed=rank) for rank in RANKS}
    losses: dict[int, list[float]] = {rank: [] for rank in RANKS}
    for step in range(3):
        promised = [(rank, models[rank].pass_data(data[rank][step])) for rank in RANKS]
        steps = [models[rank].step() for rank in draw.sample(RANKS, 8)]
        for rank, promise in promised:
            losses[rank].append(read_outputs(clients[0].result(promise))[0])
        for promise in steps:
            assert "error" not in clients[0].result(promise)
    return losses


@pytest.mark.slow
def test_eight_adapters_have_the_losses_of_eight_runs_alone(
    base: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    draw = random.Random(0)
    data = {rank: [weighted(rows[rank % 3 :], draw) for _ in range(3)] for rank in RANKS}
    alone: dict[int, list[float]] = {}
    for rank in RANKS:
        with serving(tmp_path / f"alone{rank}", base, lora_r=rank) as service:
            client = Client(service)
            alone[rank] = train(client, client.model(rank, seed=rank), data[rank])
    in_turn = {"forward_backward": 24, "forward_backward_together": 0}
    in_one_pass = {"forward_backward": 0, "forward_backward_together": 3}
    cases = [(1, True, in_turn), (8, True, in_one_pass), (8, False, in_one_pass)]
    for most_stacked, packing, expected in cases:
        folder = tmp_path / f"{most_stacked}-{packing}"
        keys = {"most_stacked": most_stacked, "packing": packing, "max_length": 512}
        with serving(folder, base, **keys) as service:
            done = watch_operations(service)
            losses = train_at_once(service, data)
        assert {name: done.count(name) for name in expected} == expected
        for rank in RANKS:
            assert losses[rank] == pytest.approx(alone[rank], abs=1e-6 * max(alone[rank])), rank


def test_several_targets_share_a_pass_with_one_and_have_the_losses_of_a_run_alone(
    base: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    draw = random.Random(2)
    data = [draw_data("several targets", rows, draw), weighted(rows, draw)]
    data.append([with_targets(ids, 20, draw) for ids in rows])
    found: dict[int, list[tuple[float, list[Any]]]] = {}
    norms: dict[int, list[float]] = {}
    for most_stacked in (1, 8):
        keys = {"most_stacked": most_stacked, "max_length": 512}
        with serving(tmp_path / str(most_stacked), base, **keys) as service:
            done = watch_operations(service)
            client = Client(service)
            models = [client.model(4, seed=number) for number in range(3)]
            promised = [model.pass_data(own) for model, own in zip(models, data, strict=True)]
            steps = [model.step() for model in models]
            found[most_stacked] = [read_outputs(client.result(each)) for each in promised]
            norms[most_stacked] = [
                client.result(each)["metrics"]["grad_norm:mean"] for each in steps
            ]
        assert done.count("forward_backward_together") == int(most_stacked == 8)
    assert norms[8] == pytest.approx(norms[1], rel=1e-5)
    for alone, beside in zip(found[1], found[8], strict=True):
        assert beside[0] == pytest.approx(alone[0], rel=1e-6)
        assert [np.shape(row) for row in beside[1]] == [np.shape(row) for row in alone[1]]
        for one, other in zip(beside[1], alone[1], strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
    assert [np.shape(row)[1:] for row in found[8][0][1]] == [(3,), (1,), (), (5,)]


@pytest.mark.parametrize("model_type", ["llama", "opt", "falcon"])
def test_a_base_with_dropout_has_the_losses_of_one_without(
    model_type: str, base: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    """As they are without a backward; and equal adapters have equal losses in one pass."""
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    dropouts = dict.fromkeys(("attention_dropout", "dropout", "hidden_dropout"), 0.5)
    config = AutoConfig.for_model(
        model_type, vocab_size=512, word_embed_proj_dim=16, **sizes, **dropouts
    )
    copy = tmp_path / "base"
    AutoModelForCausalLM.from_config(config).save_pretrained(copy)
    AutoTokenizer.from_pretrained(base).save_pretrained(copy)
    data = [datum(ids, weights=1.0) for ids in rows]
    with serving(tmp_path / "run", copy) as service:
        client = Client(service)
        models = [client.model(seed=1), client.model(seed=1)]
        alone = client.result(models[0].pass_data(data, forward_only=True))
        expected = read_outputs(alone)[0]
        for promise in [model.pass_data(data) for model in models]:
            assert read_outputs(client.result(promise))[0] == pytest.approx(expected, rel=1e-6)


def test_one_models_fault_is_not_that_of_those_beside_it(
    base: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    data = [datum(ids, weights=1.0) for ids in rows]
    with serving(tmp_path, base) as service:
        client = Client(service)
        models = [client.model(4, seed=number) for number in range(3)]
        weights = state_of(service, models[1]) / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        service._run.__self__._adapters._shards.clear()  # type: ignore[attr-defined]
        done = watch_operations(service)
        promised = [model.pass_data(data) for model in models]
        first, damaged, last = (client.result(promise) for promise in promised)
    done.remove("drop_gradients")
    assert done == ["forward_backward_together", *["forward_backward"] * 3]
    assert "is damaged; load another checkpoint" in damaged["error"]
    assert read_outputs(first)[0] == pytest.approx(read_outputs(last)[0], abs=1e-4)


def test_a_failed_batch_leaves_no_gradients_to_the_next_model(
    base: Path, rows: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [datum(ids, weights=1.0) for ids in rows]

    def fail(*_arguments: object) -> None:
        raise UserError("no batch")

    norms = []
    for fails in (False, True):
        with serving(tmp_path / str(fails), base, most_stacked=1) as service:
            client = Client(service)
            models = [client.model(4, seed=number) for number in range(2)]
            client.result(models[0].pass_data(data))
            if fails:
                with monkeypatch.context() as patch:
                    patch.setattr(operations, "make_batch", fail)
                    assert client.result(models[0].pass_data(data))["error"] == "no batch"
            client.result(models[1].pass_data(data))
            gradients = service._run.__self__._gradients[models[1].name]  # type: ignore[attr-defined]
            norms.append(sum(float(each.square().sum()) for each in gradients.tensors))
    assert norms[0] == norms[1]


@pytest.mark.parametrize("fault", ["full disk", "damaged checkpoint", "faulty pass"])
def test_a_request_that_fails_leaves_no_gradients(
    base: Path, rows: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The ledger marks them as dropped: the next update would add those of twice the data."""
    data = [datum(ids, weights=1.0) for ids in rows]

    def fail(*_arguments: object) -> None:
        raise RuntimeError("a kernel has failed")

    with serving(tmp_path, base, max_length=512) as service:
        client = Client(service)
        model, other = client.model(seed=1), client.model(seed=2)
        path = client.result(model.send("save_weights", path="it"))["path"]
        client.result(model.pass_data(data))
        expected = client.result(model.step(0.0))["metrics"]["grad_norm:mean"]
        client.result(model.pass_data(data))
        with monkeypatch.context() as patch:
            if fault == "full disk":
                patch.setattr(service, "_most_disk_bytes", 0)
                failed = model.step(0.0)
            elif fault == "damaged checkpoint":
                state = service.ledger.find("checkpoint", path)["state"]
                (service._states / state / "state.json").write_text("{}")
                service._run.__self__._adapters._shards.clear()  # type: ignore[attr-defined]
                failed = model.send("load_weights", path=path, optimizer=False)
            else:
                patch.setattr(operations, "AdapterStack", fail)
                failed = model.pass_data(data)
                other.pass_data(data)
            assert "error" in client.result(failed)
        client.result(model.pass_data(data))
        found = client.result(model.step(0.0))["metrics"]["grad_norm:mean"]
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_finished_session_leaves_no_gradients_in_memory(
    base: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    with serving(tmp_path, base) as service:
        clients = [Client(service), Client(service)]
        models = [client.model() for client in clients]
        held = []
        for client, model in zip(clients, models, strict=True):
            client.result(model.pass_data([datum(rows[0], weights=1.0)]))
            gradients = service._run.__self__._gradients[model.name]  # type: ignore[attr-defined]
            held.append(weakref.ref(gradients.tensors[0]))
        del gradients
        clients[0].post("sessions/{id}/finish", {"id": clients[0].session})
        service.work(0.0)
        assert held[0]() is None
        assert held[1]() is not None
        assert "error" not in clients[1].result(models[1].step())


def test_a_model_that_was_not_made_is_not_saved(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the checkpoint has no state, and loading it would begin a new adapter without a word."""
    with serving(tmp_path, base) as service:
        client = Client(service)

        def refuse() -> None:
            raise UserError("the disk is full")

        monkeypatch.setattr(service, "_refuse_full_disk", refuse)
        asked = {"session_id": client.session, "model_seq_id": 0}
        asked |= {"base_model": service.model_name, "lora_config": {"rank": 8}}
        promise = client.post("create_model", asked)
        assert client.result(promise)["error"] == "the disk is full"
        model = Model(client, promise["model_id"])
        for path in ("save_weights", "save_weights_for_sampler"):
            answer = client.result(model.send(path, path="it"))
            assert "was not made; its first request has failed" in answer.get("error", ""), answer
        assert not service.ledger.records("checkpoint")


@pytest.mark.parametrize(
    "places",
    [[[1, 1, 1], [2, 5]], pytest.param([[0, 4], [3, 3, 2]], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_a_restart_at_any_place_loses_nothing_that_was_promised(
    places: list[list[int]], base: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    draw = random.Random(1)
    data = [weighted(rows, draw) for _ in range(6)]

    def send_all(model: Model) -> list[dict[str, Any]]:
        return [
            promise
            for first, second in zip(data[::2], data[1::2], strict=True)
            for promise in (model.pass_data(first), model.pass_data(second), model.step())
        ]

    def weights(service: Service, model: Model) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(state_of(service, model) / "adapter_model.safetensors")

    with serving(tmp_path / "calm", base) as service:
        client = Client(service)
        model = client.model(4, seed=1)
        promised = send_all(model)
        calm = [client.result(each) for each in promised]
        expected = weights(service, model)
    for cuts in places:
        folder = tmp_path / "-".join(map(str, cuts))
        with serving(folder, base) as service:
            model = Client(service).model(4, seed=1)
            promised = send_all(model)
            for _ in range(cuts[0]):
                service.work(0.0)
        for cut in [*cuts[1:], 100]:
            with serving(folder, base) as service:
                model.client.service = service
                for _ in range(cut):
                    service.work(0.0)
                if cut == 100:
                    assert [model.client.result(each) for each in promised] == calm
                    found = weights(service, model)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_requests_wait_for_those_before_them_and_are_done_once(
    base: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    with serving(tmp_path / "run", base) as service:
        client = Client(service)
        model = client.model()
        model.seq = 1
        later = model.step()
        assert not service.work(0.0), "the first request has not come"
        model.seq = 0
        data = [datum(ids, weights=1.0) for ids in rows]
        passed = model.pass_data(data)
        again = client.post("optim_step", {"model_id": model.name, "seq_id": 2, "adam_params": {}})
        assert again == later
        first = read_outputs(client.result(passed))[0]
        assert "grad_norm:mean" in client.result(later)["metrics"]
        model.seq = 2
        assert read_outputs(client.result(model.pass_data(data, forward_only=True)))[0] < first
        assert client.result(model.step()) == {
            "error": "optim_step: no gradients; call forward_backward first", "category": "user",
        }  # fmt: skip


def test_weights_come_back_with_and_without_the_optimizer(
    base: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    data = [datum(ids, weights=1.0) for ids in rows]
    with serving(tmp_path / "run", base) as service:
        client = Client(service)
        model = client.model(4)
        train(client, model, [data] * 2)
        path = client.result(model.send("save_weights", path="here"))["path"]
        assert path == f"tinker://{model.name}/weights/here"
        assert "exists" in client.result(model.send("save_weights", path="here"))["error"]
        expected = train(client, model, [data] * 2)
        for optimizer in (True, False):
            asked = {
                "session_id": client.session,
                "model_seq_id": client.models,
                "path": path,
                "optimizer": optimizer,
            }
            client.models += 1
            other = Model(client, client.result(client.post("load_weights", asked))["model_id"])
            found = train(client, other, [data] * 2)
            assert found[0] == pytest.approx(expected[0], abs=1e-6)
            assert (found[1] == pytest.approx(expected[1], abs=1e-6)) is optimizer
        assert client.post("weights_info", {"tinker_path": path})["lora_rank"] == 4
        client.result(model.send("load_weights", path=path, optimizer=True))
        assert train(client, model, [data] * 2) == pytest.approx(expected, abs=1e-6)


def test_samples_are_those_of_transformers_and_hang_on_nothing_beside_them(
    base: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompt = rows[0][:6]
    with serving(tmp_path / "run", base) as service:
        client = Client(service)
        model = client.model(4)
        train(client, model, [[datum(ids, weights=1.0) for ids in rows]])
        sampler = client.result(model.send("save_weights_for_sampler", sampling_session_seq_id=0))[
            "sampling_session_id"
        ]
        train(
            client, model, [[datum(ids, weights=1.0) for ids in rows]]
        )  # the sampler stays what it was
        plain = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base),
            service._states / service.ledger.find("sampler", sampler)["state"],
        )
        greedy = plain.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0
        )[0, 6:].tolist()
        promised = sample(
            client, sampler, 0, prompt, temperature=0.0, max_tokens=12, prompt_logprobs=True
        )
        (found,), scores = read_samples(client.result(promised))
        assert found[0] == greedy
        with torch.no_grad():
            logits = torch.log_softmax(plain(torch.tensor([prompt + greedy])).logits[0].float(), -1)
        every = logits[:-1].gather(1, torch.tensor((prompt + greedy)[1:])[:, None])[:, 0].tolist()
        assert found[1] == pytest.approx(every[5:], abs=5e-5)
        assert scores[1:] == pytest.approx(every[:5], abs=5e-5)
        widths = (3, 512, 0)
        promises = [
            sample(client, sampler, 20 + n, prompt, max_tokens=1, topk_prompt_logprobs=n)
            for n in widths
        ]
        assert read_top(client.result(promises[2])) == ([], [])
        for width, promise in zip(widths[:2], promises[:2], strict=True):
            values, likeliest = logits[:5].topk(width)
            top_ids, top_scores = read_top(client.result(promise))
            assert (top_ids[0], top_scores[0]) == ([0] * width, [-99999.0] * width)
            torch.testing.assert_close(torch.tensor(top_scores[1:]), values, rtol=0, atol=5e-5)
            assert [row[:3] for row in top_ids[1:]] == [row[:3] for row in likeliest.tolist()]
        alone = read_samples(
            client.result(sample(client, sampler, 1, prompt, seed=7, max_tokens=9, num_samples=3))
        )[0]
        asked = [
            sample(client, sampler, 2 + n, rows[n][:4], seed=n, max_tokens=9) for n in range(3)
        ]
        beside = sample(client, sampler, 9, prompt, seed=7, max_tokens=9, num_samples=3)
        for one, other in zip(read_samples(client.result(beside))[0], alone, strict=True):
            assert one[0] == other[0]
            assert one[1] == pytest.approx(other[1], abs=5e-5)
        assert len({tuple(tokens) for tokens, _ in alone}) > 1
        assert all(read_samples(client.result(each))[0] for each in asked)
        word = tokenizer.decode(greedy).split()[1]
        cut = read_samples(
            client.result(
                sample(client, sampler, 10, prompt, temperature=0.0, max_tokens=12, stop=[word])
            )
        )[0][0][0]
        assert (
            cut == greedy[: len(cut)]
            and word in tokenizer.decode(cut)
            and word not in tokenizer.decode(cut[:-1])
        )
        third = greedy[2]
        assert (
            read_samples(
                client.result(
                    sample(
                        client, sampler, 11, prompt, temperature=0.0, max_tokens=12, stop=[third]
                    )
                )
            )[0][0][0]
            == greedy[:3]
        )
        asked = {
            "session_id": client.session,
            "sampling_session_seq_id": 1,
            "base_model": service.model_name,
        }
        bare = client.post("create_sampling_session", asked)["sampling_session_id"]
        untrained = (
            AutoModelForCausalLM.from_pretrained(base)
            .generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0)[
                0, 6:
            ]
            .tolist()
        )
        assert (
            read_samples(
                client.result(
                    sample(client, bare, 0, prompt, temperature=0.0, max_tokens=12, stop=[])
                )
            )[0][0][0]
            == untrained
        )


def test_what_a_full_disk_refuses_is_written_once_there_is_room(
    base: Path, rows: list[list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for is_full, answered in answers.items():
        with serving(tmp_path / str(is_full), base) as service:
            client = Client(service)
            model = client.model()
            done = watch_operations(service)
            pass_data = partial(model.pass_data, [datum(rows[0], weights=1.0)])
            for ask in [pass_data, model.step] * 3:
                promise = ask()
                with refusing_changes(service) if is_full else nullcontext():
                    assert service.work(0.0)
                    service.has_unused = True  # is not removed before the result is written
                    assert not service.work(0.0)
                    result = service.ledger.result(promise["request_id"])
                    assert (result is None) == is_full
                answered.append(client.result(promise))
            trained = [name for name in done if name != "drop_gradients"]
            assert trained == ["forward_backward", "optim_step"] * 3
            PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(base), state_of(service, model)
            )
    assert answers[True] == answers[False] and answers[True][0] != answers[True][2]
    said = [line for line in capsys.readouterr().err.splitlines() if "cannot be written" in line]
    assert len(said) == 6 and all("continues once there is room" in line for line in said)


@pytest.mark.parametrize("place", ["being written", "without a record"])
def test_a_client_that_leaves_removes_no_state_of_an_update_in_hand(
    base: Path, rows: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with serving(tmp_path, base) as service:
        client, leaving = Client(service), Client(service)
        model, left = client.model(), state_of(service, leaving.model())
        client.result(model.pass_data([datum(rows[0], weights=1.0)]))
        changed, name = {
            "being written": (adapters, "write_file"),
            "without a record": (service, "_run"),
        }[place]
        act = getattr(changed, name)

        def act_and_leave(*arguments: Any) -> Any:
            result = act(*arguments)
            with ThreadPoolExecutor(1) as http:
                http.submit(leaving.post, "sessions/{id}/finish", {"id": leaving.session}).result()
            return result

        with monkeypatch.context() as patch:
            patch.setattr(changed, name, act_and_leave)
            assert "error" not in client.result(model.step())
        PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), state_of(service, model)
        )
        assert not left.exists()
        path = client.result(model.send("save_weights", path="brief"))["path"]
        client.result(model.pass_data([datum(rows[0], weights=1.0)]))
        saved = state_of(service, model)
        client.result(model.step())
        assert saved.exists()
        run, _, name = path.removeprefix("tinker://").partition("/weights/")
        delete_checkpoint(service, {"id": run, "segment": "weights", "name": name})
        assert saved.exists()
        service.work(0.0)
        assert not saved.exists()


def test_a_server_that_goes_on_forgets_old_results_and_expired_checkpoints(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, base) as service:
        client = Client(service)
        model = client.model()
        saved = model.send("save_weights", path="brief", ttl_seconds=60)
        path = client.result(saved)["path"]
        client.result(model.send("save_weights", path="other"))
        with service.ledger.change("checkpoint", path) as record:
            record["expires"] -= 61
        later = time.time() + RESULTS_KEPT_SECONDS + 60
        monkeypatch.setattr(time, "time", lambda: later)
        service.work(0.0)
        assert service.ledger.result(saved["request_id"]) is not None
        hour_later = time.monotonic() + 3601
        monkeypatch.setattr(time, "monotonic", lambda: hour_later)
        service.work(0.0)
        with pytest.raises(UserError, match="is not known here"):
            service.ledger.result(saved["request_id"])
        assert path not in service.ledger.records("checkpoint")


def test_a_session_whose_client_is_gone_is_finished_after_an_hour(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with serving(tmp_path, base) as service:
        gone, alive = Client(service), Client(service)
        model = gone.model()
        state = state_of(service, model)
    now += 3600.0  # in which the server does not run
    with serving(tmp_path, base) as service:
        gone.service = alive.service = service
        service.most_sessions = 2
        now += 3500.0
        alive.post("session_heartbeat", {"session_id": alive.session})
        with pytest.raises(UserError, match="2 sessions are open"):
            Client(service)
        assert state.exists()
        now += 110.0
        Client(service)
        service.work(0.0)
        assert not state.exists()
        with pytest.raises(UserError, match="is finished"):
            model.step()
        alive.model()


def test_a_new_model_that_cannot_be_loaded_is_refused_with_the_reason(
    base: Path, tmp_path: Path
) -> None:
    with serving(tmp_path, base) as service:
        client = Client(service)
        model = client.model()
        path = client.result(model.send("save_weights_for_sampler", path="it"))["path"]
        new = {"session_id": client.session, "model_seq_id": 1, "optimizer": True}
        for asked, reason in (
            ({"path": path}, "holds no optimizer state"),
            ({"path": f"{path}s"}, "is not known here"),
            ({"path": path, "optimizer": False, "session_id": "x"}, "session 'x': is not known"),
            ({"path": path, "model_id": None}, "holds no optimizer state"),
        ):
            with pytest.raises(UserError, match=reason):
                client.post("load_weights", {**new, **asked})


def test_a_checkpoint_that_was_promised_stays_if_the_client_leaves_before(
    base: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    data = [datum(ids, weights=1.0) for ids in rows]
    norms = []
    with serving(tmp_path, base) as service:
        for leaves in (False, True):
            client = Client(service)
            model = client.model(seed=1)
            client.result(model.pass_data(data))
            model.pass_data(data)
            stepped = model.step()
            saved = model.send("save_weights", path="end")
            if leaves:
                client.post("sessions/{id}/finish", {"id": client.session})
            norms.append(client.result(stepped)["metrics"]["grad_norm:mean"])
            path = client.result(saved)["path"]
            state = service._states / service.ledger.find("checkpoint", path)["state"]
            PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), state)
    assert norms[0] == norms[1]


def test_a_waiting_load_or_sample_keeps_the_state_that_it_was_promised(
    base: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    """The checkpoint is deleted, and the sampler's client leaves, before the server is started again."""
    with serving(tmp_path, base) as service:
        client, leaving = Client(service), Client(service)
        model = client.model()
        path = client.result(model.send("save_weights", path="brief"))["path"]
        for one in (model, leaving.model()):  # whose own states are others than the saved ones
            saving = one.send("save_weights_for_sampler", sampling_session_seq_id=0)
            sampler = client.result(saving)["sampling_session_id"]
            client.result(one.pass_data([datum(rows[0], weights=1.0)]))
            client.result(one.step())
        waiting = [sample(leaving, sampler, 0, rows[0], max_tokens=4)]
        asked = {"session_id": client.session, "model_seq_id": 1, "path": path, "optimizer": False}
        waiting.append(client.post("load_weights", asked))
        run, _, name = path.removeprefix("tinker://").partition("/weights/")
        delete_checkpoint(service, {"id": run, "segment": "weights", "name": name})
        service.ledger.remove("sampler", f"{client.session}:sample:0")
        client.post("sessions/{id}/finish", {"id": leaving.session})
    with serving(tmp_path, base) as service:
        client = Client(service)
        for promise in waiting:
            assert "error" not in client.result(promise)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_table_of_one_column_is_a_row(service: Service, rows: list[list[int]], loss: str) -> None:
    client = Client(service)
    model = client.model()
    draw = random.Random(loss)
    names = LOSSES[loss].inputs
    row = datum(rows[0], **{name: [draw.uniform(-2, 2) for _ in rows[0][1:]] for name in names})
    columns = {name: [[each] for each in values] for name, values in row["inputs"].items()}
    options = dict.fromkeys(LOSSES[loss].options, 0.9)
    losses = []
    for datums in ([row], [row | {"inputs": columns}], [row, row | {"inputs": columns}]):
        promise = model.pass_data(datums, loss, options=options, forward_only=True)
        total, scored = read_outputs(client.result(promise))
        losses.append(total / len(datums))
        shapes = [(len(rows[0]) - 1,), (len(rows[0]) - 1, 1)]
        expected = [shapes[isinstance(each["inputs"]["target_tokens"][0], list)] for each in datums]
        assert [np.shape(each) for each in scored] == expected
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)


REFUSED = {
    "no target": (
        {"inputs": {"weights": [1.0, 1.0]}},
        "cross_entropy reads target_tokens, weights; given were weights",
    ),
    "a number too few": (
        {"inputs": {"target_tokens": [1, 2], "weights": [1.0]}},
        "weights has 1 numbers for 2 tokens",
    ),
    "another shape": (
        {"inputs": {"target_tokens": [[1, 2], [3, 4]], "weights": [1.0, 1.0]}},
        "weights has the shape [2], target_tokens [2, 2]; the same is expected",
    ),
    "no targets": (
        {"inputs": {"target_tokens": [[], []], "weights": [[], []]}},
        "target_tokens is a table without columns",
    ),
    "no id among several": (
        {"inputs": {"target_tokens": [[1, 2], [3, -1]], "weights": [[1.0, 1.0]] * 2}},
        "-1 is no id below 512",
    ),
    "not finite": (
        {"inputs": {"target_tokens": [1, 2], "weights": [1.0, float("nan")]}},
        "weights holds a value that is no finite number in fp32",
    ),
    "too large for fp32": (
        {"inputs": {"target_tokens": [1, 2], "weights": [1.0, 1e39]}},
        "weights holds a value that is no finite number in fp32",
    ),
    "too large for any float": (
        {"inputs": {"target_tokens": [1, 2], "weights": [1.0, 10**400]}},
        "weights holds a value that is no number",
    ),
    "no id": (
        {"inputs": {"target_tokens": [1, 512], "weights": [1.0, 1.0]}},
        "512 is no id below 512",
    ),
    "too long": (
        {"tokens": [1] * 200, "inputs": {"target_tokens": [1], "weights": [1.0]}},
        "200 tokens, where 1 to 128 are expected",
    ),
    "several targets for another loss": (
        {
            "loss": "ppo",
            "inputs": {
                name: [[1, 2], [3, 4]] for name in ("target_tokens", "logprobs", "advantages")
            },
        },
        "ppo takes one target for each token; cross_entropy takes several",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_datum_that_cannot_be_used_is_refused_and_keeps_its_place(
    base: Path, rows: list[list[int]], case: str, service: Service
) -> None:
    client = Client(service)
    model = client.model()
    changed, message = REFUSED[case]
    wrong = {"tokens": [1, 2], "inputs": {}, "loss": "cross_entropy"} | changed
    refused = send_wrong(client, model, wrong, wrong.pop("loss"))
    right = model.pass_data([datum(rows[0], weights=1.0)])
    answer = client.result(refused)
    assert message in answer["error"] and answer["category"] == "user"
    assert read_outputs(client.result(right))[0] > 0


def send_wrong(client: Client, model: Model, wrong: dict[str, Any], loss: str) -> dict[str, Any]:
    from finetune.service.endpoints import forward_backward

    model.seq += 1
    own = {
        "model_id": model.name,
        "seq_id": model.seq,
        "forward_only": False,
        "loss_fn": loss,
        "options": {},
    }
    return forward_backward(client.service, {**own, "problem": None, "data": [wrong]})


@pytest.fixture(scope="module")
def service(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving(tmp_path_factory.mktemp("service") / "run", base) as service:
        yield service


def test_what_is_not_served_is_a_sentence(service: Service, tmp_path: Path) -> None:
    client = Client(service)
    asked = {
        "session_id": client.session,
        "model_seq_id": 0,
        "base_model": service.model_name,
        "lora_config": {"rank": 9},
    }
    for path, sent, message in (
        ("create_model", asked, "lora_config.rank: 9 is above 8"),
        ("create_model", asked | {"base_model": "other"}, "'other' is not served here"),
        ("create_model", asked | {"session_id": "x"}, "session 'x': is not known here"),
        ("create_model", asked | {"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type"),
        ("create_sampling_session", {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": "tinker://../../etc/weights/x"}, "is not known here"),
        ("optim_step", {"model_id": "x", "seq_id": 1, "adam_params": {}}, "model 'x': is not known here"),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            client.post(path, sent)
        assert message in str(caught.value)
    model = client.model()
    assert "path" in client.result(model.send("save_weights", path="../up"))["error"]
    assert "eps" in client.result(model.step(eps=0.0))["error"]
    service.most_sessions = 0
    with pytest.raises(UserError, match="sessions are open"):
        Client(service)
    service.most_sessions = 64
    client.post("sessions/{id}/finish", {"id": client.session})
    with pytest.raises(UserError, match="is finished"):
        model.step()


def test_an_expired_checkpoint_is_as_one_that_is_not_there(service: Service) -> None:
    """It was listed, and kept its name, until something else removed it."""
    client = Client(service)
    model = client.model()
    path = client.result(model.send("save_weights", path="brief", ttl_seconds=60))["path"]

    def list_paths() -> list[str]:
        listed = list_checkpoints(service, {"id": model.name})["checkpoints"]
        return [each["tinker_path"] for each in listed]

    assert list_paths() == [path]
    with service.ledger.change("checkpoint", path) as record:
        record["expires"] -= 61
    with pytest.raises(UserError, match="has expired"):
        client.post("weights_info", {"tinker_path": path})
    assert list_paths() == []
    assert client.result(model.send("save_weights", path="brief"))["path"] == path
    assert list_paths() == [path]


def test_sessions_that_begin_at_once_are_counted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two clients has counted before the other one's session is there, where nothing hinders it."""
    both_counted = threading.Barrier(2)
    records = service.ledger.records

    def read_slowly(kind: str) -> dict[str, Any]:
        counted = records(kind)
        with suppress(threading.BrokenBarrierError):
            both_counted.wait(0.3)
        return counted

    sessions = records("session").values()
    monkeypatch.setattr(service.ledger, "records", read_slowly)
    monkeypatch.setattr(
        service, "most_sessions", 1 + sum(not each["finished"] for each in sessions)
    )
    with ThreadPoolExecutor(2) as threads:
        begun = [threads.submit(Client, service) for _ in range(2)]
    errors = [str(each.exception()) for each in begun if each.exception() is not None]
    assert len(errors) == 1 and "sessions are open" in errors[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: others can reach it; set FINETUNE_API_KEY"),
        (["lora_dropout=0.1", "use_dora=true"], "serve-training: use_dora, lora_dropout: cannot be combined with it"),
        (
            ["attention_dropout=0.1", "neftune_noise_alpha=5", "quantization_aware_training=int8-int4"],
            "serve-training: attention_dropout, neftune_noise_alpha, quantization_aware_training: cannot be combined with it",
        ),
        (["use_peft=false"], "serve-training: clients train adapters; set use_peft: true"),
    ],
)  # fmt: skip
def test_what_the_command_cannot_serve_is_one_sentence(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("FINETUNE_API_KEY", raising=False)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: {base}\nuse_peft: true\noutput_dir: {tmp_path}/run\n")
    assert main(["serve-training", "--recipe", str(recipe), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_layout_that_cuts_an_adapters_matrices_is_refused() -> None:
    refuse_layout(Sharding(layout="single"))
    for sharding in (
        Sharding(layout="single", tensor_parallel_size=2),
        Sharding(layout="ddp", mixed_precision="fp16"),
        Sharding(layout="fsdp1"),
    ):
        with pytest.raises(UserError, match="DDP and FSDP2 are served"):
            refuse_layout(sharding)


def test_clients_that_join_a_sampler_at_once_get_different_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", 10)
    ledger.put("sampler", "shared", {"clones": 0})
    service: Any = SimpleNamespace(ledger=ledger)
    find = ledger.find
    both_have_read = threading.Barrier(2)

    def find_and_wait(kind: str, name: object) -> dict[str, Any]:
        body = find(kind, name)
        with suppress(threading.BrokenBarrierError):  # the other one waits for the lock
            both_have_read.wait(0.3)
        return body

    monkeypatch.setattr(ledger, "find", find_and_wait)

    def join(_: int) -> int:
        answer: int = join_sampler(service, {"sampling_session_id": "shared"})["client_counter"]
        return answer

    with ThreadPoolExecutor(2) as pool:
        numbers = sorted(pool.map(join, range(2)))
    ledger.close()
    assert numbers == [1, 2]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)], ids=str)
def test_a_queue_goes_on_after_its_old_results_are_forgotten(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """The last that came is not the last that was done: it still waits, or came before its turn."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, 10)
    for seq in order:
        ledger.accept(f"model:{seq}", "model", seq, "optim_step", {})
    done = 2 if order == (0, 1, 2) else 3
    for _ in range(done):
        (request,) = ledger.take(0.0)
        ledger.finish(request, Result("application/json", b"{}"), {})
    ledger._database.execute("UPDATE request SET at = at - ?", [RESULTS_KEPT_SECONDS + 1])
    ledger.close()
    ledger = Ledger(path, 10)
    ledger.accept("model:3", "model", 3, "optim_step", {})
    with pytest.raises(UserError, match="is not known here"):
        ledger.result("model:0")
    for seq in range(done, 4):
        (request,) = ledger.take(0.0)
        assert request.seq == seq
        ledger.finish(request, Result("application/json", b"{}"), {})
    ledger.close()
