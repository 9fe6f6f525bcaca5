"""One request's timings, the depth ladder, least free memory and paired ratios; the server is a real one."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from launcher.measure import compare, ladder, timing, watch
from launcher.serve.server import Client
from launcher.units import MIB

REPLY = {"timings": {"prompt_n": 1000, "prompt_ms": 500.0, "predicted_n": 101, "predicted_ms": 2000.0, "cache_n": 24}}


class Handler(BaseHTTPRequestHandler):
    """Answers completions; prompts longer than `most` drop the connection, as a server that dies does."""

    asked: list[dict[str, Any]]
    most = 1 << 30

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append(body)
        if len(body["prompt"]) > self.most:
            self.connection.close()
            return
        said = json.dumps(REPLY).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def client() -> Iterator[Client]:
    Handler.asked, Handler.most = [], 1 << 30
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Client("127.0.0.1", server.server_port) as made:
        yield made
    server.shutdown()
    server.server_close()


# ------------------------------------------------------------------------------------------- timing


def test_speeds_come_from_counts_and_times_and_the_first_token_is_the_prompts() -> None:
    found = timing.timing(REPLY | {"timings": REPLY["timings"] | {"predicted_per_second": 1.0}}, 2.6)
    assert (found.prompt_n, found.cached_n, found.decode_n) == (1000, 24, 101)
    assert (found.prefill_tps, found.decode_tps) == (2000.0, 50.0)
    assert (found.draft_n, found.draft_accepted) == (None, None)


def test_nothing_computed_has_no_speed() -> None:
    assert timing.timing({}, 1.0).prefill_tps is None
    one = timing.timing({"timings": {"prompt_n": 0, "predicted_n": 1, "predicted_ms": 3.0, "draft_n": 0}}, 1.0)
    assert (one.prefill_tps, one.decode_tps, one.draft_n, one.draft_accepted) == (None, None, 0, 0)


def test_a_salted_prompt_is_always_the_same_for_its_seed_and_never_a_control_token() -> None:
    first, again, other = (timing.salted(500, 32000, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 500
    assert all(1000 <= token < 32000 for token in first)
    assert all(0 <= token < 10 for token in timing.salted(50, 10, 1))


def test_a_request_is_fresh_greedy_and_as_long_as_asked(client: Client) -> None:
    timing.ask(client, [5, 6, 7], 32)
    (body,) = Handler.asked
    assert (body["prompt"], body["n_predict"], body["cache_prompt"], body["ignore_eos"]) == ([5, 6, 7], 32, False, True)


# ------------------------------------------------------------------------------------------- ladder


@pytest.mark.parametrize(
    ("n_ctx", "expected"),
    [
        (131072, (16384, 65536, 120586)), (32768, (10240, 16384, 30146)), (65536, (16384, 32768, 60293)),
        (16384, (8192, 10240, 15073)), (2048, (1024, 1884)), (128, (64,)),
    ],
)  # fmt: skip
def test_depths_leave_room_for_the_answer(n_ctx: int, expected: tuple[int, ...]) -> None:
    assert ladder.depths(n_ctx) == expected


def test_every_rung_is_a_fresh_prompt_with_the_least_memory_of_its_time(client: Client) -> None:
    free = iter(range(2000, 0, -1))
    told: list[tuple[int, int]] = []
    found = ladder.climb(
        client, 4096, 32000, look=lambda: {"GPU-1": next(free) * MIB}, tell=lambda n, of: told.append((n, of))
    )
    assert found.survived
    assert [r.n_tokens for r in found.rungs] == [len(body["prompt"]) for body in Handler.asked] == [2048, 3768]
    assert told == [(2048, 3768), (3768, 3768)]
    assert Handler.asked[0]["prompt"][:50] != Handler.asked[1]["prompt"][:50]
    least = [r.least_free_bytes["GPU-1"] for r in found.rungs]
    assert least[0] > least[1]
    assert found.slope_bytes("GPU-1") == pytest.approx((least[0] - least[1]) / (3768 - 2048) * 1024)
    assert found.slope_bytes("GPU-2") is None


def test_a_server_that_dies_in_a_deep_prompt_ends_the_ladder(client: Client) -> None:
    Handler.most = 2500
    found = ladder.climb(client, 8192, 32000, look=dict)
    assert not found.survived
    assert [bool(r.error) for r in found.rungs] == [True]
    assert not ladder.Ladder(rungs=()).survived


# -------------------------------------------------------------------------------------------- watch


def test_the_least_of_all_looks_is_kept_the_last_one_included() -> None:
    free = iter((9, 5, 7))
    seen: list[int] = []

    def look() -> dict[str, int]:
        seen.append(next(free, 8))
        return {"host": seen[-1]}

    with watch.Watch(look=look, every_s=0.01) as w:
        deadline = time.monotonic() + 5
        while len(seen) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert w.least == {"host": 5}
    assert w.samples == len(seen) >= 3


def test_the_host_is_always_looked_at() -> None:
    assert watch.free_now()["host"] > MIB


# ------------------------------------------------------------------------------------------ compare


def test_what_drifts_between_rounds_cancels() -> None:
    numbers = random.Random(1)
    base = [20 + 5 * k + numbers.random() for k in range(8)]
    found = compare.paired([1.1 * b for b in base], base)
    assert found.median == pytest.approx(1.1)
    assert (found.low, found.high, found.n) == (pytest.approx(1.1), pytest.approx(1.1), 8)


def test_the_interval_holds_the_median_and_is_always_the_same() -> None:
    ours, theirs = [54.1, 55.6, 57.3, 46.9], [47.4, 48.0, 55.9, 56.5]
    found = compare.paired(ours, theirs)
    assert found.low < found.median < found.high
    assert (found.low, found.high) == (pytest.approx(46.9 / 56.5), pytest.approx(55.6 / 48.0))
    assert compare.paired(ours, theirs) == found
    assert str(found).endswith("n = 4")


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_samples_that_do_not_pair_up_are_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="pair up|no ratio"):
        compare.paired(ours, theirs)
