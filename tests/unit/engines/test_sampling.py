from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_lightning.engines.sampling import _nucleus, sample, uniform
from rlhf_lightning.spec import Sampling

MASK_64 = 2**64 - 1


def slow_mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


def slow_uniform(seed: int, row: int, position: int) -> float:
    state = slow_mixed(seed & MASK_64)
    state = slow_mixed(state ^ (row & MASK_64))
    return (slow_mixed(state ^ position) >> 16) / 2**48


def numbers(count: int, *, seed: int = 0) -> Tensor:
    return uniform(seed, torch.arange(count), torch.tensor(0))


def chi_square(tokens: Tensor, probs: Tensor) -> float:
    """Pearson's statistic by its degrees of freedom: 1 on average, over 1.5 at 60 cells in 1 of 100 cases."""
    expected = probs.double() * len(tokens)
    seen = torch.bincount(tokens, minlength=len(probs)).double()
    used = expected > 0
    assert not seen[~used].any()
    return float(((seen - expected)[used] ** 2 / expected[used]).sum() / max(1, int(used.sum()) - 1))


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63, 2**64 + 1])
def test_uniform_is_splitmix64(seed: int) -> None:
    rows, positions = torch.tensor([0, 3, 2**40, -1]), torch.tensor([0, 1, 1000])
    expected = [
        [slow_uniform(seed, row, position) for position in positions.tolist()] for row in rows.tolist()
    ]
    assert uniform(seed, rows[:, None], positions).tolist() == expected


def test_splitmix64_by_its_published_outputs() -> None:
    # The first outputs of splitmix64.c (Vigna) with state 0.
    assert slow_mixed(0) == 0xE220A8397B1DCDAF
    assert slow_mixed(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_uniform_is_even_and_has_no_neighbours() -> None:
    u = uniform(7, torch.arange(300)[:, None], torch.arange(300))
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    assert chi_square((u.flatten() * 64).long(), torch.full((64,), 1 / 64)) < 1.5
    for shifted in (u[1:] - u[:-1], u[:, 1:] - u[:, :-1]):
        # The difference of independent uniforms has variance 1/6; 90,000 of them stray by about 0.5%.
        assert float(shifted.var()) == pytest.approx(1 / 6, rel=0.03)


def slow_descent(probs: list[float], u: float) -> int:
    """The tree of eight branches: token t stands below node t mod h of a level of width h."""
    widths = [len(probs)]
    while widths[-1] > 1:
        widths.append(-(-widths[-1] // 8))
    state, node = slow_mixed(int(u * 2**48)), 0
    for level in reversed(range(len(widths) - 1)):
        number = (slow_mixed(state ^ (len(widths) - 2 - level)) >> 16) / 2**48
        places = [node + branch * widths[level + 1] for branch in range(8)]
        masses = [mass_below(probs, place, widths[: level + 1]) for place in places]
        target, height = number * sum(masses), 0.0
        for place, mass in zip(places, masses, strict=True):
            height += mass
            if height > target:
                node = place
                break
    return node


def mass_below(probs: list[float], place: int, widths: list[int]) -> float:
    if place >= widths[-1]:
        return 0.0
    if len(widths) == 1:
        return probs[place]
    return sum(mass_below(probs, place + branch * widths[-1], widths[:-1]) for branch in range(8))


@pytest.mark.parametrize("vocabulary", [1, 5, 8, 70, 512, 1000])
def test_tokens_are_those_of_a_slow_descent(vocabulary: int) -> None:
    logits = torch.randn(40, vocabulary, generator=torch.Generator().manual_seed(0)) * 2
    u = numbers(40)
    token, log_prob = sample(logits, u, Sampling())
    probs = logits.double().softmax(-1).tolist()
    assert token.tolist() == [
        slow_descent(row, number) for row, number in zip(probs, u.tolist(), strict=True)
    ]
    expected = logits.double().log_softmax(-1).gather(-1, token[:, None])[:, 0]
    torch.testing.assert_close(log_prob.double(), expected, atol=1e-5, rtol=0)


def test_a_token_without_mass_is_never_drawn() -> None:
    logits = torch.full((1000, 130), -torch.inf)
    logits[:, 65] = 0
    assert sample(logits, numbers(1000), Sampling())[0].unique().tolist() == [65]


def test_rounding_errors_do_not_change_tokens() -> None:
    # 1e-6 is what another batch size changes in logits; a walk along the vocabulary flips 5 of these.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 4096, generator=generator) * 3
    noisy = logits + 1e-6 * torch.randn(logits.shape, generator=generator)
    flips = 0
    for seed in range(10):
        u = numbers(2000, seed=seed)
        flips += int((sample(logits, u, Sampling())[0] != sample(noisy, u, Sampling())[0]).sum())
    assert flips <= 1


def test_a_broken_model_gives_tokens_of_the_vocabulary() -> None:
    logits = torch.full((2, 11), torch.nan)
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.5), Sampling(temperature=0)):
        token, log_prob = sample(logits, numbers(2), sampling)
        assert int(token.max()) < 11
        assert log_prob.isnan().all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature: float) -> None:
    logits = torch.linspace(-2, 2, 61)[torch.randperm(61, generator=torch.Generator().manual_seed(0))]
    token, log_prob = sample(logits.expand(100_000, -1), numbers(100_000), Sampling(temperature=temperature))
    probs = (logits / temperature).softmax(-1)
    assert chi_square(token, probs) < 1.5
    torch.testing.assert_close(log_prob, probs.log()[token], atol=1e-5, rtol=0)


