"""A file is there whole, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from spikecal.files import replacing, write_json


def test_json_is_written_and_nothing_else(tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", {"a": [1, 2]})
    assert json.loads((tmp_path / "results.json").read_text()) == {"a": [1, 2]}
    assert os.listdir(tmp_path) == ["results.json"]


def test_what_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(KeyboardInterrupt):
        _interrupted(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["results.json"]


def _interrupted(path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text("half of")
        raise KeyboardInterrupt


def test_the_disk_has_it_before_the_old_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append("sync") or sync(file))
    monkeypatch.setattr(os, "replace", lambda a, b: done.append("replace") or replace(a, b))
    write_json(tmp_path / "results.json", {})
    assert done == ["sync", "replace"]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write_json(tmp_path / "results.json", {})
    assert (tmp_path / "results.json").stat().st_mode == (tmp_path / "other").stat().st_mode
