"""tools.speech_rows, of which a GPU is needed for the rest: the fixed length of speech reaches vllm-omni's stages."""

from pathlib import Path

from vllm_omni.config import load_deploy_config

from tools import speech_rows


def test_each_speech_has_its_length(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    speech_rows.write_deploy(path, 37)
    first, second = load_deploy_config(path).stages
    sampling = first.default_sampling_params
    assert (sampling["max_tokens"], sampling["ignore_eos"]) == (462, True)  # of 80 ms
    assert sampling["extra_args"] == {"cfg_alpha": 1.2}  # the deploy file's own
    assert first.max_num_batched_tokens == 32768 and second.max_num_seqs == 32
    assert "ignore_eos" not in second.default_sampling_params
