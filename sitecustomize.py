"""Three patches that stock vLLM needs to get a Voxtral checkpoint of Hugging Face layout through its start.

This one file is enough: copied over the interpreter's sitecustomize.py, or found first on PYTHONPATH, Python imports it
before any other code. Installing the package voxtral-serve does the same through a .pth file, from the same source.
It needs the standard library only and imports nothing of what it patches: a patch is settled when its target module is
first imported, right after that module ran and before anybody else can bind its names.

Each patch is a record: what breaks without it, on which versions, and a probe that runs the code in question and so
tells whether this installation needs it. It ends as `applied`, `not needed`, or `drifted`: the code is not what the
patch was written for, or the probe contradicts what was measured on that very version. An exception here would be one
line on the terminal, and Python would go on; so vLLM's plugin loader, which runs in each of its processes, is made to
verify all outcomes first, and one that drifted ends the process there, before a port opens.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing itself would cost every Python start some milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, ClassVar

# What every patch was tested with. Others may work: then the probes alone decide, and a line on stderr says so.
TESTED = {
    "vllm": ("0.20.0", "0.32.0"),
    "transformers": ("5.6.2", "5.19.0"),
    "mistral-common": ("1.11.1", "1.13.1"),
}


class PatchError(RuntimeError):
    """A patch does not fit this installation. The message names patch, library, version, what was found, what to do."""


def installed(library: str) -> str | None:
    """The version of an installed distribution without its local part, "0.32.0" of "0.32.0+cpu"; None if absent."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        # None for a distribution whose metadata are gone, after an interrupted uninstall for instance
        return (version(library) or "").partition("+")[0] or None
    except PackageNotFoundError:
        return None


class Patch:
    """One record, and the code that goes with it.

    name      how messages and the README call it
    does      what it changes
    target    the module after whose import it is settled
    breaks    the message that vLLM ends with where it is needed and missing
    library   the distribution whose version decides whether it is needed
    needed    version of it -> whether the patch is needed there, as measured
    upstream  where the cause is known, or fixed
    until     when the patch can go
    expires   the test that fails once it can
    used_by   which configurations need it: a patch that drifted stops the start of these
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
    used_by: ClassVar[str] = "every start, since it runs before a configuration is known"

    def probe(self, module: Any) -> bool:
        """Whether the breakage is there now. Raises whatever it meets where the code is not as expected."""
        raise NotImplementedError

    def apply(self, module: Any) -> None:
        raise NotImplementedError

    def settle(self, module: ModuleType) -> tuple[str, str]:
        """Probe `module` and patch it where needed. Returns (outcome, what was found)."""
        try:
            version = installed(self.library)
            expected = self.needed.get(version or "")
            broken = self.probe(module)
            if expected is not None and broken != expected:
                return (
                    "drifted",
                    f"the probe says {_need(broken)}; on this version it was measured to be {_need(expected)}",
                )
            if not broken:
                return "not needed", f"{self.library} {version} does without"
            self.apply(module)
            if self.probe(module):
                return "drifted", "the patch is in place and the probe still finds the breakage"
        except Exception as error:
            # `module` still counts as being imported, and Python takes a missing name for a circular import.
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
    does = "`is_fast = False` on transformers' tokenizer classes that lack it"
    target = "vllm.tokenizers.hf"
    breaks = "AttributeError: CachedMistralCommonBackend has no attribute is_fast"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": False}
    upstream = "vLLM 0.32.0 gives its cached tokenizer an `is_fast` of its own"
    until = "vLLM 0.20.0 is no longer supported"

    def probe(self, module: Any) -> bool:
        from transformers.tokenization_mistral_common import MistralCommonBackend

        class Bare(MistralCommonBackend):
            """A tokenizer of one token, with what vLLM reads of it; the real one would need a file."""

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
    does = "`MistralCommonBackend.from_pretrained` ignores `subfolder`, `tokenizer` and `_from_auto`"
    target = "transformers.tokenization_mistral_common"
    breaks = (
        "ValueError: Some kwargs in ['subfolder', 'tokenizer', '_from_auto'] are not supported by "
        "`MistralCommonBackend.from_pretrained`."
    )
    library = "transformers"
    needed: ClassVar[Mapping[str, bool]] = {"5.6.2": True, "5.19.0": True}
    upstream = "https://github.com/vllm-project/vllm/pull/49958 (open) stops passing `tokenizer`"
    until = "vLLM or transformers no longer hands these to MistralCommonBackend"

    ignored = ("subfolder", "tokenizer", "_from_auto")

    def probe(self, module: Any) -> bool:
        # A directory that holds no tokenizer: what refuses the arguments does so before it looks for files.
        empty = os.path.dirname(module.__file__)
        try:
            module.MistralCommonBackend.from_pretrained(empty, subfolder="", tokenizer=None, _from_auto=True)
        except (TypeError, ValueError, OSError) as error:
            return any(f"'{name}'" in str(error) for name in self.ignored)
        raise LookupError(f"a tokenizer was loaded from {empty}, which holds none")

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
    does = "`VoxtralRealtimeProcessor` answers vLLM's question for its audio tokens: the context less the left padding"
    target = "vllm.model_executor.models.transformers.multimodal"
    breaks = "AttributeError: 'VoxtralRealtimeProcessor' object has no attribute '_get_num_multimodal_tokens'"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": False}
    upstream = (
        "https://github.com/huggingface/transformers/issues/41749 for another model; vLLM 0.32.0 asks for images only"
    )
    until = "vLLM 0.20.0 is no longer supported"

    def probe(self, module: Any) -> bool:
        from transformers.models.voxtral_realtime.processing_voxtral_realtime import VoxtralRealtimeProcessor

        asked = module.MultiModalProcessingInfo
        # Where audio is known to vLLM's Transformers backend, it sizes audio by itself.
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
            """Tokens to set aside for each item, whatever its size: 480 of a context of 512, as 32 pad the left."""
            budget = self.max_model_len - self.mistral_common_audio_config.n_left_pad_tokens
            return {"num_image_tokens": [budget] * len(image_sizes), "num_image_patches": [1] * len(image_sizes)}

        info.get_hf_processor = get_hf_processor
        processor_class: Any = VoxtralRealtimeProcessor
        processor_class._get_num_multimodal_tokens = _get_num_multimodal_tokens


class PluginGate(Patch):
    name = "load_general_plugins"
    does = "vLLM verifies the patches before it loads its plugins, in each process, whatever `VLLM_PLUGINS` says"
    target = "vllm.plugins"
    breaks = "nothing ends: an exception in sitecustomize.py is one line on stderr, and Python goes on"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": True}
    upstream = "https://docs.python.org/3/library/site.html#module-sitecustomize: only SystemExit ends the start"
    until = "there are no patches"
    expires = "tests/patches/test_startup.py::test_python_goes_on_after_an_exception_in_sitecustomize"

    def probe(self, module: Any) -> bool:
        return not hasattr(module.load_general_plugins, "verifies_patches")

    def apply(self, module: Any) -> None:
        load = module.load_general_plugins

        def load_general_plugins() -> None:
            finder = active()
            if finder is None:
                raise PatchError("the finder of the patches has left sys.meta_path: nobody can verify them")
            finder.verify()
            load()

        load_general_plugins.verifies_patches = True  # type: ignore[attr-defined]
        module.load_general_plugins = load_general_plugins


PATCHES = (SlowTokenizer(), TokenizerKwargs(), TokenBudget())
GATE = PluginGate()


class PostImport:
    """A finder for sys.meta_path that settles each patch when its target module was imported.

    `outcomes` maps a patch's name to (outcome, what was found); a patch is absent until its target is imported.
    `patches` are verified wherever vLLM loads its plugins; `optional` ones where a configuration that uses them asks
    `require`.
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
        """What is due once `module` has run."""
        for patch in (*self.patches, *self.optional):
            if patch.target == module.__name__ and patch.name not in self.outcomes:
                self.outcomes[patch.name] = patch.settle(module)
        if module.__name__ == GATE.target:
            outcome, found = GATE.settle(module)
            if outcome == "drifted":  # raised here, since nobody would verify the patches
                raise PatchError(
                    f"{GATE.target} of vllm {installed('vllm')} has no load_general_plugins, where the patches are "
                    f"verified ({found}). {ADVICE}"
                )

    def add(self, patches: Iterable[Patch]) -> None:
        """Settle optional patches: now where the target is imported already, else once it is. Twice does no harm."""
        known = {patch.name for patch in self.optional}
        new = tuple(patch for patch in patches if patch.name not in known)
        self.optional += new
        self.targets |= {patch.target for patch in new}
        for patch in new:
            if patch.target in sys.modules:
                self.imported(sys.modules[patch.target])

    def settled(self, patches: Iterable[Patch] | None = None) -> dict[str, tuple[str, str]]:
        """Import the targets of these patches (default: `patches`), so that each is settled. Returns their outcomes."""
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
        """Raise PatchError unless every patch of `patches` is applied or not needed here."""
        if not self.verified:
            for line in untested():
                print(f"voxtral-serve: {line}", file=sys.stderr)
        self.verified = True
        self.require(self.patches)

    def require(self, patches: Iterable[Patch]) -> None:
        """Raise PatchError unless each of these patches is applied or not needed here."""
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
        "going by what the probes find"
        for library, versions in TESTED.items()
        if installed(library) not in versions
    ]


