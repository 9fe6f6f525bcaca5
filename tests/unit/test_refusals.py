"""Bad inputs through the real command line: refused with the right id, the number that was wrong and a fix to paste.

Nothing is started and nothing that works is stopped, whatever was wrong. A case is what a person could do: an option,
a slug, a variable, a file, a machine.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pynvml
import pytest
from typer.testing import CliRunner

from launcher import cli
from launcher.facts import surroundings
from launcher.serve import state
from launcher.units import GIB, MIB
from tests.builders import T, write_shards
from tests.refusal_world import CARD, KEYS, LISTED, TENSORS, World, written_record
from tests.unit.test_errors_doc import listed

# How a line begins that can be pasted: a command, an option of the command just typed, a variable, an editor.
FIX = re.compile(
    r"^fix: (launcher |switch |python |pip install |curl |git |cat |ls |df |rm |cp |tail |ulimit |sudo |docker "
    r"|nvidia-smi|chmod |llama-server |/\S*ggml-rpc-server |ggml-rpc-server |export \w+=|unset \w+"
    r"|\$\{EDITOR:-vi\} |--?[a-z])"
)
RIG = """schema: 1
devices: [{name: CUDA0, description: RTX 3090, total: 24576MiB, free: 24125MiB, context: 615MiB}]
host: {total: 64GiB, available: 60GiB, triad_gbps: 116, cores: 6, numa_nodes: 1}
"""
Words = Callable[[World], list[str]]


class Case(NamedTuple):
    """A bad input. `words` makes it and returns the command line; `says` must stand in what is printed."""

    name: str
    code: int
    reference: str
    words: Words
    says: tuple[str, ...] = ()
    fix: str = ""


def model(*options: str) -> Words:
    """`switch` of a good file, with options."""
    return lambda w: ["switch", w.model(), "--yes", *options]


def variable(name: str, value: str, more: str = "") -> Words:
    """`switch` of a good slug, with a variable of the environment."""

    def words(w: World) -> list[str]:
        w.patch.setenv(name, value)
        return ["switch", w.slug(more), "--yes"]

    return words


def slug(more: str = "", *options: str, serve: str = "", status: str = "production") -> Words:
    """`switch` of a slug with lines of its own."""
    return lambda w: ["switch", w.slug(more, serve=serve, status=status), "--yes", *options]


def file(name: str, data: bytes) -> Words:
    """`switch` of a file that holds this."""
    return lambda w: ["switch", w.bytes(name, data), "--yes"]


def after(make: Callable[[World], object], words: Words) -> Words:
    """The machine made so, then the command."""

    def both(w: World) -> list[str]:
        make(w)
        return words(w)

    return both


USAGE = [
    Case("unknown option", 2, "usage", model("--nope"), ("--nope",), "fix: launcher switch --help"),
    Case("pasted -ngl", 2, "usage", model("-ngl", "99"), ("-ngl",), "fix: --residency auto"),
    Case("pasted -ot", 2, "usage", model("-ot", "exps=CPU"), ("-ot",), "fix: --residency auto"),
    Case("pasted --no-mmap", 2, "usage", model("--no-mmap"), ("b10884", "--load-mode none"), "fix: --load-mode none"),
    Case("no number", 2, "usage", model("--threads", "many"), ("--threads many",)),
    Case("no value", 2, "usage", model("--ctx"), ("--ctx",)),
    Case("no command", 2, "usage", lambda _: ["swich", "x"], ("swich",), "fix: launcher --help"),
    Case("no target", 2, "usage", lambda _: ["switch"], ("TARGET",)),
]
OPTIONS = [
    Case(f"{' '.join(words)}", 2, reference, model(*words), (says,))
    for words, reference, says in (
        (("--ctx", "many"), "override-invalid", "'many'"),
        (("--ctx", "0"), "override-invalid", "0 is no context"),
        (("--ctx", "1k", "-c", "1k"), "override-invalid", "both"),
        (("-c", "3", "-np", "4"), "override-invalid", "3 tokens cannot be shared by 4"),
        (("--ctx", "2048M"), "override-invalid", "2,147,483,648 tokens"),
        (("-np", "257"), "override-invalid", "257 streams"),
        (("-np", "0"), "override-invalid", "0 is less than 1"),
        (("--batch", "0"), "override-invalid", "0 is less than 1"),
        (("--ubatch", "-1"), "override-invalid", "-1 is less than 1"),
        (("--threads", "0"), "override-invalid", "0 is less than 1"),
        (("--kv", "q9"), "override-invalid", "'q9'"),
        (("--kv", "q8_0", "-ctk", "f16"), "override-invalid", "both"),
        (("--kv", "q8_0", "-fa", "off"), "override-invalid", "q8_0 needs flash attention"),
        (("-ctv", "q4_0", "-fa", "off"), "override-invalid", "q4_0 needs flash attention"),
        (("--flash-attn", "maybe"), "override-invalid", "'maybe'"),
        (("--residency", "some"), "override-invalid", "'some'"),
        (("--margin", "big"), "override-invalid", "big"),
        (("--reserve", "CUDA0"), "override-invalid", "'CUDA0' names no size"),
        (("--reserve", "CUDA9=1GiB"), "device-unknown", "CUDA9"),
        (("-ts", "a,b"), "override-invalid", "'a,b'"),
        (("-ts", "0"), "override-invalid", "'0' gives no device a layer"),
        (("-ts", "1,1"), "split-mismatch", "2 values for 1 devices"),
        (("-sm", "row"), "override-invalid", "'row'"),
        (("-sm", "none"), "override-invalid", "none"),
        (("--load-mode", "fast"), "override-invalid", "'fast'"),
        (("--numa", "all"), "override-invalid", "all"),
        (("--port", "0"), "override-invalid", "0 is no port"),
        (("--port", "70000"), "override-invalid", "70000 is no port"),
        (("--host", ""), "override-invalid", "empty"),
        (("--devices", "CUDA7"), "device-unknown", "'CUDA7'"),
        (("--devices", "CUDA0,0"), "override-invalid", "CUDA0 is named twice"),
    )
]
VARIABLES = [
    Case("OT_G0", 2, "ot-g-invalid", variable("OT_G0", "9-2"), ("9-2", "backwards"), "fix: export OT_G0=0-2"),
    Case("OT_G9", 2, "ot-g-invalid", variable("OT_G9", "0"), ("card 9", "the plan has 1"), "fix: unset OT_G9"),
    Case("OT_G00", 2, "ot-g-invalid", variable("OT_G00", "0"), ("OT_G00=0",), "fix: export OT_G0=0"),
    Case(
        "SPEC_N", 2, "spec-n-invalid",
        variable("SPEC_N", "99", "drafter: {file: d.gguf, type: draft-simple, n_max: 3}\n"), ("99", "64"),
        "fix: unset SPEC_N",
    ),
    Case("LLAMA_SERVER", 7, "engine-missing", variable("LLAMA_SERVER", "/nowhere/llama-server"), ("/nowhere",)),
    Case("MODEL_DIR", 7, "model-missing", variable("MODEL_DIR", "/nowhere"), ("m.gguf", "/nowhere")),
]  # fmt: skip
SLUGS = [
    Case(name, 3, "slug-invalid", slug(more, serve=serve), says, "fix: ${EDITOR:-vi} +")
    for name, more, serve, says in (
        ("unknown key", "deviecs: {min: 2}\n", "", (":6:1", "did you mean 'devices'")),
        ("duplicate key", "title: two\n", "", (":6:1", "title")),
        ("broken yaml", "rpc: {hosts: [\n", "", ("not YAML",)),
        ("anchor", "rpc: &a {hosts: [x]}\n", "", ("&a",)),
        ("too many streams", "", ", n_parallel: 999", ("999", "256")),
        ("a batch below the micro-batch", "", ", n_batch: 64, n_ubatch: 512", ("512 is above n_batch 64",)),
        ("quantised V without flash attention", "", ", type_v: q8_0, flash_attn: off", ("q8_0 needs flash_attn",)),
        ("a layer on two cards", "placement: {residency: {CUDA0: [1], CUDA1: [1]}}\n", "", ("layer 1 is already on",)),
        ("a far server to start", "rpc: {hosts: ['10.0.0.7:50052'], spawn: true}\n", "", ("10.0.0.7:50052",)),
        ("no size", "placement: {margin: much}\n", "", ("much",)),
        ("-c against n_ctx", "extra_args: [-c, '4096']\n", "", ("-c 4096 against serve.n_ctx: 2048",)),
        ("--threads against threads", "extra_args: ['--threads=7']\n", "", ("--threads 7 against serve.threads: 1",)),
        ("-ot", "extra_args: [-ot, 'exps=CPU']\n", "", ("-ot exps=CPU against placement.residency: auto",)),
        ("-sm row", "extra_args: [-sm, row]\n", "", ("-sm row: ", "need -sm layer")),
        ("--no-mmap", "extra_args: [--no-mmap]\n", "", ("gone since b10884", "--load-mode none")),
    )
] + [
    Case("no such slug", 2, "slug-unknown", lambda w: ["switch", w.slug() + "x"], ("my/onex", "did you mean"),),
    Case("several slugs", 2, "slug-ambiguous",
         lambda w: ["switch", [w.slug(name="a/one"), w.slug(name="b/one")][0][2:]], ("2 slugs", "a/one", "b/one")),
    Case("a broken rig", 3, "rig-invalid",
         lambda w: ["preflight", w.model(), "--rig", w.rig(RIG.replace("24125MiB", "2 apples"))], ("2 apples",)),
    Case("no rig", 3, "rig-missing", lambda w: ["preflight", w.model(), "--rig", "/nowhere.yaml"], ("/nowhere.yaml",)),
    Case("not in production", 7, "status-needs-force", slug(status="incubating"), ("incubating",), "fix: --force"),
    Case("no bundle there", 2, "residency-no-bundle",
         slug("placement: {residency: {CUDA0: [77]}}\n"), ("block 77",), "fix: --residency auto"),
    Case("no such card", 2, "device-unknown", slug("placement: {residency: {CUDA5: [1]}}\n"), ("CUDA5",)),
]  # fmt: skip


def byte_split(w: World) -> list[str]:
    w.bytes("m.gguf.part2of2", b"x")
    return ["switch", w.bytes("m.gguf.part1of2", b"GGUF"), "--yes"]


def missing_shard(w: World) -> list[str]:
    third = len(TENSORS) // 3
    parts = [TENSORS[:third], TENSORS[third : 2 * third], TENSORS[2 * third :]]
    shards = write_shards(w.models, parts, stem="s", kv=KEYS)
    shards[1].unlink()
    return ["switch", str(shards[0]), "--yes"]


def two_models(w: World) -> list[str]:
    w.model("d/a.gguf")
    return ["switch", str(Path(w.model("d/b.gguf")).parent), "--yes"]


def legacy(w: World) -> list[str]:
    old = [T(t.name.replace("gate_exps", "gate.0"), (1024, 6144), 1) if "gate_exps" in t.name else t for t in TENSORS]
    return ["switch", w.model(tensors=old), "--yes"]


def latent(w: World) -> list[str]:
    keys = {"qwen3moe.attention.key_length_mla": 192}
    return ["switch", w.model(keys=keys), "--yes", "--kv", "q8_0/f16"]


def narrow(w: World) -> list[str]:
    return ["switch", w.model(keys={"qwen3moe.attention.key_length": 80}), "--yes", "--kv", "q8_0"]


FILES = [
    Case("no such file", 7, "model-missing", lambda w: ["switch", str(w.models / "no.gguf"), "--yes"], ("no.gguf",)),
    Case("an empty file", 7, "model-empty", file("m.gguf", b""), ("0 bytes",)),
    Case("a web page", 7, "html-page", file("m.gguf", b"<!doctype html><html>"), ("m.gguf",)),
    Case("an LFS pointer", 7, "lfs-pointer", file(
        "m.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 149000000000\n"),
        ("138.8",)),
    Case("something else", 7, "not-gguf", file("m.gguf", b"PK\3\4" * 64), ("m.gguf",)),
    Case("half a header", 7, "header-truncated", lambda w: [
        "switch", w.bytes("h.gguf", Path(w.model()).read_bytes()[:300]), "--yes"], ("h.gguf",)),
    Case("a truncated file", 7, "data-truncated", lambda w: [
        "switch", w.model(short_bytes=96 * MIB), "--yes"], ("96.0 MiB",)),
    Case("version 1", 7, "gguf-version", lambda w: ["switch", w.model(version=1), "--yes"], ("version 1",)),
    Case("version 9", 7, "gguf-version", lambda w: ["switch", w.model(version=9), "--yes"], ("version 9",)),
    Case("big-endian", 7, "big-endian", lambda w: ["switch", w.model(version=3 << 24), "--yes"], ("version 3",)),
    Case("parts by bytes", 7, "byte-split", byte_split, ("part1of2",)),
    Case("a missing shard", 7, "shards-missing", missing_shard, ("s-00002-of-00003.gguf",)),
    Case("two models", 7, "folder-several-models", two_models, ("2 models", "b.gguf")),
    Case("no model", 7, "folder-no-model", after(
        lambda w: (w.models / "e").mkdir(parents=True), lambda w: ["switch", str(w.models / "e"), "--yes"]),
        ("0 files",)),
    Case("a vocabulary", 7, "no-tensors", lambda w: ["switch", w.model(tensors=[]), "--yes"], ()),
    Case("no width", 7, "model-no-width", lambda w: [
        "switch", w.model(keys={"qwen3moe.embedding_length": None}), "--yes"], ("embedding_length",)),
    Case("no layers", 7, "model-no-layers", lambda w: [
        "switch", w.model(keys={"qwen3moe.block_count": 0}), "--yes"], ("block_count",)),
    Case("experts of 2023", 7, "model-legacy-experts", legacy, ("gate.0",)),
    Case("no context", 2, "ctx-unknown", lambda w: [
        "switch", w.model(keys={"qwen3moe.context_length": None}), "--yes"], (), "fix: --ctx"),
    Case("a repository", 7, "target-remote", lambda _: ["switch", "unsloth/x-GGUF:Q4_K_M", "--yes"], ("unsloth/x",)),
    Case("no drafter", 7, "model-missing", model("--drafter", "/nowhere/d.gguf"), ("d.gguf",), "fix: --drafter off"),
    Case("no projector", 7, "model-missing", model("--mmproj", "/nowhere/p.gguf"), ("p.gguf",), "fix: --mmproj"),
    Case("counts that cannot be", 7, "header-damaged", lambda w: [
        "switch", w.model(n_tensors=1 << 40), "--yes"], ("m.gguf",)),
    Case("two of one name", 7, "model-ambiguous", lambda w: [
        "switch", [w.slug("drafter: {file: q/d.gguf, type: draft-simple, n_max: 3}\n"), w.model("a/d.gguf"),
                   w.model("b/d.gguf", tensors=TENSORS[:3])][0], "--yes"], ("2 files of different sizes", "d.gguf"),
        "fix: export MODEL_DIR="),
    Case("no such card to draft on", 2, "drafter-place", lambda w: [
        "switch", w.model(), "--yes", "--drafter", w.model("d.gguf"), "--drafter-device", "CUDA8"], ("CUDA8",)),
    Case("one cache for K and V", 2, "override-invalid", latent, ("q8_0/f16",), "fix: --kv q8_0"),
    Case("heads of 80", 2, "override-invalid", narrow, ("heads of 80", "32"), "fix: --kv f16"),
]  # fmt: skip
WITH_NEEDS = "engine: {needs: ['spec-type:draft-dspark', 'flag:--log-jsonlx']}\n"
ENGINES = [
    Case("not there", 7, "engine-missing", model("--engine", "/nowhere/llama-server"), ("/nowhere",)),
    Case("not executable", 7, "engine-missing", after(
        lambda w: w.engine().chmod(0o644), model()), ("is not executable",), "fix: chmod +x "),
    Case("does not start", 7, "engine-broken", after(lambda w: w.engine(help_code=132), model()), ("CPU features",)),
    Case("another program", 7, "engine-not-llama-server", after(
        lambda w: w.engine(help_text="-x  nothing"), model()), ("--ctx-size",)),
    Case("lacks what the slug needs", 7, "engine-lacks", slug(WITH_NEEDS), ("spec-type:draft-dspark", "--log-jsonlx")),
    Case("lacks what the plan needs", 7, "engine-lacks", after(
        lambda w: w.engine(without=["-ts", "--tensor-split"]), model()), ("--tensor-split", "11434")),
    Case("cannot list", 7, "engine-list-failed", after(lambda w: w.engine(list_code=3), model()), ("code 3",)),
    Case("a flag of a fork", 7, "engine-flag-unknown", slug("extra_args: [--moe-cache, '8']\n"),
         ("extra_args[0]", "--moe-cache", "b11434"), "fix: ${EDITOR:-vi} "),
    Case("a removed flag", 7, "engine-flag-unknown", slug("extra_args: [--top-n, '5', --draft-min, '2']\n"),
         ("extra_args[2]", "--draft-min", "use --spec-draft-n-min")),
    Case("a typo", 7, "engine-flag-unknown", slug("extra_args: [--metrix]\n"), ("did you mean --metrics",)),
    Case("an equals sign", 7, "engine-flag-unknown", slug("extra_args: ['--verbosity-x=3', '--min-px=1']\n"),
         ("--verbosity-x=3",)),
    Case("a config for all", 7, "engine-config", after(
        lambda w: w.file("etc/llama.cpp/config.ini", "[*]\nn-gpu-layers = 10\nui = false\n"), model()),
        ("n-gpu-layers = 10", "the plan 999"), "fix: sudo ${EDITOR:-vi} "),
    Case("a config in the engine's words", 7, "engine-config", after(
        lambda w: w.file("etc/llama.cpp/config.ini", "LLAMA_ARG_CPU_MOE = 1\n"), model()), ("cpu-moe = 1",)),
    Case("q5_1 on a stock build", 7, "kv-no-kernel", model("--kv", "q5_1"), ("K q5_1 with V q5_1", "CUDA0"),
         "fix: --kv q4_0"),
    Case("a mixed pair", 7, "kv-no-kernel", model("--kv", "q8_0/q5_1"), ("K q8_0 with V q5_1", "f16, q4_0, q8_0"),
         "fix: --kv q8_0"),
    Case("f16 with q8_0", 7, "kv-no-kernel", model("--kv", "f16/q8_0"), ("K f16 with V q8_0",), "fix: --kv f16"),
    Case("iq4_nl on any build", 7, "kv-no-kernel", after(
        lambda w: w.engine(library=b"GGML_CUDA_FA_QUANTS"), model("--kv", "iq4_nl")), ("K iq4_nl",), "fix: --kv q4_0"),
]  # fmt: skip
BUSY = {**CARD, "free": 600 * MIB, "processes": [{"pid": 4711, "used": 23_000 * MIB, "name": "/usr/bin/python3 train"}]}
SOFT = [
    "  Vulkan0: llvmpipe (LLVM 17.0.6, 256 bits) (64000 MiB, 64000 MiB free)",
    "  Vulkan1: Intel(R) UHD Graphics 770 (ADL-S GT1) (48000 MiB, 40000 MiB free)",
    "  Vulkan2: AMD Radeon Graphics (RADV RENOIR) (32000 MiB, 30000 MiB free)",
]
MACHINES = [
    Case("RAM", 7, "host-ram-short", after(lambda w: w.memory(GIB // 2), model("--devices", "none")),
         ("has 0.5", "MiB: ", "experts")),
    Case("a slice", 7, "host-ram-short", after(
        lambda w: w.control_group(700 * MIB), model("--devices", "none")), ("has 0.7", "user-1000.slice/memory.max")),
    Case("a container of version 1", 7, "host-ram-short", after(
        lambda w: w.control_group(700 * MIB, version=1, path="/docker/abc"), model("--devices", "none")),
        ("has 0.7", "/docker/abc/memory.limit_in_bytes")),
    Case("no /proc", 7, "host-unreadable", after(lambda w: w.file("proc/meminfo", ""), model()), ("meminfo",)),
    Case("a card that is in use", 7, "device-short", after(lambda w: w.cards(BUSY), model()),
         ("CUDA0 is short by", "python3 (pid 4711, 23,000 MiB)")),
    Case("a card that says N/A", 7, "device-free-unknown", after(
        lambda w: (w.cards({**CARD, "total": pynvml.NVMLError_NotSupported()}),
                   w.engine(listed=["  CUDA0: NVIDIA GeForce RTX 3090 (24123 MiB, 99999999 MiB free)"])), model()),
        ("CUDA0",), "fix: --devices=-CUDA0"),
    Case("software and integrated GPUs alone", 7, "devices-too-few", after(
        lambda w: (w.engine(listed=SOFT), w.cards()), slug("devices: {min: 1}\n")),
        ("there are 0", "llvmpipe", "UHD Graphics 770", "RADV RENOIR")),
    Case("fewer cards than asked", 7, "devices-too-few", slug("devices: {min: 2}\n"), ("asks for 2", "there are 1")),
    Case("a MIG slice that is too small", 7, "device-short", after(
        lambda w: (
            w.cards({**CARD, "mig": (1, 1), "slices": [{
                "uuid": "MIG-1", "name": "NVIDIA A100 MIG 1g.5gb", "total": 4864 * MIB, "free": 300 * MIB,
                "processes": []}]}),
            w.engine(listed=["  CUDA0: NVIDIA A100 MIG 1g.5gb (4800 MiB, 300 MiB free)"]),
        ), model()), ("CUDA0 is short by",)),
    Case("mlock past the limit", 7, "memlock-short", after(
        lambda w: w.patch.setattr(surroundings.resource, "getrlimit", lambda _: (64 * 1024, 64 * 1024)),
        model("--load-mode", "mlock", "--residency", "none")), ("64.0 KiB", "1,168 MiB"),
         "fix: sudo prlimit --pid $$ "),
    Case("mlock that a shell can raise", 7, "memlock-short", after(
        lambda w: w.patch.setattr(surroundings.resource, "getrlimit", lambda _: (64 * 1024, -1)),
        model("--load-mode", "mmap+mlock", "--residency", "none")), ("64.0 KiB",), "fix: ulimit -l "),
    Case("records that cannot be written", 7, "state-unwritable", after(
        lambda w: w.patch.setattr(state, "_ROOM_BYTES", 1 << 62), model()), ("free for records",), "fix: df -h "),
    Case("an address of another machine", 7, "address-unusable", model("--host", "192.0.2.1"), ("192.0.2.1:8080",),
         "fix: --host 127.0.0.1"),
    Case("nobody to ask", 7, "needs-yes", lambda w: ["switch", w.slug()], ("my/works runs on port 8100",),
         "fix: --yes"),
    Case("nobody at an RPC endpoint", 7, "rpc-unreachable", slug("rpc: {hosts: ['127.0.0.1:9']}\n"), ("127.0.0.1:9",)),
]  # fmt: skip
CASES = [*USAGE, *OPTIONS, *VARIABLES, *SLUGS, *FILES, *ENGINES, *MACHINES]


@pytest.fixture(scope="module")
def works() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a server of ours that works."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as child:
        yield child
        child.kill()


@pytest.fixture
def world(tmp_path: Path, launcher_home: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, launcher_home, monkeypatch)


def refused(world: World, works: subprocess.Popen[bytes], case: Case) -> str:
    """Try a case; what was printed, folded lines joined again. Everything that no refusal may do is looked at."""
    record = written_record(works)
    words = case.words(world)
    done = CliRunner().invoke(cli.app, words)
    said = " ".join(done.stderr.split())
    assert f"error[{case.reference}]: " in said, (words, said)
    assert done.exit_code == case.code, said
    assert "Traceback" not in done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert FIX.match(last), last
    assert last.startswith(case.fix), last
    command = last.partition(" #")[0]
    assert not re.search(r" \| |, | or |TARGET(?! --rig)", command), f"more than one command: {last}"
    for word in case.says:
        assert word in said, (word, said)
    assert world.calls == [] and not world.mark.exists(), "something was started or stopped"
    assert works.poll() is None
    assert state.records() == (record,)
    return said


@pytest.mark.parametrize("case", CASES, ids=[f"{c.reference}: {c.name}" for c in CASES])
def test_a_bad_input_is_refused(case: Case, world: World, works: subprocess.Popen[bytes]) -> None:
    refused(world, works, case)


def test_there_are_many_and_every_id_is_in_the_docs() -> None:
    assert len(CASES) >= 60
    assert len({(c.name, c.reference) for c in CASES}) == len(CASES)
    codes = listed()
    assert [c.reference for c in CASES if c.code not in {7} | codes.get(c.reference, set())] == []
    assert len({c.reference for c in CASES}) >= 40


def test_the_world_is_good_where_nothing_was_made_wrong(world: World, works: subprocess.Popen[bytes]) -> None:
    """Each refusal is the case's own; and the doubles do see who stops and starts."""
    written_record(works)
    CliRunner().invoke(cli.app, ["switch", world.slug(), "--yes"])
    assert world.calls == ["stop"]
    state.forget(state.records()[0])
    CliRunner().invoke(cli.app, ["switch", world.slug(), "--yes"])
    assert world.calls == ["stop", "start"]
    subprocess.run([world.engine(), "--port", "1"], check=True)
    assert world.mark.exists()


