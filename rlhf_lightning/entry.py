"""The console command `rlhf`."""

from __future__ import annotations

import gc


def main() -> None:
    """Run it; the garbage collector would look at all modules again and again while they are imported."""
    gc.disable()
    from rlhf_lightning import cli  # noqa: PLC0415

    gc.enable()
    cli.main()