class _Loader:
    """The module's own loader, with something to do afterwards."""

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
    """The finder that is in force in this process, whichever copy of this file put it there; or None."""
    # By name: a copied file and the package's module each have a class of their own.
    found: Any = next((finder for finder in sys.meta_path if type(finder).__name__ == "PostImport"), None)
    return found


def require(*names: str) -> None:
    """Raise PatchError unless the patches of these names are applied or not needed. For who uses them."""
    finder = active()
    known = {} if finder is None else {patch.name: patch for patch in (*finder.patches, *finder.optional)}
    if finder is None or not known.keys() >= set(names):
        raise PatchError(
            f"patch {', '.join(sorted(set(names) - known.keys()))} is not known in this process: vLLM has not loaded "
            "the plugin of voxtral-serve here. Unset VLLM_PLUGINS, or reinstall voxtral-serve"
        )
    finder.require(known[name] for name in names)


def install() -> None:
    """Put the patches in force. Twice does no harm."""
    if active() is None:
        sys.meta_path.insert(0, PostImport(PATCHES, __file__))


def run_shadowed() -> None:
    """Run the sitecustomize that this one hides: the next on sys.path, such as a distribution's own."""
    # Those of importlib.machinery and importlib.util, which would cost every Python start some milliseconds.
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder

    # The folder is resolved and the file is not: Debian's sitecustomize.py is a link that leads out of sys.path.
    here = os.path.realpath(os.path.dirname(__file__))
    places = [os.path.realpath(entry) for entry in sys.path]
    after = sys.path[places.index(here) + 1 :] if here in places else sys.path
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in after if os.path.realpath(entry) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


install()
if __name__ == "sitecustomize":
    run_shadowed()
