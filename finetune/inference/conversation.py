"""A conversation in the terminal: lines typed by a person, answers as they are made, of one model or of two."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.data.messages import Message
from finetune.errors import UserError
from finetune.inference.answers import Answer, AnswerOptions, answer
from finetune.inference.inference_model import InferenceModel
from finetune.inference.prompts import ask, check_utf8, system_message, user_message
from finetune.terminal import print_styled

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
            UserError: Where the conversation is longer than the model reads, or an image cannot be read.
        """
        sampling = AnswerOptions(max_new_tokens=max_new_tokens, temperature=temperature)
        return take_turn(self, user_message(prompt, images), sampling).text


def take_turn(
    chat: Chat, message: Message, sampling: AnswerOptions, on_piece: Callable[[str], None] = lambda piece: None
) -> Answer:
    """The answer to `message`, which is remembered with it. `on_piece` gets its text as it is made."""
    asked = [*chat.messages, message]
    answered = answer(chat.model, ask(asked), sampling, on_piece)
    if chat.model.template is not None:  # without turns, every prompt stands alone
        chat.messages = [*asked, {"role": "assistant", "content": answered.text}]
    return answered


@dataclass(frozen=True, slots=True)
class Speaker:
    """A model in the terminal's conversation."""

    label: str
    chat: Chat

    def ask(self, message: Message, sampling: AnswerOptions) -> None:
        """Prints the answer as it is made. A message that cannot be answered is reported, and forgotten."""
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
    """What the user types, without spaces around it; None at its end (Ctrl-D, or Ctrl-C twice)."""
    lines: list[str] = []
    interrupted = False
    while True:
        try:
            line = check_utf8(input(PROMPT if not lines else "  "), "this line")
        except (UserError, UnicodeDecodeError) as error:  # a terminal in another encoding
            print(error if isinstance(error, UserError) else f"this line: not UTF-8: {error.reason}", file=sys.stderr)
            lines = []
            continue
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            if interrupted:
                return None
            interrupted, lines = True, []
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
