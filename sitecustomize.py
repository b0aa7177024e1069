"""Three patches that stock vLLM needs to start with a Voxtral checkpoint in Hugging Face's layout.

This file works alone. Copy it over the interpreter's sitecustomize.py, or put it first on PYTHONPATH: Python then
imports it before any other code. The package voxtral-serve installs the same file through a .pth file. The file needs
the standard library only and imports nothing that it patches. A patch is settled when its target module is first
imported: after the module has run, and before another module can bind its names.

Each patch is a record. The record says what breaks without the patch and on which versions. Its probe runs the code in
question to find out whether this installation needs the patch. The outcome is `applied`, `not needed` or `drifted`.
`drifted` means that the code is not what the patch was written for, or that the probe contradicts what was measured on
this version. Python would print an exception raised here and continue. Therefore vLLM's plugin loader, which runs in
each vLLM process, verifies all outcomes first. A drifted patch ends the process there, before a port opens.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would add milliseconds to every start of Python
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, ClassVar

# The versions that every patch was tested with, the recommended ones last. On other versions the probes decide, and a
# line on stderr says so.
TESTED = {
    "vllm": ("0.20.0", "0.32.0"),
    "transformers": ("5.6.2", "5.19.0"),
    "mistral-common": ("1.11.1", "1.13.1"),
}


class PatchError(RuntimeError):
    """A patch does not fit this installation. The message has the patch, the library, its version, and what to do."""


def installed(library: str) -> str | None:
    """The version of an installed distribution without its local part, "0.32.0" of "0.32.0+cpu"; None if absent."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        # version() returns None if the metadata are missing, for example after an interrupted uninstall
        return (version(library) or "").partition("+")[0] or None
    except PackageNotFoundError:
        return None


class Patch:
    """One record, and its code.

    name      its name in messages and in the documentation
    does      what the patch changes
    target    the patch is settled after the import of this module
    breaks    the error, or the effect, without the patch
    library   the distribution whose version decides whether the patch is needed
    needed    version -> whether the patch was needed when measured on this version
    upstream  the issue, pull request or code that explains the cause or fixes it
    until     when the patch can be removed
    expires   the test that fails when the patch can be removed
    used_by   the configurations that need the patch: they do not start if it has drifted
    """

    name: ClassVar[str]
    does: ClassVar[str]
    target: ClassVar[str]
    breaks: ClassVar[str]
    library: ClassVar[str]
    needed: ClassVar[Mapping[str, bool]]
    upstream: ClassVar[str]
    until: ClassVar[str]
    expires: ClassVar[str] = "tests/patches/test_records.py::test_a_patch_expires_with_the_newest_version"
    used_by: ClassVar[str] = "every start, because it runs before the configuration is known"

    def probe(self, module: Any) -> bool:
        """Whether the code is broken now. Any exception means that the code is not as expected."""
        raise NotImplementedError

    def apply(self, module: Any) -> None:
        raise NotImplementedError

    def settle(self, module: ModuleType) -> tuple[str, str]:
        """Probe `module` and patch it if needed. Returns (outcome, explanation)."""
        try:
            version = installed(self.library)
            expected = self.needed.get(version or "")
            broken = self.probe(module)
            if expected is not None and broken != expected:
                return (
                    "drifted",
                    f"the probe says {_need(broken)}, but the patch was measured as {_need(expected)} on this version",
                )
            if not broken:
                return "not needed", f"{self.library} {version} works without it"
            self.apply(module)
            if self.probe(module):
                return "drifted", "the probe still fails after the patch was applied"
        except Exception as error:
            # Python still marks `module` as being imported and suggests a circular import for a missing name.
            found = str(error).replace("partially initialized module", "module").partition(" (most likely")[0]
            return "drifted", f"{type(error).__name__}: {found}"
        return "applied", f"{self.library} {version} needs it"

    def drifted(self, found: str) -> str:
        """The message for an operator."""
        return f"patch {self.name} (of {self.target}) has drifted on {self.library} {installed(self.library)}: {found}"


