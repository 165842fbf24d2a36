"""What is left out of `make test` for want of a package, and never out of `make test-integrations`."""

from __future__ import annotations

from pathlib import Path

import pytest
from missing import is_left_out, missing_packages


def test_imports_are_found_in_modules_and_in_pages_but_not_in_functions_or_prose() -> None:
    page = "From absent_one import in words.\n```python\n>>> from absent_two.part import it\nimport absent_three\n```\n"
    module = "from __future__ import annotations\nimport json\ndef f():\n    import absent_four\n"
    assert missing_packages(page) == ["absent_three", "absent_two"]
    assert missing_packages(module) == []


def test_a_page_is_left_out_unless_everything_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs/recipes/page.md"
    page.parent.mkdir(parents=True)
    page.write_text("```python\nimport absent_one\n```\n")
    monkeypatch.delenv("THALWEG_INTEGRATIONS", raising=False)
    assert is_left_out(page, tmp_path)
    assert not is_left_out(page, tmp_path / "elsewhere")
    monkeypatch.setenv("THALWEG_INTEGRATIONS", "required")
    with pytest.raises(ModuleNotFoundError, match="imports absent_one, which is not installed"):
        is_left_out(page, tmp_path)
