"""Live sessions in the engine, float32: the rows and tokens of the upload, whatever the pieces and the neighbours.

Real vLLM without a server. How clients reach it is in test_live.py. A session with another delay than the checkpoint's
has no upload to be compared with: its tokens are those of pico's reference model at that delay.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import offline
import pytest
import sessions
from places import PICO
from vllm.exceptions import VLLMValidationError

from bench.measure.scoring import word_errors
from mistral_layout import audio as layout
from pico import model
from pico.tokenizer import TextTokenizer
from voxtral_serve.engine.live_scheduler import RESUMING
from voxtral_serve.engine.session import PART, RING, SESSION
from voxtral_serve.patches import clip_end

MOST = 16
AUDIOS = 8
FRAMES = 4  # of the encoder, in one token
RELATIVE = 3e-5 if offline.ON_GPU else 1e-6  # seen on a CPU: 4e-7 at most
PIECES = [1280, 160, 1000, 5000, 16_000, 10**6]
slow, gpu = pytest.mark.slow, pytest.mark.gpu


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with offline.running(max_num_seqs=32, **sessions.live(MOST)) as running:
        yield running


@pytest.fixture
def engine(llm: Any) -> sessions.Sessions:
    return sessions.Sessions(llm)


@pytest.fixture(scope="module")
def audios() -> list[np.ndarray]:
    return [sessions.rounded(offline.read(name)) for name in offline.varied(AUDIOS)]


@pytest.fixture(scope="module")
def uploaded(llm: Any, audios: list[np.ndarray]) -> list[list[int]]:
    return offline.generate(llm, audios)


@gpu
@pytest.mark.parametrize(
    "samples", [pytest.param(80, marks=slow), 1280, pytest.param(16_000, marks=slow), pytest.param(10**6, marks=slow)]
)
def test_rows_are_those_of_the_whole_clip(llm: Any, engine: sessions.Sessions, samples: int) -> None:
    audio = sessions.rounded(offline.speech(20.0 if samples > 1280 else 4.0))
    session = engine.begin("rows", audio)
    while len(session.pcm) - session.sent > samples:
        engine.feed(session, samples)
        engine.settle()
    rows = session.due + sessions.SHAPE.prompt - 1
    if not session.sent:  # all at once: nothing can be read after the end
        engine.feed(session, len(session.pcm) - 1)
        engine.settle()
        rows = session.due + sessions.SHAPE.prompt - 1
    first = max(rows - RING, 0)  # those before it are no longer kept
    (got,) = llm.apply_model(partial(sessions.rows_of_session, name="rows", first=first, count=rows - first))
    ((whole,),) = llm.apply_model(partial(offline.rows_of, audios=[audio]))
    engine.feed(session, 10**6)
    engine.settle()
    engine.close(session)
    assert offline.relative(got, whole[first:rows]) <= RELATIVE


@gpu
def test_tokens_are_those_of_uploads(
    engine: sessions.Sessions, audios: list[np.ndarray], uploaded: list[list[int]]
) -> None:
    heard = engine.hear(audios, PIECES, at_once=8)
    assert [session.text for session in heard] == uploaded


@gpu
def test_the_left_padding_is_not_encoded_with_each_clip(llm: Any, audios: list[np.ndarray]) -> None:
    """Nor in a session: its rows are those of uploads, above."""
    ((computed, whole),) = llm.apply_model(partial(offline.frames_encoded, audios=audios[:3]))
    # The last token of the padding hears the first samples of the clip.
    assert whole - computed == 3 * (layout.LEFT_PAD_TOKENS - 1) * FRAMES
    assert computed > 0


@gpu
def test_beside_uploads(engine: sessions.Sessions, audios: list[np.ndarray], uploaded: list[list[int]]) -> None:
    for number, audio in enumerate(audios):
        engine.upload(f"upload {number}", audio)
    heard = engine.hear(audios[:3], [4000], at_once=3)
    assert [session.text for session in heard] == uploaded[:3]
    assert [*engine.uploads.values()] == uploaded


@gpu
def test_the_self_test_leaves_the_engine_as_it_was(
    llm: Any, engine: sessions.Sessions, audios: list[np.ndarray], uploaded: list[list[int]]
) -> None:
    assert llm.collective_rpc(sessions.self_test) == [""]
    assert offline.generate(llm, audios[:3]) == uploaded[:3]
    (heard,) = engine.hear(audios[3:4], [4000], at_once=1)
    assert heard.text == uploaded[3]


@gpu
@pytest.mark.parametrize(
    ("fault", "found"),
    {
        "another's slot": "in step 1: the rows of a clip of noise at positions 0 to .*, compared with the same audio",
        "a row late": "in step 1: the rows of a clip of noise at positions 0 to .*, compared with the same audio",
        "another's ring": "the rows of a live session of a clip of noise at positions 0 to .*, compared with the same",
        "no step": r"vLLM did not run it \(TypeError: no such argument\)",
        # On a GPU, torch.compile is needed to see it, which offline.running does without.
        "no sum": "" if offline.ON_GPU else "the rows of .*, as the language model gets them: their relative RMS",
    }.items(),
    ids=lambda each: each.partition(":")[0] if len(each) < 20 else "",
)
def test_the_self_test_finds(
    llm: Any, audios: list[np.ndarray], uploaded: list[list[int]], fault: str, found: str
) -> None:
    """And once the fault is mended, requests have their texts."""
    (message,) = llm.collective_rpc(partial(sessions.self_test, fault=fault))
    if not found:
        pytest.skip("not seen without torch.compile")
    assert re.match(rf"vllm .*: the self-test of VoxtralRealtimeEncodeOnce failed.*{found}", message), message
    assert offline.generate(llm, audios[:1]) == uploaded[:1]


@gpu
def test_a_session_without_audio_costs_no_step(llm: Any, engine: sessions.Sessions, audios: list[np.ndarray]) -> None:
    session = engine.begin("silent", audios[0])
    engine.feed(session, 20_000)
    engine.settle()
    offline.steps(llm)
    engine.upload("upload", audios[1])
    engine.settle()
    prefill, *decoding = offline.steps(llm)
    assert prefill == model.PROMPT_TOKENS  # of the upload alone
    assert set(decoding) == {1}
    engine.engine.abort_request([session.name])
    engine.close(session)


@gpu
def test_more_sessions_than_there_may_be(engine: sessions.Sessions) -> None:
    names = [sessions.new_id() for _ in range(MOST + 1)]
    goes_on = sessions.new_id()
    refused = engine.call(*(["open", name] for name in names))
    assert refused == {names[-1]: f"max_live_sessions is {MOST}"}
    assert engine.call(["close", names[0]], ["open", goes_on]) == {}
    assert engine.call(*(["close", name] for name in [*names, goes_on])) == {}
    assert engine.call(["open", names[-1]], ["close", names[-1]]) == {}


def test_messages_that_are_refused(engine: sessions.Sessions) -> None:
    assert engine.call(["audio", "nobody", b"12"]) == {"nobody": "unknown session"}
    assert engine.call(["close", "nobody"]) == {}
    odd = sessions.new_id()
    assert engine.call(["open", odd], ["audio", odd, b"123"]) == {odd: "3 bytes: expected an even number"}
    assert engine.call(["end", odd], ["audio", odd, b"12"], ["close", odd]) == {odd: "audio after the end"}
    assert "a session named 'odd': expected" in engine.call(["open", "odd"])["odd"]


@gpu
def test_sessions_whose_requests_are_aborted_leave_nothing(
    llm: Any, engine: sessions.Sessions, audios: list[np.ndarray], uploaded: list[list[int]]
) -> None:
    for number in range(MOST):
        session = engine.begin(f"gone {number}", audios[number % len(audios)])
        engine.feed(session, 12_000)
    engine.settle()
    engine.engine.abort_request([*engine.all])
    for session in [*engine.all.values()]:
        engine.close(session)
    # What a worker holds for requests that have ended, it gives up in the next step that begins one; the first of these
    # may begin before all of them are known to have ended.
    for _ in range(2):
        (heard,) = engine.hear(audios[:1], [1280], at_once=1)
        assert heard.text == uploaded[0]
    assert llm.apply_model(sessions.sessions_held) in ([0], [1])


# What one request or one session gets wrong


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server lets everything pass, as if it had a fault of its own."""
    monkeypatch.setattr(clip_end, "refuse_without_audio", lambda processor, request: None)


