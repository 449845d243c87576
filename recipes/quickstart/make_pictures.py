"""Makes what the quickstart for images trains on: pictures of a colored shape, a tokenizer, the
files of a processor.

The files are shipped; this script makes them again: python recipes/quickstart/make_pictures.py
[FOLDER]. It needs Pillow, whose version decides how PNG packs the pixels.
"""

import base64
import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path

from make import BEGIN, END, HELD_OUT, PAD, train_tokenizer
from PIL import Image

TRAINED = 4_000
PROMPTS = 1_000  # of the quickstart for rewards, on other backgrounds
SEED = 27
SIDE, PATCH = 28, 4  # pixels
IMAGE = "<|image|>"
QUESTIONS = ("What is this?", "What do you see?", "Name the picture.")
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 210, 40),
    "purple": (150, 60, 190),
    "orange": (245, 140, 30),
}
Color = tuple[int, int, int]
GRAYS: tuple[Color, ...] = tuple((gray, gray, gray) for gray in (0, 40, 90, 200, 255))
# pink, teal, navy, brown, pale green
COLORED: tuple[Color, ...] = (
    (250, 190, 200),
    (0, 120, 120),
    (30, 30, 90),
    (120, 70, 30),
    (190, 215, 140),
)

# Whether a point is in a shape that reaches from -1 to 1 in both directions; y points down.
SHAPES: Mapping[str, Callable[[float, float], bool]] = {
    "circle": lambda x, y: math.hypot(x, y) <= 1,
    "square": lambda x, y: max(abs(x), abs(y)) <= 0.9,
    "triangle": lambda x, y: abs(y) <= 1 and 2 * abs(x) <= y + 1,
    "cross": lambda x, y: min(abs(x), abs(y)) <= 1 / 3 and max(abs(x), abs(y)) <= 1,
    "ring": lambda x, y: 0.55 <= math.hypot(x, y) <= 1,
}
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set written -%}
        {%- if message['content'] is string %}{{ message['content'] }}{% else %}
            {%- for part in message['content'] %}
                {{- '<|image|>' if part['type'] == 'image' else part['text'] }}
            {%- endfor %}
        {%- endif %}
    {%- endset %}
    {{- '<|' + message['role'] + '|>' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ written + eos_token }}{% endgeneration %}
    {%- else %}
        {{- written + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def draw(
    shape: str, color: str, backgrounds: tuple[Color, ...], chance: random.Random
) -> Image.Image:
    """A shape of some size, somewhere on one of the backgrounds."""
    radius = chance.uniform(7, 11)
    left, top = chance.uniform(radius, SIDE - 1 - radius), chance.uniform(radius, SIDE - 1 - radius)
    background = chance.choice(backgrounds)
    picture = Image.new("P", (SIDE, SIDE))
    picture.putpalette((*background, *COLORS[color]))
    places = ((x, y) for y in range(SIDE) for x in range(SIDE))
    picture.putdata(
        [int(SHAPES[shape]((x - left) / radius, (y - top) / radius)) for x, y in places]
    )
    return picture


def make_row(backgrounds: tuple[Color, ...], chance: random.Random) -> dict[str, str]:
    """A question about a picture, and its answer."""
    color, shape = chance.choice(list(COLORS)), chance.choice(list(SHAPES))
    encoded = BytesIO()
    draw(shape, color, backgrounds, chance).save(encoded, "PNG", bits=1)
    url = "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()
    return {"image": url, "question": chance.choice(QUESTIONS), "answer": f"{color} {shape}"}


def make_rows(
    count: int, backgrounds: tuple[Color, ...], chance: random.Random
) -> list[dict[str, str]]:
    """Rows of which no two have the same picture."""
    rows = dict[str, dict[str, str]]()
    while len(rows) < count:
        row = make_row(backgrounds, chance)
        rows.setdefault(row["image"], row)
    return list(rows.values())


def make(folder: Path) -> None:
    """Writes train.jsonl, heldout.jsonl, those of colored backgrounds, and the files of the
    tokenizer and the processor into `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train: list[dict[str, str]] = []
    for kind, count, backgrounds in (("colored_", PROMPTS, COLORED), ("", TRAINED, GRAYS)):
        rows = make_rows(count + HELD_OUT, backgrounds, random.Random(SEED))
        train = rows[HELD_OUT:]
        for name, part in (("train", train), ("heldout", rows[:HELD_OUT])):
            text = "".join(json.dumps(row) + "\n" for row in part)
            (folder / f"{kind}{name}.jsonl").write_text(text)

    tokenizer = train_tokenizer(
        text for row in train for text in (row["question"], row["answer"], " " + row["answer"])
    )
    tokenizer.add_special_tokens([IMAGE])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    side = {"height": SIDE, "width": SIDE}
    files: dict[str, dict[str, object]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": PAD,
            "extra_special_tokens": {"image_token": IMAGE},
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": SIDE},
            "crop_size": side,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": PATCH,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "vision")
