"""The audio rows of the encode-once model in vLLM's Model Runner V2, which supports model state and numbers requests.

vLLM 0.32.0 uses this runner if Triton is installed. 0.20.0 has an early form, off by default, which is not used.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.states import RequestState

from voxtral_serve.engine.audio_rows import NO_AUDIO, AudioRows
from voxtral_serve.engine.draft_stream import DraftTokens
from voxtral_serve.engine.live_audio import LivePart
from voxtral_serve.engine.live_encoder import LiveEncoder
from voxtral_serve.engine.session import upload_delay


class RowsState(DefaultModelState):
    supports_prompt_embeds = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: AudioRows = self.model.audio_rows
        self.live: LiveEncoder | None = self.model.live
        self.drafts: DraftTokens | None = self.model.drafts
        self.parts: Mapping[str, LivePart] = {}  # live audio of this step; the worker sets it
        self.begun: list[tuple[int, str, int | None]] = []  # slot, clip and delay of uploads

    @torch.inference_mode()
    def encode_ahead(self, scheduler_output: SchedulerOutput) -> None:
        """Encode the clips of a step before vLLM prepares its inputs, which takes the host as long as a clip takes the
        GPU. `prepare_inputs_embeds` finds them encoded. With LoRA or an encoder cache of several servers, vLLM does
        something of its own before it encodes: then nothing happens here."""
        if self.vllm_config.lora_config is not None or self.vllm_config.ec_transfer_config is not None:
            return
        for freed in scheduler_output.free_encoder_mm_hashes:  # as vLLM does next, so that less memory is in use
            self.encoder_cache.free_encoder_cache(freed)
        for new in scheduler_output.scheduled_new_reqs:
            self.encoder_cache.add_request(new.req_id, new.mm_features)
        self.execute_mm_encoder(scheduler_output.scheduled_encoder_inputs)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Called when a request starts, or restarts after preemption. Its clip is encoded in the same step."""
        request, part = new_req_data.req_id, self.parts.get(new_req_data.req_id)
        if self.drafts is not None and not new_req_data.mm_features:
            self.drafts.clear(req_index)
        if part is not None:
            assert self.live is not None
            if (live_slot := self.live.begin(request)) is not None:
                self.rows.put_live(req_index, live_slot, part.delay)
            else:  # `encode` finds the fault
                self.rows.put_nothing(req_index)
        elif not new_req_data.mm_features:
            self.rows.put_nothing(req_index)
            self.rows.faults[request] = NO_AUDIO
        delay = upload_delay(new_req_data.sampling_params)
        self.begun += [(req_index, clip.identifier, delay) for clip in new_req_data.mm_features]

    def remove_request(self, req_id: str) -> None:
        if self.live is not None:
            self.live.end(req_id)

    def dummy_inputs_embeds(self, num_tokens: int) -> None:
        return None

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        return {}

    def prepare_inputs_embeds(
        self, scheduled_encoder_inputs: dict[str, list[int]], input_batch: InputBatch, req_states: RequestState
    ) -> None:
        """Return no embeddings, because the model gets token ids. Store the audio rows that it adds to them."""
        # Those that `encode_ahead` has not: an output that vLLM has freed since, or a step that the worker did not see.
        self.execute_mm_encoder(scheduled_encoder_inputs)
        for slot, clip, delay in self.begun:
            rows = self.encoder_cache.encoder_outputs[clip]
            self.rows.put(slot, rows, delay)
            self.rows.observe(clip, rows)
            if self.drafts is not None:
                self.drafts.begin(slot, len(rows), delay)
        self.begun.clear()
        if self.live is not None and self.parts:
            self.rows.faults |= self.live.encode(self.parts)
            if self.drafts is not None:
                self.drafts.begin_tails(self.parts, self.live.slot_of, req_states.req_id_to_index)
        tokens, slots = input_batch.num_tokens, self.rows.slot[: input_batch.num_tokens]
        if tokens == input_batch.num_reqs:
            slots.copy_(input_batch.idx_mapping)
            return
        ends = input_batch.query_start_loc[1 : input_batch.num_reqs + 1]
        counts = ends - input_batch.query_start_loc[: input_batch.num_reqs]
        slots.copy_(torch.repeat_interleave(input_batch.idx_mapping, counts, output_size=tokens))