@pytest.mark.parametrize(
    "name", [["x"], {"x": 1}, 7, "x", "x" * 10**6, "0" * 31 + "-0"], ids=lambda name: f"{name!r:.9}"
)
def test_the_name_of_a_session_that_none_has(engine: sessions.Sessions, name: Any) -> None:
    with pytest.raises(VLLMValidationError, match=f"{SESSION} is an option of the server itself"):
        engine.request("wrong", name)


def test_a_request_without_audio(llm: Any) -> None:
    with pytest.raises(VLLMValidationError, match="the request has no audio: expected one clip"):
        llm.generate({"prompt_token_ids": [model.BOS] * 39}, offline.sampling(), use_tqdm=False)


def test_a_clip_and_the_name_of_a_session(engine: sessions.Sessions, audios: list[np.ndarray]) -> None:
    options = offline.sampling(extra_args={SESSION: sessions.new_id()})
    with pytest.raises(VLLMValidationError, match=f"{SESSION} is an option of the server itself"):
        engine.engine.add_request("both", offline.prompt(audios[0]), options)


@gpu
@pytest.mark.usefixtures("unchecked")
def test_a_wrong_name_ends_its_request_at_once(
    llm: Any, engine: sessions.Sessions, audios: list[np.ndarray], uploaded: list[list[int]]
) -> None:
    """Also where no other request has a step: a session that waits for audio is not one."""
    session = engine.begin("live", audios[0])
    engine.feed(session, 20_000)
    engine.settle()
    for name, why in (
        (["x"], "it names no session that is open"),
        ({"x": 1}, "it names no session that is open"),
        ("x" * 10**6, "it names no session that is open"),
        (sessions.new_id(), "it names no session that is open"),
        (session.id, "it names a session that has a request already"),
    ):
        engine.request("wrong", name)
        assert engine.step() == {"wrong": f"error: {why}"}
    del engine.uploads["wrong"]
    engine.feed(session, 10**6)
    engine.settle()
    assert session.text == uploaded[0]
    engine.close(session)


