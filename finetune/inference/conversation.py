"""Answers that transformers' `generate` makes piece by piece, and conversations in the terminal."""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from finetune.config.methods import MULTI_LABEL
from finetune.config.pretrained import read_positions, scores_tokens
from finetune.constants import GENERATION_FILE
from finetune.data.formats import Conversation
from finetune.data.images import EncodedImage
from finetune.data.messages import BadRow, Message
from finetune.data.render import RenderedText, find_image_token, write_images
from finetune.data.spans import read_messages
from finetune.data.tokenizer import (
    add_variables,
    apply_template,
    end_of_answer_ids,
    make_renderer,
    read_parts,
)
from finetune.distributed.model_parts import has_scores
from finetune.errors import UserError, print_styled
from finetune.inference.inference_model import InferenceModel
from finetune.inference.inputs import ask, check_utf8, system_message, user_message
from finetune.models.vision import with_read_tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """The options of sampling. None: that of the model's generation_config.json."""

    max_new_tokens: int = 512
    temperature: float | None = None  # 0: greedy
    top_p: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer. Returned by `answer`."""

    text: str
    tokens: int
    seconds: float
    is_cut: bool = False  # at max_new_tokens, or at the model's limit
    limit: int | None = None  # the tokens that the model can read, where it cut the answer
    is_interrupted: bool = False  # by Ctrl-C


def answer(
    model: InferenceModel,
    conversation: Conversation,
    sampling: AnswerOptions,
    write: Callable[[str], object],
) -> Answer:
    """Answers a conversation, and calls `write` with each piece of the text as it is made.

    Ctrl-C stops the answer, which is returned as far as it was made. A model with a score head
    answers with its scores.

    Raises `UserError` where the chat template rejects the messages, or they are longer than the
    model can read.
    """
    input_ids = encode_prompt(model, conversation)
    if has_scores(model.whole):
        return _score(model, input_ids, write)
    limit = read_positions(model.model.config)
    if limit is None:
        room = sampling.max_new_tokens
    else:
        room = min(sampling.max_new_tokens, limit - len(input_ids))
    if room <= 0:
        raise UserError(
            f"{model.name}: the conversation has {len(input_ids):,} tokens, and the model reads "
            f"{limit:,} at most"
        )
    streamer = _Pieces(model.tokenizer, write)
    started = time.monotonic()
    with interruptible() as interrupted:
        options = _sampling_options(model, sampling)
        options["max_new_tokens"] = room
        options["streamer"] = streamer
        options["stopping_criteria"] = [_StopWhen(interrupted)]
        new_ids = _generate(model, input_ids, conversation.images, options)
    return Answer(
        text=streamer.text,
        tokens=len(new_ids),
        seconds=time.monotonic() - started,
        is_cut=len(new_ids) >= room and new_ids[-1] not in end_ids(model),
        limit=limit if room < sampling.max_new_tokens else None,
        is_interrupted=interrupted.is_set(),
    )


@torch.inference_mode()
def _generate(
    model: InferenceModel,
    input_ids: list[int],
    images: Sequence[EncodedImage],
    options: Mapping[str, Any],
) -> list[int]:
    """Returns the tokens that transformers' `generate` makes after `input_ids`.

    Raises `UserError` where it refuses a setting of the model, or memory runs out.
    """
    ids = torch.tensor([input_ids], device=model.model.device)
    inputs: Mapping[str, Any] = {}
    try:
        if images:
            tiles = model.tokenizer.images.make_generation_inputs(model.whole, ids, images)
            inputs = with_read_tiles(model.whole, ids, tiles)
        with model.computing():
            generated = model.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, **options
            )
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{model.name}: {GENERATION_FILE}: cannot be used: {reason}; correct it"
        ) from None
    except torch.OutOfMemoryError:
        raise UserError(
            f"{model.name}: out of memory after {len(input_ids):,} tokens of conversation; use "
            "a shorter one, or more or larger GPUs"
        ) from None
    new_ids: list[int] = generated[0, len(input_ids) :].tolist()
    return new_ids


def encode_prompt(model: InferenceModel, conversation: Conversation) -> list[int]:
    """Returns the token ids of a conversation, rendered as in training.

    The generation prompt follows, except for a model that scores. Without a chat template the
    contents of the messages are joined.

    Raises `UserError` where the chat template rejects the conversation.
    """
    is_scoring = has_scores(model.whole)
    if model.template is None:
        if conversation.images:
            raise UserError(
                f"{model.name}: an image is asked about by a chat template; name one with "
                "--chat-template"
            )
        text = "".join(message["content"] for message in conversation.messages)
        if is_scoring:
            text += model.tokenizer.eos_token or ""
        return list(model.tokenizer(text, verbose=False).input_ids)
    try:
        renderer = make_renderer(model.tokenizer, assistant_only=True)
        if conversation.images:
            find_image_token(renderer)  # raises `BadRow` where the model takes no images
            renderer = read_parts(renderer)
        renderer = add_variables(renderer, {**model.variables, **conversation.variables})
        messages = read_messages(conversation, renderer)
        text = apply_template(
            renderer, messages, conversation.tools, add_generation_prompt=not is_scoring
        )
        rendered = RenderedText(text, (), is_plain=False)
        text = write_images(rendered, conversation, conversation.images, renderer).text
    except BadRow as error:
        raise UserError(f"{model.name}: {error}") from None
    return list(model.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _score(model: InferenceModel, input_ids: list[int], write: Callable[[str], object]) -> Answer:
    """Answers with a reward model's scores or a classifier's probabilities, the largest first."""
    started = time.monotonic()
    ids = torch.tensor([input_ids], device=model.model.device)
    with model.computing(), torch.inference_mode():
        scores = model.model(input_ids=ids).logits[0].float()
    if scores_tokens(model.model.config):
        scores = scores[-1]  # the score of the last step
    names = model.model.config.id2label
    if model.model.config.problem_type == MULTI_LABEL:
        scores = scores.sigmoid()
    elif len(scores) > 1:
        scores = scores.softmax(0)
    order = scores.argsort(descending=True).tolist()
    text = "  ".join(f"{names[index]} {float(scores[index]):.4f}" for index in order)
    write(text)
    return Answer(text=text, tokens=0, seconds=time.monotonic() - started)


def end_ids(model: InferenceModel) -> list[int]:
    """Returns the tokens that end an answer by the model's generation config or its tokenizer."""
    own = model.model.generation_config.eos_token_id
    listed = own if isinstance(own, list) else [own]
    valid = [token for token in listed if type(token) is int and token >= 0]
    return sorted({*valid, *end_of_answer_ids(model.tokenizer)})


