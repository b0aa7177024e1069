"""What is run around a server: the compose file of several replicas, and the probes of a container.

clip.opus is speech of 2.3 s, clip 000 of the benchmark.
"""
