"""`voxtral-serve draft train`: its stages one after the other. What a run has done, the next one does not repeat."""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from vllm.platforms import current_platform

from voxtral_serve.client.text import shown
from voxtral_serve.draft import engine, recordings
from voxtral_serve.draft.collect import FEW, collect, detector, longest_s
from voxtral_serve.draft.job import DraftError, TrainJob
from voxtral_serve.draft.model import Model
from voxtral_serve.draft.recordings import PIECE_S, RATE_HZ, Piece, Recording
from voxtral_serve.draft.report import Line, say, table
from voxtral_serve.draft.scoring import DRAFTS, score, walk
from voxtral_serve.draft.shards import Entry, Shards, check_space, read_json, write_json
from voxtral_serve.draft.training import Corpus, Trainer, right, seen_tokens
from voxtral_serve.engine.draft_network import FILE, Head, chirp
from voxtral_serve.engine.drafter import V1

LEAST_S = 600.0  # of audio to train on
PARTS = (8, 4, 2, 1)  # the table has a line for the N-th part of the audio
HELD_OUT_S = 7200.0  # of recordings that are held out, at most
MEASURED = 12  # clips whose time is measured
# In the work folder, beside the shards. LOG goes to the drafter's folder at the end.
LOG, CHIRP, COLLECTED = "training.jsonl", "chirp.rows", "collected.json"
SCORES, WITHOUT, WITH = "scores.json", "without.json", "with.json"


