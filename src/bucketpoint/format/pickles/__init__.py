"""Safe reader of untrusted pickles: they are interpreted into a closed set of values, never unpickled."""
