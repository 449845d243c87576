"""Evaluation on rows that are not trained on: the held-out loss, and generated answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from finetune.checkpoint.manifest import Progress
from finetune.constants import ANSWERED_TOKENS, ANSWERS_AT_ONCE, round_up
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.examples import Prompt
from finetune.data.tokenizer import find_stop_token_ids
from finetune.distributed.model_parts import unwrap
from finetune.distributed.parallelize import unwrapped_call
from finetune.distributed.world import RankGroup, World
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
SAMPLE_TOKENS = 64  # the largest number of tokens in an answer to one of sample_prompts


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with the answer that the model generated."""

    prompt: str
    answer: str
    expected: str  # the expected answer; empty if there is none
    token_ids: tuple[int, ...] = ()  # the answer's, with the token that ends it
    # of each of `token_ids`; empty unless `Generation` asks for them
    log_probabilities: tuple[float, ...] = ()

    def texts(self) -> dict[str, str]:
        """Returns the sample's texts by their keys in samples.jsonl."""
        return {"prompt": self.prompt, "answer": self.answer, "expected": self.expected}

    @property
    def is_exact(self) -> bool:
        """Whether the answer is the expected one, except for white space around it."""
        return self.answer.strip() == self.expected.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The options of `answer`: how long answers may be, and how tokens are chosen."""

    # If a prompt of the batch has an expected answer, `_count_new_tokens` sets the limit instead.
    max_new_tokens: int = SAMPLE_TOKENS
    temperature: float = 0.0  # 0: greedy; above 0, tokens are drawn from torch's default generator
    stop: tuple[str, ...] = ()  # an answer also ends at any of these texts
    with_log_probabilities: bool = False  # whether samples have `log_probabilities`


GREEDY = Generation()


def evaluate(
    run: TrainingRun,
    progress: Progress,
    wrap_batches: Callable[[Iterator[StepBatch]], Iterator[StepBatch]] = lambda batches: batches,
) -> Progress:
    """Logs the held-out loss, if data is held out, and answers `sample_prompts`.

    All ranks call it. It skips what an earlier start of the run has logged at this step.

    Args:
        run: The run; its model may stay in evaluation mode.
        progress: The progress at which the model is evaluated.
        wrap_batches: Yields the held-out batches that it is given. It may raise to stop the
            evaluation.

    Returns:
        The progress with the held-out loss, if there is one.
    """
    step = progress.step
    results = run.results.setdefault(step, {})
    round_from_step(run.model, run.recipe.quantization_aware, step)
    held_out = run.data.evaluation
    line = None
    if held_out is not None and "eval_loss" not in results:
        line = _log_held_out_loss(
            run,
            progress,
            lambda: wrap_batches(run.watchdog.watched(held_out.batches(), "evaluating")),
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
) -> dict[str, Any]:
    """Measures the held-out loss over `batches`; writes its line of metrics, and returns it.

    `batches`: as in `measure_held_out`.
    """
    with run.phases.timed("evaluation"):
        loss, metrics = measure_held_out(run.model, batches, run.world, run.objectives.held_out)
    if progress.step == 0 and run.recipe.method_facts.needs_reference:
        # Before training the model is its own reference: every margin is 0, no pair is in order.
        metrics.pop(ACCURACY, None)
    line = {"step": progress.step, "epoch": progress.epoch, "eval_loss": loss}
    line |= {f"eval_{name}": value for name, value in metrics.items()}
    run.log.write(line)
    run.log.say(f"step {progress.step}: held-out loss {loss:.4f}{describe_quality(metrics)}")
    return line


def _answer_sample_prompts(run: TrainingRun, step: int) -> None:
    """Answers the recipe's `sample_prompts`; shows the answers and adds them to samples.jsonl."""
    run.watchdog.beat("answering sample_prompts")
    with run.phases.timed("evaluation"):
        samples = answer(run.model, run.sample_prompts, run.tokenizer, run.world)
    for prompt, sample in zip(run.recipe.run.sample_prompts, samples, strict=True):
        run.log.say(f"step {step}: {prompt!r} -> {sample.answer!r}")
    _write_samples(run, step, samples)


