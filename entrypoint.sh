#!/bin/sh
# What the container runs: `vllm serve` with the arguments given, once nothing is left that would keep it from serving.
#
#   VLLM_API_KEY_FILE               a file that holds the API key, such as a mounted secret; or VLLM_API_KEY, the key
#   VOXTRAL_SERVE_KEYS              instead: a file of several keys with names and limits (docs/pages/security.md)
#   HF_HUB_OFFLINE=0                lets vLLM download a model, if one is named by its id on the Hub
#   VOXTRAL_SERVE_INSTALL_AUDIO=1   lets this script install what reads audio files, if the image lacks it
#   VOXTRAL_SERVE_SHUTDOWN_S        seconds that running requests have to finish after SIGTERM (30); docker and podman
#                                   wait 10 s unless told otherwise (--stop-timeout 40)
#
# Each refusal is one line on stderr and status 1. HOME is where everything is written: compiled code, caches.
set -eu
# A shell that is process 1 would pass over SIGTERM while the check runs. `exec` takes this back.
trap 'exit 143' TERM INT

LOCK=/opt/voxtral-serve/container.txt

say() { echo "voxtral-serve: $*" >&2; }
refuse() {
  say "refused: $*"
  exit 1
}
# silero_vad is only looked for: with it comes PyTorch, which takes seconds.
reads_audio() {
  python3 -c 'import av, librosa, onnxruntime, py3langid, soundfile, soxr
from importlib.util import find_spec
raise SystemExit(find_spec("silero_vad") is None)' 2>/dev/null
}

[ -w "${HOME:=/}" ] || refuse "cache: $HOME cannot be written by uid $(id -u): mount a volume there"

if [ -n "${VLLM_API_KEY_FILE:-}" ]; then
  [ -r "$VLLM_API_KEY_FILE" ] || refuse "API key: $VLLM_API_KEY_FILE is not there, or not for uid $(id -u) to read"
  VLLM_API_KEY=$(cat "$VLLM_API_KEY_FILE")
  [ -n "$VLLM_API_KEY" ] || refuse "API key: $VLLM_API_KEY_FILE is empty"
  export VLLM_API_KEY
  unset VLLM_API_KEY_FILE # vLLM warns of names that it does not know
fi

# Nothing is downloaded unasked, and no usage statistics are sent.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" VLLM_NO_USAGE_STATS="${VLLM_NO_USAGE_STATS:-1}"

[ ! -d "$HOME/audio" ] || export PYTHONPATH="$HOME/audio${PYTHONPATH:+:$PYTHONPATH}"
if ! reads_audio; then
  [ "${VOXTRAL_SERVE_INSTALL_AUDIO:-}" = 1 ] ||
    refuse "audio: this Python lacks what reads audio files: build the image anew, or set VOXTRAL_SERVE_INSTALL_AUDIO=1"
  say "installing what reads audio files into $HOME/audio, over the network, as pinned in $LOCK"
  python3 -m pip install --quiet --no-deps --require-hashes --upgrade --target "$HOME/audio" -r "$LOCK"
  export PYTHONPATH="$HOME/audio${PYTHONPATH:+:$PYTHONPATH}"
  reads_audio || refuse "audio: what was installed into $HOME/audio cannot be imported"
fi

voxtral-serve check --gate "$@" || exit 1

# Guard writes one line for each request, in place of uvicorn's. vLLM adds --middleware to those of the config.
set -- "$@" --middleware voxtral_serve.guard.Guard --disable-fastapi-docs --disable-uvicorn-access-log
case " $* " in
*" --shutdown-timeout"* | *" --shutdown_timeout"*) ;;
*" --omni "*) ;; # vLLM-Omni refuses the option: the guard reads the variable
*) set -- "$@" --shutdown-timeout "${VOXTRAL_SERVE_SHUTDOWN_S:-30}" ;;
esac
exec vllm serve "$@"
