"""A model's answers, made by transformers' `generate` piece by piece, and conversations in the
terminal.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from finetune.config.methods import MULTI_LABEL
from finetune.config.pretrained import scores_tokens
from finetune.constants import GENERATION_FILE
from finetune.data.formats import Conversation
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
    """How tokens are chosen. None: as the model's generation_config.json says."""

    max_new_tokens: int = 512
    temperature: float | None = None  # 0: greedily
    top_p: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer. Returned by `answer`."""

    text: str
    tokens: int
    seconds: float
    is_cut: bool = False  # at max_new_tokens, or at the end of what the model can read
    limit: int | None = None  # the tokens that the model reads, where the answer is cut there
    is_interrupted: bool = False


def answer(
    model: InferenceModel,
    conversation: Conversation,
    sampling: AnswerOptions,
    write: Callable[[str], object],
) -> Answer:
    """The model's answer to a conversation; `write` gets each piece of it as it is made.

    Ctrl-C stops the answer and keeps what there is of it. Raises `UserError` where the chat
    template rejects the messages, or they are longer than what the model can read.
    """
    input_ids = encode_prompt(model, conversation)
    images = conversation.images
    if has_scores(model.whole):
        return _score(model, input_ids, write)
    limit = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
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
    with interruptible() as interrupted, model.computing(), torch.inference_mode():
        ids = torch.tensor([input_ids], device=model.model.device)
        try:
            generated = model.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **(
                    with_read_tiles(
                        model.whole,
                        ids,
                        model.tokenizer.images.make_generation_inputs(model.whole, ids, images),
                    )
                    if images
                    else {}
                ),
                max_new_tokens=room,
                streamer=streamer,
                stopping_criteria=[_StopWhen(interrupted)],
                **_sampling_options(model, sampling),
            )
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
        ) as error:  # a setting that transformers refuses
            reason = " ".join(str(error).split())
            raise UserError(
                f"{model.name}: {GENERATION_FILE}: cannot be used: {reason}; correct it"
            ) from None
        except torch.OutOfMemoryError:
            raise UserError(
                f"{model.name}: out of memory after {len(input_ids):,} tokens of conversation; use "
                "a shorter one, or more or larger GPUs"
            ) from None
    new = generated[0, len(input_ids) :].tolist()
    ends = end_ids(model)
    return Answer(
        text=streamer.text,
        tokens=len(new),
        seconds=time.monotonic() - started,
        is_cut=len(new) >= room and new[-1] not in ends,
        limit=limit if room < sampling.max_new_tokens else None,
        is_interrupted=interrupted.is_set(),
    )


def encode_prompt(model: InferenceModel, conversation: Conversation) -> list[int]:
    """The tokens that the model is asked with: rendered as in training, with the generation prompt;
    or what it scores.

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
        text += (model.tokenizer.eos_token or "") * is_scoring
        return list(model.tokenizer(text, verbose=False).input_ids)
    try:
        renderer = make_renderer(model.tokenizer, assistant_only=True)
        if conversation.images:
            find_image_token(renderer)  # says so where the model takes none
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
    """The scores of a reward model, or a classifier's probabilities, the largest first, as an
    answer.
    """
    started = time.monotonic()
    with model.computing(), torch.inference_mode():
        scores = (
            model.model(input_ids=torch.tensor([input_ids], device=model.model.device))
            .logits[0]
            .float()
        )
    if scores_tokens(model.model.config):
        scores = scores[-1]  # of the last step
    names = model.model.config.id2label
    if model.model.config.problem_type == MULTI_LABEL:
        scores = scores.sigmoid()
    elif len(scores) > 1:
        scores = scores.softmax(0)
    order = scores.argsort(descending=True).tolist()
    text = "  ".join(f"{names[index]} {float(scores[index]):.4f}" for index in order)
    write(text)
    seconds = time.monotonic() - started
    return Answer(
        text=text, tokens=0, seconds=seconds, is_cut=False, limit=None, is_interrupted=False
    )


def end_ids(model: InferenceModel) -> list[int]:
    """The tokens that end an answer: those of the model's generation config, and of its
    tokenizer.
    """
    own = model.model.generation_config.eos_token_id
    listed = own if isinstance(own, list) else [own]
    return sorted(
        {
            *(token for token in listed if type(token) is int and token >= 0),
            *end_of_answer_ids(model.tokenizer),
        }
    )


def _sampling_options(model: InferenceModel, sampling: AnswerOptions) -> dict[str, Any]:
    ends = end_ids(model)
    pad = model.tokenizer.pad_token_id
    options: dict[str, Any] = {
        "num_return_sequences": 1,  # one answer, written as it is made
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
    return options | given | ({"do_sample": True} if given else {})


class _Pieces(BaseStreamer):  # type: ignore[misc]  # transformers is untyped
    """Hands on the text as it grows, without special tokens, and not before its last character is
    whole.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._write = write
        self._ids: list[int] | None = None  # None: what comes first is the prompt

    def put(self, value: torch.Tensor) -> None:
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

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device)


@contextmanager
def interruptible() -> Iterator[Event]:
    """In this block the first Ctrl-C sets the event, and the second raises `KeyboardInterrupt`.

    Threads but the main one get no signal.
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
        """The model's answer to `prompt`, after all that was said before.

        Args:
            prompt: A user's turn.
            max_new_tokens: After which the answer is cut.
            temperature: 0: greedily; None: as the model's generation_config.json says.
            images: Paths of what is asked about.

        Raises:
            UserError: Where the conversation is longer than the model reads, or an image cannot be
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
    """The answer to `message`, which is remembered with it.

    `on_piece` gets its text as it is made.
    """
    asked = [*chat.messages, message]
    answered = answer(chat.model, ask(asked), sampling, on_piece)
    # without turns, or what is scored
    stands_alone = chat.model.template is None or has_scores(chat.model.whole)
    if not stands_alone:
        chat.messages = [*asked, {"role": "assistant", "content": answered.text}]
    return answered


@dataclass(frozen=True, slots=True)
class Speaker:
    """A model in the terminal's conversation."""

    label: str
    chat: Chat

    def ask(self, message: Message, sampling: AnswerOptions) -> None:
        """Prints the answer as it is made.

        A message that cannot be answered is reported, and forgotten.
        """
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
                system = (rest.strip() or None) if command == "/system" else system
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
    """Reads what the user types, without spaces around it; None at its end (Ctrl-D, or Ctrl-C
    twice).
    """
    lines: list[str] = []
    interrupted = False
    while True:
        try:
            line = check_utf8(input(PROMPT if not lines else "  "), "this line")
        except (UserError, UnicodeDecodeError) as error:  # a terminal in another encoding
            print(
                error if isinstance(error, UserError) else f"this line: not UTF-8: {error.reason}",
                file=sys.stderr,
            )
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
    """Ends the line of an answer, and says why it is not whole."""
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
