"""What every checkpoint of Voxtral Realtime in Mistral's layout shares, whatever its size and weights.

Below both writers of such a checkpoint: pico (trained, tiny) and bench.gpu.checkpoint (random, full size). It imports
nothing of this repository, and only the standard library; mistral_common where its packaged vocabulary is read.
"""
