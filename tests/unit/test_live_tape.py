"""What `voxtral-serve transcribe --live` keeps to send again, and in which order it gives out turns."""

import queue
import threading

import numpy as np
import pytest

from voxtral_serve.client.captions import Captions
from voxtral_serve.client.dialects import ITEM, QUIET, OpenAIDialect, Segment, Turn, VllmDialect
from voxtral_serve.client.tape import Tape

GO = threading.Event()


def pcm(first: int, samples: int) -> bytes:
    """Samples that say their positions."""
    return np.arange(first, first + samples, dtype="<i2").tobytes()


def recorded(most: int, pieces: int, samples: int = 10) -> Tape:
    tape = Tape(most)
    for number in range(pieces):
        tape.record(pcm(number * samples, samples))
    return tape


def rest(tape: Tape) -> list[int]:
    tape.finish()
    found = b""
    while (piece := tape.take(GO)) is not None:
        found += piece
    return np.frombuffer(found, "<i2").tolist()


def test_all_is_sent_once_and_again_from_what_was_answered() -> None:
    tape = recorded(1000, 3)
    assert [tape.take(GO), tape.take(GO)] == [pcm(0, 10), pcm(10, 10)]
    tape.answered(15)
    assert (tape.first, tape.rewind()) == (15, 15)
    assert rest(tape) == list(range(15, 30))
    tape.answered(30)
    assert tape.rewind() == 30
    assert rest(tape) == []


def test_what_was_not_sent_is_not_answered() -> None:
    """A server's times may be beyond the audio that it has."""
    tape = recorded(1000, 3)
    tape.take(GO)
    tape.answered(25)
    assert tape.first == 10
    assert rest(tape) == list(range(10, 30))


@pytest.mark.parametrize(("sent", "lost"), [(0, 20), (1, 10), (2, 0), (4, 0)])
def test_the_oldest_audio_is_dropped_and_counted_where_it_was_never_sent(sent: int, lost: int) -> None:
    tape = recorded(40, 4)
    for _ in range(sent):
        tape.take(GO)
    tape.record(pcm(40, 10))
    tape.record(pcm(50, 10))
    assert (tape.first, tape.end, tape.lost) == (20, 60, lost)
    assert rest(tape) == list(range(max(20, 10 * sent), 60))
    assert tape.rewind() == 20
    assert rest(tape) == list(range(20, 60))


def test_a_sender_waits_for_audio_and_can_be_stopped() -> None:
    tape, stop = Tape(100), threading.Event()
    taken: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def send() -> None:
        for _ in range(2):
            taken.put(tape.take(stop))

    thread = threading.Thread(target=send)
    thread.start()
    tape.record(pcm(0, 5))
    assert taken.get(timeout=5) == pcm(0, 5)
    stop.set()
    tape.wake()
    assert taken.get(timeout=5) is None
    thread.join(5)


# ---- OpenAI's events


def opened() -> OpenAIDialect:
    return OpenAIDialect("model", 16000, None)


def given(dialect: OpenAIDialect, kind: str, item: str = "a", **fields: object) -> list[str | Turn]:
    return list(dialect.take({"type": kind, "item_id": item, **fields}))


def test_turns_are_given_out_in_their_order() -> None:
    """The second one's text waits for the first one's end. Times and positions are the recording's."""
    dialect = opened()
    given(dialect, "input_audio_buffer.speech_started", audio_start_ms=100)
    assert given(dialect, f"{ITEM}.delta", delta="Alpha") == ["Alpha"]
    given(dialect, "input_audio_buffer.speech_stopped", audio_end_ms=900)
    given(dialect, "input_audio_buffer.committed")
    given(dialect, "input_audio_buffer.speech_started", "b", audio_start_ms=1000)
    assert given(dialect, f"{ITEM}.delta", "b", delta="Beta") == []
    assert given(dialect, f"{ITEM}.completed", "b", transcript="Beta.") == []
    given(dialect, f"{ITEM}.segment", id="1", start=0.2, end=0.8, text=" Alpha. ")
    assert given(dialect, f"{ITEM}.completed", transcript="Alpha.") == [
        Turn("Alpha.", (Segment(1.2, 1.8, "Alpha."),), 16000 + 900 * 16),
        "Beta",
        Turn("Beta.", (), None),
    ]


def test_the_end_is_the_answer_to_the_clear_and_the_text_of_what_was_committed() -> None:
    dialect = opened()
    given(dialect, "input_audio_buffer.committed")
    given(dialect, "input_audio_buffer.cleared")
    assert not dialect.done
    given(dialect, f"{ITEM}.completed", transcript="")
    assert dialect.done


def test_a_turn_without_a_stop_ends_with_its_last_segment() -> None:
    dialect = opened()
    given(dialect, f"{ITEM}.segment", start=0.5, end=1.5, text="Alpha.")
    (turn,) = given(dialect, f"{ITEM}.completed", transcript="Alpha.")
    assert turn == Turn("Alpha.", (Segment(1.5, 2.5, "Alpha."),), 40000)


# ---- vLLM's


def test_a_second_without_text_ends_a_turn_of_vllms() -> None:
    dialect = VllmDialect("model", 0)
    deltas = [" alpha", "", " beta", *[""] * (2 * QUIET), " gamma"]
    found = [each for delta in deltas for each in dialect.take({"type": "transcription.delta", "delta": delta})]
    first, second = (3 + QUIET // 2) * 1280, (3 + QUIET + QUIET // 2) * 1280
    assert found == [" alpha", " beta", Turn("alpha beta", (), first), Turn("", (), second), " gamma"]
    assert list(dialect.take({"type": "transcription.done", "text": ""})) == [Turn("gamma")]
    assert dialect.done


# ---- Captions


def test_a_turn_of_a_server_without_deltas_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Captions(None, None, "text", False) as captions:
        captions.begin()
        captions.turn(Turn("Alpha."))
        captions.turn(Turn(""))
        captions.delta(" Be")
        captions.again()
        captions.delta("Beta")
    assert capsys.readouterr().out == "Alpha.\nBeta\n"
