"""`rlhf calibrate`: what a machine can do, as a file for `--hardware`.

rlhf calibrate machine.yaml              measures this machine, in under a minute
rlhf calibrate better.yaml --from RUN    fits the hardware of a run's predictions to what the run measured
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_lightning.commands.parser import Parser, count
from rlhf_lightning.mapping import hardware, measured
from rlhf_lightning.mapping.calibrate import measure, refine_by_run
from rlhf_lightning.mapping.hardware import Hardware
from rlhf_lightning.stores import check_local


def run(arguments: Sequence[str]) -> None:
    """Measure this machine, or read what a run measured, and write the description to a file.

    Raises:
        ValueError: an option is wrong, the run has no measurements, or a process of the measurement failed.
    """
    parser = Parser("calibrate", __doc__)
    add = parser.add_argument
    add("out", help="file to write, such as machine.yaml")
    add("--name", default="", help="what the reports call the machine; the file's by default")
    add("--devices", type=count, default=0, help="devices that share the machine")
    add(
        "--from",
        dest="run",
        type=Path,
        metavar="RUN",
        help="directory of a run with --trainer.callbacks+=PredictedTimes, whose measurements are taken",
    )
    options: argparse.Namespace = parser.parse_args(arguments)
    check_local(options.out, option="out")
    out = Path(options.out)
    name = options.name or out.stem
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.is_dir():
        raise ValueError(f"{out}: is a directory. Type the file to write, such as machine.yaml.")
    if options.run is None:
        found = _measured(name, options.devices)
    elif options.devices:
        raise ValueError(
            f"--devices {options.devices} with --from {options.run}: devices were those of the run. Leave "
            "--devices out."
        )
    else:
        found = _refined(name, options.run)
    hardware.save(found, out)
    sys.stdout.write(
        f"{out.read_text()}\nwritten to {out}: give it to --hardware\n"
        f"the network between nodes was not measured: inter_bandwidth is {found.inter_bandwidth:g} bytes/s a "
        "node; with several nodes write your own there\n"
    )


def _measured(name: str, devices: int) -> Hardware:
    try:
        return measure(name=name, devices=devices)
    except RuntimeError as err:
        fewer = f" with fewer devices, such as --devices {max(1, devices // 2)}," if devices > 1 else ""
        raise ValueError(
            f"{err} Try again{fewer} on a machine that does nothing else, or take a run's measurements: "
            "rlhf calibrate OUT --from RUN."
        ) from err


def _refined(name: str, run: Path) -> Hardware:
    start, iterations = measured.read(run)
    found = refine_by_run(start, iterations)
    for title, cluster in (("before", start), ("after", found)):
        sys.stdout.write(f"{title}: {measured.table(iterations, cluster)}\n")
    return dataclasses.replace(found, name=name)
