"""ASGI middleware between the network and vLLM's API server; configs name it `middleware: voxtral_serve.guard.Guard`.

    upload: form -> fields -> decoders -> pieces -> transcriber (vLLM's engine client, a prompt for each piece) -> answer
    chat:   chat -> decoders -> chat -> vLLM's route

`middleware` handles each request, `body` receives its body, `transcription` runs the stages in order, and `server` reads
and changes the live objects of vLLM's server. All stages may use `errors`, `limits` and `asgi`.
"""

from voxtral_serve.guard.middleware import Guard

__all__ = ["Guard"]
