"""tekken.json, the tokenizer file that mistral-common reads: version v13, 1,000 special tokens, an `audio` block."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from mistral_layout.audio import DELAY_MS, FRAME_RATE, LEFT_PAD_TOKENS, SAMPLE_RATE, SPECTROGRAM

VERSION = "v13"
N_SPECIAL = 1000  # ids before the first text token
# The rank is the position. Where mistral-common names a token that real checkpoints do not number publicly, it gets
# a free place here: the file must name every control token, but the model emits only EOS and the two STREAMING ones.
CONTROL_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
    "<SPECIAL_20>",
    "<SPECIAL_21>",
    "<SPECIAL_22>",
    "<SPECIAL_23>",
    "[AUDIO]",
    "[BEGIN_AUDIO]",
    "<SPECIAL_26>",
    "<SPECIAL_27>",
    "<SPECIAL_28>",
    "<SPECIAL_29>",
    "<SPECIAL_30>",
    "<SPECIAL_31>",
    "[STREAMING_PAD]",
    "[STREAMING_WORD]",
    "[TRANSCRIBE]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
    "[REPEAT_AUDIO_TEXT]",
    "[NEXT_AUDIO_TEXT]",
    "[MODEL_SETTINGS]",
    "[/MODEL_SETTINGS]",
]
BOS, EOS, STREAMING_PAD, STREAMING_WORD = map(
    CONTROL_TOKENS.index, ("<s>", "</s>", "[STREAMING_PAD]", "[STREAMING_WORD]")
)
AUDIO: dict[str, Any] = {
    "sampling_rate": SAMPLE_RATE,
    "frame_rate": FRAME_RATE,
    "transcription_format": "streaming",
    "transcription_delay_ms": DELAY_MS,
    "streaming_look_ahead_ms": 2.5,
    "streaming_look_back_ms": 52.5,
    "streaming_n_left_pad_tokens": LEFT_PAD_TOKENS,
    "audio_encoding_config": SPECTROGRAM,
}
# The vocabulary that mistral-common packages: 150,000 tokens, of which the first are those of smaller vocabularies.
PACKAGED = "data/tekken_240911.json"


def content(pattern: str, vocabulary: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The content of tekken.json.

    `pattern` is the regular expression that parts a text before its tokens are looked up; `vocabulary` lists the text
    tokens by rank, each with `rank`, `token_bytes` (base64) and `token_str`, the 256 bytes first.
    """
    return {
        "config": {
            "pattern": pattern,
            "num_vocab_tokens": len(vocabulary),
            "default_vocab_size": N_SPECIAL + len(vocabulary),
            "default_num_special_tokens": N_SPECIAL,
            "version": VERSION,
        },
        "vocab": vocabulary,
        "special_tokens": [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(CONTROL_TOKENS)],
        "audio": AUDIO,
    }


def packaged(vocab_size: int) -> dict[str, Any]:
    """The content of a tekken.json of `vocab_size` ids, special tokens included, with mistral-common's own vocabulary.

    Raises ModuleNotFoundError without mistral_common.
    """
    found = json.loads(files("mistral_common").joinpath(PACKAGED).read_text(encoding="utf-8"))
    return content(found["config"]["pattern"], found["vocab"][: vocab_size - N_SPECIAL])
