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
BACKGROUNDS = (0, 40, 90, 200, 255)  # grays

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


def draw(shape: str, color: str, chance: random.Random) -> Image.Image:
    """A shape of some size, somewhere on a gray background."""
    radius = chance.uniform(7, 11)
    left, top = chance.uniform(radius, SIDE - 1 - radius), chance.uniform(radius, SIDE - 1 - radius)
    gray = chance.choice(BACKGROUNDS)
    picture = Image.new("P", (SIDE, SIDE))
    picture.putpalette((gray, gray, gray, *COLORS[color]))
    places = ((x, y) for y in range(SIDE) for x in range(SIDE))
    picture.putdata(
        [int(SHAPES[shape]((x - left) / radius, (y - top) / radius)) for x, y in places]
    )
    return picture


def make_row(chance: random.Random) -> dict[str, str]:
    """A question about a picture, and its answer."""
    color, shape = chance.choice(list(COLORS)), chance.choice(list(SHAPES))
    encoded = BytesIO()
    draw(shape, color, chance).save(encoded, "PNG", bits=1)
    url = "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()
    return {"image": url, "question": chance.choice(QUESTIONS), "answer": f"{color} {shape}"}


def make(folder: Path) -> None:
    """Writes train.jsonl, heldout.jsonl, and the files of the tokenizer and the processor into
    `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chance, rows = random.Random(SEED), dict[str, dict[str, str]]()
    while len(rows) < TRAINED + HELD_OUT:  # no picture twice
        row = make_row(chance)
        rows.setdefault(row["image"], row)
    held_out, train = list(rows.values())[:HELD_OUT], list(rows.values())[HELD_OUT:]
    for name, part in (("train", train), ("heldout", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

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
