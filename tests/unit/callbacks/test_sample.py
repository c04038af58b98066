from __future__ import annotations

import math
import re

import pytest

from rlhf_lightning.callbacks.sample import Sample, printable, samples_of
from rlhf_lightning.callbacks.sample_page import sample_page

TEXTS: dict[str, list[object]] = {"prompts": ["p"], "responses": ["ab"], "scores": [0.5]}


def test_samples_of_reads_numbers_token_by_token() -> None:
    outputs = TEXTS | {"tokens": [["a", "b"]], "kl": [[0.1, -0.2]], "advantages": [[1, 2]]}
    (sample,) = samples_of(outputs)
    assert sample == Sample(
        prompt="p",
        response="ab",
        score=0.5,
        tokens=("a", "b"),
        numbers={"kl": (0.1, -0.2), "advantages": (1.0, 2.0)},
    )


def test_numbers_without_tokens_are_left_out() -> None:
    (sample,) = samples_of(TEXTS | {"kl": [[0.1, -0.2]]})
    assert sample.numbers == {}


def test_columns_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different lengths: .*'prompts': 1.*'scores': 2"):
        samples_of(TEXTS | {"scores": [1.0, 2.0]})


def test_a_number_for_each_token() -> None:
    with pytest.raises(ValueError, match=r"\{'tokens': 2, 'kl': 1\}\. Return one number a token\.$"):
        samples_of(TEXTS | {"tokens": [["a", "b"]], "kl": [[0.1]]})


def test_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"returned \['prompts'\], without responses, scores"):
        samples_of({"prompts": ["p"]})


def test_printable() -> None:
    assert printable("a\n\tb\x00\x7f\x1b") == "a\n\tb\u2400\u2421\u241b"
    assert printable("\ud800x") == "?x"


def test_colours_compare_over_rows_and_survive_odd_numbers() -> None:
    rows = [
        Sample(
            prompt="", response="", score=0, tokens=("a", "<", "c"), numbers={"kl": (2.0, -4.0, math.inf)}
        ),
        Sample(prompt="", response="", score=1, tokens=("d",), numbers={"kl": (0.0,)}),
    ]
    page = sample_page(rows, title="Step 3")
    spans = re.findall(r"<span ([^>]*) title='([^']*)'>([^ ]*?)</span>", page)
    assert spans == [
        ("style='background: rgba(38, 139, 210, 0.35)'", "2", "a"),
        ("style='background: rgba(220, 50, 47, 0.70)'", "-4", "&lt;"),
        ("class='odd'", "inf", "c"),
        ("style='background: rgba(220, 50, 47, 0.00)'", "0", "d"),
    ]
    assert "full colour at &plusmn;4" in page
    assert "2 samples, mean score 0.5" in page
