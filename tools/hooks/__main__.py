"""Compare the hooks of voxtral-serve in two versions of vLLM, from their source.

    python -m tools.hooks 0.33.0                   what it changed since the installed version
    python -m tools.hooks vllm-0.34.0.whl --diff   with the code that changed
    python -m tools.hooks 0.33.0 --probe           also the outcomes of the patches, probed on its Python code
    python -m tools.hooks --record 0.34.0          write versions.json anew, with one version more

Exit status 1 if a hook is missing or has another signature, and if a probe fails.
"""

import argparse
import difflib
import sys
from collections import Counter

from tools.hooks import probes, release, versions
from tools.hooks.arguments import parser
from tools.hooks.source import Facts, Source
from tools.hooks.uses import Hooks


def main() -> int:
    made = parser(str(__doc__), release.installed_version())
    arguments = made.parse_args()
    try:
        if arguments.record:
            return record(arguments.release)
        if arguments.release is None:
            made.error("the release is missing")
        return compare(arguments)
    except release.ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def facts_of(hooks: Hooks, source: Source) -> dict[str, Facts | None]:
    return {path: source.facts(path, hooks.is_made(path)) for path in hooks.uses}


def compare(arguments: argparse.Namespace) -> int:
    old = Source(release.read(arguments.against))
    files = release.read(arguments.release)
    new = Source(files)
    hooks = Hooks(old)
    for problem in sorted(set(hooks.problems)):
        print(f"not followed: {problem}")
    found = versions.changes(hooks, facts_of(hooks, old), facts_of(hooks, new))
    counts = Counter(change.what for change in found)
    same = len(hooks.uses) - len(found)
    listed = ", ".join(f"{counts[what]} {what}" for what in (*versions.FAILURES, versions.BODY, versions.NEW))
    print(f"vllm {arguments.release} against {arguments.against}: {len(hooks.uses)} hooks, {same} unchanged, {listed}")
    for change in sorted(found, key=lambda each: each.what not in versions.FAILURES):
        optional = " (optional)" if change.optional else ""
        print(f"  {change.what + optional:18}  {change.path}  {hooks.uses[change.path][0].place}")
        if change.what == versions.SIGNATURE and change.before and change.after:
            print(f"    {change.before.signature}\n    {change.after.signature}")
    if arguments.diff is not None:
        for change in found:
            if arguments.diff in change.path:
                print_diff(change.path, old, new)
    failed = any(change.fails for change in found)
    if arguments.probe:
        failed |= not probes.run(files, arguments.release)
    return int(failed)


def print_diff(path: str, old: Source, new: Source) -> None:
    before, after = (source.text(path).splitlines(keepends=True) for source in (old, new))
    sys.stdout.writelines(difflib.unified_diff(before, after, f"before {path}", f"after {path}"))


def record(added: str | None) -> int:
    """The hooks are those of the installed version."""
    names = [*versions.read(), *([added] if added else [])] if versions.RECORD.exists() else [str(added)]
    hooks = Hooks(Source(release.installed()))
    recorded = {name: facts_of(hooks, Source(release.read(name))) for name in dict.fromkeys(names)}
    versions.write(recorded)
    print(f"{versions.RECORD.name}: {len(hooks.uses)} hooks in {', '.join(recorded)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
