"""report.html: the report in one file, which needs no network and no JavaScript.

Texts of servers and datasets are untrusted. The page is built as an element tree, which escapes all text. In addition,
its Content-Security-Policy forbids scripts and external content.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, tostring

from bench.measure.plots import tag

# Equal words shown on each side of an error
AROUND = 3
WORST_AFTER = ("Errors by duration", "Round trip")
CSS = """
:root{color-scheme:light dark;--page:#f7f7f5;--card:#fff;--ink:#1c1c1a;--soft:#5d5c58;--rule:#e2e1dc;--bar:#2a78d6;
--bad:#b3261e;--good:#1b7f3b;--s0:#2a78d6;--s1:#d95926;--s2:#1a9e77;--s3:#8a4fbf;--s4:#b58900;--s5:#d6418f;--s6:#5b6b7a;
--s7:#6b8e23}
@media(prefers-color-scheme:dark){:root{--page:#161615;--card:#1f1f1d;--ink:#ecebe6;--soft:#a5a39b;--rule:#37362f;
--bar:#4a90e2;--bad:#ff8a80;--good:#7bd88f;--s0:#5aa2f0;--s1:#f08a5d;--s2:#3fc79a;--s3:#b98ae8;--s4:#e0b43c;
--s5:#f07fb8;--s6:#9fb0c0;--s7:#a5c45a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:20px 16px 60px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:.2em 0}
h2{font-size:1.1rem;margin:2.2em 0 .5em}
p{margin:.4em 0}
.soft{color:var(--soft)}
.note{background:var(--card);border:1px solid var(--rule);border-left:4px solid var(--s1);border-radius:4px;
padding:8px 12px;margin:10px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:18px 0;padding:0}
.tiles div,figure,article{background:var(--card);border:1px solid var(--rule);border-radius:8px}
.tiles div{padding:10px 12px}
.tiles dt{color:var(--soft);font-size:.85rem}
.tiles dd{margin:0;font-weight:600;font-size:1.2rem;line-height:1.3}
.tiles dd small{display:block;font-weight:400;font-size:.8rem;color:var(--soft)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:14px}
figure{margin:0;padding:12px 12px 10px;display:flex;flex-direction:column;gap:6px}
figure h3{font-size:1rem;margin:0}
figure p{font-size:.85rem;color:var(--soft);margin:0}
figure>div{margin-top:auto}
figcaption{font-size:.75rem;line-height:1.35;color:var(--soft)}
svg{display:block;width:100%;height:auto}
svg text{font-size:11.5px;fill:var(--ink)}
svg .faint{fill:var(--soft)}
svg .middle{text-anchor:middle}
svg .end{text-anchor:end}
.grid{stroke:var(--rule);fill:none}
.axis{stroke:var(--soft);fill:none}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}
.thin{stroke-width:1.2;opacity:.7}
.dashed{stroke-dasharray:5 3}
.dots{fill:none;stroke:var(--c);stroke-width:4;stroke-linecap:round;opacity:.6}
.dot{fill:var(--c);stroke:var(--card);stroke-width:1}
.bar{fill:var(--bar)}
.s0{--c:var(--s0)}.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}.s4{--c:var(--s4)}.s5{--c:var(--s5)}
.s6{--c:var(--s6)}.s7{--c:var(--s7)}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.85rem;margin:0 0 4px}
.legend i{display:inline-block;width:14px;height:4px;border-radius:2px;background:var(--c);margin-right:5px;
vertical-align:middle}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 12px;border-bottom:1px solid var(--rule);vertical-align:top}
th{font-weight:600;color:var(--soft);white-space:nowrap}
td{min-width:4em;max-width:34em}
td.short{white-space:nowrap}
tr:last-child td{border-bottom:0}
article{padding:10px 12px;margin:8px 0}
article p{font-size:.95rem}
del{color:var(--bad);text-decoration:line-through}
ins{color:var(--good);text-decoration:underline;text-underline-offset:3px}
summary{cursor:pointer;padding:4px 0}
li{margin:.25em 0}
pre{white-space:pre-wrap;font:inherit}
"""


class Section(NamedTuple):
    """A heading, a line of text and a table, for report.md and report.html. In HTML, a `folded` table starts closed."""

    title: str
    note: str
    header: Sequence[str]
    body: Sequence[Sequence[Any]]
    folded: bool = False


def one_line(value: Any) -> str:
    """One printable line. A transcript may contain line breaks and terminal escapes."""
    text = " ".join(("null" if value is None else str(value)).split())
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def shortened(alignment: Sequence[Sequence[str | None]]) -> list[tuple[str, str, str]]:
    """(operation, word of the reference, word of the transcript). A "cut" replaces a long run of equal words."""
    near = [index for index, step in enumerate(alignment) if step[0] != "equal"]
    kept = {index + offset for index in near for offset in range(-AROUND, AROUND + 1)}
    steps: list[tuple[str, str, str]] = []
    for index, (kind, here, there) in enumerate(alignment):
        if index in kept:
            steps.append((str(kind), here or "", there or ""))
        elif not steps or steps[-1][0] != "cut":
            steps.append(("cut", "", ""))
    return steps


def render(
    title: str,
    setup: str,
    headline: Sequence[tuple[str, str]],
    figures: Sequence[tuple[str, str, Element]],
    sections: Sequence[Section],
    definitions: Sequence[tuple[str, str]],
    worst: Sequence[dict[str, Any]] | None,
    notes: Sequence[str] = (),
) -> str:
    """The whole page. `setup` is the caption of every figure: model, server, machine and dataset.

    `figures` are (title, note, picture). `worst` are the clips with the most errors, of `quality` in summary.json,
    which follow the section of WORST_AFTER; null for none. `notes` are what a reader has to know before the figures.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        Element("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        tag("title", title),
        tag("style", CSS),
    )
    drawn = [
        tag("figure", tag("h3", name), tag("p", note), picture, tag("figcaption", setup))
        for name, note, picture in figures
    ]
    body = tag(
        "body",
        tag("h1", title),
        tag("p", setup, class_="soft"),
        *(tag("p", one_line(note), class_="note") for note in notes),
        tag("dl", *(_tile(name, value) for name, value in headline), class_="tiles"),
        tag("div", *drawn, class_="figures"),
    )
    for section in sections:
        body.extend(_section(section))
        if worst is not None and section.title.startswith(WORST_AFTER):
            body.extend(_worst(worst))
    body.append(tag("h2", "Definitions"))
    body.append(tag("ul", *(tag("li", tag("b", term), f": {text}") for term, text in definitions)))
    return "<!doctype html>\n" + tostring(tag("html", head, body, lang="en"), encoding="unicode", method="html") + "\n"


