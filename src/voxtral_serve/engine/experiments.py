"""Experiments: changes of the engine whose gain is not measured yet, off by default. Standard library only.

VOXTRAL_SERVE_EXPERIMENTS names those that are on, with commas between them. It is for measurements of one commit with
and without a change. A name goes away once it is decided: its code goes with it, or becomes the way the engine works.

skip-propose     a step without drafts that asks for none skips vLLM's code of drafts, on GPUs (worker.py)
"""

import os
from collections.abc import Mapping

VARIABLE = "VOXTRAL_SERVE_EXPERIMENTS"
SKIP_PROPOSE = "skip-propose"
KNOWN = (SKIP_PROPOSE,)


def experiments(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The names of the experiments that are on. Raises ValueError for an unknown one."""
    names = frozenset(name.strip() for name in environ.get(VARIABLE, "").split(",")) - {""}
    if unknown := sorted(names - {*KNOWN}):
        raise ValueError(f"{VARIABLE} has {', '.join(unknown)}: expected {', '.join(KNOWN)}, or nothing")
    return names
