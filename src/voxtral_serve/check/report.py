"""The output of a check: sections, rows and problems."""

from dataclasses import dataclass, field

from voxtral_serve.units import GIB, MIB

WIDTH = 16  # of the names in the printed rows


class ConfigError(ValueError):
    """vLLM would reject this configuration. The message names the value."""


@dataclass
class Report:
    """The lines to print, and the problems. A problem prevents a start, or makes the server differ from its config."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)  # the section of each problem
    title: str = ""

    def section(self, title: str) -> None:
        self.title = title
        self.lines.append(title)

    def row(self, name: str, value: str) -> None:
        self.lines.append(f"  {name:{WIDTH}}  {value}")

    def problem(self, text: str) -> None:
        self.problems.append(text)
        self.sections.append(self.title)
        self.row("PROBLEM", text)

    def verdict(self) -> str:
        if not self.problems:
            return "ok: this configuration can be served"
        count, where = len(self.problems), ", ".join(dict.fromkeys(self.sections))
        return f"{count} problem{'s' if count > 1 else ''} in {where}, marked PROBLEM above"

    def refusals(self) -> list[str]:
        """One line for each problem, complete without the other lines."""
        pairs = zip(self.sections, self.problems, strict=True)
        return [f"voxtral-serve: refused: {section}: {' '.join(problem.split())}" for section, problem in pairs]


def size(count: int) -> str:
    """A number of bytes as text, in MiB or GiB."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.2f} MiB"
