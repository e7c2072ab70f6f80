"""What mkdocs asks while it builds the site (mkdocs.yml): links from docs/ to code become links to where the
code is shown, or, where nobody has said where that is, plain names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[(?P<text>[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\((?P<to>[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page as mkdocs is to read it."""
    folder = (ROOT / "docs" / page.file.src_path).parent

    def link(found: re.Match[str]) -> str:
        path, _, anchor = found["to"].partition("#")
        target = (folder / path).resolve()
        if "://" in found["to"] or not path or target.is_relative_to(ROOT / "docs"):
            return found[0]
        if not config.repo_url:
            return found["text"]
        shown = f"{config.repo_url.rstrip('/')}/blob/main/{target.relative_to(ROOT)}"
        return f"[{found['text']}]({shown}{f'#{anchor}' if anchor else ''})"

    return _LINK.sub(link, markdown)
