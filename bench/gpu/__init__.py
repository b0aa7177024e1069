"""Every figure of bench/results/gpu.json: vLLM's own ways of serving Voxtral Realtime beside this repository's.

    python -m bench.gpu run --out bench/results/gpu.json

Weights are random and of full size, so that nothing is fetched: speed, energy and memory do not depend on their values,
and of the texts nothing is said. Servers are resident together and measured one at a time, turn by turn, so that what
changes on the machine meanwhile changes for all of them.

It is not part of `bench matrix`, which serves one configuration at a time and scores its texts. Here servers stay up
together; a start is timed with empty and with filled caches; GPU memory counts from a server's start on, and by growth
where NVML names no process; drafts are accepted at given rates; tokens are those of the server's counters. `matrix` has
none of these figures and gpu.json has no quality, so that one command for both would be two commands behind a flag.

`live` is the other command: live sessions of one configuration, of any age and beside uploads.

    python -m bench.gpu live --name stock --trials sessions=16,seconds=90 --out bench/results/live.json

arguments  the command line, made into a plan      plan      what is to be done
rows       configurations, figures, merging        tasks     which clips each row sends
servers    starting servers                        readings  GPU memory and energy
measure    one row of one server                   run       all of it, in order
checkpoint random weights of full size
live       all of `live`, in order                 liverows  its rows and its file
meanwhile  uploads, energy and host memory while the sessions go on
"""
