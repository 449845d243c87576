"""Evaluation on rows that are not trained on: the held-out loss, and generated answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from finetune.checkpoint.manifest import Progress
from finetune.constants import Fields, Record, round_up
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.examples import Prompt
from finetune.data.tokenizer import end_of_answer_ids
from finetune.distributed.model_parts import unwrap
from finetune.distributed.parallelize import unwrapped_call
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.files.json_files import append_json_lines
from finetune.models.documents import depends_on_length
from finetune.models.fake_quantize import round_from_step
from finetune.models.vision import reads_across, with_read_tiles
from finetune.training.objectives.objective import Measured, Objective
from finetune.training.training_run import TrainingRun
from finetune.training.watch import SignalListener

SAMPLES = "samples.jsonl"
ACCURACY = "rewards/accuracies"  # the share of pairs whose chosen answer has the larger reward
REWARD = "reward"  # the mean reward of answers to held-out prompts
SAMPLE_TOKENS = 64  # of an answer to one of sample_prompts, at most


@dataclass(frozen=True, slots=True)
class Sample:
    """One held-out prompt as the model answers it."""

    prompt: str
    answer: str
    expected: str
    token_ids: tuple[int, ...] = ()  # of the answer, with the token that ends it
    log_probabilities: tuple[float, ...] = ()  # of each token, if `Generation` asks for them

    def texts(self) -> dict[str, str]:
        """The sample's texts, for samples.jsonl."""
        return {"prompt": self.prompt, "answer": self.answer, "expected": self.expected}

    @property
    def is_exact(self) -> bool:
        """Whether the answer is the expected one, up to the white space around it."""
        return self.answer.strip() == self.expected.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How answers are generated."""

    max_new_tokens: int = SAMPLE_TOKENS  # if no answer is expected; else see `_count_new_tokens`
    temperature: float = 0.0  # 0: greedily; above it, by torch's generators
    stop: tuple[str, ...] = ()  # texts at which an answer ends
    with_log_probabilities: bool = False


GREEDY = Generation()


def evaluate(
    run: TrainingRun,
    progress: Progress,
    watch: Callable[[Iterator[StepBatch]], Iterator[StepBatch]] = lambda batches: batches,
) -> Progress:
    """Logs the held-out loss, if data is held out, and answers `sample_prompts`.

    Repeats nothing that an earlier start of the run has logged of this step.

    `watch`: wraps the held-out batches, and may raise before one. Returns the progress with the
    loss, on every rank.
    """
    step = progress.step
    results = run.results.setdefault(step, {})
    round_from_step(run.model, run.recipe.quantization_aware, step)
    held_out = run.data.evaluation
    line = None
    if held_out is not None and "eval_loss" not in results:
        line = _log_held_out_loss(
            run, progress, lambda: watch(run.watchdog.watched(held_out.batches(), "evaluating"))
        )
        results["eval_loss"] = line["eval_loss"]
    if run.sample_prompts and "sample_prompts" not in results:
        _answer_sample_prompts(run, step)
        results["sample_prompts"] = True
    if "eval_loss" in results:
        progress = progress.after_evaluation(results["eval_loss"])
    if line is not None:
        run.notify("on_evaluate", progress, line)
    return progress


def _log_held_out_loss(
    run: TrainingRun, progress: Progress, batches: Callable[[], Iterator[StepBatch]]
) -> Record:
    """Measures the held-out loss over `batches`; writes and returns its line of metrics."""
    with run.phases.timed("evaluation"):
        loss, metrics = measure_held_out(run.model, batches, run.world, run.objectives.held_out)
    if progress.step == 0 and run.recipe.method_facts.needs_reference:
        metrics.pop(ACCURACY, None)  # the model still is its own reference: every margin is 0
    line = {"step": progress.step, "epoch": progress.epoch, "eval_loss": loss}
    line |= {f"eval_{name}": value for name, value in metrics.items()}
    run.log.write(line)
    run.log.say(f"step {progress.step}: held-out loss {loss:.4f}{describe_quality(metrics)}")
    return line


def _answer_sample_prompts(run: TrainingRun, step: int) -> None:
    with run.phases.timed("evaluation"):
        samples = answer(run.model, run.sample_prompts, run.tokenizer, run.world)
    for prompt, sample in zip(run.recipe.run.sample_prompts, samples, strict=True):
        run.log.say(f"step {step}: {prompt!r} -> {sample.answer!r}")
    _write_samples(run, step, samples)


def describe_quality(metrics: Mapping[str, float]) -> str:
    """Describes recall, the accuracy of classes, the mean reward or the share of pairs in order;
    empty if none was measured.

    >>> describe_quality({ACCURACY: 0.75}), describe_quality({"reward": 0.5}), describe_quality({})
    (', 75% of the pairs in order', ', mean reward 0.5', '')
    >>> describe_quality({"accuracy": 0.75, "f1_macro": 0.7})
    ', accuracy 75.0%, F1 0.700'
    """
    if "recall@1" in metrics:
        return f", recall@1 {metrics['recall@1']:.1%}, MRR {metrics['mrr@10']:.3f}"
    if "accuracy" in metrics:
        return f", accuracy {metrics['accuracy']:.1%}, F1 {metrics['f1_macro']:.3f}"
    if REWARD in metrics:
        return f", mean reward {metrics[REWARD]:.4g}"
    if ACCURACY in metrics:
        return f", {metrics[ACCURACY]:.0%} of the pairs in order"
    return ""


def evaluate_before_training(run: TrainingRun, progress: Progress, signals: SignalListener) -> None:
    """Evaluates a model that has not been trained yet; does nothing if the run is resumed.

    Raises `Preempted` if a signal has asked to stop, while the model was loaded or since.
    """
    if progress.step:
        where = f"after step {progress.step}, which is saved"
    else:
        where = "before the first step"
    stopped = run.preempted(where)
    if signals.agree(run.world).stop:
        raise stopped
    if progress.step == 0:
        evaluate(run, progress, lambda batches: signals.interrupt(batches, run.world, stopped))
        evaluate_exact_match(run, progress)


def evaluate_after_training(
    run: TrainingRun, progress: Progress, signals: SignalListener
) -> Progress:
    """Evaluates at the end of a run. Raises `Preempted` if a signal asks to stop meanwhile."""
    stopped = run.preempted(f"during the last evaluation; all {progress.step} steps are saved")
    progress = evaluate(
        run, progress, lambda batches: signals.interrupt(batches, run.world, stopped)
    )
    if not signals.agree(run.world).stop:
        evaluate_exact_match(run, progress)
    if signals.agree(run.world).stop:
        raise stopped
    return progress


def evaluate_exact_match(run: TrainingRun, progress: Progress) -> None:
    """Logs the share of held-out prompts that the model answers exactly, unless an earlier start of
    the run has logged it at this step.
    """
    if not run.prompts or "exact_match" in run.results.get(progress.step, {}):
        return
    with run.phases.timed("evaluation"):
        samples = answer(
            run.model, run.prompts, run.tokenizer, run.world, run.recipe.model.eot_tokens
        )
    share = sum(sample.is_exact for sample in samples) / len(samples)
    line = {
        "step": progress.step,
        "epoch": progress.epoch,
        "exact_match": share,
        "exact_match_samples": len(samples),
    }
    _write_samples(run, progress.step, samples)
    answers = [(sample.prompt, sample.answer, sample.expected) for sample in samples]
    scores: dict[str, float] = RankGroup(run.world).on_main(lambda: run.hooks.score(answers))
    line |= scores
    run.log.write(line)
    shown = f"{share:.0%} of {len(samples)} held-out questions answered exactly"
    for name, score in scores.items():
        shown += f", {name.removeprefix('metrics/')} {score:.4g}"
    run.log.say(f"step {progress.step}: {shown}")
    run.notify("on_evaluate", progress, line)


def _write_samples(run: TrainingRun, step: int, samples: Sequence[Sample]) -> None:
    """Adds the samples to samples.jsonl on the main rank. A full disk does not end the run."""
    if run.world.is_main:
        path = run.folder / SAMPLES
        with run.log.report_unwritable(path):
            append_json_lines(path, ({"step": step} | sample.texts() for sample in samples))


@torch.no_grad()
def measure_held_out(
    model: nn.Module, batches: Callable[[], Iterator[StepBatch]], world: World, objective: Objective
) -> tuple[float, dict[str, float]]:
    """Measures the objective's loss and metrics over all batches and all ranks.

    `batches`: begins to yield them again at each call; an objective may read them twice.
    """
    model.eval()

    def micro_batches() -> Iterator[MicroBatch]:
        for batch in batches():
            yield from batch.micro_batches

    objective = objective.prepare(model, micro_batches, world)
    total = Measured(torch.zeros((), device=world.device))
    count = 0
    for batch in batches():
        count += objective.count(batch)
        for micro_batch in batch.micro_batches:
            on_device = micro_batch.to(world.device)
            total += objective.measure(model, on_device, on_device.inputs, batch)
    loss, means = total.average(count, world)
    return loss, objective.complete(means) | objective.describe_rows(total.gather_rows(world))


@torch.no_grad()
def answer(
    model: nn.Module,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    world: World,
    eot_tokens: tuple[str, ...] = (),
    how: Generation = GREEDY,
) -> list[Sample]:
    """Answers every prompt; returns the answers on every rank, in the order of the prompts.

    The prompts are dealt out to the tensor parallel groups; the ranks of a group run the same
    forwards. An answer ends with a turn, or at twice the longest expected length; if none is
    expected, at `max_new_tokens`.

    Raises `UserError` on all ranks if some would run a sharded vision tower and others would not.
    """
    model.eval()
    groups = world.tensor_group_count
    padded = round_up(len(prompts), groups)  # every group answers the same number
    own = [prompts[i % len(prompts)] for i in range(world.tensor_group_index, padded, groups)]
    batches = [own] if own else []
    # One by one: rotary frequencies that depend on a row's length would be the longest row's, and
    # cross attention reads the images of one prompt.
    if depends_on_length(model) or reads_across(unwrap(model)):
        batches = [[prompt] for prompt in own]
    have_images = [any(prompt.images for prompt in batch) for batch in batches]
    if world.sharding.is_fsdp and any(other != have_images for other in world.gather(have_images)):
        raise UserError(
            "exact_match_samples: a rank's held-out questions have images and another's have "
            "none, and a sharded tower runs on all ranks together; hold out rows with images "
            "alone, or set exact_match_samples: 0"
        )
    samples: list[Sample] = []
    for batch in batches:
        samples += _generate(model, batch, tokenizer, world, eot_tokens, how)
    by_rank = world.gather([asdict(sample) for sample in samples])
    by_group = by_rank[:: world.stage_size // groups][:groups]  # of its first rank each
    return [Sample(**by_group[i % groups][i // groups]) for i in range(len(prompts))]


def _generate(
    model: nn.Module,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    world: World,
    eot_tokens: tuple[str, ...],
    how: Generation,
) -> list[Sample]:
    """Generates the answers to `prompts` in one batch."""
    transformer: Any = unwrap(model)
    pad = _choose_pad(tokenizer)
    stop_ids = end_of_answer_ids(tokenizer, eot_tokens)
    inputs = _pad_left(prompts, pad)
    prompt_length = inputs["input_ids"].shape[1]
    # Compiled for generation's many shapes, torch.compile would reach its limit of graphs, and
    # training would run uncompiled.
    with unwrapped_call(model, world), torch.compiler.set_stance("force_eager"):
        generated = transformer.generate(
            **{name: ids.to(world.device) for name, ids in inputs.items()},
            **_read_images(transformer, tokenizer, prompts, inputs["input_ids"]),
            max_new_tokens=_count_new_tokens(prompts, tokenizer, how),
            **_choose_tokens(transformer, tokenizer, how),
            use_cache=True,
            eos_token_id=stop_ids,
            pad_token_id=pad,
            synced_gpus=world.sharding.is_fsdp and world.size > 1,
            return_dict_in_generate=True,
            output_logits=how.with_log_probabilities,
        )
    token_ids = generated.sequences[:, prompt_length:]
    answers = [row[: _count_answer(row, stop_ids, pad)] for row in token_ids.tolist()]
    scores: list[tuple[float, ...]] = [()] * len(prompts)
    if how.with_log_probabilities:
        padded = _log_probabilities(generated.logits, token_ids, how.temperature or 1.0).tolist()
        scores = [tuple(row[: len(ids)]) for row, ids in zip(padded, answers, strict=True)]
    return _make_samples(prompts, answers, scores, tokenizer)


def _make_samples(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    scores: Sequence[tuple[float, ...]],
    tokenizer: Any,
) -> list[Sample]:
    """Decodes questions and answers.

    `scores`: the log-probabilities of each answer's tokens; empty ones if they are not asked for.
    """
    prompt_ids = [list(prompt.prompt_ids) for prompt in prompts]
    questions = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    samples = []
    for i, prompt in enumerate(prompts):
        question = questions[i].strip()
        text = texts[i].strip()
        samples.append(Sample(question, text, prompt.answer, tuple(answers[i]), scores[i]))
    return samples


def _choose_pad(tokenizer: Any) -> int:
    """The id that fills a batch's shorter rows."""
    if tokenizer.pad_token_id is not None:
        pad: int = tokenizer.pad_token_id
        return pad
    return tokenizer.eos_token_id or 0


