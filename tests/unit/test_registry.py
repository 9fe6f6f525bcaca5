from __future__ import annotations

from pathlib import Path

import pytest

from launcher.engines import registry
from launcher.errors import DeviceUnusable, UsageError
from launcher.facts import paths


def engine(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "llama-server"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_use_remembers_and_goes_back(tmp_path: Path) -> None:
    one, two = engine(tmp_path / "a"), engine(tmp_path / "b" / "bin")
    assert registry.chosen() is None
    assert registry.use(str(one)) == one
    assert registry.use(str(two.parent.parent)) == two  # the folder of a build will do
    assert registry.chosen() == two
    assert (paths.config_dir() / "engine").read_text() == f"{two}\n"
    assert registry.use("-") == one
    assert registry.use("-") == two
    registry.use(str(two))
    assert registry.use("-") == one


def test_links_keep_their_name(tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(engine(tmp_path / "b1").parent)
    assert registry.use(str(link / "llama-server")) == link / "llama-server"


def test_forget_keeps_the_way_back(tmp_path: Path) -> None:
    one = engine(tmp_path)
    registry.use(str(one))
    registry.forget()
    registry.forget()
    assert registry.chosen() is None
    assert registry.use("-") == one


@pytest.mark.parametrize("kind", ["nothing", "folder", "not executable"])
def test_what_is_no_engine_is_refused_and_changes_nothing(tmp_path: Path, kind: str) -> None:
    good = engine(tmp_path / "good")
    registry.use(str(good))
    bad = tmp_path / "bad"
    if kind == "folder":
        bad.mkdir()
    elif kind == "not executable":
        bad.write_text("")
    with pytest.raises(DeviceUnusable) as failed:
        registry.use(str(bad))
    assert failed.value.reference == "engine-not-executable"
    assert str(bad) in failed.value.message
    assert registry.chosen() == good


def test_going_back_without_a_past(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as failed:
        registry.use("-")
    assert failed.value.reference == "engine-no-previous"
    registry.use(str(engine(tmp_path)))
    with pytest.raises(UsageError):
        registry.use("-")
    assert registry.chosen() == tmp_path / "llama-server"
