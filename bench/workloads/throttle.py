"""A proxy of a Redis that limits the bytes a second of answers.

`python -m bench.workloads.throttle LISTEN TARGET RATE`
"""

from __future__ import annotations

import asyncio
import sys

_PIECE = 64 * 1024


class Throttle:
    """Passes bytes between Unix sockets; all that comes back shares `rate` bytes a second."""

    def __init__(self, target: str, rate: float) -> None:
        self._target, self._rate = target, rate
        self._free_at = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        there, back = await asyncio.open_unix_connection(self._target, limit=_PIECE)
        await asyncio.gather(self._pass(reader, back), self._slowly(there, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def _slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while piece := await reader.read(_PIECE):
            self._free_at = max(self._free_at, loop.time()) + len(piece) / self._rate
            if (wait := self._free_at - loop.time()) > 0:
                await asyncio.sleep(wait)
            writer.write(piece)
            await writer.drain()
        writer.close()


async def main(listen: str, target: str, rate: float) -> None:
    """Serve for ever."""
    throttle = Throttle(target, rate)
    server = await asyncio.start_unix_server(throttle.serve, listen, limit=_PIECE)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
