"""Safe reader of untrusted pickles, which are interpreted as values of an allow-list and never unpickled."""
