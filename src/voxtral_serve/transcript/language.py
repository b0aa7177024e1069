"""The language of a transcript, recognised from its text: Voxtral Realtime does not say which one it has heard.

py3langid (https://github.com/adbar/py3langid) compares the text with a model of 139 languages that is in its package.
Here it chooses among the languages of Voxtral-Mini-4B-Realtime.
"""

import asyncio
import functools
import threading
from collections.abc import Callable
from importlib.util import find_spec

# Codes of ISO 639-1 with the names that OpenAI's `verbose_json` has (https://platform.openai.com/docs/api-reference/audio).
# The languages are those of the model's card (https://huggingface.co/mistralai/Voxtral-Mini-4B-Realtime-2602).
NAMES = {
    **{"ar": "arabic", "de": "german", "en": "english", "es": "spanish", "fr": "french", "hi": "hindi"},
    **{"it": "italian", "ja": "japanese", "ko": "korean", "nl": "dutch", "pt": "portuguese", "ru": "russian"},
    **{"zh": "chinese"},
}
LEAST, MOST = 20, 2000  # letters of a text below which nothing is said, and characters of it that are read
SURE = 0.5  # probability of the language, of all thirteen, below which nothing is said

# OpenAI's models that say the languages of a text; the names of a server's model may have them
TELLING = ("gpt-transcribe", "gpt-live-transcribe")

_LOADING = threading.Lock()


def check() -> None:
    """Raises ImportError if py3langid is not installed."""
    if find_spec("py3langid") is None:
        raise ImportError("py3langid is not installed")


def recognised(text: str) -> str | None:
    """The code of the language in which most of the text's first MOST characters are; None for a text of less than
    LEAST letters, and for one that could be of several.

    It takes 0.2 to 0.8 ms once the model is loaded. Any thread may call it.
    """
    text = text[:MOST]
    if not _is_enough(text):
        return None
    with _LOADING:  # which many may want first at the same time
        classify = _model()
    language, probability = classify(text)
    return language if probability >= SURE else None


async def recognised_later(text: str) -> str | None:
    """`recognised`, in a thread."""
    return await asyncio.to_thread(recognised, text) if _is_enough(text[:MOST]) else None


def name_of(code: str) -> str:
    """The name of a language, one of the 100 of Whisper, as OpenAI's `verbose_json` has it; others stay as they are."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES  # which vLLM imports as well

    return str(NAMES.get(code) or LANGUAGES.get(code, code))


def listed(code: str | None) -> list[dict[str, str]]:
    """`languages` as OpenAI's gpt-transcribe has them: none if the language is not clear."""
    return [] if code is None else [{"code": code}]


def _is_enough(text: str) -> bool:
    return sum(map(str.isalpha, text)) >= LEAST


@functools.cache
def _model() -> Callable[[str], tuple[str, float]]:
    """A function from a text to its language and the language's probability among those of NAMES.

    It takes half a second and then 55 MB.
    """
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    whole = LanguageIdentifier.from_model_file(MODEL_FILE)
    whole.set_languages(list(NAMES))
    # A copy without the 28 MB of the other languages.
    tables = whole.nb_ptc, whole.nb_pc, whole.nb_classes, whole.tk_nextmove, whole.tk_output
    classify: Callable[[str], tuple[str, float]]
    classify = LanguageIdentifier(*tables, norm_probs=True, tk_row=whole.tk_row).classify
    return classify
