"""`finetune report` on folders as runs leave them, read as text and looked at in a browser."""

import cProfile
import json
import math
import re
import shutil
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from finetune.cli import main
from finetune.config.reader import read_recipe
from finetune.report.page import render_page
from finetune.report.run_data import plan_run, read_run
from tests.conftest import make_chat
from tests.ranks import run_python
from tests.report.browser import look
from tests.report.runs import STEPS, make_run

PLOTS = {
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "peak_memory_bytes", "data_wait_seconds", "exact_match",
}  # fmt: skip
# Of every line: its plot, its extent in pixels, its color; and whether the page is wider than its frame.
MEASURED = """{
  overflow: w.document.documentElement.scrollWidth - w.innerWidth,
  background: w.getComputedStyle(w.document.body).backgroundColor,
  lines: [...w.document.querySelectorAll('.plot path:not(.grid)')].map((p) => ({
    plot: p.closest('figure').id, width: p.getBoundingClientRect().width, height: p.getBoundingClientRect().height,
    color: w.getComputedStyle(p).stroke})),
  tiles: [...w.document.querySelectorAll('.tile')].map((t) => t.getBoundingClientRect().top),
  faint: [...w.document.querySelectorAll('#loss .faint')].map((p) => w.getComputedStyle(p).opacity),
  scrolled: [...w.document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth).length,
  squeezed: [...w.document.querySelectorAll('table:not(.samples) :is(td, th)')].filter((cell) =>
    cell.textContent.trim().length > 12 && cell.getBoundingClientRect().width < 90).length,
  labels: [...w.document.querySelectorAll('.x, .y')].map((l) => l.getBoundingClientRect().height),
  tip: (() => { const plot = w.document.querySelector('#loss .plot'); plot.focus();
    return plot.querySelector('.tip').innerText; })(),
}"""


def _report(*arguments: str) -> tuple[int, str, str]:
    ended = run_python(["-m", "finetune", "report", *arguments])
    return ended.returncode, ended.stdout, ended.stderr


