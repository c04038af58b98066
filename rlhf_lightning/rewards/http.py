"""A reward function that is a service: texts are sent to it as JSON, and it returns the scores.

    POST {"prompts": [...], "responses": [...], "rows": [...]}  ->  {"scores": [1.0, ...]}, or the list alone

Failures that may be temporary (a time-out, a lost connection, 429, 500 to 599) are retried, a bounded number
of times; any other answer without a number for each row ends the run at once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from random import SystemRandom
from string import Template
from typing import NamedTuple, cast
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager, Timeout
from urllib3.exceptions import HTTPError
from urllib3.exceptions import TimeoutError as LateError
from urllib3.util import make_headers, parse_url

logger = logging.getLogger(__name__)

SCHEMES = ("http://", "https://")
"""Beginnings of a service's address."""
RETRIES: Counter[str] = Counter()
"""Requests that this process has repeated, by address."""
MAX_CONNECT_S = 5.0
"""Longest wait for a connection: a running service accepts it at once."""
MAX_PAUSE_S = 60.0
"""Longest pause before a retry, before it is spread."""
_SPREAD = SystemRandom()
"""Lengthens pauses, so that workers which were refused at once do not come back at once. No seed
moves it, and processes that were forked from one draw different numbers."""
_CHUNK = 1 << 16
_SENT = re.compile(r"[^\r\n\u0100-\U0010ffff]*")
"""What a header's value may be."""


class ServiceError(ValueError):
    """A service gave no scores; the message begins with its address."""


@dataclass(frozen=True, kw_only=True)
class HTTPOptions:
    """How services are asked."""

    timeout_s: float = 30.0
    """Longest wait for the answer to one request."""
    retries: int = 3
    """Retries of a request after a time-out, a lost connection, 429 or 500 to 599."""
    backoff_s: float = 0.5
    """Pause before the first retry; it doubles, up to a minute, and up to as much is added."""
    batch_size: int = 256
    """Most rows in a request."""
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every request; `$NAME` in a value is an environment variable, so that no secret is logged."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"http.timeout_s={self.timeout_s}: is not a positive number. Try 30.")
        if self.retries < 0:
            raise ValueError(f"http.retries={self.retries}: is negative. Use 0 to try each request once.")
        if not (math.isfinite(self.backoff_s) and self.backoff_s >= 0):
            raise ValueError(f"http.backoff_s={self.backoff_s}: use 0 to repeat a request at once.")
        if self.batch_size < 1:
            raise ValueError(f"http.batch_size={self.batch_size}: must be at least 1. Try 256.")


class _Answer(NamedTuple):
    """The result of one request."""

    status: int
    """HTTP status; 0 where no answer came."""
    said: str
    """The status, or why there is none, in words."""
    body: bytes = b""

    @property
    def may_pass(self) -> bool:
        """Whether a retry may succeed."""
        return self.status in (0, 429) or self.status >= 500


