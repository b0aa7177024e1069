"""Why a `vllm serve` ended, from its log."""

import re

# A line with an exception: the last of a Python traceback, behind vLLM's process and what its logger adds at `ERROR`. A
# warning that quotes an exception is none.
EXCEPTION = re.compile(
    r"^(?:\((\w+) pid=\d+\) )?(?:ERROR:? +(?:\d\d-\d\d [\d:]+ \[[^\]]+\] )?)?"
    r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt): .+)$",
    re.MULTILINE,
)
ENGINE = ("EngineCore", "Worker")  # how the names of the engine's processes begin
POINTER = "root cause"  # in exceptions that say no more than that the log has another one


def cause(log: str) -> str | None:
    """The exception that ended a `vllm serve`, from its log, in one line; None if there is none.

    It is the last one of the engine's processes: they end at it. Without one it is the first, because the API server's
    later exceptions follow from it.
    """
    found = [match for match in EXCEPTION.finditer(log) if POINTER not in match[2]]
    engine = [match for match in found if (match[1] or "").startswith(ENGINE)]
    if not found:
        return None
    last = engine[-1] if engine else found[0]
    told = last[2]
    if "validation error" in told:  # pydantic's: the next line says what is wrong, and then all arguments
        line = log[last.end() :].split("\n", 2)[1:2]
        told += ": " + re.sub(r"^\(\w+ pid=\d+\) (?:ERROR .*?\] )?", "", "".join(line)).partition(" [type=")[0]
    return " ".join(told.split())
