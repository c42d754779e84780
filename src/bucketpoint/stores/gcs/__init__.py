"""Google Cloud Storage, through its JSON API, and through its XML API for multipart uploads."""
