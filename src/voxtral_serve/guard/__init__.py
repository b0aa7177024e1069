"""ASGI middleware between the network and vLLM's API server; configs name it `middleware: voxtral_serve.guard.Guard`.

    upload: form -> fields -> budget, decoders -> pieces -> transcriber (vLLM's engine client) -> answer
    chat:   chat -> budget, decoders -> vLLM's application
    live:   live.handshake -> live.socket -> live.session -> vLLM's engine client
    speech: speech.fields -> vLLM-Omni's application -> speech.answer

`middleware` handles each request, `body` receives its body, `transcription` runs the stages in order, `server` reads
and changes the live objects of vLLM's server. A stage gets the results of the earlier stages and imports no later one.
"""

from voxtral_serve.guard.middleware import Guard

__all__ = ["Guard"]