def run(job: TrainJob) -> int:
    """Exit status: 0; 2 for arguments or recordings that cannot be used; 130 for Ctrl-C."""
    try:
        Job(job).run()
        return 0
    except DraftError as error:
        print(f"voxtral-serve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("voxtral-serve: stopped. Run the same command again to go on", file=sys.stderr)
        return 130


class Job:
    """A run of the command, which goes on where an earlier one has stopped."""

    def __init__(self, job: TrainJob) -> None:
        self.job = job
        if V1:
            raise DraftError("vLLM 0.20.0 is installed, which uses no drafter: expected 0.32.0 or later")
        self.model = Model.read(job.checkpoint)
        self.out = job.out or job.checkpoint / FILE
        self.work = job.work or self.out.parent / "work"
        if self.out.exists() and not job.replace and not self._kept(SCORES).exists():
            raise DraftError(f"{self.out} exists: pass --replace to train another one, or --out FILE")
        self.train, self.held_out = self._recordings()
        self.arguments = engine.options(job.checkpoint, job.arguments, current_platform.is_cuda_alike())

    def _kept(self, name: str) -> Path:
        return self.work / name

    def _recordings(self) -> tuple[list[Recording], list[Recording]]:
        """Those to train on, and those that are held out; [] if clips of the same recordings are held out."""
        found, failed = recordings.find((*self.job.clips, *self.job.held_out))
        for path, why in failed:
            say(f"left out: {shown(path)}: {why}")
        if failed:
            say(f"{len(failed)} files cannot be read")
        chosen = recordings.find(self.job.held_out)[0] if self.job.held_out else hold_out(found)
        keys = {each.key for each in chosen}
        held_out = [each for each in found if each.key in keys]
        train = recordings.take([each for each in found if each.key not in keys], self.job.hours)
        seconds = sum(each.seconds for each in train)
        if seconds < LEAST_S:
            raise DraftError(
                f"{len(train)} recordings have {seconds / 60:.1f} minutes of audio: expected {LEAST_S / 60:.0f} "
                "minutes at least, and some hours for a useful drafter"
            )
        held = f"{len(held_out)} others are" if held_out else "a tenth of their clips is"
        say(f"{len(train)} recordings of {seconds / 3600:.2f} h to train on; {held} held out")
        return train, held_out

    def run(self) -> None:
        every = self.held_out + self.train
        clips = sum(1 + int(each.seconds / PIECE_S) for each in every)
        needed = self.model.rows_bytes(sum(each.seconds for each in every), clips)
        check_space(self.work, needed - sum(file.stat().st_size for file in self.work.glob("*.safetensors")))
        self.shards = Shards(self.work, self.model.identity())
        collected = self._kept(COLLECTED)
        if not collected.exists() or not {each.key for each in every} <= {*read_json(collected)["recordings"]}:
            self._collect(every)
        measured = self._measured()
        if not self._kept(SCORES).exists():
            self._train([piece.key for piece in measured])
        if not self._kept(WITH).exists():
            self._measure([piece.samples for piece in measured])
        self._end()

    def _collect(self, every: Sequence[Recording]) -> None:
        """The shards, the rows of the chirp, and the time of clips without drafts. What was trained on less is void."""
        for path in (self._kept(SCORES), self._kept(WITH), *self.work.glob("state-*")):
            path.unlink(missing_ok=True)
        say("starting vLLM")
        with engine.running(self.arguments) as llm:
            transcriber = engine.Transcriber(llm)
            collect(transcriber, self.shards, every, frozenset(each.key for each in self.held_out))
            transcriber.tokens("chirp", chirp(RATE_HZ), 1)
            llm.collective_rpc("write_rows", args=(str(self._kept(CHIRP)), ["chirp"]))
            times = engine.alone(transcriber, [piece.samples for piece in self._measured()], drafts=False)
            write_json(self._kept(WITHOUT), times._asdict())
        write_json(self._kept(COLLECTED), {"recordings": [each.key for each in every]})

    def _measured(self) -> list[Piece]:
        """Held-out clips whose time is measured; the same ones each time."""
        held, cutter = {entry.key for entry in self.shards.entries if entry.held_out}, detector()
        every = (
            piece
            for recording in self.held_out or self.train
            for piece in recordings.pieces(recording, longest_s(self.model.shape), cutter)
            if piece.key in held
        )
        return list(itertools.islice(every, MEASURED))

    def _train(self, measured: Sequence[str]) -> None:
        """Train on growing parts of the audio, keep the scores of each, and write the drafter of the last."""
        entries = sorted(self.shards.entries)
        held_out = [entry for entry in entries if entry.held_out]
        train = [entry for entry in entries if not entry.held_out]
        total_s = sum(entry.seconds for entry in train)
        if not held_out or total_s < LEAST_S:
            raise DraftError(
                f"{total_s / 60:.1f} minutes of speech to train on and {len(held_out)} clips to judge by were found in "
                f"the recordings: expected {LEAST_S / 60:.0f} minutes and one clip at least"
            )
        tokens = seen_tokens(train)
        embeddings = self.model.embeddings(tokens)
        device = torch.device(current_platform.device_type)
        corpus = Corpus(self.shards, tokens, self.model.shape.prompt, device)
        scores = [self._pads(held_out, measured)]
        self._log(scores[0])
        for part in PARTS:
            entries = first(train, total_s / part)
            hours = sum(entry.seconds for entry in entries) / 3600
            if part > 1 and 3600 * hours < LEAST_S / 2:
                continue
            trainer = Trainer(corpus, entries, embeddings, self.job.training, self._kept(f"state-{part}.pt"))
            network = trainer.run(lambda *at, hours=hours: self._tell(hours, *at))
            hits = right(network, corpus, held_out, embeddings, self.model.shape.prompt, self.job.training.batch_rows)
            scores.append(scored(f"{hours:.2f} h", dict(zip((e.key for e in held_out), hits, strict=True)), measured))
            self._log(scores[-1])
        with safe_open(self._kept(CHIRP), "pt") as file:
            rows = file.get_tensor("rows")
        head = Head(
            network.cpu(),
            tokens,
            self.model.vocabulary,
            self.model.shape.delay,
            self.model.tokenizer,
            self.model.shape.prompt,
            scores[-1]["survival"],
            round(hours, 3),
            rows.float(),
            trainer.shape,
        )
        head.write(self.out)
        write_json(self._kept(SCORES), {"lines": scores})

    def _pads(self, held_out: Sequence[Entry], measured: Sequence[str]) -> dict[str, Any]:
        hits = {entry.key: np.array(entry.tokens) == self.model.pad for entry in held_out}
        return scored("pads", hits, measured)

    def _tell(self, hours: float, step: int, steps: int, loss: float) -> None:
        say(f"training on {hours:.2f} h: step {step} of {steps}, loss {loss:.3f}")
        self._log({"hours": round(hours, 3), "step": step, "steps": steps, "loss": round(loss, 4)})

    def _log(self, line: dict[str, Any]) -> None:
        with self._kept(LOG).open("a") as file:
            print(json.dumps(line), file=file)

    def _measure(self, clips: Sequence[np.ndarray]) -> None:
        say("starting vLLM with the drafter, to measure clips alone")
        torch.cuda.empty_cache()
        with engine.running(engine.with_drafts(self.arguments, self.out)) as llm:
            times = engine.alone(engine.Transcriber(llm), clips, drafts=True)
        write_json(self._kept(WITH), times._asdict())

    def _end(self) -> None:
        """Print the table, and leave the drafter and its log only."""
        without, drafted = (engine.Alone(**read_json(self._kept(name))) for name in (WITHOUT, WITH))
        scores = read_json(self._kept(SCORES))["lines"]
        lines = [Line("no drafts", None, dict.fromkeys(DRAFTS, 1.0), without.clip_ms, True)]
        for number, each in enumerate(scores):
            measured = number == len(scores) - 1
            clip_ms = drafted.clip_ms if measured else drafted.with_steps(each["steps"])
            a_step = {int(drafts): value for drafts, value in each["a_step"].items()}
            lines.append(Line(each["name"], each["right"], a_step, clip_ms, measured))
        say(table(lines, current_platform.get_device_name()))
        for name, times in (("without", without), ("with", drafted)):
            self._log({"alone": name, "device": current_platform.get_device_name(), **times._asdict()})
        self._kept(LOG).replace(self.out.with_name(LOG))
        self.shards.remove()
        say(f"{self.out} is written; the collected rows and tokens are removed")


def scored(name: str, hits: dict[str, np.ndarray], measured: Sequence[str]) -> dict[str, Any]:
    """A line of the log, by the hits of all held-out clips; with the steps of the clips whose time is measured."""
    steps = [len(walk(hits[key], DRAFTS[-1]).accepted) for key in measured]
    return {"name": name, **score(list(hits.values()))._asdict(), "steps": float(np.mean(steps))}


def first(entries: Sequence[Entry], seconds: float) -> list[Entry]:
    """The first clips with so much audio together."""
    ends = np.cumsum([entry.seconds for entry in entries])
    return list(entries[: int(np.searchsorted(ends, seconds * (1 - 1e-9))) + 1])


def hold_out(found: Sequence[Recording]) -> list[Recording]:
    """The first recordings, 2 % but some dozens; none if there are few, of which clips are held out."""
    if len(found) < FEW:
        return []
    count = min(max(36, len(found) // 50), len(found) // 5)
    held_out: list[Recording] = []
    for recording in found[:count]:
        if held_out and sum(each.seconds for each in held_out) > HELD_OUT_S:
            break
        held_out.append(recording)
    return held_out
