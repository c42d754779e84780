"""Meaning of a request: S3's operations by name, and the operations of GCS's two APIs by the same names."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from kit.http import Head

READS = frozenset({"GetObject", "HeadObject", "ListObjects"})
BODIES_UP = frozenset({"PutObject", "UploadPart"})

_JSON_PATHS = ("storage/v1/", "upload/storage/v1/", "download/storage/v1/", "batch/storage/v1")

NEXT_PART = b"\r\n--"
"""Separator before each part of a multipart body except the first."""


class Api(enum.Enum):
    """The API of a request, and so of the answer.

    GCS's XML API equals S3's, but with a token instead of a signature.
    """

    S3 = "s3"
    GCS_XML = "gcs xml"
    GCS_JSON = "gcs json"


@dataclass(frozen=True)
class StoreRequest:
    """A request, with the facts that rules use.

    Attributes:
        kind: the operation, such as `PutObject`, `UploadPart` or `CompleteMultipartUpload`.
        key: of the object, decoded; empty for requests to a bucket.
        nbytes: size of the body; 0 if it is sent in chunks.
        access_key: key that signed the request, if the request names one. For a token, a value that distinguishes it
            from other tokens within this process.
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
    def of(cls, head: Head, beginning: bytes = b"") -> StoreRequest:
        """Interpret a head, and the beginning of the body, which is needed only if `names_key_in_body`."""
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
            # If the host's name holds the bucket (`bucket.s3.region.amazonaws.com`), the whole path is the key.
            host = (parts.netloc or head.headers.get("host", "")).partition(":")[0]
            bucket = "" if ".s3." in host or ".s3-" in host else path.partition("/")[0] + "/"
            key = unquote(path.removeprefix(bucket) if path.startswith(bucket) else "")
            kind = _of_s3(method, key, query, copies="x-amz-copy-source" in head.headers)
        if kind_of_signature == "Bearer":
            # Python salts this hash anew in each process, so it does not reveal the token.
            signer = f"{hash(signature):x}"
        else:
            signer = signature.partition("Credential=")[2].partition("/")[0]
        nbytes = 0 if head.chunked else head.length
        return cls(kind, key, method, target, nbytes, head.headers.get("range"), signer, api)


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
    """Return True if an upload's key stands before the data, in a body of two parts.

    https://cloud.google.com/storage/docs/uploading-objects: the JSON API's multipart uploads.
    """
    parts = urlsplit(head.first[1])
    return parts.path.lstrip("/").startswith("upload/") and "uploadType=multipart" in parts.query


def _of_gcs(method: str, path: str, query: dict[str, str], beginning: bytes) -> tuple[str, str]:
    """Return operation and key of a GCS JSON request: https://cloud.google.com/storage/docs/json_api/v1"""
    key = unquote(path.partition("/o/")[2].partition("/")[0]) or query.get("name", "") or _named(beginning)
    if path.startswith("batch/"):
        return "DeleteObjects", key
    if path.startswith("upload/"):
        if method == "PUT":
            return "UploadPart", key
        return ("CreateMultipartUpload" if query.get("uploadType") == "resumable" else "PutObject"), key
    if "/rewriteTo/" in path or "/copyTo/" in path:
        return "CopyObject", key
    if method == "DELETE":
        return "DeleteObject", key
    if not key:
        return ("ListObjects" if path.endswith("/o") else "HeadBucket"), key
    return ("GetObject" if query.get("alt") == "media" or path.startswith("download/") else "HeadObject"), key


def _named(beginning: bytes) -> str:
    """Return the name in the first part of a multipart body, or an empty string."""
    try:
        metadata = json.loads(beginning.partition(b"\r\n\r\n")[2].partition(NEXT_PART)[0])
    except ValueError:
        return ""
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
