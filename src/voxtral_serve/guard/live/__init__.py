"""Live sessions of an API process: audio from a WebSocket to vLLM's engine, text from the engine to the WebSocket.

    vllm_dialect   the events on the socket, as vLLM's own server has them
    session        one text: audio in, pieces of text out, whatever dialect the socket speaks
    cuts           where an endless text goes over from one request of the engine to the next
    link           messages and requests to the engine, of all sessions of this process
    service        the sockets of this process: idle ones, those that nobody reads, and the end of the server

`whole_clips` answers the same WebSocket on a server without live sessions; `metrics` has what /metrics says of them.
"""
