"""Answers by transformers' `generate`, piece by piece, and conversations in the terminal."""

import signal
import sys
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
    encode_plain,
    find_stop_token_ids,
    make_renderer,
    read_parts,
)
from finetune.distributed.model_parts import has_scores
from finetune.errors import UserError, on_one_line, print_styled
from finetune.inference.inference_model import InferenceModel
from finetune.inference.inputs import check_utf8, make_question, system_message, user_message
from finetune.models.vision import with_read_tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """The options of sampling. None: the model's generation_config.json decides."""

    max_new_tokens: int = 512
    temperature: float | None = None  # 0: greedy
    top_p: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer. Returned by `answer`."""

    text: str
    tokens: int  # 0 for scores
    is_cut: bool = False  # at max_new_tokens, or at the model's limit
    # the tokens that the model can read, if they leave less room than max_new_tokens; else None
    limit: int | None = None
    is_interrupted: bool = False  # by Ctrl-C


def answer(
    model: InferenceModel,
    conversation: Conversation,
    sampling: AnswerOptions,
    write: Callable[[str], object],
) -> Answer:
    """Answers a conversation.

    A model with a score head answers with its scores. Ctrl-C stops the answer; the part that was
    made until then is returned.

    Args:
        model: The model.
        conversation: The conversation, without the answer.
        sampling: The options of sampling.
        write: Called with each piece of the text as it is made.

    Raises:
        UserError: The chat template rejects the messages, or they are longer than the model can
            read.
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
    streamer = _PieceWriter(model.tokenizer, write)
    with interruptible() as interrupted:
        options = _make_generate_options(model, sampling)
        options["max_new_tokens"] = room
        options["streamer"] = streamer
        options["stopping_criteria"] = [_StopWhen(interrupted)]
        new_ids = _generate(model, input_ids, conversation.images, options)
    return Answer(
        text=streamer.text,
        tokens=len(new_ids),
        is_cut=len(new_ids) >= room and new_ids[-1] not in find_end_ids(model),
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
    """Generates the tokens after `input_ids`.

    Args:
        model: The model.
        input_ids: The token ids of the prompt.
        images: The images of the prompt.
        options: The other arguments of transformers' `generate`.

    Raises:
        UserError: `generate` refuses the model's generation_config.json, or memory runs out.
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
        raise UserError(
            f"{model.name}: {GENERATION_FILE}: cannot be used: {on_one_line(error)}; correct it"
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

    The generation prompt comes last, unless the model scores. Without a chat template the contents
    of the messages are joined.

    Raises `UserError` if the chat template rejects the conversation, or the model takes no images.
    """
    is_scoring = has_scores(model.whole)
    if model.template is None:
        if conversation.images:
            raise UserError(
                f"{model.name}: an image is asked about by a chat template; name one with "
                "--chat-template"
            )
        text = "".join(message["content"] for message in conversation.messages)
        if is_scoring and not scores_tokens(model.model.config):
            # a process reward model scores the separator that ends the text
            eos = model.tokenizer.eos_token or ""
            text = text.removesuffix(eos) + eos
        return encode_plain(model.tokenizer, text)
    try:
        renderer = make_renderer(model.tokenizer, assistant_only=True)
        if conversation.images:
            find_image_token(renderer)  # raises `BadRow` if the model takes no images
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
    """Answers with a reward model's scores or a classifier's probabilities, the largest first.

    write: Called with the whole text.
    """
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
    return Answer(text=text, tokens=0)


def find_end_ids(model: InferenceModel) -> list[int]:
    """Returns the ids that end an answer by the model's generation config or by its tokenizer."""
    configured = model.model.generation_config.eos_token_id  # an id, a list of ids, or None
    listed = configured if isinstance(configured, list) else [configured]
    valid = [token for token in listed if type(token) is int and token >= 0]
    return sorted({*valid, *find_stop_token_ids(model.tokenizer)})


def _make_generate_options(model: InferenceModel, sampling: AnswerOptions) -> dict[str, Any]:
    """Makes the arguments of `generate` for one answer by `sampling`."""
    end_ids = find_end_ids(model)
    pad_id = model.tokenizer.pad_token_id
    if pad_id is None:  # one answer has no padding: any id will do
        pad_id = end_ids[0] if end_ids else 0
    options: dict[str, Any] = {
        "num_return_sequences": 1,  # a streamer takes one answer
        "num_beams": 1,
        "return_dict_in_generate": False,
        "eos_token_id": end_ids or None,
        "pad_token_id": pad_id,
    }
    if sampling.temperature == 0:
        return options | {
            "do_sample": False,
            "temperature": None,
            "top_p": None,
            "top_k": None,
            "min_p": None,
        }
    all_settings = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    settings = {name: value for name, value in all_settings.items() if value is not None}
    if settings:
        options["do_sample"] = True
    return options | settings


class _PieceWriter(BaseStreamer):  # type: ignore[misc]  # transformers is untyped
    """A streamer of `generate` that writes the text as it grows, without special tokens.

    A character of several tokens is written once it is complete.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._write = write
        self._ids: list[int] | None = None  # None: the prompt, which comes first, is expected

    def put(self, value: Tensor) -> None:
        """Takes the prompt in the first call, then the next token ids, and writes their text."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        text = self._decode()
        is_complete = not text.endswith("\ufffd")  # how an incomplete character is decoded
        if text.startswith(self.text) and is_complete:
            self._write_rest(text)

    def end(self) -> None:
        """Writes what is left, even an incomplete character."""
        text = self._decode()
        if text.startswith(self.text):
            self._write_rest(text)

    def _decode(self) -> str:
        """Decodes all ids of the answer so far."""
        return str(self._tokenizer.decode(self._ids or [], skip_special_tokens=True))

    def _write_rest(self, text: str) -> None:
        """Writes the part of `text` that has not been written."""
        if piece := text[len(self.text) :]:
            self.text = text
            self._write(piece)


@dataclass
class _StopWhen(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion of `generate`, which stops it once `event` is set."""

    event: Event

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Returns bool[rows]: whether the answer of each row stops."""
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device)


@contextmanager
def interruptible() -> Iterator[Event]:
    """Yields an event that the first Ctrl-C in the block sets.

    The second Ctrl-C raises `KeyboardInterrupt`. Only the main thread gets signals: in other
    threads the event is never set.
    """
    pressed = Event()
    if current_thread() is not main_thread():
        yield pressed
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    previous_handler = signal.signal(signal.SIGINT, stop)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous_handler)


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
            max_new_tokens: The number of tokens at which the answer is cut.
            temperature: 0 is greedy; None: the model's generation_config.json decides.
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
    """Answers `message` in a chat, and adds the message and the answer to the chat.

    Without a chat template, or if the model scores, nothing is added: each message is answered
    without the earlier ones.

    on_piece: Called with each piece of the text as it is made.
    """
    messages = [*chat.messages, message]
    answered = answer(chat.model, make_question(messages), sampling, on_piece)
    has_turns = chat.model.template is not None and not has_scores(chat.model.whole)
    if has_turns:
        chat.messages = [*messages, {"role": "assistant", "content": answered.text}]
    return answered


