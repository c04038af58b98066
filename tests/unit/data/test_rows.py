"""Reading rows: every format, and every way in which a file can be wrong."""

from __future__ import annotations

import csv
import gzip
import json
import re
import subprocess
from pathlib import Path

import pytest

from rlhf_lightning import extras
from rlhf_lightning.data.rows import read_rows

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "é", "n": 2}, {"prompt": "c", "n": 3}]
DATA = Path(__file__).parents[3].parent / "shared" / "data"


def test_json_lines_skips_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        '\ufeff{"prompt": "a", "n": 1}\n\n{"prompt": "é", "n": 2}\r\n{"prompt": "c", "n": 3}'.encode()
    )
    assert read_rows(str(file)) == ROWS
    assert read_rows(str(file), limit=2) == ROWS[:2]


def test_json_is_an_array_or_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("\ufeff " + json.dumps(ROWS, indent=2))
    assert read_rows(str(file)) == ROWS
    assert read_rows(str(file), limit=1) == ROWS[:1]
    file.write_text("\n".join(map(json.dumps, ROWS)))
    assert read_rows(str(file), limit=2) == ROWS[:2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"n": 1},\n {"n": 2}, 3]', ", row 3: a row is a JSON object, this is a int"),
        (
            '[{"n": 1},\n {"n": 2},\n {"n": 3]',
            r", line 3: not JSON \(Expecting .*, column 9\): '\{\"n\": 3\]'",
        ),
        ("[]", "it holds no rows"),
    ],
)
def test_corrupt_array(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"a\.json.*{message}"):
        read_rows(str(file))


def test_a_table_of_texts_is_answered_with_a_command_that_converts_it(tmp_path: Path) -> None:
    rows = [{"prompt": 'a, "b"\nc', "answer": "é"}, {"prompt": "d", "answer": "007"}]
    with (tmp_path / "my rows.csv").open("w", newline="") as file:
        csv.DictWriter(file, ["prompt", "answer"]).writeheader()
        csv.DictWriter(file, ["prompt", "answer"]).writerows(rows)
    with pytest.raises(ValueError, match=r"\.csv.*Convert it: python -c") as error:
        read_rows(str(tmp_path / "my rows.csv"))
    typed = str(error.value).partition("Convert it: ")[2]
    subprocess.run(["/bin/sh", "-c", typed], cwd=tmp_path, check=True)
    assert read_rows(str(tmp_path / "my rows.jsonl")) == rows


def test_whole_characters_are_read_however_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(rb'{"prompt": "\ud83d\ude00 \\ud83d"}' + b"\n")
    assert read_rows(str(file)) == [{"prompt": "\U0001f600 \\ud83d"}]


def test_gzipped_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    assert read_rows(str(file)) == [{"prompt": "a"}]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    assert read_rows(str(file)) == ROWS
    assert read_rows(str(file), limit=1) == ROWS[:1]


def test_data_set_directories_and_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_list(ROWS)
    split.save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"train": split, "extra": split.select([2])}).save_to_disk(tmp_path / "both")
    assert read_rows(str(tmp_path / "single"), limit=2) == ROWS[:2]
    assert read_rows(str(tmp_path / "both")) == ROWS
    assert read_rows(f"{tmp_path / 'both'}:extra") == ROWS[2:]
    with pytest.raises(ValueError, match=r"no split 'test'; it has: train, extra"):
        read_rows(f"{tmp_path / 'both'}:test")


def test_what_a_saved_data_set_does_not_hold(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    unnamed, both, named = (str(tmp_path / name) for name in ("unnamed", "both", "named"))
    datasets.Dataset.from_list(ROWS).save_to_disk(unnamed)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(both)
    datasets.Dataset.from_list(ROWS, split="train").save_to_disk(named)
    assert read_rows(f"{named}:train") == ROWS
    for given, told in (
        (f"{named}:test", "the directory holds train alone. Leave :test out"),
        (f"{unnamed}:test", "the directory holds one split alone, without a name. Leave :test out"),
        (f"{named}@main:train", "what save_to_disk wrote has no subsets. Leave @main out"),
        (f"{both}@main:train", "what save_to_disk wrote has no subsets. Leave @main out"),
    ):
        with pytest.raises(ValueError, match=f"^data.path={re.escape(f'{given}: {told}')}"):
            read_rows(given)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("b.jsonl", '{"other": "b"}', r"one table \(Couldn't cast other: .*Repair those .* give one alone\."),
        ("b.jsonl", '{"prompt": "b"', r"one table \(JSON parse error: .*Repair those"),
        ("b.csv", 'prompt\n"b', r"one table \(.*EOF inside string.*Repair those"),
        ("{folder}.py", "", r"no data set could be loaded \(Dataset scripts are no longer supported"),
    ],
)
def test_a_directory_of_files_that_make_no_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    config = pytest.importorskip("datasets.config")
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "rows"
    folder.mkdir()
    file = folder / name.format(folder=folder.name)
    if file.suffix != ".py":
        whole = '{"prompt": "a"}\n' if file.suffix == ".jsonl" else "prompt\na\n"
        (folder / f"a{file.suffix}").write_text(whole)
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"^data\.path={folder}: .*{message}"):
        read_rows(str(folder))


