"""ASGI middleware between the network and vLLM's API server; configs name it `middleware: voxtral_serve.guard.Guard`.

    upload: form -> fields -> clip -> pieces -> ask (vLLM, a request for each piece) -> answer
    chat:   chat -> vLLM

`middleware` handles each request, `body` receives its body, `upload` runs the stages in order, and `server` reads and
changes the live objects of vLLM's server. A stage gets the results of the earlier stages and does not call them. All
stages may use `errors`, `limits`, `asgi` and `form`, which also writes vLLM's forms.
"""

from voxtral_serve.guard.middleware import Guard

__all__ = ["Guard"]