@dataclass(frozen=True, slots=True)
class Speaker:
    """A model in the terminal's conversation, or in the answers to prompts."""

    label: str  # printed above the answers if there are several models
    chat: Chat

    def ask(self, message: Message, sampling: AnswerOptions) -> None:
        """Prints the answer to a message as it is made, or the error on stderr."""
        try:
            finish_answer(take_turn(self.chat, message, sampling, write_piece), sampling)
        except UserError as error:
            print(error, file=sys.stderr)

    def start_over(self, system: str | None) -> None:
        """Empties the conversation but for a system message, if there is one."""
        self.chat.messages = system_message(system)


def converse(speakers: Sequence[Speaker], sampling: AnswerOptions, system: str | None) -> None:
    """Reads turns from the terminal and prints the answer of every speaker, until the user ends it.

    Args:
        speakers: The models.
        sampling: The options of sampling.
        system: The system message to start with; None: there is none.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` arrow keys and a history, if Python has it
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
    """Reads a turn that the user types, without spaces around it.

    Returns None after Ctrl-D, or after Ctrl-C twice in a row.
    """
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
    """Prints a piece of an answer at once, without a line break."""
    print(text, end="", flush=True)


def finish_answer(answered: Answer, sampling: AnswerOptions) -> None:
    """Ends the line of a printed answer, and notes below if it was stopped, cut or empty."""
    if not answered.text.endswith("\n"):
        print()
    if answered.is_interrupted:
        print_styled("[stopped]", "dim")
    elif answered.is_cut and answered.limit is not None:
        reason = f"the conversation has reached the {answered.limit:,} tokens that the model reads"
        print_styled(f"[cut after {answered.tokens:,} tokens: {reason}; /new starts over]", "dim")
    elif answered.is_cut:
        print_styled(f"[cut after {answered.tokens:,} tokens; --max-new-tokens allows more]", "dim")
    elif not answered.text.strip():
        print_styled("[an empty answer]", "dim")
