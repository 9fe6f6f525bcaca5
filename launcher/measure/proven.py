"""What was proven on this rig: which launches have read a deep prompt and lived, kept for their next start.

`proven.json` in the state folder. It may be deleted at any time: the next start proves its depth again. A damaged entry
is passed over. A server that comes up can still die in its first deep prompt (see ladder), so READY waits for one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.facts.paths import state_dir
from launcher.measure import ladder, timing
from launcher.serve import state
from launcher.structs import ModelHeader, Plan

SCHEMA = 1
SHARE = 0.9
_SEED = 16411
_ENTRIES = 256
_FILE_MOST = 4 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One launch read a fresh prompt of so many tokens. at: seconds since 1970."""

    n_tokens: int
    at: float


def depth_tokens(plan: Plan) -> int:
    """How deep a prompt has to be: 16,384 tokens, or 90 % of what one stream gets where that is less.

    The engine gives no stream more than the model was trained for, whatever was asked.
    """
    n_ctx = plan.settings.n_ctx_per_stream or 0
    trained = plan.model.n_ctx_train
    return min(ladder.FIRST, int(SHARE * (min(n_ctx, trained) if trained > 0 else n_ctx)))


def prompt(header: ModelHeader, n_tokens: int) -> list[int] | None:
    """Token ids that no cache has seen; None where none are asked or the file does not say how many it knows."""
    found = header.metadata.get(f"{header.arch}.vocab_size")
    n_vocab = found if isinstance(found, int) else header.array_lengths.get("tokenizer.ggml.tokens", 0)
    if n_vocab < 1 or n_tokens < 1:
        return None
    return timing.salted(n_tokens, n_vocab, _SEED)


def key(plan: Plan, *, engine: str, digests: Sequence[str], extra: Sequence[str] = (), driver: str = "") -> str:
    """The name of one launch: target, engine, driver, and all that decides what lies where and what grows there.

    engine   sha256 of the binary
    digests  of the headers of model and drafter: a path does not count
    extra    the slug's extra_args
    Address, threads, and what follows the memory that is free just now (prompt cache, checkpoints, free bytes) are no
    part of it, else no second start would be the same.
    """
    s = plan.settings
    document = [
        SCHEMA, plan.target, engine, driver, list(digests), list(extra), s.n_ctx_per_stream, s.n_parallel,
        s.kv_unified, s.n_batch, s.n_ubatch, s.type_k, s.type_v, s.flash_attn, s.load_mode, s.drafter_type,
        s.draft_n_max, s.drafter_device, s.drafter_layers, s.drafter_experts, list(plan.tensor_split),
        [[str(r.pattern), r.buffer_type] for r in plan.rules],
        [
            [d.device.uuid or d.device.pci or d.device.endpoint or d.rig_name, d.device.total_bytes,
             list(d.resident_layers), d.terms["projector"]]
            for d in plan.devices
        ],
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def path() -> Path:
    """Where it is kept."""
    return state_dir() / "proven.json"


def read() -> dict[str, Proof]:
    """Every proof, the newest last; nothing when there is no file or it cannot be read. Never raises."""
    found = {}
    for name, entry in entries(path()).items():
        n_tokens, at = entry.get("n_tokens"), entry.get("at")
        if isinstance(n_tokens, int) and isinstance(at, int | float) and n_tokens > 0 and at > 0:
            found[name] = Proof(n_tokens=n_tokens, at=float(at))
    return found


def keep(name: str, proof: Proof) -> None:
    """Remember a proof. Raises Refused (state-unwritable). Callers hold the lock of `switch`."""
    known = {k: asdict(v) for k, v in read().items() if k != name}
    write(path(), known | {name: asdict(proof)})


def entries(file: Path) -> dict[str, Mapping[str, object]]:
    """The objects of one `{"schema_version": 1, "entries": {...}}` file; empty when it cannot be read. Never raises."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_FILE_MOST + 1)
        document = json.loads(data) if len(data) <= _FILE_MOST else None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA:
        return {}
    found = document.get("entries")
    return {str(k): v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


def write(file: Path, found: Mapping[str, object]) -> None:
    """Replace such a file, without its oldest entries beyond 256. Raises Refused (state-unwritable)."""
    state.runs_dir()  # and with it the state folder
    state.write_json(file, {"schema_version": SCHEMA, "entries": dict(list(found.items())[-_ENTRIES:])})
