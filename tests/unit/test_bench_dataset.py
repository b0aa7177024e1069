"""The dataset reader: every problem is named with its line, all at once, before any request."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import soundfile
from fakeserver import write_dataset

from bench import BenchError, dataset
from bench.formats import HUB

DATA = Path(__file__).parents[2] / "bench/data"


def sound(path: Path, seconds: float = 0.1, rate: int = 16_000, **options: Any) -> Path:
    """Write a silent clip in the format of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.zeros(round(seconds * rate)), rate, **options)
    return path


def manifest(directory: Path, *entries: Any, name: str = "manifest.jsonl") -> Path:
    """Write a manifest: dicts become JSON, strings stay as they are."""
    directory.mkdir(exist_ok=True)
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    (directory / name).write_text("\n".join(lines) + "\n")
    return directory


def entry(directory: Path, name: str = "a.wav", **changes: Any) -> dict[str, Any]:
    """A sound manifest entry with its file, but for `changes`; a change to None removes the key."""
    content = sound(directory / name).read_bytes()
    whole = {"path": name, "text": "hello", "duration": 0.1, "sha256": hashlib.sha256(content).hexdigest()}
    return {key: value for key, value in {**whole, **changes}.items() if value is not None}


def refusal(source: Path | str) -> list[str]:
    """The lines with which a dataset is refused, the first one says where."""
    with pytest.raises(BenchError) as caught:
        dataset.load(source)
    return str(caught.value).splitlines()


def problems(source: Path | str) -> list[str]:
    first, *others = refusal(source)
    assert first.startswith(f"{len(others)} problem(s) in ")
    return [line.removeprefix("  ") for line in others]


# Our own format


def test_a_sound_dataset_keeps_manifest_order_and_extra_keys(tmp_path: Path) -> None:
    words = [["hello", 0.0, 0.4]]
    second = entry(tmp_path, "a.flac", text=" Hi\u2028there ", words=words, voice="en-us")
    second["sha256"] = second["sha256"].upper()
    manifest(tmp_path, entry(tmp_path, "b.wav"), "", second)
    clips, digest, name, language = dataset.load(tmp_path)
    assert [clip.id for clip in clips] == ["b", "a"]
    assert clips[1].path == tmp_path / "a.flac"
    assert clips[1].text == " Hi\u2028there "
    assert clips[1].duration_s == 0.1
    assert clips[1].extra == {"words": words, "voice": "en-us"}
    assert digest == hashlib.sha256((tmp_path / "manifest.jsonl").read_bytes()).hexdigest()
    assert (name, language) == ("manifest", None)
    assert dataset.load(tmp_path / "manifest.jsonl") == dataset.load(str(tmp_path))


