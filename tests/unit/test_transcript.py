"""Words with times from made-up token streams, subtitles, and the response formats."""

import itertools
import json
import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from openai.types.audio import TranscriptionDiarized

from voxtral_serve.audio.level import voiced
from voxtral_serve.audio.speech import Piece
from voxtral_serve.transcript.formats import AnswerFormat, PieceTranscript, TimeError, timed_words, written
from voxtral_serve.transcript.logprobs import TokenLogprobs
from voxtral_serve.transcript.subtitles import LONGEST_S, Segment, _lines, _stamp, segments, srt, vtt
from voxtral_serve.transcript.words import TokenStream, Word, refine, words

PAD, WORD = 32, 33
VOCABULARY = {2: "", 100: " Hello", 101: " wor", 102: "ld", 103: ".", 104: " again"}
# A character in two tokens; blanks
PIECES = {token: text.encode() for token, text in VOCABULARY.items()} | {110: b" caf\xc3", 111: b"\xa9", 112: b" "}
STREAM = TokenStream(
    PAD,
    WORD,
    0.08,
    lambda tokens: "".join(VOCABULARY[token] for token in tokens),
    lambda token: PIECES.get(token, b""),
)
RATE = 16000
SILENT = np.zeros(0, bool)


def spoken(*parts: tuple[float, float], seconds: float = 2.0) -> np.ndarray:
    """A tone in these (start, end), soft noise elsewhere."""
    samples = np.random.default_rng(0).normal(0, 1e-3, round(seconds * RATE)).astype(np.float32)
    for start, end in parts:
        part = slice(round(start * RATE), round(end * RATE))
        samples[part] += np.sin(np.arange(samples[part].size) / 10).astype(np.float32)
    return samples


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([PAD, PAD, 2], []),
        ([PAD, WORD, 100, PAD, 2], [("Hello", 0.0, 0.12)]),
        # Pieces of one word, and a second word that waited for the first: each ends where its [STREAMING_WORD] stands
        ([WORD, 101, 102, WORD, 100, 2], [("world", 0.0, 0.04), ("Hello", 0.04, 0.28)]),
        # A full stop by itself belongs to the word before
        ([WORD, 100, PAD, WORD, 103, PAD], [("Hello.", 0.0, 0.28)]),
        # Without [STREAMING_WORD]
        ([PAD, 100, PAD], [("Hello", 0.0, 0.12)]),
    ],
)
def test_words(tokens: list[int], expected: list[tuple[str, float, float]]) -> None:
    found = words(tokens, STREAM)
    assert [word.text for word in found] == [text for text, *_ in expected]
    assert [word[1:3] for word in found] == [pytest.approx(times) for _, *times in expected]


def test_a_word_begins_after_the_pause_before_it() -> None:
    loud = voiced(spoken((0.3, 0.6), (0.6, 0.9), (1.4, 1.8)), RATE)
    found = refine([Word("a", 0.0, 0.6), Word("b", 0.6, 0.92), Word("c", 0.92, 1.8)], loud)
    assert [word.start for word in found] == pytest.approx([0.3, 0.6, 1.4], abs=0.03)
    assert [word.end for word in found] == [0.6, 0.92, 1.8]


def test_words_keep_their_order_where_nothing_is_heard() -> None:
    found = refine([Word("a", 0.0, 0.04), Word("b", 0.04, 0.2)], voiced(np.zeros(RATE, np.float32), RATE))
    for word, after in zip(found, [*found[1:], Word("", 9, 9)], strict=True):
        assert word.start < word.end <= after.start
    assert voiced(np.zeros(3, np.float32), RATE).size == 0


def timed(text: str, each: float = 0.5) -> list[Word]:
    return [Word(word, number * each, (number + 1) * each) for number, word in enumerate(text.split())]


def test_segments_end_with_sentences_and_fit_two_lines() -> None:
    sentence = "one two three four five six seven eight nine ten"
    text = f"Stop. {sentence}. " + " ".join(["something"] * 30)
    found = segments(timed(text, 0.3))
    assert found[0].text == "Stop."
    assert found[1].text == f"{sentence}."
    assert " ".join(segment.text for segment in found) == text
    for segment, after in itertools.pairwise(found):
        assert segment.end <= after.start
    for segment in found:
        assert segment.end - segment.start <= LONGEST_S
        lines = _lines(segment).split("\n")
        assert len(lines) <= 2 and max(map(len, lines)) <= 42


