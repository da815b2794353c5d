"""What show_versions prints."""

import importlib.metadata
import platform

from fluxutils_py import versions


def test_each_line_has_a_name_and_a_version(capsys):
    versions.show_versions()
    lines = dict(
        line.split(maxsplit=1)
        for line in capsys.readouterr().out.splitlines()
        if "recurrent" not in line
    )
    assert lines["torch"] == importlib.metadata.version("torch")
    assert lines["Python"] == platform.python_version()


def test_a_package_that_is_missing_is_said_to_be(monkeypatch, capsys):
    monkeypatch.setattr(versions, "PACKAGES", ("numpy", "no-such-package"))
    versions.show_versions()
    assert "no-such-package   not installed" in capsys.readouterr().out


def test_a_version_is_looked_up_once(monkeypatch):
    asked = []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: asked.append(name) or "1.2")
    versions.installed_version.cache_clear()
    assert [versions.installed_version("numpy") for _ in range(3)] == ["1.2"] * 3
    assert asked == ["numpy"]
    versions.installed_version.cache_clear()
