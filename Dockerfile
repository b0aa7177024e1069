# Voxtral served by vLLM's official image: patches, plugin and guard put in, what reads audio files added.
#
#   docker build -t vllm-voxtral .
#   docker build --build-arg VLLM=0.20.0 -t vllm-voxtral .          the contest's vLLM
#
# A tag can be moved to another image, a digest cannot. To pin: `docker buildx imagetools inspect vllm/vllm-openai:v0.32.0`
# prints it, and `--build-arg BASE_IMAGE=vllm/vllm-openai@sha256:...` takes it.
ARG VLLM=0.32.0
# Any image with that vLLM
ARG BASE_IMAGE=docker.io/vllm/vllm-openai:v${VLLM}

# ---- The wheel of this repository, and the lock for this vLLM. What builds it stays in this stage.
FROM ${BASE_IMAGE} AS wheel
WORKDIR /src
ARG VLLM
COPY requirements/container-[0-9]*.txt requirements/wheel.txt requirements/
RUN if [ ! -f "requirements/container-$VLLM.txt" ]; then \
      echo "VLLM is $VLLM: expected the version of one of" requirements/container-[0-9]*.txt >&2; exit 1; \
    fi; \
    found=$(python3 -c "from importlib.metadata import version; print(version('vllm').partition('+')[0])"); \
    if [ "$found" != "$VLLM" ]; then \
      echo "VLLM is $VLLM, but BASE_IMAGE has vLLM $found: expected the same" >&2; exit 1; \
    fi; \
    cp "requirements/container-$VLLM.txt" container.txt
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes --target /build -r requirements/wheel.txt
COPY pyproject.toml README.md LICENSE sitecustomize.py ./
COPY profiles profiles
COPY src src
RUN PYTHONPATH=/build python3 -m pip wheel --no-cache-dir --no-deps --no-build-isolation --no-index -w /wheel .

# ---- The image. Layers that change least come first.
FROM ${BASE_IMAGE} AS serve

# Run by a number, so that Kubernetes can tell that it is not root. Everything that is written goes below /cache, where a
# volume is mounted; it takes any other uid as well (`--user`), which then has no name of its own.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /cache voxtral \
    && mkdir --mode 1777 /cache \
    && mkdir /model
ENV HOME=/cache USER=voxtral LOGNAME=voxtral \
    TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor

# --no-deps: the lock has what the base lacks, and what the base has is not to be changed.
COPY --from=wheel /src/container.txt /opt/voxtral-serve/
RUN python3 -m pip install --no-cache-dir --no-deps --break-system-packages --require-hashes \
      -r /opt/voxtral-serve/container.txt \
    && python3 -c "import av, librosa, py3langid, silero_vad, soundfile, soxr; librosa.resample; silero_vad.load_silero_vad(sequence=True)"

# Bytecode: the official image has none, and who runs this one cannot write any, so each process would compile thousands of
# modules at each start. In other packages there may be files for another Python, such as tests; they are named.
RUN dist=$(python3 -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
    && python3 -m compileall -q -j 0 "$dist/vllm" "$dist/transformers" \
    && { python3 -m compileall -q -j 0 "$dist" || true; }

# The wheel's voxtral_serve.pth puts the patches in force at every start of Python.
COPY --from=wheel /wheel /opt/voxtral-serve/wheel
RUN python3 -m pip install --no-cache-dir --no-deps --break-system-packages --no-index /opt/voxtral-serve/wheel/*.whl \
    && ln -s "$(python3 -c 'import voxtral_serve.check as c; print(c.PROFILES)')" /profiles
# Ends the build where a patch does not fit the base's vLLM. Needs no GPU.
RUN python3 -c "from voxtral_serve.plugin import register; register()"

COPY vllm_config.yaml /opt/voxtral-serve/
COPY entrypoint.sh /usr/local/bin/

WORKDIR /model
USER 10001:10001
EXPOSE 8000
# Of the port inside the container. Loading takes minutes on a slow disk; until --start-period ends no failure counts.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
  CMD ["python3", "-IS", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["entrypoint.sh"]

ARG VLLM
ARG BASE_IMAGE
ARG REVISION=unknown
LABEL org.opencontainers.image.title="voxtral-serve" \
      org.opencontainers.image.description="Mistral's Voxtral speech-to-text served by vLLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="2.1.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.revision="${REVISION}" \
      voxtral-serve.vllm="${VLLM}"

# ---- The same with a model inside, for machines without a network:
#   docker build --target with-model --build-context model=voxtral-realtime -t vllm-voxtral-model .
#   docker run --gpus all --network none ... vllm-voxtral-model --config /profiles/fast.yaml
FROM serve AS with-model
# hadolint ignore=DL3022
COPY --from=model . /model/

# ---- Speech synthesis with Voxtral TTS, by vLLM-Omni; its weights are for non-commercial use (CC BY-NC 4.0):
#   docker build --target tts -t vllm-voxtral-tts .
#   docker run --gpus all ... vllm-voxtral-tts . --omni --config /profiles/voxtral-tts.yaml
FROM serve AS tts
USER 0:0
COPY requirements/omni.txt /opt/voxtral-serve/
# --no-deps: of what vLLM-Omni asks for, the lock has what Voxtral TTS needs and the base lacks. Its PyAV is for Python 3.11, so
# that of container.txt is put back. A vLLM-Omni for another vLLM ends the build.
RUN python3 -m pip install --no-cache-dir --no-deps --break-system-packages --require-hashes \
      -r /opt/voxtral-serve/omni.txt \
    && python3 -m pip install --no-cache-dir --no-deps --break-system-packages --require-hashes \
      -r /opt/voxtral-serve/container.txt \
    && python3 -c "from importlib.metadata import version as v; x, y = ([*map(int, v(n).split('.')[:2])] for n in ('vllm', 'vllm-omni')); assert x == y, f'vllm-omni is for vLLM {y}, and the base has {x}'"
USER 10001:10001

# ---- What is built when no target is named.
FROM serve
