"""The command line: `python -m bench run|serve|report|compare|matrix ...`.

Exit status: 0 all clips completed; 1 a request failed or is missing; 2 a mistake in the usage or the data,
or no server; 130 stopped by Ctrl-C.
"""

import os
import sys
from collections.abc import Sequence

from bench import BenchError, compare, matrix, report, run, serve
from bench.arguments import parse
from bench.plan import ComparePlan, MatrixPlan, RunPlan, ServePlan


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line (default: this process's) and return the exit status."""
    plan = parse(arguments)
    try:
        if isinstance(plan, ServePlan):
            serve.stay_up(plan.config, plan.directory, plan.port, plan.flags)
            return 0
        if isinstance(plan, ComparePlan):
            return compare.main(plan)
        if isinstance(plan, MatrixPlan):
            return matrix.main(plan)
        interrupted = isinstance(plan, RunPlan) and run.execute(plan)
        summary, rows = report.score(plan.out)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted; there is nothing new to score.", file=sys.stderr)
        return 130
    print(report.console(plan.out, summary, rows))
    complete = summary["completed"] == summary["samples"]
    if not complete:
        print("To send what failed or is missing, add --resume to the `bench run` command.", file=sys.stderr)
    return 130 if interrupted else int(not complete)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. After Ctrl-C, threads still wait for answers, and a plain exit would wait with them.
    os._exit(status)
