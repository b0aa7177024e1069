"""`voxtral-serve check`: whether vLLM can serve a checkpoint here, and with how much memory."""

from voxtral_serve.check.clip import clip_length
from voxtral_serve.check.device import other_gpu
from voxtral_serve.check.preflight import check_all
from voxtral_serve.check.profiles import PROFILES
from voxtral_serve.check.report import Report

__all__ = ["PROFILES", "Report", "check_all", "clip_length", "other_gpu"]
