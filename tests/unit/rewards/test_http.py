"""Rewards that are services, asked over a real connection."""

from __future__ import annotations

import logging
import math
import random
import socket
import time
from base64 import b64encode
from datetime import date
from decimal import Decimal
from itertools import count
from traceback import format_exception
from types import SimpleNamespace

import pytest
from jsonargparse import ArgumentParser

from rlhf_lightning.rewards import RETRIES, HTTPOptions, RewardSpec, preflight, resolve, score
from rlhf_lightning.rewards.http import json_safe
from tests.unit import spmd
from tests.unit.rewards.services import LENGTHS, Answer, Row, service

BROKEN = Answer(status=500, body=b"out of memory")
SILENT = Answer(silent=True)
TRICKLE = Answer(trickle=True)
PATIENT = HTTPOptions(timeout_s=5.0, retries=2, backoff_s=0.01)
HASTY = HTTPOptions(timeout_s=0.1, retries=2, backoff_s=0.01)


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    """A port may be another test's again."""
    RETRIES.clear()


def row(prompt: str = "the prompt", source: str = "a", **fields: object) -> Row:
    return {"prompt": prompt, "data_source": source, "answer": "yes"} | fields


def asked_for(
    url: str, responses: list[str], *, http: HTTPOptions = PATIENT, rows: list[Row] | None = None
) -> list[float]:
    rows = rows or [row() for _ in responses]
    spec = RewardSpec(functions=url, http=http)
    return score(spec, [str(one["prompt"]) for one in rows], responses, rows)["scores"]


def dead_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def test_texts_and_rows_go_there_and_scores_come_back() -> None:
    with service(LENGTHS) as asked:
        assert asked_for(asked.url, ["yes", ""], rows=[row("p"), row("q", day=date(2026, 1, 2))]) == [
            3.0,
            0.0,
        ]
    assert asked.contents == [
        {"prompts": ["p", "q"], "responses": ["yes", ""], "rows": [row("p"), row("q", day="2026-01-02")]}
    ]
    assert asked.headers[0]["Content-Type"] == "application/json"


def test_a_bare_list_will_do() -> None:
    with service(Answer(body=b" [1, 0.5, -2e-1]")) as asked:
        assert asked_for(asked.url, ["x", "y", "z"]) == [1.0, 0.5, -0.2]


def test_a_service_is_weighed_with_other_functions_by_data_source() -> None:
    with service(LENGTHS) as asked:
        spec = RewardSpec(
            functions={asked.url: 0.5, "exact_match": 2.0}, by_source={"b": {asked.url: -1.0}}, http=PATIENT
        )
        rows = [row("p"), row("q", "b"), row("r")]
        got = score(spec, ["p", "q", "r"], ["yes", "1234", "no"], rows)
    assert got["scores"] == [3.5, -4.0, 1.0]
    assert got[asked.url] == [3.0, 4.0, 2.0]
    assert [content["prompts"] for content in asked.contents] == [["p", "q", "r"]]


def test_many_rows_are_asked_for_in_parts() -> None:
    with service(LENGTHS) as asked:
        responses = ["x" * n for n in range(7)]
        http = HTTPOptions(timeout_s=5.0, batch_size=3)
        assert asked_for(asked.url, responses, http=http) == [float(n) for n in range(7)]
        assert asked_for(asked.url, [], http=http) == []
    assert [len(content["rows"]) for content in asked.contents] == [3, 3, 1]
    assert [text for content in asked.contents for text in content["responses"]] == responses


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said of each failed try."""
    return [record.getMessage() for record in caplog.records if record.name == "rlhf_lightning.rewards.http"]


@pytest.mark.parametrize("bad", [BROKEN, Answer(status=429), SILENT, Answer(body=b"[1", announced=5)])
def test_one_that_recovers_at_the_third_try(bad: Answer, caplog: pytest.LogCaptureFixture) -> None:
    http = HTTPOptions(timeout_s=0.3, retries=2, backoff_s=0.01) if bad.silent else PATIENT
    with caplog.at_level(logging.WARNING), service(bad, bad, LENGTHS) as asked:
        assert asked_for(asked.url, ["yes"], http=http) == [3.0]
        assert RETRIES[asked.url] == 2
    assert len(asked.contents) == 3
    assert asked.contents[0] == asked.contents[2], "the same request"
    said = warnings(caplog)
    assert [text.startswith(f"{asked.url}: try {n} of 3 failed (") for n, text in enumerate(said, 1)] == [
        True,
        True,
    ]
    assert all(text.endswith("; next in 0.0 s") for text in said)


def test_the_pause_grows() -> None:
    http = HTTPOptions(timeout_s=5.0, retries=3, backoff_s=0.03)
    with service(BROKEN) as asked:
        started = time.monotonic()
        with pytest.raises(ValueError, match="500"):
            asked_for(asked.url, ["yes"], http=http)
        assert time.monotonic() - started >= 0.03 * (1 + 2 + 4)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list of the pauses from now on, which take no time."""
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append)
    monkeypatch.setattr("rlhf_lightning.rewards.http.time", clock)
    return pauses


