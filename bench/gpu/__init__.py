"""Measure configurations of Voxtral Realtime on one GPU: uploads, live sessions, starts, energy and memory.

    python -m bench gpu report --out bench/results/report-h200.json   # the tables of the pages, in one run
    python -m bench gpu run --servers fast --steps --out fast.json    # uploads to a configuration or a few
    python -m bench gpu live --sessions 16,150 --out live.json        # live sessions, with or without uploads
    python -m bench gpu kernels --out kernels.json                    # the kernels of a step, by size

The weights have the full size and random values, so nothing is downloaded. Speed, energy and memory do not depend on
the values. The texts are not evaluated: `bench matrix` scores them, of one configuration at a time.

A plan has rows. A row is one number of requests or of live sessions at one server, or one start:

    arguments -> plan (the rows) -> report (servers up together, row after row) -> record (the file)
                                       servers     start `vllm serve`
                                       measure     a row of uploads: tasks (its clips), steps (of the engine)
                                       live        a row of live sessions: meanwhile (uploads, energy, host memory)

rows has the configurations and the rows of the report, readings GPU memory and energy, checkpoint the random weights.
speech_checkpoint and voxcpm2_checkpoint write those of models for speech synthesis.
"""
