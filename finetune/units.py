"""Reads and writes amounts and places as people do: bytes, seconds, counts, rows of files."""

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import TypeGuard

from finetune.errors import UserError

GIB = 1 << 30
MIB = 1 << 20
LARGEST_SIZE = 1 << 60  # 1 EiB
FP32_MAX = (2 - 2**-23) * 2.0**127  # the largest finite fp32 number
UNITS = {  # in lower case -> bytes
    "": 1,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


def read_size(text: str) -> int:
    """Reads a number of bytes from text such as 80GiB, 5 GB or a bare number.

    5GB is 5·10⁹ bytes; 5GiB and 5G are 5·2³⁰.

    Raises `UserError` if the text is no size, or if the size is below 1 byte or above 1 EiB.

    >>> read_size("80GiB") == 80 * 2**30, read_size("1.5gb")
    (True, 1500000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    size = float(match[1]) * unit if match and unit else 0.0  # 0: not a size, as below
    if size > LARGEST_SIZE:
        raise UserError(
            f"{text}: more than 1 EiB; write a number and a unit, for example 80GiB or 500MB"
        )
    if size < 1:
        raise UserError(
            f"{text}: not a size; write a number and a unit, for example 80GiB or 500MB"
        )
    return int(size)


def is_fp32_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number that is finite in fp32.

    >>> is_fp32_number(3), is_fp32_number(1e39), is_fp32_number(10**400), is_fp32_number("3")
    (True, False, False, False)
    """
    return isinstance(value, int | float) and abs(value) <= FP32_MAX


def read_gpu_memory(text: str) -> str:
    """Adds the unit GiB to a GPU's memory if it is a bare number below 10,000; removes spaces.

    >>> read_gpu_memory("80"), read_gpu_memory("79.6 GiB")
    ('80GiB', '79.6GiB')
    """
    plain = text.replace(" ", "")
    is_bare = re.fullmatch(r"\d{1,4}(\.\d+)?", plain)
    return f"{plain}GiB" if is_bare else plain


def disk_size(size_bytes: int) -> str:
    """Writes a size in the decimal units of disks, rounded to about three digits.

    >>> (
    ...     disk_size(734),
    ...     disk_size(1_300_000),
    ...     disk_size(96_360_000_000),
    ...     disk_size(1_234_000_000_000_000),
    ... )
    ('734 bytes', '1.30 MB', '96.4 GB', '1,234 TB')
    """
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= unit:
            value = size_bytes / unit
            if value >= 100:
                return f"{value:,.0f} {name}"
            decimals = 1 if value >= 10 else 2
            return f"{value:.{decimals}f} {name}"
    return f"{size_bytes} bytes"


def gib(size_bytes: float) -> str:
    """Writes a size of memory as a number of GiB, with as many decimals as it needs.

    >>> gib(3 << 30), gib(150 << 30), gib(1 << 20)
    ('3.00', '150', '0.001')
    """
    value = size_bytes / GIB
    if value >= 100:
        return f"{value:.0f}"
    if value >= 0.01 or value == 0:
        return f"{value:.2f}"
    return f"{value:.3f}"


def duration(seconds: float) -> str:
    """Writes a time in seconds, or from 100 s on as hours, minutes and seconds.

    >>> duration(0.034), duration(41.25), duration(3725)
    ('0.03 s', '41.2 s', '1:02:05')
    """
    if seconds >= 100:
        return str(timedelta(seconds=round(seconds)))
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"


def format_count(number: int) -> str:
    """Writes a large number, such as of parameters or tokens, in millions or billions.

    >>> format_count(8030261248), format_count(736000), format_count(41943040)
    ('8.03 B', '736,000', '41.9 M')
    """
    if number >= 10**9:
        return f"{number / 1e9:.2f} B"
    if number >= 10**6:
        return f"{number / 1e6:.1f} M"
    return f"{number:,}"


def format_compact(value: float) -> str:
    """Writes a number in a short form, for an axis or a tooltip of a chart.

    >>> [format_compact(value) for value in (0.0, 2e-05, 1234567, 0.3333, 5202.4)]
    ['0', '2e-5', '1.23M', '0.333', '5,202']
    """
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1e4:  # thousands below that are written out
        for divisor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= divisor:
                return f"{value / divisor:.3g}{letter}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def counted(number: int, thing: str) -> str:
    """Writes a number and the name of a thing, in the plural unless the number is 1.

    >>> counted(1, "rank"), counted(1024, "rank"), counted(2, "micro-batch")
    ('1 rank', '1,024 ranks', '2 micro-batches')
    """
    plural = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"


def expand_home(path: str) -> str:
    """Returns `path` with the user's home folder in place of a "~" at its beginning."""
    # pathlib raises for a user that does not exist
    return os.path.expanduser(path)  # noqa: PTH111


def read_folder_path(text: str) -> str:
    """Reads the path of a folder on this machine, which need not exist.

    Raises `UserError` for a URL: it would be taken for a folder named "s3:".
    """
    if "://" in text:
        raise UserError(
            f"{text}: a URL; name a folder of this machine, such as one in which the storage is "
            "mounted"
        )
    return expand_home(text)


def name_place(path: str, number: int) -> str:
    """Writes the place of a row in a file or data set, for messages.

    `number`: the number of the line if a row of the file begins with a line, else the number of the
    row; both count from 1.

    >>> (
    ...     name_place("data/math.jsonl.gz", 3),
    ...     name_place("data/math.json", 3),
    ...     name_place("openai/gsm8k", 3),
    ... )
    ('data/math.jsonl.gz:3', 'data/math.json, row 3', 'openai/gsm8k, row 3')
    """
    if has_lines(path):
        return f"{path}:{number}"
    return f"{path}, row {number}"


def has_lines(path: str) -> bool:
    """Whether each row of the file begins at a line, by the file's ending."""
    return Path(path.removesuffix(".gz")).suffix.lower() in (
        ".jsonl",
        ".ndjson",
        ".csv",
        ".tsv",
        ".txt",
    )
