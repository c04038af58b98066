"""A Ray of the job's own, and one that runs already: how it is started or joined, and what is refused."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import ray
import torch
from ray._private import services, utils
from ray._private.node import Node
from ray.exceptions import AuthenticationError

from rlhf_lightning.controller import WorkerTimeoutError, connection
from rlhf_lightning.controller.connection import check_address, join, start_ray

SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
"""The frame with which a server of gRPC begins."""


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (
            Exception("The current node timed out."),
            "Ray did not start on this machine: The current node timed",
        ),
        (RuntimeError("another"), "another"),
    ],
)
def test_a_node_that_is_late_is_told(theirs: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(**_: object) -> None:
        raise theirs  # as Ray's node.py does, 30 seconds after it has started its processes

    popen = services.ConsolePopen
    monkeypatch.setattr(ray, "init", late)
    with pytest.raises((WorkerTimeoutError, RuntimeError), match=f"^{told}"):
        start_ray(1)
    assert services.ConsolePopen is popen


@pytest.fixture(autouse=True)
def _heeded() -> Iterator[None]:
    """Ctrl-C has Python's handler; in a process that a shell has put in the background it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGTERM)
    yield
    for number, theirs in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, theirs)


@pytest.fixture(autouse=True)
def _on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray runs on this machine, where a cluster is to be joined."""
    monkeypatch.setattr(services, "find_node_ids", lambda: {"a"})


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Ray is told as it begins, and how it starts processes then; it sets handlers of SIGTERM."""
    found = dict[str, Any]()

    def init(**given: object) -> None:
        found.update(given, popen=services.ConsolePopen, heaps=os.environ.get("MALLOC_ARENA_MAX"))
        found.update(server=Node.start_api_server)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")  # as Ray does
        if threading.current_thread() is threading.main_thread():
            utils.set_sigterm_handler(lambda *_: sys.exit(1))  # the same
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(134))  # its core does

    monkeypatch.setattr(ray, "init", init)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Ray ends with its group")
def test_a_ray_of_its_own_is_apart_and_as_eager_as_others(begun: dict[str, Any]) -> None:
    popen, server = services.ConsolePopen, Node.start_api_server
    start_ray(7)
    assert (begun["address"], begun["num_cpus"]) == ("local", 7)
    assert begun["_system_config"] == {"worker_niceness": 0}
    assert begun["popen"].keywords == {"process_group": 0}
    assert services.ConsolePopen is popen
    assert begun["server"] is not server, "nobody asks for it, and Ray would wait for it"
    assert Node.start_api_server is server