def test_segments_end_where_the_speaker_changes_and_have_room_for_its_name() -> None:
    names = ["A", "A", "B", "B", "A"]
    words = [word._replace(speaker=name) for word, name in zip(timed("one two three. four five"), names, strict=True)]
    assert segments(words) == [
        Segment("one two", 0.0, 1.0, "A"),
        Segment("three.", 1.0, 1.5, "B"),
        Segment("four", 1.5, 2.0, "B"),
        Segment("five", 2.0, 2.5, "A"),
    ]
    long = [word._replace(speaker="SPEAKER_1") for word in timed(" ".join(["something"] * 30), 0.1)]
    assert [word for segment in segments(long) for word in segment.text.split()] == [word.text for word in long]
    for found in segments(long):
        lines = _lines(found).split("\n")
        assert lines[0].startswith("SPEAKER_1: something") and len(lines) <= 2 and max(map(len, lines)) <= 42


def test_subtitles() -> None:
    found = [Segment("Salt & <pepper>.", 0.04, 3599.9996), Segment("Bye", 3600, 3661.5)]
    assert srt(found) == (
        "1\n00:00:00,040 --> 01:00:00,000\nSalt & <pepper>.\n\n2\n01:00:00,000 --> 01:01:01,500\nBye\n\n"
    )
    assert vtt(found) == (
        "WEBVTT\n\n00:00:00.040 --> 01:00:00.000\nSalt &amp; &lt;pepper&gt;.\n\n01:00:00.000 --> 01:01:01.500\nBye\n\n"
    )
    assert srt([]) == ""
    assert vtt([]) == "WEBVTT\n\n"


TOKENS = [PAD, PAD, PAD, WORD, 100, PAD, WORD, 101, 102, 103, PAD, 2]
WHOLE = PieceTranscript(" Hello world.", TOKENS, Piece(0.0, 1.0, (0.0, 1.0)), SILENT)
USAGE = {"type": "duration", "seconds": 1}


def answer_format(form: str, *granularities: str, speakers: bool = False) -> AnswerFormat:
    return AnswerFormat(form, frozenset(granularities), "en", "transcribe", speakers=speakers)


def test_verbose_json() -> None:
    kind, body = written(answer_format("verbose_json", "word", "segment"), [WHOLE], STREAM, 1.0, USAGE)
    assert kind == "application/json"
    assert json.loads(body) == {
        **{"task": "transcribe", "language": "english", "duration": 1.0, "text": "Hello world."},
        "words": [{"word": "Hello", "start": 0.0, "end": 0.28}, {"word": "world.", "start": 0.28, "end": 0.52}],
        "segments": [{"id": 0, "seek": 0, "start": 0.0, "end": 0.52, "text": "Hello world.", "temperature": 0.0}],
        "usage": USAGE,
    }
    assert "words" not in written(answer_format("verbose_json", "segment"), [WHOLE], STREAM, 1.0, USAGE)[1]


def test_confidence_in_verbose_json() -> None:
    """Of the tokens that write a word: neither [STREAMING_WORD] nor EOS, which the tokens of another logprob are."""
    chances = {100: 0.8, 101: 0.9, 102: 0.5, 103: 0.1, PAD: 1e-9, WORD: 1e-9, 2: 1e-9}
    tokens = [*TOKENS[:-2], 2, PAD]  # EOS follows the last word
    piece = WHOLE._replace(tokens=tokens, logprobs=[math.log(chances[token]) for token in tokens])
    content = json.loads(written(answer_format("verbose_json", "word", "segment"), [piece], STREAM, 1.0, USAGE)[1])
    assert [word["probability"] for word in content["words"]] == [0.8, 0.5]  # the second is the mean of three
    (segment,) = content["segments"]
    assert segment["avg_logprob"] == pytest.approx(math.log(0.8 * 0.9 * 0.5 * 0.1) / 4, abs=1e-4)
    (both,) = json.loads(
        written(answer_format("verbose_json", "segment"), [piece], STREAM, 1.0, USAGE, timed_words([piece], STREAM))[1]
    )["segments"]
    assert both["avg_logprob"] == segment["avg_logprob"]  # so it is with words that were labelled
    without = json.loads(written(answer_format("verbose_json", "segment"), [piece], None, 1.0, USAGE)[1])
    assert "avg_logprob" not in without["segments"][0]  # which tokens are special is not known


