from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.errors import ModelUnreadable
from launcher.structs import ModelRef
from launcher.weights.find import find_model, shard_names

SHARD = "M-Q8-00001-of-00003.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "user"
    monkeypatch.setenv("HOME", str(folder))
    for name in ("XDG_CACHE_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def put(path: Path, size: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def hub_file(hub: Path, repo: str, rev: str, name: str, *, main: bool = True) -> Path:
    """A file as the Hugging Face cache keeps it: a link in the snapshot to a blob without a name."""
    root = hub / f"models--{repo.replace('/', '--')}"
    blob = put(root / "blobs" / f"sha-{rev}")
    link = root / "snapshots" / rev / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(blob, link.parent))
    if main:
        put(root / "refs" / "main").write_text(rev)
    return link


def test_the_slugs_own_place_comes_first_in_order_of_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    monkeypatch.setenv("MODEL_DIR", f"{a}{os.pathsep}{b}")
    ref = ModelRef(file="UD-Q8/m.gguf", dir="repo-dir")
    put(a / "elsewhere" / "m.gguf")
    exact = put(b / "repo-dir" / "UD-Q8" / "m.gguf")
    assert find_model(ref) == exact
    first = put(a / "repo-dir" / "UD-Q8" / "m.gguf")
    assert find_model(ref) == first


def test_default_folder_is_models_in_the_home(home: Path) -> None:
    file = put(home / "models" / "d" / "m.gguf")
    assert find_model(ModelRef(file="m.gguf", dir="d")) == file


def test_by_name_three_folders_deep_and_no_deeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "a"))
    put(tmp_path / "a" / "1" / "2" / "3" / "4" / "m.gguf")
    with pytest.raises(ModelUnreadable):
        find_model(ModelRef(file="x/m.gguf"))
    found = put(tmp_path / "a" / "1" / "2" / "3" / "m.gguf")
    assert find_model(ModelRef(file="x/m.gguf")) == found


def test_hub_cache_keeps_link_names_and_prefers_main(home: Path) -> None:
    hub = home / ".cache" / "huggingface" / "hub"
    hub_file(hub, "o/r", "aaa", f"Q8/{SHARD}", main=False)
    new = hub_file(hub, "o/r", "bbb", f"Q8/{SHARD}")
    hub_file(hub, "other/r", "ccc", f"Q8/{SHARD}")
    found = find_model(ModelRef(file=f"Q8/{SHARD}", repo="o/r"))
    assert found == new
    assert found.name == SHARD
    assert found.is_symlink()


def test_hub_cache_where_its_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    link = hub_file(tmp_path / "hf" / "hub", "o/r", "aaa", "m.gguf")
    assert find_model(ModelRef(file="m.gguf")) == link
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf2"))
    with pytest.raises(ModelUnreadable):
        find_model(ModelRef(file="m.gguf"))


def test_a_dangling_link_is_no_file(home: Path) -> None:
    link = hub_file(home / ".cache" / "huggingface" / "hub", "o/r", "aaa", "m.gguf")
    link.resolve().unlink()
    with pytest.raises(ModelUnreadable):
        find_model(ModelRef(file="m.gguf", repo="o/r"))


@pytest.mark.parametrize("root", [".lmstudio/models", ".cache/lm-studio/models"])
def test_lm_studio(home: Path, root: str) -> None:
    file = put(home / root / "publisher" / "repo" / "m.gguf")
    assert find_model(ModelRef(file="m.gguf")) == file


def test_two_models_of_one_name_are_not_guessed_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "a"))
    one, two = put(tmp_path / "a" / "x" / "mmproj-F16.gguf", 3), put(tmp_path / "a" / "y" / "mmproj-F16.gguf", 5)
    with pytest.raises(ModelUnreadable) as failed:
        find_model(ModelRef(file="mmproj-F16.gguf", dir="z"))
    assert failed.value.reference == "model-ambiguous"
    assert str(one) in failed.value.context
    assert str(two) in failed.value.context
    assert find_model(ModelRef(file="mmproj-F16.gguf"), size_bytes=5) == two
    put(two, 3)
    assert find_model(ModelRef(file="mmproj-F16.gguf")) == one  # copies of one file


def test_absolute_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    file = put(tmp_path / "anywhere" / "m.gguf")
    assert find_model(ModelRef(file=str(file))) == file
    assert find_model(ModelRef(file="m.gguf", dir=str(file.parent))) == file


def test_missing_model_says_where_it_looked_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}")
    with pytest.raises(ModelUnreadable) as failed:
        find_model(ModelRef(file="Q8/m.gguf", dir="d", repo="o/r"), target="family/m")
    error = failed.value
    assert (error.reference, error.exit_code) == ("model-missing", 4)
    for place in (tmp_path / "a" / "d" / "Q8" / "m.gguf", tmp_path / "b", ".cache/huggingface/hub", ".lmstudio/models"):
        assert str(place) in error.context
    assert error.fix.startswith("launcher setup family/m ")


def test_a_lost_first_shard_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", str(tmp_path))
    for name in shard_names(SHARD)[1:]:
        put(tmp_path / "d" / name)
    with pytest.raises(ModelUnreadable, match="2 of its 3 shards"):
        find_model(ModelRef(file=SHARD, dir="d"))


def test_shard_names() -> None:
    assert shard_names("q/M-Q8-00002-of-00003.gguf") == tuple(f"q/M-Q8-0000{i}-of-00003.gguf" for i in (1, 2, 3))
    assert shard_names("m.gguf") == ("m.gguf",)
