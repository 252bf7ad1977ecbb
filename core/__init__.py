"""octavo's engine: a really paged KV cache under unmodified Hugging Face models."""

from octavo.core.config import EngineConfig, SamplingParams
from octavo.core.engine import Engine
from octavo.core.errors import BatchError, CapacityError, UnsupportedModelError
from octavo.core.outputs import Completion, EngineStats, Sample, StepOutput
from octavo.core.serving.prompts import TokenSegment
from octavo.core.serving.session import Session

__all__ = [
    "BatchError",
    "CapacityError",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Sample",
    "SamplingParams",
    "Session",
    "StepOutput",
    "TokenSegment",
    "UnsupportedModelError",
]