def test_the_clips_of_this_repository_are_sound() -> None:
    found = dataset.load(DATA)
    assert (len(found.clips), found.format) == (500, "manifest")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"text": None}, "the key 'text' is missing"),
        ({"path": None}, "the key 'path' is missing"),
        ({"duration": None}, "the key 'duration' is missing"),
        ({"sha256": None}, "the key 'sha256' is missing"),
        ({"text": "  "}, "the text is empty"),
        ({"text": 3}, "'text' must be a string, found 3"),
        ({"duration": "0.1"}, "'duration' must be a number, found '0.1'"),
        ({"duration": True}, "'duration' must be a number, found True"),
        ({"duration": 0}, "'duration' must be more than 0 seconds, found 0"),
        ({"duration": float("nan")}, "'duration' must be more than 0 seconds, found nan"),
        ({"duration": float("inf")}, "'duration' must be more than 0 seconds, found inf"),
        ({"duration": 0.31}, "the dataset gives a duration of 0.31 s, but 'a.wav' lasts 0.1 s"),
        ({"path": "gone.wav"}, "cannot read 'gone.wav' (No such file or directory)"),
        ({"path": "a\0.wav"}, "cannot read 'a\\x00.wav' (embedded null byte)"),
        ({"path": "."}, "'path' must name a file below the dataset's directory, found '.'"),
        ({"path": "../a.wav"}, "'path' must name a file below the dataset's directory, found '../a.wav'"),
        (
            {"path": "/etc/passwd"},
            "'path' must name a file below the dataset's directory, found '/etc/passwd'",
        ),
        ({"sha256": "00"}, "not '00'"),
        ({"sha256": ""}, "not ''"),
    ],
)
def test_one_fault(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    manifest(tmp_path, entry(tmp_path, "fine.wav"), entry(tmp_path, **changes))
    (found,) = problems(tmp_path)
    assert found.startswith("line 2: ")
    assert problem in found


def test_all_faults_of_all_lines_are_named_at_once(tmp_path: Path) -> None:
    manifest(
        tmp_path,
        entry(tmp_path, "a.wav"),
        "{oops",
        "[1]",
        entry(tmp_path, "a.flac", text="", duration=-1),
        {"path": "gone.wav"},
    )
    lines = refusal(tmp_path)
    assert lines[0] == f"9 problem(s) in {tmp_path / 'manifest.jsonl'}:"
    assert [line.strip()[:6] for line in lines[1:]] == ["line 2", "line 3"] + ["line 4"] * 3 + ["line 5"] * 4
    assert "  line 3: expected a JSON object, found list" in lines
    assert "  line 4: the id 'a' is already used by line 1" in lines


def test_bytes_that_are_no_utf8_are_a_named_problem(tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").write_bytes(b'{"path": "\xff"}\n')
    with pytest.raises(BenchError, match="line 1: not valid JSON"):
        dataset.load(tmp_path)


def test_no_clips(tmp_path: Path) -> None:
    assert problems(manifest(tmp_path)) == ["the dataset has no clips"]


# Audio files, in a format that does not vouch for them


def nemo(directory: Path, *paths: Path | str, **extra: Any) -> Path:
    entries = [{"audio_filepath": str(path), "text": "hello", **extra} for path in paths]
    return manifest(directory, *entries, name="test.json") / "test.json"


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "opus", "mp3", "aiff"])
def test_the_header_gives_the_duration(tmp_path: Path, suffix: str) -> None:
    options = {"format": "OGG", "subtype": "OPUS"} if suffix == "opus" else {}
    (clip,) = dataset.load(nemo(tmp_path, sound(tmp_path / f"a.{suffix}", 0.3, **options))).clips
    assert clip.duration_s == pytest.approx(0.3)


