"""Conversion of checkpoints between bucketpoint's and other formats, as a stream from bucket to bucket."""

from bucketpoint.convert.pipeline import (
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
