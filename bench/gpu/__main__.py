"""The command line: `python -m bench.gpu run|live --out FILE` and `python -m bench.gpu merge FILE... --out FILE`.

Exit status: 0 if all rows were measured without a failed request, 1 if a server did not start or a request failed, 2
for a usage error. The file is written after every row, so an interrupted run keeps the rows measured until then.
"""

import json
import sys
from collections.abc import Sequence

from bench import BenchError, results
from bench.gpu import live, liverows, rows
from bench.gpu.arguments import parse
from bench.gpu.plan import LivePlan, MergePlan
from bench.gpu.run import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of this process) and return the exit status."""
    plan = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if isinstance(plan, MergePlan):
            files = [json.loads(path.read_bytes()) for path in plan.files]
            if all("sessions" in row for file in files for row in file["rows"]):  # of live sessions
                results.write_json(plan.out, outcome := liverows.merge(*files))
                print(liverows.table(outcome))
                return 0
            results.write_json(plan.out, outcome := rows.merge(*files))
        elif isinstance(plan, LivePlan):
            outcome = live.run(plan)
            print(liverows.table(outcome))
            failed = any(row["failed"] or row["uploads_failed"] for row in outcome["rows"])
            return int(failed or any(run["not_measured"] for run in outcome["runs"]))
        else:
            outcome = run(plan)
            if plan.only_plan:
                return 0
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(rows.table(outcome))
    return int(any(row["failed"] for row in outcome["rows"]) or any(run["not_measured"] for run in outcome["runs"]))


if __name__ == "__main__":
    sys.exit(main())
