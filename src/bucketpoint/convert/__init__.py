"""Conversion of checkpoints between bucketpoint's format and others, streamed from bucket to bucket."""

from bucketpoint.convert.export import export_safetensors
from bucketpoint.convert.pipeline import CONVERT_OPTIONS, plan_conversion, run_conversion
from bucketpoint.convert.plan import Converted, ConvertOptions, ConvertPlan

__all__ = [
    "CONVERT_OPTIONS",
    "ConvertOptions",
    "ConvertPlan",
    "Converted",
    "export_safetensors",
    "plan_conversion",
    "run_conversion",
]
