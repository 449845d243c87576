"""The chat templates that a recipe can name, as Jinja text; each is a file in templates/."""

from difflib import get_close_matches
from pathlib import Path

from finetune.errors import UserError

FOLDER = Path(__file__).parent / "templates"
# The text of a template is part of a checkpoint's fingerprints: a changed file is another template to a run that resumes.
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
ALIASES = {
    "qwen2.5": "qwen",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "deepseek": "deepseek-v3",
    "olmo": "olmo2",
    "glm-4": "glm4",
}  # fmt: skip
# For tokenizers without a template and without special tokens for turns; of those it uses only the EOS token.
PLAIN = TEMPLATES["plain"]


def read_template(name: str) -> str:
    """The Jinja text that `chat_template` means: one of `TEMPLATES` or `ALIASES`, a file, or the text itself.

    Raises `UserError` for a file that does not exist or cannot be read.
    """
    known = TEMPLATES | {alias: TEMPLATES[own] for alias, own in ALIASES.items()}
    if name in known:
        return known[name]
    if "{" in name:
        return name
    path = Path(name)
    if not path.is_file():
        close = get_close_matches(name.replace("_", "-"), known, n=1)
        hint = f"; did you mean {close[0]}?" if close else f", which are {', '.join(sorted(known))}"
        raise UserError(f"chat_template: {name}: not a file, not Jinja text, and not one of the named templates{hint}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template: {name}: cannot be read: {error}") from None
