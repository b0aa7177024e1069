"""Measure the figures of bench/results/gpu.json: Voxtral Realtime served by vLLM's own model and by this repository.

    python -m bench.gpu run --out bench/results/gpu.json

The weights have the full size and random values, so nothing is downloaded. Speed, energy and memory do not depend on
the values. The texts are not evaluated. All servers are resident at the same time and are measured in turns, so that a
change of the machine during the run affects all of them.

This command is separate from `bench matrix`, which serves one configuration at a time and scores its texts. Here, all
servers stay up. Start-up is timed with empty and with filled caches. GPU memory is measured from the start of a server
on, as growth if NVML does not report processes. Drafts are accepted at given rates. Tokens are counted by the server.
`matrix` has none of these figures, and gpu.json has no error rates.

The second command, `live`, measures live sessions of one configuration, of any age, with or without parallel uploads.

    python -m bench.gpu live --name stock --trials sessions=16,seconds=90 --out bench/results/live.json

arguments  the command line, parsed into a plan    plan      the plan of each command
rows       configurations, figures, merging        tasks     the clips that each row sends
servers    starting servers                        readings  GPU memory and energy
measure    one row of one server                   run       the command `run`
checkpoint random weights of full size             steps     the steps of a server's engine
live       the command `live`                      liverows  its rows and its file
meanwhile  uploads, energy and host memory during live sessions
"""
