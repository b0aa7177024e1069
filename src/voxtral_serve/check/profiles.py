"""The profiles of this package, and which of them fit on the device."""

from pathlib import Path

from voxtral_serve.check.device import Device
from voxtral_serve.check.memory import check_memory
from voxtral_serve.check.options import read_options
from voxtral_serve.check.plan import Plan
from voxtral_serve.check.report import ConfigError, Report
from voxtral_serve.checkpoint import Checkpoint

# In a wheel the profiles are inside the package, in a checkout beside src.
PLACES = (Path(__file__).parents[1] / "profiles", Path(__file__).parents[3] / "profiles")
PROFILES = next(filter(Path.is_dir, PLACES), None)
OF_OTHER_MODELS = ("voxcpm2", "voxtral-3b", "voxtral-tts", "whisper")  # than Voxtral Realtime


def fitting(held: Checkpoint, device: Device | None) -> str:
    """The profiles that fit on the device with this checkpoint, as a sentence to append to a problem."""
    names = []
    for path in sorted(PROFILES.glob("*.yaml")) if PROFILES else []:
        if path.stem in OF_OTHER_MODELS:
            continue
        trial = Report()
        options = read_options(trial, path, device=device)
        if options is None or not options.valid:
            continue
        try:
            check_memory(trial, options, held, Plan.of(options.values, held), lambda: "")
        except ConfigError:
            continue
        if not trial.problems and any(line.startswith("  room for ") for line in trial.lines):
            names.append(f"profiles/{path.name}")
    return f". Profiles that fit: {', '.join(names) or 'none'}"
