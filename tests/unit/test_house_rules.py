"""The repository keeps the house rules, and every rule turns red on a violation."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from tests import house_rules as rules
from tests.conftest import ROOT
from tests.house_rules import OTHERS, PRODUCT, Rule, Source

PRODUCT_FOLDERS = ("rlhf_lightning", "algos", "strategies")
OTHER_FOLDERS = ("tests", "examples", "benchmarks")
CHOICES = ("algos", "strategies")

EXCEPTIONS: dict[str, str] = {
    "rlhf_lightning/workers/opponent.py:19: Opponent: 3 classes": "an opponent is an actor wherever one is "
    "asked for: its draws, its seeds, its stop tokens, its place beside a batch ahead"
}
"""Beginning of a complaint -> why it stands."""


@cache
def repository_files() -> list[str]:
    """Files that git tracks or would add, links left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("the files of the repository are known to git alone, and this is no git checkout")
    names = sorted(set(listed.stdout.split("\0")) - {""})
    return [name for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8", errors="ignore")


@cache
def source_of(name: str) -> Source:
    """The tree of a file is made once, whichever folders a rule looks at."""
    return Source(path=name, text=read(name))


def sources(*folders: str) -> list[Source]:
    names = [
        name
        for name in repository_files()
        if name.endswith(".py") and name.startswith(tuple(f"{f}/" for f in folders))
    ]
    assert names, f"no Python file in {folders}"
    return [source_of(name) for name in names]


@pytest.fixture(scope="module", autouse=True)
def sources_are_let_go() -> Iterator[None]:
    """Their trees are a million objects, which every later collection of garbage would look at."""
    yield
    source_of.cache_clear()


def agree(complaints: Iterator[str]) -> None:
    left = [complaint for complaint in complaints if not complaint.startswith(tuple(EXCEPTIONS))]
    assert not left, "\n" + "\n".join(left)


@pytest.mark.parametrize("rule", PRODUCT, ids=lambda rule: rule.__name__)
def test_product(rule: Rule) -> None:
    agree(complaint for source in sources(*PRODUCT_FOLDERS) for complaint in rule(source))


@pytest.mark.parametrize("rule", OTHERS, ids=lambda rule: rule.__name__)
def test_tests_examples_and_benchmarks(rule: Rule) -> None:
    agree(complaint for source in sources(*OTHER_FOLDERS) for complaint in rule(source))


def test_inheritance_is_shallow() -> None:
    agree(rules.inheritance(sources(*PRODUCT_FOLDERS)))


def test_most_files_are_short() -> None:
    agree(rules.file_length_p90(sources(*PRODUCT_FOLDERS)))


def test_core_names_no_algorithm_and_no_strategy() -> None:
    choices = [source for source in sources(*CHOICES) if not source.path.endswith("__init__.py")]
    classes = frozenset(
        node.name for source in choices for node in source.classes() if not node.name.startswith("_")
    )
    # `auto` and `local` are Ray's words too, for addresses of clusters on this machine.
    short = frozenset(Path(s.path).stem for s in choices) - {"auto", "local"}
    rule = partial(rules.names_no_choice, classes=classes, short=short)
    agree(complaint for source in sources("rlhf_lightning") for complaint in rule(source))


def test_configs() -> None:
    names = [
        name
        for name in repository_files()
        if name.startswith("configs/") and name.endswith((".yaml", ".yml"))
    ]
    agree(complaint for name in names for complaint in rules.config_file(name, read(name)))


def test_no_file_tells_of_a_machine() -> None:
    names = [name for name in repository_files() if (ROOT / name).stat().st_size < 1_000_000]
    agree(complaint for name in names for complaint in rules.no_machine(name, read(name)))


def function(*, lines: int, name: str = "f", indent: str = "") -> str:
    return f"{indent}def {name}(self):\n" + f"{indent}    pass\n" * (lines - 1)


def method(**options: object) -> str:
    return "class A:\n" + function(indent="    ", **options)  # type: ignore[arg-type]


# rule, path, text that keeps it, text that breaks it, what the complaint says
RED: list[tuple[Rule, str, str, str, str]] = [
    (rules.file_length, "a.py", "x = 1\n" * 400, "x = 1\n" * 401, "401 lines -> 400"),
    (rules.file_length, "algos/a.py", "x = 1\n" * 120, "x = 1\n" * 121, "121 lines -> 120"),
    (rules.function_length, "a.py", function(lines=60), function(lines=61), "a.py:1: f: 61 lines -> 60"),
    (
        rules.function_length,
        "a.py",
        method(lines=25, name="__init__"),
        method(lines=26, name="__init__"),
        "26 lines -> 25",
    ),
    (
        rules.function_length,
        "a.py",
        method(lines=40, name="step"),
        method(lines=41, name="step"),
        "41 lines -> 40",
    ),
    (
        rules.argument_count,
        "a.py",
        "def f(a, b, *, c, d, e, g): ...",
        "def f(a, b, *, c, d, e, g, h): ...",
        "7 arguments -> 6",
    ),
    (
        rules.argument_count,
        "a.py",
        "class A:\n def f(self, a, b, c, *, d, e, g): ...",
        "class A:\n @staticmethod\n def f(self, a, b, c, *, d, e, g): ...",
        "7 arguments",
    ),
    (
        rules.argument_count,
        "a.py",
        "class A:\n def on_end(self, a, b, c, d, e, f, g): ...",
        "def on_end(a, b, c, d, e, f, g): ...",
        "7 arguments",
    ),
    (
        rules.keyword_only,
        "a.py",
        "def f(a=1, b=2, *, c=3): ...",
        "def f(a, b=2, c=3): ...",
        "options by position: b, c -> keyword-only",
    ),
    (rules.keyword_only, "a.py", "def f(a, b, c, d): ...", "def f(a, b, c, d, e): ...", "5 by position -> 4"),
    (
        rules.keyword_only,
        "a.py",
        "def _f(a, b=2, c=3): ...",
        "class A:\n def __init__(self, a, b=2, c=3): ...",
        "options by position: b, c",
    ),
    (
        rules.keyword_only,
        "a.py",
        "class A:\n def forward(self, a, b=2, c=3): ...",
        "class A:\n def onward(self, a, b=2, c=3): ...",
        "b, c -> keyword",
    ),
    (
        rules.abstract_members,
        "a.py",
        "class A:\n" + " @abstractmethod\n def f(self): ...\n" * 7,
        "class A:\n" + " @abc.abstractmethod\n def f(self): ...\n" * 8,
        "8 abstract members -> 7",
    ),
    (
        rules.abstract_members,
        "a.py",
        "class A:\n" + " def f(self): ...\n" * 8,
        "class A(Protocol[T]):\n" + " def f(self): ...\n" * 8,
        "8 abstract members",
    ),
    (
        rules.blind_except,
        "a.py",
        "try: f()\nexcept Exception: raise",
        "try: f()\nexcept Exception: pass",
        "a.py:2: catches everything",
    ),
    (
        rules.blind_except,
        "a.py",
        "try: f()\nexcept ValueError: pass",
        "try: f()\nexcept: pass",
        "catches everything",
    ),
    (
        rules.blind_except,
        "a.py",
        "try: f()\nexcept (OSError, KeyError): pass",
        "try: f()\nexcept (OSError, BaseException): pass",
        "catches",
    ),
    (
        rules.one_public_class,
        "a.py",
        "class A: ...\nclass B: ...\nclass C: ...\nclass _D: ...\n@dataclass()\nclass E: ...\nclass F(A): 1",
        "class A: ...\nclass B: ...\nclass C: ...\nclass D: ...",
        "public classes A, B, C, D -> 3",
    ),
]


@pytest.mark.parametrize(
    ("rule", "path", "good", "bad", "says"), RED, ids=[f"{row[0].__name__}-{i}" for i, row in enumerate(RED)]
)
def test_rule_turns_red(rule: Rule, path: str, good: str, bad: str, says: str) -> None:
    assert list(rule(Source(path=path, text=good))) == []
    (complaint,) = rule(Source(path=path, text=bad))
    assert says in complaint


def test_every_rule_is_seen_red() -> None:
    assert {row[0] for row in RED} == set(PRODUCT) | set(OTHERS)


def test_inheritance_turns_red() -> None:
    chain = "class A(Module): ...\nclass B(A): ...\nclass C(pkg.B[int]): ...\n"
    assert list(rules.inheritance([Source(path="a.py", text=chain)])) == []
    deep = [Source(path="a.py", text=chain), Source(path="b.py", text="class D(Mixin, C): ...")]
    assert list(rules.inheritance(deep)) == ["b.py:1: D: 3 classes of ours above it -> 2"]


def test_p90_turns_red() -> None:
    short, long = Source(path="a.py", text="x = 1\n" * 300), Source(path="b.py", text="x = 1\n" * 301)
    assert list(rules.file_length_p90([short] * 9 + [long])) == []
    assert list(rules.file_length_p90([short] * 8 + [long] * 2)) == [
        "90% of the files have at most 301 lines -> 300"
    ]


@pytest.mark.parametrize(
    ("text", "num_complaints"),
    [
        ("x = PPO", 1),
        ("x = algos.PPO()", 1),
        ("name = 'ppo'", 1),
        ("'''About ppo.'''\nx = s.ppo", 0),
        ("class P: ...", 0),
    ],
)
def test_naming_a_choice_turns_red(text: str, num_complaints: int) -> None:
    found = rules.names_no_choice(
        Source(path="a.py", text=text), classes=frozenset({"PPO"}), short=frozenset({"ppo"})
    )
    assert len(list(found)) == num_complaints


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# rlhf fit -c configs/a.yaml\n" + "a: 1\n" * 39, ""),
        ("# rlhf fit -c configs/a.yaml\n" + "a: 1\n" * 40, "41 lines -> 40"),
        ("a: 1\n", "the first line -> # rlhf fit -c configs/a.yaml"),
        ("# rlhf fit -c configs/b.yaml\n", "the first line"),
        ("", "the first line"),
    ],
)
def test_config_turns_red(text: str, says: str) -> None:
    complaints = list(rules.config_file("configs/a.yaml", text))
    assert len(complaints) == bool(says)
    assert says in "".join(complaints)


@pytest.mark.parametrize(
    ("line", "is_red"),
    [
        ("cd /" + "work/main", True),
        ("find-links = /" + "opt/wheels/", True),
        ("open('/" + "home/me/x')", True),
        ("Work" + "place of the team", True),
        ("network/" + "work/main, ./" + "work/x, ~/" + "home/, framework", False),
    ],
)
def test_a_machine_turns_red(line: str, is_red: bool) -> None:
    assert bool(list(rules.no_machine("a.md", line))) is is_red


def test_exceptions_still_stand() -> None:
    unused = set(EXCEPTIONS)
    files = [source_of(name) for name in {exception.partition(":")[0] for exception in EXCEPTIONS}]
    of_files = (complaint for source in files for rule in PRODUCT for complaint in rule(source))
    for complaint in (*of_files, *rules.inheritance(sources(*PRODUCT_FOLDERS))):
        unused -= {name for name in unused if complaint.startswith(name)}
    assert not unused, f"no complaint begins with {sorted(unused)}: remove them"
