"""Every change that voxtral-serve makes to vLLM at run time, as a record: sitecustomize.py's `Patch`.

Three kinds, by when they are settled:
  sitecustomize.PATCHES   at the import of their target, and verified in every vLLM process
  RECORDS                 at the import of their target too, once vLLM has loaded the plugin; verified by the
                          configurations that use them (`shims.require`), so that one that drifted stops no other start
  SERVER_RECORDS          on objects of a server that starts, by the guard

Standard library only, until a patch is probed or applied.
"""

from collections.abc import Iterator

from voxtral_serve import shims
from voxtral_serve.patches.clip_end import ClipEnd
from voxtral_serve.patches.config_hooks import ConfigHooks, ConfigParsers
from voxtral_serve.patches.drain import ApiProcessDrain
from voxtral_serve.patches.live_audio import LiveAudio
from voxtral_serve.patches.live_server import FileLimit, GracefulStop, TokenRecording
from voxtral_serve.patches.ngram_pads import NgramPads

# Without these two nobody could tell what a configuration uses.
ALWAYS = (ConfigParsers(), ConfigHooks())
RECORDS = (*ALWAYS, ClipEnd(), NgramPads(), ApiProcessDrain(), LiveAudio())
SERVER_RECORDS = (TokenRecording(), FileLimit(), GracefulStop())


def every() -> Iterator[shims.Patch]:
    """All records, in the order of the published table."""
    yield from (*shims.PATCHES, shims.GATE, *RECORDS, *SERVER_RECORDS)
