"""`EngineThread`: the thread that the engine lives in. Requests come by an inbox, results go to the event loop.

It never waits for the loop, and the loop never waits for it. A step that fails is recovered from (`Engine.recover`); if
that is impossible the engine is dead, and says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from sparseserve_jax.engine import Engine
from sparseserve_jax.request import RequestOutput
from sparseserve_jax.server.metrics import Metrics, read_state
from sparseserve_jax.server.tickets import Piece, Ticket
from sparseserve_jax.validation import RequestError

logger = logging.getLogger("sparseserve.server")

MAX_FAILED_STEPS_IN_A_ROW = 16
"""More than it takes to find one request among thousands by halving; then it is not a request that makes steps fail."""

EngineStatus = Literal["loading", "ready", "dead", "stopped"]


@dataclasses.dataclass(frozen=True)
class _Add:
    tickets: Sequence[Ticket]


@dataclasses.dataclass(frozen=True)
class _Abort:
    request_ids: Sequence[str]


class _Stop:
    pass


class EngineThread:
    """Builds an engine and runs it.

    Args:
        build: makes the engine, in the thread; it takes seconds to minutes.
        metrics: gets what every step gave.
        warm_up: compile everything before the first request.

    Attributes:
        status: "loading" until the engine is warm, then "ready"; "dead" when it cannot go on.
        problem: why it is dead.
    """

    def __init__(self, build: Callable[[], Engine], metrics: Metrics, *, warm_up: bool) -> None:
        self._build, self._metrics, self._warm_up = build, metrics, warm_up
        self._engine: Engine | None = None
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Stop] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}  # of the engine's thread
        self._num_failed_in_a_row = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_status: Callable[[EngineStatus], None] = lambda status: None
        self.status: EngineStatus = "loading"
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- for the event loop ------------------------------------------------------------------------------------------

    def start(self, on_status: Callable[[EngineStatus], None]) -> None:
        """Starts the thread; `on_status` is called in the running event loop whenever the status changes."""
        self._loop, self._on_status = asyncio.get_running_loop(), on_status
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine, for what any thread may use: `prepare`, tokenizer, configuration."""
        assert self._engine is not None, "the engine is still loading"
        return self._engine

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Hands prompts to the engine; their pieces come to their queues, until each continuation has ended."""
        self._inbox.put(_Add(tickets))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends prompts within a step, wherever they are."""
        self._inbox.put(_Abort(request_ids))

    async def stop(self) -> None:
        """Ends the thread after its present step; what is unfinished is dropped."""
        self._inbox.put(_Stop())
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, 60)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._engine = self._build()
            for program in engine.warm_up() if self._warm_up else ():
                logger.debug("warm-up: %s", program)
                if not self._inbox.empty():  # nobody submits before the engine is ready: it is told to stop
                    return
            self._metrics.note_state(read_state(engine))
            self._set_status("ready")
            while self._take_commands(engine):
                if engine.has_unfinished():
                    self._deliver(self._step(engine))
                self._metrics.note_state(read_state(engine))
            self._set_status("stopped")
        except BaseException as error:
            logger.critical("the engine is dead: %s: %s", type(error).__name__, error, exc_info=error)
            self.problem = error
            self._set_status("dead")
            self._serve_no_more(f"the engine is dead: {type(error).__name__}: {error}")

    def _take_commands(self, engine: Engine) -> bool:
        """Carries out what has come, waiting for it if there is nothing else to do; False = stop."""
        wait = not engine.has_unfinished()
        while wait or not self._inbox.empty():
            command = self._inbox.get()
            wait = False
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Abort):
                for request_id in command.request_ids:
                    engine.abort(request_id)
            else:
                self._add(engine, command.tickets)
        return True

    def _add(self, engine: Engine, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            try:
                engine.add_prepared(ticket.prepared)
            except RequestError as error:
                self._send([(ticket, piece) for piece in ticket.failed(str(error))])
            else:
                self._tickets[ticket.request_id] = ticket

    def _step(self, engine: Engine) -> list[RequestOutput]:
        try:
            outputs = engine.step()
        except Exception as error:
            self._num_failed_in_a_row += 1
            logger.error("a step of the engine failed: %s: %s", type(error).__name__, error, exc_info=error)
            if self._num_failed_in_a_row > MAX_FAILED_STEPS_IN_A_ROW:
                raise
            engine.recover()
            return []
        self._num_failed_in_a_row = 0
        return outputs

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        self._metrics.note_outputs(outputs)
        pieces = []
        for output in outputs:
            ticket = self._tickets.get(output.request_id)
            if ticket is None:
                continue
            piece = ticket.take(output)
            if piece is not None:
                pieces.append((ticket, piece))
            if ticket.is_ended:
                del self._tickets[output.request_id]
        self._send(pieces)

    def _send(self, pieces: Sequence[tuple[Ticket, Piece]]) -> None:
        if pieces:
            self._call_loop(lambda: [ticket.queue.put_nowait(piece) for ticket, piece in pieces])

    def _set_status(self, status: EngineStatus) -> None:
        self.status = status
        self._call_loop(lambda: self._on_status(status))

    def _call_loop(self, call: Callable[[], object]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            logger.debug("the event loop is closed; nobody is there to be told")

    def _serve_no_more(self, reason: str) -> None:
        """Answers everybody who is here or comes, until the process ends."""
        self._send([(ticket, piece) for ticket in self._tickets.values() for piece in ticket.failed(reason)])
        self._tickets.clear()
        while not isinstance(command := self._inbox.get(), _Stop):
            if isinstance(command, _Add):
                self._send([(ticket, piece) for ticket in command.tickets for piece in ticket.failed(reason)])
