"""What measures a server from outside: its launcher, clients, scoring and statistics, for `prove`, `batch` and `bench`.

`bench/measure` is a link to this folder: the benchmark runs from a checkout without this package. So the modules import
each other by relative names, and nothing else of this package.
"""
