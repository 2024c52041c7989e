"""What kernels need of the machine is asked for by name."""

from __future__ import annotations

import sysconfig

import pytest

from pi05_ros.engine.kernels import language


@pytest.fixture(autouse=True)
def a_machine_with_everything(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(language, "AVAILABLE", True)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CC", "a-compiler")


def test_a_machine_with_everything_will_do() -> None:
    language.check_compiler()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="C compiler"):
        language.check_compiler()
    monkeypatch.setattr(language, "AVAILABLE", False)
    language.check_compiler()  # plain operations need none


def test_missing_headers_are_named(tmp_path) -> None:
    (tmp_path / "Python.h").unlink()
    with pytest.raises(ValueError, match="python3-dev"):
        language.check_compiler()
