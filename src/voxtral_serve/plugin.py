"""What vLLM runs in each of its processes (entry point `vllm.general_plugins`): patches verified, models registered.

vLLM logs an error in importing this module and goes on without it, but lets one inside `register` through. So nothing
is imported here that could fail.
"""


def register() -> None:
    """Verify the patches and register the models. Raises PatchError if the patches are not in force; may run twice."""
    import sys
    from pathlib import Path
    from typing import Any

    # Before `shims` is imported: that alone puts the patches in force, too late for whoever bound names already.
    in_force: Any = next((finder for finder in sys.meta_path if type(finder).__name__ == "PostImport"), None)
    from voxtral_serve import shims

    if in_force is None:
        raise shims.PatchError(
            "the patches of voxtral-serve are not in force in this process: its voxtral_serve.pth was not read. "
            "Reinstall voxtral-serve into this environment's site-packages, or put its sitecustomize.py on PYTHONPATH"
        )
    if Path(in_force.file).read_bytes() != Path(shims.__file__).read_bytes():
        raise shims.PatchError(
            f"{in_force.file} is in force, and it is not the sitecustomize.py of the installed voxtral-serve: "
            "copy it again, or remove it"
        )
    in_force.verify()

    from vllm.logger import init_logger
    from vllm.model_executor.models.registry import ModelRegistry

    from voxtral_serve import patches
    from voxtral_serve.engine import names

    in_force.add(patches.RECORDS)
    in_force.require(patches.ALWAYS)
    for architecture, module in ((names.HUGGING_FACE, "weights"), (names.ENCODE_ONCE, "encode_once")):
        known = ModelRegistry.models.get(architecture)
        if known is None:
            ModelRegistry.register_model(architecture, f"voxtral_serve.engine.{module}:{architecture}")
        elif getattr(known, "module_name", None) != f"voxtral_serve.engine.{module}":
            raise shims.PatchError(
                f"vllm {shims.installed('vllm')} has a model of its own for {architecture}, which takes another config "
                f"than voxtral-serve would give it. {shims.ADVICE}"
            )
    outcomes = ", ".join(f"{name} {outcome}" for name, (outcome, _) in in_force.outcomes.items())
    init_logger("vllm.voxtral_serve").info("voxtral-serve patches: %s", outcomes)
