"""The documentation as a site: it builds without a warning, and links to code lead where the code is shown.
And the images of containers, which follow the lists of what is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
SHOWN = "https://example.org/humanline"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    to = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(to)]
    env = os.environ | {"REPO_URL": SHOWN}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return to


def test_every_page_is_there_in_the_sites_order_and_links_to_code_lead_to_it(site):
    pages = {p.relative_to(ROOT / "docs").with_suffix("") for p in (ROOT / "docs").rglob("*.md")}
    for page in pages - {Path("README")}:
        assert (site / page / "index.html").is_file()
    text = re.sub(r"!ENV \[[^\]]*\]", "null", (ROOT / "mkdocs.yml").read_text())
    parts = [of for part in yaml.safe_load(text)["nav"] for of in part.values()]
    named = [page for of in parts for page in ([of] if isinstance(of, str) else of)]
    assert sorted(named) == sorted(f"{page}.md" for page in pages)
    shown = (site / "tour" / "index.html").read_text()
    linked = re.findall(rf'href="{SHOWN}/blob/main/([^"#]+)["#]', shown)
    assert "trainers/humanline.py" in linked and all((ROOT / path).is_file() for path in linked)
    assert "losses/" in (site / "index.html").read_text()
    elsewhere = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]+(?:src|href)="(https?:[^"]+)"')
    loaded = {page.name: elsewhere.findall(page.read_text()) for page in site.rglob("*.html")}
    assert not any(loaded.values()), loaded


def test_images_copy_what_is_there():
    docker, apptainer = (ROOT / "Dockerfile").read_text(), (ROOT / "launch" / "apptainer.def").read_text()
    images = {re.search(r"(?:FROM|From:) (\S+)", text)[1] for text in (docker, apptainer)}
    copied = re.findall(r"^COPY (\S+) ", docker, re.M)
    copied += re.findall(r"^    (\S+) /opt/humanline/", apptainer, re.M)
    assert len(images) == 1 and copied and all((ROOT / line).exists() for line in copied)


def test_the_lock_is_of_the_lists_and_every_package_in_it_has_its_hash():
    """What make lock has to be run again for."""
    blocks = re.findall(r"^\w.*(?:\n    .*)*", (ROOT / "requirements" / "gpu.lock").read_text(), re.M)
    assert all("--hash=sha256:" in block for block in blocks)
    locked = [re.match(r"(\S+)==(\S+)", block).groups() for block in blocks]
    lists = [(ROOT / name).read_text() for name in ("requirements.txt", "requirements/cpu.txt")]
    for line in re.findall(r"^\w.*", "\n".join(lists), re.M):
        wanted = Requirement(line.partition("#")[0])
        versions = [version for name, version in locked if name == wanted.name]
        assert versions and all(version in wanted.specifier for version in versions), line
