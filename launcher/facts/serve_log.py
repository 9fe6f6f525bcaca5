"""What a running engine's log says of its requests: pure, from the text of its end.

Lines of b11434 at `-lv 4`, and the older spellings beside them:

    0.00.977.598 I slot operator(): id  1 | task 2 | new prompt, n_ctx_slot = 4096, n_keep = 0, task.n_tokens = 3501
    0.05.768.128 I slot print_timing: id  1 | task 2 | prompt processing, n_tokens = 1024, progress = 0.29, t = 4.79 s
                                                       / 213.76 tokens per second
    0.22.308.636 I slot release: id  1 | task 2 | stop processing: n_tokens = 3516, truncated = 0

The length of a prompt is nowhere else: `n_prompt_tokens` of /slots is what was handed to the engine so far (seen on
b11434: it runs one batch ahead of `n_prompt_tokens_processed`, from 512 to 3501).
"""

from __future__ import annotations

import re
from dataclasses import replace

from launcher.structs import Request

_LINE = re.compile(r"^(?:(\d+)\.(\d\d)\.(\d{3})\.(\d{3}) )?.*?\bid\s+(\d+) \| task (\d+) \| (.*)$", re.M)
_TOTAL = re.compile(r"new prompt, .*?(?:task\.n_tokens|n_prompt_tokens) = (\d+)")
_READ = re.compile(
    r"prompt processing(?: progress)?, (?:n_past = (\d+), )?n_tokens =\s*(\d+),.*?progress = [\d.]+"
    r"(?:, t =\s*[\d.]+ s / ([\d.]+) tokens per second)?"
)
_CACHED = re.compile(r"\bn_(?:tokens|past) = (\d+), memory_seq_rm")
_PROMPT = re.compile(r"prompt eval time =\s*[\d.]+ ms /\s*(\d+) tokens \(.*?([\d.]+) tokens per second")
_WRITTEN = re.compile(r"^\s*eval time =\s*[\d.]+ ms /\s*(\d+) tokens")
# Our keeper's line between two servers that share a log: tasks are counted from 0 again.
STARTED_AGAIN = "launcher: started again"
# A rate over two lines that are nearer than this would be noise.
_LEAST_S = 0.5


def parse_requests(log: str) -> tuple[Request, ...]:
    """Every request of the last server that the text names, in the order in which they came; what is not said is None.

    The rate is that of a prompt's last batches where lines carry the engine's clock, else the average that one states.
    """
    found: dict[tuple[int, int], Request] = {}
    clock: dict[tuple[int, int], tuple[float, int]] = {}
    for match in _LINE.finditer(log.rpartition(STARTED_AGAIN)[2]):
        key = (int(match[5]), int(match[6]))
        request = found.get(key) or Request(slot=key[0], task=key[1])
        text, at_s = match[7], _seconds(match)
        if total := _TOTAL.search(text):
            request = replace(request, prompt_tokens=int(total[1]))
        elif batch := _READ.search(text) or _CACHED.search(text):
            read = int(next(n for n in batch.groups() if n))
            average = float(batch[3]) if batch.re is _READ and batch[3] else None
            rate = _rate(clock.get(key), at_s, read)
            known = average or request.read_tps if at_s is None else rate or request.read_tps or average
            request = replace(request, read_tokens=read, read_tps=known)
            if at_s is not None and (rate or key not in clock):
                clock[key] = (at_s, read)
        elif prompt := _PROMPT.search(text):
            request = replace(request, read_tokens=request.prompt_tokens or int(prompt[1]), read_tps=float(prompt[2]))
        elif written := _WRITTEN.search(text):
            request = replace(request, written_tokens=int(written[1]))
        elif "stop processing" in text:
            request = replace(request, ended=True)
        found[key] = request
    return tuple(found.values())


def last_mark(log: str) -> str:
    """The last line about a request, empty when there is none: another one means that something went on."""
    mark = ""
    for match in _LINE.finditer(log):
        mark = match[0]
    return mark


def _seconds(match: re.Match[str]) -> float | None:
    """Seconds since the engine's start of `M.SS.mmm.uuu`, None on a line without."""
    if match[1] is None:
        return None
    return int(match[1]) * 60 + int(match[2]) + int(match[3]) / 1e3 + int(match[4]) / 1e6


def _rate(before: tuple[float, int] | None, at_s: float | None, read: int) -> float | None:
    if before is None or at_s is None or at_s - before[0] < _LEAST_S or read <= before[1]:
        return None
    return (read - before[1]) / (at_s - before[0])