def describe_quality(metrics: Mapping[str, float]) -> str:
    """Describes the metric of the method's quality: recall, the accuracy of classes, the mean
    reward, or the share of pairs in order.

    Returns an empty text if none of them was measured.

    >>> describe_quality({ACCURACY: 0.75}), describe_quality({"reward": 0.5}), describe_quality({})
    (', 75% of the pairs in order', ', mean reward 0.5', '')
    >>> describe_quality({"accuracy": 0.75, "f1_macro": 0.7})
    ', accuracy 75.0%, F1 0.700'
    """
    if "recall@1" in metrics:
        return f", recall@1 {metrics['recall@1']:.1%}, MRR {metrics['mrr@10']:.3f}"
    if "accuracy" in metrics:
        accuracy = f", accuracy {metrics['accuracy']:.1%}"
        # Without a document that has a class or is predicted to, there is no F1.
        return accuracy + (f", F1 {metrics['f1_macro']:.3f}" if "f1_macro" in metrics else "")
    if REWARD in metrics:
        return f", mean reward {metrics[REWARD]:.4g}"
    if ACCURACY in metrics:
        return f", {metrics[ACCURACY]:.0%} of the pairs in order"
    return ""


def evaluate_before_training(
    run: TrainingRun, progress: Progress, signals: SignalListener
) -> Progress:
    """Evaluates the model before the first step, or after the step at which the run resumes if a
    signal has stopped that evaluation. Otherwise only checks for signals.

    Returns the progress with the held-out loss of the evaluation. Raises `Preempted` if a signal
    asks to stop, or has asked since the model began to load.
    """
    if progress.step:
        where = f"after step {progress.step}, which is saved"
    else:
        where = "before the first step"
    preempted = run.preempted(where)
    if signals.agree(run.world).stop:
        raise preempted
    if progress.step == 0 or progress.owes_evaluation:
        progress = evaluate(
            run, progress, lambda batches: signals.interrupt(batches, run.world, preempted)
        )
    if progress.step == 0:
        if signals.agree(run.world).stop:
            raise preempted
        evaluate_exact_match(run, progress)
    return progress


def evaluate_after_training(
    run: TrainingRun, progress: Progress, signals: SignalListener
) -> Progress:
    """Evaluates the model after the last step; returns the progress with the held-out loss.

    Raises `Preempted` if a signal asks to stop meanwhile.
    """
    preempted = run.preempted(f"during the last evaluation; all {progress.step} steps are saved")
    progress = evaluate(
        run, progress, lambda batches: signals.interrupt(batches, run.world, preempted)
    )
    if not signals.agree(run.world).stop:
        evaluate_exact_match(run, progress)
    if signals.agree(run.world).stop:
        raise preempted
    return progress


def evaluate_exact_match(run: TrainingRun, progress: Progress) -> None:
    """Logs the share of held-out prompts that the model answers exactly, and the user's metrics of
    the answers.

    All ranks call it. It does nothing without such prompts, or if an earlier start of the run has
    logged the share at this step.
    """
    if not run.prompts or "exact_match" in run.results.get(progress.step, {}):
        return
    with run.phases.timed("evaluation"):
        samples = answer(run.model, run.prompts, run.tokenizer, run.world)
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
    summary = f"{share:.0%} of {len(samples)} held-out questions answered exactly"
    for name, score in scores.items():
        summary += f", {name.removeprefix('metrics/')} {score:.4g}"
    run.log.say(f"step {progress.step}: {summary}")
    run.notify("on_evaluate", progress, line)


def _write_samples(run: TrainingRun, step: int, samples: Sequence[Sample]) -> None:
    """Appends the samples to samples.jsonl, on the main rank. A failed write does not end the
    run.
    """
    if run.world.is_main:
        path = run.folder / SAMPLES
        with run.log.report_unwritable(path):
            append_json_lines(path, ({"step": step} | sample.texts() for sample in samples))


@torch.no_grad()
def measure_held_out(
    model: nn.Module, batches: Callable[[], Iterator[StepBatch]], world: World, objective: Objective
) -> tuple[float, dict[str, float]]:
    """Returns the objective's loss and metrics over all batches and all ranks.

    All ranks call it. The model stays in evaluation mode.

    `batches`: returns this rank's batches, from the first at each call, because the objective may
    read them before they are measured.
    """
    model.eval()

    def micro_batches() -> Iterator[MicroBatch]:
        for batch in batches():
            yield from batch.micro_batches

    objective = objective.prepare(model, micro_batches, world)
    total = Measured(torch.zeros((), device=world.device))
    count_of_all_ranks = 0
    for batch in batches():
        count_of_all_ranks += objective.count(batch)
        for micro_batch in batch.micro_batches:
            on_device = micro_batch.to(world.device)
            total += objective.measure(model, on_device, on_device.inputs, batch)
    loss, means = total.average(count_of_all_ranks, world)
    return loss, objective.complete(means) | objective.describe_rows(total.gather_rows(world))