@pytest.mark.parametrize("name", ["a.wav", "a.mp3", "a.flac", "a.xyz"])
@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n" * 30])
def test_a_file_that_is_no_audio(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    found = problems(nemo(tmp_path, sound(tmp_path / "fine.wav"), name))
    assert found == [f"line 2: {name!r} ({len(content)} bytes) is not audio that soundfile can read"]


def test_a_file_without_samples(tmp_path: Path) -> None:
    sound(tmp_path / "a.wav", seconds=0)
    assert problems(nemo(tmp_path, "a.wav")) == ["line 1: 'a.wav' contains no samples"]
    assert problems(nemo(tmp_path, "a.wav", duration=1)) == ["line 1: 'a.wav' contains no samples"]


def test_what_soundfile_cannot_read_needs_a_stated_duration(tmp_path: Path) -> None:
    (tmp_path / "a.m4a").write_bytes(b"\0\0\0\x18ftypM4A ")
    (missing,) = problems(nemo(tmp_path, "a.m4a"))
    assert missing == "line 1: 'a.m4a' has no duration in the dataset, and soundfile cannot read .m4a"
    assert dataset.load(nemo(tmp_path, "a.m4a", duration=7)).clips[0].duration_s == 7


def test_a_stream_whose_header_tells_no_length_needs_a_stated_duration(tmp_path: Path) -> None:
    content = bytearray(sound(tmp_path / "a.flac").read_bytes())
    content[21] &= 0xF0  # STREAMINFO's 36 bits of total samples; 0 is unknown (RFC 9639, 8.2)
    content[22:26] = bytes(4)
    (tmp_path / "a.flac").write_bytes(content)
    (missing,) = problems(nemo(tmp_path, "a.flac"))
    assert missing == "line 1: 'a.flac' has no duration in the dataset, and none in the file's header"
    assert dataset.load(nemo(tmp_path, "a.flac", duration=0.1)).clips[0].duration_s == 0.1


@pytest.mark.parametrize(
    ("real", "stated", "refused"),
    [(10, 10.09, False), (10, 10.11, True), (10, 9.89, True), (1, 0.91, False), (0.05, 0.16, True)],
)
def test_a_duration_may_be_off_by_a_tenth_of_a_second(
    tmp_path: Path, real: float, stated: float, refused: bool
) -> None:
    sound(tmp_path / "a.wav", real)
    file = nemo(tmp_path, "a.wav", duration=stated)
    if refused:
        assert problems(file) == [f"line 1: the dataset gives a duration of {stated:g} s, but 'a.wav' lasts {real:g} s"]
    else:
        assert dataset.load(file).clips[0].duration_s == stated


# NeMo


def test_nemo(tmp_path: Path) -> None:
    elsewhere = sound(tmp_path / "elsewhere/c.wav")
    lines = [
        {"audio_filepath": "wavs/one/a.wav", "duration": 0.1, "text": "hello", "lang": "de", "speaker": 7},
        {"audio_filepath": "wavs/two/a.wav", "duration": None, "offset": 0.0, "text": "there", "lang": "de"},
        {"audio_filepath": str(elsewhere), "text": "you", "lang": "de"},
    ]
    directory = manifest(tmp_path / "data", *lines, name="test_manifest.json")
    sound(directory / "wavs/one/a.wav")
    sound(directory / "wavs/two/a.wav", 0.2)
    (directory / "config.json").write_text('{\n"no": "manifest"\n}\n')
    found = dataset.load(directory)
    assert [clip.id for clip in found.clips] == ["wavs/one/a", "wavs/two/a", "c"]
    assert [clip.duration_s for clip in found.clips] == [0.1, 0.2, 0.1]
    assert [clip.path for clip in found.clips] == [
        directory / "wavs/one/a.wav",
        directory / "wavs/two/a.wav",
        elsewhere,
    ]
    assert found.clips[0].extra == {"lang": "de", "speaker": 7}
    assert (found.format, found.language) == ("nemo", "de")
    assert found.manifest_sha256 == hashlib.sha256((directory / "test_manifest.json").read_bytes()).hexdigest()
    (directory / "test_manifest.json").rename(directory / "manifest.jsonl")
    assert dataset.load(directory) == found


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"audio_filepath": "gone.wav", "text": "x"}, "cannot read 'gone.wav' (No such file or directory)"),
        ({"audio_filepath": ".", "text": "x"}, "'audio_filepath' must name a file, found '.'"),
        (
            {"audio_filepath": "b.wav", "text": "x", "duration": 3},
            "the dataset gives a duration of 3 s, but 'b.wav' lasts 0.1 s",
        ),
        ({"audio_filepath": "b.wav", "text": "x", "duration": "3"}, "'duration' must be a number, found '3'"),
        ({"audio_filepath": "b.wav", "text": "x", "offset": 1.5}, "'offset' 1.5 selects a part of the file"),
        ({"audio_filepath": "b.wav", "text": " "}, "the text is empty"),
        ({"audio_filepath": "b.wav"}, "the key 'text' is missing"),
        ({"text": "x"}, "the key 'audio_filepath' is missing"),
        ({"audio_filepath": "a.wav", "text": "x"}, "the id 'a' is already used by line 1"),
        ("{", "not valid JSON"),
    ],
)
def test_nemo_refuses(tmp_path: Path, line: Any, problem: str) -> None:
    sound(tmp_path / "a.wav")
    sound(tmp_path / "b.wav")
    manifest(tmp_path, {"audio_filepath": "a.wav", "text": "hello"}, line, name="m.jsonl")
    (found,) = problems(tmp_path)
    assert found.startswith(f"line 2: {problem}")


