"""The architectures of Voxtral Realtime, as `architectures` of a config names them. Standard library only."""

STOCK = "VoxtralRealtimeGeneration"  # vLLM's own model
HUGGING_FACE = "VoxtralRealtimeForConditionalGeneration"  # the same, from config.json
ENCODE_ONCE = "VoxtralRealtimeEncodeOnce"
REALTIME = (STOCK, HUGGING_FACE, ENCODE_ONCE)
ATTENTION = "voxtral_serve.engine.attention_backend.PagedAttentionBackend"  # the backend CUSTOM
