"""Slug files: the shipped ones, every kind of mistake with its place, names, shadowing, the environment."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.errors import SlugInvalid, UsageError
from launcher.facts import slug as slugs
from launcher.facts import yaml_reader
from launcher.facts.slug_values import OWNED_FLAGS, SAMPLING_KEYS
from launcher.structs import Slug, Status
from launcher.units import GIB, MIB

ROOT = Path(__file__).parents[2]
LEAST = "schema: 1\nstatus: production\ntitle: t\nmodel: {file: m.gguf}\n"


def read(tmp_path: Path, text: str) -> Slug:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    return slugs.load_file(path, "family/x")


def problems(tmp_path: Path, text: str | bytes) -> list[str]:
    """`line:col: text` of each problem."""
    path = tmp_path / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SlugInvalid) as e:
        slugs.load_file(path, "family/x")
    assert (e.value.exit_code, e.value.reference) == (3, "slug-invalid")
    lines = e.value.context.splitlines()
    assert f"has {len(lines)} problem" in e.value.message
    assert all(re.match(rf"{re.escape(str(path))}:\d+:\d+: ", line) for line in lines)
    assert e.value.fix == f"${{EDITOR:-vi}} +{lines[0].split(':')[1]} {path}"
    return [line.removeprefix(f"{path}:") for line in lines]


# ---------------------------------------------------------------------------------------- shipped


def test_shipped_names() -> None:
    assert [e.name for e in slugs.names()] == [
        "demo/smol-moe",
        "demo/smol-moe-two-devices",
        "llamacpp/deepseek-flash-dual-iq2",
        "llamacpp/deepseek-flash-dual-q8",
        "llamacpp/deepseek-flash-multi4-q8",
    ]
    assert not any(e.shadows for e in slugs.names())


def test_dual_q8() -> None:
    slug = slugs.load("llamacpp/deepseek-flash-dual-q8")
    assert (slug.name, slug.status, slug.devices_min) == ("llamacpp/deepseek-flash-dual-q8", Status.INCUBATING, 2)
    assert slug.model.repo == "unsloth/DeepSeek-V4-Flash-0731-GGUF"
    assert slug.model.dir == "deepseek-v4-flash-0731-gguf"
    assert slug.model.file == "UD-Q8_K_XL/DeepSeek-V4-Flash-0731-UD-Q8_K_XL-00001-of-00005.gguf"
    assert slug.drafter is not None
    assert slug.drafter.file == "dspark/dspark-DeepSeek-V4-Flash-0731-Q8_0.gguf"
    assert slug.drafter.remote == "dspark-DeepSeek-V4-Flash-0731-Q8_0.gguf"
    assert (slug.drafter.type, slug.drafter.n_max) == ("draft-dspark", 5)
    assert slug.engine.needs == ("spec-type:draft-dspark",)
    s = slug.serve
    assert (s.host, s.port, s.alias, s.n_ctx, s.n_parallel) == ("127.0.0.1", 8030, "deepseek-v4-flash", 204800, 1)
    assert (s.n_batch, s.n_ubatch, s.flash_attn, s.type_k, s.type_v) == (4096, 4096, "on", "f16", "f16")
    assert (s.threads, s.load_mode, s.numa, s.cache_ram_bytes, s.checkpoints) == (None, "none", "auto", None, None)
    p = slug.placement
    assert (p.residency, p.margin_bytes, p.reserve_bytes, p.order) == ("auto", None, {}, None)
    assert slug.sampling == {"temperature": 0.6, "top_p": 0.95}
    assert slug.thinking is True
    assert (slug.extra_args, slug.rpc, slug.mmproj) == ((), None, None)


def test_the_deepseek_slugs_differ_only_in_what_they_must() -> None:
    q8, iq2, multi = (slugs.load(n) for n in ("dual-q8", "dual-iq2", "multi4-q8"))
    assert iq2.model.file == "UD-IQ2_XXS/DeepSeek-V4-Flash-0731-UD-IQ2_XXS-00001-of-00003.gguf"
    assert (iq2.serve.port, multi.serve.port, multi.devices_min) == (8031, 8032, 4)
    same = {"name": q8.name, "path": q8.path, "title": q8.title, "model": q8.model, "devices_min": 2, "serve": q8.serve}
    for other in (iq2, multi):
        assert dataclasses.replace(other, **same) == q8
        assert dataclasses.replace(other.serve, port=q8.serve.port) == q8.serve


def test_demo_slugs() -> None:
    host, two = slugs.load("demo/smol-moe"), slugs.load("demo/smol-moe-two-devices")
    for slug in (host, two):
        assert slug.status is Status.PRODUCTION
        assert (slug.model.dir, slug.model.file) == ("demo", "smol-moe-8x135m-q4_1.gguf")
        assert (slug.serve.n_ctx, slug.serve.n_batch, slug.serve.n_ubatch) == (2048, 512, 256)
        assert (slug.serve.n_parallel, slug.serve.cache_ram_bytes, slug.serve.checkpoints) == (1, 0, 1)
    assert (host.serve.port, host.placement.residency, host.rpc, host.devices_min) == (8040, "none", None, 0)
    assert (two.serve.port, two.placement.residency) == (8041, "auto")
    assert two.rpc is not None
    assert (two.rpc.hosts, two.rpc.spawn) == (("127.0.0.1:18152", "127.0.0.1:18153"), True)
    assert two.rpc.memory_bytes == 190 * MIB


def test_shipped_ports_are_distinct_and_on_loopback() -> None:
    shipped = [slugs.load(e.name) for e in slugs.names()]
    assert len({s.serve.port for s in shipped}) == len(shipped)
    assert {s.serve.host for s in shipped} == {"127.0.0.1"}


# ---------------------------------------------------------------------------------------- reading


def test_every_default(tmp_path: Path) -> None:
    assert read(tmp_path, LEAST) == Slug(
        name="family/x",
        path=str(tmp_path / "x.yaml"),
        title="t",
        status=Status.PRODUCTION,
        model=slugs.ModelRef(file="m.gguf"),
    )


def test_every_key_at_another_value(tmp_path: Path) -> None:
    slug = read(
        tmp_path,
        """
