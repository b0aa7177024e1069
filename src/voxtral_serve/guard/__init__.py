"""ASGI middleware between the network and vLLM's API server; configs name it `middleware: voxtral_serve.guard.Guard`.

    upload: form -> fields -> clip -> pieces -> ask (vLLM, a request for each piece) -> answer
    chat:   chat -> vLLM

`middleware` takes each request, `body` receives its body, `upload` runs these stages in order, and `server` reads and
changes the live objects of vLLM's server. Each stage gets the values of those before it and calls none of them;
`errors`, `limits`, `asgi` and `form`, which also writes vLLM's forms, are below the stages.
"""

from voxtral_serve.guard.middleware import Guard

__all__ = ["Guard"]
