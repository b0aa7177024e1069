"""Each record against the libraries that are installed: what it says is needed is needed, and no more."""

import json
from pathlib import Path
from typing import Any

import pytest
import scratch
from vllm.plugins import load_general_plugins

from voxtral_serve import patches, shims
from voxtral_serve.shims import PATCHES, TESTED, Patch, PatchError, installed

NEWEST = {library: versions[-1] for library, versions in TESTED.items()}
by_name = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)


@by_name
def test_the_outcome_is_what_was_measured_on_this_version(patch: Patch, outcomes: dict[str, list[str]]) -> None:
    version = installed(patch.library)
    outcome, found = outcomes[patch.name]
    assert (outcome, version in found) == ("applied" if patch.needed[version] else "not needed", True)


@by_name
def test_a_patch_is_removed_once_no_tested_version_needs_it(patch: Patch) -> None:
    """`needed` is what the test above measures, so a record that is False throughout has outlived its reason."""
    assert set(patch.needed) == set(TESTED[patch.library])
    assert any(patch.needed.values()), f"no tested {patch.library} needs {patch.name}: remove the patch ({patch.until})"


@by_name
def test_a_patch_expires_with_the_newest_version(patch: Patch, outcomes: dict[str, list[str]]) -> None:
    """The newest tested version is where a fix of upstream's shows first."""
    if installed(patch.library) != NEWEST[patch.library]:
        pytest.skip(f"{patch.library} {installed(patch.library)} is not the newest tested, {NEWEST[patch.library]}")
    if not patch.needed[NEWEST[patch.library]]:
        pytest.skip(f"it went with {patch.library} {NEWEST[patch.library]} already, and is here for the older one")
    outcome, found = outcomes[patch.name]
    assert outcome == "applied", (
        f"{patch.library} {NEWEST[patch.library]} works without {patch.name} ({found}). Write this into `needed`, and "
        f"remove the patch if no tested version needs it any more: {patch.until}. Upstream: {patch.upstream}"
    )


# All records, those of the package too


@pytest.fixture(scope="module")
def optional() -> dict[str, tuple[str, str]]:
    """What becomes here of the records that the plugin brings, each on its real target."""
    load_general_plugins()
    finder: Any = shims.active()
    return finder.settled(patches.RECORDS)


every = pytest.mark.parametrize("patch", [*patches.every()], ids=lambda patch: patch.name)


@pytest.mark.parametrize("patch", patches.RECORDS, ids=lambda patch: patch.name)
def test_a_record_of_the_package_has_the_outcome_that_was_measured(
    patch: Patch, optional: dict[str, tuple[str, str]]
) -> None:
    outcome, found = optional[patch.name]
    assert outcome == ("applied" if patch.needed[installed(patch.library)] else "not needed"), found


@every
def test_a_record_is_whole(patch: Patch) -> None:
    texts = {
        name: getattr(patch, name) for name in ("name", "does", "target", "breaks", "upstream", "until", "used_by")
    }
    assert all(text.strip() for text in texts.values()), texts
    assert set(patch.needed) == set(TESTED[patch.library])
    assert any(patch.needed.values()), f"no tested {patch.library} needs {patch.name}: remove the patch ({patch.until})"


@every
def test_the_expiry_test_of_a_record_exists(patch: Patch) -> None:
    file, _, name = patch.expires.partition("::")
    assert f"\ndef {name}(" in (scratch.ROOT / file).read_text()


def test_names_of_records_are_distinct() -> None:
    names = [patch.name for patch in patches.every()]
    assert len(set(names)) == len(names)


def test_what_the_plugin_has_not_brought_is_not_known() -> None:
    with pytest.raises(PatchError, match="patch no_such_record is not registered in this process"):
        shims.require("no_such_record")


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH that tells Python of versions which nobody has tested, in front of the real ones."""
    # vLLM takes "cpu" in its version for its platform.
    for library, version in (("vllm", "9.9.9+cpu"), ("transformers", "9.9.9")):
        metadata = tmp_path / f"{library}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: {version}\n")
    return tmp_path


@pytest.mark.slow
def test_an_untested_version_is_told_and_goes_by_the_probes(
    stock: Path, unknown: Path, outcomes: dict[str, list[str]]
) -> None:
    scratch.sitecustomize(unknown, scratch.SOURCE.read_text())
    done = scratch.run(stock, "-c", scratch.VERIFY, PYTHONPATH=str(unknown))
    assert done.returncode == 0, done.stderr
    probed = json.loads(done.stdout.splitlines()[-1])
    assert {name: outcome for name, (outcome, _) in probed.items()} == {
        name: outcome for name, (outcome, _) in outcomes.items()
    }
    assert all("9.9.9" in found for _, found in probed.values())
    told = [line for line in done.stderr.splitlines() if line.startswith("voxtral-serve:")]
    assert [line.partition(" is not one of the tested versions")[0] for line in told] == [
        "voxtral-serve: vllm 9.9.9",
        "voxtral-serve: transformers 9.9.9",
    ]


@pytest.mark.slow
def test_an_untested_version_that_a_probe_cannot_read_is_refused(stock: Path, unknown: Path) -> None:
    renamed = {"def get_cached_tokenizer(": "def get_cached_tokenizer(cache, "}
    scratch.sitecustomize(unknown, scratch.LOADED, scratch.edited({"vllm.tokenizers.hf": renamed}))
    done = scratch.run(stock, "-c", scratch.VERIFY, PYTHONPATH=str(unknown))
    assert done.returncode != 0
    raised = done.stderr.splitlines()[-1]
    assert "PatchError: patch is_fast (of vllm.tokenizers.hf) has drifted on vllm 9.9.9: TypeError" in raised
    assert "Nothing is served" in raised
