"""The language of a text, with py3langid's own model."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from voxtral_serve.transcript import language
from voxtral_serve.transcript.language import NAMES, recognised

# The same in each, and in short: the most that people say in a breath.
SENTENCES = {
    "ar": "من فضلك، أين أقرب محطة قطار؟ لقد ضللت الطريق.",
    "de": "Entschuldigung, wo ist der nächste Bahnhof?",
    "en": "Excuse me, where is the nearest station?",
    "es": "Perdone, ¿dónde está la estación más cercana?",
    "fr": "Excusez-moi, où se trouve la gare la plus proche ?",
    "hi": "माफ़ कीजिए, सबसे नज़दीकी स्टेशन कहाँ है? मैं रास्ता भूल गया हूँ।",
    "it": "Scusi, dov'è la stazione più vicina?",
    "ja": "すみません、一番近い駅はどこにありますか。道に迷ってしまいました。",
    "ko": "실례합니다, 가장 가까운 역이 어디에 있습니까? 길을 잃었습니다.",
    "nl": "Pardon, waar is het dichtstbijzijnde station?",
    "pt": "Desculpe, onde fica a estação mais próxima?",
    "ru": "Извините, где находится ближайшая станция?",
    "zh": "不好意思，请问最近的火车站在哪里？我迷路了，手机也没有电了。",
}


@pytest.mark.parametrize("code", NAMES)
def test_a_short_sentence_of_each_language(code: str) -> None:
    assert recognised(SENTENCES[code]) == code


@pytest.mark.parametrize(
    "text", ["", "Guten Morgen", "thank you", "はい、そうです。", "OK. " + "1234 " * 20, "Hm. " * 9]
)
def test_two_words_or_few_letters_say_nothing(text: str) -> None:
    assert recognised(text) is None


def test_what_could_be_of_several_says_nothing() -> None:
    cities = "Berlin, Paris, London, Madrid."
    assert sum(map(str.isalpha, cities)) >= language.LEAST
    assert recognised(cities) is None


def test_a_long_text_is_read_from_its_beginning_in_less_than_a_millisecond() -> None:
    text = SENTENCES["fr"] * (language.MOST // len(SENTENCES["fr"]) + 1) + SENTENCES["ru"] * 20_000
    assert recognised(text) == "fr"
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        recognised(text)
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.001


def test_threads_that_come_first_load_the_model_once() -> None:
    language._model.cache_clear()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(recognised, [SENTENCES["ko"], SENTENCES["nl"]] * 4))
    assert found == ["ko", "nl"] * 4
    assert language._model.cache_info().misses == 1


def test_a_server_without_the_library_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    language.check()
    monkeypatch.setattr(language, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="py3langid is not installed"):
        language.check()
