"""Live sessions of an API process: audio from a WebSocket to vLLM's engine, text from the engine to the WebSocket.

    handshake        which protocol a WebSocket speaks, its key, the web page that it comes from
    events           what a client sends, as types: one message of JSON
    socket           a connection from its acceptance to its close, whatever protocol it speaks
    vllm_dialect     the events of vLLM's own server: one text after the other
    turn_dialect     what protocols share whose connection is one session of several turns
    openai_dialect   the events of OpenAI's Realtime transcription; openai_settings is its `session`
    mistral_dialect  the events of Mistral's realtime transcription
    items            the text of one turn: deltas, words with times, logprobs
    turn_audio       the audio of a session, cut into turns; turns finds them, voices has the probabilities of speech
    session          audio in, pieces of text out, whatever dialect the socket speaks
    cuts             where an endless text goes over from one request of the engine to the next
    link             messages and requests to the engine, of all sessions of this process
    service          the sockets of this process: how many, how many bytes wait, idle and vanished ones, the end

`whole_clips` answers the same WebSocket on a server without live sessions; `metrics` has what /metrics says of them.
"""