# FLEURS


def fleurs(tmp_path: Path, *more: str) -> Path:
    """One sentence read by two people, and the lines of `more`."""
    directory = tmp_path / "en_us"
    lines = []
    for name, seconds in (("1003119935936341070", 0.1), ("10115657412364021823", 0.2)):
        sound(directory / f"audio/test/{name}.wav", seconds, subtype="FLOAT")
        lines.append(
            f'1904\t{name}.wav\tA "tornado" spins!\ta "tornado" spins\ta | t o r n a d o | s p i n s |'
            f"\t{round(seconds * 16000)}\tFEMALE"
        )
    (directory / "test.tsv").write_text("\n".join([*lines, *more]) + "\n", encoding="utf-8")
    return directory


def test_fleurs(tmp_path: Path) -> None:
    directory = fleurs(tmp_path)
    found = dataset.load(directory)
    assert [clip.id for clip in found.clips] == ["1003119935936341070", "10115657412364021823"]
    assert {clip.text for clip in found.clips} == {'a "tornado" spins'}
    assert [clip.duration_s for clip in found.clips] == [0.1, 0.2]
    assert found.clips[0].extra == {"sentence_id": "1904", "gender": "FEMALE"}
    assert (found.format, found.language) == ("fleurs", "en_us")
    assert found.manifest_sha256 == hashlib.sha256((directory / "test.tsv").read_bytes()).hexdigest()
    directory.rename(tmp_path / "data")
    assert dataset.load(tmp_path / "data/test.tsv").language is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("7\tgone.wav\tHi\thi\th i\t1600\tMALE", "cannot read 'gone.wav' (No such file or directory)"),
        ("7\tfine.wav\tHi\t\th i\t1600\tMALE", "the text is empty"),
        ("7\tfine.wav\tHi\thi\th i\t6400\tMALE", "the dataset gives a duration of 0.4 s, but 'fine.wav' lasts 0.1 s"),
        ("7\tfine.wav\tHi\thi\th i\t0.1\tMALE", "column 6 must be the number of samples, found '0.1'"),
        ("7\tfine.wav\tHi\thi\th i\t0\tMALE", "column 6 must be the number of samples, found '0'"),
        ("7\tfine.wav\tHi\thi\t1600\tMALE", "expected 7 columns between tabs, found 6"),
        ("7\t../up.wav\tHi\thi\th i\t1600\tMALE", "column 2 must name a file below the dataset's directory"),
        (
            "7\t1003119935936341070.wav\tHi\thi\th i\t1600\tMALE",
            "the id '1003119935936341070' is already used by line 1",
        ),
    ],
)
def test_fleurs_refuses(tmp_path: Path, line: str, problem: str) -> None:
    directory = fleurs(tmp_path, line)
    sound(directory / "audio/test/fine.wav")
    (found,) = problems(directory)
    assert found.startswith(f"line 3: {problem}")


def test_a_faulty_first_line_is_named_all_the_same(tmp_path: Path) -> None:
    directory = fleurs(tmp_path)
    (directory / "test.tsv").write_text("oops\n")
    assert problems(directory) == ["line 1: expected 7 columns between tabs, found 1"]


def test_fleurs_with_bad_bytes(tmp_path: Path) -> None:
    directory = fleurs(tmp_path)
    with (directory / "test.tsv").open("ab") as file:
        file.write("7\tfine.wav\tÄh\täh\tä h\t1600\tMALE\n".encode("latin-1"))
    assert problems(directory) == ["line 3: not UTF-8 (invalid continuation byte at byte 11)"]


def test_fleurs_whose_audio_is_still_packed(tmp_path: Path) -> None:
    directory = fleurs(tmp_path)
    (directory / "audio").rename(tmp_path / "away")
    (found,) = refusal(directory)
    assert f"{directory / 'test.tsv'} looks like fleurs, but its audio directory {directory / 'audio/test'}" in found


# Common Voice

