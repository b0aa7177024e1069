"""The arguments of `python -m tools.hooks`."""

import argparse


def parser(description: str, installed: str) -> argparse.ArgumentParser:
    """`installed`: the version of the installed vLLM."""
    made = argparse.ArgumentParser(
        prog="python -m tools.hooks", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("release", nargs="?", help="a version of vLLM, or the path of a wheel, an sdist or the package")
    made.add_argument("--against", default=installed, help="another one (default: the installed)")
    made.add_argument(
        "--diff", nargs="?", const="", metavar="TEXT", help="print the code that changed, of paths with TEXT"
    )
    made.add_argument("--probe", action="store_true", help="also run the patches' probes on the release's Python code")
    made.add_argument("--record", action="store_true", help="write versions.json anew; `release` is added to it")
    return made
