"""The Triton kernels compute attention: in Triton's interpreter, since this machine may have no GPU."""

import os
import re
import subprocess
import sys

import pytest
import triton
from places import ROOT
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from voxtral_serve.engine import keyword_boost


def test_kernels_are_windowed_attention() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "VOXTRAL_TEST_DEVICE": "cpu"}
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_gpu_kernels.py"]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found[1]) >= 30, done.stdout


TABLES = {"tables": "*i32", "slots": "*i32", "width": keyword_boost.WIDTH, "block": keyword_boost.BLOCK}


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        ("_advance", {"tokens": "*i32", "stride": "i32", "prompts": "*i32", "lengths": "*i32"}),
        (
            "_boost",
            {"logits": "*fp32", "stride": "i32", "offsets": "*i32", "inputs": "*i32"},
        ),
    ],
)
def test_kernels_of_custom_words_compile_for_gpus(
    kernel: str, arguments: dict[str, str | int], capability: int
) -> None:
    """Which the interpreter does not show: it takes variables whose types change in a loop."""
    function = getattr(keyword_boost, kernel)
    given = {name: (TABLES | arguments)[name] for name in function.arg_names}
    constants = {name: value for name, value in given.items() if isinstance(value, int)}
    types = {name: "constexpr" if name in constants else value for name, value in given.items()}
    source = ASTSource(fn=function, signature=types, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
