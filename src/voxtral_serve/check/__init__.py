from voxtral_serve.check.report import PROFILES, Report, check, longest_clip

__all__ = ["PROFILES", "Report", "check", "longest_clip"]
