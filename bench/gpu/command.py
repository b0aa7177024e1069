"""The command line: `python -m bench gpu report|run|live|kernels ...`.

Exit status: 0 if all rows were measured without a failed request; 1 if a server did not start or a request failed; 2
for a usage error; 3 if --minutes ended before all rows were measured.
"""

import json
import sys
from collections.abc import Sequence

from bench import BenchError
from bench.gpu import record, report
from bench.gpu.arguments import parse


def main(arguments: Sequence[str]) -> int:
    """Run a command line (without `gpu`) and return the exit status."""
    if arguments[:1] == ["kernels"]:
        from bench.gpu import kernels  # which needs PyTorch and this repository's package

        return kernels.main(arguments[1:])
    plan = parse(arguments)
    try:
        content = report.run(plan)
    except report.TimeIsUpError as told:
        print(record.table(json.loads(plan.out.read_bytes())))
        print(f"{told}. Run the same command again to continue.", file=sys.stderr)
        return 3
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if plan.only_plan:
        return 0
    print(record.table(content))
    return int(any(row["failed"] for row in content["rows"]) or bool(content["not_measured"]))
