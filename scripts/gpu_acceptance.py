#!/usr/bin/env python3
"""The whole path on a real NVIDIA GPU, beside what llama-server does by itself, for anyone who has one.

    python scripts/gpu_acceptance.py --out results.jsonl [--only NAME,...] [--engine PATH] [--work DIR] [--rounds N]

For each run of the matrix (--list shows it): makes a random-weight model of a real shape, holds the card's memory so
that a smaller card is left, plans, starts, compares plan and card, climbs the depth ladder, and measures our launch and
the others in turn. Every finished piece is a line of --out; what is there already is not done again, so a matrix can be
spread over several visits. Nothing of the machine is changed, and everything started or held ends with the script.

Our launch is `ours`; `fit` is --fit on with load mode none, `stock` llama-server with the model and nothing else,
`ncmoe` --n-cpu-moe at its smallest value that boots, `cpumoe` --cpu-moe. Arms take turns within each round.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from acceptance import arms, facts, model  # noqa: E402
from acceptance import two_cards as two  # noqa: E402
from acceptance.matrix import RUNS, Run  # noqa: E402
from acceptance.results import Results  # noqa: E402
from hold_card import held  # noqa: E402

from launcher.errors import LauncherError  # noqa: E402
from launcher.measure import ladder  # noqa: E402
from launcher.units import GIB, MIB  # noqa: E402


def say(text: str) -> None:
    """One line of progress, with the time since the start."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


STARTED = time.monotonic()
TWO = "two-cards"


def limited(run: Run, cards: list[str], stack: ExitStack) -> dict[str, int]:
    """Hold every card of the run down to its limit; UUID -> free bytes then."""
    free = {}
    for uuid, limit in zip(cards, run.limits_gib, strict=False):
        holding = stack.enter_context(held(uuid, int(limit * GIB)))
        free[holding.uuid] = holding.free_bytes
    return free


def one_run(run: Run, args: argparse.Namespace, out: Results, cards: list[str]) -> None:
    """Every piece of one run that is not in the results yet."""
    work = Path(args.work) / run.name
    target = model.make(run, Path(args.work), say)
    with ExitStack() as stack:
        env = facts.environment(run, cards)
        stack.enter_context(facts.exported(env))
        free = limited(run, cards, stack)
        say(f"{run.name}: free {', '.join(f'{n / MIB:,.0f} MiB' for n in free.values())}")
        bench = arms.Bench(run=run, target=target, engine=args.engine, work=work, say=say)
        if not out.has(run.name, "plan"):
            out.add(run.name, "plan", **bench.time_plans())
        planned = bench.planned()
        if not planned.plan.fits:
            out.add(run.name, "refused", message=str(planned.plan.refusal))
            return
        out.add(run.name, "planned", **facts.plan_facts(planned), free_bytes=free)
        if run.ladder and not out.has(run.name, "ladder"):
            with bench.ours() as server:
                out.add(run.name, "audit", first=True, **server.audit())
                server.learn()
                found = ladder.climb(
                    server.client, planned.plan.settings.n_ctx_per_stream or 0, server.n_vocab, tell=bench.rung
                )
                out.add(run.name, "ladder", survived=found.survived, rungs=[asdict(r) for r in found.rungs],
                        slope_bytes={name: found.slope_bytes(name) for name in free})  # fmt: skip
        for n in range(args.rounds if len(run.arms) > 1 else 1):
            for arm in turned(run.arms, n):
                if out.has(run.name, "sample", arm=arm, round=n) or (arm in run.once and n):
                    continue
                if args.until and time.monotonic() - STARTED > args.until:
                    say(f"{run.name}: out of time before {arm}, round {n}")
                    return
                row = bench.sample(arm)
                say(f"{run.name} {arm} {n}: " + " ".join(f"{k}={v}" for k, v in row.items() if k in arms.SHOWN))
                out.add(run.name, "sample", arm=arm, round=n, **row)


def two_cards(args: argparse.Namespace, out: Results, cards: list[str]) -> None:
    """Which card a bundle is on, and the price of a bundle on the wrong one; needs two cards, whole ones."""
    work = Path(args.work)
    out.add("two-cards", "rig", **facts.rig(cards[:2], args.engine))
    if not out.has("two-cards", "identity"):
        for row in two.identity(args.engine, work, cards, say):
            out.add("two-cards", "identity", **row)
    if not out.has("two-cards", "hop"):
        with facts.exported({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(cards[:2])}):
            for row in two.hop(args.engine, work, min(3, args.rounds), (), say):
                out.add("two-cards", "hop", **row)


def turned(names: tuple[str, ...], n: int) -> Iterator[str]:
    """The arms of round n: each round begins with another."""
    k = n % len(names)
    yield from (*names[k:], *names[:k])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="gpu_acceptance.jsonl")
    parser.add_argument("--only", default="", help="names of runs, comma-separated")
    parser.add_argument("--engine", help="llama-server with CUDA; default: the installed one")
    parser.add_argument("--work", default="/dev/shm/gpu_acceptance", help="folder for models, in memory where it fits")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--until", type=float, default=0, help="begin nothing after so many seconds")
    parser.add_argument("--list", action="store_true", help="show the matrix")
    args = parser.parse_args()
    if args.list:
        for run in RUNS.values():
            print(f"{run.name:20} {run.title}")
        print(f"{TWO:20} two physical cards: whose memory a bundle is in, and what one on the wrong card costs")
        return 0
    names = [n for n in args.only.split(",") if n] or [*RUNS, TWO]
    unknown = [n for n in names if n not in (*RUNS, TWO)]
    if unknown:
        print(f"error: no run is called {unknown[0]}\nfix: --only {','.join((*RUNS, TWO))}", file=sys.stderr)
        return 2
    cards = facts.cards()
    if not cards:
        print("error: the driver shows no NVIDIA card\nfix: nvidia-smi", file=sys.stderr)
        return 5
    out = Results(Path(args.out))
    failed = 0
    with facts.own_folders(Path(args.work)):
        for name in names:
            if name == TWO:
                if len(cards) > 1:
                    two_cards(args, out, cards)
                continue
            run = RUNS[name]
            if run.n_cards > len(cards):
                say(f"{name}: needs {run.n_cards} cards, {len(cards)} here")
                continue
            out.add(name, "rig", **facts.rig(cards[: run.n_cards], args.engine))
            try:
                one_run(run, args, out, cards[: run.n_cards])
            except (LauncherError, OSError) as error:
                failed += 1
                say(f"{name}: {error}")
                out.add(name, "failed", message=str(error), fix=getattr(error, "fix", ""))
    return 7 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