def _need(needed: bool) -> str:
    return "needed" if needed else "not needed"


class SlowTokenizer(Patch):
    name = "is_fast"
    does = "adds `is_fast = False` to the tokenizer classes of transformers that lack it"
    target = "vllm.tokenizers.hf"
    breaks = "AttributeError: CachedMistralCommonBackend has no attribute is_fast"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": False}
    upstream = "vLLM 0.32.0 defines `is_fast` on its cached tokenizer"
    until = "vLLM 0.20.0 is no longer supported"

    def probe(self, module: Any) -> bool:
        from transformers.tokenization_mistral_common import MistralCommonBackend

        class Bare(MistralCommonBackend):
            """A tokenizer of one token with the attributes that vLLM reads. The real one would need a file."""

            all_special_ids: ClassVar[list[int]] = []
            all_special_tokens: ClassVar[list[str]] = []
            vocab_size = 1

            def __init__(self) -> None:
                pass

            def get_vocab(self) -> dict[str, int]:
                return {"a": 0}

            def __len__(self) -> int:
                return 1

        return not hasattr(module.get_cached_tokenizer(Bare()), "is_fast")

    def apply(self, module: Any) -> None:
        from transformers.tokenization_mistral_common import MistralCommonBackend
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        tokenizer: Any
        for tokenizer in (PreTrainedTokenizerBase, MistralCommonBackend):
            if not hasattr(tokenizer, "is_fast"):
                tokenizer.is_fast = False


class TokenizerKwargs(Patch):
    name = "from_pretrained"
    does = "makes `MistralCommonBackend.from_pretrained` ignore `subfolder`, `tokenizer` and `_from_auto`"
    target = "transformers.tokenization_mistral_common"
    breaks = (
        "ValueError: Some kwargs in ['subfolder', 'tokenizer', '_from_auto'] are not supported by "
        "`MistralCommonBackend.from_pretrained`."
    )
    library = "transformers"
    needed: ClassVar[Mapping[str, bool]] = {"5.6.2": True, "5.19.0": True}
    upstream = "https://github.com/vllm-project/vllm/pull/49958 (open) stops passing `tokenizer`"
    until = "these arguments are no longer passed to MistralCommonBackend"

    ignored = ("subfolder", "tokenizer", "_from_auto")

    def probe(self, module: Any) -> bool:
        # A directory without a tokenizer. The arguments are rejected before files are read.
        empty = os.path.dirname(module.__file__)
        try:
            module.MistralCommonBackend.from_pretrained(empty, subfolder="", tokenizer=None, _from_auto=True)
        except (TypeError, ValueError, OSError) as error:
            return any(f"'{name}'" in str(error) for name in self.ignored)
        raise LookupError(f"a tokenizer was loaded from {empty}, which contains none")

    def apply(self, module: Any) -> None:
        from functools import wraps

        stock = module.MistralCommonBackend.from_pretrained.__func__
        ignored = self.ignored

        @wraps(stock)
        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            return stock(cls, *args, **{name: kwargs[name] for name in kwargs if name not in ignored})

        module.MistralCommonBackend.from_pretrained = classmethod(from_pretrained)