@torch.no_grad()
def answer(
    model: nn.Module,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    world: World,
    generation: Generation = GREEDY,
) -> list[Sample]:
    """Answers every prompt; returns the samples on every rank, in the order of the prompts.

    All ranks call it with the same prompts. Each tensor-parallel group answers a part of them; the
    ranks of a group run the same forwards. The model stays in evaluation mode.

    Args:
        model: The model, sharded over the ranks.
        prompts: The prompts; if some have an expected answer, it limits the answers' length.
        tokenizer: Encodes expected answers and decodes samples.
        world: The ranks of the run.
        generation: The length of answers, and how tokens are chosen.
    """
    model.eval()
    groups = world.tensor_group_count
    order = _deal(prompts, groups)
    own = [prompts[index] for index in order[world.tensor_group_index :: groups]]
    # Prompts are answered one by one if rotary frequencies depend on a row's length, since a batch
    # would use those of its longest row, or if cross attention reads the images of a single prompt.
    if depends_on_length(model) or reads_across(unwrap(model)):
        size = 1
    else:
        size = _count_at_once(prompts, tokenizer, generation)
    samples: list[Sample] = []
    for start in range(0, len(own), size):
        batch = own[start : start + size]
        samples += _generate(model, batch, tokenizer, world, generation)
    by_rank = world.gather([asdict(sample) for sample in samples])
    # The ranks of a group have the same samples: those of its first rank are enough.
    ranks_per_group = world.stage_size // groups
    by_group = by_rank[::ranks_per_group][:groups]
    by_index = {
        index: Sample(**by_group[place % groups][place // groups])
        for place, index in enumerate(order)
    }
    return [by_index[index] for index in range(len(prompts))]


def _deal(prompts: Sequence[Prompt], groups: int) -> list[int]:
    """Lists the indexes of the prompts as they are dealt to `groups` groups of ranks in turn.

    Prompts with images come first, and every group gets as many of them as the others: a sharded
    vision tower runs on all ranks together. Every group gets as many prompts without images, too.
    For that, some indexes are listed again.
    """
    order: list[int] = []
    for has_images in (True, False):
        kind = [i for i, prompt in enumerate(prompts) if bool(prompt.images) == has_images]
        order += [kind[place % len(kind)] for place in range(round_up(len(kind), groups))]
    return order


def _count_at_once(prompts: Sequence[Prompt], tokenizer: Any, generation: Generation) -> int:
    """Counts the prompts of a batch: at most ANSWERS_AT_ONCE, with at most ANSWERED_TOKENS tokens.

    It is the same on every rank, because all have the same `prompts`; at least 1.
    """
    longest = max((len(prompt.prompt_ids) for prompt in prompts), default=0)
    row_tokens = longest + _count_new_tokens(prompts, tokenizer, generation)
    return max(1, min(ANSWERS_AT_ONCE, ANSWERED_TOKENS // row_tokens))


def _generate(
    model: nn.Module,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    world: World,
    generation: Generation,
) -> list[Sample]:
    """Generates the answers to `prompts` in one batch, on this rank's model."""
    transformer: Any = unwrap(model)
    pad = _choose_pad(tokenizer)
    stop_ids = find_stop_token_ids(tokenizer)
    inputs = _pad_left(prompts, pad)
    prompt_length = inputs["input_ids"].shape[1]
    # Eager, because generation has many shapes: torch.compile would reach its limit of graphs with
    # them, and training would run uncompiled.
    with unwrapped_call(model, world), torch.compiler.set_stance("force_eager"):
        generated = transformer.generate(
            **{name: ids.to(world.device) for name, ids in inputs.items()},
            **_read_images(transformer, tokenizer, prompts, inputs["input_ids"]),
            max_new_tokens=_count_new_tokens(prompts, tokenizer, generation),
            **_make_sampling_options(transformer, tokenizer, generation),
            use_cache=True,
            eos_token_id=stop_ids,
            pad_token_id=pad,
            # A forward gathers shards from all ranks: a rank that is done runs forwards with them.
            synced_gpus=world.sharding.is_fsdp and world.size > 1,
            return_dict_in_generate=True,
            output_logits=generation.with_log_probabilities,
        )
    token_ids = generated.sequences[:, prompt_length:]
    answers = [row[: _count_answer(row, stop_ids, pad)] for row in token_ids.tolist()]
    log_probabilities: list[tuple[float, ...]] = [()] * len(prompts)
    if generation.with_log_probabilities:
        temperature = generation.temperature or 1.0  # greedy answers are scored at 1
        padded = _score_tokens(generated.logits, token_ids, temperature).tolist()
        log_probabilities = [
            tuple(row[: len(ids)]) for row, ids in zip(padded, answers, strict=True)
        ]
    return _make_samples(prompts, answers, log_probabilities, tokenizer)


def _make_samples(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    log_probabilities: Sequence[tuple[float, ...]],
    tokenizer: Any,
) -> list[Sample]:
    """Makes a sample of each prompt and its answer, with both decoded.

    Args:
        prompts: The prompts.
        answers: The token ids of each prompt's answer.
        log_probabilities: Of each answer's tokens; empty tuples if nobody asked for them.
        tokenizer: Decodes them.
    """
    prompt_ids = [list(prompt.prompt_ids) for prompt in prompts]
    questions = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    samples = []
    for i, prompt in enumerate(prompts):
        question = questions[i].strip()
        text = texts[i].strip()
        token_ids = tuple(answers[i])
        samples.append(Sample(question, text, prompt.answer, token_ids, log_probabilities[i]))
    return samples


def _choose_pad(tokenizer: Any) -> int:
    """Returns the token id that pads a batch's shorter rows."""
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
) -> Mapping[str, Any]:
    """Makes the vision tower's inputs for the images of `prompts`; empty if they have none."""
    images = list(chain.from_iterable(prompt.images for prompt in prompts))
    if not images:
        return {}
    inputs = tokenizer.images.make_generation_inputs(transformer, input_ids, images)
    return with_read_tiles(transformer, input_ids, inputs)


def _count_new_tokens(prompts: Sequence[Prompt], tokenizer: Any, generation: Generation) -> int:
    """Returns the largest number of tokens that an answer may have: twice as many as the longest
    expected answer, and 2 more.

    Returns `max_new_tokens` if no prompt has an expected answer.
    """
    expected_tokens = []
    for prompt in prompts:
        if prompt.answer:
            expected_tokens.append(len(tokenizer.encode(prompt.answer, add_special_tokens=False)))
    if not expected_tokens:
        return generation.max_new_tokens
    return 2 * max(expected_tokens) + 2


def _make_sampling_options(
    transformer: Any, tokenizer: Any, generation: Generation
) -> dict[str, Any]:
    """Makes the arguments of `generate` that decide how a token is chosen and where answers end."""
    options: dict[str, Any] = {"do_sample": generation.temperature > 0}
    if generation.temperature:
        # 0 and 1.0 switch off what the model's generation config may set
        options |= {"temperature": generation.temperature, "top_k": 0, "top_p": 1.0}
    if generation.stop:
        options |= {"stop_strings": list(generation.stop), "tokenizer": tokenizer}
    # If the model's vocabulary is padded, its last ids stand for no token.
    vocabulary = tokenizer.backend_tokenizer.get_vocab_size()
    ids_without_token = range(vocabulary, transformer.config.get_text_config().vocab_size)
    if ids_without_token:
        options["suppress_tokens"] = list(ids_without_token)
    return options


def _score_tokens(logits: Sequence[Tensor], token_ids: Tensor, temperature: float) -> Tensor:
    """Computes the log-probability of each generated token, fp32[rows, positions].

    Args:
        logits: For each generated position, [rows, vocabulary].
        token_ids: The tokens that were generated, int64[rows, positions].
        temperature: Divides the logits.
    """
    columns = []
    for position, row_logits in enumerate(logits):
        log_probabilities = (row_logits.float() / temperature).log_softmax(-1)
        columns.append(log_probabilities.gather(-1, token_ids[:, position : position + 1]))
    return torch.cat(columns, 1)


def _count_answer(token_ids: Sequence[int], stop_ids: Sequence[int], pad: int) -> int:
    """Counts the tokens of an answer in a generated row: all up to the first of `stop_ids`, which
    is counted too.

    Without one of `stop_ids`, the row's whole length counts, except padding at its end.

    >>> (
    ...     _count_answer([5, 6, 2, 0, 0], [2], pad=0),
    ...     _count_answer([5, 6, 7], [2], pad=0),
    ...     _count_answer([5, 0, 0], [2], pad=0),
    ... )
    (3, 3, 1)
    """
    for position, token in enumerate(token_ids):
        if token in stop_ids:
            return position + 1
    length = len(token_ids)
    # `generate` pads a row that ended at a text of `stop`
    while length and token_ids[length - 1] == pad:
        length -= 1
    return length
