"""Reads the images of rows, and asks the model's own processor for the text that it writes in the
place of an image, and for the pixels.
"""

import base64
import importlib
import importlib.util
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import xxhash

from finetune.config.pretrained import find_file, is_vision_language, load_config
from finetune.config.schema import DatasetSource, Model
from finetune.constants import Names
from finetune.data.messages import IMAGE, BadRow, describe_value
from finetune.data.readers import most_unpacked
from finetune.errors import UserError, install_command

MAX_PIXELS = 89_478_485  # of an image; Pillow warns beyond it
MAX_BYTES = 4 * MAX_PIXELS  # of an image file
# The longer side of an image by the shorter. A processor that enlarges the shorter side enlarges
# the longer one as much.
MAX_RATIO = 200
# A progressive JPEG has ten scans or so. Decoding goes over all pixels for each.
MAX_SCANS = 100
RGB_BYTES = 3  # of a decoded pixel
# formats that Pillow decodes by itself, without starting another program
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
IN_FILE = b"f"  # the first byte of a stored image; the path of its file follows
IN_STORE = b"b"  # the first byte of a stored image; its own bytes follow
# the processor's files that decide about the tokens and pixels of images
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
# what a processor returns about the text, which is no argument for the images
TEXT_INPUTS = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "text_replacement_offsets",
    "cross_attention_mask",  # models/vision.py makes one of each document's tokens
}
# what a processor returns about the parts that it cut an image into, and no model reads
LAYOUTS = {"rows", "cols", "num_soft_tokens_per_image"}


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image as its file has it, before it is decoded."""

    content: bytes
    path: str | None = None  # the image's file; None: the row holds the bytes

    @property
    def hash(self) -> int:
        """The xxh3 hash of the bytes."""
        return xxhash.xxh3_64_intdigest(self.content)

    def stored(self) -> bytes:
        """The image as a token store keeps it: the path of its file; without a file, its bytes."""
        if self.path is None:
            return IN_STORE + self.content
        return IN_FILE + self.path.encode()


def load_stored(stored: bytes) -> EncodedImage:
    """Loads an image from the bytes of `EncodedImage.stored`.

    Raises `BadRow` if its file cannot be read.
    """
    kind = stored[:1]
    value = stored[1:]
    if kind == IN_STORE:
        return EncodedImage(value)
    return _read_file(Path(value.decode()))


def find_image_folder(source: DatasetSource, file: str) -> Path:
    """Returns the folder to which the paths of a row's images are relative.

    Args:
        source: The entry of `datasets`, which may name it as `image_folder`.
        file: The row's file; its folder is the default.
    """
    return Path(source.image_folder or Path(file).parent)


def read_image(value: Any, folder: Path) -> EncodedImage:
    """Reads the image that a row names by a path, by its bytes, or by a mapping with either.

    Args:
        value: The image as the row has it.
        folder: The folder to which paths are relative; see `find_image_folder`.

    Raises:
        BadRow: There is no such image, or it cannot be read.
    """
    while isinstance(value, Mapping):
        keys = ("bytes", "path", "image", "url", "base64")
        key = next((key for key in keys if value.get(key)), None)
        if key == "base64":
            return _decode(value[key])
        value = None if key is None else value[key]
    if isinstance(value, bytes | bytearray):
        return EncodedImage(bytes(value))
    if isinstance(value, str) and value.startswith("data:"):
        return _decode(value)
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise BadRow(
            f"image: {value}: an address is not downloaded; save the image as a file and name its "
            "path"
        )
    if isinstance(value, str) and value:
        return _read_file(folder / value.removeprefix("file://"))
    if hasattr(value, "save"):  # a Pillow image, to which `datasets` decodes an image
        encoded = BytesIO()
        value.save(encoded, "PNG")
        return EncodedImage(encoded.getvalue())
    raise BadRow(f"image: a path or bytes are expected, found {describe_value(value)}")


def _decode(text: Any) -> EncodedImage:
    """Decodes an image in base64, or in a data URL with base64. Raises `BadRow` for other text."""
    try:
        encoded = text.partition(",")[2] if text.startswith("data:") else text
        return EncodedImage(base64.b64decode(encoded, validate=True))
    except (AttributeError, ValueError):
        raise BadRow(f"image: not base64: {describe_value(text)}") from None


IMAGE_COLUMN = re.compile(r"(.*_)?(images?|imgs?|pictures?|photos?|pixel_values)", re.IGNORECASE)


def holds_images(column: str, value: Any) -> bool:
    """Whether a column's value is an image or a list of images.

    It is by what it holds (a Pillow image, or a mapping with bytes), or by the column's name.

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
    """Reads an image file. Raises `BadRow` if it is missing, too large or cannot be read."""
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
    """Raises `UserError` if Pillow is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise UserError(f"images need Pillow; {install_command('images')}") from None


def open_image(image: EncodedImage) -> Any:
    """Decodes an image to a Pillow image, upright and in RGB, as transformers' `load_image` does.

    Raises `BadRow` for an image that cannot be decoded, is animated, or out of the bounds above.
    """
    _import_pillow()
    from PIL import Image, ImageOps, UnidentifiedImageError

    name = f"image: {image.path or f'of {len(image.content):,} bytes'}"
    try:
        # Pillow warns beyond MAX_PIXELS, where `_find_excess` rejects the image
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
        picture: Any = Image.open(BytesIO(image.content), formats=FORMATS)
        # the sizes are in the header: nothing is decoded yet
        if problem := _find_excess(picture, image.content):
            raise BadRow(f"{name}: {problem}")
        # MPO: a JPEG with further pictures, such as a phone's map of depth; only the first is read
        if getattr(picture, "is_animated", False) and picture.format != "MPO":
            raise BadRow(f"{name}: animated; save one of its {picture.n_frames} frames as an image")
        picture.load()
        ImageOps.exif_transpose(picture, in_place=True)
        if picture.mode == "RGB":
            return picture  # `convert` would copy it
        return picture.convert("RGB")
    except BadRow:
        raise
    except Image.DecompressionBombError:
        raise BadRow(f"{name}: more than {2 * MAX_PIXELS:,} pixels; shrink it") from None
    except UnidentifiedImageError:  # the error's text names a Python object
        raise BadRow(
            f"{name}: cannot be read as an image: not one of {', '.join(FORMATS)}"
        ) from None
    except Exception as error:  # the decoders of the formats raise errors of many kinds
        raise BadRow(
            f"{name}: cannot be read as an image: {' '.join(str(error).split()[:20])}"
        ) from None


def _find_excess(picture: Any, content: bytes) -> str | None:
    """Says in what way a picture is too large to decode; None if it is not.

    Such a picture would take far more memory or time than the size of its file suggests.

    Args:
        picture: A Pillow image that is not decoded yet.
        content: The bytes of its file.
    """
    width, height = picture.size
    max_bytes = most_unpacked(len(content))
    scans = 1
    if picture.format in ("JPEG", "MPO"):
        scans = _count_scans(content)
    if width * height > MAX_PIXELS:
        return f"{width:,} x {height:,} pixels, more than {MAX_PIXELS:,}; shrink it"
    if RGB_BYTES * width * height > max_bytes:
        most = f"more than {max_bytes // 2**20:,} MiB, the most for a file of its size"
        return f"{width:,} x {height:,} pixels unpack to {most}; shrink it"
    if max(width, height) > MAX_RATIO * min(width, height):
        return (
            f"{width:,} x {height:,} pixels: one side is more than {MAX_RATIO} times the other; "
            "cut it"
        )
    if scans > MAX_SCANS:
        return f"a JPEG of more than {MAX_SCANS} scans; save it again"
    return None


def _count_scans(content: bytes) -> int:
    """Counts the scans of a JPEG, up to MAX_SCANS + 1.

    It walks over the file's segments: each begins with 0xff and a marker, and most then give their
    length. What follows the end of the image, as a film does in some files, is not read.
    """
    scans = 0
    position = 2  # behind the marker with which the file begins
    while scans <= MAX_SCANS and (position := content.find(b"\xff", position)) >= 0:
        marker = content[position + 1 : position + 2]
        if marker in (b"", b"\xd9"):  # end of the file or of the image
            break
        if marker == b"\xff":  # a fill byte before a marker
            position += 1
        elif marker in (b"\x00", b"\x01") or b"\xd0" <= marker <= b"\xd8":
            position += 2  # a byte 0xff of the scan's data, or a marker without a length
        else:
            is_scan = marker == b"\xda"
            scans += is_scan
            length = int.from_bytes(content[position + 2 : position + 4])  # includes these 2 bytes
            position += 2 + max(2, length)
    return scans


class ImageProcessor:
    """A model's own processor, used for images only. It is loaded when the first image is met."""

    def __init__(self, model: Model, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        # images of one size have the same text
        self.expand = lru_cache(maxsize=4096)(self._expand)

    @cached_property
    def _processor(self) -> Any:
        """Transformers' processor of the family, without its part for videos.

        That part needs torchvision. Pillow resizes the images, whatever else is installed, so that
        they are the same everywhere.

        Raises `UserError` if the model takes no images, or if the processor cannot be loaded or
        does not agree with the model's config.
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
        # If Pillow is missing, transformers' message would ask to restart a notebook.
        _import_pillow()
        options = {"revision": self._revision}
        try:
            # the last file that names a class decides
            configs = [json.loads(text) for text in self.describe().values()]
            class_names = (config.get("processor_class") for config in reversed(configs))
            class_name = next(filter(None, class_names), PROCESSOR_MAPPING_NAMES[family])
            processor_class = _find_processor_class(class_name)
            # in the order of the constructor's arguments; None for the part for videos
            parts = dict.fromkeys(processor_class.get_attributes())
            parts["image_processor"] = AutoImageProcessor.from_pretrained(
                name, backend="pil", **options
            )
            # a copy, because a processor may change the tokenizer's padding
            parts["tokenizer"] = deepcopy(self._tokenizer)
            settings, _ = processor_class.get_processor_dict(name, **options)
            # transformers' check would refuse None in the place of the part for videos
            without_check = {"check_argument_for_proper_class": lambda *_: None}
            unchecked_class: Any = type(processor_class.__name__, (processor_class,), without_check)
            processor = unchecked_class.from_args_and_dict(list(parts.values()), settings)
        except Exception as error:  # a file is missing or damaged, or a package
            raise UserError(
                f"{name}: its image processor cannot be loaded: {' '.join(str(error).split())}"
            ) from None
        expected_id = load_config(self._model).image_token_id
        image_ids = _find_image_ids(processor)
        if expected_id not in image_ids:
            raise UserError(
                f"{name}: image_token_id is {expected_id} in the model's config, and an image's "
                f"tokens have the ids {image_ids} in the tokenizer; make them equal"
            )
        return processor

    @property
    def _name(self) -> str | None:
        """The model's name or path; of a model from random weights, the tokenizer's."""
        return self._model.model_name_or_path or self._model.tokenizer_name_or_path

    @property
    def _revision(self) -> str | None:
        """The model's revision; None for a name that is the tokenizer's."""
        is_of_model = self._name == self._model.model_name_or_path
        return self._model.model_revision if is_of_model else None

    def describe(self) -> dict[str, str]:
        """Reads IMAGE_FILES: name -> content. Files that the model does not have are left out."""
        if self._name is None:
            return {}
        files: dict[str, str] = {}
        for file in IMAGE_FILES:
            path = find_file(self._name, file, self._revision)
            if path is not None:
                files[file] = path.read_text(encoding="utf-8", errors="replace")
        return files

    @cached_property
    def model_takes_images(self) -> bool:
        """Whether the model is a vision-language one; False if its config cannot be read."""
        if self._model.model_config is None and self._model.model_name_or_path is None:
            return False
        try:
            return is_vision_language(load_config(self._model))
        except UserError:  # loading the model reports it
            return False

    @property
    def family(self) -> str:
        """The name by which rules know the model: the model_type of its config."""
        return str(load_config(self._model).model_type)

    @property
    def token(self) -> str:
        """The text that a chat template writes for an image."""
        return str(self._processor.image_token)

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids that stand for parts of an image and for nothing else."""
        return tuple(_find_image_ids(self._processor))

    @cached_property
    def reserved(self) -> Names:
        """The texts of the tokens that stand for an image; a row may not hold them as words."""
        return tuple({self.token, *self._tokenizer.convert_ids_to_tokens(list(self.token_ids))})

    def _expand(self, size: tuple[int, int]) -> str:
        """Returns the text that the processor writes in the place of an image.

        The text depends on the size (width, height) alone. Raises `BadRow` for a size that the
        processor rejects.
        """
        from PIL import Image

        width, height = size
        blank = Image.new("RGB", size)
        processor = self._processor
        try:
            processed = processor(
                text=[self.token], images=[[blank]], return_text_replacement_offsets=True
            )
        except ValueError as error:  # a processor's own limits, such as a ratio of the sides
            raise BadRow(
                f"image: {width} x {height} pixels: {type(processor).__name__} rejects it: {error}"
            ) from None
        if "text_replacement_offsets" not in processed:  # Llama 3.2's processor replaces nothing
            return self.token
        replacements = processed["text_replacement_offsets"][0]  # of the only text
        return str(replacements[0]["replacement"])  # of its only image

    def make_inputs(self, images: Sequence[EncodedImage]) -> dict[str, Any]:
        """Makes the model's arguments for `images`, such as `pixel_values`; name -> tensor.

        Floating-point tensors are fp32. Raises `BadRow` for an image that cannot be decoded.
        """
        processed = self._run_processor(images)
        # Llama 4's processor rounds to bf16, but the vision tower has the dtype of the files.
        return {
            name: value.float() if value.is_floating_point() else value
            for name, value in processed.items()
            if name not in TEXT_INPUTS | LAYOUTS
        }

    def _run_processor(self, images: Sequence[EncodedImage]) -> Mapping[str, Any]:
        """Returns everything that the processor makes of a text that consists of `images`."""
        pictures = [open_image(image) for image in images]
        text = [self.token * len(pictures)]
        processed: Mapping[str, Any] = self._processor(
            text=text, images=[pictures], return_tensors="pt", verbose=False
        )
        return processed

    def make_generation_inputs(
        self, model: Any, input_ids: Any, images: Sequence[EncodedImage]
    ) -> dict[str, Any]:
        """Makes the arguments of `model.generate` for images, on the model's device.

        Args:
            model: The model; if its forward has an argument for token types, they are made too.
            input_ids: int64[rows, tokens]: the prompts, with the tokens of the images.
            images: The images of the prompts, in the order of their tokens.
        """
        import torch

        is_image = torch.isin(input_ids, torch.tensor(self.token_ids, device=input_ids.device))
        arguments = inspect.signature(model.forward).parameters
        if "token_type_ids" in arguments:
            types_name = "token_type_ids"
        else:
            types_name = "mm_token_type_ids"
        inputs = {types_name: is_image.long()} if types_name in arguments else {}
        return {
            name: value.to(model.device)
            for name, value in (inputs | self.make_inputs(images)).items()
        }

    @cached_property
    def blank_inputs(self) -> dict[str, Any]:
        """The model's arguments for one blank image, for a micro-batch without images.

        With it the vision tower runs on every rank, and all ranks meet in its collectives.
        """
        return self.make_inputs([_make_blank()])

    def make_blank_document(self) -> tuple[Any, dict[str, Any]]:
        """Makes a document that consists of one blank image.

        Returns:
            int64[1, tokens]: its token ids.
            The model's arguments for the image.
        """
        ids = self._run_processor([_make_blank()])["input_ids"]
        return ids, self.blank_inputs


def _find_image_ids(processor: Any) -> list[int]:
    """Lists the token ids that a processor writes for images and for nothing else.

    Llama 4's processor keeps one of them, that of a patch, in an attribute of its own.
    """
    ids = list(processor.image_token_ids)
    patch_token = getattr(processor, "img_patch_token", None)
    if patch_token is not None:
        ids.append(processor.tokenizer.convert_tokens_to_ids(patch_token))
    return ids


def _make_blank() -> EncodedImage:
    """Makes a gray image of 64 x 64 pixels."""
    from PIL import Image

    encoded = BytesIO()
    Image.new("RGB", (64, 64), "gray").save(encoded, "PNG")
    return EncodedImage(encoded.getvalue())


def _find_processor_class(name: str) -> Any:
    """Returns transformers' processor class of this name."""
    from transformers.models.auto.processing_auto import processor_class_from_name

    if name == "PixtralProcessor" and importlib.util.find_spec("torchvision") is None:
        # The class imports one function of a module that needs torchvision. The module for Pillow
        # has the same function, and takes the other's place during the import.
        folder = "transformers.models.pixtral"
        pillow_module = importlib.import_module(f"{folder}.image_processing_pil_pixtral")
        with patch.dict(sys.modules, {f"{folder}.image_processing_pixtral": pillow_module}):
            return importlib.import_module(f"{folder}.processing_pixtral").PixtralProcessor
    return processor_class_from_name(name)


def place_images(
    text: str, spans: Sequence[tuple[int, int]], replacements: Sequence[str], token: str
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Replaces each image token of a text by the text that the processor writes for its image.

    Args:
        text: The text, with a `token` for each image.
        spans: (start, end) of each part of the text that is trained on.
        replacements: The text for each image.
        token: The text that a chat template writes for an image.

    Returns:
        The new text, and the spans in it, out of which the images are cut.

    >>> place_images("<a><i> b", [(0, 8)], ["<i><i>"], "<i>")
    ('<a><i><i> b', ((0, 3), (9, 11)))
    """
    pieces = []
    image_spans = []  # in the new text
    shifts = []  # (end of an image token in the old text, how many characters longer its image is)
    position = 0  # in the old text
    new_length = 0
    for replacement in replacements:
        token_start = text.index(token, position)
        token_end = token_start + len(token)
        pieces += [text[position:token_start], replacement]
        new_length += token_start - position
        image_spans.append((new_length, new_length + len(replacement)))
        new_length += len(replacement)
        shifts.append((token_end, len(replacement) - len(token)))
        position = token_end

    def move(old_position: int) -> int:
        """The position in the new text."""
        return old_position + sum(shift for end, shift in shifts if old_position >= end)

    new_spans = tuple((move(start), move(end)) for start, end in spans)
    for image_span in image_spans:
        new_spans = cut_out(new_spans, image_span)
    return "".join([*pieces, text[position:]]), new_spans


def cut_out(
    spans: Iterable[tuple[int, int]], removed: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Takes the characters of the span `removed` out of spans (start, end).

    >>> cut_out([(0, 8)], (3, 5))
    ((0, 3), (5, 8))
    """
    removed_start, removed_end = removed
    left: list[tuple[int, int]] = []
    for start, end in spans:
        left += [(start, min(end, removed_start)), (max(start, removed_end), end)]
    return tuple((start, end) for start, end in left if start < end)


def hash_images(images: Sequence[EncodedImage]) -> str:
    """Returns the JSON text of the images' hashes, in their order."""
    return json.dumps([image.hash for image in images])


def split_parts(content: str) -> list[dict[str, str]]:
    """Splits a message's content into the parts that a vision-language chat template reads.

    >>> split_parts(f"{IMAGE}What is this?")
    [{'type': 'image'}, {'type': 'text', 'text': 'What is this?'}]
    """
    first, *others = content.split(IMAGE)
    parts = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text", "image")] or parts