class TokenBudget(Patch):
    name = "_get_num_multimodal_tokens"
    does = (
        "gives `VoxtralRealtimeProcessor` the method that vLLM calls for the number of audio tokens; it returns the "
        "context minus the left padding"
    )
    target = "vllm.model_executor.models.transformers.multimodal"
    breaks = "AttributeError: 'VoxtralRealtimeProcessor' object has no attribute '_get_num_multimodal_tokens'"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": False}
    upstream = (
        "https://github.com/huggingface/transformers/issues/41749 (for another model); vLLM 0.32.0 calls the method "
        "for images only"
    )
    until = "vLLM 0.20.0 is no longer supported"

    def probe(self, module: Any) -> bool:
        from transformers.models.voxtral_realtime.processing_voxtral_realtime import VoxtralRealtimeProcessor

        asked = module.MultiModalProcessingInfo
        # A Transformers backend of vLLM that supports audio computes the number of audio tokens itself.
        knows_audio = hasattr(asked, "get_max_audio_tokens")
        if not knows_audio and not hasattr(asked, "get_max_image_tokens"):
            raise AttributeError(f"{asked.__name__} has neither get_max_audio_tokens nor get_max_image_tokens")
        return not knows_audio and not hasattr(VoxtralRealtimeProcessor, "_get_num_multimodal_tokens")

    def apply(self, module: Any) -> None:
        from transformers.models.voxtral_realtime.processing_voxtral_realtime import VoxtralRealtimeProcessor

        info = module.MultiModalProcessingInfo
        stock = info.get_hf_processor

        def get_hf_processor(self: Any, **kwargs: Any) -> Any:
            processor = stock(self, **kwargs)
            processor.max_model_len = self.ctx.model_config.max_model_len
            return processor

        def _get_num_multimodal_tokens(self: Any, image_sizes: Sequence = (), **_: Any) -> dict[str, list[int]]:
            """Tokens to reserve for each item of any size: for a context of 512, 480, because 32 are left padding."""
            budget = self.max_model_len - self.mistral_common_audio_config.n_left_pad_tokens
            return {"num_image_tokens": [budget] * len(image_sizes), "num_image_patches": [1] * len(image_sizes)}

        info.get_hf_processor = get_hf_processor
        processor_class: Any = VoxtralRealtimeProcessor
        processor_class._get_num_multimodal_tokens = _get_num_multimodal_tokens


class PluginGate(Patch):
    name = "load_general_plugins"
    does = "makes every vLLM process verify the patches before it loads plugins, for any value of `VLLM_PLUGINS`"
    target = "vllm.plugins"
    breaks = "vLLM starts although a patch has drifted: Python prints an exception in sitecustomize.py and continues"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": True}
    upstream = "https://docs.python.org/3/library/site.html#module-sitecustomize (only SystemExit ends the start)"
    until = "no patch of this file is left"
    expires = "tests/patches/test_startup.py::test_python_goes_on_after_an_exception_in_sitecustomize"

    def probe(self, module: Any) -> bool:
        return not hasattr(module.load_general_plugins, "verifies_patches")

    def apply(self, module: Any) -> None:
        load = module.load_general_plugins

        def load_general_plugins() -> None:
            finder = active()
            if finder is None:
                raise PatchError(
                    "the finder of the patches was removed from sys.meta_path, so the patches cannot be verified"
                )
            finder.verify()
            load()

        load_general_plugins.verifies_patches = True  # type: ignore[attr-defined]
        module.load_general_plugins = load_general_plugins


PATCHES = (SlowTokenizer(), TokenizerKwargs(), TokenBudget())
GATE = PluginGate()


