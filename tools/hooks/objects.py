"""What the source of voxtral-serve does not say of the objects of vLLM that it uses: declared, and checked by a test.

A value is a path of `source`: of a class, for its instances, or `type PATH` for the class itself. Several alternatives
are a tuple: the first one that has the attribute counts. "" is not an object of vLLM.
"""

V1, V2 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
REQUEST, OUTPUT = "vllm.v1.request:Request", "vllm.v1.core.sched.output:SchedulerOutput"
ENGINE = "vllm.v1.engine.async_llm:AsyncLLM"
INPUTS = "vllm.v1.engine.input_processor:InputProcessor"
TOKENIZER = "vllm.tokenizers.mistral:MistralTokenizer"
CONFIG, MODEL_CONFIG = "vllm.config:VllmConfig", "vllm.config:ModelConfig"
OPTIONS = ("vllm.engine.arg_utils:AsyncEngineArgs", "vllm.entrypoints.launchers.cli_args:FrontendArgs")
QUEUE = "vllm.v1.core.sched.request_queue:RequestQueue"
SPEECH = "vllm.entrypoints.speech_to_text"
TRANSCRIPTION = f"{SPEECH}.transcription.serving:OpenAIServingTranscription"
MODELS = "vllm.entrypoints.openai.models.serving:OpenAIServingModels"
SPEECH_MODEL = "type vllm.model_executor.models.interfaces:SupportsTranscription"
STEP_OUTPUT = ("vllm.v1.outputs:ModelRunnerOutput", "vllm.v1.outputs:AsyncModelRunnerOutput")
N_GRAMS = "vllm.v1.spec_decode.ngram_proposer_gpu:NgramProposerGPU"

Declared = str | tuple[str, ...]

# By module of voxtral_serve, or by function of one: names of parameters and variables that are typed `Any`, and
# attributes of voxtral-serve's own objects
NAMES: dict[str, dict[str, Declared]] = {
    "shims": {"loader": ""},
    "shims.get_hf_processor": {"self": "vllm.model_executor.models.transformers.multimodal:MultiModalProcessingInfo"},
    "shims._get_num_multimodal_tokens": {"self": ""},
    "check.device": {"current": "vllm.platforms.interface:Platform", "values": OPTIONS},
    "check.gate": {"values": OPTIONS},
    "check.kv_cache": {"dtype": ""},
    "check.memory": {"values": OPTIONS},
    "check.options": {
        "speculative_config": "",
        "parser": "vllm.utils.argparse_utils:FlexibleArgumentParser",
        "values": OPTIONS,
    },
    "check.parallel": {"values": OPTIONS},
    "check.plan": {"values": OPTIONS},
    "engine.clip_length": {"model_config": MODEL_CONFIG, "audio": "", "tokenizer": TOKENIZER},
    "engine.drafter": {"input_batch": "vllm.v1.worker.gpu.input_batch:InputBatch"},
    "engine.encode_once": {"hf_inputs": ""},
    "engine.live_audio": {"scheduled": OUTPUT},
    "engine.live_scheduler": {
        "vllm_config": CONFIG,
        "request": REQUEST,
        "scheduler_output": OUTPUT,
        "model_runner_output": STEP_OUTPUT,
        **dict.fromkeys(("message", "name", "delay"), ""),  # of the API server
    },
    "engine.model_runner": {
        "runner_class": f"type {V1}",
        "runner": V1,
        "scheduled": OUTPUT,
        "scheduler_output": OUTPUT,
        "request": "vllm.v1.core.sched.output:NewRequestData",
    },
    "engine.session": {"audio": ""},
    "engine.steps": {"worker": "vllm.v1.worker.gpu_worker:Worker", "scheduled": OUTPUT, "start": "", "grammar": ""},
    "engine.worker": {"runner": V2, "scheduler_output": OUTPUT, "grammar_output": "", "output": STEP_OUTPUT},
    "guard.access": {"state": "state", "app": ""},
    "guard.live.link": {"client": ENGINE},
    "guard.live.session._outputs": {"output": "vllm.outputs:RequestOutput", "answer": "vllm.outputs:CompletionOutput"},
    "guard.transcriber": {
        "client": ENGINE,
        "state": "state",
        "handler": TRANSCRIPTION,
        "models": MODELS,
        "output": "vllm.outputs:RequestOutput",
        "answer": "vllm.outputs:CompletionOutput",
        "prompt": "",
        "params": "",
        "adapter": "",
        "self.client": ENGINE,
        "self.models": MODELS,
        "speech.model": SPEECH_MODEL,
        "self.tasks[task].model": SPEECH_MODEL,
        "self.tasks[request.form.task].model": SPEECH_MODEL,
    },
    "guard.transcriber._text_of": {"model": SPEECH_MODEL},
    "transcript.logprobs": {"answer": "vllm.outputs:CompletionOutput"},
    # Objects of vLLM-Omni
    "guard.speech.facts": {"state": "", "app": "", "engine": ""},
    "guard.speech.stages": {"client": "", "server": ""},
    "guard.server": {"state": "state", "app": "", "config": CONFIG},
    "patches.clip_end": {"record": "", "processor": INPUTS, "request": "vllm.v1.engine:EngineCoreRequest"},
    "patches.clip_end.process_inputs": {"self": INPUTS},
    "patches.drain.__init__": {"self": "vllm.v1.utils:APIServerProcessManager"},
    "patches.drain.shutdown": {"self": "vllm.v1.utils:APIServerProcessManager"},
    "patches.live_audio.live": {"self": "vllm.v1.engine.core:EngineCore"},
    "patches.live_server": {"engine": ENGINE, "target": "", "protocol": ""},
    "patches.ngram_pads": {
        "stock": f"type {N_GRAMS}",
        "vllm_config": CONFIG,
        "device": "",
        "runner": V1,
        "num_tokens_no_spec": "",
    },
    "patches.step_graphs.both": {"self": "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager"},
}

