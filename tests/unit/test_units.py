"""Bytes and tokens as people write them, and the size of every tensor type."""

from __future__ import annotations

import pytest

from launcher import units

# gguf counts q8_1 with two 32-bit floats; the engine's block_q8_1 holds two halves (ggml-common.h). No file uses it.
GGUF_DIFFERS = {9: (32, 40)}
NEWER_THAN_GGUF = {42: ("Q2_0", 64, 18)}  # in llama.cpp b11434: block_q2_0 is a half and 64 / 4 bytes


def test_type_sizes_are_those_of_gguf() -> None:
    constants = pytest.importorskip("gguf.constants")
    theirs = {int(t): (t.name, *size) for t, size in constants.GGML_QUANT_SIZES.items()}
    for type_id, (block, block_bytes) in GGUF_DIFFERS.items():
        assert theirs[type_id][1:] == (block, block_bytes)
        del theirs[type_id]
    assert {i: t for i, t in units.GGML_TYPES.items() if i in theirs} == {
        i: t for i, t in theirs.items() if i in units.GGML_TYPES
    }
    ours_alone = {i: t for i, t in units.GGML_TYPES.items() if i not in theirs and i not in GGUF_DIFFERS}
    assert ours_alone.items() <= NEWER_THAN_GGUF.items()
    # A type that only a newer gguf knows is sized by its offsets until we list it; none below our highest is left out.
    assert {i for i in theirs if i <= max(units.GGML_TYPES)} <= set(units.GGML_TYPES)
    assert units.GGML_TYPES[9] == ("Q8_1", 32, 36)


def test_cache_types_have_the_sizes_of_tensor_types() -> None:
    by_name = {name: size for name, *size in units.GGML_TYPES.values()}
    for name, size in units.KV_TYPES.items():
        assert tuple(by_name[name.upper()]) == size


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("24GiB", 24 * 2**30),
        ("24125MiB", 24125 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("24 GB", 24 * 10**9),
        ("24G", 24 * 2**30),
        ("512m", 2**29),
        ("1KB", 1000),
        ("1 kib", 1024),
        ("2TiB", 2**41),
        ("1024", 1024),
        ("7 B", 7),
        ("0", 0),
    ],
)
def test_sizes(text: str, n: int) -> None:
    assert units.parse_size(text) == n


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "24 gigs", "1,5GiB", "1e9", "24GiB 3", "٣GiB", "nan", "0x10"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        units.parse_size(text)


@pytest.mark.parametrize(
    ("text", "n"),
    [("200k", 204_800), ("1M", 1_048_576), ("1m", 1_048_576), ("32768", 32768), ("1.5K", 1536), (" 8k ", 8192)],
)
def test_tokens(text: str, n: int) -> None:
    assert units.parse_tokens(text) == n


@pytest.mark.parametrize("text", ["", "k", "200kb", "-8k", "8 192", "1G", "auto"])
def test_tokens_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="not a token count"):
        units.parse_tokens(text)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (512 * 2**20, "512.0 MiB"),
        (4_402_341_478, "4.1 GiB"),
        (-3 * 2**30, "-3.0 GiB"),
        (2 * 2**40, "2.0 TiB"),
        (5000 * 2**40, "5,000.0 TiB"),
    ],
)
def test_human(n: int, text: str) -> None:
    assert units.human(n) == text


def test_plain_numbers() -> None:
    assert units.mib(3264 * 2**20) == "3,264"
    assert units.mib(2**20 // 2 - 1) == "0"
    assert units.gib(161_869_999_999, 1) == "150.8"
    assert units.gib(1536 * 2**30, 0) == "1,536"
    assert units.tokens(204_800) == "204,800"


@pytest.mark.parametrize(("n", "multiple", "padded"), [(0, 32, 0), (1, 32, 32), (32, 32, 32), (33, 32, 64), (7, 1, 7)])
def test_pad(n: int, multiple: int, padded: int) -> None:
    assert units.pad(n, multiple) == padded
