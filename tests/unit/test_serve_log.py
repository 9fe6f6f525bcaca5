"""Requests read from a log's lines: those of b11434 as it printed them, and older spellings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.facts.serve_log import last_mark, parse_requests
from launcher.structs import Request

# b11434, `-lv 4`, the eight-expert demo model on two cores, `-b 512`; one request of 3,501 tokens.
REAL = """\
0.00.977.465 I slot get_availabl: id  1 | task -1 |  - skipping, slot is empty
0.00.977.578 I slot launch_slot_: id  1 | task 2 | processing task, is_child = 0
0.00.977.598 I slot   operator(): id  1 | task 2 | new prompt, n_ctx_slot = 4096, n_keep = 0, task.n_tokens = 3501
0.00.977.613 I slot   operator(): id  1 | task 2 | cached n_tokens = 0, memory_seq_rm [0, end)
0.03.416.814 I slot   operator(): id  1 | task 2 | cached n_tokens = 512, memory_seq_rm [512, end)
0.05.768.128 I slot print_timing: id  1 | task 2 | prompt processing, n_tokens =   1024, progress = 0.29, t =   4.79 s / 213.76 tokens per second
0.05.768.145 I slot   operator(): id  1 | task 2 | cached n_tokens = 1024, memory_seq_rm [1024, end)
0.08.458.769 I slot print_timing: id  1 | task 2 | prompt processing, n_tokens =   1536, progress = 0.44, t =   7.48 s / 205.32 tokens per second
0.08.458.794 I slot   operator(): id  1 | task 2 | cached n_tokens = 1536, memory_seq_rm [1536, end)
0.12.377.647 I slot print_timing: id  1 | task 2 | prompt processing, n_tokens =   2048, progress = 0.58, t =  11.40 s / 179.65 tokens per second
"""  # noqa: E501
THE_END = """\
0.22.306.929 I slot print_timing: id  1 | task 2 | prompt eval time =   20980.46 ms /  3501 tokens (    5.99 ms per token,   166.87 tokens per second)
0.22.307.696 I slot print_timing: id  1 | task 2 |        eval time =     348.84 ms /    16 tokens (   23.26 ms per token,    43.00 tokens per second)
0.22.307.718 I slot print_timing: id  1 | task 2 |       total time =   21329.30 ms /  3517 tokens
0.22.308.636 I slot      release: id  1 | task 2 | stop processing: n_tokens = 3516, truncated = 0
0.22.308.675 I srv  update_slots: all slots are idle
"""  # noqa: E501


def test_a_prompt_half_read() -> None:
    (found,) = parse_requests(REAL)
    assert (found.slot, found.task, found.ended) == (1, 2, False)
    assert (found.prompt_tokens, found.read_tokens, found.written_tokens) == (3501, 2048, None)
    # between the last two lines, which is slower than the average that the last one states
    assert found.read_tps == pytest.approx(512 / (12.377647 - 8.458769))
    assert found.left_s == pytest.approx((3501 - 2048) / found.read_tps)


def test_a_request_that_is_done() -> None:
    (found,) = parse_requests(REAL + THE_END)
    wanted = Request(
        slot=1, task=2, prompt_tokens=3501, read_tokens=3501, written_tokens=16, read_tps=166.87, ended=True
    )
    assert found == wanted
    assert found.left_s is None


def test_before_the_first_progress_line_nothing_is_promised() -> None:
    (found,) = parse_requests("".join(REAL.splitlines(keepends=True)[:4]))
    assert (found.prompt_tokens, found.read_tokens, found.left_s) == (3501, 0, None)


def test_the_average_stands_in_where_lines_have_no_clock() -> None:
    bare = "\n".join(line.partition(" I ")[2] for line in REAL.splitlines())
    assert parse_requests(bare) == tuple(replace(r, read_tps=179.65) for r in parse_requests(REAL))


def test_older_spellings() -> None:
    """Lines as builds of 2024 and of autumn 2025 print them."""
    old = """\
slot launch_slot_: id  0 | task 7 | processing task
slot update_slots: id  0 | task 7 | new prompt, n_ctx_slot = 32768, n_keep = 0, n_prompt_tokens = 9000
slot update_slots: id  0 | task 7 | prompt processing progress, n_past = 4096, n_tokens = 2048, progress = 0.455111
slot update_slots: id  1 | task 9 | new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = 500
slot update_slots: id  1 | task 9 | prompt processing progress, n_tokens = 250, batch.n_tokens = 250, progress = 0.5
"""
    first, second = parse_requests(old)
    assert (first.prompt_tokens, first.read_tokens, first.read_tps, first.left_s) == (9000, 4096, None, None)
    assert (second.prompt_tokens, second.read_tokens) == (500, 250)


def test_a_server_that_was_started_again_counts_its_tasks_from_the_start() -> None:
    (found,) = parse_requests(REAL + "launcher: started again (1 of at most 1)\n" + REAL.replace("3501", "99"))
    assert (found.task, found.prompt_tokens) == (2, 99)
    assert parse_requests(REAL + "launcher: started again (1 of at most 1)\n") == ()


def test_the_last_mark_moves_with_requests_alone() -> None:
    assert last_mark(REAL).startswith("0.12.377.647 I slot print_timing: id  1 | task 2 | prompt processing")
    assert last_mark(REAL + "0.30.000.000 I srv  update_slots: all slots are idle\nlauncher: x\n") == last_mark(REAL)
    assert last_mark(REAL + THE_END) != last_mark(REAL)
    assert (last_mark("nothing of that kind"), parse_requests("")) == ("", ())