# Patches whose `module` is no module
TARGETS: dict[str, Declared] = {
    "FileLimit": "state",
    "GracefulStop": "",  # uvicorn's
    "HeaderLimit": "",
    "ConnectionHeaders": "",
    "ClientWatch": "",
    "NoCompression": "",
}

# Classes of voxtral_serve that are put before a class of vLLM at run time
MIXED_INTO = {"AudioRowsRunner": (V1,)}

# What an attribute is, or what a function returns, where vLLM's annotations do not say it. "[PATH]" are several.
TEXT, MISTRAL = "vllm.model_executor.models.voxtral", "vllm.model_executor.models.mistral"
REALTIME = "vllm.model_executor.models.voxtral_realtime"
TYPES: dict[str, Declared] = {
    "state:engine_client": ENGINE,
    "state:openai_serving_models": MODELS,
    "state:openai_serving_transcription": TRANSCRIPTION,
    "state:args": OPTIONS,
    "state:server": "",  # uvicorn's
    f"{TRANSCRIPTION}.asr_config": "vllm.config:SpeechToTextConfig",
    "vllm.config:VllmConfig.additional_config": "",
    "vllm.config.vllm:VllmConfig.additional_config": "",
    "vllm.entrypoints.launchers.cli_args:make_arg_parser": "vllm.utils.argparse_utils:FlexibleArgumentParser",
    "vllm.model_executor.layers.layernorm:RMSNorm.weight": "",
    "vllm.model_executor.models.utils:init_vllm_registered_model": f"{MISTRAL}:MistralForCausalLM",
    f"{TEXT}:VoxtralProcessingInfo.get_tokenizer": TOKENIZER,
    f"{MISTRAL}:MistralForCausalLM.model": f"{MISTRAL}:MistralModel",
    f"{MISTRAL}:MistralModel.layers": f"[{MISTRAL}:MistralDecoderLayer]",
    f"{REALTIME}:VoxtralRealtimeMultiModalProcessor.info": f"{TEXT}:VoxtralProcessingInfo",
    f"{REALTIME}:VoxtralRealtimeGeneration.config": "",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.CUSTOM": (
        "vllm.v1.attention.backends.registry:AttentionBackendEnum"
    ),
    "vllm.third_party.pynvml:nvmlDeviceGetMemoryInfo": "",
    "vllm.tokenizers:cached_tokenizer_from_config": TOKENIZER,
    "vllm.utils.argparse_utils:FlexibleArgumentParser.parse_args": OPTIONS,
    "vllm.v1.core.sched.scheduler:Scheduler.waiting": QUEUE,
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler.waiting": QUEUE,
    "vllm.v1.engine.async_llm:AsyncLLM.engine_core": "vllm.v1.engine.core_client:AsyncMPClient",
    f"{ENGINE}.renderer": "vllm.renderers.base:BaseRenderer",
    "vllm.v1.engine.core:EngineCore.scheduler": "",  # `live_scheduler`, whose `live` is called
    f"{INPUTS}.tokenizer": TOKENIZER,
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.model": "",
    "vllm.v1.worker.gpu_worker:Worker.model_runner": V2,
    f"{V2}.model_state": "",  # `RowsState`
}

