"""Images in the rows: their bytes, what the model's own processor writes in their place, and their
pixels.
"""

import base64
import importlib
import importlib.util
import inspect
import json
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import xxhash

from finetune.config.pretrained import is_vision_language, load_config
from finetune.config.schema import DatasetSource, Model
from finetune.constants import PROCESSOR_FILES, Names
from finetune.data.messages import IMAGE, BadRow, describe_value
from finetune.data.readers import UNPACKED_TIMES, most_unpacked
from finetune.errors import UserError, install_command

MAX_PIXELS = 89_478_485  # of an image; Pillow warns beyond it
MAX_BYTES = 4 * MAX_PIXELS  # of its file
# of an image's sides: a processor that enlarges the shorter one enlarges the other as much
MAX_RATIO = 200
MAX_SCANS = 100  # of a progressive JPEG, which has ten or so; each goes over all pixels again
RGB_BYTES = 3  # of a pixel
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # none that starts another program
IN_FILE = b"f"  # how a stored image begins whose path follows
IN_STORE = b"b"  # how one begins whose bytes follow
TEXT_INPUTS = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "text_replacement_offsets",
    "cross_attention_mask",  # models/vision.py makes one of each document's tokens
}
LAYOUTS = {"rows", "cols", "num_soft_tokens_per_image"}  # of an image's parts, which no model reads


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image as its file has it."""

    content: bytes
    path: str | None = None  # of its file; None: it came with the row

    @property
    def hash(self) -> int:
        """xxh3 of the bytes."""
        return xxhash.xxh3_64_intdigest(self.content)

    def stored(self) -> bytes:
        """The image as a store keeps it: its place, or all of it."""
        if self.path is None:
            return IN_STORE + self.content
        return IN_FILE + self.path.encode()


def load_stored(stored: bytes) -> EncodedImage:
    """The image of which a store keeps `stored`. Raises `BadRow` where its file cannot be read."""
    if stored[:1] == IN_STORE:
        return EncodedImage(stored[1:])
    return _read_file(Path(stored[1:].decode()))


def find_image_folder(source: DatasetSource, file: str) -> Path:
    """Returns the folder where the relative paths of a row's images begin.

    Args:
        source: The entry of `datasets`; its `image_folder` comes first.
        file: The row's file, whose own folder is the default.
    """
    return Path(source.image_folder or Path(file).parent)


def read_image(value: Any, folder: Path) -> EncodedImage:
    """Reads the image that a row names by a path, by its bytes, or by a mapping with either.

    Args:
        value: The image as the row has it.
        folder: Where a relative path begins; see `find_image_folder`.

    Raises:
        BadRow: There is no such image, or it cannot be read.
    """
    while isinstance(value, Mapping):
        value = next(
            (value[key] for key in ("bytes", "path", "image", "url", "base64") if value.get(key)),
            None,
        )
    if isinstance(value, bytes | bytearray):
        return EncodedImage(bytes(value))
    if isinstance(value, str) and value.startswith("data:"):
        try:
            return EncodedImage(base64.b64decode(value.partition(",")[2], validate=True))
        except ValueError:
            raise BadRow(f"image: not base64: {describe_value(value)}") from None
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise BadRow(
            f"image: {value}: an address is not downloaded; save the image as a file and name its "
            "path"
        )
    if isinstance(value, str) and value:
        return _read_file(folder / value.removeprefix("file://"))
    if hasattr(value, "save"):  # a picture of Pillow, as `datasets` decodes one
        encoded = BytesIO()
        value.save(encoded, "PNG")
        return EncodedImage(encoded.getvalue())
    raise BadRow(f"image: a path or bytes are expected, found {describe_value(value)}")


IMAGE_COLUMN = re.compile(r"(.*_)?(images?|imgs?|pictures?|photos?|pixel_values)", re.IGNORECASE)


def holds_images(column: str, value: Any) -> bool:
    """Whether a column's value is an image or a list of them: by the column's name, or by what it
    holds.

    >>> (
    ...     holds_images("photo", "fox.png"),
    ...     holds_images("file", {"bytes": b"...", "path": None}),
    ...     holds_images("id", 7),
    ... )
    (True, True, False)
    """
    first = value[0] if isinstance(value, list) and value else value
    is_stored = isinstance(first, Mapping) and isinstance(first.get("bytes"), bytes)
    return (
        is_stored
        or hasattr(first, "save")
        or (bool(IMAGE_COLUMN.fullmatch(column)) and not isinstance(first, int))
    )


def _read_file(path: Path) -> EncodedImage:
    try:
        if not path.is_file():
            raise BadRow(f"image: {path}: no such file")
        if path.stat().st_size > MAX_BYTES:
            raise BadRow(
                f"image: {path}: {path.stat().st_size:,} bytes, more than the {MAX_BYTES:,} that "
                "are read"
            )
        return EncodedImage(path.read_bytes(), str(path.absolute()))
    except (OSError, ValueError) as error:
        raise BadRow(f"image: {path}: cannot be read: {error}") from None


def _import_pillow() -> None:
    """Raises `UserError` where it is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise UserError(f"images need Pillow; {install_command('images')}") from None