def _sampling_options(model: InferenceModel, sampling: AnswerOptions) -> dict[str, Any]:
    """Returns the arguments of `generate` for `sampling`."""
    ends = end_ids(model)
    pad = model.tokenizer.pad_token_id
    options: dict[str, Any] = {
        "num_return_sequences": 1,  # a streamer takes one answer
        "num_beams": 1,
        "return_dict_in_generate": False,
        "eos_token_id": ends or None,
        "pad_token_id": pad if pad is not None else (ends or [0])[0],
    }
    if sampling.temperature == 0:
        return options | {
            "do_sample": False,
            "temperature": None,
            "top_p": None,
            "top_k": None,
            "min_p": None,
        }
    named = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    given = {name: value for name, value in named.items() if value is not None}
    if given:
        options["do_sample"] = True
    return options | given


class _Pieces(BaseStreamer):  # type: ignore[misc]  # transformers is untyped
    """Writes the text as it grows, without special tokens.

    A character of several tokens is written once it is complete.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._write = write
        self._ids: list[int] | None = None  # None: the prompt, which comes first, is expected

    def put(self, value: Tensor) -> None:
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        text = self._decode()
        if text.startswith(self.text) and not text.endswith("\ufffd"):
            self._show(text)

    def end(self) -> None:
        text = self._decode()
        if text.startswith(self.text):
            self._show(text)

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids or [], skip_special_tokens=True))

    def _show(self, text: str) -> None:
        if piece := text[len(self.text) :]:
            self.text = text
            self._write(piece)


@dataclass
class _StopWhen(StoppingCriteria):  # type: ignore[misc]
    """Stops the generation once `event` is set."""

    event: Event

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device)


@contextmanager
def interruptible() -> Iterator[Event]:
    """Yields an event that the first Ctrl-C sets; the second raises `KeyboardInterrupt`.

    Only the main thread gets signals; in others the event is never set.
    """
    pressed = Event()
    if current_thread() is not main_thread():
        yield pressed
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


HELP = """\
/new          start over
/system TEXT  start over, with this system message (none: without one)
/image PATH   ask about this image with the next line
/exit         end; so does Ctrl-D. Ctrl-C stops an answer
a line that ends in \\ continues on the next"""
PROMPT = "> "


@dataclass(slots=True)
class Chat:
    """A conversation with a model. Returned by `chat`."""

    model: InferenceModel
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(
        self,
        prompt: str,
        max_new_tokens: int = 512,
        temperature: float | None = None,
        images: Sequence[str] = (),
    ) -> str:
        """Returns the model's answer to `prompt`, which continues the conversation.

        Args:
            prompt: The user's turn.
            max_new_tokens: The length at which the answer is cut.
            temperature: 0: greedy; None: that of the model's generation_config.json.
            images: The paths of images that the prompt is about.

        Raises:
            UserError: The conversation is longer than the model can read, or an image cannot be
                read.
        """
        sampling = AnswerOptions(max_new_tokens=max_new_tokens, temperature=temperature)
        return take_turn(self, user_message(prompt, images), sampling).text


def take_turn(
    chat: Chat,
    message: Message,
    sampling: AnswerOptions,
    on_piece: Callable[[str], None] = lambda piece: None,
) -> Answer:
    """Answers `message`, and adds message and answer to the conversation.

    Without a chat template, and by a model that scores, each message is answered on its own.

    on_piece: Called with each piece of the text as it is made.
    """
    asked = [*chat.messages, message]
    answered = answer(chat.model, ask(asked), sampling, on_piece)
    has_turns = chat.model.template is not None and not has_scores(chat.model.whole)
    if has_turns:
        chat.messages = [*asked, {"role": "assistant", "content": answered.text}]
    return answered


@dataclass(frozen=True, slots=True)
class Speaker:
    """A model in the terminal's conversation."""

    label: str
    chat: Chat

    def ask(self, message: Message, sampling: AnswerOptions) -> None:
        """Prints the answer as it is made; reports a message that cannot be answered."""
        try:
            finish_answer(take_turn(self.chat, message, sampling, write_piece), sampling)
        except UserError as error:
            print(error, file=sys.stderr)

    def start_over(self, system: str | None) -> None:
        self.chat.messages = system_message(system)