@gpu
@pytest.mark.usefixtures("unchecked")
def test_a_request_without_audio_reads_nobodys_and_ends(
    engine: sessions.Sessions, audios: list[np.ndarray], uploaded: list[list[int]]
) -> None:
    engine.upload("upload", audios[1])
    engine.engine.add_request("text", {"prompt_token_ids": [model.BOS] * 39}, offline.sampling())
    ended = engine.step()
    while not ended:
        ended = engine.step()
    assert ended == {"text": "error: the request has no audio"}
    assert engine.uploads.pop("text") == []
    engine.settle()
    assert engine.uploads["upload"] == uploaded[1]


@gpu
@pytest.mark.parametrize(
    "fault", [*(pytest.param(fault, marks=slow) for fault in ("short", "float", "no slot")), "a gap", "all slots taken"]
)
def test_a_fault_of_the_worker_ends_the_sessions_request_alone(
    llm: Any, engine: sessions.Sessions, audios: list[np.ndarray], uploaded: list[list[int]], fault: str
) -> None:
    """Two sessions and an upload beside it have their texts, and its slot is free."""
    well = [engine.begin(f"well {number}", audios[number]) for number in (1, 2)]
    for session in well:
        engine.feed(session, 12_000)
    engine.settle()
    wrong = engine.begin("wrong", audios[3])
    if fault == "all slots taken":
        llm.apply_model(partial(sessions.take_slots, taken=True))
    elif fault != "no slot":
        llm.apply_model(partial(sessions.spoil_parts, name="wrong", fault=fault))
    else:
        engine.feed(wrong, 12_000)
        engine.settle()
        llm.apply_model(partial(sessions.drop_slot, name="wrong"))
    engine.upload("upload", audios[4])
    for session in (*well, wrong):
        engine.feed(session, 10**6)
    while not wrong.broken:
        engine.step()
    if fault == "all slots taken":
        llm.apply_model(partial(sessions.take_slots, taken=False))
    elif fault != "no slot":
        llm.apply_model(sessions.mend_parts)
    engine.settle()
    expected = {"short": "expected int16 (", "float": "float32", "a gap": "next row is 0"}.get(fault, "no slot")
    assert wrong.broken.startswith("error: the session") and expected in wrong.broken
    assert [session.text for session in well] == uploaded[1:3]
    assert engine.uploads["upload"] == uploaded[4]
    for session in (*well, wrong):
        engine.close(session)
    for _ in range(2):  # as in the test above
        (heard,) = engine.hear(audios[:1], [1280], at_once=1)
        assert heard.text == uploaded[0]
    assert llm.apply_model(sessions.sessions_held) in ([0], [1])


