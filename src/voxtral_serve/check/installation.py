"""The installation: library versions, active patches, and the plugin that vLLM loads."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version

from voxtral_serve import __version__, logs, plugin, shims
from voxtral_serve.check.report import Report

LIBRARIES = ("vllm", "transformers", "mistral-common", "torch")
PLUGIN = "voxtral_serve.plugin:register"
PLUGIN_GROUP = "vllm.general_plugins"
# What the recommended vLLM can do and an older one that is supported cannot. docs/pages/install.md has the same list.
LACKS = {
    "0.20.0": (
        "profiles/voxtral-tts.yaml, voxcpm2.yaml: the guard does not serve vllm-omni 0.20.0",
        "Model Runner V2: the host needs longer to prepare a step",
        "full CUDA graphs of vLLM's own Voxtral Realtime model, and that model on a CPU",
        "drafts of a drafter: profiles that ask for it are served without drafts",
        "custom words: their fields have no effect",
        "150 live sessions with a P99 of the lag within 160 ms",
        "right texts on Hopper GPUs with the default attention: set attention_backend: TRITON_ATTN",
        "data_parallel_size above 1",
    ),
}


def check_versions(report: Report) -> None:
    report.section("versions")
    report.row("voxtral-serve", __version__)
    report.row("python", platform.python_version())
    for library in LIBRARIES:
        try:
            installed = version(library)
        except PackageNotFoundError:
            report.problem(
                f"{library} is not installed in the environment of {sys.executable}: install voxtral-serve[gpu]"
            )
            continue
        tested = shims.TESTED.get(library, (shims.installed(library),))
        untested = "" if shims.installed(library) in tested else f"  not tested; tested: {', '.join(map(str, tested))}"
        report.row(library, installed + untested)
    _compare_vllm(report)


def _compare_vllm(report: Report) -> None:
    """What the installed vLLM cannot do, if it is not the recommended one, which is the last of those tested."""
    installed, recommended = shims.installed("vllm"), shims.TESTED["vllm"][-1]
    if installed is None or installed == recommended:
        return
    report.row("recommended", f"vllm {recommended}: pip install 'voxtral-serve[gpu]'")
    for lack in LACKS.get(installed, ()):
        report.row(f"not in {installed}", lack)


def check_patches(report: Report) -> None:
    """Settle every patch and run the plugin's own verification. This imports the patched modules (some seconds)."""
    report.section("patches")
    in_force = shims.active()
    if in_force is not None:
        for name, (outcome, explanation) in in_force.settled().items():
            report.row(outcome, f"{name}: {explanation}")
    try:
        plugin.register()
    except Exception as error:  # any exception here would end every vLLM process
        kind = "" if isinstance(error, shims.PatchError | logs.LogError) else f"{type(error).__name__}: "
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
