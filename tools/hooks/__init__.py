"""What a version of vLLM changed of the code that voxtral-serve hooks into: `python -m tools.hooks VERSION`.

A hook is a module, class, function, method or attribute of vLLM that voxtral-serve imports, subclasses, overrides,
calls, reads or sets. The hooks are derived from the source of voxtral-serve (`uses`), with a declared table of the
classes of parameters that are typed `Any` (`objects`). vLLM's source is read, not imported, so that no GPU and no build
of that version is needed. `versions.json` has what the recorded versions have; tests/unit/test_hooks.py compares it
with the code and with the installed vLLM.
"""
