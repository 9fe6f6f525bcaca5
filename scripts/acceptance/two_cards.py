"""What only two physical cards can show: which card a bundle is really on, and what a bundle on the wrong one costs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from acceptance import facts, model
from acceptance.arms import Bench, Server, free_port
from acceptance.matrix import Run
from launcher.facts import nvml
from launcher.measure import timing
from launcher.workflows.plan import Planned

SPEC = "qwen3-30b-a3b-Q4_K_M"
_TOLERANCE = 16 * 1024**2


def identity(engine: str | None, work: Path, cards: list[str], say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A bundle more on the plan's second device, with the cards in both orders: whose memory grew, and by how much.

    The user's own CUDA_VISIBLE_DEVICES is natural or reversed, CUDA_DEVICE_ORDER unset or FASTEST_FIRST. Two starts of
    each: with one bundle on device 1 and with two, so that only the bundle differs.
    """
    given = {"ctx": "4k", "ubatch": 512, "tensor_split": "9,8", "margin": "1024MiB"}
    run = Run(name="identity", title="", spec=SPEC, n_layer=16, limits_gib=(), given=given)
    bench = Bench(run=run, target=model.make(run, work, say), engine=engine, work=work / "identity", say=say)
    for order in (cards[:2], cards[1::-1]):
        for device_order in ("", "FASTEST_FIRST"):
            env = {"CUDA_VISIBLE_DEVICES": ",".join(order)}
            with facts.exported(env), _device_order(device_order):
                used: list[dict[str, int]] = []
                for pins in ("12", "12,13"):
                    with facts.exported({"OT_G1": pins}), bench.ours() as server:
                        timing.ask(server.client, timing.salted(64, server.n_vocab, 1), 4)
                        used.append(_used(server))
                        planned = server.planned
                assert planned is not None
                meant = planned.plan.devices[1].device.uuid
                bundle = planned.plan.layers[13].bundle_bytes
                grown = {uuid: used[1][uuid] - used[0][uuid] for uuid in used[0]}
                row = {
                    "order": order, "device_order": device_order or "unset", "env": dict(planned.launch.env_set),
                    "meant": meant, "bundle_bytes": bundle, "grown_bytes": grown,
                    "ok": meant == order[1] and all(
                        abs(n - (bundle if uuid == meant else 0)) <= _TOLERANCE for uuid, n in grown.items()
                    ),
                }  # fmt: skip
                say(f"identity: {row['device_order']}, meant {meant}: {grown}, bundle {bundle}: {row['ok']}")
                yield row


def hop(
    engine: str | None, work: Path, rounds: int, limits_gib: tuple[float, ...], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """The same eight bundles on the card that owns their layers, on the other card, and in host memory, in turn."""
    given = {"ctx": "8k", "ubatch": 2048, "batch": 2048, "tensor_split": "25,24", "margin": "1024MiB"}
    run = Run(name="hop", title="", spec=SPEC, limits_gib=limits_gib, given=given)
    bench = Bench(run=run, target=model.make(run, work, say), engine=engine, work=work / "hop", say=say)
    with facts.exported({"OT_G1": "26-33"}):
        owned = bench.planned()
    with facts.exported({"OT_G1": ""}):
        plain = replace(bench, run=replace(run, given={**given, "residency": "none"})).planned()
    lines = {"owner": list(owned.launch.argv), "hop": _moved(owned), "host": list(plain.launch.argv)}
    for n in range(rounds):
        for arm in (*list(lines)[n % 3 :], *list(lines)[: n % 3]):
            port = free_port()
            words = list(lines[arm])
            words[words.index("--port") + 1] = str(port)
            with bench.booted(words, dict(owned.launch.env), port, arm) as server:
                seed = int(time.time())
                timing.ask(server.client, timing.salted(512, server.n_vocab, seed), 16)
                answers = [
                    timing.ask(server.client, timing.salted(64, server.n_vocab, seed + i), 128) for i in (1, 2, 3)
                ]
                prompt = timing.ask(server.client, timing.salted(4096, server.n_vocab, seed + 9), 4)
                row = {
                    "arm": arm, "round": n, "decode_tps": median(t.decode_tps or 0 for t in answers),
                    "prefill_tps": prompt.prefill_tps, "load_s": server.load_s, "used": _used(server),
                }  # fmt: skip
            say(f"hop {arm} {n}: decode {row['decode_tps']:.1f}, prefill {row['prefill_tps']:.0f}")
            yield row


def _moved(planned: Planned) -> list[str]:
    """The command line with the resident bundles on the first device, which does not own their layers."""
    words = list(planned.launch.argv)
    at = words.index("-ot") + 1
    first, second = (d.device.buffer_type for d in planned.plan.devices)
    words[at] = ",".join(
        f"{rule.rpartition('=')[0]}={first}" if rule.endswith(f"={second}") else rule for rule in words[at].split(",")
    )
    return words


def _used(server: Server) -> dict[str, int]:
    """UUID -> how much less is free than before the server."""
    now = {c.uuid: c.free_bytes or 0 for c in nvml.nvml_cards() if c.uuid}
    return {uuid: free - now[uuid] for uuid, free in server.before.items() if uuid in now}


@contextmanager
def _device_order(value: str) -> Iterator[None]:
    if value:
        with facts.exported({"CUDA_DEVICE_ORDER": value}):
            yield
        return
    before = os.environ.pop("CUDA_DEVICE_ORDER", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUDA_DEVICE_ORDER"] = before
