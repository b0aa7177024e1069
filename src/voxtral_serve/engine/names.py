"""Names that configs use: of architectures, of the attention backend and of drafters. Standard library only."""

STOCK = "VoxtralRealtimeGeneration"  # vLLM's own model
HUGGING_FACE = "VoxtralRealtimeForConditionalGeneration"  # the same, from config.json
ENCODE_ONCE = "VoxtralRealtimeEncodeOnce"
REALTIME = (STOCK, HUGGING_FACE, ENCODE_ONCE)
ATTENTION = "voxtral_serve.engine.attention_backend.PagedAttentionBackend"  # the backend CUSTOM
DRAFTER = "voxtral_serve.drafter.Drafter"  # `model` of speculative_config
PAD_DRAFTER = "voxtral_serve.drafter.PadDrafter"
DRAFT_HEAD = "draft_head"  # key of additional_config: a drafter's file, absolute or below the checkpoint's directory
DRAFT_FILE = "draft/head.safetensors"  # the same without that key
# Options that split one model over several workers, which the encode-once model refuses
SPLITS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)
UNSPLIT = (
    f"expected 1 for {ENCODE_ONCE}, because one worker holds the audio rows. For several GPUs, start one server on each"
)
