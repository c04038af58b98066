"""Systems that measure in turns, each in a process of its own: while one works, the others wait for a line.

A script runs its measurement as `for turn in turns(n)`, starts before the first turn and ends after the last,
and prints one JSON object. `in_turns` runs several such scripts together; by hand, press return for a turn.
"""

import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import environments

_READY = "ready for a turn"


def turns(count: int) -> Iterator[int]:
    """The numbers of a script's turns, each when it comes; what follows the last one has a turn, too."""
    for number in range(count + 1):
        print(_READY, flush=True)
        sys.stdin.readline()
        if number < count:
            yield number


def in_turns(commands: Mapping[str, tuple[Path, Path]]) -> dict[str, dict[str, object]]:
    """Run scripts by name, each turn of all of them before the next, and return the JSON objects they print.

    Args:
        commands: interpreter and script.

    Raises:
        RuntimeError: a script fails or ends without a JSON object.
    """
    with ExitStack() as stack:
        players = {name: stack.enter_context(_Player(*command)) for name, command in commands.items()}
        waiting = {name: player for name, player in players.items() if player.ready()}
        while waiting:
            waiting = {name: player for name, player in waiting.items() if player.takes_a_turn()}
        return {name: player.result() for name, player in players.items()}


class _Player:
    """A script in a process of its own."""

    def __init__(self, interpreter: Path, script: Path) -> None:
        self._script = script
        self._command = [str(interpreter), str(script)]
        self._output: list[str] = []

    def __enter__(self) -> "_Player":
        self._errors: IO[str] = tempfile.TemporaryFile("w+")
        self._process = environments.started(self._command, errors=self._errors)
        self._alarm = threading.Timer(1800, self._process.kill)
        self._alarm.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._alarm.cancel()
        environments.end(self._process)
        self._errors.close()

    def ready(self) -> bool:
        """Wait until it is ready for a turn; False where it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == _READY:
                return True
            self._output.append(line)
        return False

    def takes_a_turn(self) -> bool:
        """Give it a turn, and wait for its end; False where that was the last."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.ready()

    def result(self) -> dict[str, object]:
        """What it printed."""
        if self._process.wait() != 0:
            self._errors.seek(0)
            raise RuntimeError(
                f"{self._script.name} ended with {self._process.returncode}:\n{self._errors.read()[-4000:]}"
            )
        return environments.last_object(self._script.name, "".join(self._output))
