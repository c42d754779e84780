"""What a request means: S3's operations by their names, and those of GCS's two APIs by the same. No I/O."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from bucketpoint.testing.http import Head

READS = frozenset({"GetObject", "HeadObject", "ListObjects"})
BODIES_UP = frozenset({"PutObject", "UploadPart"})

_JSON_PATHS = ("storage/v1/", "upload/storage/v1/", "download/storage/v1/", "batch/storage/v1")

NEXT_PART = b"\r\n--"
"""Before each part of a multipart body but the first."""


class Api(enum.Enum):
    """How a request is worded, and so its answers. GCS's XML API is S3's, with a token for a signature."""

    S3 = "s3"
    GCS_XML = "gcs xml"
    GCS_JSON = "gcs json"


@dataclass(frozen=True)
class Request:
    """A request as rules see it.

    Attributes:
        kind: the operation, such as `PutObject`, `UploadPart` or `CompleteMultipartUpload`.
        key: of the object, decoded; empty for requests to a bucket.
        nbytes: of the body; 0 if it is sent in chunks.
        access_key: that signed it, as far as the request tells; for a token what tells it from others in this process.
    """

    kind: str
    key: str
    method: str
    target: str
    nbytes: int = 0
    range: str | None = None
    access_key: str = ""
    api: Api = Api.S3

    @classmethod
    def of(cls, head: Head, beginning: bytes = b"") -> Request:
        """The request of this head, whose body has this beginning. Only `names_key_in_body` asks for one."""
        method, target = head.first[0], head.first[1]
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        path = parts.path.lstrip("/")
        kind_of_signature, _, signature = head.headers.get("authorization", "").partition(" ")
        api = Api.GCS_XML if kind_of_signature == "Bearer" else Api.S3
        if path.startswith(_JSON_PATHS):
            api = Api.GCS_JSON
            kind, key = _of_gcs(method, path, query, beginning)
        else:
            # A bucket in the host's name leaves the path to the key.
            host = (parts.netloc or head.headers.get("host", "")).partition(":")[0]
            bucket = "" if _names_a_bucket(host) else path.partition("/")[0] + "/"
            key = unquote(path.removeprefix(bucket) if path.startswith(bucket) else "")
            kind = _of_s3(method, key, query, copies="x-amz-copy-source" in head.headers)
        if kind_of_signature == "Bearer":
            # Python salts this anew in each process, so that it tells nothing of the token.
            signer = f"{hash(signature):x}"
        else:
            signer = signature.partition("Credential=")[2].partition("/")[0]
        nbytes = 0 if head.chunked else head.length
        return cls(kind, key, method, target, nbytes, head.headers.get("range"), signer, api)


def _names_a_bucket(host: str) -> bool:
    """Whether it is `bucket.s3.region.amazonaws.com`, or the like elsewhere, and not the service's own name."""
    return ".s3." in host or ".s3-" in host


def _of_s3(method: str, key: str, query: dict[str, str], *, copies: bool) -> str:
    if method == "PUT":
        if not key:
            return "CreateBucket"
        if copies:
            return "UploadPartCopy" if "partNumber" in query else "CopyObject"
        return "UploadPart" if "partNumber" in query else "PutObject"
    if method == "POST":
        if "uploads" in query:
            return "CreateMultipartUpload"
        return "CompleteMultipartUpload" if "uploadId" in query else "DeleteObjects" if "delete" in query else "POST"
    if method == "DELETE":
        return "AbortMultipartUpload" if "uploadId" in query else "DeleteObject"
    if method == "HEAD":
        return "HeadObject" if key else "HeadBucket"
    if "uploads" in query:
        return "ListMultipartUploads"
    return "ListObjects" if "list-type" in query or "prefix" in query or not key else "GetObject"


def names_key_in_body(head: Head) -> bool:
    """Whether an upload's key stands before its bytes, in a body of two parts.

    https://cloud.google.com/storage/docs/uploading-objects: the JSON API's multipart uploads.
    """
    parts = urlsplit(head.first[1])
    return parts.path.lstrip("/").startswith("upload/") and "uploadType=multipart" in parts.query


def _of_gcs(method: str, path: str, query: dict[str, str], beginning: bytes) -> tuple[str, str]:
    """https://cloud.google.com/storage/docs/json_api/v1"""
    key = unquote(path.partition("/o/")[2].partition("/")[0]) or query.get("name", "") or _named(beginning)
    if path.startswith("batch/"):
        return "DeleteObjects", key
    if path.startswith("upload/"):
        if method == "PUT":
            return "UploadPart", key
        return ("CreateMultipartUpload" if query.get("uploadType") == "resumable" else "PutObject"), key
    if "/rewriteTo/" in path or "/copyTo/" in path:
        return "CopyObject", key
    if path.endswith("/compose"):
        return "CompleteMultipartUpload", key
    if method == "DELETE":
        return "DeleteObject", key
    if not key:
        return ("ListObjects" if path.endswith("/o") else "HeadBucket"), key
    return ("GetObject" if query.get("alt") == "media" or path.startswith("download/") else "HeadObject"), key


def _named(beginning: bytes) -> str:
    """The name in the first part of a multipart body; empty where there is none."""
    try:
        said = json.loads(beginning.partition(b"\r\n\r\n")[2].partition(NEXT_PART)[0])
    except ValueError:
        return ""
    return str(said.get("name", "")) if isinstance(said, dict) else ""
