"""The record of one run of load: a sample a request, as the client saw it."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


class Sample(NamedTuple):
    """One request and its answer. Times are seconds from the start of the run; 0.0 where it did not come to that."""

    place: int = 0
    """Number of the prompt in the data set, the same in every arm and run that uses the same seed."""
    scheduled: float = 0.0
    """When the arrival process wanted it to leave."""
    sent: float = 0.0
    """When the client began to send it (a connection that had to be opened is part of the latency)."""
    events: tuple[float, ...] = ()
    """When each stream event with new text or tokens arrived."""
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    """The count of the server's usage; the number of events if it sends none."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    """Ids of the generated tokens, if the server sends them."""
    error: str = ""
    """Why it failed; a failed sample counts in no latency."""
    released: float = 0.0
    """When schedule and limit on concurrency both let it go. Up to here it waited on purpose; `lag` is what follows."""
    counted: bool = False
    """The server sent no usage: output_tokens are counted events."""
    finish: str = ""
    """The last finish_reason."""

    @property
    def lag(self) -> float:
        """The client's own delay in seconds."""
        return self.sent - self.released

    @property
    def queued(self) -> float:
        """Seconds of waiting for the limit on concurrency."""
        return self.released - self.scheduled

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first event."""
        return self.events[0] - self.sent

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0.0 for one token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def itls(self) -> tuple[float, ...]:
        """Seconds between events."""
        return tuple(after - before for before, after in pairwise(self.events))

    def later(self, seconds: float) -> Sample:
        """Return the sample on a clock that began `seconds` earlier."""
        scheduled, sent, ended, released = (
            at + seconds for at in (self.scheduled, self.sent, self.ended, self.released)
        )
        events = tuple(at + seconds for at in self.events)
        return self._replace(scheduled=scheduled, sent=sent, events=events, ended=ended, released=released)


class ClientUse(NamedTuple):
    """The client's own time in the run. Seconds."""

    cpu: float = 0.0
    """Processor time of this process."""
    wall: float = 0.0
    late: tuple[float, ...] = ()
    """How late the event loop was, looked at 20 times a second: times of arrival are as wrong as that."""


class LoadRun(NamedTuple):
    """One run of load against one server."""

    samples: tuple[Sample, ...]
    duration: float
    """Seconds from the first sending to the last end."""
    client: ClientUse = ClientUse()
    began: float = 0.0
    """The start of the run on this machine's monotonic clock, to lay its times beside others."""
    interrupted: bool = False
    """Ctrl-C came: there are samples of the requests alone that had ended."""
