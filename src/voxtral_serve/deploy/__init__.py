"""The probes that a container runs around a server: `voxtral-serve ready` and `voxtral-serve drain`.

clip.opus is speech of 2.3 s, clip 000 of the benchmark.
"""
