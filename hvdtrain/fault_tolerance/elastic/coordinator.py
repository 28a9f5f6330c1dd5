"""The coordinator of an elastic job: connects its processes, notices losses, and begins generations."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.distributed.rendezvous import Rendezvous
from hvdtrain.errors import DisagreementError, StoppedEarly
from hvdtrain.fault_tolerance.channel import MAX_LINE_BYTES, Message
from hvdtrain.fault_tolerance.elastic.connected_peers import ConnectedPeers
from hvdtrain.fault_tolerance.elastic.generation import Generation
from hvdtrain.fault_tolerance.elastic.hello import Hello, differences
from hvdtrain.fault_tolerance.elastic.member_timeouts import MemberTimeouts, NoProgress
from hvdtrain.fault_tolerance.elastic.membership import Member, Membership
from hvdtrain.fault_tolerance.elastic.peer import Peer
from hvdtrain.fault_tolerance.stop_consensus import StopVote

HEARTBEAT_S = 1.0
_START_S = 120.0
"""How long the first generation waits for all processes, if there are at least the minimum."""
_MAX_RESTARTS = 3
_MAX_EXIT_CODE = 255
_MAX_NUMBER = 1 << 53
"""Above, JSON's numbers are not exact everywhere."""


class Coordinator:
    """Decides who trains, until the job has ended.

    Args:
        token: what members must send; processes without it are disconnected.
        start_size: members that the first generation waits for.
        timeout_s: how long fewer members than the minimum wait for others before they save and end.
        endpoint: the address and port to listen on; port 0: any.
        say: prints a message.
        on_removed: called with the worker number of a process that is no longer part of the job.
        clock: returns the time in seconds; monotonic.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        token: str,
        start_size: int,
        timeout_s: float,
        endpoint: tuple[str, int],
        say: Callable[[str], None],
        on_removed: Callable[[int], None] = lambda worker: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._membership = membership
        self._token = token
        self._start_size = start_size
        self._timeout_s = timeout_s
        self._say = say
        self._on_removed = on_removed
        self._clock = clock
        self._host = endpoint[0]
        self.peers = ConnectedPeers(endpoint, clock, say)
        """The connected processes."""
        self._timeouts = MemberTimeouts(clock())
        self._facts: Mapping[str, Any] | None = None
        self._rendezvous: Rendezvous | None = None
        self._vote: StopVote | None = None
        self._stop_reason: str | None = None
        self._waits_since: float | None = None
        self._heartbeat_at = clock()
        self._num_restarts = 0
        self.exit_code: int | None = None
        """The exit code of the job, once it is decided."""
        self.lost = 0
        """Number of members that were lost."""

    @property
    def port(self) -> int:
        return self.peers.port

    @property
    def generation(self) -> int:
        """The number of the current generation; 0 before the first."""
        return self._membership.generation

    def stop(self, reason: str) -> None:
        """Makes all members save and end, at the same step."""
        if self._stop_reason is None:
            self._stop_reason = reason
            self._membership.keep_all()
            if self._membership.generation == 0:
                self._end(StoppedEarly.exit_code)

    def ask_to_leave(self, worker: int, reason: str) -> None:
        """Makes the process with this worker number leave, once another process has its state."""
        for peer in self.peers:
            if peer.member is not None and peer.worker == worker:
                self._leave(peer, peer.member, reason, may_wait=True)

    def poll(self, timeout_s: float) -> None:
        """Waits for messages, at most this long, and handles them and everything that is due."""
        ready = self.peers.wait(timeout_s)
        now = self._clock()
        for peer in ready:
            if peer in self.peers:
                self._receive(peer, now)
        for peer in self.peers:
            if peer.connection.is_lost:
                self._remove(peer, "its connection was lost: killed, or host down")
        self._check_timeouts(now)
        self._send_heartbeats(now)
        self._advance(now)

    def close(self) -> None:
        """Disconnects all processes."""
        self.peers.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    # Messages.

    def _receive(self, peer: Peer, now: float) -> None:
        for message in peer.connection.receive():
            peer.received_at = now
            if peer.member is None:
                self._greet(peer, message)
            elif _holds_usable_numbers(message):
                self._handle(peer, peer.member, message, now)
            else:
                self._remove(peer, "it sent a number that no process sends")
            if peer not in self.peers:
                return

    def _greet(self, peer: Peer, message: Message) -> None:
        hello = Hello.from_message(message, self._token)
        if hello is None:
            self.peers.disconnect(peer)
        elif self._facts is not None and (found := differences(self._facts, hello.facts)):
            self._say(f"refused process {hello.pid} (host {hello.host}): {found}")
            text = (
                f"a process that joins must have the options and versions of the job. Received: {found}. Start it with "
                "the same command and code."
            )
            peer.connection.send({"kind": "refused", "code": DisagreementError.exit_code, "text": text})
            self.peers.disconnect(peer)
        elif self.exit_code is not None:
            peer.connection.send({"kind": "end", "code": self.exit_code})
            self.peers.disconnect(peer)
        else:
            self._facts = self._facts or hello.facts
            peer.member = self._membership.join(hello.host, hello.worker)
            peer.hello, peer.was_member = hello, True
            peer.connection.max_line_bytes = MAX_LINE_BYTES
            welcome = {"member": peer.member.number, "must_warm_up": not peer.member.is_ready}
            peer.connection.send({"kind": "welcome", **welcome, "start_size": self._start_size})

    def _handle(self, peer: Peer, member: Member, message: Message, now: float) -> None:
        match message:
            case {"kind": "heartbeat", "heartbeats": int(heartbeats), "step": step}:
                if heartbeats != peer.heartbeats:
                    self._timeouts.note_progress(now)
                peer.heartbeats, peer.step = heartbeats, step
            case {"kind": "ready"}:
                member.is_ready = True
            case {"kind": "answer", "passed": int(passed)}:
                if self._vote is not None:
                    self._vote.record(member.number, passed)
            case {"kind": "hold", "generation": int(generation)}:
                member.holds = member.holds or generation == self._membership.generation
                self._timeouts.note_progress(now)
            case {"kind": "broken", "generation": int(generation)}:
                if generation == self._membership.generation and not self._membership.is_interrupted:
                    self._membership.is_interrupted = True
                    self._interrupt()
            case {"kind": "leave", "reason": str(reason)}:
                self._leave(peer, member, reason)
            case {"kind": "stop", "reason": str(reason)}:
                self.stop(reason)
            case {"kind": "restart"} if member.trains:
                self._restart_all(peer)
            case {"kind": "bye", "code": int(code)}:
                peer.has_finished = True
                if self.exit_code is None and member.trains:
                    self._decide_exit_code(code)
            case {"kind": "end", "code": int(code)} if member.trains and code <= _MAX_EXIT_CODE:
                self._end(code)

    def _leave(self, peer: Peer, member: Member, reason: str, *, may_wait: bool = False) -> None:
        if not member.trains:
            self._dismiss(peer)
            return
        member.is_leaving, member.may_wait = True, may_wait
        if self._membership.can_lose_state:
            self.stop(reason)
        else:
            self._say(f"{peer.name} leaves: {reason}")

    # Losses.

    def _remove(self, peer: Peer, why: str) -> None:
        self.peers.disconnect(peer)
        member = peer.member
        if member is None or member.number not in self._membership.members:
            return
        interrupts = self._membership.remove(member.number)
        if peer.has_finished or self.exit_code is not None:
            return
        at_step = "" if peer.step is None else f" at step {peer.step}"
        self._say(f"lost {peer.name}{at_step}: {why}")
        if peer.worker is not None:
            self._on_removed(peer.worker)
        if interrupts:
            self.lost += 1
            self._interrupt()

    def _interrupt(self) -> None:
        """Ends the current generation at once: its reductions, or its rendezvous, cannot complete."""
        self._vote = None
        self._timeouts.note_progress(self._clock())  # The others could not make progress, and now have to hold.
        if self._rendezvous is not None:
            self._rendezvous.fail()
        self.peers.send_training({"kind": "cut", "generation": self._membership.generation})

    def _restart_all(self, peer: Peer) -> None:
        """Restarts all members: a loss before the first step or after the last, where ranks cannot change."""
        if self.exit_code is not None:
            peer.connection.send({"kind": "end", "code": self.exit_code})
            return
        if self._membership.generation == 0:
            return
        self._num_restarts += 1
        if self._num_restarts > _MAX_RESTARTS:
            self._say(f"a member was lost before the first step or after the last {self._num_restarts} times.")
            self._end(1)
            return
        self._say("a member was lost before the first step or after the last: all start again")
        for each in self.peers:
            if each.member is not None:
                each.connection.send({"kind": "restart"})
                each.member = None
        self._membership = Membership(self._membership.minimum, self._membership.maximum)
        self._interrupt()

    def _check_timeouts(self, now: float) -> None:
        for peer, why in self._timeouts.silent(self.peers, now):
            self._remove(peer, why)
        if self._membership.all_hold:
            return
        stalled = self._timeouts.stalled(self.peers.training, is_interrupted=self._membership.is_interrupted, now=now)
        if isinstance(stalled, NoProgress):
            self._say(f"no member made progress for {stalled.timeout_s:g} s. The job ends.")
            self._end(1)
            return
        for peer, why in stalled:
            self._remove(peer, why)

    # Generations.

    def _advance(self, now: float) -> None:
        """Makes the current generation hold if necessary, or begins the next one."""
        if self.exit_code is not None:
            return
        membership = self._membership
        if membership.training and not membership.all_hold:
            self._waits_since = None
            wants_pause = self._stop_reason is not None or membership.must_pause
            if wants_pause and not membership.is_interrupted and self._vote is None:
                self._propose()
            elif self._vote is not None and (check := self._vote.decision()) is not None:
                self.peers.send_training({"kind": "decision", "check": check})
            return
        is_first = membership.generation == 0
        if not is_first and not membership.training:
            self._say("all members were lost, and the state of the run with them. Restart the job to resume it.")
            self._end(1)
            return
        if self._waits_since is None:
            self._waits_since = now
        has_waited = now - self._waits_since > (_START_S if is_first else self._timeout_s)
        num_candidates = len(membership.candidates)
        if is_first:
            if num_candidates >= self._start_size or (has_waited and membership.can_form):
                self._begin()
        elif self._stop_reason is not None:
            self._begin(is_last=True)
        elif membership.can_form:
            self._begin()
        elif has_waited:
            self._stop_reason = (
                f"{num_candidates} member(s) have waited {self._timeout_s:g} s for at least {membership.minimum}"
            )
            self._begin(is_last=True)

    def _propose(self) -> None:
        self._vote = StopVote(len(self._membership.training))
        self._vote.open()
        stops = self._stop_reason is not None
        reason = self._stop_reason or "the members of the job change"
        self.peers.send_training({"kind": "propose", "reason": reason, "stops": stops})

    def _begin(self, *, is_last: bool = False) -> None:
        before = {member.number for member in self._membership.training}
        chosen, leaving = self._membership.form()
        self._vote = None
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous = Rendezvous(self._host, self._token)
        self._rendezvous.start()
        generation = Generation(
            number=self._membership.generation,
            members=tuple(member.number for member in chosen),
            hosts=tuple(member.host for member in chosen),
            address=self._host,
            port=self._rendezvous.port,
            is_last=is_last,
        )
        self._timeouts.note_progress(self._clock())
        new = [member.number for member in chosen if member.number not in before]
        joined = f", {len(new)} of them new" if before and new else ""
        self._say(f"generation {generation.number}: {len(chosen)} rank(s){joined}")
        for peer in self.peers:
            if peer.member in leaving:
                self._dismiss(peer)
            elif peer.member in chosen:
                peer.connection.send({"kind": "begin", **generation.message()})

    # The end.

    def _decide_exit_code(self, code: int) -> None:
        """A member has completed its work, or failed as all do: the others have too, or are about to."""
        self.exit_code = code or (StoppedEarly.exit_code if self._stop_reason is not None else 0)
        for peer in self.peers:
            if peer.member is not None and not peer.member.trains:
                peer.connection.send({"kind": "end", "code": self.exit_code})

    def _end(self, code: int) -> None:
        """Ends all members at once."""
        if self.exit_code is None:
            self.exit_code = code
            for peer in self.peers:
                peer.connection.send({"kind": "end", "code": code})

    def _dismiss(self, peer: Peer) -> None:
        peer.has_finished = True
        # One that trains disconnects from the others together with them.
        peer.connection.send({"kind": "dismissed"} if peer.trains else {"kind": "end", "code": 0})
        if peer.member is not None:
            self._membership.members.pop(peer.member.number, None)

    def _send_heartbeats(self, now: float) -> None:
        if now < self._heartbeat_at:
            return
        self._heartbeat_at = now + HEARTBEAT_S
        for peer in self.peers:
            if peer.member is not None:
                peer.connection.send({"kind": "heartbeat"})


def _holds_usable_numbers(message: Message) -> bool:
    return all(0 <= value <= _MAX_NUMBER for value in message.values() if isinstance(value, int | float))