def converse(speakers: Sequence[Speaker], sampling: AnswerOptions, system: str | None) -> None:
    """Asks for lines and prints the answers of every speaker, until the user ends it."""
    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and a history for `input`, where Python has it
    images: list[str] = []
    for speaker in speakers:
        speaker.start_over(system)
    while (line := read_turn()) is not None:
        command, _, rest = line.partition(" ")
        match command:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/help":
                print(HELP)
            case "/new" | "/system":
                if command == "/system":
                    system = rest.strip() or None
                images = []
                for speaker in speakers:
                    speaker.start_over(system)
                print_styled("a new conversation", "dim")
            case "/image" if Path(rest.strip()).is_file():
                images.append(rest.strip())
            case "/image":
                print(f"{rest.strip() or 'no path'}: no such file")
            case _ if command.startswith("/") and command[1:].isalpha():
                print(f"{command}: no such command; /help lists them")
            case _:
                for speaker in speakers:
                    if len(speakers) > 1:
                        print_styled(speaker.label, "bold")
                    speaker.ask(user_message(line, images), sampling)
                images = []
        print()


def read_turn() -> str | None:
    """Reads a turn that the user types, stripped of spaces; None after Ctrl-D, or Ctrl-C twice."""
    lines: list[str] = []
    interrupted = False
    while True:
        try:
            line = check_utf8(input(PROMPT if not lines else "  "), "this line")
        except UserError as error:
            print(error, file=sys.stderr)
            lines = []
            continue
        except UnicodeDecodeError as error:  # the terminal has another encoding
            print(f"this line: not UTF-8: {error.reason}", file=sys.stderr)
            lines = []
            continue
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            if interrupted:
                return None
            interrupted = True
            lines = []
            print_styled("Ctrl-D or /exit ends the conversation", "dim")
            continue
        interrupted = False
        if line.endswith("\\"):
            lines.append(line[:-1])
            continue
        return "\n".join([*lines, line]).strip()


def write_piece(text: str) -> None:
    print(text, end="", flush=True)


def finish_answer(answered: Answer, sampling: AnswerOptions) -> None:
    """Ends the line of a printed answer, and prints why it is incomplete or empty."""
    if not answered.text.endswith("\n"):
        print()
    if answered.is_interrupted:
        print_styled("[stopped]", "dim")
    elif answered.is_cut and answered.limit is not None:
        end = f"the conversation has reached the {answered.limit:,} tokens that the model reads"
        print_styled(f"[cut after {answered.tokens:,} tokens: {end}; /new starts over]", "dim")
    elif answered.is_cut:
        print_styled(f"[cut after {answered.tokens:,} tokens; --max-new-tokens allows more]", "dim")
    elif not answered.text.strip():
        print_styled("[an empty answer]", "dim")
