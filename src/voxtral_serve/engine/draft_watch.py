"""Which drafts a step makes, and how many: chosen by how many were right so far. Pure Python; draft_scheduler asks it.

A step with n drafts for each request makes 1 + s_1 + ... + s_n tokens of each, where survival s_i is the share of the
steps in which drafts 1 to i were all right. It takes `cost`, which grows with n. Of the drafts of the head (the network
of draft_network), pads, and none, with each number of drafts that the schedule has for at most as many requests,
`choose` returns what makes most tokens for the cost.

head   A step that verifies drafts of the head shows how many were right. Of draft i, `right` is the share that was
       right where all before it were: a mean at first, later a moving average; s_i is the product of the first i.
       A draft that no step has reached is taken to be as good as the one before it, so a few steps without a right one
       end the head's drafts, until a probe has one.
pads   No pad has to be drafted: a text shows the steps in which pads would have made it. n - 1 pads and the token after
       them take n / (drafts + 1) steps, rounded up.

One step in PROBE drafts the head's, as many as the schedule has. So `right` is known of all drafts, and a head that was
of no use to one audio returns with another.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

# The time of a step, in that of one token more: FIXED + REQUEST * requests + tokens, and DRAFTS if it verifies drafts.
# Fitted to the 20 throughputs of `fast.yaml` and `throughput.yaml` on two H200s (1 to 256 requests, 0 to 7 drafts of
# pads and of synthetic acceptance; 7 % root mean square). They decide on every machine.
FIXED, REQUEST, DRAFTS = 200, 2, 50
PROBE = 64  # 1.6 % of the steps
MEMORY = 256  # drafts after which a moving average has forgotten 63 % of what it was
TEXT = 2048  # the same, in tokens of texts: 15 clips of 10 s
START = 0.9  # `right` of a head that has not drafted yet: its number of drafts falls until they are right
DOUBT = 16  # drafts that START counts as
PATIENCE = 512  # steps in which a choice has to stay before it is reported; twice as many after each report


class Choice(NamedTuple):
    """`number` drafts for each request, of the head or pads."""

    pads: bool
    number: int

    @property
    def name(self) -> str:
        return "none" if not self.number else "pads" if self.pads else "guesses"


def cost(running: int, count: int) -> int:
    """The time of a step that makes `count` drafts for each of `running` requests, in that of one token more."""
    return FIXED + (REQUEST + 1 + count) * running + (DRAFTS if count else 0)


class DraftWatch:
    """`schedule` has the most drafts for a number of running requests, as vLLM's lookup has; index 0 is of no use."""

    def __init__(self, schedule: Sequence[int], head: bool, pad: int) -> None:
        self.schedule, self.pad = [*schedule], pad
        self.counts = sorted({*schedule[1:]} - {0})
        self.right = [START] * max(self.counts, default=0) if head else []
        self.known = [0] * len(self.right)  # drafts that were verified, by place; at most MEMORY
        self.of_head = self._of_head()  # tokens of a request in a step, by number of drafts
        self.of_pads = {count: min(1 + 0.34 * count, 2.0) for count in self.counts}  # about pico's
        self.steps = 0
        self.reported, self.other, self.patience = "", 0, PATIENCE

    def _of_head(self) -> dict[int, float]:
        made, survival, tokens = {0: 1.0}, 1.0, 1.0
        for count, right in enumerate(self.right, start=1):
            survival *= right
            tokens += survival
            made[count] = tokens
        return made

    def heard(self, accepted: Sequence[int], count: int) -> None:
        """The numbers of drafts that were right, by request, in a step that has verified `count` of the head's."""
        ended = Counter(accepted)
        tried = len(accepted)
        for draft in range(count):
            if not tried:
                break
            right, weight = tried - ended[draft], min(DOUBT + self.known[draft], MEMORY) + tried
            self.right[draft] += (right - tried * self.right[draft]) / weight
            self.known[draft] = min(self.known[draft] + tried, MEMORY)
            tried = right
        for draft in range(1, len(self.right)):
            if not self.known[draft]:
                self.right[draft] = self.right[draft - 1]
        self.of_head = self._of_head()

    def text(self, tokens: Sequence[int]) -> None:
        """The tokens that a request has made."""
        lengths, length = Counter[int](), 0
        for token in tokens:
            length += 1
            if token != self.pad:
                lengths[length] += 1
                length = 0
        if not (total := len(tokens) - length):
            return
        for count, made in self.of_pads.items():
            steps = sum(number * -(-length // (count + 1)) for length, number in lengths.items())
            share = 1 / made  # steps of a token
            self.of_pads[count] = 1 / (share + (steps - total * share) / (TEXT + total))

    def choose(self, running: int) -> Choice:
        """What to draft after a step of so many requests."""
        most = self.schedule[running]
        self.steps += 1
        if self.right and self.steps % PROBE == 0:
            return Choice(False, most)
        return self.best(running, most)

    def best(self, running: int, most: int) -> Choice:
        chosen, rate = Choice(False, 0), 1 / cost(running, 0)
        for count in self.counts:
            if count > most:
                break
            price = cost(running, count)
            if self.right and self.of_head[count] > rate * price:
                chosen, rate = Choice(False, count), self.of_head[count] / price
            if self.of_pads[count] > rate * price:
                chosen, rate = Choice(True, count), self.of_pads[count] / price
        return chosen

    def report(self, running: int) -> str | None:
        """A line for the log, if for some time another source than the one reported last is chosen."""
        most = self.schedule[running]
        name = self.best(running, most).name
        self.other = self.other + 1 if name != self.reported else 0
        if self.other < self.patience or not most:
            return None
        expected = "guesses" if self.right else "pads"  # what the configuration says
        silent = not self.reported and name == expected
        self.reported, self.other, self.patience = name, 0, 2 * self.patience
        if silent:
            return None
        head = ""
        if self.right:
            right, tokens = self.right[0], self.of_head[most]
            head = f"{right:.0%} of the first guesses were right, {tokens:.2f} tokens a step with {most}; "
        return (
            f"drafts: {name} for {running} running requests. {head}{self.of_pads[most]:.2f} tokens a step with {most} "
            "pads. `voxtral-serve draft train` trains a drafter, which guesses, with your own audio"
        )