def _pad_left(prompts: Sequence[Prompt], pad: int) -> dict[str, Tensor]:
    """Makes `input_ids` and `attention_mask`, int64[prompts, longest], padded on the left."""
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    input_ids = torch.full((len(prompts), longest), pad)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt.prompt_ids)
        input_ids[row, start:] = torch.as_tensor(prompt.prompt_ids)
        attention_mask[row, start:] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def _read_images(
    transformer: Any, tokenizer: Any, prompts: Sequence[Prompt], input_ids: Tensor
) -> Fields:
    """Makes the vision tower's inputs for the images of `prompts`; empty if they have none."""
    images = list(chain.from_iterable(prompt.images for prompt in prompts))
    if not images:
        return {}
    inputs = tokenizer.images.make_generation_inputs(transformer, input_ids, images)
    return with_read_tiles(transformer, input_ids, inputs)


def _count_new_tokens(prompts: Sequence[Prompt], tokenizer: Any, how: Generation) -> int:
    """Counts the tokens that an answer may have: twice the longest expected answer, and 2."""
    expected_tokens = []
    for prompt in prompts:
        if prompt.answer:
            expected_tokens.append(len(tokenizer.encode(prompt.answer, add_special_tokens=False)))
    if not expected_tokens:
        return how.max_new_tokens
    return 2 * max(expected_tokens) + 2


