"""`setup` against a real server that speaks the Hugging Face listing and its redirects to another host."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import DownloadFailed, ModelUnreadable
from launcher.structs import DrafterRef, ModelRef, Slug, Status
from launcher.weights import hub
from launcher.weights.hub import Check
from tests.file_server import FileServer, Route, recorder

REPO = "owner/Model-GGUF"
SHARDS = tuple(f"Q8/M-0000{i}-of-00003.gguf" for i in (1, 2, 3))
SIZE = 300_000


@dataclass
class Hub:
    """The API host and the host that holds the bytes, as Hugging Face has them."""

    api: FileServer
    cdn: FileServer
    rows: list[dict[str, Any]] = field(default_factory=list)
    bodies: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, *, published: bool = True, spoil: bool = False, **route: Any) -> None:
        body = self.bodies[name] = os.urandom(SIZE)
        row: dict[str, Any] = {"type": "file", "path": name, "size": SIZE, "oid": "f" * 40}
        if published:
            row["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": SIZE, "pointerSize": 134}
        self.rows.append(row)
        sent = bytes([body[0] ^ 1]) + body[1:] if spoil else body
        self.cdn.routes[f"/blob/{name}"] = Route(body=sent, etag=f'"{name}"', **route)
        self.api.routes[f"/{REPO}/resolve/main/{name}"] = Route(location=self.cdn.url(f"/blob/{name}"))
        self.publish([self.rows])

    def publish(self, pages: list[list[dict[str, Any]]]) -> None:
        path = f"/api/models/{REPO}/tree/main?recursive=true"
        for i, rows in enumerate(pages):
            after = f"{path}&cursor={i + 1}"
            more = {"Link": f'<{self.api.url(after)}>; rel="next"'} if i + 1 < len(pages) else {}
            body = json.dumps([{"type": "directory", "path": "Q8", "size": 0, "oid": "0"}, *rows]).encode()
            self.api.routes[path] = Route(body=body, content_type="application/json", headers=more)
            path = after

    def fetched(self) -> list[str]:
        return [s.path.removeprefix("/blob/") for s in self.cdn.seen]


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "models"))
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with FileServer().running() as api, FileServer().running() as cdn:
        monkeypatch.setenv("HF_ENDPOINT", api.url("/"))
        made = Hub(api, cdn)
        for name in SHARDS:
            made.add(name)
        made.add("draft-Q8.gguf")
        made.add("mmproj-F16.gguf", published=False)
        made.add("Q4/other.gguf")
        yield made


def slug(**changes: Any) -> Slug:
    base: dict[str, Any] = {
        "name": "family/model",
        "path": "/slugs/family/model.yaml",
        "title": "Model",
        "status": Status.PRODUCTION,
        "model": ModelRef(repo=REPO, dir="model-dir", file=SHARDS[0]),
        "drafter": DrafterRef(file="draft/draft-Q8.gguf", remote="draft-Q8.gguf", type="draft-x", n_max=5),
        "mmproj": "mmproj-F16.gguf",
    }
    return Slug(**{**base, **changes})


def test_everything_that_the_slug_loads_arrives_and_is_counted(remote: Hub, tmp_path: Path) -> None:
    bar, progress = recorder()
    result = hub.setup(slug(), progress=progress)
    folder = tmp_path / "models" / "model-dir"
    for near, far in [*zip(SHARDS, SHARDS, strict=True), ("draft/draft-Q8.gguf", "draft-Q8.gguf")]:
        assert (folder / near).read_bytes() == remote.bodies[far]
    assert (folder / "mmproj-F16.gguf").exists()
    assert not list(tmp_path.rglob("other.gguf"))
    assert (result.count(Check.VERIFIED), result.count(Check.UNPUBLISHED), result.count(Check.FAILED)) == (4, 1, 0)
    assert [Path(f.path).name for f in result.files if f.check == Check.UNPUBLISHED] == ["mmproj-F16.gguf"]
    assert result.fetched_bytes == 5 * SIZE
    assert {stage for stage, _, _ in bar} == {f"download {Path(f.path).name}" for f in result.files}


def test_a_second_setup_fetches_nothing_and_reads_nothing_again(remote: Hub) -> None:
    hub.setup(slug())
    before = len(remote.cdn.seen)
    bar, progress = recorder()
    result = hub.setup(slug(), progress=progress)
    assert len(remote.cdn.seen) == before
    assert result.fetched_bytes == 0
    assert result.count(Check.VERIFIED) == 4
    assert bar == []  # hashes are remembered by size, time and inode


def test_only_the_missing_shard_is_fetched(remote: Hub, tmp_path: Path) -> None:
    hub.setup(slug(drafter=None, mmproj=None))
    (tmp_path / "models" / "model-dir" / SHARDS[1]).unlink()
    remote.cdn.seen.clear()
    assert hub.setup(slug(drafter=None, mmproj=None)).fetched_bytes == SIZE
    assert remote.fetched() == [SHARDS[1]]


def test_cut_connection_resumes_at_the_other_host(remote: Hub) -> None:
    remote.cdn.routes[f"/blob/{SHARDS[0]}"].cuts = [200_000]
    assert hub.setup(slug(drafter=None, mmproj=None)).count(Check.VERIFIED) == 3
    first, second = remote.cdn.requests(f"/blob/{SHARDS[0]}")
    assert "range" not in first.headers
    assert second.headers["range"] == "bytes=200000-"
    assert second.headers["if-range"] == f'"{SHARDS[0]}"'


def test_wrong_bytes_of_the_right_size_are_refused(remote: Hub, tmp_path: Path) -> None:
    remote.rows.clear()
    for name in SHARDS:
        remote.add(name, spoil=name == SHARDS[2])
    with pytest.raises(DownloadFailed) as failed:
        hub.setup(slug(drafter=None, mmproj=None))
    assert (failed.value.reference, failed.value.exit_code) == ("hash-mismatch", 11)
    assert Path(SHARDS[2]).name in failed.value.message
    assert not (tmp_path / "models" / "model-dir" / SHARDS[2]).exists()


def test_a_file_that_rotted_on_the_disk_is_named(remote: Hub, tmp_path: Path) -> None:
    hub.setup(slug())
    rotten = tmp_path / "models" / "model-dir" / SHARDS[0]
    rotten.write_bytes(b"\0" * SIZE)
    remote.cdn.seen.clear()
    with pytest.raises(DownloadFailed) as failed:
        hub.setup(slug(), verify_only=True)
    assert remote.cdn.seen == []
    assert failed.value.reference == "hash-mismatch"
    assert failed.value.fix == f"rm {rotten}; launcher setup family/model"


def test_verify_only_fetches_nothing(remote: Hub) -> None:
    with pytest.raises(ModelUnreadable) as failed:
        hub.setup(slug(), verify_only=True)
    assert failed.value.reference == "model-missing"
    assert "5 of 5" in failed.value.message
    assert remote.cdn.seen == []


def test_the_token_stays_with_the_endpoint(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.setup(slug())
    assert {s.headers.get("authorization") for s in remote.api.seen} == {"Bearer hf_secret"}
    assert {s.headers.get("authorization") for s in remote.cdn.seen} == {None}


def test_a_listing_of_several_pages_is_read_whole(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    remote.publish([remote.rows[:2], remote.rows[2:4], remote.rows[4:]])
    assert set(hub.list_repo(REPO, again="x")) == {r["path"] for r in remote.rows}
    assert len(remote.api.seen) == 3


def test_disk_gate_comes_before_the_first_byte(remote: Hub) -> None:
    for row in remote.rows:
        row["size"] = row.get("lfs", {})["size"] = 10**15 if "lfs" in row else SIZE
    remote.publish([remote.rows])
    with pytest.raises(DownloadFailed, match="short by") as failed:
        hub.setup(slug())
    assert failed.value.reference == "disk-space"
    assert remote.cdn.seen == []


def test_files_in_the_hub_cache_are_used_where_they_lie(
    remote: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    snapshot = tmp_path / "hf" / "hub" / f"models--{REPO.replace('/', '--')}" / "snapshots" / "abc"
    for name in SHARDS:
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(remote.bodies[name])
    result = hub.setup(slug(drafter=None, mmproj=None))
    assert result.fetched_bytes == 0
    assert [f.path for f in result.files] == [str(snapshot / n) for n in SHARDS]
    (snapshot / SHARDS[1]).unlink()  # half a set in a cache is no set: the engine wants all in one folder
    result = hub.setup(slug(drafter=None, mmproj=None))
    assert {Path(f.path).parent for f in result.files} == {tmp_path / "models" / "model-dir" / "Q8"}


def test_names_that_the_repository_lacks_are_all_told(remote: Hub) -> None:
    wrong = slug(model=ModelRef(repo=REPO, dir="d", file="Q8/M-00001-of-00004.gguf"), mmproj="mmproj-f16.gguf")
    with pytest.raises(DownloadFailed) as failed:
        hub.setup(wrong)
    assert failed.value.reference == "repo-file-missing"
    assert "M-00004-of-00004.gguf" in failed.value.message
    assert "mmproj-F16.gguf" in failed.value.context
    assert remote.cdn.seen == []


def no_repo(remote: Hub) -> None:
    remote.api.routes.clear()


def html(remote: Hub) -> None:
    for route in remote.api.routes.values():
        route.body = b"<html>"


def gated(remote: Hub) -> None:
    for route in remote.api.routes.values():
        route.statuses = [401]


@pytest.mark.parametrize(
    ("change", "reference"), [(no_repo, "download-refused"), (html, "repo-unreadable"), (gated, "download-refused")]
)
def test_a_repository_that_cannot_be_read(remote: Hub, change: Callable[[Hub], None], reference: str) -> None:
    change(remote)
    with pytest.raises(DownloadFailed) as failed:
        hub.setup(slug())
    assert failed.value.reference == reference
    assert ("HF_TOKEN" in failed.value.fix) == (change is gated)


def test_the_demo_model_is_made_and_not_fetched(remote: Hub, tmp_path: Path) -> None:
    demo = slug(name="demo/smol-moe", model=ModelRef(file="m.gguf", dir="demo"), drafter=None, mmproj=None)
    with pytest.raises(DownloadFailed) as failed:
        hub.setup(demo)
    assert failed.value.reference == "model-has-no-repo"
    assert failed.value.fix == f"python scripts/make_demo_model.py {tmp_path / 'models' / 'demo'}"
    with pytest.raises(DownloadFailed) as failed:
        hub.setup(slug(model=ModelRef(file="m.gguf")))
    assert "repo: OWNER/NAME" in failed.value.fix
    assert remote.api.seen == []