schema: 1
status: deprecated
title: "all of it: yes"
model: {file: q/m-00001-of-00002.gguf, dir: d, repo: some-one/Some.Repo_1}
drafter: {file: d.gguf, type: draft-mtp, n_max: 3}
mmproj: q/mmproj.gguf
engine: {needs: ["flag:--log-jsonl", spec-type:draft-mtp], image: a/b:c, path: ~/llama-server}
devices: {min: 1}
serve:
  host: 0.0.0.0
  port: 65535
  alias: yes
  n_ctx: auto
  n_parallel: 4
  kv_unified: on
  n_batch: 1_024
  n_ubatch: 256
  flash_attn: auto
  type_k: q8_0
  type_v: q4_0
  threads: 12
  load_mode: mmap+mlock
  numa: distribute
  cache_ram: 2GiB
  checkpoints: 8
placement:
  residency: {CUDA0: [12, 0-2], CUDA1: ["40-42"]}
  margin: 1.5GiB
  reserve: {CUDA0: 6GiB}
  order: [CUDA1, CUDA0]
rpc: {hosts: ["10.0.0.5:50052", localhost:50052], memory: 8GiB}
sampling: {temperature: 1e-1, top_k: 40, presence_penalty: -0.5}
thinking: off
chat_template: chatml
api_key_file: ~/.keys
extra_args: [--no-warmup, --override-kv, "a.b=int:1", -tb, "8"]
""",
    )
    assert (slug.status, slug.title, slug.thinking) == (Status.DEPRECATED, "all of it: yes", False)
    assert (slug.model.dir, slug.model.repo, slug.mmproj) == ("d", "some-one/Some.Repo_1", "q/mmproj.gguf")
    assert slug.drafter == slugs.DrafterRef(file="d.gguf", type="draft-mtp", n_max=3)
    assert slug.engine.needs == ("flag:--log-jsonl", "spec-type:draft-mtp")
    assert (slug.engine.image, slug.engine.path) == ("a/b:c", "~/llama-server")
    s = slug.serve
    assert (s.alias, s.n_ctx, s.kv_unified, s.n_batch, s.type_v) == ("yes", None, True, 1024, "q4_0")
    assert (s.threads, s.load_mode, s.numa) == (12, "mmap+mlock", "distribute")
    assert (s.cache_ram_bytes, s.checkpoints, s.flash_attn) == (2 * GIB, 8, "auto")
    assert slug.placement.residency == {"CUDA0": (0, 1, 2, 12), "CUDA1": (40, 41, 42)}
    assert slug.placement.margin_bytes == 1536 * MIB
    assert (slug.placement.reserve_bytes, slug.placement.order) == ({"CUDA0": 6 * GIB}, ("CUDA1", "CUDA0"))
    assert slug.rpc == slugs.RpcRef(hosts=("10.0.0.5:50052", "localhost:50052"), memory_bytes=8 * GIB)
    assert slug.sampling == {"temperature": 0.1, "top_k": 40, "presence_penalty": -0.5}
    assert isinstance(slug.sampling["top_k"], int)
    assert (slug.chat_template, slug.api_key_file) == ("chatml", "~/.keys")
    assert slug.extra_args == ("--no-warmup", "--override-kv", "a.b=int:1", "-tb", "8")


def test_drafter_and_projector_off(tmp_path: Path) -> None:
    slug = read(tmp_path, LEAST + "drafter: off\nmmproj: off\n")
    assert (slug.drafter, slug.mmproj) == (None, None)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + LEAST.replace("\n", "\r\n").encode())
    assert slugs.load_file(path, "x").title == "t"


@pytest.mark.parametrize("loader", [yaml.CBaseLoader, yaml.BaseLoader])  # with and without libyaml
def test_all_problems_at_once(loader: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_reader, "_LOADER", loader)
    found = problems(
        tmp_path,
        "schema: 1\n"
        "status: incubatng\n"
        "title: t\n"
        "model: {file: m.bin, dir: ../up}\n"
        "deviecs: {min: 2}\n"
        "serve:\n"
        "  port: 80300\n"
        "  n_ctx: 200 tokens\n"
        "  n_ctx: 200k\n"
        "  type_k: q9_0\n"
        "  flash_attn: true\n",
    )
    assert found == [
        "2:9: status: 'incubatng' is not one of production, incubating, deprecated, did you mean 'incubating'?",
        "4:15: model.file: 'm.bin' does not end in .gguf",
        "4:27: model.dir: '../up' must lie below the model folder (put the folder into MODEL_DIR, no '..')",
        "5:1: unknown key 'deviecs', did you mean 'devices'?",
        "7:9: serve.port: 80300 is not from 1 to 65,535",
        "8:10: serve.n_ctx: not a token count: '200 tokens' (write 32768, 32k or 1M)",
        "9:3: duplicate key 'n_ctx', first given in line 8",
        "10:11: serve.type_k: 'q9_0' is not one of f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl, "
        "did you mean 'q8_0'?",
        "11:15: serve.flash_attn: 'true' is not one of on, off, auto",
    ]


def test_missing_keys(tmp_path: Path) -> None:
    assert problems(tmp_path, "thinking: true\ndrafter: {n_max: 3}\nrpc: {spawn: true}\n") == [
        "1:1: missing key 'model'",
        "1:1: missing key 'schema'",
        "1:1: missing key 'status'",
        "1:1: missing key 'title'",
        "2:10: missing key 'drafter.file'",
        "2:10: missing key 'drafter.type'",
        "3:6: missing key 'rpc.hosts'",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # forms
        ("serve: [1]\n", "5:8: serve: expected a mapping, as in {name: value}, found a list"),
        ("serve:\n", "5:7: serve: expected a mapping, as in {name: value}, found nothing"),
        ("serve: {port: [1]}\n", "5:15: serve.port: expected one value, found a list"),
        ("serve: {port: }\n", "serve.port: empty; give a value or remove the key"),
        ("chat_template: ~\n", "5:16: chat_template: empty; give a value or remove the key"),
        ("extra_args: --no-warmup\n", "5:13: extra_args: expected a list, as in [a, b], found '--no-warmup'"),
        ("? [a]\n: 1\n", "5:3: a key must be a word"),
        ("title: again\n", "5:1: duplicate key 'title', first given in line 3"),
        # what YAML offers and a slug does not
        ("serve: &s {port: 1}\n", "5:8: anchor &s: anchors are not read"),
        ("serve: &s {port: 1}\nengine: *s\n", "6:9: alias *s: aliases are not read"),
        ("serve: {<<: {port: 1}}\n", "5:9: merge keys are not read"),
        ("thinking: !!bool yes\n", "5:11: tag tag:yaml.org,2002:bool: tags are not read"),
        # values
        ("serve: {port: 8030.0}\n", "expected a whole number, found '8030.0'"),
        ("serve: {port: 0}\n", "0 is not from 1 to 65,535"),
        ("serve: {port: 0x50}\n", "expected a whole number, found '0x50'"),
        ("serve: {port: 99999999999999999999999999}\n", "is not from 1 to 65,535"),
        ("serve: {port: ٨٠}\n", "expected a whole number"),
        ("serve: {n_parallel: 0}\n", "0 is not from 1 to 256"),
        ("serve: {n_ctx: 0}\n", "0 tokens is not from 1 to 2,147,483,647"),
        ("serve: {n_ctx: 3000M}\n", "3000M tokens is not from 1 to 2,147,483,647"),
        ("serve: {n_ctx: " + "9" * 400 + "}\n", "tokens is not from 1 to 2,147,483,647"),
        ("serve: {n_ctx: 24GiB}\n", "serve.n_ctx: not a token count: '24GiB'"),
        ("serve: {cache_ram: 8k tokens}\n", "serve.cache_ram: not a size: '8k tokens'"),
        ("serve: {cache_ram: " + "9" * 400 + "}\n", "is more memory than any machine has"),
        ("serve: {kv_unified: maybe}\n", "serve.kv_unified: expected true or false, found 'maybe'"),
        ("serve: {load_mode: no-mmap}\n", "serve.load_mode: 'no-mmap' is not one of auto, none, mmap"),
        ("serve: {numa: distributed}\n", "did you mean 'distribute'?"),
        ("serve: {numa: 'bind:0,1'}\n", "expected one node, as in bind:0"),
        ("serve: {numa: 'interleave:a'}\n", "expected nodes, as in interleave:0,1"),
        ("serve: {host: 'a b'}\n", "expected an address or a host name"),
        ("serve: {ctx: 32k}\n", "5:9: unknown key 'ctx': the context is n_ctx"),
        ("n_ctx: 32k\n", "5:1: unknown key 'n_ctx': it belongs below serve"),
        ("devices: {max: 2}\n", "5:11: unknown key 'max' (known here: min)"),
        ("engine: {needs: [draft-dspark]}\n", "5:18: engine.needs[0]: expected flag:--name or spec-type:name"),
        ("drafter: {file: d.gguf, type: draft-dspork, n_max: 5}\n", "did you mean 'draft-dspark'?"),
        ("drafter: {file: d.gguf, type: ngram-mod, n_max: 5}\n", "drafter.type: ngram-mod reads no draft model"),
        ("drafter: {file: d.gguf, type: draft-mtp, n_max: 0}\n", "0 is not from 1 to 64"),
        ("sampling: {temp: 1}\n", "unknown key 'temp': write temperature"),
        ("sampling: {temperature: warm}\n", "sampling.temperature: expected a number, found 'warm'"),
        ("sampling: {top_p: nan}\n", "sampling.top_p: nan is not from"),
        ("sampling: {top_k: 40.5}\n", "sampling.top_k: expected a whole number"),
        ("mmproj: /etc/passwd\n", "mmproj: '/etc/passwd' must lie below the model folder"),
        # placement
        ("placement: {residency: all}\n", "placement.residency: 'all' is not one of auto, none"),
        ("placement: {residency: [0, 1]}\n", "placement.residency: expected a mapping"),
        ("placement: {residency: {CUDA0: 0-3}}\n", "residency.CUDA0: expected a list, as in [a, b], found '0-3'"),
        ("placement: {residency: {CUDA0: [9-0]}}\n", "CUDA0[0]: the range 9-0 runs backwards"),
        ("placement: {residency: {CUDA0: [0-99999999]}}\n", "99999999 is not from 0 to 9,999"),
        ("placement: {residency: {CUDA0: [0-3], CUDA1: [3]}}\n", "CUDA1: layer 3 is already on CUDA0"),
        ("placement: {reserve: {CUDA0: lots}}\n", "placement.reserve.CUDA0: not a size: 'lots'"),
        ("placement: {order: CUDA0}\n", "placement.order: 'CUDA0' is not one of auto"),
        ("placement: {order: [CUDA0, CUDA0]}\n", "placement.order: a device is named twice"),
        # rpc
        ("rpc: {hosts: []}\n", "5:14: rpc.hosts: empty; give at least one"),
        ("rpc: {hosts: [localhost]}\n", "rpc.hosts[0]: expected host:port"),
        ('rpc: {hosts: ["[::1]:50052"]}\n', "with a name or an IPv4 address, found '[::1]:50052'"),
        ("rpc: {hosts: [localhost:70000]}\n", "70000 is not from 1 to 65,535"),
        ("rpc: {hosts: [a:1, a:1]}\n", "rpc.hosts: an endpoint is named twice"),
        ("rpc: {hosts: [127.0.0.1:1, 10.0.0.2:1], spawn: true}\n", "10.0.0.2:1 is another machine"),
        ("rpc: {hosts: [127.0.0.1:1], memory: 0}\n", "rpc.memory: 0 leaves nothing to place there"),
        # settings that the engine refuses late or changes silently
        ("serve: {n_batch: 512, n_ubatch: 1024}\n", "5:33: serve.n_ubatch: 1024 is above n_batch 512"),
        ("serve: {n_batch: 256}\n", "5:8: serve.n_ubatch: 512 is above n_batch 256"),
        ("serve: {type_v: q8_0, flash_attn: off}\n", "serve.type_v: q8_0 needs flash_attn: on"),
    ],
)
def test_one_problem(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in "\n".join(problems(tmp_path, LEAST + text))


def test_quantised_keys_need_no_flash_attention(tmp_path: Path) -> None:
    assert read(tmp_path, LEAST + "serve: {type_k: q8_0, flash_attn: off}\n").serve.type_k == "q8_0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1:1: expected a mapping of keys, found nothing"),
        ("# only a comment\n", "1:1: expected a mapping of keys, found nothing"),
        ("- a\n", "1:1: expected a mapping of keys, found something else"),
        ("a: [1,\n", "not YAML: "),
        ("a: b: c\n", "1:5: not YAML: mapping values are not allowed"),
        (LEAST + "---\nb: 1\n", "5:1: not YAML: expected a single document in the stream"),
        ("\tschema: 1\n", "1:1: not YAML: "),
        ("a: *nowhere\n", "1:4: not YAML: found undefined alias"),
        ("a: 1\nb: x\x07y\n", "2:5: control character '\\x07'"),
        (b"a: 1\nb: \xc3\xa4\xff\n", "2:5: not UTF-8 text (byte 0xff)"),
        ("a: " + "[" * 100, "1:23: nested deeper than 20 levels"),
        ("- " * 100, "nested deeper than 20 levels"),
        ("a: " + "[" * 50_000, "nest"),  # libyaml's own limit or ours
        (b"GGUF" + b"\x00" * (2 << 20), "2,097,156 bytes: too large to be written by hand"),
    ],
)
def test_files_that_are_not_slugs(tmp_path: Path, text: str | bytes, expected: str) -> None:
    assert expected in "\n".join(problems(tmp_path, text))


def test_an_alias_to_its_own_parent_ends(tmp_path: Path) -> None:
    assert any("alias *a" in p for p in problems(tmp_path, LEAST + "placement: &a {reserve: *a}\n"))


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none.yaml", "No such file or directory")):
        with pytest.raises(SlugInvalid) as e:
            slugs.load_file(path, "x")
        assert e.value.context == f"{path}:1:1: cannot be read: {why}"


def test_paths_below_the_working_folder_are_shown_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x y.yaml").write_text(LEAST + "deviecs: 1\n")
    with pytest.raises(SlugInvalid) as e:
        slugs.load_file(tmp_path / "x y.yaml", "x")
    assert e.value.context == "x y.yaml:5:1: unknown key 'deviecs', did you mean 'devices'?"
    assert e.value.fix == f"${{EDITOR:-vi}} +5 '{tmp_path}/x y.yaml'"


# ------------------------------------------------------------------------------------- extra_args


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("-m", "model"), ("-c", "serve.n_ctx"), ("--ctx-size", "serve.n_ctx"), ("--ctx_size", "serve.n_ctx"),
        ("-np", "serve.n_parallel"), ("-ngl", "placement.residency"), ("-ts", "placement.order"),
        ("-ot", "placement.residency"), ("--n-cpu-moe", "placement.residency"), ("--cpu-moe", "placement.residency"),
        ("-b", "serve.n_batch"), ("-ub", "serve.n_ubatch"), ("-fa", "serve.flash_attn"), ("-ctk", "serve.type_k"),
        ("-ctv", "serve.type_v"), ("--host", "serve.host"), ("--port", "serve.port"), ("--port=80", "serve.port"),
        ("--alias", "serve.alias"), ("--fit", "placement.margin"), ("--load-mode", "serve.load_mode"),
        ("--no-mmap", "serve.load_mode"), ("-sm", "placement.order"), ("--rpc", "rpc.hosts"), ("-md", "drafter"),
        ("--spec-type", "drafter.type"), ("--spec-draft-n-max", "drafter.n_max"), ("--cache-ram", "serve.cache_ram"),
        ("--ctx-checkpoints", "serve.checkpoints"), ("-dev", "placement.order"), ("-t", "serve.threads"),
        ("--numa", "serve.numa"), ("--top-p", "sampling.top_p"), ("--temp", "sampling.temperature"),
        ("--api-key", "api_key_file"), ("--chat-template", "chat_template"), ("--mmproj", "mmproj"),
    ],
)  # fmt: skip
def test_flags_of_the_planner_are_refused_with_the_key(tmp_path: Path, flag: str, key: str) -> None:
    (found,) = problems(tmp_path, LEAST + f'extra_args: [--no-warmup, "{flag}"]\n')
    shown = flag.partition("=")[0].replace("_", "-")
    assert found.split(" (")[0] == f"5:27: extra_args[1]: {shown} is the launcher's to write: use {key}"


@pytest.mark.parametrize("flag", ["-lv", "--swa-full", "--no-kv-offload", "--log-file", "--list-devices", "--help"])
def test_flags_that_hide_something_are_refused(tmp_path: Path, flag: str) -> None:
    assert problems(tmp_path, LEAST + f"extra_args: [{flag}]\n") == [
        f"5:14: extra_args[0]: {flag} is the launcher's to write"
    ]


# ------------------------------------------------------------------------------------------ names


def own(launcher_home: Path, name: str, text: str = LEAST) -> Path:
    path = launcher_home / "config" / "slugs" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("llamacpp/deepseek-flash-dual-q8", "llamacpp/deepseek-flash-dual-q8"),
        ("deepseek-flash-dual-q8", "llamacpp/deepseek-flash-dual-q8"),
        ("dual-q8", "llamacpp/deepseek-flash-dual-q8"),
        ("dual-q8.yaml", "llamacpp/deepseek-flash-dual-q8"),
        ("iq2", "llamacpp/deepseek-flash-dual-iq2"),
        (" smol-moe ", "demo/smol-moe"),
    ],
)
def test_unique_endings(target: str, name: str) -> None:
    assert slugs.load(target).name == name


def test_an_ambiguous_ending_lists_the_candidates() -> None:
    with pytest.raises(UsageError) as e:
        slugs.load("q8")
    assert (e.value.exit_code, e.value.reference) == (2, "slug-ambiguous")
    assert e.value.message == "'q8' is the end of 2 slugs"
    assert "llamacpp/deepseek-flash-dual-q8     # or llamacpp/deepseek-flash-multi4-q8" in e.value.fix


@pytest.mark.parametrize(
    ("target", "guess"),
    [
        ("llamacpp/deepseek-flash-dual-q4", "did you mean 'llamacpp/deepseek-flash-dual-q8'?"),
        ("smol-mo", "did you mean 'smol-moe'?"),
        ("s", ""),
        ("ash-dual-q8", ""),
        ("", ""),
        ("../demo/smol-moe", ""),
    ],
)
def test_unknown_names(target: str, guess: str) -> None:
    with pytest.raises(UsageError) as e:
        slugs.load(target)
    assert (e.value.exit_code, e.value.reference) == (2, "slug-unknown")
    assert guess in e.value.message
    assert "demo/smol-moe" in e.value.context


def test_own_slugs_shadow_shipped_ones(launcher_home: Path) -> None:
    path = own(launcher_home, "demo/smol-moe")
    own(launcher_home, "mine/big-model")
    own(launcher_home, ".git/hidden", "not a slug")
    entries = {e.name: e for e in slugs.names()}
    assert list(entries) == sorted(entries)
    assert entries["demo/smol-moe"] == slugs.SlugEntry(name="demo/smol-moe", path=path, shadows=True)
    assert [e.name for e in entries.values() if e.shadows] == ["demo/smol-moe"]
    assert "mine/big-model" in entries
    assert ".git/hidden" not in entries
    assert slugs.load("smol-moe").title == "t"
    assert slugs.load("big-model").path == str(launcher_home / "config" / "slugs" / "mine" / "big-model.yaml")


def test_a_broken_slug_hurts_only_itself(launcher_home: Path) -> None:
    own(launcher_home, "mine/broken", "schema: [")
    assert slugs.load("dual-q8").serve.port == 8030
    with pytest.raises(SlugInvalid):
        slugs.load("broken")


def test_an_installed_package_carries_its_slugs(tmp_path: Path) -> None:
    installed = tmp_path / "site"
    (installed / "launcher" / "slugs" / "only").mkdir(parents=True)
    for source in ("__init__.py", "units.py", "errors.py"):
        (installed / "launcher" / source).write_bytes((ROOT / "launcher" / source).read_bytes())
    shutil.copytree(ROOT / "launcher" / "structs", installed / "launcher" / "structs")
    (installed / "launcher" / "facts").mkdir()
    for source in ("__init__", "paths", "slug", "slug_values", "yaml_reader"):
        text = (ROOT / "launcher" / "facts" / f"{source}.py").read_bytes()
        (installed / "launcher" / "facts" / f"{source}.py").write_bytes(text)
    (installed / "launcher" / "slugs" / "only" / "one.yaml").write_text(LEAST)
    (installed / "slugs" / "somebody").mkdir(parents=True)
    (installed / "slugs" / "somebody" / "elses.yaml").write_text(LEAST)
    code = "from launcher.facts import slug; print([e.name for e in slug.names()])"
    done = subprocess.run([sys.executable, "-c", code], cwd=installed, env={"PYTHONPATH": str(installed), "PATH": "",
        "LAUNCHER_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.strip() == "['only/one']"


# ------------------------------------------------------------------------------------ environment


def test_spec_n() -> None:
    slug = slugs.load("dual-q8")
    deeper = slugs.with_environment(slug, {"SPEC_N": "8"})
    assert deeper.drafter is not None
    assert deeper.drafter.n_max == 8
    assert dataclasses.replace(deeper, drafter=slug.drafter) == slug
    assert slugs.with_environment(slug, {"SPEC_N": "0"}) == dataclasses.replace(slug, drafter=None)
    for env in ({}, {"SPEC_N": ""}, {"WEIGHT_KEY": "x"}):
        assert slugs.with_environment(slug, env) is slug
    demo = slugs.load("smol-moe")
    assert slugs.with_environment(demo, {"SPEC_N": "3"}) is demo


@pytest.mark.parametrize("value", ["many", "-1", "2.5", "1000"])
def test_a_wrong_spec_n(value: str) -> None:
    with pytest.raises(UsageError, match=f"SPEC_N={value}") as e:
        slugs.with_environment(slugs.load("dual-q8"), {"SPEC_N": value})
    assert (e.value.exit_code, e.value.reference) == (2, "spec-n-invalid")


@pytest.mark.parametrize(("value", "times"), [("off", 0), ("on-failure", 1), ("on-failure:1", 1), ("on-failure:5", 5)])
def test_restart(tmp_path: Path, value: str, times: int) -> None:
    assert read(tmp_path, LEAST).restarts == 0, "nobody asked for it"
    assert read(tmp_path, f"{LEAST}restart: {value}\n").restarts == times


@pytest.mark.parametrize("value", ["always", "on-failure:0", "on-failure:6", "on-failure:", "2", "unless-stopped"])
def test_restart_has_an_end(tmp_path: Path, value: str) -> None:
    (problem,) = problems(tmp_path, f"{LEAST}restart: {value!r}\n")
    assert "restart: expected off, on-failure or on-failure:N with N from 1 to 5" in problem


# ------------------------------------------------------------------------------------------- docs


def known_keys(tmp_path: Path) -> dict[str, set[str]]:
    """The keys that the reader knows, by section, from what it says about an unknown one."""
    sections = ("engine", "devices", "serve", "placement", "rpc", "sampling", "drafter")
    text = "qqqq: 1\nmodel: {qqqq: 1}\n" + "".join(f"{s}: {{qqqq: 1}}\n" for s in sections)
    found = [p for p in problems(tmp_path, text) if "known here: " in p]
    keys = [set(p.partition("known here: ")[2].rstrip(")").split(", ")) for p in found]
    return dict(zip(("the file itself", "model", *sections), keys, strict=True))


def chapters() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", (ROOT / "docs" / "slugs.md").read_text(encoding="utf-8"), flags=re.M)
    return {title.lower(): body for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def test_every_key_is_documented_in_its_section(tmp_path: Path) -> None:
    documented = {title: set(re.findall(r"`(\w+)`", body)) for title, body in chapters().items()}
    known = known_keys(tmp_path)
    assert known["serve"] >= {"n_ctx", "port"}
    assert known["sampling"] == set(SAMPLING_KEYS)
    for section, keys in known.items():
        assert keys <= documented[section], section


def test_documented_keys_are_known(tmp_path: Path) -> None:
    for section, keys in known_keys(tmp_path).items():
        rows = set(re.findall(r"^\| `(\w+)`", chapters()[section], flags=re.M))
        assert rows <= keys, section


def test_every_owned_flag_names_a_key_that_exists(tmp_path: Path) -> None:
    known = known_keys(tmp_path)
    for flag, key in OWNED_FLAGS.items():
        assert flag.startswith("-")
        section, _, name = key.rpartition(".")
        assert not key or name in known[section or "the file itself"], flag