def _choose_tokens(transformer: Any, tokenizer: Any, how: Generation) -> Record:
    """Returns the arguments by which `generate` chooses the next token."""
    options: Record = {"do_sample": how.temperature > 0}
    if how.temperature:
        options |= {"temperature": how.temperature, "top_k": 0, "top_p": 1.0}
    if how.stop:
        options |= {"stop_strings": list(how.stop), "tokenizer": tokenizer}
    # A padded vocabulary has ids that no token has.
    vocabulary = tokenizer.backend_tokenizer.get_vocab_size()
    padding = range(vocabulary, transformer.config.get_text_config().vocab_size)
    if padding:
        options["suppress_tokens"] = list(padding)
    return options


def _log_probabilities(logits: Sequence[Tensor], token_ids: Tensor, temperature: float) -> Tensor:
    """Computes the log-probability of each token, fp32[rows, tokens].

    `logits`: [rows, vocabulary] for each place of the answers.
    """
    columns = []
    for place, scores in enumerate(logits):
        log_probabilities = (scores.float() / temperature).log_softmax(-1)
        columns.append(log_probabilities.gather(-1, token_ids[:, place : place + 1]))
    return torch.cat(columns, 1)


def _count_answer(token_ids: Sequence[int], stop_ids: Sequence[int], pad: int) -> int:
    """Counts the tokens of a row's answer: up to the first that ends it, that one
    included.

    >>> (
    ...     _count_answer([5, 6, 2, 0, 0], [2], pad=0),
    ...     _count_answer([5, 6, 7], [2], pad=0),
    ...     _count_answer([5, 0, 0], [2], pad=0),
    ... )
    (3, 3, 1)
    """
    for place, token in enumerate(token_ids):
        if token in stop_ids:
            return place + 1
    length = len(token_ids)
    while length and token_ids[length - 1] == pad:  # an answer that ended with a text of `stop`
        length -= 1
    return length
