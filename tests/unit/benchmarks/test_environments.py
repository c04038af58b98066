"""Scripts of the benchmarks in processes of their own: which of their ends count; and their help."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import environments, mapping, mapping_memory, mapping_search


@pytest.fixture(autouse=True)
def _same_signals() -> Iterator[None]:
    """A benchmark ends its scripts with itself."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def ended(tmp_path: Path, text: str) -> dict[str, object]:
    """What a script says."""
    script = tmp_path / "script.py"
    script.write_text(f"import os\n{text}\n")
    return environments.run(Path(sys.executable), script, [])


def test_a_script_may_abort_once_it_has_said_all(tmp_path: Path) -> None:
    assert ended(tmp_path, "print('{\"seconds\": 1}', flush=True)\nos.abort()") == {"seconds": 1}


@pytest.mark.parametrize("last", ["settings: {'a': 1}", "{'a': 1}"])
def test_one_that_fails_before_has_no_result(tmp_path: Path, last: str) -> None:
    with pytest.raises(RuntimeError, match=r"^script.py ended with 3:"):
        ended(tmp_path, f'print(\'{{"seconds": 1}}\')\nprint("{last}")\nraise SystemExit(3)')


@pytest.mark.parametrize("module", [mapping, mapping_memory, mapping_search])
def test_help_is_shown_instead_of_measuring(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, "--help"])
    monkeypatch.setattr(environments, "write_result", lambda *_: pytest.fail("it measured"))
    with pytest.raises(SystemExit, match=r"^0$"):
        module.main()
    assert str(module.__doc__) in capsys.readouterr().out