COLUMNS = (
    "client_id\tpath\tsentence_id\tsentence\tsentence_domain\tup_votes\tdown_votes"
    "\tage\tgender\taccents\tvariant\tlocale\tsegment"
)


def voiced(name: str, sentence: str, locale: str = "zh-CN") -> str:
    return f"c0ffee\t{name}\t5f\t{sentence}\t\t2\t0\ttwenties\t\t\t\t{locale}\t"


def common_voice(tmp_path: Path, *more: str) -> Path:
    directory = tmp_path / "zh-CN"
    sound(directory / "clips/common_voice_zh-CN_1.mp3", 0.3)
    sound(directory / "clips/common_voice_zh-CN_2.mp3", 0.2)
    lines = [COLUMNS, voiced("common_voice_zh-CN_2.mp3", '"你好'), *more]
    (directory / "test.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    # Others of a release's files, which list no clips or are empty but for their columns.
    (directory / "clip_durations.tsv").write_text("clip\tduration[ms]\ncommon_voice_zh-CN_1.mp3\t300\n")
    return directory


def test_common_voice(tmp_path: Path) -> None:
    directory = common_voice(tmp_path, voiced("common_voice_zh-CN_1.mp3", "再见"))
    found = dataset.load(directory)
    assert [clip.id for clip in found.clips] == ["common_voice_zh-CN_2", "common_voice_zh-CN_1"]
    # A quotation mark is the sentence's own, and what follows is not swallowed.
    assert [clip.text for clip in found.clips] == ['"你好', "再见"]
    assert [clip.duration_s for clip in found.clips] == pytest.approx([0.2, 0.3])
    assert found.clips[0].extra["age"] == "twenties"
    assert (found.format, found.language) == ("common-voice", "zh-CN")
    (directory / "dev.tsv").write_text(COLUMNS + "\n")
    several = refusal(directory)
    assert several[0].endswith("Choose one:")
    assert several[1:] == [f"  {directory / 'dev.tsv'}", f"  {directory / 'test.tsv'}"]
    assert dataset.load(directory / "test.tsv") == found
    assert problems(directory / "dev.tsv") == ["the dataset has no clips"]


def test_lines_as_windows_ends_them(tmp_path: Path) -> None:
    file = common_voice(tmp_path) / "test.tsv"
    found = dataset.load(file).clips
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert dataset.load(file).clips == found
    fleurs_file = fleurs(tmp_path) / "test.tsv"
    fleurs_file.write_bytes(b"\xef\xbb\xbf" + fleurs_file.read_bytes())
    assert dataset.load(fleurs_file).clips[0].extra["sentence_id"] == "1904"


def test_several_locales_are_no_language(tmp_path: Path) -> None:
    assert dataset.load(common_voice(tmp_path, voiced("common_voice_zh-CN_1.mp3", "bye", "en"))).language is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (voiced("gone.mp3", "x"), "cannot read 'gone.mp3' (No such file or directory)"),
        (voiced("common_voice_zh-CN_1.mp3", ""), "the text is empty"),
        (voiced("common_voice_zh-CN_1.mp3", "a\tb"), "expected 13 columns between tabs, found 14"),
        (voiced("common_voice_zh-CN_2.mp3", "x"), "the id 'common_voice_zh-CN_2' is already used by line 2"),
        (voiced("/etc/passwd", "x"), "'path' must name a file below the dataset's directory, found '/etc/passwd'"),
        ("\t" * 12, "the text is empty"),
    ],
)
def test_common_voice_refuses(tmp_path: Path, line: str, problem: str) -> None:
    found = problems(common_voice(tmp_path, line))
    assert found[-1].startswith(f"line 3: {problem}")


def test_common_voice_whose_columns_are_no_utf8(tmp_path: Path) -> None:
    directory = common_voice(tmp_path)
    file = directory / "test.tsv"
    file.write_bytes(file.read_bytes().replace(b"accents", b"acc\xffnts"))
    assert problems(directory) == ["line 1: not UTF-8 (invalid start byte at byte 86)"]


