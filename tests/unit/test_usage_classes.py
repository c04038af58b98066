"""What is said of a class that its module lacks."""

from __future__ import annotations

import pytest

from rlhf_lightning.usage import option_error


@pytest.mark.parametrize(
    ("option", "path", "told"),
    [
        ("algo", "rlhf_lightning.algos.ppo.PPPO", " Did you mean PPO?"),
        ("algo", "rlhf_lightning.algos.safe_rlhf.Mine", " Type one of PPO, SafeRLHF."),
        ("data", "rlhf_lightning.data.Mine", " Type one of CompletionData, "),
        ("strategy", "json.Mine", " No class there is derived from Strategy. Write one, or "),
    ],
)
def test_a_class_that_its_module_lacks(option: str, path: str, told: str) -> None:
    module, _, name = path.rpartition(".")
    said = f"{option}: {path}: module '{module}' has no attribute '{name}'"
    assert option_error(said, {}).startswith(f"{said}.{told}")
