"""`voxtral-serve prove`: the acceptance run, on a user's own GPU and weights.

It runs on any machine, without vLLM; with --serve it starts `vllm serve` as a process of its own.
"""
