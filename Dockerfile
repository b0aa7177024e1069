# Voxtral served by vLLM's official image: patches, plugin and guard put in, what reads audio files added.
#
#   docker build -t vllm-voxtral .
#
# A tag can be moved to another image, a digest cannot. To pin: `docker buildx imagetools inspect vllm/vllm-openai:v0.20.0`
# prints it, and `--build-arg BASE_IMAGE=vllm/vllm-openai@sha256:...` takes it.
ARG BASE_IMAGE=vllm/vllm-openai:v0.20.0

# ---- The wheel of this repository. What builds it stays in this stage.
FROM ${BASE_IMAGE} AS wheel
WORKDIR /src
COPY requirements/wheel.txt requirements/
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
COPY requirements/container.txt /opt/voxtral-serve/
RUN python3 -m pip install --no-cache-dir --no-deps --break-system-packages --require-hashes \
      -r /opt/voxtral-serve/container.txt \
    && python3 -c "import av, librosa, silero_vad, soundfile, soxr; librosa.resample; silero_vad.load_silero_vad(sequence=True)"

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

ARG BASE_IMAGE
ARG REVISION=unknown
LABEL org.opencontainers.image.title="voxtral-serve" \
      org.opencontainers.image.description="Mistral's Voxtral speech-to-text served by vLLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.revision="${REVISION}"

# ---- The same with a model inside, for machines without a network:
#   docker build --target with-model --build-context model=voxtral-realtime -t vllm-voxtral-model .
#   docker run --gpus all --network none ... vllm-voxtral-model --config /profiles/fast.yaml
FROM serve AS with-model
# hadolint ignore=DL3022
COPY --from=model . /model/

# ---- What is built when no target is named.
FROM serve