class PostImport:
    """A finder for sys.meta_path that settles each patch after its target module was imported.

    `outcomes` maps a patch's name to (outcome, explanation); a patch is absent until its target is imported. `patches`
    are verified in every process where vLLM loads its plugins. `optional` patches are verified by `require`, for the
    configurations that use them.
    """

    def __init__(self, patches: Iterable[Patch], file: str) -> None:
        self.patches = tuple(patches)
        self.optional: tuple[Patch, ...] = ()
        self.file = file
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.verified = False
        self.targets = {patch.target for patch in self.patches} | {GATE.target}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.targets:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def imported(self, module: ModuleType) -> None:
        """Settle the patches of `module`, which has just run."""
        for patch in (*self.patches, *self.optional):
            if patch.target == module.__name__ and patch.name not in self.outcomes:
                self.outcomes[patch.name] = patch.settle(module)
        if module.__name__ == GATE.target:
            outcome, found = GATE.settle(module)
            if outcome == "drifted":  # raised here, because nothing would verify the patches
                raise PatchError(
                    f"{GATE.target} of vllm {installed('vllm')} has no load_general_plugins, so the patches cannot be "
                    f"verified ({found}). {ADVICE}"
                )

    def add(self, patches: Iterable[Patch]) -> None:
        """Settle optional patches after the import of their targets, or now if already imported. Safe to call twice."""
        known = {patch.name for patch in self.optional}
        new = tuple(patch for patch in patches if patch.name not in known)
        self.optional += new
        self.targets |= {patch.target for patch in new}
        for patch in new:
            if patch.target in sys.modules:
                self.imported(sys.modules[patch.target])

    def settled(self, patches: Iterable[Patch] | None = None) -> dict[str, tuple[str, str]]:
        """Import the targets of these patches (default: `patches`), which settles them. Returns their outcomes."""
        from importlib import import_module

        chosen = self.patches if patches is None else tuple(patches)
        for patch in chosen:
            if patch.name not in self.outcomes:
                try:
                    self.imported(import_module(patch.target))
                except Exception as error:
                    found = f"importing {patch.target} raised {type(error).__name__}: {error}"
                    self.outcomes[patch.name] = ("drifted", found)
        return {patch.name: self.outcomes[patch.name] for patch in chosen}

    def verify(self) -> None:
        """Raise PatchError unless every patch of `patches` is applied or not needed."""
        if not self.verified:
            for line in untested():
                print(f"voxtral-serve: {line}", file=sys.stderr)
        self.verified = True
        self.require(self.patches)

    def require(self, patches: Iterable[Patch]) -> None:
        """Raise PatchError unless each of these patches is applied or not needed."""
        chosen = tuple(patches)
        outcomes = self.settled(chosen)
        drifted = [patch.drifted(outcomes[patch.name][1]) for patch in chosen if outcomes[patch.name][0] == "drifted"]
        if drifted:
            raise PatchError(". ".join((*drifted, ADVICE)))


ADVICE = "Nothing is served. Install a tested version ({}), or a newer voxtral-serve.".format(
    "; ".join(f"{library} {' or '.join(versions)}" for library, versions in TESTED.items())
)


def untested() -> list[str]:
    """One line for each installed library whose version the patches were not tested with."""
    return [
        f"{library} {installed(library)} is not one of the tested versions ({', '.join(versions)}): "
        "the probes decide which patches are needed"
        for library, versions in TESTED.items()
        if installed(library) not in versions
    ]


class _Loader:
    """Runs the module's own loader, then settles the patches of the module."""

    def __init__(self, loader: Any, finder: PostImport) -> None:
        self.loader = loader
        self.finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.finder.imported(module)


def active() -> PostImport | None:
    """The finder that is active in this process, from any copy of this file; or None."""
    # Compared by name: a copied file and the package's module have different classes.
    found: Any = next((finder for finder in sys.meta_path if type(finder).__name__ == "PostImport"), None)
    return found


def require(*names: str) -> None:
    """Raise PatchError unless the patches of these names are applied or not needed. Called by their users."""
    finder = active()
    known = {} if finder is None else {patch.name: patch for patch in (*finder.patches, *finder.optional)}
    if finder is None or not known.keys() >= set(names):
        raise PatchError(
            f"patch {', '.join(sorted(set(names) - known.keys()))} is not registered in this process, because vLLM has "
            "not loaded the plugin of voxtral-serve. Unset VLLM_PLUGINS, or reinstall voxtral-serve"
        )
    finder.require(known[name] for name in names)


def install() -> None:
    """Activate the patches. Safe to call twice."""
    if active() is None:
        sys.meta_path.insert(0, PostImport(PATCHES, __file__))


def run_shadowed() -> None:
    """Run the sitecustomize that this file hides: the next one on sys.path, such as the distribution's."""
    # The same functions as in importlib, whose import would add milliseconds to every start of Python.
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder

    # Resolve the folder, not the file: Debian's sitecustomize.py is a link to a place outside sys.path.
    here = os.path.realpath(os.path.dirname(__file__))
    places = [os.path.realpath(entry) for entry in sys.path]
    after = sys.path[places.index(here) + 1 :] if here in places else sys.path
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in after if os.path.realpath(entry) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


install()
if __name__ == "sitecustomize":
    run_shadowed()