@pytest.mark.parametrize(("given", "has"), [(None, "1"), ("4", "4")])
def test_a_ray_of_its_own_has_one_heap_a_process_unless_told_otherwise(
    begun: dict[str, Any], monkeypatch: pytest.MonkeyPatch, given: str | None, has: str
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("MALLOC_ARENA_MAX", given or "")
    if given is None:
        monkeypatch.delenv("MALLOC_ARENA_MAX")
    start_ray(1)
    assert begun["heaps"] == has
    assert os.environ["RAY_AUTH_MODE"] == "token", "what Ray sets stays"
    assert os.environ.get("MALLOC_ARENA_MAX") == given, (
        "this process and others that it starts are left alone"
    )


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_ray_of_its_own_has_the_gpus_that_torch_can_use(
    begun: dict[str, Any], monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    start_ray(1)
    assert begun["num_gpus"] == gpus


def test_a_cluster_is_joined_as_it_is(begun: dict[str, Any]) -> None:
    join("10.0.0.1:6379")
    assert begun["address"] == "10.0.0.1:6379"
    assert begun["popen"] is services.ConsolePopen
    assert "_system_config" not in begun


@pytest.mark.parametrize("begin", [lambda: start_ray(1), lambda: join("auto")], ids=["start", "join"])
def test_sigterm_ends_with_what_a_shell_calls_it(
    begun: dict[str, Any], begin: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's core aborts, and its Python ends with 15; with 1, or 15, while it starts."""
    theirs = utils.set_sigterm_handler
    monkeypatch.setattr(connection, "TERMINATED", noted := threading.Event())
    before, other = signal.getsignal(signal.SIGTERM), threading.Thread(target=begin)
    other.start()
    other.join()
    assert signal.getsignal(signal.SIGTERM) is before, "none but the main thread may"
    begin()
    assert utils.set_sigterm_handler is theirs
    assert not noted.is_set()
    with pytest.raises(SystemExit, match=r"^143$"):
        signal.raise_signal(signal.SIGTERM)
    assert noted.is_set()


@pytest.mark.parametrize("begin", [lambda: start_ray(1), lambda: join("auto")], ids=["start", "join"])
@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize(
    ("asked", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_what_asks_it_to_end_waits_until_ray_is_up_but_only_once(
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[[], None],
    asked: signal.Signals,
    ends: type[BaseException],
    times: int,
) -> None:
    monkeypatch.setattr(connection, "TERMINATED", threading.Event())
    handlers = {signal.SIGINT: signal.getsignal(signal.SIGINT), signal.SIGTERM: connection._end}
    steps = list[str]()

    def init(**_: object) -> None:
        for _press in range(times):
            signal.raise_signal(asked)
        steps.append("up")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ends) if times else nullcontext():
        begin()
    assert steps == ["up"] * (times < 2)
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_nothing_aborts_after_a_sigterm_that_came_as_ray_started(
    begun: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its core sets an alarm as it catches one, and aborts at that."""
    monkeypatch.setattr(connection, "TERMINATED", threading.Event())
    alarms = list[int]()
    monkeypatch.setattr(signal, "alarm", alarms.append)
    start_ray(1)
    assert not alarms
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    assert alarms == [0]


@pytest.mark.parametrize("theirs", [signal.SIG_IGN, signal.SIG_DFL])
def test_who_has_no_handler_of_ctrl_c_gets_none(
    monkeypatch: pytest.MonkeyPatch, theirs: signal.Handlers
) -> None:
    seen = list[object]()
    monkeypatch.setattr(ray, "init", lambda **_: seen.append(signal.getsignal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, theirs)
    try:
        start_ray(1)
        assert seen == [theirs] == [signal.getsignal(signal.SIGINT)]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("origin", ["strategy.address", "RAY_ADDRESS"])
@pytest.mark.parametrize("theirs", [ConnectionError, AuthenticationError])
def test_a_cluster_that_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, theirs: Callable[[str], Exception], origin: str
) -> None:
    """Ray itself ends the second where RAY_AUTH_MODE=token and no token is found."""

    def refuse(**_: object) -> None:
        raise theirs("no token")

    monkeypatch.setattr(ray, "init", refuse)
    said = rf"^{origin}='10\.0\.0\.1:6379': no Ray cluster .* \(no token.*\)\. .*MODE=token .*AUTH_TOKEN"
    with pytest.raises(ValueError, match=said):
        join("10.0.0.1:6379", origin)


@pytest.mark.parametrize(
    ("theirs", "kind", "told"),
    [
        (
            "Version mismatch: with:\n  Ray: 2.59\n",
            ValueError,
            r"^strategy.* with: Ray: 2\.59\. Start .*theirs",
        ),
        ("can't start new thread", RuntimeError, r"^can't start new thread$"),
    ],
)
def test_a_cluster_of_another_version_is_told(
    monkeypatch: pytest.MonkeyPatch, theirs: str, kind: type[Exception], told: str
) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError(theirs)

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(kind, match=told):
        join("auto")


def test_a_machine_that_is_no_node_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[object]()
    monkeypatch.setattr(ray, "init", lambda **given: begun.append(given))
    monkeypatch.setattr(services, "find_node_ids", set[str])
    said = (
        r"^strategy\.address='head:6379': .* this machine, on which no Ray runs\. Run .*`ray start --address"
    )
    with pytest.raises(ValueError, match=said):
        join("head:6379")
    assert begun == []
    join("auto")  # Ray says so itself, at once
    assert len(begun) == 1


def test_a_machine_that_is_a_node_of_another_cluster_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("Failed to connect") from RuntimeError("No node info found")  # after a minute

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ValueError, match=r"\(Failed to connect\)\. .* must be one of its nodes\. Run "):
        join("head:6379")


@contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """The address of who answers so to the first that asks; nothing where empty, while the door is open."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as asked, suppress(ConnectionResetError):
                asked.sendall(answer)
                while asked.recv(1024):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_who_answers_as_ray_does_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    with listening(SETTINGS) as address:
        check_address(address)
    with listening(SETTINGS) as address:
        check_address(address.replace("127.0.0.1", "[127.0.0.1]"))  # as those of IPv6 are written
    check_address("auto")
    said = r"answers there \(what listens there is not Ray\)"
    with listening(b"HTTP/1.1 400 Bad Request\r\n") as address, pytest.raises(ValueError, match=said):
        check_address(address)


def test_who_speaks_tls_needs_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_S", 0.1)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with listening(b"") as address:
        check_address(address)
    monkeypatch.setenv("RAY_USE_TLS", "0")
    with listening(b"") as address, pytest.raises(ValueError, match=r"answers there \(timed out\)"):
        check_address(address)


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "host:name", ":6379", "ray://10.0.0.1:10001", "http://10.0.0.1:8265"]
)
@pytest.mark.parametrize("origin", ["strategy.address", "RAY_ADDRESS"])
def test_what_is_no_host_and_port_is_refused(address: str, origin: str) -> None:
    with pytest.raises(ValueError, match=rf"^{origin}='{address}': write host:port .* local to use this"):
        check_address(address, origin)
