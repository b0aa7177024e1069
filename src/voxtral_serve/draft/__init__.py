"""`voxtral-serve draft train`: make the drafter that hears, from the user's own recordings, for their checkpoint.

Three stages: vLLM transcribes the recordings, and the audio rows and tokens are kept (collect); the network is trained
on them (training); and the table says what it reached on recordings that it was not trained on, with the time that a
clip then takes (alone).
"""