@gpu
def test_the_request_of_a_session_ends_with_it(
    llm: Any, engine: sessions.Sessions, audios: list[np.ndarray], uploaded: list[list[int]]
) -> None:
    """Nobody aborts it: its client is gone, and the session is closed."""
    gone = [engine.begin(f"gone {number}", audios[number % len(audios)]) for number in range(MOST)]
    for session in gone:
        engine.feed(session, 12_000)
    engine.settle()
    engine.call(*(["close", session.id] for session in gone))
    while not all(session.broken for session in gone):
        engine.step()
    assert {session.broken for session in gone} == {"abort: the session is closed"}
    engine.all.clear()
    assert [heard.text for heard in engine.hear(audios, [4000], at_once=MOST)] == uploaded


# Drafts

DRAFTS = {
    "model": "voxtral_serve.drafter.Drafter",
    "num_speculative_tokens": 15,
    "num_speculative_tokens_per_batch_size": [[1, 4, 15], [5, 16, 7], [17, 32, 1]],
}
PADS = DRAFTS | {"model": "voxtral_serve.drafter.PadDrafter"}


@slow
@pytest.mark.parametrize("drafts", [pytest.param(DRAFTS, marks=gpu), PADS], ids=["Drafter", "PadDrafter"])
def test_with_drafts_beside_uploads(
    audios: list[np.ndarray], uploaded: list[list[int]], drafts: dict[str, Any]
) -> None:
    """Each session and upload has the text that it has without drafts. One session has another delay, and no drafts."""
    expected = [*uploaded[:5], *offline.referred(audios[5:6], [12]), *uploaded[6:]]
    with offline.running(max_num_seqs=32, speculative_config=drafts, **sessions.live(MOST)) as llm:
        engine = sessions.Sessions(llm)
        for number, audio in enumerate(audios):
            engine.upload(f"upload {number}", audio)
        heard = engine.hear(audios, PIECES, at_once=4, delays=[None, None, None, None, None, 12, None, None])
        assert [session.text for session in heard] == expected
        assert [*engine.uploads.values()] == uploaded
        before = offline.counters(llm)
        (alone,) = engine.hear(audios[:1], [4000], at_once=1)
        assert alone.text == uploaded[0]
        after = offline.counters(llm)
        drafted, accepted = (
            after[name] - before[name] for name in ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens")
        )
        # Its tail alone: without drafts it takes 17 steps or more.
        assert 0 < drafted < sessions.SHAPE.right and accepted > 0


@slow
@pytest.mark.parametrize("drafts", [pytest.param(DRAFTS, marks=gpu), PADS], ids=["Drafter", "PadDrafter"])
def test_with_drafts_after_preemption(
    audios: list[np.ndarray], uploaded: list[list[int]], drafts: dict[str, Any]
) -> None:
    with offline.running(max_num_seqs=8, speculative_config=drafts, **sessions.live(7)) as llm:
        engine = sessions.Sessions(llm)
        for number in range(2):
            engine.upload(f"upload {number}", audios[number])
        heard = engine.hear(audios, [4000, 16_000, 7000], at_once=6, preempts=True)
        assert [session.text for session in heard] == uploaded
        assert [*engine.uploads.values()] == uploaded[:2]
        counted = offline.counters(llm)
        assert counted["num_preemptions"] > 0 and counted["spec_decode_num_accepted_tokens"] > 0