def test_every_plot_is_seen_at_desk_and_phone_in_dark_and_light(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = tiny_recipe(accelerate_config="fsdp_full_shard")
    run = make_run(tmp_path / "runs" / "first", recipe)
    code, shown, _ = _report(str(run))
    assert code == 0
    assert shown.splitlines()[0] == str(run / "report.html")
    for width, dark in ((1280, False), (390, True)):
        seen, picture = look(
            run / "report.html", tmp_path, width=width, height=900, dark=dark, script=MEASURED
        )
        assert seen["overflow"] <= 0
        assert {line["plot"] for line in seen["lines"]} == PLOTS
        drawn = [line for line in seen["lines"] if line["plot"] not in ("exact_match",)]
        assert all(line["width"] > width / 6 for line in drawn)
        assert any(line["height"] > 80 for line in drawn if line["plot"] == "loss")
        assert len(seen["tiles"]) == 7
        assert seen["tiles"].count(max(seen["tiles"])) >= 2, "no tile is alone in the last row"
        assert all(float(opacity) >= 0.5 for opacity in seen["faint"]), (
            "the loss as logged is seen under the smoothed one"
        )
        assert seen["squeezed"] == 0, "a wide table scrolls on a phone"
        assert seen["scrolled"] >= 3 if width == 390 else seen["scrolled"] == 0
        assert min(seen["labels"]) > 8  # pixels: text is as tall on a phone
        brightness = sum(map(int, re.findall(r"\d+", seen["background"])[:3]))
        assert brightness < 120 if dark else brightness > 700
        assert seen["tip"].startswith(f"step {STEPS}")
        assert _has_color(picture, seen["lines"][0]["color"])


def test_a_preference_run_shows_its_rewards_beside_the_loss(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "dpo", tiny_recipe(method="dpo", beta=0.2), is_preference=True)
    assert _report(str(run))[0] == 0
    text = (run / "report.html").read_text()
    assert (
        "<span>Held-out pairs in order</span><strong>100%</strong><small>reward margin 1.87</small>"
        in text
    )
    facts = text.partition('<dl class="facts">')[2].partition("</dl>")[0]
    assert "<dt>pairs</dt><dd>15</dd>" in facts and "<dt>held-out pairs</dt><dd>5</dd>" in facts
    assert "desirable" not in facts and "rated" not in facts
    assert (
        " · dpo" in text.partition("</header>")[0] and "of dpo, per pair; faint: as logged" in text
    )
    seen, _ = look(
        run / "report.html", tmp_path, width=1280, height=900, dark=False, script=MEASURED
    )
    assert seen["overflow"] <= 0 and min(seen["labels"]) > 8
    assert seen["tiles"].count(max(seen["tiles"])) >= 2, "no tile is alone in the last row"
    plots = [line["plot"] for line in seen["lines"] if line["plot"] not in PLOTS]
    # Of two answers a line and held-out points each.
    assert {plot: plots.count(plot) for plot in plots} == {
        "reward_margins": 2, "reward_accuracies": 2, "rewards": 4, "log_probabilities": 4, "kl": 3, "nll_loss": 2,
    }  # fmt: skip


@pytest.mark.slow
def test_several_runs_share_their_plots(tiny_recipe: Callable[..., Path], tmp_path: Path) -> None:
    sources: dict[str, list[dict[str, object]]] = {
        name: [{"path": str(make_chat(tmp_path / "chat.jsonl", rows=24))}]
        for name in ("one", "two")
    }
    sources["two"][0]["weight"] = 0.5
    runs = [
        make_run(
            tmp_path / name,
            tiny_recipe(name, datasets=sources[name]),
            learning_rate=rate,
            ranks=ranks,
            diverges=bad,
        )
        for name, rate, ranks, bad in (("one", 1e-3, 2, False), ("two", 2e-3, 4, True))
    ]
    layout = (runs[1] / "accelerate.yaml").read_text().replace("bf16", "fp16")
    (runs[1] / "accelerate.yaml").write_text(layout)
    page = tmp_path / "both.html"
    assert _report(*map(str, runs), "--output", str(page))[0] == 0
    text = page.read_text()
    assert re.search(
        r"<code>learning_rate</code></td><td><code>0.001</code></td><td><code>0.002</code>", text
    )
    differing = text.partition('aria-label="What differs"')[2].partition("</section>")[0]
    assert re.search(
        r"<code>datasets\[0\].weight</code></td><td><code>1.0</code></td><td><code>0.5</code>",
        differing,
    )
    assert "{" not in differing and "path" not in differing
    assert re.search(r"<code>ranks</code></td><td><code>2</code></td><td><code>4</code>", differing)
    assert re.search(
        r"<code>accelerate.mixed_precision</code></td><td><code>bf16</code></td><td><code>fp16</code>",
        differing,
    )
    assert "fsdp2 · 4 ranks" in text.partition('aria-label="Summary"')[2].partition("</section>")[0]
    assert "<b>two diverged:</b> the loss is 540 at step 60, far above the 9.084 of step 1." in text
    assert text.count("diverged:") == 1
    assert text.count('class="line run-1"') >= 5
    assert not re.search(r"https?://", text.replace("http://www.w3.org", ""))  # nothing is fetched
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    bottoms = "[...w.document.querySelectorAll('.summary td')].map((cell) => cell.getBoundingClientRect().right)"
    loss = "w.document.querySelector('#loss .plot').getBoundingClientRect()"
    script = f"({{right: Math.max(...{bottoms}), top: {loss}.top, bottom: {loss}.bottom}})"
    phone, _ = look(page, tmp_path, width=390, height=900, dark=False, script=script)
    assert phone["right"] <= 390, "on a phone every number of the summary is seen"
    desk, _ = look(page, tmp_path, width=1280, height=900, dark=False, script=script)
    assert desk["top"] < desk["bottom"] <= 900, "the loss is on the first screen"


@pytest.mark.slow
def test_a_loss_that_falls_far_is_drawn_on_a_log_scale(tmp_path: Path) -> None:
    """Equal factors are equal heights; a loss that falls little, or to 0, keeps a linear scale."""
    labels = """[...w.document.querySelectorAll('#loss .y')].map((label) => [
      parseFloat(label.textContent), label.getBoundingClientRect().top])"""
    for name, losses in (
        ("far", (4.0, 0.4, 0.004)),
        ("little", (1.4, 1.1, 0.9)),
        ("to 0", (4.0, 0.4, 0.0)),
    ):
        run = tmp_path / name
        run.mkdir()
        (run / "metrics.jsonl").write_text(
            "".join(f'{{"step": {i}, "loss": {y}}}\n' for i, y in enumerate(losses))
        )
        assert _report(str(run))[0] == 0
        assert ("; log scale" in (run / "report.html").read_text()) == (name == "far")
        seen, _ = look(
            run / "report.html", tmp_path, width=1280, height=900, dark=False, script=labels
        )
        scale = math.log10 if name == "far" else float
        heights = [
            (scale(high) - scale(low), below - above)
            for (low, below), (high, above) in pairwise(seen)
        ]
        factor = heights[0][1] / heights[0][0]
        assert all(
            height == pytest.approx(factor * difference, abs=1.5) for difference, height in heights
        )
        assert seen[0][0] <= min(losses) and seen[-1][0] >= max(losses)


def test_steps_are_shown_of_how_many_and_while_a_run_is_watched_the_time_left(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """870 steps by their epochs; a step of 100 tokens at 50 tokens/s takes two seconds. The losses are compared smoothed."""
    folder = make_run(tmp_path / "run", tiny_recipe(max_steps=None, num_train_epochs=3))
    lines = [
        {
            "step": step,
            "epoch": round(step / 290, 6),
            "loss": 2.0 + (step % 20 == 0),
            "tokens": 100 * step,
            "tokens_per_second": 50.0,
        }
        for step in range(10, 441, 10)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    live, done = (render_page([run], [None], live=live) for live in (True, False))
    assert "<strong>440</strong><small>of 870 · 1.52 epochs · 0:14:20 left</small>" in live
    assert "<strong>440</strong><small>of 870 · 1.52 epochs</small>" in done
    found = re.search(
        r"<span>Training loss</span><strong>(.*?)</strong><small>from (.*?)</small>", done
    )
    assert found is not None
    assert all(2.0 < float(value) < 3.0 for value in found.groups()), (
        "neither is the loss of one line"
    )


def test_what_a_run_says_is_shown_and_never_run(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run</script><b>", tiny_recipe())
    assert _report(str(run))[0] == 0
    text = (run / "report.html").read_text()
    assert "What is &lt;b&gt;two&lt;/b&gt; &amp; three?" in text
    assert "run</script><b>" not in text
    assert "in 3 of 24 rows are duplicates (chat.jsonl:7)" in text
    assert "9.00 MB" in text
    questions = text.partition("Held-out questions <small>")[2].partition("</table>")[0]
    prompts = text.partition("Sample prompts <small>")[2].partition("</table>")[0]
    assert "Tell me a story." in prompts and "Expected" not in prompts and "Once, at 60." in prompts
    assert "Six?" in questions and "Tell me a story." not in questions
    assert re.search(r"<td>chat.jsonl</td><td class=\"number\">2,417</td>", text)


def test_a_run_whose_reference_is_read_from_files_has_its_plan(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """A checkpoint's config alone names no files, and a rule refuses a reference without any."""
    keys = {"method": "grpo", "rewards": ["length"], "max_completion_length": 16}
    bytes_by_beta = {}
    for beta in (0.0, 0.1):
        recipe = tiny_recipe(**keys, beta=beta)
        model = Path(read_recipe(str(recipe)).model.model_name_or_path or "")
        folder = make_run(tmp_path / str(beta), recipe)
        saved = folder / "checkpoints" / f"step-{STEPS:08d}" / "model"
        saved.mkdir()
        shutil.copy(model / "config.json", saved)
        plan = plan_run(read_run(folder))
        assert plan is not None
        bytes_by_beta[beta] = plan.peak_bytes
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert bytes_by_beta[0.1] - bytes_by_beta[0.0] > weights / 8  # the reference's shard of 2 ranks
    kept = tmp_path / "0.0" / "recipe.yaml"
    kept.write_text(kept.read_text().replace(str(model), "nobody/on-no-hub"))
    again = plan_run(read_run(tmp_path / "0.0"))
    assert again is not None and again.peak_bytes == bytes_by_beta[0.0]


def test_a_run_in_progress_is_reported_as_far_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": NaN}\n{"step": 3, "lo'
    )
    assert _report(str(run))[0] == 0
    page = (run / "report.html").read_text()
    assert "2.5000" in page
    assert '<path class="dots run-0"' in page  # a line of one point would not be seen
    metrics = (run / "metrics.jsonl").read_bytes()
    for other in ("metrics.jsonl", "loss.PNG"):
        code, _, errors = _report(str(run), "--output", str(run / other))
        assert code == 2 and errors.startswith(f"--output: {run / other}: the report is HTML")
    assert (run / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("made", ["nothing", "an empty folder", "a broken file", "a doubled line"])
def test_what_is_not_a_run_is_one_sentence(made: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    if made != "nothing":
        run.mkdir()
    if made == "a broken file":
        (run / "metrics.jsonl").write_text('{"step": 1}\n???\n{"step": 2}\n')
    if made == "a doubled line":
        (run / "metrics.jsonl").write_text(
            '{"step": 1, "loss": 2}\n{"step": 2}\n{"loss": 2, "step": 1}\n'
        )
    code, _, errors = _report(str(run))
    assert (code, len(errors.strip().splitlines())) == (2, 1)
    assert str(run) in errors


HUGE = dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"), 8) | {
    "model_type": "llama", "num_hidden_layers": 10**9,
}  # fmt: skip
DAMAGED: list[tuple[str, str]] = [
    ("metrics.jsonl", '{"step": 60, "epoch": "x", "loss": [1], "tokens_per_second": {}, "exact_match": "all"}\n'),
    ("metrics.jsonl", '{"step": 1' + "0" * 4000 + ', "loss": 1' + "0" * 4000 + ', "peak_memory_bytes": 1e400}\n'),
    ("metrics.jsonl", '{"step": 1, "loss": 1e308, "idle_expert_share_by_layer": ["a"]}\n{"step": null, "loss": -1e308}\n'),
    ("metrics.jsonl", '{"step": 1, "loss": ' + "[" * 100_000 + "\n{}\n"),
    ("samples.jsonl", '{"step": "a", "prompt": [], "answer": "\\ud800"}\n{"step": 1, "prompt": "a"}\n'),
    ("data_report.json", '{"findings": [1, {"rows": "x", "where": [1]}], "sources": {"a": 1}, "eval_sources": [[], {"tokens": "x"}]}'),
    ("data_report.json", '{"a":' * 100_000),
    ("environment.json", '{"ranks": [], "device": {}}'),
    ("recipe.yaml", "a: &a [*a]\n"),
    ("recipe.yaml", "model_config: text\nmodel_name_or_path: [1]\n"),
    ("accelerate.yaml", "[" * 100_000),
    ("checkpoints/step-00000060/manifest.json", '{"files": [1]}'),
    ("checkpoints/step-00000060/manifest.json", '{"files": {"a": 1, "b": {"size": "x"}}}'),
    ("benchmarks.json", '{"results": [1, {"task": 2, "trained": "x"}]}'),
    ("benchmarks.json", '{"results": [{"task": "a", "metric": "b", "trained": 1, "base": "x", "model": 2}]}'),
    ("metrics.jsonl", '{"step": 1, "loss": 2.0, "idle_expert_share_by_layer": [0.5]}'),
    ("checkpoints/step-00000060/model/config.json", json.dumps(HUGE)),
    ("checkpoints/step-00000060/model/config.json", json.dumps({"architectures": 5, "vision_config": [], "text_config": HUGE})),
    ("recipe.yaml", "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(f"{'abcdefghij'[i]}: &{'abcdefghij'[i]} [{'*' + 'abcdefghij'[i - 1]},{'*' + 'abcdefghij'[i - 1]}]\n" for i in range(1, 9))),
]  # fmt: skip


def test_a_damaged_run_is_a_report_or_one_sentence(
    tiny_recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = make_run(tmp_path / "whole", tiny_recipe())
    for number, (name, content) in enumerate(DAMAGED):
        run = tmp_path / str(number)
        shutil.copytree(whole, run)
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(content)
        code, errors = main(["report", str(run)]), capsys.readouterr().err.splitlines()
        sentences = [line for line in errors if line.startswith(str(run))]
        is_named = len(sentences) == 1 and name in sentences[0]
        assert code == 0 or (code == 2 and is_named), (name, content[:60])


@pytest.mark.slow
def test_a_long_run_takes_linear_time_and_memory_and_a_page_of_the_same_size(
    tmp_path: Path,
) -> None:
    numbers = {
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "tokens_per_second": 9.0,
        "peak_memory_bytes": 2**30,
    }

    def measure(steps: int) -> tuple[int, float, int]:
        lines = (
            {"step": step, "loss": 2 + math.sin(step), **numbers} for step in range(1, steps + 1)
        )
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / "samples.jsonl").write_text(
            '{"step": 1, "prompt": "a", "answer": "b"}\n' * steps
        )
        profile = cProfile.Profile()
        page = profile.runcall(lambda: render_page([read_run(tmp_path)], [None]))
        tracemalloc.start()
        render_page([read_run(tmp_path)], [None])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        size = (tmp_path / "metrics.jsonl").stat().st_size
        return sum(entry.callcount for entry in profile.getstats()), peak / size, len(page)

    (calls, _, size), (more_calls, share, more_size) = measure(2000), measure(8000)
    assert more_calls < 4.4 * calls
    assert share < 30
    assert more_size < 1.2 * size


def _has_color(picture: Path, css: str) -> bool:
    import matplotlib.image

    wanted = [int(part) / 255 for part in re.findall(r"\d+", css)[:3]]
    pixels = matplotlib.image.imread(picture)[..., :3]
    return bool((abs(pixels - wanted).max(-1) < 0.02).sum() > 100)