# Names that code makes at run time, by the expression that does
LIMITS = tuple(f"vllm.v1.core.sched.scheduler:Scheduler.max_num_{each}_reqs" for each in ("running", "active"))
DYNAMIC: dict[str, tuple[str, ...]] = {
    "check.clip: getattr(envs, name, None)": (
        "vllm.envs:VLLM_MAX_AUDIO_CLIP_FILESIZE_MB",
        "vllm.envs:VLLM_MAX_AUDIO_DECODE_DURATION_S",
        "vllm.envs:VLLM_MAX_AUDIO_DECODE_BYTES",
    ),
    "engine.live_scheduler: getattr(self, name)": LIMITS[:1],
    "engine.live_scheduler: setattr(self, name, most - len(waiting))": LIMITS[:1],
    "engine.live_scheduler: setattr(self, name, most)": LIMITS[:1],
    "engine.live_scheduler: hasattr(self, name)": LIMITS,
    "engine.model_runner: getattr(runner_class, name, None)": tuple(
        f"{V1}.{name}" for name in ("_prepare_inputs", "_preprocess", "_dummy_run", "_check_and_update_cudagraph_mode")
    ),
    "guard.server: getattr(state, f'openai_serving_{name}', None)": (
        "state:openai_serving_realtime",
        "state:openai_serving_chat",
    ),
    "guard.transcriber: getattr(client, name)": tuple(
        f"{ENGINE}.{name}" for name in ("generate", "errored", "renderer")
    ),
    "guard.transcriber: getattr(state, name, None)": (
        "state:openai_serving_transcription",
        "state:openai_serving_translation",
    ),
    "patches.drain: getattr(manager, method)": (
        "vllm.v1.utils:APIServerProcessManager.__init__",
        "vllm.v1.utils:APIServerProcessManager.shutdown",
    ),
    # voxtral-serve's own names
    "engine.live_audio: getattr(scheduled, STEP, LiveStep())": (),
    "engine.live_scheduler: getattr(model_runner_output, FAULTS, {})": (),
    "engine.worker: setattr(output, FAULTS, faults)": (),
    "patches.live_audio: hasattr(module.EngineCore, UTILITY)": (),
    "patches.live_audio: setattr(module.EngineCore, UTILITY, live)": (),
    "patches.live_audio: hasattr(module, name)": (
        "vllm.v1.engine.core:EngineCore",
        "vllm.v1.engine.core:EngineCoreProc",
    ),
    "patches.ngram_pads: getattr(stock, name)": tuple(
        f"{N_GRAMS}.{each}" for each in ("__init__", "propose", "load_model")
    ),
    "patches.ngram_pads: hasattr(stock, name)": (),
    "patches.step_graphs: hasattr(stock, MARK)": (),
    "patches.step_graphs: setattr(stock, MARK, True)": (),
}

# Asked for by a probe that refuses to go on without them
NEEDED = ("vllm.v1.engine.core:EngineCoreProc._handle_client_request",)

# What is used, and vLLM's source does not define where it is looked for
ELSEWHERE = {
    "vllm.engine.arg_utils:AsyncEngineArgs.grpc": "an argument that `make_arg_parser` adds",
    "vllm.engine.arg_utils:AsyncEngineArgs.model_tag": "an argument that `vllm serve` adds",
}

# Modules that moved, where voxtral-serve looks in both places or has an object of the module's class
ALSO_IN = {
    "vllm.entrypoints.launchers.cli_args": ("vllm.entrypoints.openai.cli_args", "vllm.entrypoints.common.cli_args"),
    f"{SPEECH}.transcription.serving": ("vllm.entrypoints.openai.speech_to_text.serving",),
    "vllm.v1.core.kv_cache_utils": ("vllm.v1.core.kv_cache_planning",),
}
