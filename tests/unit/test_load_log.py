"""load_log.py against logs that llama-server b11434 wrote with small models."""

from __future__ import annotations

from pathlib import Path

from launcher.facts.load_log import LoadLog, parse_load_log
from launcher.units import MIB

CAPTURED = Path(__file__).parents[1] / "captured"
A, B = "RPC0[127.0.0.1:47311]", "RPC0[127.0.0.1:47312]"


def read(name: str) -> LoadLog:
    return parse_load_log((CAPTURED / name).read_text(encoding="utf-8"))


def mib(**sizes: float) -> dict[str, int]:
    names = {"a": A, "b": B, "cpu": "CPU", "repack": "CPU_REPACK"}
    return {names[key]: round(value * MIB) for key, value in sizes.items()}


def test_model_and_drafter_are_told_apart() -> None:
    log = read("load_two_devices_draft.log")
    assert log.model_bytes == mib(cpu=0.13, a=14.15, b=14.28)
    assert log.kv_bytes == mib(a=8, b=8)
    assert log.compute_bytes == mib(a=30.55, b=26.04, cpu=21.07)
    assert log.draft_model_bytes == mib(cpu=0.13, a=14.15, b=14.28)
    assert log.draft_kv_bytes == mib(a=8, b=8)
    assert log.draft_compute_bytes == mib(a=30.55, b=26.04, cpu=21.07)
    assert (log.speculative, log.pipeline, log.loaded) == (True, True, True)
    assert (log.n_slots, log.n_ctx_slot, log.offloaded) == (1, 4096, (9, 9))


def test_every_cache_and_state_of_a_compressed_model_is_summed() -> None:
    log = read("load_deepseek4.log")
    assert log.kv_bytes.keys() == {A, B}
    for name, parts in (
        (A, (3.00, 1.00, 0.25, 0.25, 0.06, 0.50, 0.02)),
        (B, (3.00, 2.00, 0.50, 0.50, 0.12, 1.00, 0.03)),
    ):
        assert log.kv_bytes[name] == sum(round(part * MIB) for part in parts)
    assert log.draft_kv_bytes == {}


def test_layers_and_overrides_at_verbosity_5() -> None:
    log = read("load_overrides_lv5.log")
    assert log.layer_devices == tuple((i, "RPC0" if i < 4 else "RPC1") for i in range(9))
    assert log.overrides == 12  # three tensors of each of four layers
    assert log.model_bytes == mib(cpu=12.88, a=1.40, b=14.28)
    assert log.compute_bytes == mib(a=8.01, b=12.52, cpu=11.05)  # not the `compute buffer size is` of the end
    assert not log.pipeline


def test_an_mtp_drafter_is_a_second_context_of_the_same_model() -> None:
    log = read("load_mtp.log")
    assert log.model_bytes == mib(cpu=21.66, repack=0.84)
    assert (log.kv_bytes, log.draft_kv_bytes) == (mib(cpu=14), mib(cpu=2))
    assert log.draft_model_bytes == {}
    assert log.draft_compute_bytes == mib(cpu=7.01)  # reserved twice, held once


def test_a_target_that_reserves_again_after_its_drafter_keeps_its_own_buffers() -> None:
    """With the first drafted tokens the target reserves anew, when the drafter's context is the latest one."""
    log = read("load_dspark_reserves_again.log")
    first, last, middle = (f"RPC0[127.0.0.1:{port}]" for port in (47311, 47312, 47313))
    assert log.compute_bytes == {
        name: round(n * MIB) for name, n in ((first, 3.70), (middle, 3.85), (last, 3.74), ("CPU", 0.32))
    }
    assert log.draft_compute_bytes == {last: round(2.41 * MIB), "CPU": round(0.09 * MIB)}
    assert log.draft_model_bytes == {last: round(6.66 * MIB)}


def test_trial_loads_of_the_fit_are_left_out() -> None:
    assert read("load_fit_mtp_lv5.jsonl").kv_bytes == mib(cpu=14)
    with_fit, without = read("load_fit_mtp_lv5.jsonl"), read("load_mtp.log")
    assert with_fit.model_bytes == without.model_bytes
    assert with_fit.draft_kv_bytes == without.draft_kv_bytes
    assert len(with_fit.layer_devices) == 9


def test_the_last_of_several_loads_counts() -> None:
    both = (CAPTURED / "load_two_devices_draft.log").read_text() + (CAPTURED / "load_mtp.log").read_text()
    assert parse_load_log(both) == read("load_mtp.log")


def test_a_load_that_is_under_way_is_not_loaded() -> None:
    lines = (CAPTURED / "load_deepseek4.log").read_text().splitlines()
    cut = next(i for i, line in enumerate(lines) if "sched_reserve" in line)
    log = parse_load_log("\n".join(lines[:cut]))
    assert not log.loaded
    assert log.model_bytes and log.kv_bytes and not log.compute_bytes


def test_nothing_and_noise() -> None:
    assert parse_load_log("") == LoadLog()
    assert parse_load_log('{"type":"log","msg":"cut in the mi\n\x00\xff KV buffer size = 3 MiB\n') == LoadLog()


def test_a_recurrent_state_and_a_cuda_host_buffer() -> None:
    text = """0.00.000.001 I load_tensors: loading model tensors, this can take a while... (load_mode = none)
0.00.000.002 I load_tensors:    CUDA_Host model buffer size = 116354.00 MiB
0.00.000.003 I load_tensors:        CUDA0 model buffer size =  8191.50 MiB
0.00.000.004 I llama_context: constructing llama_context
0.00.000.005 I llama_kv_cache:      CUDA0 KV buffer size =   768.00 MiB
0.00.000.006 I llama_memory_recurrent:      CUDA0 RS buffer size =    75.38 MiB
0.00.000.007 I sched_reserve:  CUDA_Host compute buffer size =   138.02 MiB
"""
    log = parse_load_log(text)
    assert log.model_bytes == {"CUDA_Host": 116354 * MIB, "CUDA0": round(8191.5 * MIB)}
    assert log.kv_bytes == {"CUDA0": 768 * MIB + round(75.38 * MIB)}
    assert log.compute_bytes == {"CUDA_Host": round(138.02 * MIB)}