# Delays of one session


@gpu
@slow
def test_sessions_of_two_delays_in_one_batch_have_the_texts_that_each_has_alone(
    engine: sessions.Sessions, audios: list[np.ndarray]
) -> None:
    delays = [3, 12]  # 240 and 960 ms
    both = [audio for audio in audios[:4] for _ in delays]  # each clip at each delay
    together = engine.hear(both, PIECES[1:], at_once=8, delays=delays)
    alone = [engine.hear([audio], [16_000], 1, [delays[i % 2]])[0] for i, audio in enumerate(both[:4])]
    assert [session.tokens for session in together[:4]] == [session.tokens for session in alone]
    assert [session.text for session in together] == offline.referred(both, delays)


@slow
def test_words_of_sessions_at_several_delays(engine: sessions.Sessions, audios: list[np.ndarray]) -> None:
    """With the conditioning of the checkpoint's delay, 64 of 107 words were wrong at 2.4 s."""
    tokenizer = TextTokenizer.from_file(PICO / "tekken.json")
    heard = engine.hear(audios, [16_000], at_once=AUDIOS, delays=[30, 3, 12])
    spoken = [offline.clips()[name].text for name in offline.varied(AUDIOS)]
    found = [word_errors(text, tokenizer.decode(each.text)) for text, each in zip(spoken, heard, strict=True)]
    assert sum(each.total for each in found) <= 0.1 * sum(each.words for each in found)


@gpu
@slow
def test_sessions_of_all_kinds_of_delays_beside_uploads(
    engine: sessions.Sessions, audios: list[np.ndarray], uploaded: list[list[int]]
) -> None:
    delays = [1, 30, model.DELAY_TOKENS, 12]
    for number, audio in enumerate(audios):
        engine.upload(f"upload {number}", audio)
    heard = engine.hear(audios[:8], [4000], at_once=4, delays=delays)
    assert [session.text for session in heard] == offline.referred(audios[:8], delays)
    assert [*engine.uploads.values()] == uploaded


def test_a_delay_that_no_session_has(engine: sessions.Sessions) -> None:
    expected = "positions: expected 1 to 30"
    delays = {sessions.new_id(): delay for delay in (0, 31, -1, 6.0)}
    refused = engine.call(*(["open", name, delay] for name, delay in delays.items()))
    assert refused == {name: f"a delay of {delay} {expected}" for name, delay in delays.items()}


@pytest.mark.parametrize(
    "delays",
    [[model.DELAY_TOKENS], pytest.param([3, 30, 6], marks=gpu)],
    ids=["the checkpoint's", "several"],
)
def test_after_preemption(
    llm: Any, engine: sessions.Sessions, audios: list[np.ndarray], uploaded: list[list[int]], delays: list[int]
) -> None:
    """Their rows are encoded again, a few at a time, and their texts are the same."""
    offline.steps(llm)
    heard = engine.hear(audios, [16_000, 30_000, 7000], at_once=6, delays=delays, preempts=True)
    assert [session.text for session in heard] == (uploaded if len(delays) == 1 else offline.referred(audios, delays))
    begin = 2 * model.PROMPT_TOKENS  # sessions that begin in the same step
    assert RESUMING * PART < max(offline.steps(llm)) <= RESUMING * PART + begin


def test_a_session_alone_after_preemption(llm: Any, engine: sessions.Sessions) -> None:
    """A long one, of which vLLM would compute all in one step."""
    audio = sessions.rounded(offline.speech(25.0))
    (expected,) = offline.generate(llm, [audio])
    session = engine.begin("long", audio)
    engine.feed(session, 20 * 16_000)
    engine.settle()
    offline.steps(llm)
    engine.preempt()
    engine.feed(session, 10**6)
    engine.settle()
    assert session.text == expected
    assert max(offline.steps(llm)) <= PART
    engine.close(session)
