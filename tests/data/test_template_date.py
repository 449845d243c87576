"""Chat templates that write today's date: one day for a whole run, on every rank and after every restart."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.config.methods import RolloutKeys
from finetune.config.reader import to_dict, write_recipe
from finetune.config.schema import Checkpoint, Data, DatasetSource, Recipe
from finetune.data.messages import BadRow
from finetune.data.paid_text import read_reward_texts
from finetune.data.token_store import cache_key
from finetune.data.tokenizer import Renderer, add_variables, apply_template, make_renderer
from finetune.errors import UserError
from finetune.files.durable import hash_json
from finetune.training import lifecycle
from finetune.training.lifecycle import encode_prompt, fix_template_date
from tests.conftest import make_tokenizer

# As Llama 3.2's own template asks for it.
DATED = """{%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{{- bos_token + "Today Date: " + date_string }}{% for m in messages %}{{ "<|" + m.role + "|>" + m.content }}{% endfor %}"""
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
ALONE: Any = SimpleNamespace(
    is_main=True, gather=lambda value, group: [value], broadcast=lambda value, group: value
)


def dated_tokenizer() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = DATED
    return tokenizer


def recipe_with(date: str | None = None) -> Recipe:
    return Recipe(path="r.yaml", data=Data(chat_template_date=date))


def test_the_fixed_day_is_written_where_transformers_writes_todays() -> None:
    tokenizer, today = dated_tokenizer(), date.today()
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    if date.today() != today:
        pytest.skip("midnight has just passed")
    assert apply_template(make_renderer(tokenizer, True, today.isoformat()), MESSAGES) == expected
    other = apply_template(make_renderer(tokenizer, True, "2024-07-26"), MESSAGES)
    assert other == expected.replace(today.strftime("%d %b %Y"), "26 Jul 2024") != expected
    with_tools = make_renderer(tokenizer, True, "2024-07-26")
    assert "26 Jul 2024" in apply_template(
        with_tools, [*MESSAGES, {"role": "tool", "content": "1", "name": "f"}]
    )


def test_one_renderer_never_changes_the_day_of_another() -> None:
    def day_of(renderer: Renderer, tools: Any = ()) -> bool:
        return "Today Date: 26 Jul 2024" in apply_template(renderer, MESSAGES, tools)

    tokenizer = dated_tokenizer()
    run = make_renderer(tokenizer, True, "2024-07-26")
    for other in (make_renderer(tokenizer, False), make_renderer(tokenizer, False, "2020-01-31")):
        assert day_of(run) and day_of(run, ({"name": "f"},))
        assert not day_of(other) and not day_of(other, ({"name": "f"},))
    with pytest.raises(BadRow, match="chat_template_date is set by rendering itself"):
        add_variables(run, {"chat_template_date": "2020-01-31"})


def test_a_reward_model_reads_the_day_of_the_run(tmp_path: Path) -> None:
    dated_tokenizer().save_pretrained(tmp_path)
    recipe = replace(recipe_with("2024-07-26"), rollout=RolloutKeys(rewards=(str(tmp_path),)))
    [text] = read_reward_texts(recipe)
    assert "Today Date: 26 Jul 2024" in apply_template(text.renderer, MESSAGES)


def test_prompts_that_are_sampled_during_a_run_have_the_day_of_the_run() -> None:
    tokenizer = dated_tokenizer()
    ids = encode_prompt("Hi", tokenizer, "2024-07-26")
    asked = tokenizer.decode(encode_prompt(MESSAGES, tokenizer, "2024-07-26"))
    assert asked == tokenizer.decode(ids) == "<|begin|>Today Date: 26 Jul 2024<|user|>Hi"
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(UserError, match="the prompt 'Hi': the chat template rejects it: no"):
        encode_prompt("Hi", tokenizer)


def test_tokens_of_another_day_are_others_in_the_cache_where_the_template_asks() -> None:
    def key(tokenizer: Any, day: str | None) -> str:
        return cache_key(DatasetSource(path="a.jsonl"), {}, Data(chat_template_date=day), tokenizer)

    dated, plain = dated_tokenizer(), make_tokenizer()
    assert len({key(dated, day) for day in (None, "2026-01-31", "2026-02-01")}) == 3
    assert key(plain, None) == key(plain, "2026-01-31")


@pytest.fixture
def fixed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """The day of a run in `tmp_path` that starts on `day`."""

    def fix(day: str, recipe: Recipe, tokenizer: Any) -> str | None:
        monkeypatch.setattr(
            lifecycle, "date", SimpleNamespace(today=lambda: date.fromisoformat(day))
        )
        return fix_template_date(recipe, tmp_path, tokenizer, ALONE).data.chat_template_date

    return fix


def save_state(run: Path, **changed: Any) -> Path:
    """The state.json of a run's checkpoint."""
    counts = ("step", "tokens", "trained_tokens", "skipped_steps", "evaluations_since_best")
    state = dict.fromkeys(counts, 1) | {"epoch": 0.5, "global_batch_size": 1, "scaler": None}
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    state |= {"best_eval_loss": None, "best_step": None}
    (checkpoint / "state.json").write_text(json.dumps(state | changed))
    return checkpoint


def test_a_run_that_starts_from_another_ones_checkpoint_has_its_day(
    tmp_path: Path, fixed_on: Callable[..., str | None]
) -> None:
    """By another day its rows, and its recipe, would be others than those of the checkpoint."""
    dated = dated_tokenizer()
    other = tmp_path / "other"
    checkpoint = save_state(other, recipe=to_dict(recipe_with("2026-01-29")))
    starts = []
    for path in (other, checkpoint):
        from_path = Checkpoint(resume_from_checkpoint=str(path))
        starts.append(replace(recipe_with(), checkpoint=from_path))
    write_recipe(
        recipe_with("2026-01-30"), tmp_path / "recipe.yaml"
    )  # of a start that saved nothing
    assert fixed_on("2026-01-31", starts[0], dated) == "2026-01-29"
    (checkpoint / "manifest.json").touch()
    assert fixed_on("2026-01-31", starts[1], dated) == "2026-01-29"
    save_state(tmp_path, recipe=to_dict(recipe_with("2026-01-30")))
    assert fixed_on("2026-01-31", starts[1], dated) == "2026-01-30", "it resumes from its own"
    elsewhere = Checkpoint(
        resume_from_checkpoint=str(tmp_path / "nowhere")
    )  # `find_resume_checkpoint` says so
    (tmp_path / "recipe.yaml").unlink()
    shutil.rmtree(tmp_path / "checkpoints")
    nowhere = replace(recipe_with(), checkpoint=elsewhere)
    assert fixed_on("2026-01-31", nowhere, dated) == "2026-01-31"


def test_a_run_keeps_the_day_on_which_it_began(
    tmp_path: Path, fixed_on: Callable[..., str | None]
) -> None:
    dated = dated_tokenizer()
    assert fixed_on("2026-01-31", recipe_with(), make_tokenizer()) is None
    paid = replace(recipe_with(), rollout=RolloutKeys(rewards=("some/reward-model",)))
    assert fixed_on("2026-01-31", paid, make_tokenizer()) == "2026-01-31", "its template may ask"
    assert fixed_on("2026-01-31", recipe_with("2024-07-26"), dated) == "2024-07-26"
    assert fixed_on("2026-01-31", recipe_with(), dated) == "2026-01-31"
    write_recipe(recipe_with(), tmp_path / "recipe.yaml")  # its template asked for no date
    assert fixed_on("2026-01-31", recipe_with(), dated) == "2026-01-31", "no step is saved yet"
    (tmp_path / "recipe.yaml").unlink()
    save_state(tmp_path, recipe=to_dict(recipe_with("2026-01-30")))
    assert fixed_on("2026-02-01", recipe_with(), dated) == "2026-01-30", "of a script's session"
    write_recipe(recipe_with("2026-01-31"), tmp_path / "recipe.yaml")
    assert fixed_on("2026-02-01", recipe_with(), dated) == "2026-01-31"
    (tmp_path / "recipe.yaml").write_text("model_name_or_path: a model\n")
    for template, day in ((None, None), (dated, None), (make_tokenizer(), "2026-02-01")):
        inputs = template and {"chat_template": hash_json(template.chat_template)}
        save_state(tmp_path, inputs=inputs or {}, recipe=to_dict(recipe_with()))
        # of a version that fixed no day, or of another template, which asked for none
        assert fixed_on("2026-02-01", recipe_with(), dated) == day
    (tmp_path / "recipe.yaml").write_text("- torn")
    with pytest.raises(UserError, match="set chat_template_date to the run's day"):
        fixed_on("2026-02-01", recipe_with(), dated)