def test_common_voice_without_clips(tmp_path: Path) -> None:
    directory = common_voice(tmp_path)
    (directory / "clips").rename(tmp_path / "away")
    (found,) = refusal(directory / "test.tsv")
    assert "looks like common-voice, but its audio directory" in found


# LibriSpeech


def librispeech(tmp_path: Path) -> Path:
    directory = tmp_path / "LibriSpeech/dev-clean"
    for chapter, texts in (("84/121123", ["GO DO YOU HEAR", "BUT"]), ("174/50561", ["FORGOTTEN TOO"])):
        name = chapter.replace("/", "-")
        lines = [f"{name}-{number:04} {text}\n" for number, text in enumerate(texts)]
        for number in range(len(texts)):
            sound(directory / chapter / f"{name}-{number:04}.flac", 0.1 * (1 + number))
        (directory / chapter / f"{name}.trans.txt").write_text("".join(lines))
    return directory


def test_librispeech(tmp_path: Path) -> None:
    directory = librispeech(tmp_path)
    found = dataset.load(directory)
    assert [(clip.id, clip.text, clip.duration_s) for clip in found.clips] == [
        ("174-50561-0000", "FORGOTTEN TOO", 0.1),
        ("84-121123-0000", "GO DO YOU HEAR", 0.1),
        ("84-121123-0001", "BUT", 0.2),
    ]
    assert (found.format, found.language) == ("librispeech", None)
    listing = "".join(
        json.dumps([clip.id, clip.text, hashlib.sha256(clip.path.read_bytes()).hexdigest()]) + "\n"
        for clip in found.clips
    )
    assert found.manifest_sha256 == hashlib.sha256(listing.encode("ascii")).hexdigest()
    sound(found.clips[2].path, 0.3)
    assert dataset.load(directory).manifest_sha256 != found.manifest_sha256
    assert refusal(tmp_path / "LibriSpeech")[1:] == [f"  {directory}"]


def test_librispeech_refuses(tmp_path: Path) -> None:
    directory = librispeech(tmp_path)
    transcript = directory / "84/121123/84-121123.trans.txt"
    transcript.write_bytes(b"84-121123-0001\n84-121123-0001 BUT\n84-121123-0002 GONE\n/etc/x Y\n84-121123-0001 \xc0\n")
    where = "84/121123/84-121123.trans.txt line"
    assert problems(directory) == [
        f"{where} 1: the text is empty",
        f"{where} 2: the id '84-121123-0001' is already used by {where} 1",
        f"{where} 3: cannot read '84-121123-0002.flac' (No such file or directory)",
        f"{where} 4: the first word must name a file below the dataset's directory, found '/etc/x.flac'",
        f"{where} 5: not UTF-8 (invalid start byte at byte 15)",
        "84/121123/84-121123-0000.flac: no .trans.txt file in its directory has a line for it",
    ]


# A folder


def test_a_folder(tmp_path: Path) -> None:
    sound(tmp_path / "b.mp3", 0.2)
    sound(tmp_path / "a.WAV")
    (tmp_path / "a.txt").write_text("\ufeffHello\r\n there\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("Grüß dich", encoding="utf-8")
    found = dataset.load(tmp_path)
    assert [(clip.id, clip.text) for clip in found.clips] == [("a", "Hello there"), ("b", "Grüß dich")]
    assert [clip.duration_s for clip in found.clips] == pytest.approx([0.1, 0.2])
    assert (found.format, found.language) == ("folder", None)
    (tmp_path / "b.txt").write_text("Gruß dich", encoding="utf-8")
    assert dataset.load(tmp_path).manifest_sha256 != found.manifest_sha256


def test_a_folder_refuses(tmp_path: Path) -> None:
    for name in ("a.wav", "b.wav", "c.wav", "d.flac", "d.wav"):
        sound(tmp_path / name)
    (tmp_path / "a.txt").write_text(" \n")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "d.txt").write_text("hello")
    (tmp_path / "e.txt").write_text("hello")
    assert problems(tmp_path) == [
        "a.wav: the text is empty",
        "b.wav: not UTF-8 (invalid start byte at byte 0)",
        "c.wav: its transcript c.txt is missing",
        "d.wav: the id 'd' is already used by d.flac",
        "e.txt: there is no audio file of the same name",
    ]


