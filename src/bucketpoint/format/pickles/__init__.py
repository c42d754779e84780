"""Pickles that anybody may have written: interpreted into a closed set of values, never unpickled."""
