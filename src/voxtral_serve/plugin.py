"""The plugin that vLLM runs in each of its processes (entry point `vllm.general_plugins`).

It verifies the patches and registers the models. If the import of this module fails, vLLM logs the error and continues
without the plugin; an error inside `register` ends the process. Therefore this module imports nothing that could fail.
"""


def register() -> None:
    """Verify the patches, and register the models and the attention backend. Safe to call twice.

    Raises PatchError if the patches are not active, and LogError for the environment variables of the log.
    """
    import sys
    from pathlib import Path
    from typing import Any

    # Looked up before the import of `shims`, which activates the patches: too late for names already bound.
    in_force: Any = next((finder for finder in sys.meta_path if type(finder).__name__ == "PostImport"), None)
    from voxtral_serve import logs, shims

    if in_force is None:
        raise shims.PatchError(
            "the patches of voxtral-serve are not active in this process, because voxtral_serve.pth was not read. "
            "Reinstall voxtral-serve into this environment's site-packages, or put its sitecustomize.py on PYTHONPATH"
        )
    if Path(in_force.file).read_bytes() != Path(shims.__file__).read_bytes():
        raise shims.PatchError(
            f"the active patches are those of {in_force.file}, which differs from the sitecustomize.py of the "
            "installed voxtral-serve: copy it again, or remove it"
        )
    in_force.verify()
    logs.check_settings()

    from vllm.logger import init_logger
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

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
                f"vllm {shims.installed('vllm')} has its own model for {architecture}, which expects another config "
                f"than voxtral-serve writes. {shims.ADVICE}"
            )
    if not AttentionBackendEnum.CUSTOM.is_overridden():  # config.py refuses the backend of another plugin
        register_backend(AttentionBackendEnum.CUSTOM, names.ATTENTION)
    _ignore_hangup()
    outcomes = ", ".join(f"{name} {outcome}" for name, (outcome, _) in in_force.outcomes.items())
    init_logger("vllm.voxtral_serve").info("voxtral-serve patches: %s", outcomes)


def _ignore_hangup() -> None:
    """With VOXTRAL_SERVE_KEYS, SIGHUP ends no process of the server: some send it where a file has changed.

    The API processes read the file again by themselves (guard.keyring). Processes that are started later inherit this.
    """
    import os
    import signal
    import threading

    if "VOXTRAL_SERVE_KEYS" in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
