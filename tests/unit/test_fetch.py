"""Downloads against a real HTTP server on loopback."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import DownloadFailed, Locked
from launcher.facts import fetch
from tests.file_server import FileServer, Route, recorder

BODY = os.urandom(3_000_000)
SHA = hashlib.sha256(BODY).hexdigest()
AGAIN = "launcher setup some/model"


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FileServer().running() as server:
        yield server


def test_whole_file_is_published_with_hash_and_counts(web: FileServer, tmp_path: Path) -> None:
    web.routes["/f"] = Route(body=BODY, etag='"v1"')
    bar, progress = recorder()
    target = tmp_path / "deep" / "f.bin"
    assert fetch.download(web.url("/f"), target, again=AGAIN, size_bytes=len(BODY), progress=progress) == SHA
    assert target.read_bytes() == BODY
    assert bar[0] == ("download", 0, len(BODY))
    assert bar[-1] == ("download", len(BODY), len(BODY))
    assert [d for _, d, _ in bar] == sorted(d for _, d, _ in bar)
    assert [p.name for p in target.parent.iterdir()] == ["f.bin"]


def test_cut_connection_is_taken_up_with_range_and_if_range(web: FileServer, tmp_path: Path) -> None:
    web.routes["/f"] = Route(body=BODY, etag='"v1"', cuts=[1_200_000])
    fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN, size_bytes=len(BODY), sha256=SHA)
    first, second = web.requests("/f")
    assert "range" not in first.headers
    assert second.headers["if-range"] == '"v1"'
    assert 0 < int(second.headers["range"].removeprefix("bytes=").removesuffix("-")) <= 1_200_000
    assert (tmp_path / "f").read_bytes() == BODY


def test_a_later_run_goes_on_where_the_first_gave_up(web: FileServer, tmp_path: Path) -> None:
    web.routes["/f"] = Route(body=BODY, etag='"v1"', cuts=[1_500_000])
    with pytest.raises(DownloadFailed) as failed:
        fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN, size_bytes=len(BODY), retries=0)
    assert failed.value.reference == "download-failed"
    assert failed.value.fix == AGAIN
    kept = (tmp_path / "f.part").stat().st_size
    assert f"{kept:,} bytes are kept" in failed.value.context
    assert not (tmp_path / "f").exists()
    bar, progress = recorder()
    assert fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN, size_bytes=len(BODY), progress=progress) == SHA
    assert web.seen[-1].headers["range"] == f"bytes={kept}-"
    assert bar[0][1] == kept


def test_a_file_that_changed_meanwhile_is_started_over(web: FileServer, tmp_path: Path) -> None:
    web.routes["/f"] = Route(body=os.urandom(2_000_000), etag='"old"', cuts=[1_500_000])
    with pytest.raises(DownloadFailed):
        fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN, retries=0)
    web.routes["/f"] = Route(body=BODY, etag='"new"')
    assert fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN) == SHA


def test_a_server_without_ranges_restarts(web: FileServer, tmp_path: Path) -> None:
    web.routes["/f"] = Route(body=BODY, etag='"v1"', cuts=[1_500_000], ranges=False)
    assert fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN, size_bytes=len(BODY)) == SHA


def test_a_left_over_longer_than_the_file_is_dropped(web: FileServer, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(b"x" * (len(BODY) + 7))
    web.routes["/f"] = Route(body=BODY)
    assert fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN, sha256=SHA) == SHA  # size unknown: 416 first
    (tmp_path / "g.part").write_bytes(b"x" * (len(BODY) + 7))
    assert fetch.download(web.url("/f"), tmp_path / "g", again=AGAIN, size_bytes=len(BODY), sha256=SHA) == SHA


def test_right_size_but_wrong_bytes_is_refused_and_removed(web: FileServer, tmp_path: Path) -> None:
    web.routes["/f"] = Route(body=BODY[:-1] + bytes([BODY[-1] ^ 1]), etag='"v1"')
    with pytest.raises(DownloadFailed) as failed:
        fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN, size_bytes=len(BODY), sha256=SHA)
    assert failed.value.reference == "hash-mismatch"
    assert failed.value.exit_code == 11
    assert SHA in failed.value.context
    assert list(tmp_path.glob("f*")) == []


def test_wrong_size_is_refused(web: FileServer, tmp_path: Path) -> None:
    web.routes["/f"] = Route(body=BODY[:-5])
    with pytest.raises(DownloadFailed) as failed:
        fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN, size_bytes=len(BODY))
    assert failed.value.reference == "size-mismatch"


@pytest.mark.parametrize(("status", "word"), [(401, "token"), (403, "granted"), (404, "no such file")])
def test_a_refusal_is_not_tried_again(web: FileServer, tmp_path: Path, status: int, word: str) -> None:
    web.routes["/f?secret=1"] = Route(body=BODY, statuses=[status])
    with pytest.raises(DownloadFailed) as failed:
        fetch.download(web.url("/f?secret=1"), tmp_path / "f", again=AGAIN)
    assert failed.value.reference == "download-refused"
    assert word in failed.value.message
    assert "secret" not in failed.value.message
    assert ("HF_TOKEN" in failed.value.fix) == (status in (401, 403))
    assert len(web.seen) == 1


def test_a_busy_server_is_tried_again(web: FileServer, tmp_path: Path) -> None:
    web.routes["/f"] = Route(body=BODY, statuses=[503])
    assert fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN) == SHA


def test_no_network_is_said_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    started = time.monotonic()
    with pytest.raises(DownloadFailed) as failed:
        fetch.download("http://127.0.0.1:9/f", tmp_path / "f", again=AGAIN)
    assert failed.value.reference == "download-failed"
    assert time.monotonic() - started < 4


def test_the_token_never_follows_a_redirect_to_another_origin(web: FileServer, tmp_path: Path) -> None:
    with FileServer().running() as cdn:
        web.routes["/hop"] = Route(location="/to-cdn")
        web.routes["/to-cdn"] = Route(location=cdn.url("/blob"))
        cdn.routes["/blob"] = Route(body=BODY, etag='"cdn"')
        assert fetch.download(web.url("/hop"), tmp_path / "f", again=AGAIN, token="hf_secret") == SHA
        assert [s.headers.get("authorization") for s in web.seen] == ["Bearer hf_secret"] * 2
        assert [s.headers.get("authorization") for s in cdn.seen] == [None]


def test_an_endless_redirect_is_refused(web: FileServer, tmp_path: Path) -> None:
    web.routes["/f"] = Route(location="/f")
    with pytest.raises(DownloadFailed, match="redirects"):
        fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN)


def test_two_downloads_of_one_file_do_not_mix(web: FileServer, tmp_path: Path) -> None:
    web.routes["/f"] = Route(body=BODY)
    with (tmp_path / "f.part").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Locked) as failed:
            fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN)
    assert failed.value.reference == "download-locked"
    assert web.seen == []


def test_a_killed_process_leaves_a_part_that_the_next_one_uses(web: FileServer, tmp_path: Path) -> None:
    web.routes["/f"] = Route(body=BODY, etag='"v1"', cuts=[1_500_000])
    code = (
        "import sys, time; from pathlib import Path; from launcher.facts import fetch\n"
        "def slow(stage, done, total):\n"
        "    if done > 1_000_000: print('half', flush=True); time.sleep(60)\n"
        "fetch.download(sys.argv[1], Path(sys.argv[2]), again='x', progress=slow)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, web.url("/f"), str(tmp_path / "f")], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    kept = (tmp_path / "f.part").stat().st_size
    assert kept > 1_000_000
    assert fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN, size_bytes=len(BODY)) == SHA
    assert web.seen[-1].headers["range"] == f"bytes={kept}-"


def test_a_full_disk_is_told_and_keeps_what_came(web: FileServer, tmp_path: Path) -> None:
    """On a real full disk: a page cache would hide it until the file is closed."""
    web.routes["/f"] = Route(body=BODY, etag='"v1"')
    code = (
        "import sys; from pathlib import Path\n"
        "from launcher.errors import DownloadFailed; from launcher.facts import fetch\n"
        "try:\n    fetch.download(sys.argv[1], Path(sys.argv[2]) / 'f', again='x', size_bytes=int(sys.argv[3]))\n"
        "except DownloadFailed as error:\n    print(error.reference, error.exit_code, error.context)"
    )
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    script = 'mount -t tmpfs -o size=1m tmpfs "$1"; exec "$2" -c "$3" "$4" "$1" "$5"'
    words = [str(tmp_path), sys.executable, code, web.url("/f"), str(len(BODY))]
    done = subprocess.run([*unshare, "sh", "-ec", script, "sh", *words], capture_output=True, text=True, check=False)
    assert re.match(r"disk-full 11 1,0\d\d,\d{3} of 3,000,000 bytes are kept in ", done.stdout), done.stderr


def test_a_folder_that_cannot_be_written_is_a_refusal(web: FileServer, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file in the way")
    with pytest.raises(DownloadFailed) as failed:
        fetch.download(web.url("/f"), tmp_path / "models" / "deep" / "f", again=AGAIN)
    assert failed.value.reference == "disk-unwritable"
    assert AGAIN in failed.value.fix
    assert web.seen == []


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1080", "socks"),
        ("HTTPS_PROXY", "foo://127.0.0.1:3128", "foo"),
        ("http_proxy", "http://[::1", "http_proxy"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    monkeypatch.setenv(name, value)
    for ask in (
        lambda: fetch.download("http://192.0.2.1/f", tmp_path / "f", again=AGAIN),
        lambda: fetch.get_page("http://192.0.2.1/f", again=AGAIN, accept="*/*"),
    ):
        with pytest.raises(DownloadFailed) as failed:
            ask()
        assert failed.value.reference == "proxy-unusable"
        assert name in failed.value.message
        assert why in failed.value.message
        assert AGAIN in failed.value.fix


def test_a_proxy_of_the_environment_is_used(web: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("HTTP_PROXY", web.url(""))
    web.routes["http://models.invalid/f"] = Route(body=BODY)
    assert fetch.download("http://models.invalid/f", tmp_path / "f", again=AGAIN) == SHA


def test_a_redirect_to_nonsense_is_a_refusal(web: FileServer, tmp_path: Path) -> None:
    web.routes["/f"] = Route(location="http://[")
    with pytest.raises(DownloadFailed) as failed:
        fetch.download(web.url("/f"), tmp_path / "f", again=AGAIN)
    assert failed.value.reference in ("download-refused", "download-failed")


def test_what_lies_there_is_read_again_visibly(web: FileServer, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(BODY[:2_000_000])
    web.routes["/f"] = Route(body=BODY)
    bar, progress = recorder()
    fetch.download(
        web.url("/f"), tmp_path / "f", again=AGAIN, size_bytes=len(BODY), sha256=SHA, stage="download f",
        progress=progress,
    )  # fmt: skip
    assert bar[0] == ("reread f", 2_000_000, 2_000_000)
    assert bar[1] == ("download f", 2_000_000, len(BODY))
