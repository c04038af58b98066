"""`rlhf calibrate`: what this machine can do, measured in under a minute, as a file for `--hardware`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_lightning.commands.parser import Parser, count
from rlhf_lightning.mapping import hardware
from rlhf_lightning.mapping.calibrate import measure


def run(arguments: Sequence[str]) -> None:
    """Measure, and write the description to a file.

    Raises:
        ValueError: an option is wrong.
        RuntimeError: a process of the measurement failed.
    """
    parser = Parser(prog="rlhf calibrate", description=__doc__, allow_abbrev=False)
    parser.add_argument("out", type=Path, help="file to write, such as machine.yaml")
    parser.add_argument("--name", default="", help="what the reports call the machine; the file's by default")
    parser.add_argument("--devices", type=count, default=0, help="devices that share the machine")
    options: argparse.Namespace = parser.parse_args(arguments)
    found = measure(name=options.name or options.out.stem, devices=options.devices)
    hardware.save(found, options.out)
    sys.stdout.write(f"{options.out.read_text()}\nwritten to {options.out}: give it to --hardware\n")