@dataclass(frozen=True)
class Service:
    """A reward function at an address; workers call it, so that `localhost` is the worker's own node.

    Proxies of the environment's variables are used, but not for this machine.

    Raises:
        ValueError: the address names no host.
    """

    url: str
    options: HTTPOptions = field(default_factory=HTTPOptions)

    def __post_init__(self) -> None:
        if not _host(self.url):
            raise ValueError(
                f"{self.url}: names no host and port that could be asked for scores. Type an address such as "
                "http://127.0.0.1:8000/score."
            )

    def __call__(
        self, prompts: list[str], responses: list[str], rows: list[dict[str, object]]
    ) -> Sequence[float]:
        """Score the responses, some at a time.

        Raises:
            ServiceError: the service cannot be reached, refuses, or answers something else than scores.
        """
        size = self.options.batch_size
        headers = {"Content-Type": "application/json"} | self.headers()
        scores: list[float] = []
        with _pool(self.url) as pool:
            for start in range(0, len(rows), size):
                part = slice(start, start + size)
                content = {"prompts": prompts[part], "responses": responses[part], "rows": rows[part]}
                body = json.dumps(json_safe(content)).encode()
                asked = f"{len(rows[part])} rows, the first with the prompt {prompts[start][:60]!r}"
                answer = self._answer(pool, body, headers, asked)
                scores += self._scores(answer, len(rows[part]), asked)
        return scores

    def headers(self) -> dict[str, str]:
        """The headers with the values of environment variables put in.

        Raises:
            ServiceError: a variable is not set, or cannot be sent.
        """
        return {name: self._filled(name, value) for name, value in self.options.headers.items()}

    def _filled(self, name: str, value: str) -> str:
        """A header's value; no message shows it, for it may be a secret."""
        template = Template(value)
        try:
            filled = template.substitute(os.environ).strip()  # a file's content often ends in a line break
        except KeyError as err:
            raise ServiceError(
                f"{self.url}: the header {name} takes the environment variable {err.args[0]}, which is "
                "not set in this process. Set it before the run, on every node."
            ) from err
        except ValueError as err:
            raise ServiceError(
                f"{self.url}: the header {name} has a $ without a name after it. Write $$ for a plain $."
            ) from err
        if not _SENT.fullmatch(filled):
            taken = "".join(f" (it takes ${variable})" for variable in template.get_identifiers())
            raise ServiceError(
                f"{self.url}: the header {name}{taken} has a line break within it, or a character beyond "
                "Latin-1, and cannot be sent. Write it as one line, on every node."
            )
        return filled

    def _answer(self, pool: PoolManager, body: bytes, headers: Mapping[str, str], asked: str) -> _Answer:
        """Ask until an answer comes that another try would not change."""
        tries = 1 + self.options.retries
        answer = self._post(pool, body, headers)
        for number in range(1, tries):
            if not answer.may_pass:
                return answer
            pause_s = min(self.options.backoff_s * 2 ** min(number - 1, 30), MAX_PAUSE_S)
            pause_s *= _SPREAD.uniform(1, 2)
            RETRIES[self.url] += 1
            logger.warning(
                "%s: try %d of %d failed (%s); next in %.1f s", self.url, number, tries, answer.said, pause_s
            )
            time.sleep(pause_s)
            answer = self._post(pool, body, headers)
        if answer.may_pass:
            raise ServiceError(
                f"{self.url}: no scores for {asked}; tries: {tries}, the last answer: {answer.said}. See "
                f"whether the service runs; http.timeout_s ({self.options.timeout_s} s) and http.retries say "
                "how long it is waited for."
            )
        return answer

    def _post(self, pool: PoolManager, body: bytes, headers: Mapping[str, str]) -> _Answer:
        """Send one request."""
        limit_s = self.options.timeout_s
        deadline = time.monotonic() + limit_s
        try:
            response = pool.request(
                "POST",
                self.url,
                body=body,
                headers=headers,
                timeout=Timeout(connect=min(limit_s, MAX_CONNECT_S), read=limit_s),
                retries=False,
                redirect=False,
                preload_content=False,
            )
            try:
                content = _read(response, deadline)
            finally:
                response.close()
        except HTTPError as err:
            return _Answer(0, f"{type(err).__name__}: {err}")
        target = response.headers.get("Location")
        points = f" that points to {target}" if target else ""
        said = f"{response.status} {response.reason or ''}{points}, {_excerpt(content)}"
        return _Answer(response.status, said, content)

    def _scores(self, answer: _Answer, count: int, asked: str) -> list[float]:
        """Read the scores, whose values the caller checks."""
        if not 200 <= answer.status < 300:
            raise ServiceError(
                f"{self.url}: refused {asked}: {answer.said}. Check the address, and that it takes a POST of "
                "JSON with prompts, responses and rows."
            )
        try:
            content = json.loads(answer.body)
        except ValueError as err:
            raise ServiceError(
                f"{self.url}: did not answer with JSON for {asked}: {answer.said}. "
                'Return {"scores": [...]}.'
            ) from err
        scores = content.get("scores") if isinstance(content, dict) else content
        if not isinstance(scores, list):
            raise ServiceError(
                f"{self.url}: answered without a list of scores for {asked}: {answer.said}. "
                'Return {"scores": [...]}.'
            )
        if len(scores) != count:
            raise ServiceError(
                f"{self.url}: returned {len(scores)} scores for {asked}. Return one number for each response."
            )
        return cast("list[float]", scores)


def json_safe(value: object) -> object:
    """A value that JSON can hold: other objects become texts, numbers that are not finite None."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_safe(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def _host(url: str) -> str:
    """The host of an address; empty where there is none, or the port is no valid one."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "" if parts.port is None or parts.port > 0 else ""
    except ValueError:
        return ""


def _pool(url: str) -> PoolManager:
    """Connections to a service, through a proxy where the environment names one for it."""
    host = _host(url)
    here = _is_this_machine(host) or proxy_bypass(host)
    proxy = None if here else getproxies().get(urlsplit(url).scheme)
    return _proxied(proxy) if proxy else PoolManager()


def _proxied(address: str) -> ProxyManager:
    """Connections through a proxy, written as `proxy:3128` or `http://user:password@proxy:3128`."""
    address = address if "://" in address else f"http://{address}"
    auth = parse_url(address).auth
    headers = make_headers(proxy_basic_auth=unquote(auth)) if auth else None
    return ProxyManager(address, proxy_headers=headers)


def _is_this_machine(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _read(response: BaseHTTPResponse, deadline: float) -> bytes:
    """The whole body, until the deadline: the library's time-out is for each part of it alone."""
    parts = []
    while part := response.read1(_CHUNK, decode_content=True):
        parts.append(part)
        if time.monotonic() > deadline:
            raise LateError("its answer had begun, but was not complete in time")
    return b"".join(parts)


def _excerpt(body: bytes) -> str:
    return f"{body[:80].decode(errors='replace')!r}{'...' if len(body) > 80 else ''}"
