"""`rlhf reshard` on good input and on bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rlhf_lightning.commands.blocks import WIDTH
from rlhf_lightning.spec import EMBEDDED_DIRECTORY
from tests.unit.rlhf import Rlhf

FIGURE_8 = ("reshard", "--train", "1,4,2", "--generate", "1,2")
KEYS = ["gen_tp_groups", "gen_pp_groups", "micro_dp_groups", "volume_bytes", "peak_bytes", "redundant_bytes"]


def answer(rlhf: Rlhf, *words: str) -> dict[str, list[object]]:
    code, out, err = rlhf.run(*words, "--json")
    assert (code, err) == (0, "")
    found: dict[str, list[object]] = json.loads(out)
    assert list(found) == KEYS
    return found


def lines(rlhf: Rlhf, *words: str) -> list[str]:
    code, out, err = rlhf.run(*words)
    assert (code, err) == (0, "")
    return out.splitlines()


def test_json_of_the_figure(rlhf: Rlhf) -> None:
    found = answer(rlhf, *FIGURE_8)
    assert found["gen_tp_groups"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert found["gen_pp_groups"] == [[rank] for rank in range(8)]
    assert found["micro_dp_groups"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found["volume_bytes"] == [3_369_207_808] * 8  # a quarter of 13,476,831,232
    assert found["peak_bytes"] == [6_738_415_616] * 8
    assert found["redundant_bytes"] == [0] * 8


def test_json_of_the_other_rules(rlhf: Rlhf) -> None:
    found = answer(rlhf, *FIGURE_8, "--rule", "vanilla", "--bytes", "800")
    assert found["gen_tp_groups"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found["micro_dp_groups"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert (found["volume_bytes"], found["peak_bytes"]) == ([600] * 8, [800] * 8)
    assert found["redundant_bytes"] == [0, 200, 200, 0, 0, 200, 200, 0]
    found = answer(rlhf, *FIGURE_8, "--rule", "deepspeed-chat", "--bytes", "100")
    assert found["volume_bytes"] == [87.5] * 8
    assert found["redundant_bytes"] == [12.5] * 8


def test_the_order_of_ranks(rlhf: Rlhf) -> None:
    words = ("reshard", "--train", "2,2,2", "--generate", "1,1", "--bytes", "80")
    assert answer(rlhf, *words)["micro_dp_groups"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert answer(rlhf, *words, "--order", "tdp")["micro_dp_groups"] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_text_draws_what_each_rank_keeps_and_receives(rlhf: Rlhf) -> None:
    found = lines(rlhf, *FIGURE_8)
    assert found[0].startswith("llama-7b, 13.48 GB: train (p=1, t=4, d=2) -> generate (pg=1, tg=2, dg=2)")
    assert found[2].split("groups  ")[1] == "[0 2] [1 3] [4 6] [5 7]"
    assert found[7].split() == ["0", "4", "|#+", "|", "3.37", "GB", "3.37", "GB", "6.74", "GB", "0", "B"]
    pictures = [line.split("|")[1] for line in found if "|" in line]
    assert pictures == ["#+  ", "+#  ", "  #+", "  +#"]
    found = lines(rlhf, *FIGURE_8, "--rule", "vanilla")
    assert [line.split("|")[1] for line in found if "|" in line] == ["#+..", ".x++", "++x.", "..+#"]
    assert [line.split()[2:] for line in found if line.startswith("worst rank")] == [
        ["10.11", "GB", "13.48", "GB", "3.37", "GB"]
    ]


@pytest.mark.parametrize(
    ("train", "generate", "ranks"),
    [
        ("1,1,64", "1,1", ["0-63"]),
        ("1,2,3", "1,1", ["0 2 4", "1 3 5"]),
        ("1,2,8", "1,1", ["0 2 .. 14", "1 3 .. 15"]),
        ("4,32,2", "1,32", [f"{r}-{r + 1} {r + 128}-{r + 129}" for r in range(0, 128, 2)]),
    ],
)
def test_ranks_that_are_alike_share_a_line(rlhf: Rlhf, train: str, generate: str, ranks: list[str]) -> None:
    found = lines(rlhf, "reshard", "--train", train, "--generate", generate)
    assert [line.split("|")[0].strip() for line in found if "|" in line] == ranks
    assert max(map(len, found)) < 150


@pytest.mark.parametrize(("d", "end"), [(8, "[14] [15]"), (9, "[14] [15] and 2 more")])
def test_a_line_of_groups_has_sixteen_ranks(rlhf: Rlhf, d: int, end: str) -> None:
    found = lines(rlhf, "reshard", "--train", f"1,2,{d}", "--generate", "1,1")
    assert found[2].split("groups  ")[1].endswith(end)


def test_devices_that_are_alike_share_a_line(rlhf: Rlhf) -> None:
    found = lines(rlhf, "reshard", "--train", "2,4,1", "--apart", "1,2,4")
    assert [line.split()[0] for line in found[3:]] == ["0-7", "8", "9", "all"]
    assert found[4].split()[:4] == ["8", "10", "12", "14"]
    assert found[4].endswith("   0-1 4-5")


def test_a_wide_layout_is_drawn_on_a_line(rlhf: Rlhf) -> None:
    found = lines(rlhf, "reshard", "--train", "4,8,2", "--generate", "1,8", "--rule", "deepspeed-chat")
    pictures = [line.split("|")[1] for line in found if "|" in line]
    assert len(pictures) == 64
    assert {len(picture) for picture in pictures} == {WIDTH}


def test_models_are_those_of_the_mapping(rlhf: Rlhf) -> None:
    words = ("reshard", "--train", "1,2,1", "--generate", "1,1", "--model")
    assert answer(rlhf, *words, "llama-70b")["peak_bytes"] == [137_953_296_384] * 2
    found = answer(rlhf, *words, str(EMBEDDED_DIRECTORY))
    assert found == answer(rlhf, *words, "embedded")


@pytest.mark.parametrize("rule", ["hybridflow", "vanilla", "deepspeed-chat"])
def test_the_picture_is_an_image(rlhf: Rlhf, tmp_path: Path, rule: str) -> None:
    picture = tmp_path / "plan.svg"
    lines(rlhf, *FIGURE_8, "--rule", rule, "--picture", str(picture))
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")  # noqa: S314 - our own file
    patches = picture.read_text().count('id="patch_')
    assert patches > 8 * (2 if rule == "hybridflow" else 4)


def test_a_picture_that_cannot_be_written(rlhf: Rlhf) -> None:
    said = rlhf.refused(*FIGURE_8, "--picture", "nowhere/x.svg")
    assert said == (
        "--picture nowhere/x.svg: there is no directory nowhere. Type a file in a directory that exists."
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("1,4,2", "1,3"), ("train t=4, generate t=3", "Try generate t=1 or 2 or 4")),
        (("4,1,1", "3,1"), ("train p=4, generate p=3", "Try generate p=1 or 2 or 4")),
        (("1,4", "1,2"), ("--train: 1,4 is not p,t,d", "such as 1,4,2")),
        (("1,4,0", "1,2"), ("--train: 1,4,0 is not p,t,d", "from 1 up")),
        (("1,four,2", "1,2"), ("--train: 1,four,2 is not p,t,d",)),
        (("64,64,128", "1,1"), ("--train: 64,64,128 are 524,288 ranks", "up to 4,096", "smaller d")),
        (("1,4,2", "2"), ("--generate: 2 is not pg,tg", "such as 1,2")),
        (("1,4,2", "0,2"), ("--generate: 0,2 is not pg,tg",)),
        (("1,3,1", "1,1"), ("t=3: llama-7b has 32 heads", "Try t=2 or 4")),
        (("1,64,1", "1,1"), ("t=64: llama-7b has 32 heads", "Try t=32")),
        (("1,12,1", "1,1", "--model", "llama-70b"), ("64 heads, 8 key-value heads", "Try t=8 or 16")),
        (("33,1,1", "1,1"), ("p=33 stages", "32 layers", "Try p=32")),
        (("1,1,1", "1,1", "--model", "llama-8b"), ("'llama-8b'", "llama-7b, llama-13b")),
        (("1,1,1", "1,1", "--bytes", "0"), ("--bytes: 0 is not a whole number",)),
        (("1,1,1", "1,1", "--bytes", "5", "--model", "llama-7b"), ("not allowed with argument --bytes",)),
        (("1,1,1", "1,1", "--rule", "verl"), ("'verl'", "'hybridflow', 'vanilla', 'deepspeed-chat'")),
        (("1,1,1", "1,1", "--order", "dtp"), ("'dtp'", "'tpd', 'tdp'")),
        (("1,1,1", "1,1", "--picture", "plan.doc"), ("plan.doc", "Try plan.png or .svg")),
        (("1,1,1", "1,1", "--jsn"), ("--jsn", "--help")),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value, tuple) and "1," in value[0] else "",
)
def test_what_is_impossible_is_refused(rlhf: Rlhf, words: tuple[str, ...], said: tuple[str, ...]) -> None:
    train, generate, *rest = words
    message = rlhf.refused("reshard", "--train", train, "--generate", generate, *rest)
    assert [part for part in said if part not in message] == [], message


def test_both_layouts_are_asked_for(rlhf: Rlhf) -> None:
    assert "--generate" in rlhf.refused("reshard", "--train", "1,1,1")
    assert "--train" in rlhf.refused("reshard")


def test_a_generator_on_other_devices(rlhf: Rlhf) -> None:
    words = ("reshard", "--train", "2,2,1", "--apart", "1,2,2", "--bytes", "800", "--devices-per-node", "6")
    code, out, err = rlhf.run(*words, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [one["device"] for one in found] == list(range(8))
    assert [one["received_bytes"] for one in found] == [0] * 4 + [400] * 4
    assert [one["network_bytes"] for one in found] == [0] * 6 + [400] * 2
    assert [one["sent_bytes"] for one in found] == [400] * 4 + [0] * 4
    assert found[4]["sources"] == [0, 2]
    text = lines(rlhf, *words)
    assert text[0] == (
        "a model, 800 B: train (p=2, t=2, d=1) on devices 0 to 3 -> generate (pg=1, tg=2, 2 copies) on 4 to 7"
    )
    assert text[-1].split() == ["all", "0", "B", "1.60", "kB", "800", "B", "1.60", "kB"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--apart", "1,3,1"), "--apart with t=3: llama-7b has 32 heads"),
        (("--apart", "3,1,1"), "p=3: 32 layers do not divide into as many stages. Try p=1"),
        (("--apart", "1,2"), "1,2 is not pg,tg,d"),
        ((), "one of the arguments --generate --apart is required"),
        (("--apart", "1,1,1", "--generate", "1,1"), "not allowed with argument"),
    ],
)
def test_refused_apart(rlhf: Rlhf, words: tuple[str, ...], says: str) -> None:
    code, _, err = rlhf.run("reshard", "--train", "1,4,1", *words)
    assert code != 0
    assert says in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--apart", "1,2,4", "--rule", "vanilla"), "--rule vanilla: nothing reads it with --apart. Leave"),
        (("--apart", "1,2,4", "--picture", "x.svg"), "--picture x.svg: nothing reads it with --apart."),
        (("--generate", "1,2", "--devices-per-node", "4"), "--devices-per-node 4: nothing reads it with --"),
    ],
)
def test_what_nothing_reads_is_refused(rlhf: Rlhf, words: tuple[str, ...], said: str) -> None:
    assert said in rlhf.refused("reshard", "--train", "1,4,2", *words)


def test_it_answers_without_importing_lightning() -> None:
    command = ["rlhf", "reshard", "--train", "1,4,2", "--generate", "1,2"]
    program = (
        f"import sys; from rlhf_lightning import entry; sys.argv = {command}; entry.main(); "
        "sys.exit(bool({'lightning', 'ray', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, stdout=subprocess.DEVNULL)
    assert ended.returncode == 0


def test_a_file_with_the_name_of_a_library_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(3)")
    script = str(Path(sys.executable).with_name("rlhf"))
    command = [script, "reshard", "--train", "1,4,2", "--generate", "1,2"]
    ended = subprocess.run(command, check=False, cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert ended.returncode == 0