def open_image(image: EncodedImage) -> Any:
    """The picture, upright and in RGB, as transformers' `load_image` gives it. Raises `BadRow`."""
    _import_pillow()
    from PIL import Image, ImageOps, UnidentifiedImageError

    name = f"image: {image.path or f'of {len(image.content):,} bytes'}"
    try:
        # our own bounds are below it
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
        picture: Any = Image.open(BytesIO(image.content), formats=FORMATS)
        # known from its header, before it is decoded
        if problem := _find_excess(picture, image.content):
            raise BadRow(f"{name}: {problem}")
        if getattr(picture, "is_animated", False) and picture.format != "MPO":
            raise BadRow(f"{name}: animated; save one of its {picture.n_frames} frames as an image")
        picture.load()
        ImageOps.exif_transpose(picture, in_place=True)
        # to the same mode it would be a copy
        if picture.mode == "RGB":
            return picture
        return picture.convert("RGB")
    except BadRow:
        raise
    except Image.DecompressionBombError:
        raise BadRow(f"{name}: more than {2 * MAX_PIXELS:,} pixels; shrink it") from None
    except UnidentifiedImageError:  # its text names a Python object
        raise BadRow(
            f"{name}: cannot be read as an image: not one of {', '.join(FORMATS)}"
        ) from None
    except Exception as error:  # each format has its own
        raise BadRow(
            f"{name}: cannot be read as an image: {' '.join(str(error).split()[:20])}"
        ) from None


def _find_excess(picture: Any, content: bytes) -> str | None:
    """Says which of a picture's sizes is out of bounds; None where it may be opened.

    Such a picture would take far more memory or time than the size of its file lets expect.
    """
    width, height = picture.size
    most = most_unpacked(len(content))
    scans = 1
    if picture.format in ("JPEG", "MPO"):
        scans = _count_scans(content)
    if width * height > MAX_PIXELS:
        return f"{width:,} x {height:,} pixels, more than {MAX_PIXELS:,}; shrink it"
    if RGB_BYTES * width * height > most:
        times = f"more than {most // 2**20:,} MiB, {UNPACKED_TIMES} times its size"
        return f"{width:,} x {height:,} pixels unpack to {times}; shrink it"
    if max(width, height) > MAX_RATIO * min(width, height):
        return (
            f"{width:,} x {height:,} pixels: one side is more than {MAX_RATIO} times the other; "
            "cut it"
        )
    if scans > MAX_SCANS:
        return f"a JPEG of more than {MAX_SCANS} scans; save it again"
    return None


def _count_scans(content: bytes) -> int:
    """Counts the scans of a JPEG, up to one more than MAX_SCANS.

    What follows its end, as a film does in some files, is not read.
    """
    scans = 0
    at = 2
    while scans <= MAX_SCANS and (at := content.find(b"\xff", at)) >= 0:
        marker = content[at + 1 : at + 2]
        if marker in (b"", b"\xd9"):  # the end
            break
        if marker == b"\xff":  # filling
            at += 1
        elif (
            marker in (b"\x00", b"\x01") or b"\xd0" <= marker <= b"\xd8"
        ):  # a byte of a scan, or a mark alone
            at += 2
        else:
            scans += marker == b"\xda"
            at += 2 + max(2, int.from_bytes(content[at + 2 : at + 4]))
    return scans


