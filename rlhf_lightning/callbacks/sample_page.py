"""HTML pages of samples that need nothing but a browser: one for each validation, and an index of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from rlhf_lightning.callbacks.sample import Sample, printable
from rlhf_lightning.reporting import PER_TOKEN

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #ddd; padding: .5rem; text-align: left; vertical-align: top; }
td.score { font-variant-numeric: tabular-nums; text-align: right; }
pre { font: 13px/1.5 ui-monospace, monospace; margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.name { color: #666; font-size: 12px; margin-top: .5rem; }
.odd { outline: 1px dashed #888; }
"""
_POSITIVE, _NEGATIVE = "38, 139, 210", "220, 50, 47"


def sample_page(samples: Sequence[Sample], *, title: str) -> str:
    """Write a page: scores, prompts, responses and, where samples carry numbers, their tokens in colour.

    Args:
        samples: what to show, in this order.
        title: of the page: the training step of the samples, or their checkpoint.
    """
    scales = {name: _scale(samples, name) for name in PER_TOKEN}
    rows = "\n".join(_row(sample, scales) for sample in samples)
    summary = f"{len(samples)} samples, mean score {fmean(sample.score for sample in samples):.4g}"
    legend = [f"{name}: full colour at &plusmn;{scale:.3g}" for name, scale in scales.items() if scale > 0]
    return _page(
        title,
        f"<p>{summary}. <a href='index.html'>All pages</a></p>\n"
        + (f"<p class='name'>Blue is positive, red negative. {'; '.join(legend)}.</p>\n" if legend else "")
        + f"<table>\n<tr><th>score</th><th>prompt</th><th>response</th></tr>\n{rows}\n</table>",
    )


def index_page(pages: Sequence[Path]) -> str:
    """Write the list of pages, in the order given."""
    links = "\n".join(f"<li><a href='{quote(page.name)}'>{escape(page.stem)}</a></li>" for page in pages)
    return _page("Samples", f"<ul>\n{links}\n</ul>")


def _page(title: str, body: str) -> str:
    return (
        f"<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n<title>{escape(title)}</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _row(sample: Sample, scales: dict[str, float]) -> str:
    tokens = "".join(
        f"<div class='name'>{name}</div><pre>{_tokens(sample.tokens, numbers, scales[name])}</pre>"
        for name, numbers in sample.numbers.items()
    )
    return (
        f"<tr><td class='score'>{sample.score:.4g}</td><td><pre>{escape(printable(sample.prompt))}</pre></td>"
        f"<td><pre>{escape(printable(sample.response))}</pre>{tokens}</td></tr>"
    )


def _tokens(tokens: Sequence[str], numbers: Sequence[float], scale: float) -> str:
    return "".join(
        f"<span {_look(number, scale)} title='{number:.4g}'>{escape(printable(token))}</span>"
        for token, number in zip(tokens, numbers, strict=True)
    )


def _look(number: float, scale: float) -> str:
    if not math.isfinite(number):
        return "class='odd'"
    strength = min(abs(number) / scale, 1.0) if scale > 0 else 0.0
    return f"style='background: rgba({_POSITIVE if number > 0 else _NEGATIVE}, {0.7 * strength:.2f})'"


def _scale(samples: Sequence[Sample], name: str) -> float:
    """Find the largest finite size over all samples, so that the colours of two rows compare."""
    numbers = (abs(x) for sample in samples for x in sample.numbers.get(name, ()) if math.isfinite(x))
    return max(numbers, default=0.0)