def test_a_directory_without_rows_is_told_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    for path in (".", str(tmp_path)):
        told = rf"^data\.path={re.escape(path)}: no data set .* doesn't contain any data files\)\. Type"
        with pytest.raises(ValueError, match=told):
            read_rows(path)


def test_split_sizes_that_differ_from_those_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load(*_: object) -> None:
        raise datasets.exceptions.NonMatchingSplitsSizesError([{"expected": 2, "recorded": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ValueError, match=r"^data\.path=some/rows: .*no data set.*\(\[\{'expected': 2,"):
        read_rows("some/rows")


def test_hub_name_and_a_hub_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    asked = []

    def load(name: str, subset: str | None) -> object:
        asked.append((name, subset))
        if name == "missing":
            raise ConnectionError("no route\nmore")
        return datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_rows("openai/gsm8k@main:test") == ROWS
    assert asked == [("openai/gsm8k", "main")]
    with pytest.raises(ValueError, match=r"data\.path=missing: no such file.*no data set.*\(no route\)"):
        read_rows("missing")


def test_missing_file_says_what_lies_beside(tmp_path: Path) -> None:
    for name in ("gsm8k_train.jsonl", "other.txt", ".hidden"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="no such file") as error:
        read_rows(str(tmp_path / "gsm8k_trian.jsonl"), option="data.val_path")
    assert str(error.value) == (
        f"data.val_path={tmp_path}/gsm8k_trian.jsonl: no such file. "
        "Beside it lie: gsm8k_train.jsonl, other.txt. "
        f"Did you mean {tmp_path}/gsm8k_train.jsonl?"
    )
    with pytest.raises(ValueError, match=f"the directory {tmp_path}/nowhere does not exist either"):
        read_rows(str(tmp_path / "nowhere" / "x.jsonl"))


def test_a_missing_file_of_a_known_kind_is_not_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load(*_: object) -> None:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in ("rows.jsonl", "rows.parquet", "rows.csv", "rows.txt", "rows.tsv"):
        with pytest.raises(ValueError, match=rf"data\.path={name}: no such file"):
            read_rows(name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "b"', r":2: not JSON \(Expecting ',' delimiter, column 15\): '\{\"prompt\": \"b\"'"),
        (b'["b"]', r":2: a row is a JSON object, this line holds a list"),
        (b'{"prompt": "\xff"}', r":2: byte 13 of the line is not UTF-8"),
    ],
)
def test_corrupt_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=re.escape(str(file)) + message):
        read_rows(str(file))


def test_damaged_gzip(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 1000)[:-12])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz:\d+: the gzip stream is damaged"):
        read_rows(str(file))


def test_damaged_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"a\.parquet: not a Parquet file"):
        read_rows(str(file))


def test_unknown_format_and_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\na\n")
    (tmp_path / "b.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"ends in '\.csv'.*\.jsonl, \.jsonl\.gz"):
        read_rows(str(tmp_path / "a.csv"))
    with pytest.raises(ValueError, match="it holds no rows"):
        read_rows(str(tmp_path / "b.jsonl"))


def test_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(extras, "import_module", refuse)
    file = tmp_path / "a.parquet"
    file.touch()
    with pytest.raises(ValueError, match=r"'pyarrow\.parquet'.*pip install 'rlhf-lightning\[data\]'"):
        read_rows(str(file))


@pytest.mark.skipif(not DATA.is_dir(), reason="the folder shared/data beside the checkout is absent")
def test_real_files() -> None:
    assert len(read_rows(str(DATA / "gsm8k_train.jsonl"))) == 7473
    dialogues = read_rows(str(DATA / "hh_harmless_base_test.jsonl.gz"))
    assert len(dialogues) == 2312
    assert set(dialogues[0]) == {"chosen", "rejected"}
