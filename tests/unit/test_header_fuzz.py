"""Damaged headers of real small models, read and planned: a refusal or a plan, never a traceback, never much memory."""

from __future__ import annotations

import random
import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import LauncherError, ModelUnreadable
from launcher.facts.gguf_header import BLOCKS_MAX, read_header
from launcher.planner import make_plan
from launcher.structs import ModelHeader, Plan, Settings
from tests.builders import BASE_KV, Raw, array, write_gguf
from tests.models import card, rig

TINY = ("tiny-qwen3moe", "tiny-gpt-oss", "tiny-glm4moe", "tiny-deepseek4")
EXTREMES = (0, 1, 7, 255, 65535, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def planned(header: ModelHeader, rng: random.Random | None = None) -> Plan:
    rng = rng or random.Random(0)
    devices = [card(i, rng.choice((900, 3000, 24000))) for i in range(rng.randint(1, 3))]
    settings = Settings(n_ctx_per_stream=4096, n_parallel=rng.choice((1, 4)), type_k=rng.choice(("f16", "q8_0")))
    return make_plan(target="t", header=header, drafter=None, inventory=rig(*devices), settings=settings)


def damaged(rng: random.Random, head: bytes, spots: list[int]) -> bytes:
    """One to four changes near a key of the architecture or a tensor's name: what the planner reads."""
    raw = bytearray(head)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = min(len(raw) - 9, rng.choice(spots) + rng.randrange(70))
        match rng.randrange(4):
            case 0:
                raw[at] ^= 1 << rng.randrange(8)
            case 1:
                raw[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))
            case 2:
                raw[at : at + 4] = struct.pack("<I", rng.randrange(2 ** rng.randrange(1, 33)))
            case 3:
                raw[at : at + 4] = struct.pack("<f", rng.choice((float("nan"), float("inf"), -1.0, 1e30)))
    return bytes(raw)


def ends_of(path: Path, folder: Path, seed: int, n: int) -> Counter[str]:
    """How `n` damaged copies of a model's header end."""
    rng, header = random.Random(seed), read_header(path)
    head = path.read_bytes()[: header.shards[0].header_bytes]
    spots = [m.start() for m in re.finditer(rf"{header.arch}\.|blk\.".encode(), head)]
    ends: Counter[str] = Counter()
    copy = folder / "copy.gguf"
    for _ in range(n):
        with copy.open("wb") as f:
            f.write(damaged(rng, head, spots))
            f.truncate(path.stat().st_size)
        try:
            plan = planned(read_header(copy), rng)
        except LauncherError as e:
            assert e.fix
            ends[e.reference] += 1
        else:
            assert all(value >= 0 for d in plan.devices for value in d.terms.values())
            ends["plan"] += 1
    return ends


def test_a_thousand_damaged_models_are_planned_or_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    ends: Counter[str] = Counter()
    for seed, name in enumerate(TINY):
        ends += ends_of(tiny(name), tmp_path, seed, 250)
    assert ends.total() == 1000
    assert {"plan", "header-damaged"} <= set(ends)
    assert ends["plan"] > 100


WRONG = (-1, 2**32, float("nan"), float("inf"), 0.5, "eight", ("a", "b"), (float("nan"),) * 8, (-1,) * 8)


def as_written(value: object) -> object:
    match value:
        case int() if value < 0 or value >= 2**32:
            return Raw(11, struct.pack("<q", value))
        case tuple():
            return array({int: 5, float: 6, str: 8}[type(value[0])], value)
    return value


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize("key", ["block_count", "attention.head_count_kv", "embedding_length", "expert_count"])
def test_a_count_that_is_none_is_named(tmp_path: Path, key: str, value: object) -> None:
    path = write_gguf(tmp_path / "m.gguf", BASE_KV | {f"llama.{key}": as_written(value)})
    with pytest.raises(ModelUnreadable, match=f"'llama.{key}' is .*, which is no count") as caught:
        read_header(path)
    assert caught.value.reference == "header-damaged"


def test_a_model_of_no_width(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", BASE_KV | {"llama.embedding_length": 0})
    with pytest.raises(ModelUnreadable, match="'llama.embedding_length' is 0"):
        read_header(path)


def test_more_blocks_than_an_engine_loads(tmp_path: Path) -> None:
    assert read_header(write_gguf(tmp_path / "m.gguf", BASE_KV | {"llama.block_count": BLOCKS_MAX})).tensors
    for blocks in (BLOCKS_MAX + 1, 2**31, [1] * 4):
        path = write_gguf(tmp_path / "m.gguf", BASE_KV | {"llama.block_count": blocks})
        with pytest.raises(ModelUnreadable, match=r"it claims .* blocks, more than 512"):
            read_header(path)


def test_memory_stays_under_a_gib_whatever_a_header_claims(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """In a process of its own, which may have 2 GiB of addresses, libraries and all."""
    code = (
        "import resource, sys; from pathlib import Path; from tests.unit.test_header_fuzz import ends_of\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        f"ends_of(Path({str(tiny('tiny-glm4moe'))!r}), Path({str(tmp_path)!r}), 77, 150)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1024**2  # KiB


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_types_that_nobody_knows_change_no_placement(
    tiny: Callable[[str], Path], tmp_path: Path, name: str, share: float
) -> None:
    """The same file with type 999 in the place of some or all types: sizes come from the offsets, warnings from us."""
    rng, known = random.Random(name), read_header(tiny(name))
    raw = bytearray(tiny(name).read_bytes())
    changed = 0
    for t in known.tensors:
        at = raw.index(struct.pack("<Q", len(t.name)) + t.name.encode()) + 8 + len(t.name) + 4 + 8 * len(t.shape)
        assert struct.unpack_from("<I", raw, at)[0] == t.type_id
        if rng.random() < share:
            struct.pack_into("<I", raw, at, 999)
            changed += 1
    (tmp_path / "m.gguf").write_bytes(raw)
    other = read_header(tmp_path / "m.gguf")
    assert changed and sum(t.type_name == "unknown(999)" for t in other.tensors) == changed
    assert other.warnings == (f"needs an engine that knows type 999 ({changed} tensors, sized by their offsets)",)
    for free in ((24000, 24000), (1200, 1150)):
        one, two = (
            make_plan(
                target="t", header=h, drafter=None, inventory=rig(*(card(i, mib) for i, mib in enumerate(free))),
                settings=Settings(n_ctx_per_stream=4096, margin_bytes=0),
            )
            for h in (known, other)
        )  # fmt: skip
        assert (one.tensor_split, one.resident_layers, one.rules) == (two.tensor_split, two.resident_layers, two.rules)
        assert [d.terms["kv"] for d in one.devices] == [d.terms["kv"] for d in two.devices]
        assert set(two.warnings) - set(one.warnings) == set(other.warnings)
        assert replace(two, warnings=()).host.required_bytes == pytest.approx(one.host.required_bytes, abs=64 * 1024)
