"""Device to host: copies of the state that training cannot change any more. No networks."""

from bucketpoint.staging.blocking import copy_to_host

__all__ = ["copy_to_host"]