def _tile(name: str, value: str) -> Element:
    """A value in large type, and its qualification in small type."""
    large, bracket, small = one_line(value).partition(" (")
    if not bracket:
        large, bracket, small = one_line(value).partition(", ")
    small = small.removesuffix(")") if bracket == " (" else small
    return tag("div", tag("dt", name), tag("dd", large, *([tag("small", small)] if small else [])))


def _section(section: Section) -> list[Element]:
    note = [tag("p", one_line(section.note), class_="soft")] if section.note else []
    content = _table(section.header, section.body) if section.body else tag("p", "None.")
    if section.folded:
        return [tag("h2", section.title), *note, tag("details", tag("summary", "Show"), content)]
    return [tag("h2", section.title), *note, content]


def _table(header: Sequence[str], body: Sequence[Sequence[Any]]) -> Element:
    """A table in a box that scrolls, so that the page never scrolls sideways. The box is focusable for the keyboard."""
    rows = [
        tag("tr", *(tag("td", text, class_="short" if len(text) < 28 else "") for text in map(one_line, cells)))
        for cells in body
    ]
    head = tag("thead", tag("tr", *(tag("th", one_line(cell)) for cell in header)))
    return tag("div", tag("table", head, tag("tbody", *rows)), class_="scroll", tabindex="0")


def _worst(worst: Sequence[dict[str, Any]]) -> list[Element]:
    """The alignment of each clip. Struck through: only in the reference. Underlined: only in the transcript."""
    note = "Completed clips with the most word errors, after normalisation. "
    found = [
        tag("h2", f"The {len(worst)} worst clips" if worst else "The worst clips"),
        tag("p", note, tag("del", "Reference only"), ", ", tag("ins", "transcript only"), ".", class_="soft"),
    ]
    for clip in worst:
        words: list[Element | str] = []
        for kind, here, there in shortened(clip["alignment"]):
            if kind in ("substitute", "delete"):
                words += [tag("del", one_line(here)), " "]
            if kind in ("substitute", "insert"):
                words += [tag("ins", one_line(there)), " "]
            if kind in ("equal", "cut"):
                words.append("[…] " if kind == "cut" else one_line(here) + " ")
        share = "" if clip["wer"] is None else f", {clip['wer']:.1%}"
        original = tag(
            "details",
            tag("summary", "As written", class_="soft"),
            tag("p", tag("b", "Reference: "), one_line(clip["reference"])),
            tag("p", tag("b", "Transcript: "), one_line(clip["transcript"])),
        )
        said = f" {clip['errors']} errors in {clip['words']} words{share}"
        found.append(tag("article", tag("b", one_line(clip["id"])), said, tag("p", *words), original))
    return found if worst else [*found[:1], tag("p", "None.")]
