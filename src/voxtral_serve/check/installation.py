"""The installation: library versions, active patches, and the plugin that vLLM loads."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version

from voxtral_serve import plugin, shims
from voxtral_serve.check.report import Report

LIBRARIES = ("vllm", "transformers", "mistral-common", "torch")
PLUGIN = "voxtral_serve.plugin:register"
PLUGIN_GROUP = "vllm.general_plugins"


def check_versions(report: Report) -> None:
    report.section("versions")
    report.row("python", platform.python_version())
    for library in LIBRARIES:
        try:
            found = version(library)
        except PackageNotFoundError:
            report.problem(
                f"{library} is not installed in the environment of {sys.executable}: install voxtral-serve[gpu]"
            )
            continue
        tested = shims.TESTED.get(library, (shims.installed(library),))
        untested = "" if shims.installed(library) in tested else f"  not tested; tested: {', '.join(map(str, tested))}"
        report.row(library, found + untested)


def check_patches(report: Report) -> None:
    """Settle every patch and run the plugin's own verification. This imports the patched modules (some seconds)."""
    report.section("patches")
    in_force = shims.active()
    if in_force is not None:
        for name, (outcome, found) in in_force.settled().items():
            report.row(outcome, f"{name}: {found}")
    try:
        plugin.register()
    except Exception as error:  # any exception here would end every vLLM process
        kind = "" if isinstance(error, shims.PatchError) else f"{type(error).__name__}: "
        report.problem(f"{kind}{error}")


def check_plugin(report: Report) -> str | None:
    """Why vLLM does not load the plugin, or None if it does. It is a problem only for a model that needs the plugin."""
    report.section("plugin")
    names = [entry.name for entry in entry_points(group=PLUGIN_GROUP) if entry.value == PLUGIN]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not names:
        absent = f"{PLUGIN} is not an entry point of {PLUGIN_GROUP}: reinstall voxtral-serve for {sys.executable}"
    elif allowed is not None and not set(names) & set(allowed.split(",")):
        absent = f"VLLM_PLUGINS={allowed!r} does not include {names[0]}: unset VLLM_PLUGINS, or add {names[0]} to it"
    else:
        report.row(names[0], f"vLLM loads {PLUGIN}")
        return None
    report.row("not loaded", f"{absent}. Mistral's layout does not need the plugin")
    return absent
