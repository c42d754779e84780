"""Any filesystem that fsspec knows, and the additional features of some filesystems."""
