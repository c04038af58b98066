"""Every benchmark one after the other, and one page with what they print and draw: `make bench`.

    python -m benchmarks.everything
    python -m benchmarks.everything --only scale startup
    python -m benchmarks.everything --quick        a look at whether all of it runs: its numbers say nothing

A benchmark that fails is shown as such, and the rest run. The page, results/index.html, is written anew after
each.
"""

import html
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import environments
from benchmarks.spread import machine

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "results" / "index.html"


@dataclass(frozen=True)
class Benchmark:
    """What to run, and what it draws."""

    arguments: tuple[str, ...]
    pictures: tuple[str, ...] = ()
    """Patterns below docs/images."""
    quick: tuple[str, ...] = ()
    """More arguments with which it runs and measures little."""

    def command(self, *, quick: bool) -> list[str]:
        """What is run."""
        return [*self.arguments, *(self.quick if quick else ())]


BENCHMARKS: Mapping[str, Benchmark] = {
    "startup": Benchmark(("-m", "benchmarks.startup"), quick=("--rounds", "1")),
    "dispatch": Benchmark(("benchmarks/dispatch.py",), quick=("--rounds", "1")),
    "scale": Benchmark(
        ("-m", "benchmarks.scale"), ("scale.svg",), quick=("--workers", "16", "32", "64", "--actors", "4")
    ),
    "engines": Benchmark(("-m", "benchmarks.engines"), quick=("--model", "tiny", "--rounds", "1")),
    "throughput": Benchmark(("benchmarks/throughput.py", "--rounds", "2"), quick=("--quick",)),
    "ragged": Benchmark(
        ("benchmarks/throughput.py", "--rounds", "2", "--lengths", "ragged"), quick=("--quick",)
    ),
    "memory": Benchmark(
        ("-m", "benchmarks.memory"),
        ("memory.svg",),
        quick=("--rounds", "1", "--model", "tiny", "--iterations", "60"),
    ),
    "transition": Benchmark(("benchmarks/transition.py",), quick=("--rounds", "1")),
    "vllm_update": Benchmark(
        ("benchmarks/vllm_update.py",),
        quick=("--rounds", "1", "--layouts", "1,1", "--hidden", "128", "--layers", "2"),
    ),
    "mapping": Benchmark(("-m", "benchmarks.mapping_search"), ("mapping-search.svg",)),
    "mapping_memory": Benchmark(("-m", "benchmarks.mapping_memory")),
    "patterns": Benchmark(
        ("-m", "benchmarks.patterns", "--models", "embedded"),
        ("patterns/embedded-*.svg",),
        quick=("--only", "colocated", "--iterations", "2"),
    ),
    "pipelined": Benchmark(
        ("-m", "benchmarks.pipelined"),
        quick=("--rounds", "2", "--rows", "8", "--layers", "1", "--scorer-layers", "1", "--stops", "40"),
    ),
}


def run(name: str, *, quick: bool) -> tuple[str, float]:
    """What a benchmark prints, on the way to the page, and its seconds."""
    started = time.monotonic()
    command = [sys.executable, *BENCHMARKS[name].command(quick=quick)]
    before = {picture: picture.read_bytes() for picture in drawn(name)} if quick else {}
    with subprocess.Popen(  # noqa: S603
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        lines = []
        try:
            for line in process.stdout:
                sys.stdout.write(line)
                lines.append(line)
        except SystemExit:  # at SIGTERM
            process.terminate()
            raise
    if process.returncode:
        lines.append(f"FAILED with exit code {process.returncode}\n")
        sys.stdout.write(lines[-1])
    if quick:  # what little was measured is not worth a picture
        for picture in drawn(name):
            picture.write_bytes(before[picture]) if picture in before else picture.unlink()
    return "".join(lines), time.monotonic() - started


def drawn(name: str) -> list[Path]:
    """The pictures that there are of a benchmark."""
    images = ROOT / "docs" / "images"
    return [picture for pattern in BENCHMARKS[name].pictures for picture in sorted(images.glob(pattern))]


def section(name: str, text: str, seconds: float, *, quick: bool) -> str:
    """A part of the page."""
    shown = "".join(
        f"<figure><img src='{os.path.relpath(picture, PAGE.parent)}' alt='{picture.stem}'></figure>"
        for picture in ([] if quick else drawn(name))
    )
    command = html.escape(" ".join(("python", *BENCHMARKS[name].command(quick=quick))))
    return (
        f"<h2>{name}</h2><p><code>{command}</code>, {seconds:.0f} s</p><pre>{html.escape(text)}</pre>{shown}"
    )


def write(sections: Sequence[str]) -> None:
    """Write the page of these parts."""
    where = machine()
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {where['cores']} cores of {where['processor']}"
    style = "<style>body{font-family:sans-serif;max-width:70em;margin:auto}img{max-width:100%}</style>"
    title = "<!doctype html><meta charset='utf-8'><title>Benchmarks</title>"
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(f"{title}{style}<h1>Benchmarks</h1><p>{now}</p>{''.join(sections)}\n", encoding="utf-8")


def main() -> None:
    """Run, and write the page."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(BENCHMARKS), default=tuple(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="as little of each as runs")
    args = parser.parse_args()
    environments.exit_at_sigterm()
    sections = []
    for name in args.only:
        print(f"\n--- {name}", flush=True)
        sections.append(section(name, *run(name, quick=args.quick), quick=args.quick))
        write(sections)
    print(f"\nwritten: {PAGE}")
    if any("FAILED with exit code" in text for text in sections):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
