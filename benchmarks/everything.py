"""Every benchmark one after the other, and one page with what they print and draw: `make bench`.

    python -m benchmarks.everything
    python -m benchmarks.everything --only scale startup

A benchmark that fails is shown as such, and the rest run. The page is results/index.html.
"""

import argparse
import html
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "results" / "index.html"


@dataclass(frozen=True)
class Benchmark:
    """What to run, and what it draws."""

    arguments: tuple[str, ...]
    pictures: tuple[str, ...] = ()
    """Patterns below docs/images."""


BENCHMARKS: Mapping[str, Benchmark] = {
    "startup": Benchmark(("-m", "benchmarks.startup")),
    "dispatch": Benchmark(("benchmarks/dispatch.py",)),
    "scale": Benchmark(("-m", "benchmarks.scale"), ("scale.svg",)),
    "engines": Benchmark(("-m", "benchmarks.engines")),
    "throughput": Benchmark(("benchmarks/throughput.py",)),
    "transition": Benchmark(("benchmarks/transition.py",)),
    "mapping": Benchmark(("-m", "benchmarks.mapping_search"), ("mapping-search.svg",)),
    "patterns": Benchmark(
        ("-m", "benchmarks.patterns", "--models", "embedded"), ("patterns/embedded-*.svg",)
    ),
}


def run(name: str) -> tuple[str, float]:
    """What a benchmark prints, on the way to the page, and its seconds."""
    started = time.monotonic()
    command = [sys.executable, *BENCHMARKS[name].arguments]
    with subprocess.Popen(  # noqa: S603
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            sys.stdout.write(line)
            lines.append(line)
    if process.returncode:
        lines.append(f"FAILED with exit code {process.returncode}\n")
        sys.stdout.write(lines[-1])
    return "".join(lines), time.monotonic() - started


def section(name: str, text: str, seconds: float) -> str:
    """A part of the page."""
    found = [
        picture
        for pattern in BENCHMARKS[name].pictures
        for picture in sorted((ROOT / "docs" / "images").glob(pattern))
    ]
    shown = "".join(
        f"<figure><img src='{os.path.relpath(picture, PAGE.parent)}' alt='{picture.stem}'></figure>"
        for picture in found
    )
    command = html.escape(" ".join(("python", *BENCHMARKS[name].arguments)))
    return (
        f"<h2>{name}</h2><p><code>{command}</code>, {seconds:.0f} s</p><pre>{html.escape(text)}</pre>{shown}"
    )


def main() -> None:
    """Run, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(BENCHMARKS), default=tuple(BENCHMARKS))
    args = parser.parse_args()
    sections = []
    for name in args.only:
        print(f"\n--- {name}", flush=True)
        sections.append(section(name, *run(name)))
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores"
    style = "<style>body{font-family:sans-serif;max-width:70em;margin:auto}img{max-width:100%}</style>"
    title = "<!doctype html><meta charset='utf-8'><title>Benchmarks</title>"
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(f"{title}{style}<h1>Benchmarks</h1><p>{now}</p>{''.join(sections)}\n", encoding="utf-8")
    print(f"\nwritten: {PAGE}")
    if any("FAILED with exit code" in text for text in sections):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
