"""Which launches are known to survive a deep prompt: what counts as the same launch, and what a damaged file costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.measure import proven
from launcher.measure.proven import Proof
from launcher.structs import Plan
from tests.serve_builders import card, device_plan, plan, settings


def key(p: Plan, **changes: object) -> str:
    given = {"engine": "e" * 64, "digests": ["m"], "driver": "570"} | changes
    return proven.key(p, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_ctx", "trained", "n_tokens"),
    [(204800, 1048576, 16384), (2048, 32768, 1843), (32768, 2048, 1843), (18204, 65536, 16383), (1, 4096, 0)],
)
def test_how_deep(n_ctx: int, trained: int, n_tokens: int) -> None:
    p = plan(card())
    p = replace(p, settings=settings(n_ctx_per_stream=n_ctx), model=replace(p.model, n_ctx_train=trained))
    assert proven.depth_tokens(p) == n_tokens


def test_free_memory_threads_and_checkpoints_are_no_other_launch() -> None:
    p = plan(card())
    other = plan(card(free_bytes=1), settings=settings(threads=7, checkpoints=9, cache_ram_bytes=5))
    assert key(p) == key(other)


def test_whatever_moves_memory_is_another_launch() -> None:
    p = plan(card())
    others = [
        key(p, engine="f" * 64), key(p, digests=["n"]), key(p, driver="580"), key(p, extra=["--no-op-offload"]),
        key(replace(p, target="demo/other")), key(replace(p, settings=settings(n_ubatch=1024))),
        key(replace(p, settings=settings(n_ctx_per_stream=4096))), key(plan(card(uuid="GPU-other"))),
        key(plan(replace(device_plan(card()), resident_layers=(0, 1)))), key(plan(card(), card("CUDA1"))),
    ]  # fmt: skip
    assert len({key(p), *others}) == len(others) + 1


def test_a_proof_is_kept_and_a_damaged_file_costs_only_itself() -> None:
    assert proven.read() == {}
    proven.keep("a", Proof(n_tokens=921, at=5.0))
    proven.keep("b", Proof(n_tokens=16384, at=6.0))
    assert proven.read() == {"a": Proof(n_tokens=921, at=5.0), "b": Proof(n_tokens=16384, at=6.0)}
    proven.write(proven.path(), {"a": {"n_tokens": "many", "at": 5.0}, "b": 3, "c": {"n_tokens": 7, "at": 8.0}})
    assert proven.read() == {"c": Proof(n_tokens=7, at=8.0)}
    proven.path().write_text("{")
    assert proven.read() == {}
