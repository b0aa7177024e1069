"""Every figure of bench/results/gpu.json: vLLM's own ways of serving Voxtral Realtime beside this repository's.

    python -m bench.gpu run --out bench/results/gpu.json

Weights are random and of full size, so that nothing is fetched: speed, energy and memory do not depend on their values,
and of the texts nothing is said. Servers are resident together and measured one at a time, turn by turn, so that what
changes on the machine meanwhile changes for all of them.
"""
