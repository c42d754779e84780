"""Checkpoints of other formats made into ours, and ours into others, as a stream from bucket to bucket."""

from bucketpoint.convert.convert import (
    CONVERT_OPTIONS,
    Converted,
    ConvertOptions,
    ConvertPlan,
    plan_conversion,
    run_conversion,
)

__all__ = [
    "CONVERT_OPTIONS",
    "ConvertOptions",
    "ConvertPlan",
    "Converted",
    "plan_conversion",
    "run_conversion",
]
