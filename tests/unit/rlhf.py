"""The `rlhf` command inside the test's process: what it writes, how it ends, and that it starts no worker."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import ray

from rlhf_lightning import entry

ERROR = "rlhf: error: "
FIT = ("fit", "--algo", "ppo")
SHORT = ("--data.num_rows", "200", "--data.num_val_rows", "8")


@dataclass(frozen=True, kw_only=True)
class Rlhf:
    """Runs the command in the present directory."""

    monkeypatch: pytest.MonkeyPatch
    capfd: pytest.CaptureFixture[str]

    def run(self, *words: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a command that starts no worker."""
        with self.monkeypatch.context() as patch:
            patch.setattr(ray, "init", refuse_to_start)
            patch.setattr(sys, "argv", ["__main__.py", *words])  # as of `python -m rlhf_lightning`
            patch.setattr(sys, "path", list(sys.path))
            for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # Lightning sets them
                patch.setenv(name, "0")
            self.capfd.readouterr()
            try:
                entry.main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return code, *self.capfd.readouterr()

    def succeeds(self, *words: str) -> str:
        """The standard output of a command that ends with 0."""
        code, out, err = self.run(*words)
        assert code == 0, err
        return out

    def refused(self, *words: str) -> str:
        """The one message with which a command is refused."""
        code, _, err = self.run(*words)
        assert code != 0
        assert "Traceback" not in err, err
        said = [line for line in err.splitlines() if line.startswith(ERROR)]
        assert len(said) == 1, err
        assert err.endswith(said[0] + "\n"), err
        return said[0].removeprefix(ERROR)


def refuse_to_start(*_: object, **__: object) -> None:
    raise AssertionError("the command started Ray")