def test_pauses_are_spread_whatever_the_seed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Hundreds of workers ask at once after a generation, and would be refused at once again."""
    pauses = noted(monkeypatch)
    http = HTTPOptions(timeout_s=5.0, retries=2, backoff_s=4.0)
    with service(BROKEN) as asked:
        for _ in range(3):
            random.seed(0)
            with pytest.raises(ValueError, match="500"):
                asked_for(asked.url, ["yes"], http=http)
    assert len(set(pauses)) == 6
    told = [text.rpartition("; ")[2] for text in warnings(caplog)]
    assert told == [f"next in {pause:.1f} s" for pause in pauses]
    assert all(4 <= first < 8 <= second < 16 for first, second in zip(pauses[::2], pauses[1::2], strict=True))


def test_pauses_of_processes_from_one_are_spread() -> None:
    def paused(_: object) -> list[float]:
        with pytest.MonkeyPatch.context() as patch:
            pauses = noted(patch)
            with pytest.raises(ValueError, match="no scores"):
                asked_for(f"http://127.0.0.1:{dead_port()}", ["yes"])
        return pauses

    (one, other) = spmd.run(2, paused)
    assert len({*one, *other}) == 4


@pytest.mark.parametrize(
    ("bad", "http", "said"),
    [
        (BROKEN, PATIENT, "500 Internal Server Error, 'out of memory'"),
        (Answer(status=429, body=b"x" * 200), PATIENT, "429 Too Many Requests, '" + "x" * 80 + "'..."),
        (SILENT, HASTY, r"ReadTimeoutError: .*Read timed out\. \(read timeout=0\.1\)"),
        (TRICKLE, PATIENT, "TimeoutError: its answer had begun, but was not complete in time"),
    ],
    ids=["500", "429", "silent", "trickle"],
)
def test_one_that_stays_down_ends_clearly(
    bad: Answer, http: HTTPOptions, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()
    if bad.trickle:  # each time that the client looks, 2 of its 5 seconds have passed
        clock = SimpleNamespace(monotonic=count(step=2).__next__, sleep=time.sleep)
        monkeypatch.setattr("rlhf_lightning.rewards.http.time", clock)
    with service(bad) as asked:
        with pytest.raises(ValueError, match=said) as error:
            asked_for(asked.url, ["a", "b"], http=http, rows=[row("the first" + "." * 100), row()])
        assert RETRIES[asked.url] == 2
    message = str(error.value)
    assert message.startswith(
        f"reward function {asked.url}: no scores for 2 rows, the first with the prompt 'the first..."
    )
    assert "; tries: 3, the last answer: " in message
    waits = f"http.timeout_s ({http.timeout_s} s) and http.retries say how long it is waited for."
    assert message.endswith(waits)
    assert len(asked.contents) == 3
    assert time.monotonic() - started < 3


def test_nobody_there() -> None:
    url = f"http://127.0.0.1:{dead_port()}/score"
    with pytest.raises(
        ValueError, match=r"tries: 3, the last answer: NewConnectionError: .*refused"
    ) as error:
        asked_for(url, ["yes"])
    assert url in str(error.value)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (Answer(status=404, body=b"no such page"), "refused 1 rows.*404 Not Found, 'no such page'"),
        (Answer(status=422), "refused 1 rows, .*422 .*a POST of JSON with prompts, responses and rows"),
        (
            Answer(status=307, header=("Location", "/elsewhere")),
            "307 Temporary Redirect that points to /elsewhere",
        ),
        (Answer(body=b"<html>hello</html>"), "did not answer with JSON for 1 rows, .*'<html>hello</html>'"),
        (Answer(status=204), "did not answer with JSON for 1 rows, .*204 No Content, ''"),
        (Answer(body=b"\xff\xfe\xfa"), "did not answer with JSON"),
        (Answer(body=b'{"score": [1]}'), "answered without a list of scores .*score"),
        (Answer(body=b"1.0"), "answered without a list of scores"),
        (Answer(body=b"[1, 2]"), "returned 2 scores for 1 rows"),
        (Answer(body=b"[]"), "returned 0 scores for 1 rows"),
        (Answer(body=b"[NaN]"), "row 0 of the batch got nan, which is not a finite number"),
        (Answer(body=b"[null]"), "row 0 of the batch got None"),
        (Answer(body=b"[[1]]"), r"row 0 of the batch got \[1\]"),
        (Answer(body=b"[1" + b"0" * 400 + b"]"), "row 0 of the batch got 10000"),
    ],
)
def test_an_answer_that_another_try_would_not_change(bad: Answer, said: str) -> None:
    with service(bad) as asked:
        with pytest.raises(ValueError, match=said) as error:
            asked_for(asked.url, ["yes"])
        assert RETRIES[asked.url] == 0
    assert str(error.value).startswith(f"reward function {asked.url}: ")
    assert "'the prompt'" in str(error.value)
    assert len(asked.contents) == 1


def test_wrong_number_of_scores_in_a_later_part_names_its_first_row() -> None:
    http = HTTPOptions(timeout_s=5.0, batch_size=2)
    rows = [row(f"p{n}") for n in range(4)]
    with (
        service(LENGTHS, Answer(body=b"[1]")) as asked,
        pytest.raises(ValueError, match=r"returned 1 scores for 2 rows, .*'p2'"),
    ):
        asked_for(asked.url, ["x"] * 4, http=http, rows=rows)


def test_a_service_is_tried_before_the_run() -> None:
    rows = [row("p") for _ in range(9)] + [row("q", "b")]
    with service(LENGTHS) as asked:
        preflight(RewardSpec(functions=asked.url), rows)
    assert [content["prompts"] for content in asked.contents] == [["p", "p", "p"], ["q"]]
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"cost function .*: no scores .*; tries: 1, .*refused"):
        preflight(RewardSpec(functions=asked.url, kind="cost", http=HTTPOptions(backoff_s=9)), rows)
    with service(BROKEN) as asked, pytest.raises(ValueError, match=r"tries: 1, the last answer: 500 "):
        preflight(RewardSpec(functions=asked.url), rows)
    assert time.monotonic() - started < 3
    with pytest.raises(ValueError, match="names no host and port"):
        preflight(RewardSpec(by_source={"z": {"http://:80/score": 1.0}}), rows)


def test_headers_take_secrets_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    http = HTTPOptions(headers={"Authorization": "Bearer $REWARD_TOKEN", "X-Price": "5$$"})
    with service(LENGTHS) as asked:
        asked_for(asked.url, ["yes"], http=http)
    assert asked.headers[0]["Authorization"] == "Bearer s3cret"
    assert asked.headers[0]["X-Price"] == "5$"
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(
        ValueError, match=r"Authorization takes the environment variable REWARD_TOKEN, .*not set"
    ):
        asked_for(asked.url, ["yes"], http=http)
    with pytest.raises(ValueError, match=r"header X-Price has a \$ without a name after it"):
        asked_for(asked.url, ["yes"], http=HTTPOptions(headers={"X-Price": "5$"}))


def test_a_header_from_a_file_ends_in_no_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret\n")
    with service(LENGTHS) as asked:
        asked_for(asked.url, ["yes"], http=HTTPOptions(headers={"Authorization": "Bearer $REWARD_TOKEN"}))
    assert asked.headers[0]["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize("secret", ["s3cret\nmore", "s3cret\rmore", "s3cret\u2026"], ids=ascii)
def test_a_header_that_cannot_be_sent_is_not_shown(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", secret)
    http = HTTPOptions(headers={"Authorization": "Bearer $REWARD_TOKEN"})
    with service(LENGTHS) as asked, pytest.raises(ValueError, match="cannot be sent") as error:
        asked_for(asked.url, ["yes"], http=http)
    assert "the header Authorization (it takes $REWARD_TOKEN) has a line break" in str(error.value)
    assert "s3cret" not in "".join(format_exception(error.value))
    assert not asked.contents


def test_proxies_are_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with service(LENGTHS) as proxy, service(LENGTHS) as asked:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/score"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert asked_for(asked.url, ["yes"]) == [3.0]
        assert asked_for(asked.url.replace("127.0.0.1", "localhost"), ["yes"]) == [3.0]
        assert (len(asked.contents), len(proxy.contents)) == (2, 0)
        assert asked_for("http://rewards.invalid/score", ["yes"]) == [3.0]
        assert (len(asked.contents), len(proxy.contents)) == (2, 1)


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_proxy_is_told_who_asks(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(LENGTHS) as proxy:
        place = proxy.url.removeprefix("http://").removesuffix("/score")
        monkeypatch.setenv("http_proxy", f"{scheme}user:p%40ss@{place}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert asked_for("http://rewards.invalid/score", ["yes"]) == [3.0]
    assert proxy.headers[0]["proxy-authorization"] == f"Basic {b64encode(b'user:p@ss').decode()}"


def test_what_json_cannot_hold() -> None:
    value = {
        1: (1, 2.5, True, None),
        "nan": [math.nan, math.inf],
        "other": [Decimal("0.1"), b"x"],
        "\udc80": {"deep": [{2}]},
    }
    assert json_safe(value) == {
        "1": [1, 2.5, True, None],
        "nan": [None, None],
        "other": ["0.1", "b'x'"],
        "\udc80": {"deep": [[2]]},
    }
    with service(LENGTHS) as asked:
        asked_for(asked.url, ["\udc80"], rows=[row(missing=math.nan)])
    assert asked.contents[0]["rows"] == [row(missing=None)]


@pytest.mark.parametrize(
    "url", ["http://", "http:///score", "https://:1", "http://host:port", "http://h:99999"]
)
def test_an_address_without_a_host(url: str) -> None:
    with pytest.raises(ValueError, match=r"names no host and port .*http://127\.0\.0\.1:8000/score"):
        resolve(url)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("timeout_s", 0.0),
        ("timeout_s", math.nan),
        ("timeout_s", math.inf),
        ("retries", -1),
        ("backoff_s", -0.5),
        ("backoff_s", math.nan),
        ("batch_size", 0),
    ],
)
def test_options_out_of_range(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"http\.{option}={value}"):
        HTTPOptions(**{option: value})  # type: ignore[arg-type]


def test_options_from_the_command_line() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--reward", type=RewardSpec, default=RewardSpec())
    words = [
        "--reward.functions",
        "{http://127.0.0.1:8000/score: 0.5, length: 1}",
        "--reward.http.timeout_s",
        "5",
        "--reward.http.headers",
        "{Authorization: Bearer $TOKEN}",
    ]
    spec = parser.instantiate(parser.parse_args(words)).reward
    assert spec.weights({}) == {"http://127.0.0.1:8000/score": 0.5, "length": 1.0}
    assert spec.http == HTTPOptions(timeout_s=5.0, headers={"Authorization": "Bearer $TOKEN"})
    words = ["--reward.functions", "https://rewards.example/score?model=a"]
    assert parser.instantiate(parser.parse_args(words)).reward.names() == words[1:]
