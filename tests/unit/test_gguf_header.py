"""The header reader on files as real ones are, and on files as they arrive damaged."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import ModelUnreadable
from launcher.facts.gguf_header import find_shards, read_header
from tests.builders import (
    BASE_KV,
    Raw,
    T,
    array,
    gguf_header,
    header,
    tensor,
    text,
    u16,
    write_gguf,
    write_shards,
)
from tests.replicas import make_replica

DEEPSEEK = "deepseek-v4-flash-UD-Q8_K_XL"
PARTS = ([T("a.weight")], [T("b.weight"), T("c.weight")], [T("d.weight")])


def refused(path: Path) -> ModelUnreadable:
    """The refusal that reading ends with, which must carry a fix and code 4."""
    with pytest.raises(ModelUnreadable) as caught:
        read_header(path)
    assert caught.value.exit_code == 4
    assert caught.value.fix
    return caught.value


# ------------------------------------------------------------------------------------- what a file says


def test_every_kind_of_value_written_by_another_writer(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    path = tmp_path / "model.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_uint8("x.u8", 200)
    w.add_int8("x.i8", -3)
    w.add_uint16("x.u16", 60000)
    w.add_int16("x.i16", -300)
    w.add_uint32("x.u32", 4_000_000_000)
    w.add_int32("x.i32", -70000)
    w.add_uint64("x.u64", 2**63)
    w.add_int64("x.i64", -(2**40))
    w.add_float32("x.f32", 0.5)
    w.add_float64("x.f64", 1e-300)
    w.add_bool("x.yes", True)
    w.add_string("x.text", "größer ☂")
    w.add_array("x.ints", [-1, 2, 3])
    w.add_array("x.strings", ["a", "", "ü"])
    w.add_array("x.bools", [True, False])
    w.add_array("x.floats", [0.25, -4.0])
    w.add_token_list(["<s>", "a" * 300, "☂", ""])
    w.add_token_scores([0.0, 1.0, 2.0, 3.0])
    w.add_token_merges(["a b", "c d"])
    w.add_bos_token_id(1)
    w.add_chat_template("{{ messages }}")
    w.add_tensor("token_embd.weight", np.zeros((4, 64), dtype=np.float32))
    w.add_tensor("blk.0.attn_norm.weight", np.zeros(3, dtype=np.float32))
    w.add_tensor(
        "blk.0.ffn_up_exps.weight", np.zeros((2, 4, 34 * 2), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    h = read_header(path)
    assert {k: v for k, v in h.metadata.items() if k.startswith("x.")} == {
        "x.u8": 200, "x.i8": -3, "x.u16": 60000, "x.i16": -300, "x.u32": 4_000_000_000, "x.i32": -70000,
        "x.u64": 2**63, "x.i64": -(2**40), "x.f32": 0.5, "x.f64": 1e-300, "x.yes": True, "x.text": "größer ☂",
        "x.ints": (-1, 2, 3), "x.strings": ("a", "", "ü"), "x.bools": (True, False), "x.floats": (0.25, -4.0),
    }  # fmt: skip
    assert h.arch == "llama"
    assert h.metadata["tokenizer.ggml.bos_token_id"] == 1
    assert h.metadata["tokenizer.chat_template"] == "{{ messages }}"
    assert h.array_lengths == {
        "tokenizer.ggml.tokens": 4,
        "tokenizer.ggml.scores": 4,
        "tokenizer.ggml.merges": 2,
    }
    assert [(t.name, t.shape, t.type_name, t.size_bytes, t.offset_bytes) for t in h.tensors] == [
        ("token_embd.weight", (64, 4), "F32", 1024, 0),
        ("blk.0.attn_norm.weight", (3,), "F32", 12, 1024),
        ("blk.0.ffn_up_exps.weight", (64, 4, 2), "Q8_0", 544, 1056),
    ]
    last = h.tensors[-1]
    assert h.shards[0].header_bytes + last.offset_bytes + last.size_bytes == path.stat().st_size == h.file_bytes
    assert h.warnings == ()


@pytest.mark.parametrize("name", [DEEPSEEK, "gpt-oss-20b-MXFP4", "deepseek-v4-flash-dspark-Q8_0"])
def test_replicas_read_back_as_they_were_specified(replica: Callable[[str], Path], name: str) -> None:
    spec = make_replica.load_spec(str(Path(make_replica.__file__).parent / "specs" / f"{name}.yaml"))
    tensors = make_replica.tensors_of(spec)
    h = read_header(replica(name))
    assert [(t.name, t.shape, t.type_name, t.size_bytes) for t in h.tensors] == [
        (t.name, t.shape, t.qtype.name, t.nbytes) for t in tensors
    ]
    for key, value in spec["kv"].items():
        got = h.metadata[f"{h.arch}.{key}"]
        assert got == pytest.approx(tuple(value) if isinstance(value, list) else value), key
    assert h.array_lengths["tokenizer.ggml.tokens"] == spec["vocab"]["n_tokens"]
    assert sum(s.n_tensors for s in h.shards) == len(tensors)
    assert h.warnings == ()


@pytest.mark.parametrize("n", [16, 65, 88, 1024])
def test_arrays_of_the_architecture_are_kept_whole(tmp_path: Path, n: int) -> None:
    heads = [0 if il % 3 else 8 for il in range(n)]
    kv = BASE_KV | {"llama.attention.head_count_kv": heads, "llama.swa": [il % 2 == 0 for il in range(n)]}
    h = read_header(write_gguf(tmp_path / "m.gguf", kv))
    assert h.metadata["llama.attention.head_count_kv"] == tuple(heads)
    assert h.metadata["llama.swa"] == tuple(il % 2 == 0 for il in range(n))
    assert h.array_lengths == {}


def test_a_scalar_stays_a_scalar(tmp_path: Path) -> None:
    h = read_header(write_gguf(tmp_path / "m.gguf", BASE_KV | {"llama.attention.head_count_kv": 8}))
    assert h.metadata["llama.attention.head_count_kv"] == 8


def test_alignment_is_that_of_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", BASE_KV | {"general.alignment": 4096}, alignment=4096)
    h = read_header(path)
    assert h.shards[0].header_bytes == 4096
    assert h.tensors[1].offset_bytes == 4096


def test_a_scalar_tensor_and_one_without_elements(tmp_path: Path) -> None:
    h = read_header(write_gguf(tmp_path / "m.gguf", None, [T("one", ()), T("none", (256, 0)), T("last")]))
    assert [(t.name, t.shape, t.size_bytes) for t in h.tensors] == [
        ("one", (1,), 4),
        ("none", (256, 0), 0),
        ("last", (256, 4), 4096),
    ]
    assert h.warnings == ("1 tensors have no elements, the first is 'none'",)


def test_text_that_is_not_utf8_is_no_reason_to_refuse(tmp_path: Path) -> None:
    h = read_header(write_gguf(tmp_path / "m.gguf", BASE_KV | {"general.description": Raw(8, text(b"caf\xe9"))}))
    assert h.metadata["general.description"] == "caf\N{REPLACEMENT CHARACTER}"
    assert len(h.warnings) == 1
    assert "general.description" in h.warnings[0]


def test_the_digest_is_of_what_the_header_says(tmp_path: Path) -> None:
    vocab = {"tokenizer.ggml.tokens": ["a", "b"]}
    one = read_header(write_gguf(tmp_path / "one.gguf", BASE_KV | vocab))
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "one.gguf", tmp_path / "elsewhere" / "two.gguf")
    assert read_header(tmp_path / "elsewhere" / "two.gguf").digest == one.digest
    others = [
        write_gguf(tmp_path / "kv.gguf", BASE_KV | vocab | {"llama.block_count": 2}),
        write_gguf(tmp_path / "vocab.gguf", BASE_KV | {"tokenizer.ggml.tokens": ["a", "b", "c"]}),
        write_gguf(
            tmp_path / "type.gguf", BASE_KV | vocab, [T("token_embd.weight"), T("blk.0.attn_q.weight", type_id=1)]
        ),
        write_gguf(tmp_path / "name.gguf", BASE_KV | vocab, [T("token_embd.weight"), T("blk.0.attn_k.weight")]),
    ]
    assert len({one.digest, *(read_header(p).digest for p in others)}) == 5


# ---------------------------------------------------------------------------------------- unknown types


def test_unknown_types_are_sized_by_their_offsets(tmp_path: Path) -> None:
    tensors = [
        T("a", (256, 8), 156, 1120),
        T("b", (256, 8), 156, 1120),
        T("norm", (256,), 0),
        T("c", (512, 8), 31, 2048),
    ]
    h = read_header(write_gguf(tmp_path / "m.gguf", None, tensors))
    assert [(t.type_name, t.size_bytes) for t in h.tensors] == [
        ("unknown(156)", 1120),
        ("unknown(156)", 1120),
        ("F32", 1024),
        ("unknown(31)", 2048),
    ]
    assert h.warnings == (
        "needs an engine that knows type 31 (1 tensors, sized by their offsets)",
        "needs an engine that knows type 156 (2 tensors, sized by their offsets)",
    )


def test_a_model_of_types_not_known_has_the_same_sizes(tmp_path: Path) -> None:
    known = [T("a", (256, 8), 12), T("b", (256, 16), 14, None), T("c", (256,), 0), T("d", (512, 2), 8)]
    sizes = [t.size_bytes for t in read_header(write_gguf(tmp_path / "known.gguf", None, known)).tensors]
    other = [T(t.name, t.shape, 999, size) for t, size in zip(known, sizes, strict=True)]
    h = read_header(write_gguf(tmp_path / "other.gguf", None, other))
    assert {t.type_id for t in h.tensors} == {999}
    # Padding to the alignment is all that offsets cannot tell from data.
    assert [t.size_bytes for t in h.tensors] == [-(-size // 32) * 32 for size in sizes]


def test_a_file_of_unknown_types_that_ends_early_is_still_found(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", None, [T("a", (256,), 156, 4096), T("b", (256,), 156, 64)], short_bytes=128)
    assert refused(path).reference == "data-truncated"


# ------------------------------------------------------------------------------------------------ shards


def test_any_shard_or_the_folder_is_the_same_model(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, PARTS, kv=BASE_KV | {"tokenizer.ggml.tokens": ["x"] * 9})
    write_gguf(tmp_path / "mmproj-F16.gguf")
    headers = [read_header(p) for p in (tmp_path, *paths)]
    assert all(h == headers[0] for h in headers)
    h = headers[0]
    assert h.path == str(paths[0])
    assert find_shards(paths[2]) == paths
    assert [(t.name, t.shard) for t in h.tensors] == [
        ("a.weight", 0),
        ("b.weight", 1),
        ("c.weight", 1),
        ("d.weight", 2),
    ]
    assert [s.n_tensors for s in h.shards] == [1, 2, 1]
    assert h.array_lengths == {"tokenizer.ggml.tokens": 9}
    assert h.metadata["split.count"] == 3
    assert h.file_bytes == sum(p.stat().st_size for p in paths)


def test_a_relative_path_and_a_set_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = write_shards(tmp_path, PARTS[:1])
    monkeypatch.chdir(tmp_path)
    assert read_header(path.name).path == str(path)


def test_shards_are_found_by_the_names_of_links(tmp_path: Path) -> None:
    hub = tmp_path / "models--own--er-GGUF"
    snapshot = hub / "snapshots" / "abc123" / "Q8"
    snapshot.mkdir(parents=True)
    (hub / "blobs").mkdir()
    paths = []
    for i, p in enumerate(write_shards(tmp_path / "made", PARTS)):
        blob = p.rename(hub / "blobs" / f"{i}c0ffee")
        paths.append(snapshot / p.name)
        paths[-1].symlink_to(Path("../../../blobs") / blob.name)
    h = read_header(paths[1])
    assert [s.path for s in h.shards] == [str(p) for p in paths]

    e = refused(hub / "blobs" / "1c0ffee")
    assert e.reference == "shard-name"
    assert "is shard 2 of 3" in e.message
    found = subprocess.run(["bash", "-c", e.fix.partition(": ")[2]], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(paths[1])

    (hub / "blobs" / "2c0ffee").unlink()
    e = refused(paths[0])
    assert e.reference == "shards-missing"
    assert e.context == "model-00003-of-00003.gguf (a link to nothing)"
    url = "https://huggingface.co/own/er-GGUF/resolve/abc123/Q8/model-00003-of-00003.gguf"
    assert e.fix == f"launcher setup {url}"


def test_all_missing_shards_are_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [[T(f"t{i}")] for i in range(13)])
    for i in (1, 6, 12):
        paths[i].unlink()
    e = refused(paths[0])
    assert e.reference == "shards-missing"
    assert e.message == f"3 of 13 shards are missing in {tmp_path}"
    assert e.context.splitlines() == [paths[i].name for i in (1, 6, 12)]
    assert "launcher setup" in e.fix
    assert refused(paths[6]).context == e.context  # naming one that is not there finds its siblings
    assert refused(tmp_path).context == e.context


@pytest.mark.parametrize(
    ("splits", "odd"),
    [
        ({1: {"split.tensors.count": 99}}, 2),
        ({2: {"split.count": u16(4)}}, 3),
        ({0: {"split.no": u16(1)}}, 1),
        ({1: {"split.no": None}}, 2),
        ({2: {"split.count": None, "split.tensors.count": None}}, 3),
        ({1: {"split.count": "three"}}, 2),
    ],
)
def test_the_odd_shard_is_named(tmp_path: Path, splits: dict[int, dict[str, object]], odd: int) -> None:
    paths = write_shards(tmp_path, PARTS, splits=splits)
    e = refused(paths[0])
    assert e.reference == "shards-mixed"
    assert paths[odd - 1].name in e.message
    assert len(e.context.splitlines()) == 3


def test_shards_of_two_conversions_are_not_merged(tmp_path: Path) -> None:
    ours = write_shards(tmp_path / "ours", PARTS)
    theirs = write_shards(tmp_path / "theirs", ([T("a.weight"), T("b.weight")], [T("c.weight")], [T("d.weight")]))
    shutil.copy(theirs[1], ours[1])  # all keys agree, tensors b is lost
    e = refused(ours[0])
    assert e.reference == "shards-mixed"
    assert "3 tensors are here, the set has 4" in e.message
    shutil.copy(theirs[0], ours[0])
    shutil.copy(write_shards(tmp_path / "again", PARTS)[1], ours[1])
    e = refused(ours[0])
    assert e.reference == "shards-mixed"
    assert "tensor 'b.weight' is in shard 1 and in shard 2" in e.message


def test_a_renamed_shard(tmp_path: Path) -> None:
    path = write_shards(tmp_path, PARTS)[1].rename(tmp_path / "my model.gguf")
    e = refused(path)
    assert (e.reference, e.message) == ("shard-name", "my model.gguf is shard 2 of 3, but its name does not say so")
    assert e.fix == f"mv '{path}' '{tmp_path / 'my model-00002-of-00003.gguf'}'"
    assert refused(write_gguf(tmp_path / "m-00007-of-00003.gguf")).reference == "shard-name"


@pytest.mark.parametrize(("name", "parts"), [("m.gguf.part1of2", "m.gguf.part1of2 {}/m.gguf.part2of2"),
                                             ("m.gguf-split-a", "m.gguf-split-?")])  # fmt: skip
def test_byte_splits_need_cat(tmp_path: Path, name: str, parts: str) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    second = name.replace("part1", "part2").replace("-split-a", "-split-b")
    (tmp_path / name).write_bytes(whole[:3000])
    (tmp_path / second).write_bytes(whole[3000:])
    for path in (tmp_path / name, tmp_path / second, tmp_path):
        if path == tmp_path:
            (tmp_path / "whole.gguf").unlink()
        e = refused(path)
        assert e.reference == "byte-split"
        assert e.fix == f"cat {tmp_path}/{parts.format(tmp_path)} > {tmp_path}/m.gguf"
    subprocess.run(["bash", "-c", e.fix], check=True)
    assert (tmp_path / "m.gguf").read_bytes() == whole
    assert len(read_header(tmp_path / "m.gguf").tensors) == 2


# ------------------------------------------------------------------------------------------ what is there


def test_nothing_there(tmp_path: Path) -> None:
    e = refused(tmp_path / "none.gguf")
    assert (e.reference, e.message) == ("model-missing", f"{tmp_path}/none.gguf does not exist")
    (tmp_path / "none.gguf.part").write_bytes(b"GGUF")
    assert "none.gguf.part is there (4 B)" in refused(tmp_path / "none.gguf").context
    assert refused(tmp_path / "none.gguf" / "deeper.gguf").reference == "model-missing"
    assert refused(tmp_path / "m-00001-of-00002.gguf").reference == "model-missing"
    (tmp_path / "link.gguf").symlink_to("gone")
    assert refused(tmp_path / "link.gguf").context == "it is a link to gone, which is not there"


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert refused(tmp_path / "m.gguf").reference == "model-empty"


def test_folders_without_one_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "mmproj-model-F16.gguf")
    assert refused(tmp_path).reference == "folder-no-model"
    inner = write_gguf(tmp_path / "UD-Q8_K_XL" / "m.gguf").parent
    e = refused(tmp_path)
    assert (e.context, e.fix) == (f"there is one in {inner}", f"launcher plan {inner}")
    assert read_header(inner).path == str(inner / "m.gguf")
    write_shards(inner, PARTS, stem="other")
    e = refused(inner)
    assert e.reference == "folder-several-models"
    assert e.context.splitlines() == ["m.gguf", "other-00001-of-00003.gguf"]


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refused(tmp_path / "pipe.gguf").message
    assert refused(Path("nul\0.gguf")).reference == "model-unreadable"
    assert refused(tmp_path / ("long" * 100)).reference == "model-unreadable"
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    assert refused(loop).reference == "model-unreadable"


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_without_permission(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.chmod(0)
    assert "Permission denied" in refused(path).message


# ---------------------------------------------------------------------------------- what is not a GGUF


def test_a_web_page(tmp_path: Path) -> None:
    path = tmp_path / "m-Q4_K_M.gguf"
    path.write_text("<!doctype html>\n<html><title>own/er at main</title>")
    e = refused(path)
    assert e.reference == "html-page"
    assert "is an HTML page" in e.message
    assert "/resolve/main/m-Q4_K_M.gguf" in e.fix
    page = "\n<!doctype html><meta property='og:url' content='https://huggingface.co/own/er-GGUF/blob/main/q4/m.gguf'>"
    path.write_text(page)
    assert refused(path).fix == f"curl -fL -o {path} https://huggingface.co/own/er-GGUF/resolve/main/q4/m.gguf"


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 49215492960\n")
    e = refused(path)
    assert (e.reference, e.message) == ("lfs-pointer", "m.gguf is a Git-LFS pointer, not the model of 45.8 GiB")
    assert "lfs pull" in e.fix
    assert "/resolve/" in e.fix


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"\0" * 5000, "only zeros"),
        (b'{"error":"Invalid credentials"}', "a server's answer"),
        (b"tjgg\3\0\0\0", "older than GGUF"),
        (b"PK\3\4", "PK"),
        (b"G", "b'G'"),
        (b"gguf" + b"\0" * 60, "b'gguf'"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, seen: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    e = refused(tmp_path / "m.gguf")
    assert e.reference == "not-gguf"
    assert seen in e.context


@pytest.mark.parametrize("version", [2, 3])
def test_a_big_endian_file(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m-be.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", version, 2, 2) + bytes(100))
    e = refused(path)
    assert e.reference == "big-endian"
    assert f"big-endian file, this host cannot run it (version {version}, bytes swapped)" in e.message


@pytest.mark.parametrize("version", [0, 1, 4, 2**32 - 1])
def test_other_versions(tmp_path: Path, version: int) -> None:
    e = refused(write_gguf(tmp_path / "m.gguf", version=version))
    assert e.reference == "gguf-version"
    assert f"version {version};" in e.message
    assert read_header(write_gguf(tmp_path / "two.gguf", version=2)).arch == "llama"


# ----------------------------------------------------------------------------------------------- damage


def test_a_short_shard_is_named_with_its_bytes(tmp_path: Path) -> None:
    big = (4096, 1024, 256)
    parts = [[T("a")], [T("b", big)], [T("c", big), T("d", big)]]
    paths = write_shards(tmp_path, parts)
    for path, cut in ((paths[1], 4096), (paths[2], 4_402_341_478)):
        os.truncate(path, path.stat().st_size - cut)
    has = paths[2].stat().st_size
    e = refused(paths[0])
    assert e.reference == "data-truncated"
    assert e.message == f"shard 2 is 4.0 KiB short (expected 4.0 GiB, has 4.0 GiB): {paths[1].name}"
    assert e.context == (f"shard 3 is 4.1 GiB short (expected 8.0 GiB, has {has / 2**30:.1f} GiB): {paths[2].name}")


def test_a_short_file_and_the_byte_that_decides(tmp_path: Path) -> None:
    odd = [T("a"), T("b", (3,))]  # 12 bytes, padded to 32: the padding need not be there
    assert len(read_header(write_gguf(tmp_path / "m.gguf", None, odd, short_bytes=20)).tensors) == 2
    e = refused(write_gguf(tmp_path / "m.gguf", None, odd, short_bytes=21))
    assert (e.reference, e.message.partition(" (")[0]) == ("data-truncated", "m.gguf is 1 B short")


def test_every_cut_through_a_header_is_refused(tmp_path: Path) -> None:
    head, _ = gguf_header(BASE_KV | {"tokenizer.ggml.tokens": ["a", "bc"], "llama.list": [1, 2]}, [T("a"), T("b")])
    seen = set()
    for n in range(1, len(head)):
        (tmp_path / "m.gguf").write_bytes(head[:n])
        seen.add(refused(tmp_path / "m.gguf").reference)
    assert seen == {"not-gguf", "header-truncated", "data-truncated"}


HUGE = 2**64 - 1


def _tensor_info(name: bytes, dims: list[int], n_dims: int | None = None, type_id: int = 0, offset: int = 0) -> bytes:
    n = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", n, *dims, type_id, offset)


@pytest.mark.parametrize(
    ("kv", "why"),
    [
        ([("a", 1), ("a", 2)], "key 'a' is there twice"),
        ([("tokenizer.ggml.tokens", ["a"]), ("tokenizer.ggml.tokens", 2)], "is there twice"),
        ([("", 1)], "no name"),
        ([("a", Raw(13, b"\0" * 8))], "type 13, which does not exist"),
        ([("a", Raw(9, struct.pack("<IQ", 9, 1) + b"\0" * 12))], "array of type 9"),
        ([("tokenizer.x", Raw(9, struct.pack("<IQ", 9, 1) + b"\0" * 12))], "array of type 9"),
        ([("a", Raw(9, struct.pack("<IQ", 4, HUGE)))], "claims 18,446,744,073,709,551,615 elements"),
        ([("tokenizer.a", Raw(9, struct.pack("<IQ", 12, HUGE)))], "claims 147,573,952,589,676,412,920 bytes"),
        ([("tokenizer.a", Raw(9, struct.pack("<IQ", 8, HUGE)))], "claims 147,573,952,589,676,412,920 bytes"),
        ([("tokenizer.a", Raw(9, struct.pack("<IQ", 8, 2) + struct.pack("<Q", HUGE)))], "claims"),
        ([("a", Raw(8, struct.pack("<Q", HUGE)))], "claims 18,446,744,073,709,551,615 bytes"),
        ([("k" * 70000, 1)], "claims 70,000 bytes"),
        ([("general.alignment", 24)], "general.alignment is 24"),
        ([("general.alignment", 0)], "general.alignment is 0"),
        ([("general.alignment", u16(32))], "general.alignment' must be a u32, it has type 2"),
        ([("general.alignment", array(4, [32]))], "general.alignment is (32,)"),
    ],
)
def test_keys_that_cannot_be(tmp_path: Path, kv: list[tuple[str, object]], why: str) -> None:
    e = refused(write_gguf(tmp_path / "m.gguf", kv))
    assert e.reference == "header-damaged"
    assert why in e.message


@pytest.mark.parametrize(
    ("infos", "why"),
    [
        ([_tensor_info(b"a", [4] * 5)], "'a' has 5 dimensions, more than 4"),
        ([_tensor_info(b"a", [4], 2**32 - 1)], "4294967295 dimensions"),
        ([_tensor_info(b"a", [2**63])], "has the shape"),
        ([_tensor_info(b"a", [2**32, 2**32])], "has the shape"),
        ([_tensor_info(b"a", [48], type_id=8)], "rows of 48, no multiple of Q8_0's block of 32"),
        ([_tensor_info(b"n" * 64, [8])], "claims 64 bytes"),
        ([_tensor_info(b"\xff\xfe", [8])], "not UTF-8"),
        ([_tensor_info(b"a", [8]), _tensor_info(b"a", [8], offset=32)], "'a' is there twice"),
        ([_tensor_info(b"a", [8], offset=32)], "starts at 32 of the data where 0 is due"),
        ([_tensor_info(b"a", [8]), _tensor_info(b"b", [8], offset=64)], "starts at 64 of the data where 32 is due"),
        ([_tensor_info(b"a", [8], type_id=156), _tensor_info(b"b", [8], offset=33)], "starts at 33"),
        (
            [_tensor_info(b"a", [8], type_id=99), _tensor_info(b"b", [8], type_id=99, offset=64),
             _tensor_info(b"c", [8], offset=32)],
            "starts at 32 of the data where 64 is due",
        ),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be(tmp_path: Path, infos: list[bytes], why: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(infos), 0) + b"".join(infos) + bytes(8192))
    e = refused(path)
    assert e.reference == "header-damaged"
    assert why in e.message


def test_counts_that_cannot_be(tmp_path: Path) -> None:
    assert refused(write_gguf(tmp_path / "m.gguf", n_kv=HUGE)).reference == "header-damaged"
    assert refused(write_gguf(tmp_path / "m.gguf", n_tensors=2**40)).reference == "header-damaged"
    assert refused(write_gguf(tmp_path / "m.gguf", tensors=[])).reference == "no-tensors"


def test_a_hole_that_claims_a_billion_strings_costs_no_time(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", [("tokenizer.a", Raw(9, struct.pack("<IQ", 8, 10**9)))])
    os.truncate(path, 10**11)
    begin = time.perf_counter()
    assert refused(path).reference == "header-damaged"
    assert time.perf_counter() - begin < 0.5


def test_messages_stay_on_one_line_whatever_the_file_says(tmp_path: Path) -> None:
    kv = [("evil\n\x1b[31mkey" + "x" * 500, 1)] * 2
    message = refused(write_gguf(tmp_path / "m.gguf", kv)).message
    assert "\n" not in message
    assert "\x1b" not in message
    assert len(message) < 200


def test_a_thousand_mutated_headers_are_read_or_refused(tmp_path: Path) -> None:
    kv = BASE_KV | {
        "general.alignment": 64,
        "llama.attention.head_count_kv": [0, 8, 8, 0],
        "llama.rope": [0.5, 1.0],
        "general.tags": ["a", "bc"],
        "tokenizer.ggml.tokens": ["a", "bc", ""],
        "tokenizer.ggml.scores": [0.5, 1.0, 2.0],
        "tokenizer.ggml.bos_token_id": 1,
        "split.count": u16(1),
    }
    tensors = [T("a", (256, 4), 8), T("b", (256, 4, 2), 12), T("c", (3,)), T("d", (256,), 156, 128)]
    head, data_bytes = gguf_header(kv, tensors, alignment=64)
    path = tmp_path / "m.gguf"
    rng = random.Random(3)
    extremes = (0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, HUGE)
    ends: dict[str, int] = {}
    for _ in range(1000):
        raw = bytearray(head)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            at = rng.randrange(4, len(raw) - 8)
            match rng.randrange(4):
                case 0:
                    raw[at] ^= 1 << rng.randrange(8)
                case 1:
                    raw[at : at + 8] = struct.pack("<Q", rng.choice(extremes))
                case 2:
                    raw[at : at + 4] = struct.pack("<I", rng.randrange(2**32))
                case 3:
                    del raw[at : at + rng.randrange(1, 16)]
        with path.open("wb") as f:
            f.write(raw[: rng.randrange(len(raw))] if rng.randrange(10) == 0 else raw)
            f.truncate(f.tell() + rng.choice((0, data_bytes, data_bytes, data_bytes + 64)))
        try:
            h = read_header(path)
        except ModelUnreadable as e:
            assert e.fix
            ends[e.reference] = ends.get(e.reference, 0) + 1
        else:
            assert h.shards[0].file_bytes == path.stat().st_size
            ends["read"] = ends.get("read", 0) + 1
    assert {"read", "header-damaged", "header-truncated", "data-truncated"} <= set(ends)
    assert sum(ends.values()) == 1000


# ------------------------------------------------------------------------------------------------- cost


def test_five_shards_of_150_gib_in_under_150_ms(replica: Callable[[str], Path]) -> None:
    path = replica(DEEPSEEK)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        h = read_header(path)
        times.append(time.perf_counter() - begin)
    assert (len(h.shards), len(h.tensors), h.array_lengths["tokenizer.ggml.tokens"]) == (5, 1328, 129280)
    assert min(times) < 0.15, times


READ = "import sys; from launcher.facts.gguf_header import read_header\n"


def test_memory_stays_under_120_mib(replica: Callable[[str], Path]) -> None:
    # VmHWM, not ru_maxrss: that one remembers the parent's size across fork and exec
    code = READ + "read_header(sys.argv[1]); print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    done = subprocess.run([sys.executable, "-c", code, str(replica(DEEPSEEK))], capture_output=True, check=True)
    assert int(done.stdout) < 120 * 1024


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not here")
def test_system_calls_stay_under_100_a_shard(replica: Callable[[str], Path], tmp_path: Path) -> None:
    code = READ + "import os; os.getpriority(0, 0); read_header(sys.argv[1]); os.getpriority(0, 0)"
    trace = tmp_path / "trace"
    command = ["strace", "-o", str(trace), sys.executable, "-c", code, str(replica(DEEPSEEK))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr.lower():
        pytest.skip("this machine does not let us trace")
    assert done.returncode == 0, done.stderr
    lines = trace.read_text().splitlines()
    marks = [i for i, line in enumerate(lines) if line.startswith("getpriority")]
    assert len(marks) == 2
    between = lines[marks[0] + 1 : marks[1]]
    assert sum(line.startswith("openat") for line in between) == 5
    assert len(between) < 5 * 100, len(between)


# --------------------------------------------------------------------------------- headers made in memory


def test_made_headers_look_like_read_ones(tmp_path: Path) -> None:
    made = header([tensor("a", (256, 4), "F32"), tensor("b", (3,), "F32"), tensor("c", (256, 4), "Q4_K")], arch="llama")
    read = read_header(write_gguf(tmp_path / "m.gguf", None, [T("a"), T("b", (3,)), T("c", (256, 4), 12)]))
    assert made.tensors == read.tensors
    assert made.arch == read.arch
    two = header([tensor("a"), tensor("b", shard=1), tensor("c", shard=1)])
    assert [s.n_tensors for s in two.shards] == [1, 2]
    assert [t.offset_bytes for t in two.tensors] == [0, 0, 131072]
    assert Path(two.path).name == "model-00001-of-00002.gguf"
