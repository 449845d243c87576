"""Evaluation on rows that are not trained on: the held-out loss, and generated answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.checkpoint.manifest import Progress
from finetune.data.batches import StepBatch
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
REWARD = "reward"  # of answers to held-out prompts, their mean
SAMPLE_TOKENS = 64  # of an answer to one of sample_prompts, at most


@dataclass(frozen=True, slots=True)
class Sample:
    """One held-out prompt as the model answers it."""

    prompt: str
    answer: str
    expected: str
    token_ids: tuple[int, ...] = ()  # of the answer, with the token that ends it
    # of each token; none where `Generation` asks for none
    log_probabilities: tuple[float, ...] = ()

    def texts(self) -> dict[str, str]:
        """The sample's texts, for samples.jsonl."""
        return {"prompt": self.prompt, "answer": self.answer, "expected": self.expected}

    @property
    def is_exact(self) -> bool:
        return self.answer.strip() == self.expected.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How answers are generated."""

    max_new_tokens: int = SAMPLE_TOKENS  # without expected answers, which allow twice the longest
    temperature: float = 0.0  # 0: greedily; above it, by torch's generators
    stop: tuple[str, ...] = ()  # texts at which an answer ends
    with_log_probabilities: bool = False


GREEDY = Generation()


def evaluate(
    run: TrainingRun,
    progress: Progress,
    watch: Callable[[Iterator[StepBatch]], Iterator[StepBatch]] = lambda batches: batches,
) -> Progress:
    """Logs the held-out loss, where something is held out, and answers `sample_prompts`.

    Returns the progress with that loss, on every rank. What this run has logged of the step before
    is not repeated. `watch`: wraps the held-out batches, and may raise before one.
    """
    step = progress.step
    results = run.results.setdefault(progress.step, {})
    round_from_step(run.model, run.recipe.quantization_aware, step)
    line = None
    if run.data.evaluation is not None and "eval_loss" not in results:
        held_out = run.data.evaluation

        def batches() -> Iterator[StepBatch]:
            return watch(run.watchdog.watched(held_out.batches(), "evaluating"))

        with run.phases.timed("evaluation"):
            loss, metrics = measure_held_out(run.model, batches, run.world, run.objectives.held_out)
        results["eval_loss"] = loss
        if step == 0 and run.recipe.method_facts.needs_reference:
            metrics.pop(ACCURACY, None)  # the model still is its own reference: every margin is 0
        shown = {f"eval_{name}": value for name, value in metrics.items()}
        line = {"step": step, "epoch": progress.epoch, "eval_loss": loss, **shown}
        run.log.write(line)
        run.log.say(f"step {step}: held-out loss {loss:.4f}{describe_order(metrics)}")
    if run.sample_prompts and "sample_prompts" not in results:
        with run.phases.timed("evaluation"):
            samples = answer(run.model, run.sample_prompts, run.tokenizer, run.world)
        for prompt, sample in zip(run.recipe.run.sample_prompts, samples, strict=True):
            run.log.say(f"step {step}: {prompt!r} -> {sample.answer!r}")
        _write_samples(run, step, samples)
        results["sample_prompts"] = True
    if "eval_loss" in results:
        progress = progress.after_evaluation(results["eval_loss"])
    else:
        progress = progress
    if line is not None:
        run.notify("on_evaluate", progress, line)
    return progress


def describe_order(metrics: Mapping[str, float]) -> str:
    """The share of pairs in order, the mean reward, the accuracy of classes, or recall; empty where
    none was measured.

    >>> describe_order({ACCURACY: 0.75}), describe_order({"reward": 0.5}), describe_order({})
    (', 75% of the pairs in order', ', mean reward 0.5', '')
    >>> describe_order({"accuracy": 0.75, "f1_macro": 0.7})
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
    """Evaluates a model that has not been trained yet; nothing where the run is resumed.

    Raises `Preempted` where a signal asks to stop meanwhile.
    """
    saved = f"after step {progress.step}, which is saved"
    stopped = run.preempted(saved if progress.step else "before the first step")
    if signals.agree(run.world).stop:  # while the model was loaded
        raise stopped
    if progress.step == 0:
        evaluate(run, progress, lambda batches: signals.interrupt(batches, run.world, stopped))
        evaluate_exact_match(run, progress)


