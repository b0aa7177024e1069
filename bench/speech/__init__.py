"""Measure speech synthesis over HTTP: texts -> /v1/audio/speech -> first audio, latency, RTF, waits -> report.

`python -m bench speech --url http://127.0.0.1:8000 --out results/NAME` runs it. As a library:

    from bench.plan import SpeechPlan
    from bench.speech.run import measure

    summary = measure(SpeechPlan("http://127.0.0.1:8000", Path("results/NAME"), loads=tuple(closed("1,16,32"))))
"""
