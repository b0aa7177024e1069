"""report.html: the report in one file, without a network and JavaScript. Jinja escapes all text, and the page's
Content-Security-Policy forbids scripts and what comes from elsewhere."""

import json
from typing import Any
from xml.etree.ElementTree import Element, tostring

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from voxtral_serve.measure import plots

TEMPLATE = "report.html.jinja"
GIB = 1 << 30


def page(report: dict[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("voxtral_serve.prove", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"time": time, "share": share, "pretty": pretty}
    parts = {part["name"]: part for part in report["parts"]}
    figures = {name: part["figures"] for name, part in parts.items()}
    return environment.get_template(TEMPLATE).render(
        report=report,
        parts=parts,
        figures=figures,
        charts=drawn(figures, report["bounds"]),
        tiles=tiles(report, figures),
    )


def time(seconds: float | None) -> str:
    return "–" if seconds is None else plots.seconds(seconds)


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def drawn(figures: dict[str, Any], bounds: dict[str, float]) -> dict[str, Markup]:
    """The charts of parts that have figures, by the parts' names."""
    found = {}
    if phases := figures["start"].get("phases"):
        found["start"] = _markup(plots.stacked([(each["name"], each["seconds"]) for each in phases]))
    if rows := delay_rows(figures["delays"]):
        found["delays"] = _markup(plots.ranges(rows))
    for name in ("texts", "speculative", "stock"):
        if paths := figures[name].get("paths"):
            counts = [(each["path"], each["texts"] - each["different"], each["texts"]) for each in paths]
            found[name] = _markup(plots.counts(counts))
    if levels := figures["live"].get("levels"):
        lags = [each["lag_s"] or {} for each in levels]
        lag, final = (
            f"lag P99 (bound {time(bounds['lag_p99_s'])})",
            f"to final P90 (bound {time(bounds['final_p90_s'])})",
        )
        lines = {
            "lag P50": [each.get("p50") for each in lags],
            lag: [each.get("p99") for each in lags],
            final: [each["final_s"]["p90"] for each in levels],
        }
        lines = {name: line for name, line in lines.items() if any(line)}
        limits = {lag: bounds["lag_p99_s"], final: bounds["final_p90_s"]}
        ticks = [str(each["sessions"]) for each in levels]
        found["live"] = _markup(plots.by_level(ticks, lines, {}, "sessions", "s", limits))
    return found


def _markup(picture: Element) -> Markup:
    return Markup(tostring(picture, encoding="unicode", method="html"))  # an element tree escapes its texts


def delay_rows(delays: dict[str, Any]) -> list[tuple[str, float, float, float]]:
    live = delays.get("live") or {}
    rows = {
        "upload": delays.get("upload_s"),
        "first text of a stream": delays.get("first_text_s"),
        "upload, batched": (delays.get("batched") or {}).get("seconds"),
        "live lag": live.get("lag_s"),
        "live time to final": live.get("final_s"),
    }
    return [(label, spread["p50"], spread["p90"], spread["p99"]) for label, spread in rows.items() if spread]


def tiles(report: dict[str, Any], figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, value, note) of what a reader looks for first; a value that was not measured is a dash."""
    machine, delays = report["machine"], figures["delays"]
    gpus = ", ".join(each["name"] for each in machine["gpus"])
    bundled, live = figures["clips"].get("bundled") or {}, figures["live"]
    peak, batched = figures["memory"].get("peak_bytes"), delays.get("batched") or {}
    spread = delays.get("upload_s") or {}
    final = (delays.get("live") or {}).get("final_s") or {}
    here = machine["is_the_servers"]
    return [
        ("GPU", (gpus or "none") if here else "not known", f"driver {machine['driver']}" if gpus else "of the server"),
        (
            "Profile",
            (report["server"] or {}).get("profile") or "–",
            f"vLLM {(report['server'] or {}).get('version') or '–'}",
        ),
        ("WER, bundled clips", share(bundled.get("wer")), "synthetic voices, English"),
        ("Upload, P50", time(spread.get("p50")), "one at a time"),
        ("Batched", f"{batched['rtfx']:.0f} ×" if batched else "–", "real time"),
        (
            "Live sessions",
            str(live["holds"]) if live else "–",
            f"within the bounds, of {live['most']} at most" if live else "",
        ),
        ("Live, to final text", time(final.get("p50")), "P50 after the end of speech, one session"),
        ("GPU memory", f"{peak / GIB:.1f} GiB" if peak else "–", "" if peak else "not measured"),
    ]