# The Hugging Face Hub


Hub = Callable[[dict[str, list[Any]]], None]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Publish columns as hf:own/voices:en_us:test, a directory to the package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    (tmp_path / "own/voices").mkdir(parents=True)
    (tmp_path / "own/voices/README.md").write_text(
        "---\nconfigs:\n- config_name: en_us\n  data_files:\n  - split: test\n    path: test.parquet\n---\n"
    )

    def publish(columns: dict[str, list[Any]]) -> None:
        table = datasets.Dataset.from_dict(columns)
        if "audio" in columns:
            table = table.cast_column("audio", datasets.Audio(decode=False))
        table.to_parquet(str(tmp_path / "own/voices/test.parquet"))

    return publish


def test_hugging_face(tmp_path: Path, hub: Hub) -> None:
    flac, mp3, wav = (sound(tmp_path / name, 0.2).read_bytes() for name in ("a.flac", "b.mp3", "c.wav"))
    audio = [
        {"bytes": flac, "path": None},
        {"bytes": mp3, "path": "b.mp3"},
        {"bytes": None, "path": str(tmp_path / "c.wav")},
    ]
    hub({"audio": audio, "raw_transcription": ["Hi!", "You!", "!"], "transcription": ["hi", "you", "there"]})
    found = dataset.load("hf:own/voices:en_us:test")
    assert [(clip.id, clip.text) for clip in found.clips] == [("000000", "hi"), ("000001", "you"), ("000002", "there")]
    assert [clip.path.name for clip in found.clips[:2]] == ["000000.flac", "000001.mp3"]
    assert [clip.path.read_bytes() for clip in found.clips] == [flac, mp3, wav]
    assert found.clips[0].path.is_relative_to(tmp_path / "cache")
    assert [clip.duration_s for clip in found.clips] == pytest.approx([0.2, 0.2, 0.2])
    assert (found.format, found.language) == ("huggingface", None)
    assert dataset.load("hf:own/voices:en_us:test") == found
    found.clips[0].path.write_bytes(b"cut")
    assert dataset.load("hf:own/voices:en_us:test") == found
    (unknown,) = refusal("hf:own/voices:en_us:dev")
    assert unknown.startswith("--dataset hf:own/voices:en_us:dev: ValueError: Unknown ")


def test_hugging_face_refuses_rows(tmp_path: Path, hub: Hub) -> None:
    good = {"bytes": sound(tmp_path / "a.wav").read_bytes(), "path": None}
    bad = {"bytes": b"nonsense", "path": None}
    worse = {"bytes": b"nonsense", "path": "b.wav"}
    hub({"audio": [good, good, bad, worse, None], "text": ["", None, "x", "x", "x"]})
    assert problems("hf:own/voices:en_us:test") == [
        "row 0: the text is empty",
        "row 1: the text is empty",
        "row 2: its 8 bytes are not audio that soundfile can read",
        "row 3: '000003.wav' (8 bytes) is not audio that soundfile can read",
        "row 4: it has no audio",
    ]


def test_hugging_face_names_the_columns(tmp_path: Path, hub: Hub) -> None:
    audio = {"bytes": sound(tmp_path / "a.wav").read_bytes(), "path": None}
    hub({"audio": [audio], "words": ["hello"]})
    (found,) = refusal("hf:own/voices:en_us:test")
    assert "one of text, sentence, normalized_text, transcript, transcription; its columns are audio, words" in found


def test_hugging_face_without_audio(hub: Hub) -> None:
    hub({"text": ["hello"], "label": [1]})
    (found,) = refusal("hf:own/voices:en_us:test")
    assert "must have one audio column, found [] among the columns text, label" in found


