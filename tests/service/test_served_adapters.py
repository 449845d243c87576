"""Clients' adapters sampled by a vLLM server: a stand-in for it, and, slow, itself. The log-probabilities are those of PEFT's model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from finetune.errors import UserError
from finetune.service import served_adapters
from finetune.service.service import Service
from tests.conftest import make_model, slow_but
from tests.rollout import stand_in_vllm
from tests.rollout.test_vllm import serving_by_vllm
from tests.service.served import Client, Model, datum, read_outputs, read_samples, sample, serving

PROMPT = [1, 5, 9, 13]
DATA = [datum([1, 5, 9, 13, 17, 21], weights=1.0)]


def draw(client: Client, model: Model, number: int) -> list[tuple[list[int], list[float]]]:
    """Samples of the model as it is now."""
    named = client.result(model.send("save_weights_for_sampler", sampling_session_seq_id=number))
    sampler = named["sampling_session_id"]
    promised = sample(client, sampler, 0, PROMPT, seed=5, max_tokens=8, num_samples=3)
    return read_samples(client.result(promised))[0]


def score(base: Path, service: Service, model: Model, tokens: Sequence[int]) -> list[float]:
    """The log-probabilities of tokens after the prompt, by PEFT's model of the state."""
    state = service._states / service.ledger.find("model", model.name)["state"]
    plain: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), state)
    with torch.no_grad():
        logits = plain(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    scores = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens)[:, None])
    values: list[float] = scores[:, 0].tolist()
    return values


def check_samples(base: Path, url: str, folder: Path) -> None:
    """Of two clients' adapters, after each of two updates."""
    with serving(folder, base, vllm_server=url) as service:
        client = Client(service)
        models = [client.model(4, seed=number) for number in range(2)]
        for number in range(2):
            for model in models:
                assert read_outputs(client.result(model.pass_data(DATA)))
                assert "error" not in client.result(model.step(0.1))
            for place, model in enumerate(models):
                for tokens, scores in draw(client, model, 2 * number + place):
                    expected = score(base, service, model, tokens)
                    assert scores == pytest.approx(expected, abs=1e-4)


# vLLM knows modules of GLM-4 by other names. Of 4 adapters, 6 would hold all.
@pytest.mark.parametrize(
    ("family", "limit", "most_loaded"),
    slow_but([("glm4", 3, 3), ("glm4", 6, 4)], [("llama", 3, 3), ("glm4", 3, 3), ("glm4", 6, 4)]),
)
def test_a_servers_samples_are_of_each_clients_adapter(
    family: str, limit: int, most_loaded: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_model(tmp_path / "base", model_type=family, initializer_range=0.3)
    monkeypatch.setattr(served_adapters, "MOST_LOADED", limit)
    with stand_in_vllm.serving(base) as server:
        check_samples(base, server.url, tmp_path / "run")
        assert len(server.loads) == 4
        assert len(server.adapters) == most_loaded
        assert len({body["model"] for body, _ in server.asked}) == 4


def test_a_server_that_an_ended_run_left_paused_is_resumed(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    with stand_in_vllm.serving(base) as server:
        server.at_pause("/pause?mode=abort")
        with serving(tmp_path / "run", base, vllm_server=server.url):
            assert not server.is_paused


def test_a_server_of_another_base_is_refused(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    other = make_model(tmp_path / "other")
    with (
        stand_in_vllm.serving(other) as server,
        pytest.raises(UserError, match=r"--vllm-server: .*: serves .*other, but .*base is trained"),
        serving(tmp_path / "run", base, vllm_server=server.url),
    ):
        pass


def test_a_server_that_takes_no_adapters_is_a_clients_sentence(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    with (
        stand_in_vllm.serving(base) as server,
        serving(tmp_path / "run", base, vllm_server=server.url) as service,
    ):
        server.changes["/v1/load_lora_adapter"] = (404, {"detail": "Not Found"})
        client = Client(service)
        model = client.model(4)
        named = client.result(model.send("save_weights_for_sampler", sampling_session_seq_id=0))
        promised = sample(client, named["sampling_session_id"], 0, PROMPT, max_tokens=2)
        error = client.result(promised)["error"]
    assert error.startswith("--vllm-server: ")
    assert error.endswith("start vLLM with --enable-lora and --max-lora-rank 8")


@pytest.mark.slow
def test_a_real_servers_samples_are_of_each_clients_adapter(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", head_dim=32, initializer_range=0.3)
    with serving_by_vllm(base, 128) as url:
        check_samples(base, url, tmp_path / "run")
