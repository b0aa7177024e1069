"""vLLM-Omni on a CPU, for `make test-speech` only: upstream has no such platform (vllm-omni issue 1095)."""
