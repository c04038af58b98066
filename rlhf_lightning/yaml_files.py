"""YAML files that people write: configurations, and hardware for mappings."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import yaml  # type: ignore[import-untyped]


def read_yaml(path: str, *, shown: str) -> object:
    """What a YAML file holds, none of whose keys stands there twice.

    Args:
        path: the file.
        shown: what messages call it.

    Raises:
        ValueError: there is no such file, or it is not YAML.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a safe one
    except OSError as err:
        raise ValueError(f"{shown}: cannot be read ({err.strerror}).") from err
    except UnicodeDecodeError as err:
        raise ValueError(f"{shown}: is not UTF-8 (byte {err.start + 1}).") from err
    except yaml.MarkedYAMLError as err:
        raise ValueError(
            f"{shown}, line {err.problem_mark.line + 1}: is not YAML: {err.problem}. Options of one level "
            "begin in one column, behind spaces and no tab; a text with a colon is quoted."
        ) from err
    except yaml.YAMLError as err:
        raise ValueError(f"{shown}: is not YAML ({' '.join(str(err).split())}).") from err


def write_names(kind: type[Enum]) -> None:
    """Let YAML have the value of such a constant, where a class of options has one as its default.

    Args:
        kind: a class of text constants; also those that extend it.
    """
    yaml.SafeDumper.add_multi_representer(kind, lambda dumper, constant: dumper.represent_str(constant.value))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that stands twice, of which the first would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        """The content of a mapping."""
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if key.value in [before.value for before in keys[:number]]:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} stands there twice", problem_mark=key.start_mark
                )
        found: dict[object, object] = super().construct_mapping(node, deep)
        return found
