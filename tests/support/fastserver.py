"""A transcription server that answers at once, to be run in a process of its own: prints its port.

It looks at no more of a request than its length, so that the cost of a client can be seen beside it.
"""

import asyncio

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
STREAM = b'data: {"choices":[{"delta":{"content":"alpha "}}]}\n\ndata: {"choices":[{"delta":{"content":"beta"}}]}\n\n'
STREAM += b"data: [DONE]\n\n"


class FastServer(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.received = transport, bytearray()

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.received[:end]).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(self.received) < end + 4 + length:
                return
            streamed = b'name="stream"' in self.received
            del self.received[: end + 4 + length]
            kind, body = b"application/json", b'{"text": "alpha beta"}'
            if head.startswith(b"get /v1/models"):
                body = b'{"data": [{"id": "fast"}]}'
            elif streamed:
                kind, body = b"text/event-stream", STREAM
            self.transport.write(HEAD % (kind, len(body)) + body)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(FastServer, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve())
