"""What a reward model reads of a completion: the ids that `method: reward` trains it on."""

from pathlib import Path
from typing import Any

import pytest

from finetune.config.methods import RolloutKeys
from finetune.config.schema import Recipe
from finetune.data.messages import describe_tool
from finetune.data.paid_text import read_reward_texts
from tests.conftest import CHAT_TEMPLATE, make_tokenizer
from tests.data.conftest import Prepare
from tests.data.test_prepare import write_lines

TEXT = {"prompt": "2+2=", "chosen": " 4", "rejected": " 5"}
TURNS = {
    "prompt": [{"role": "user", "content": "Does it rain?"}],
    "chosen": [{"role": "assistant", "content": "Yes"}],
    "rejected": [{"role": "assistant", "content": "No"}],
}
TOOL = {
    "type": "function",
    "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("writes_eos", [False, True])
@pytest.mark.parametrize(
    ("pair", "shown"),
    [
        (TEXT, "2+2= 4<|end|>"),
        (TURNS, "calm[]<|user|>"),
        (TURNS | {"tools": [TOOL]}, 'calm[{"type": "function"'),
        (TURNS | {"chat_template_kwargs": {"mood": "glad"}}, "glad[]<|user|>"),
    ],
)
def test_a_reward_model_reads_the_ids_that_it_is_trained_on(
    pair: dict[str, Any], shown: str, writes_eos: bool, prepare: Prepare, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{{ mood or 'calm' }}{{ (tools or []) | tojson }}"
        + CHAT_TEMPLATE.removeprefix("{{ bos_token }}")
    )
    if writes_eos:
        ids = {token: tokenizer.convert_tokens_to_ids(token) for token in ("<|begin|>", "<|end|>")}
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|begin|> $A <|end|>", special_tokens=list(ids.items())
        )
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)
    keys = {"tokenizer_name_or_path": str(model), "max_length": 512}
    pairs = [{"path": str(write_lines(tmp_path / "pairs.jsonl", [pair]))}]
    trained = prepare(pairs, method="reward", **keys).train.examples[0].input_ids.tolist()
    asked = {key: value for key, value in pair.items() if key not in ("chosen", "rejected")}
    prompts = [{"path": str(write_lines(tmp_path / "prompts.jsonl", [asked]))}]
    online = {"method": "grpo", "rewards": ["length"], "num_generations": 2}
    row = prepare(prompts, **keys, **online).train.examples.read_row(0)
    [text] = read_reward_texts(Recipe(path="r.yaml", rollout=RolloutKeys(rewards=(str(model),))))
    assert shown in text.render(row, pair["chosen"])
    assert text.encode(row, pair["chosen"]) == trained
    if pair is TEXT:
        assert (trained[0] == tokenizer.bos_token_id) is writes_eos, "BOS comes with that EOS"
    assert trained.count(tokenizer.eos_token_id) == (1 if pair is TEXT else 2)


def test_a_reward_model_reads_the_recipes_tools_as_those_of_a_row(tmp_path: Path) -> None:
    """The prompt that the model answers describes both alike."""
    tool = f"{tmp_path / 'my_tools.py'}:rain"
    (tmp_path / "my_tools.py").write_text(
        'def rain(city: str) -> bool:\n    """Whether it rains.\n\n    Args:\n        city: Where.\n    """\n'
    )
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ (tools or []) | tojson }}" + CHAT_TEMPLATE
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)

    def render(of_recipe: tuple[str, ...], **row: Any) -> str:
        rollout = RolloutKeys(rewards=(str(model),), tools=of_recipe)
        [text] = read_reward_texts(Recipe(path="r.yaml", rollout=rollout))
        return text.render({"prompt": TURNS["prompt"], **row}, TURNS["chosen"])

    read = render((tool,))
    assert read == render((), tools=[describe_tool(tool)]) != render(())
    assert render((tool,), tools=[TOOL]) == render((), tools=[TOOL])
