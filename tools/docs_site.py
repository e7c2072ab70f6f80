"""The hook of mkdocs (mkdocs.yml) that rewrites links from docs/ to code.

They become links to the code in the repository of ``repo_url``, or plain names if no ``repo_url`` is set.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[(?P<text>[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\((?P<to>[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's markdown with its links rewritten."""
    folder = (ROOT / "docs" / page.file.src_path).parent

    def link(match: re.Match[str]) -> str:
        path, _, anchor = match["to"].partition("#")
        target = (folder / path).resolve()
        if "://" in match["to"] or not path or target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not config.repo_url:
            return match["text"]
        shown = f"{config.repo_url.rstrip('/')}/blob/main/{target.relative_to(ROOT)}"
        return f"[{match['text']}]({shown}{f'#{anchor}' if anchor else ''})"

    return _LINK.sub(link, markdown)