@pytest.mark.parametrize(
    ("form", "kind", "begins"),
    [
        ("text", "text/plain; charset=utf-8", "Hello world.\n"),
        ("srt", "application/x-subrip", "1\n00:00:00,000 --> 00:00:00,520\nHello world.\n"),
        ("vtt", "text/vtt; charset=utf-8", "WEBVTT\n\n00:00:00.000 --> "),
    ],
)
def test_other_forms(form: str, kind: str, begins: str) -> None:
    found, body = written(answer_format(form), [WHOLE], STREAM, 1.0, USAGE)
    assert found == kind
    assert body.startswith(begins)


def labelled(form: str, *granularities: str, speakers: Sequence[int | str] = (0, 1)) -> str:
    """The body of an answer with two speakers, of a word each."""
    form_of = answer_format(form, *granularities, speakers=True)
    pairs = zip(timed_words([WHOLE], STREAM), speakers, strict=True)
    words = [word._replace(speaker=form_of.speaker(speaker)) for word, speaker in pairs]
    return written(form_of, [WHOLE], STREAM, 1.0, USAGE, words)[1]


def test_speakers_in_verbose_json() -> None:
    content = json.loads(labelled("verbose_json", "word", "segment"))
    assert [(word["word"], word["speaker"]) for word in content["words"]] == [
        ("Hello", "SPEAKER_1"),
        ("world.", "SPEAKER_2"),
    ]
    assert [(each["id"], each["text"], each["speaker"]) for each in content["segments"]] == [
        (0, "Hello", "SPEAKER_1"),
        (1, "world.", "SPEAKER_2"),
    ]


def test_diarized_json_is_openais() -> None:
    answer = TranscriptionDiarized.model_validate_json(labelled("diarized_json"), extra="forbid")
    assert (answer.task, answer.duration, answer.text) == ("transcribe", 1.0, "Hello world.")
    segment = {"type": "transcript.text.segment", "id": "seg_001", "start": 0.0, "end": 0.28, "text": "Hello"}
    assert answer.segments[0].model_dump() == {**segment, "speaker": "A"}
    assert (answer.segments[1].id, answer.segments[1].speaker) == ("seg_002", "B")
    without = json.loads(written(answer_format("diarized_json"), [WHOLE], STREAM, 1.0, USAGE)[1])
    assert [(each["text"], each["speaker"]) for each in without["segments"]] == [("Hello world.", None)]


def test_speakers_in_text_and_subtitles() -> None:
    assert labelled("text") == "SPEAKER_1: Hello\nSPEAKER_2: world.\n"
    assert labelled("srt") == (
        "1\n00:00:00,000 --> 00:00:00,280\nSPEAKER_1: Hello\n\n2\n00:00:00,280 --> 00:00:00,520\nSPEAKER_2: world.\n\n"
    )
    assert "\nSPEAKER_2: world.\n" in labelled("vtt")
    assert answer_format("json", speakers=True).speaker(0) == "speaker_1"  # as Mistral has it


@pytest.mark.parametrize(("form", "unknown"), [("diarized_json", "A"), ("verbose_json", "SPEAKER_1")])
def test_names_in_json_are_as_the_client_sent_them(form: str, unknown: str) -> None:
    name = 'Ann </b>"\\ & {żółw}'
    content = json.loads(labelled(form, "segment", speakers=(name, 0)))
    assert [each["speaker"] for each in content["segments"]] == [name, unknown]


def test_names_are_no_markup_in_subtitles() -> None:
    name = "<i>A</i> --> {\\an8}B & C"
    assert re.findall(r"(.+): Hello", labelled("srt", speakers=(name, 0))) == ["iA/i -- an8B & C"]
    assert re.findall(r"(.+): Hello", labelled("vtt", speakers=(name, 0))) == [
        "&lt;i&gt;A&lt;/i&gt; --&gt; {\\an8}B &amp; C"
    ]
    assert labelled("text", speakers=(name, 0)) == f"{name}: Hello\nSPEAKER_1: world.\n"


def test_pieces_are_joined_in_order() -> None:
    """The second begins while the first's last word is still being written."""
    pieces = [WHOLE, PieceTranscript("", [PAD, 2], Piece(3.0, 4.0, (3.1, 3.9)), SILENT)]
    pieces.append(WHOLE._replace(piece=Piece(0.4, 1.4, (0.5, 1.3))))
    content = json.loads(written(answer_format("verbose_json", "word"), pieces, STREAM, 5.0, USAGE)[1])
    assert content["text"] == "Hello world. Hello world."
    assert [word["start"] for word in content["words"]] == pytest.approx([0.0, 0.28, 0.52, 0.68])
    for word, after in itertools.pairwise(content["words"]):
        assert word["start"] < word["end"] <= after["start"]


