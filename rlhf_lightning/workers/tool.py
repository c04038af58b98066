"""A tool: a role without a model, such as one that searches documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlhf_lightning.workers.role import Role


@dataclass(frozen=True, kw_only=True)
class Tool(Role):
    """Holds no model: a subclass has the methods, and makes what they need where they run."""

    path: str = ""
    """There is no model, so it stays empty."""

    def following(self, actor: Role) -> Self:
        """Itself.

        Raises:
            ValueError: it has a path.
        """
        if self.path:
            raise ValueError(
                f"{type(self).__name__}(path={self.path!r}): it holds no model, so nothing reads the path. "
                "Leave it out, or derive the class from Role."
            )
        return self
