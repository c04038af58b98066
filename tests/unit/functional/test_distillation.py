"""The divergence between teacher and student, against whole distributions and numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import Counts, DistillationLoss
from tests.unit.functional.cases import close

WORDS = 7
COUNTS = Counts(tokens=3, sequences=2, groups=2)
MASK = torch.tensor([[True, True], [True, False]])


def distributions() -> tuple[Tensor, Tensor]:
    """Logits of the teacher and of the student, [2, 2, WORDS]."""
    generator = torch.Generator().manual_seed(0)
    teacher, student = 2 * torch.randn(2, 2, 2, WORDS, generator=generator)
    return teacher, student.requires_grad_()


def asked(teacher: Tensor, student: Tensor, size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and rows of the teacher's likeliest words."""
    known, words = teacher.log_softmax(-1).topk(size, dim=-1)
    rows = {"response_mask": MASK, "candidate_ids": words.int(), "candidate_ref_log_probs": known}
    return {"candidate_log_probs": student.log_softmax(-1).gather(-1, words)}, rows


def whole(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """The divergence of the whole distributions as Agarwal 2023 defines it, in probabilities: [2, 2]."""
    p, q = teacher.softmax(-1), student.softmax(-1)
    forward, reverse = (p * (p / q).log()).sum(-1), (q * (q / p).log()).sum(-1)
    if beta in (0, 1):
        return reverse if beta else forward
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_all_words_give_the_whole_divergence_and_its_gradient(beta: float) -> None:
    teacher, student = distributions()
    for size in (WORDS, WORDS - 1):  # the last one is then the rest
        outputs, rows = asked(teacher, student, size)
        value, metrics = DistillationLoss(beta=beta)(outputs, rows, COUNTS)
        expected = whole(teacher, student, beta)[MASK].mean()
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
        found, wanted = (torch.autograd.grad(x, student)[0] for x in (value, expected))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
        for name, share in (("forward_kl", 0.0), ("reverse_kl", 1.0)):
            kl = whole(teacher, student, share)[MASK].mean()
            assert float(metrics[f"distillation/{name}"]) == pytest.approx(float(kl.detach()), abs=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_fewer_candidates_never_say_more(beta: float) -> None:
    teacher, student = distributions()
    values = []
    for size in range(1, WORDS):
        outputs, rows = asked(teacher, student, size)
        values.append(float(DistillationLoss(beta=beta)(outputs, rows, COUNTS)[0].detach()))
    assert values == sorted(values)
    assert values[0] < values[-1]


def test_by_hand() -> None:
    """The teacher says one of two words, 0.5 and 0.25; the student 0.25 and 0.25, another one else."""
    mask = torch.tensor([[True]])
    rows = {"response_mask": mask, "candidate_ref_log_probs": torch.tensor([[[0.5, 0.25]]]).log()}
    outputs = {"candidate_log_probs": torch.tensor([[[0.25, 0.25]]]).log().requires_grad_()}
    counts = Counts(tokens=1, sequences=1, groups=1)
    value, metrics = DistillationLoss(beta=0.0)(outputs, rows, counts)
    close(value.detach(), 0.5 * math.log(2) - 0.25 * math.log(2))
    close(metrics["distillation/forward_kl"], 0.25 * math.log(2))
    close(metrics["distillation/reverse_kl"], -0.25 * math.log(2) + 0.5 * math.log(2))
    close(metrics["distillation/rest"], 0.25)
    torch.autograd.backward(value)
    gradient = outputs["candidate_log_probs"].grad
    assert gradient is not None
    # d KL / d log q_i = -p_i + p_rest q_i / q_rest
    close(gradient[0, 0], [-0.5 + 0.25 * 0.25 / 0.5, -0.25 + 0.25 * 0.25 / 0.5])


def test_a_student_that_is_too_sure_learns_to_leave_room() -> None:
    """Its other words have less than the least, and the teacher finds them likely."""
    rows = {"response_mask": MASK[:1, :1], "candidate_ref_log_probs": torch.tensor([[[0.7]]]).log()}
    logits = torch.tensor([[[13.0, 0.0, 0.0]]], requires_grad=True)
    outputs = {"candidate_log_probs": logits.log_softmax(-1)[..., :1]}
    loss, _ = DistillationLoss(beta=0.0)(outputs, rows, Counts(tokens=1, sequences=1, groups=1))
    torch.autograd.backward(loss)
    assert logits.grad is not None
    assert logits.grad[0, 0, 0] > 0
    assert (logits.grad[0, 0, 1:] < 0).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta": 1.5}, r"beta=1\.5\): is a share"),
        ({"beta": math.nan}, "is a share"),
        ({"aggregation": "mean"}, "unknown mode"),
        ({"horizon": 3}, "nothing reads it"),
    ],
)
def test_impossible_options(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillationLoss(**fields)  # type: ignore[arg-type]
