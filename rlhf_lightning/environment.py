"""The environment of the process while a library that reads it is imported, starts, or computes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within this context, environment variables have these values; on exit all are as they were before."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Within this context, of these variables the unset have these values; what others set stays."""
    unset = values.keys() - os.environ.keys()
    os.environ.update({name: values[name] for name in unset})
    try:
        yield
    finally:
        for name in unset:
            os.environ.pop(name, None)


@contextmanager
def replaced(owner: object, values: Mapping[str, object]) -> Iterator[None]:
    """Within this context, attributes of a module have other values."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def for_deepspeed() -> dict[str, str]:
    """What to set while DeepSpeed is first imported: it chooses its accelerator then, and warns of a CPU."""
    return {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