def test_hugging_face_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (found,) = refusal("hf:google/fleurs:en_us:test")
    assert found.startswith("--dataset hf:google/fleurs:en_us:test needs the package datasets")
    assert found.endswith("pip install datasets")


@pytest.mark.parametrize("source", ["hf:", "hf:fleurs:test", "hf:google/fleurs", "hf:google/fleurs:en_us:a/b"])
def test_hugging_face_of_another_form(source: str) -> None:
    assert refusal(source) == [f"--dataset {source} must look like hf:OWNER/NAME:SPLIT or hf:OWNER/NAME:CONFIG:SPLIT"]


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("hf:a/b:test", ("a/b", None, "test")),
        ("hf:openslr/librispeech_asr:clean:test.clean", ("openslr/librispeech_asr", "clean", "test.clean")),
        ("hf:a/b:c-d:test[:100]", ("a/b", "c-d", "test[:100]")),
        ("hf:a/b:test[10%:20%]", ("a/b", None, "test[10%:20%]")),
    ],
)
def test_the_parts_of_a_hugging_face_dataset(source: str, parts: tuple[str | None, ...]) -> None:
    match = HUB.fullmatch(source)
    assert match is not None
    assert match.group("name", "config", "split") == parts


# Recognition


@pytest.mark.parametrize(
    "make", [lambda path: path.mkdir(), lambda path: path.write_text("no\tlist\n"), lambda path: None]
)
def test_what_is_unknown_is_refused_with_what_was_looked_for(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "x.tsv")
    first, *looked_for = refusal(tmp_path / "x.tsv")
    assert first.startswith(f"--dataset {tmp_path / 'x.tsv'} ")
    assert first.endswith("Looked for:")
    for name in ("manifest.jsonl", "NeMo", "FLEURS", "Common Voice", "LibriSpeech", ".txt", "hf:OWNER/NAME"):
        assert any(name in line for line in looked_for), name


def test_json_of_no_known_kind(tmp_path: Path) -> None:
    manifest(tmp_path, {"audio": "a.wav", "text": "hello"}, name="list.jsonl")
    assert "is not a list of clips in a known format" in refusal(tmp_path / "list.jsonl")[0]
    assert "contains no known format" in refusal(tmp_path)[0]


def test_two_formats_in_one_directory_are_refused(tmp_path: Path) -> None:
    directory = fleurs(tmp_path)
    sound(directory / "a.wav")
    (directory / "a.txt").write_text("hello")
    nemo(directory, "a.wav")
    assert refusal(directory)[1:] == [
        f"  {directory / 'test.json'}",
        f"  {directory / 'test.tsv'}",
        f"  {directory} (audio files with .txt)",
    ]
    assert dataset.load(directory / "test.json").format == "nemo"
    # A manifest.jsonl is what a directory says it holds.
    manifest(directory, entry(directory))
    assert dataset.load(directory).format == "manifest"


def test_a_line_of_two_formats_is_refused(tmp_path: Path) -> None:
    manifest(tmp_path, entry(tmp_path, audio_filepath="a.wav"))
    assert "has both 'path' (bench) and 'audio_filepath' (NeMo)" in refusal(tmp_path)[0]


# The choice


def test_selection_is_seeded_and_in_manifest_order(tmp_path: Path) -> None:
    clips = dataset.load(write_dataset(tmp_path, {f"c{number:02}": "hello" for number in range(20)})).clips
    ids = [clip.id for clip in clips]
    picked = [clip.id for clip in dataset.select(clips, 5, seed=0)]
    # random.Random(0).sample(range(20), 5) == [12, 13, 1, 8, 15]
    assert picked == ["c01", "c08", "c12", "c13", "c15"]
    assert [clip.id for clip in dataset.select(clips, 5, seed=1)] != picked
    assert [clip.id for clip in dataset.select(clips, 20, seed=0)] == ids
    assert [clip.id for clip in dataset.select(clips, None, seed=0)] == ids
    with pytest.raises(BenchError, match="--samples 21 is more than the 20 clips"):
        dataset.select(clips, 21, seed=0)