class ImageProcessor:
    """A model's own processor, for images alone. It is loaded when the first image is met."""

    def __init__(self, model: Model, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.expand = lru_cache(maxsize=4096)(self._expand)

    @cached_property
    def _own(self) -> Any:
        """Transformers' processor of the family, without its part for videos.

        That part needs torchvision. Pillow resizes the images, whatever else is installed, so that
        they are the same everywhere.
        """
        from transformers import AutoImageProcessor
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        name = self._name
        family = str(load_config(self._model).model_type)
        if name is None or family not in PROCESSOR_MAPPING_NAMES:
            raise UserError(
                f"{name or family}: a row holds an image, and this model takes none; name another "
                "model"
            )
        _import_pillow()  # transformers' processor would ask to restart a notebook
        options = {}
        if name == self._model.model_name_or_path:
            options = {"revision": self._model.model_revision}
        try:
            read = [json.loads(text) for text in self.describe().values()]
            named = next(
                (each["processor_class"] for each in read[::-1] if each.get("processor_class")),
                None,
            )
            known = _find_processor_class(named or PROCESSOR_MAPPING_NAMES[family])
            parts = dict.fromkeys(known.get_attributes())  # in their order; None for videos
            parts["image_processor"] = AutoImageProcessor.from_pretrained(
                name, backend="pil", **options
            )
            # a copy, in which a processor may leave its own padding
            parts["tokenizer"] = deepcopy(self._tokenizer)
            values = known.get_processor_dict(name, **options)[0]
            # the check would refuse None in the place of the part for videos
            checks = {"check_argument_for_proper_class": lambda *_: None}
            unchecked: Any = type(known.__name__, (known,), checks)
            own = unchecked.from_args_and_dict(list(parts.values()), values)
        except Exception as error:  # a file is missing or damaged, or a package
            raise UserError(
                f"{name}: its image processor cannot be loaded: {' '.join(str(error).split())}"
            ) from None
        expected = load_config(self._model).image_token_id
        image_ids = _find_image_ids(own)
        if expected not in image_ids:
            raise UserError(
                f"{name}: image_token_id is {expected} in the model's config, and an image's "
                f"tokens have the ids {image_ids} in the tokenizer; make them equal"
            )
        return own

    @property
    def _name(self) -> str | None:
        return self._model.model_name_or_path or self._model.tokenizer_name_or_path

    def describe(self) -> dict[str, str]:
        """Reads the processor's files, which decide about tokens and pixels: name -> content.

        Files that the model does not have are left out.
        """
        if self._name is None:
            return {}
        from transformers.utils import cached_file

        is_of_model = self._name == self._model.model_name_or_path
        files: dict[str, str] = {}
        for file in PROCESSOR_FILES[:2]:
            path = cached_file(
                self._name,
                file,
                revision=self._model.model_revision if is_of_model else None,
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            if path:
                files[file] = Path(path).read_text(encoding="utf-8", errors="replace")
        return files

    @cached_property
    def is_expected(self) -> bool:
        """Whether the model is a vision-language one."""
        if self._model.model_config is None and self._model.model_name_or_path is None:
            return False
        try:
            return is_vision_language(load_config(self._model))
        except UserError:  # its config cannot be read, which is reported where the model is
            return False

    @property
    def family(self) -> str:
        """The name by which rules know the model: the model_type of its config."""
        return str(load_config(self._model).model_type)

    @property
    def token(self) -> str:
        """The text that a chat template writes for an image."""
        return str(self._own.image_token)

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """The ids that only an image has."""
        return tuple(_find_image_ids(self._own))

    @cached_property
    def reserved(self) -> Names:
        """The texts of an image's tokens, which no row may hold."""
        return tuple({self.token, *self._tokenizer.convert_ids_to_tokens(list(self.token_ids))})

    def _expand(self, size: tuple[int, int]) -> str:
        """Returns the text that the processor writes for an image of `size` (width and height).
        Raises `BadRow`.
        """
        from PIL import Image

        blank = Image.new("RGB", size)
        own = self._own
        try:
            processed = own(
                text=[self.token], images=[[blank]], return_text_replacement_offsets=True
            )
        except ValueError as error:  # a processor's own limits, such as a ratio of the sides
            raise BadRow(
                f"image: {size[0]} x {size[1]} pixels: {type(own).__name__} rejects it: {error}"
            ) from None
        if "text_replacement_offsets" not in processed:  # Llama 3.2's writes nothing
            return self.token
        return str(processed["text_replacement_offsets"][0][0]["replacement"])

    def make_inputs(self, images: Sequence[EncodedImage]) -> dict[str, Any]:
        """The model's arguments for `images`, such as `pixel_values`, by name. Raises `BadRow`."""
        processed = self._process(images)
        # in fp32, to which Llama 4's processor would not round: a tower has the dtype of the files
        return {
            name: value.float() if value.is_floating_point() else value
            for name, value in processed.items()
            if name not in TEXT_INPUTS | LAYOUTS
        }

    def _process(self, images: Sequence[EncodedImage]) -> Mapping[str, Any]:
        """Returns all that the processor makes of a text that holds nothing but `images`."""
        pictures = [open_image(image) for image in images]
        text = [self.token * len(pictures)]
        made: Mapping[str, Any] = self._own(
            text=text, images=[pictures], return_tensors="pt", verbose=False
        )
        return made

    def make_generation_inputs(
        self, model: Any, input_ids: Any, images: Sequence[EncodedImage]
    ) -> dict[str, Any]:
        """The arguments of `model.generate` for the `images` whose tokens are in `input_ids`, on
        the model's device.
        """
        import torch

        is_image = torch.isin(input_ids, torch.tensor(self.token_ids, device=input_ids.device))
        names = inspect.signature(model.forward).parameters
        if "token_type_ids" in names:
            types = "token_type_ids"
        else:
            types = "mm_token_type_ids"
        inputs = {types: is_image.long()} if types in names else {}
        return {
            name: value.to(model.device)
            for name, value in (inputs | self.make_inputs(images)).items()
        }

    @cached_property
    def blank_inputs(self) -> dict[str, Any]:
        """Returns the inputs of one small image, for a micro-batch without any: the tower takes
        part in every rank's collectives.
        """
        return self.make_inputs([_make_blank()])

    def make_blank_document(self) -> tuple[Any, dict[str, Any]]:
        """Returns (the tokens of a document that holds a small image alone, int64[1, tokens]; the
        model's arguments for it).
        """
        ids = self._process([_make_blank()])["input_ids"]
        return ids, self.blank_inputs


def _find_image_ids(processor: Any) -> list[int]:
    """Lists the ids that a processor writes for images and nothing else.

    Llama 4's processor has that of a part of an image in a place of its own.
    """
    ids = list(processor.image_token_ids)
    patch = getattr(processor, "img_patch_token", None)
    if patch is not None:
        ids.append(processor.tokenizer.convert_tokens_to_ids(patch))
    return ids


def _make_blank() -> EncodedImage:
    from PIL import Image

    encoded = BytesIO()
    Image.new("RGB", (64, 64), "gray").save(encoded, "PNG")
    return EncodedImage(encoded.getvalue())


def _find_processor_class(name: str) -> Any:
    """Transformers' class of this name."""
    from transformers.models.auto.processing_auto import processor_class_from_name

    if name == "PixtralProcessor" and importlib.util.find_spec("torchvision") is None:
        # It imports one function of the module that needs torchvision; the module for Pillow has
        # the same function.
        folder = "transformers.models.pixtral"
        for_pillow = importlib.import_module(f"{folder}.image_processing_pil_pixtral")
        with patch.dict(sys.modules, {f"{folder}.image_processing_pixtral": for_pillow}):
            return importlib.import_module(f"{folder}.processing_pixtral").PixtralProcessor
    return processor_class_from_name(name)


def place_images(
    text: str, spans: Sequence[tuple[int, int]], written: Sequence[str], token: str
) -> Any:
    """Replaces each image token of a text by what the processor has written for its image.

    Args:
        text: With a `token` for each image.
        spans: What is trained on of it.
        written: The text of each image.
        token: What stands for an image.

    Returns:
        The text with the images, and its trained spans without them.

    >>> place_images("<a><i> b", [(0, 8)], ["<i><i>"], "<i>")
    ('<a><i><i> b', ((0, 3), (9, 11)))
    """
    parts = []
    holes = []
    shifts = []
    position = 0
    length = 0
    for replacement in written:
        at = text.index(token, position)
        length += at - position
        parts += [text[position:at], replacement]
        holes.append((length, length + len(replacement)))
        shifts.append((at + len(token), len(replacement) - len(token)))
        length += len(replacement)
        position = at + len(token)

    def move(place: int) -> int:
        return place + sum(shift for after, shift in shifts if place >= after)

    kept = [(move(start), move(end)) for start, end in spans]
    for first, last in holes:
        kept = [
            piece
            for a, b in kept
            for piece in ((a, min(b, first)), (max(a, last), b))
            if piece[0] < piece[1]
        ]
    return "".join([*parts, text[position:]]), tuple(kept)


def hash_images(images: Sequence[EncodedImage]) -> str:
    """Names `images` in their order, by what they hold."""
    return json.dumps([image.hash for image in images])


def split_parts(content: str) -> list[dict[str, str]]:
    """A message's content as the parts that a chat template of a vision-language model reads.

    >>> split_parts(f"{IMAGE}What is this?")
    [{'type': 'image'}, {'type': 'text', 'text': 'What is this?'}]
    """
    first, *others = content.split(IMAGE)
    parts = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text", "image")] or parts
