"""Server-sent events: `EventStream`, a response that ends its work when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparseserve_jax.server.disconnect import ClientGone, while_connected
from sparseserve_jax.server.errors import APIError, dumps

logger = logging.getLogger("sparseserve.server")

DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    """One event."""
    return f"data: {dumps(content)}\n\n".encode()


class EventStream(Response):
    """Sends events as they come, then `[DONE]`. An `APIError` on the way becomes an event, since the status is out.

    Args:
        events: of `event`.
        close: called at the end, whatever that is.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._events, self._close = events, close
        self.background = None
        self.status_code = 200
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends everything, unless the client goes."""
        try:
            await while_connected(self._send_all(send), receive)
        except (ClientGone, OSError):
            logger.info("the client closed a stream")
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for part in self._events:
                await _send_part(send, part)
        except APIError as error:
            await _send_part(send, event(error.body()))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.error("a stream failed: %s", error, exc_info=error)
            await _send_part(send, event(APIError(500, "the server failed; see its log").body()))
        await _send_part(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})