def evaluate_after_training(
    run: TrainingRun, progress: Progress, signals: SignalListener
) -> Progress:
    """The last evaluation of a run. Raises `Preempted` where a signal asks to stop meanwhile."""
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
    """Logs the share of held-out prompts that the model answers exactly, where this run has not
    logged it before.
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
    run.log.write(line | scores)
    shown = "".join(
        f", {name.removeprefix('metrics/')} {score:.4g}" for name, score in scores.items()
    )
    run.log.say(
        f"step {progress.step}: {share:.0%} of {len(samples)} held-out questions answered "
        f"exactly{shown}"
    )
    run.notify("on_evaluate", progress, line | scores)


def _write_samples(run: TrainingRun, step: int, samples: Sequence[Sample]) -> None:
    """Adds the samples to samples.jsonl on the main rank. A full disk does not end the run."""
    if run.world.is_main:
        try:
            append_json_lines(
                run.folder / SAMPLES, ({"step": step} | sample.texts() for sample in samples)
            )
        except OSError as error:
            run.log.say(
                f"{run.folder / SAMPLES}: cannot be written ({error.strerror}); the run continues"
            )


@torch.no_grad()
def measure_held_out(
    model: nn.Module, batches: Callable[[], Iterator[StepBatch]], world: World, objective: Objective
) -> tuple[float, dict[str, float]]:
    """The objective's loss and metrics over all of `batches` and all ranks.

    An objective may go through them twice.
    """
    model.eval()
    objective = objective.prepare(
        model, lambda: (each for batch in batches() for each in batch.micro_batches), world
    )
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
    """Every prompt answered, on every rank in the same order; each rank (each tensor parallel
    group, whose ranks run the same forwards) answers its share.

    An answer ends with a turn, or at twice the longest expected length; without one, at
    `max_new_tokens`.

    Raises `UserError` on all ranks where a sharded tower would run on some of them alone.
    """
    model.eval()
    groups = world.tensor_group_count
    padded = len(prompts) + -len(prompts) % groups  # every group answers the same number
    mine = [prompts[i % len(prompts)] for i in range(world.tensor_group_index, padded, groups)]
    batches = [mine] if mine else []
    # Caches of rows of several lengths cannot change their frequencies each at its own token.
    if depends_on_length(model) or reads_across(unwrap(model)):
        batches = [[prompt] for prompt in mine]
    have_images = [any(prompt.images for prompt in batch) for batch in batches]
    if world.sharding.is_fsdp and any(each != have_images for each in world.gather(have_images)):
        raise UserError(
            "exact_match_samples: a rank's held-out questions have images and another's have "
            "none, and a sharded tower runs on all ranks together; hold out rows with images "
            "alone, or set exact_match_samples: 0"
        )
    answers = [
        sample
        for batch in batches
        for sample in _generate(model, batch, tokenizer, world, eot_tokens, how)
    ]
    by_rank = world.gather([asdict(sample) for sample in answers])
    return [
        Sample(**by_rank[i % groups * (world.stage_size // groups)][i // groups])
        for i in range(len(prompts))
    ]


def _generate(
    model: nn.Module,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    world: World,
    eot_tokens: tuple[str, ...],
    how: Generation,
) -> list[Sample]:
    """Generates the answers to `prompts` as one batch."""
    transformer: Any = unwrap(model)
    pad = _choose_pad(tokenizer)
    stop_ids = end_of_answer_ids(tokenizer, eot_tokens)
    inputs = _pad_left(prompts, pad)
    prompt_length = inputs["input_ids"].shape[1]
    # Generation's shapes and caches would fill torch.compile's limit of graphs, and training would
    # run uncompiled.
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
    answers = [row[: _length(row, stop_ids, pad)] for row in token_ids.tolist()]
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
    """Decodes questions and answers. `scores`: each answer's log-probabilities, or nothing."""
    prompt_ids = [list(prompt.prompt_ids) for prompt in prompts]
    questions = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    rows = zip(questions, texts, prompts, answers, scores, strict=True)
    return [
        Sample(question.strip(), text.strip(), prompt.answer, tuple(ids), of_tokens)
        for question, text, prompt, ids, of_tokens in rows
    ]


def _choose_pad(tokenizer: Any) -> int:
    """The id that fills a batch's shorter rows."""
    if tokenizer.pad_token_id is not None:
        pad: int = tokenizer.pad_token_id
        return pad
    return tokenizer.eos_token_id or 0


def _pad_left(prompts: Sequence[Prompt], pad: int) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, int64[prompts, longest prompt]."""
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
    """The tower's inputs for the images of `prompts`; none where they have none."""
    images = [image for prompt in prompts for image in prompt.images]
    if not images:
        return {}
    inputs = tokenizer.images.make_generation_inputs(transformer, input_ids, images)
    return with_read_tiles(transformer, input_ids, inputs)


def _count_new_tokens(prompts: Sequence[Prompt], tokenizer: Any, how: Generation) -> int:
    """Counts the tokens that an answer may have: twice the longest expected answer."""
    expected = [
        len(tokenizer.encode(prompt.answer, add_special_tokens=False))
        for prompt in prompts
        if prompt.answer
    ]
    return 2 * max(expected) + 2 if expected else how.max_new_tokens


def _choose_tokens(transformer: Any, tokenizer: Any, how: Generation) -> dict[str, Any]:
    """Returns the arguments by which `generate` chooses the next token."""
    options: dict[str, Any] = {"do_sample": how.temperature > 0}
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
    """fp32[rows, tokens]: of each token, from the logits [rows, vocabulary] at each place."""
    columns = []
    for place, scores in enumerate(logits):
        of_all = (scores.float() / temperature).log_softmax(-1)
        columns.append(of_all.gather(-1, token_ids[:, place : place + 1]))
    return torch.cat(columns, 1)


def _length(token_ids: Sequence[int], stop_ids: Sequence[int], pad: int) -> int:
    """Counts the tokens of a row's answer: up to the first that ends it, that one
    included.

    >>> (
    ...     _length([5, 6, 2, 0, 0], [2], pad=0),
    ...     _length([5, 6, 7], [2], pad=0),
    ...     _length([5, 0, 0], [2], pad=0),
    ... )
    (3, 3, 1)
    """
    for place, token in enumerate(token_ids):
        if token in stop_ids:
            return place + 1
    length = len(token_ids)
    while length and token_ids[length - 1] == pad:  # behind the text of `stop`
        length -= 1
    return length