def test_without_times_of_words_a_piece_is_a_segment() -> None:
    pieces = [WHOLE, WHOLE._replace(text=" ", piece=Piece(2.0, 3.0, (2.2, 2.8)))]
    pieces.append(WHOLE._replace(text=" Again", piece=Piece(4.0, 5.0, (4.2, 4.8))))
    text = written(answer_format("srt"), pieces, None, 5.0, USAGE)[1]
    assert text == ("1\n00:00:00,000 --> 00:00:01,000\nHello world.\n\n2\n00:00:04,200 --> 00:00:04,800\nAgain\n\n")
    assert "words" not in json.loads(written(answer_format("verbose_json", "segment"), pieces, None, 5.0, USAGE)[1])


def test_a_text_that_is_not_its_tokens_has_no_times() -> None:
    with pytest.raises(TimeError, match="the text has 1 words, and its tokens have 2 with a time"):
        written(answer_format("srt"), [WHOLE._replace(text="Hello")], STREAM, 1.0, USAGE)


def test_times_as_subrip_writes_them() -> None:
    assert re.fullmatch(r"\d\d:\d\d:\d\d,\d{3}", _stamp(0.0004, ","))
    assert _stamp(59.9996, ".") == "00:01:00.000"


# ---- Logprobs


@pytest.mark.parametrize(
    ("pieces", "text", "tokens"),
    [
        ([[]], "", []),
        ([[PAD, WORD, 2]], "", []),
        ([[PAD, WORD, 101, 102, 103, PAD, 2]], "world.", ["wor", "ld", "."]),
        ([[100, 103], [PAD], [104, 2]], "Hello. again", ["Hello", ".", " again"]),
        ([[100], [103]], "Hello .", ["Hello", " ."]),  # a blank between two pieces, as their texts have
        ([[110, PAD, 111, 100]], "café Hello", ["caf", "é", " Hello"]),
        ([[112, 100, 112, 112]], "Hello", ["Hello"]),
    ],
)
def test_tokens_with_logprobs_make_the_text(pieces: list[list[int]], text: str, tokens: list[str]) -> None:
    writer = TokenLogprobs(STREAM)
    for piece in pieces:
        writer.begin_piece()
        for token in piece:
            writer.add([token], [-token / 100])
    found = writer.finish()
    assert [each["token"] for each in found] == tokens
    assert b"".join(bytes(each["bytes"]) for each in found).decode() == "".join(tokens) == text
    assert all(each["logprob"] < -0.5 for each in found)


def test_a_blank_at_the_end_of_a_token_is_no_part_of_the_text() -> None:
    writer = TokenLogprobs(STREAM._replace(piece=lambda token: b" a "))
    assert writer.add([1], [0.0]) == [{"token": "a ", "bytes": [97, 32], "logprob": 0.0}]
    assert writer.finish() == [{"token": "a", "bytes": [97], "logprob": 0.0}]


# ---- Channels


def test_channels_are_merged_by_time() -> None:
    """Words by their starts; a segment is of one channel, also where both speak at the same time."""
    form = AnswerFormat("verbose_json", frozenset({"word", "segment"}), None, "transcribe", channels=True)
    said = [("A", "yes", 0.0, 1.0), ("B", "who", 0.2, 0.4), ("A", "and", 1.0, 1.2), ("B", "are you?", 0.5, 1.5)]
    timed = sorted((Word(text, start, end, name) for name, text, start, end in said), key=lambda word: word.start)
    pieces = [WHOLE._replace(text=" yes and"), WHOLE._replace(text=" who are you?")]
    content = json.loads(written(form, pieces, STREAM, 2.0, USAGE, timed)[1])
    assert content["text"] == "yes and who are you?"
    assert [(each["speaker"], each["word"]) for each in content["words"]] == [
        ("A", "yes"), ("B", "who"), ("B", "are you?"), ("A", "and")
    ]  # fmt: skip
    assert [(each["speaker"], each["text"], each["start"]) for each in content["segments"]] == [
        ("A", "yes and", 0.0), ("B", "who are you?", 0.2)
    ]  # fmt: skip
    assert written(form._replace(name="text"), pieces, STREAM, 2.0, USAGE, timed)[1] == "A: yes and\nB: who are you?\n"
    assert "A: yes and\n\n2\n" in written(form._replace(name="srt"), pieces, STREAM, 2.0, USAGE, timed)[1]
