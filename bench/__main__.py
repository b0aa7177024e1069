"""The command line: `python -m bench run|speech|serve|report|compare|matrix|gpu|speakers|confidence|delays ...`.

Exit status: 0 if all clips completed; 1 if a request failed or is missing; 2 for an error in the usage or the data, or
if there is no server; 130 after Ctrl-C.
"""

import os
import sys
from collections.abc import Sequence

from bench import BenchError, compare, confidence, delays, matrix, report, run, serve
from bench.arguments import parse
from bench.plan import ComparePlan, MatrixPlan, ReportPlan, RunPlan, ServePlan, SpeechPlan
from bench.speech import report as speech_report
from bench.speech import run as speech_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["gpu"]:
        from bench.gpu import command  # which other commands do without

        return command.main(words[1:])
    if words[:1] == ["speakers"]:
        from bench.speakers import command as speakers

        return speakers.main(words[1:])
    for name, command in (("confidence", confidence), ("delays", delays)):
        if words[:1] == [name]:
            return command.main(words[1:])
    plan = parse(words)
    try:
        if isinstance(plan, SpeechPlan) or (isinstance(plan, ReportPlan) and speech_report.is_one(plan.out)):
            return _speech(plan)
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
        print("\nInterrupted before the first result.", file=sys.stderr)
        return 130
    print(report.console(plan.out, summary, rows))
    complete = summary["completed"] == summary["samples"]
    if not complete:
        print("Add --resume to the `bench run` command to send failed and missing requests again.", file=sys.stderr)
    return 130 if interrupted else int(not complete)


def _speech(plan: SpeechPlan | ReportPlan) -> int:
    """Measure speech, unless the run is there already; write and print its report. Raises BenchError."""
    interrupted = isinstance(plan, SpeechPlan) and speech_run.execute(plan)
    summary = speech_report.score(plan.out)
    print(speech_report.console(plan.out, summary))
    return 130 if interrupted else int(summary["completed"] < summary["samples"] or speech_report.unheard(summary) > 0)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All results are written. After Ctrl-C, threads still wait for responses; a normal exit would wait for them.
    os._exit(status)
