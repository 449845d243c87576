"""What the site needs beyond its pages: files outside docs/, and lists as GitHub has them."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# A list that follows a line of text at once: Python-Markdown takes it for more of the paragraph.
LIST_BELOW_TEXT = re.compile(
    r"^((?!\s*(?:[-*]|\d+\.) |#|\s*$).+)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE
)


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside docs/ that a page links, under their names in the repository."""
    for page in files.documentation_pages():
        for path in OUTSIDE.findall(page.content_string):
            if files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **others: Any) -> str:
    """Points links out of docs/ to these copies, and puts an empty line before each list."""
    markdown = OUTSIDE.sub(r"](\1", markdown)
    parts = re.split(f"({FENCE.pattern})", markdown, flags=FENCE.flags)
    return "".join(
        part if part.startswith("```") else LIST_BELOW_TEXT.sub(r"\1\n\n", part) for part in parts
    )
