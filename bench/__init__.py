"""Measure a transcription server over HTTP: dataset -> client -> metrics -> report.

Run it with `python -m bench run --url http://127.0.0.1:8000 --dataset bench/data --out results/NAME`.
The stages exchange files, so `python -m bench report results/NAME` scores a run again without a server.
"""

from bench.measure.errors import MeasureError

# An error in the usage, the data or the server's address. The message is for the user; exit status 2.
BenchError = MeasureError
