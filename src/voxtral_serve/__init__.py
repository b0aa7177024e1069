"""Voxtral speech-to-text on vLLM.

A room is a folder whose code runs in one kind of process with one set of dependencies:

  patches     every vLLM process: a record for each change to vLLM at run time. Standard library until applied
  engine      vLLM's engine and workers: config, weights, encoder, audio rows, drafts; torch and vLLM
  guard       vLLM's API server: an upload or a chat from its bytes to its answer. Of `engine`, names and lengths only
  audio       decoding, speech detection, levels; numpy. Called by the guard
  transcript  tokens to words with times, subtitles, JSON. Called by the guard
  keys        the file of API keys: names, digests, limits. Read by the guard and by `check`
  logs        every vLLM process: the log as lines of JSON. Called by the guard for what a line says of its request
  checkpoint  what a directory of weights holds; standard library. Called by `engine` and `check`
  check       `voxtral-serve check`, before a start
  deploy      a container's probes, `ready` and `drain`: urllib3, no other room
  client      `voxtral-serve transcribe`, on any machine: no vLLM. Of `transcript`, the writer of subtitles only
  batch       `voxtral-serve batch`: archives through Ray Data. It sends files as `client` does, to its own servers
  prove       `voxtral-serve prove`: the acceptance run of a server, as its clients see it, and its reports

tests/unit/test_house.py holds who may import whom. A line of code for a live session goes into `engine` where it works
on frames, rows or the scheduler, and into `guard` where it speaks a protocol: the guard may know a session's name and
shapes, and nothing else of the engine.
"""

import os

__version__ = "2.1.0"

# Python runs this at its start (voxtral_serve.pth): vLLM configures its log while it is imported, before its plugins.
if os.environ.get("VOXTRAL_SERVE_LOG") == "json":
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", os.path.join(os.path.dirname(__file__), "logs.json"))
