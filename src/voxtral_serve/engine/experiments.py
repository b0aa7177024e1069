"""Experiments: changes of the engine whose gain is not measured yet, off by default. Standard library only.

VOXTRAL_SERVE_EXPERIMENTS names those that are on, with commas between them. It is for measurements of one commit with
and without a change. A name goes away once it is decided: its code goes with it, or becomes the way the engine works.

skip-propose    a step without drafts that asks for none skips vLLM's code of drafts, on GPUs (worker.py)
plan-on-gpu     the encoder's graphs compute the places of packed clips, and the host sends their ends only (encoder.py)
share-padding   uploaded clips share the keys and values of their left padding (padding_scheduler.py)
share-blocks    the same, but for positions that do not fill a block, so that nothing is copied
"""

import os
from collections.abc import Mapping

VARIABLE = "VOXTRAL_SERVE_EXPERIMENTS"
SKIP_PROPOSE = "skip-propose"
PLAN_ON_GPU = "plan-on-gpu"
SHARE_PADDING = "share-padding"
SHARE_BLOCKS = "share-blocks"
KNOWN = (SKIP_PROPOSE, PLAN_ON_GPU, SHARE_PADDING, SHARE_BLOCKS)


def experiments(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The names of the experiments that are on. Raises ValueError for an unknown one."""
    names = frozenset(name.strip() for name in environ.get(VARIABLE, "").split(",")) - {""}
    if unknown := sorted(names - {*KNOWN}):
        raise ValueError(f"{VARIABLE} has {', '.join(unknown)}: expected {', '.join(KNOWN)}, or nothing")
    return names


def shares_padding() -> bool:
    return not experiments().isdisjoint((SHARE_PADDING, SHARE_BLOCKS))