def test_a_taken_port_names_who_holds_it(world: World, works: subprocess.Popen[bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        case = Case("port", 7, "port-busy", model("--port", port), (port, "(pid "), "fix: --port ")
        refused(world, works, case)


def test_a_lock_names_its_holder(world: World, works: subprocess.Popen[bytes]) -> None:
    with state.lock("engine", "switch something"):
        refused(world, works, Case("lock", 10, "locked", slug(), (f"pid {os.getpid()}", "switch something")))


def test_a_port_that_an_rpc_server_needs(world: World, works: subprocess.Popen[bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = f"127.0.0.1:{server.getsockname()[1]}"
        words = slug(f"rpc: {{hosts: ['{at}'], spawn: true}}\n", "--devices", "RPC0")
        refused(
            world, works, Case("rpc", 7, "rpc-port-busy", words, (at, f"(pid {os.getpid()})"), "fix: ${EDITOR:-vi} ")
        )


def test_all_gates_are_listed_at_once_and_force_opens_the_status_alone(
    world: World, works: subprocess.Popen[bytes]
) -> None:
    world.memory(GIB // 2)
    more = "devices: {min: 3}\nextra_args: [--moe-cache]\n"
    both = slug(more, "--devices", "none", status="incubating")
    case = Case("all", 7, "engine-flag-unknown", both)
    said = refused(world, works, case)
    for other in ("devices-too-few", "host-ram-short", "status-needs-force"):
        assert f"also closed: {other}: " in said
    forced = refused(world, works, case._replace(words=lambda w: [*both(w), "--force"]))
    assert "status-needs-force" not in forced
    assert "host-ram-short" in forced


# ------------------------------------------------------------------------- what is said and does not refuse


def notes(world: World, *words: str) -> str:
    """What `preflight` prints of a start that nothing stands in the way of."""
    done = CliRunner().invoke(cli.app, ["preflight", *words])
    assert done.exit_code == 0, done.output
    assert world.calls == []
    return " ".join(done.stdout.split())


def test_who_else_holds_memory_of_a_card_is_named_when_the_plan_fits(world: World) -> None:
    world.cards({**CARD, "free": 20_000 * MIB, "processes": [{"pid": 99, "used": 4_100 * MIB, "name": "/opt/comfy"}]})
    assert "also on it: comfy (pid 99, 4,100 MiB)" in notes(world, world.model())


def test_devices_that_are_left_out_are_named(world: World) -> None:
    arc = "  Vulkan3: Intel(R) Arc(TM) 140V GPU (LNL) (16000 MiB, 16000 MiB free)"
    world.engine(listed=[LISTED, *SOFT, arc])
    said = notes(world, world.model())
    for name in ("llvmpipe", "UHD Graphics 770", "RADV RENOIR", "Arc(TM) 140V"):
        assert re.search(rf"Vulkan\d \([^)]*\(?.*{re.escape(name)}", said), name
    assert "a software renderer" in said
    assert said.count("an integrated GPU, its memory is the host's") == 3


@pytest.mark.parametrize(
    ("kind", "source", "network"),
    [
        ("nfs4", "nas:/models", True), ("cifs", "//nas/models", True), ("fuse.sshfs", "me@nas:", True),
        ("9p", "C:\\134", True), ("ext4", "/dev/sda1", False), ("fuse.ntfs-3g", "/dev/sdb1", False),
    ],
)  # fmt: skip
def test_models_that_come_over_a_wire(world: World, kind: str, source: str, network: bool) -> None:
    world.mounted(kind, source, world.models)
    said = notes(world, world.model(), "--load-mode", "mmap")
    assert (f"lies on {kind} at {world.models}" in said) is network
    assert ("a drive of Windows" in said) is (kind == "9p")
    assert ("a page that was dropped comes that way again" in said) is network


def test_settings_of_the_engine_that_do_not_count_here(world: World) -> None:
    world.patch.setenv("LLAMA_ARG_CPU_MOE", "1")
    config = Path(world.folder / "user/.config/llama.cpp/config.ini")
    config.parent.mkdir(parents=True)
    config.write_text("[*]\nctx-size = 4096\n")
    said = notes(world, world.model())
    assert "LLAMA_ARG_CPU_MOE: set here and not passed on" in said
    assert "unset LLAMA_ARG_CPU_MOE" in said
    assert f"{config} sets ctx-size" in said


def test_cards_are_counted_in_pci_order_whatever_the_environment_says(world: World) -> None:
    other = {**CARD, "uuid": "GPU-bbbb2222-0000-0000-0000-000000000000", "busId": "00000000:02:00.0"}
    world.cards(CARD, other)
    world.engine(listed=[LISTED, LISTED.replace("CUDA0", "CUDA1")])
    world.patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "CUDA_DEVICE_ORDER" not in notes(world, world.model())
    world.patch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    said = notes(world, world.model())
    assert "CUDA0 0000:01:00.0, CUDA1 0000:02:00.0" in said
    assert f"export CUDA_VISIBLE_DEVICES={CARD['uuid']},{other['uuid']}" in said


def test_a_limit_of_a_slice_is_shown_where_the_plan_fits(world: World) -> None:
    world.control_group(40 * GIB)
    said = notes(world, world.model())
    assert "user-1000.slice/memory.max leaves 40.0 GiB; the machine has 64.0" in said
    assert "sudo systemctl set-property --runtime user-1000.slice MemoryMax=infinity" in said


@pytest.mark.parametrize(
    ("library", "says"),
    [
        (b"flash_attn_ext_vecILi128ELi1EL9ggml_type7ELS0_7ELb0E", "K q5_1 with V q5_1: compiled into"),
        (b"flash_attn_ext_vecILi128ELi1EL9ggml_type8ELS0_8ELb0E GGML_CUDA_FA_QUANTS", "converted to f16, slower"),
        (b"nothing", "does not show its own"),
        (None, "does not show its own"),
    ],
)
def test_a_cache_pair_that_the_build_has_or_converts_is_served(world: World, library: bytes | None, says: str) -> None:
    world.engine(library=library)
    assert says in " ".join(CliRunner().invoke(cli.app, ["preflight", world.model(), "--kv", "q5_1"]).stdout.split())
    assert "kv-" not in notes(world, world.model(), "--kv", "q8_0")
    assert "kv-" not in notes(world, world.model(), "--kv", "iq4_nl", "--devices", "none")


def test_who_may_lock_all_is_not_refused(world: World) -> None:
    world.patch.setattr(surroundings.resource, "getrlimit", lambda _: (64 * 1024, 64 * 1024))
    world.file("proc/self/status", f"CapEff:\t{1 << 14:016x}\n")
    assert "memlock" not in notes(world, world.model(), "--load-mode", "mlock")
