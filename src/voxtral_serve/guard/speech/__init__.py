"""Speech synthesis: the guard before vLLM-Omni's Voxtral TTS or VoxCPM2, `POST /v1/audio/speech`.

    request -> fields -> vLLM-Omni -> answer

`facts` reads vLLM-Omni's live objects when the server has started, and `stages` ends a server that has lost a stage.
"""
