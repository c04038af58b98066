"""A checkpoint as what is read from it, which a run that goes on may replace meanwhile.

The files of the next checkpoint have the same names, tensors and shapes, so nothing else tells them apart.
"""

from __future__ import annotations

from pathlib import Path

from rlhf_lightning.spec import CHECKPOINT


class CheckpointSource:
    """The directory of a checkpoint, and what its state was when reading began."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._written = self._found()

    def __str__(self) -> str:
        """Its path."""
        return str(self.directory)

    def check(self) -> None:
        """Refuse what has been read if it may be of two checkpoints."""
        if self._found() != self._written:
            raise ValueError(
                f"checkpoint {self}: its run replaced it while it was read, and what was read may "
                "be of two. Type the command again; or copy the checkpoint, and type the copy."
            )

    def _found(self) -> tuple[int, int, int] | None:
        """What tells a file of the trainer's state from the next; None if there is none."""
        try:
            file = (self.directory / CHECKPOINT).stat()
        except FileNotFoundError:
            return None
        return file.st_dev, file.st_ino, file.st_mtime_ns
