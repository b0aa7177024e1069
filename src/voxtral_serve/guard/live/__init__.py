"""Live sessions of an API process: audio from a WebSocket to vLLM's engine, text from the engine to the WebSocket.

    handshake       which protocol a WebSocket speaks, its key, the web page that it comes from
    socket          a connection from its acceptance to its close; says how an event travels
    events          what a client sends, as types: one message of JSON
    codec           what a codec does: commands of a client's events, and the protocol's events of outputs;
                    vllm_codec, openai_codec and mistral_codec are the three, openai_settings is OpenAI's `session`
    conversation    what commands do to a session, and which outputs its text has
    items           the text of one turn: deltas, words with times, logprobs
    turn_audio      the audio of a session, cut into turns; turns finds them, voices has the probabilities of speech
    session         audio in, pieces of text out, whatever protocol the socket speaks
    cuts            where an endless text goes over from one request of the engine to the next
    link            messages and requests to the engine, of all sessions of this process
    service         the sockets of this process: how many, how many bytes wait, idle and vanished ones, the end
    endings         why a connection is closed from this side

Codecs import neither the socket nor the session; the socket imports codec, conversation and session, which imports the
link. `whole_clips` answers the same WebSocket on a server without live sessions, and `metrics` has what /metrics says
of them.
"""
