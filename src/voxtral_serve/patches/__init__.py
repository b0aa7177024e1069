"""The records of all changes that voxtral-serve makes to vLLM at run time (`Patch` of sitecustomize.py).

There are three kinds:
  sitecustomize.PATCHES   settled at the import of their target; verified in every vLLM process
  RECORDS                 settled at the import of their target, after vLLM has loaded the plugin; verified by the
                          configurations that use them (`shims.require`), so a drifted record stops only these
  SERVER_RECORDS          settled by the guard, on objects of the starting server

This module needs the standard library only. Probing or applying a patch imports more.
"""

from collections.abc import Iterator

from voxtral_serve import shims
from voxtral_serve.patches.clip_end import ClipEnd
from voxtral_serve.patches.config_hooks import ConfigHooks, ConfigParsers
from voxtral_serve.patches.cpu_sampling import CpuSampling
from voxtral_serve.patches.draft_method import DraftMethod
from voxtral_serve.patches.drain import ApiProcessDrain
from voxtral_serve.patches.live_audio import LiveAudio
from voxtral_serve.patches.live_server import (
    ClientWatch,
    ConnectionHeaders,
    FileLimit,
    GracefulStop,
    HeaderLimit,
    NoCompression,
)
from voxtral_serve.patches.ngram_pads import NgramPads
from voxtral_serve.patches.step_graphs import StepGraphs

# Every start needs these two: they find out which patches a configuration uses.
ALWAYS = (ConfigParsers(), ConfigHooks())
RECORDS = (
    *(*ALWAYS, ClipEnd(), DraftMethod(), CpuSampling(), NgramPads(), ApiProcessDrain(), LiveAudio(), StepGraphs()),
)
SERVER_RECORDS = (*(FileLimit(), GracefulStop(), HeaderLimit(), ConnectionHeaders(), ClientWatch(), NoCompression()),)


def every() -> Iterator[shims.Patch]:
    """All records, in the order of the published table."""
    yield from (*shims.PATCHES, shims.GATE, *RECORDS, *SERVER_RECORDS)