def test_at_temperature_0_the_likeliest_token_is_taken() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 2.5]])
    token, log_prob = sample(logits, numbers(2), Sampling(temperature=0))
    assert token.tolist() == [1, 2]
    torch.testing.assert_close(log_prob, logits.log_softmax(-1)[[0, 1], [1, 2]], atol=1e-6, rtol=0)


def kept(probs: list[float], sampling: Sampling) -> set[int]:
    logits = torch.tensor(probs).log().expand(4000, -1)
    token, log_prob = sample(logits, numbers(4000), sampling)
    torch.testing.assert_close(log_prob, logits[0][token], atol=1e-5, rtol=0)  # before truncation
    allowed = torch.zeros(len(probs))
    allowed[token.unique()] = torch.tensor(probs)[token.unique()]
    assert chi_square(token, allowed / allowed.sum()) < 4
    return set(token.tolist())


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(top_k=1), {2}),
        (Sampling(top_k=2), {1, 2}),
        (Sampling(top_k=3), {0, 1, 2}),
        (Sampling(top_k=9), {0, 1, 2, 3}),
        (Sampling(top_p=0.3), {2}),
        (Sampling(top_p=0.41), {1, 2}),
        (Sampling(top_p=0.75), {0, 1, 2}),
        (Sampling(top_p=0.95), {0, 1, 2, 3}),
        (Sampling(top_p=1e-9), {2}),
        (Sampling(top_k=2, top_p=0.55), {2}),  # 0.4 of 0.7 is 0.571: enough
        (Sampling(top_k=2, top_p=0.6), {1, 2}),
        (Sampling(min_p=0.2), {0, 1, 2, 3}),
        (Sampling(min_p=0.4), {0, 1, 2}),
        (Sampling(min_p=1), {2}),
        (Sampling(min_p=0.7, top_p=0.55), {2}),  # of 0.7 again
        (Sampling(min_p=0.7, top_p=0.6), {1, 2}),
        (Sampling(min_p=0.4, top_k=2), {1, 2}),
    ],
)
def test_only_what_top_k_top_p_and_min_p_keep_is_drawn(sampling: Sampling, expected: set[int]) -> None:
    assert kept([0.2, 0.3, 0.4, 0.1], sampling) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^sampling\.{name}={value}: (must|use)"):
        Sampling(**{name: value})  # type: ignore[arg-type]


def test_truncation_keeps_ties() -> None:
    assert kept([0.25, 0.25, 0.5], Sampling(top_k=2)) == {0, 1, 2}
    assert kept([0.25, 0.25, 0.5], Sampling(top_p=0.5)) == {2}


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 20])
def test_top_p_keeps_what_a_sort_keeps(top_p: float, top_k: int) -> None:
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(3)) * 2
    probs = logits.double().softmax(-1)[0]
    ranked = probs.sort(descending=True)
    values = ranked.values[: top_k or 700]
    size = int((values.cumsum(0) / values.sum() < top_p).sum()) + 1
    token, _ = sample(logits.expand(5_000, -1), numbers(5_000), Sampling(top_k=top_k, top_p=top_p))
    inside = ranked.indices[:size]
    likely = inside[probs[inside] > 4e-3 * probs[inside].sum()]  # expected 20 times
    assert set(likely.tolist()) <= set(token.tolist()) <= set(inside.tolist())


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("vocabulary", [10, 300, 2000])
def test_threshold_of_the_nucleus_against_a_sort(vocabulary: int, spread: float) -> None:
    probs = (torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0)) * spread).softmax(-1)
    for top_p in (0.01, 0.5, 0.9, 0.999):
        ranked = probs.double().sort(descending=True).values
        heights = ranked.cumsum(-1)
        size = (heights < top_p * heights[:, -1:]).sum(-1, keepdim=True)
        assert torch.equal(_nucleus(probs, top_p).double(), ranked.gather(-1, size))


def test_bfloat16_logits_draw_as_their_float32_values() -> None:
    logits = torch.randn(3, 10).bfloat16()
    token, log_prob = sample(logits, numbers(3), Sampling())
    assert log_prob.dtype == torch.float32
    assert torch.equal(token, sample(logits.float(), numbers(3), Sampling())[0])
