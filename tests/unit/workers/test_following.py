"""What a role leaves open it has from the actor."""

from __future__ import annotations

import pytest

from rlhf_lightning.spec import Sampling
from rlhf_lightning.workers import Actor, Critic, Reference, Role

ACTOR = Actor(path="somewhere", dtype="bfloat16", sampling=Sampling(temperature=0.7))


@pytest.mark.parametrize(
    ("role", "path", "computes_in"),
    [
        (Reference(), "somewhere", "bfloat16"),
        (Critic(), "somewhere", "bfloat16"),
        (Reference(dtype="float32"), "somewhere", "float32"),
        (Critic(path="somewhere"), "somewhere", "bfloat16"),
        (Reference(path="somewhere", dtype="float32"), "somewhere", "float32"),
        (Critic(path="elsewhere"), "elsewhere", "float32"),
        (Critic(path="elsewhere", dtype="bfloat16"), "elsewhere", "bfloat16"),
    ],
)
def test_a_role_takes_the_actors_path_and_with_it_its_dtype(role: Role, path: str, computes_in: str) -> None:
    found = role.following(ACTOR)
    assert (found.path, found.computes_in) == (path, computes_in)


def test_an_actor_in_float32_leaves_the_others_their_types() -> None:
    actor = Actor(path="somewhere")
    assert actor.computes_in == Reference().following(actor).computes_in == "float32"
    assert Reference(dtype="bfloat16").following(actor).computes_in == "bfloat16"


def test_a_reference_takes_the_actors_temperature() -> None:
    assert Reference().following(ACTOR).temperature == 0.7
    assert Reference(temperature=1.0).following(ACTOR).temperature == 1.0


def test_no_reference_reads_the_least_likely_tokens_as_the_likeliest() -> None:
    with pytest.raises(ValueError, match=r"^Reference\(temperature=-1\.0\): .* Try 1\.0"):
        Reference(temperature=-1.0)
    assert Reference(temperature=0.0).temperature == 0.0
