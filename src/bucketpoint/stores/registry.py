"""Parsing of URLs, and `open_store`, which makes the store for a URL and its options."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bucketpoint.errors import INSTALL_GCS, BucketpointError, InvalidURLError
from bucketpoint.forks import occupy_standard_descriptors
from bucketpoint.stores.base import Store
from bucketpoint.stores.cutoff import give_up_when_cut
from bucketpoint.stores.local import LocalStore
from bucketpoint.stores.redact import clean, hide, holds_password, without_password

S3_SCHEMES = ("s3", "s3a")
GCS_SCHEMES = ("gs", "gcs")

FOLLOW_LINKS = "follow_links"
"""The storage option for local folders: see `LocalStore.follow_links`."""

# Commands that install the library for a scheme: fsspec knows these schemes, but does not require their libraries.
_INSTALL = {
    **dict.fromkeys(GCS_SCHEMES, INSTALL_GCS),
    **dict.fromkeys(
        ("az", "abfs", "abfss", "adl"), "pip install 'adlfs>=2026.4', or install bucketpoint with its extra azure"
    ),
}

_BUCKETS = tuple(dict.fromkeys((*S3_SCHEMES, *_INSTALL)))

_HALVES = re.compile("[\ud800-\udfff]")

# RFC 3986, section 3.1, but with at least two characters: one letter is a Windows drive.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(://|::)")

# A URL that lost a slash in `Path`, alone or after folders: `s3:/bucket`, `/home/me/s3:/bucket`; `s3:` (from `s3://`).
_FOLDED = re.compile(r"(?:^|/|::)([A-Za-z][A-Za-z0-9+.-]+):(?:/(?!/)|$)")
_LOCAL_SCHEMES = ("file", "local")
# A mistyped URL: `s3:bucket/run`, and for buckets' schemes `s3//bucket/run` (with any other name, it may be a folder).
# `s3::` and `file::` begin no chained URL.
_MISTYPED = re.compile(
    r"(^|^.*?::)(?:([A-Za-z][A-Za-z0-9+.-]+):(?=[^:/])"
    rf"|({'|'.join(_BUCKETS)})//(?=[^/])"
    rf"|(?<!:)({'|'.join((*_BUCKETS, *_LOCAL_SCHEMES))})::)",
    re.IGNORECASE,
)
# RFC 8089 allows one slash, and the host `localhost`: `file:/path` and `file://localhost/path` are `file:///path`.
_LOCALHOST = re.compile(rf"^({'|'.join(_LOCAL_SCHEMES)})://localhost(?=/)", re.IGNORECASE)
_HOST = re.compile(rf"({'|'.join(_LOCAL_SCHEMES)})://([^/]*)(?=/|$)", re.IGNORECASE)
_LOCAL = re.compile(rf"({'|'.join(_LOCAL_SCHEMES)}):(?=/[^/])", re.IGNORECASE)

# The ARN of an S3 access point with a slash before the name, where the bucket would end. `_in_one_form` writes a colon.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/access-points-naming.html
_ACCESS_POINT = re.compile(r"^(s3a?://arn:[^:/]*:s3:[^:/]*:[^:/]*:accesspoint)/(?=[^/])", re.IGNORECASE)

_ACCESS_POINT_ROOT = re.compile(r"arn:[^:/]*:s3:[^:/]*:[^:/]*:accesspoint:[^:/]+", re.IGNORECASE)

# The address of an object on Amazon S3, with the bucket in the host or in the path.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/VirtualHosting.html
_AMAZON = re.compile(
    r"https?://(?:([^/]+?)\.)?s3[.-](?!accesspoint|object-lambda|website)(?:[a-z0-9-]+\.)*amazonaws\.com(?:\.cn)?/([^?#]+)",
    re.IGNORECASE,
)

# Services restrict bucket names further. Any other character is from a user, a port, a query or a mistyped slash.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*|arn:.+", re.DOTALL)

# A bucket and a key without a scheme: `bucket/run`.
_BARE = re.compile(r"[a-z0-9][a-z0-9.-]+[a-z0-9]/.")


def parse_url(url: str | os.PathLike[str]) -> tuple[str, str, str]:
    """Split a URL into its scheme (empty for a bare path), its root, and the key prefix below the root.

    The root of an `s3://` or `gs://` URL is the bucket, and the key prefix is the rest, unchanged: nothing is decoded,
    `?` and `#` are ordinary characters, and `//` is kept. Only slashes at the end are dropped: `prefix/` and `prefix`
    are the same checkpoint. The root of an access point is its ARN with a colon before the name, whichever form the URL
    has. With any other scheme the whole path is the root, and the key prefix is empty. `file:/path` and
    `file://localhost/path` are the same as `file:///path`. Of a chained URL (`a::b://…`) the scheme is the first one's.

    Raises:
        InvalidURLError: the URL names no bucket or another host's folder, is empty, holds a password or a zero byte,
            has white space around it, or has lost a slash in a `Path`.
    """
    text = _in_one_form(os.fspath(url))
    _refuse_mistaken(text)
    if "\0" in text:
        raise InvalidURLError("the URL holds a zero byte", remedy="Pass something like s3://bucket/prefix")
    local = _LOCAL.match(text)
    if local is not None:
        return local[1].lower(), text[local.end() :], ""
    match = _SCHEME.match(text)
    # A local path may contain surrogates: Python uses them for bytes of a name that are not UTF-8.
    if match is not None and match[1].lower() not in _LOCAL_SCHEMES and _HALVES.search(text):
        raise InvalidURLError(
            "the URL holds half a character: it was not read as UTF-8, or was cut", remedy="Write the name in UTF-8"
        )
    if match is None:
        if not text:
            raise InvalidURLError("the URL is empty", remedy="Pass something like s3://bucket/prefix")
        return "", text, ""
    scheme, rest = match[1].lower(), text[match.end() :]
    if scheme not in S3_SCHEMES + GCS_SCHEMES:
        return scheme, rest if match[2] == "://" else text, ""
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise _without_bucket(text, scheme)
    if bucket.lower().startswith("arn:") and not _ACCESS_POINT_ROOT.fullmatch(bucket):
        raise InvalidURLError(
            "this is not the ARN of an access point of S3",
            url=text,
            remedy="Pass s3://bucket/prefix, or s3://arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME/prefix. S3 on "
            "Outposts, whose overwrites show late, and Object Lambda, which changes what is read, are not supported",
        )
    if not _BUCKET.fullmatch(bucket):
        raise InvalidURLError(
            f"{bucket!r} is not a bucket name",
            url=text,
            remedy=f"Pass {scheme}://bucket/prefix; the host and the port of a service go into endpoint_url",
        )
    return scheme, bucket, key.rstrip("/")


def as_url(path: str | os.PathLike[str] | None) -> str | None:
    """Return a checkpoint id as text, without slashes at the end. As a `Path`, a URL would lose a slash of `//`.

    The ARN of an access point gets the form of `parse_url`, so that each place has only one URL.
    """
    if path is None:
        return None
    text = _in_one_form(os.fspath(path))
    return text.rstrip("/") if len(text) > 1 else text


def accepts_url(url: str | os.PathLike[str], schemes: Sequence[str] = ()) -> bool:
    """Return True if `open_store` would accept this URL, judged by the URL's text alone.

    A scheme that fsspec knows is accepted even if its library is not installed: then DCP chooses bucketpoint's class,
    whose error names the package.
    """
    try:
        _check_scheme(url, schemes)
    except InvalidURLError:
        return False
    # In chained URLs (`a::b://…`) the first scheme decides.
    match = _SCHEME.match(os.fspath(url))
    return match is None or _is_known(match[1])


def open_store(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    fs: Any = None,
    schemes: Sequence[str] = (),
) -> tuple[Store, str]:
    """Make the store that serves a URL, and return it with the key prefix of the URL.

    Args:
        storage_options: options of fsspec's filesystem for this scheme. For S3: the options of s3fs, and the names of
            `S3Options`. For GCS: the options of gcsfs, and the names of `GCSOptions`. For a local folder:
            `follow_links`, to read files through links that leave the folder.
        fs: a filesystem object to use, whatever the URL's scheme.
        schemes: the accepted schemes; empty accepts any scheme, and paths without a scheme.

    Raises:
        InvalidURLError: the URL has no bucket, no scheme although one is needed, or a scheme that is not accepted.
        BucketpointError: an option is not known.
    """
    occupy_standard_descriptors()
    if fs is not None:
        url = _in_one_form(os.fspath(url))
        scheme, root, _ = parse_url(url)
        if scheme and schemes:
            _check_scheme(url, schemes)
        path = fs._strip_protocol(root if scheme in _LOCAL_SCHEMES else url)
        return _store_on(fs, path, _follows_links(dict(storage_options or {}))), ""
    scheme, root, prefix = _check_scheme(url, schemes)
    # Providers are imported here, so that a program loads only the libraries of the stores that it opens.
    if scheme in S3_SCHEMES:
        from bucketpoint.stores.s3 import S3Options, S3Store

        return S3Store(root, S3Options.from_storage_options(storage_options)), prefix
    if scheme in GCS_SCHEMES and _has_gcs():
        from bucketpoint.stores.gcs import GCSOptions, GCSStore

        return GCSStore(root, GCSOptions.from_storage_options(storage_options)), prefix
    options = dict(storage_options or {})
    if scheme in ("", *_LOCAL_SCHEMES):
        return LocalStore(_absolute(root), _follows_links(options)), ""
    import fsspec.core

    from bucketpoint.stores.fsspec.drivers import driver_of
    from bucketpoint.stores.fsspec.errors import translate

    failure: BucketpointError
    try:
        _refuse_false_chain(os.fspath(url))
        make = functools.partial(fsspec.core.url_to_fs, os.fspath(url), **options)
        filesystem, path = give_up_when_cut(make, f"making the filesystem of {scheme}:// URLs")
        driver_of(filesystem).bound_retries(filesystem)
        return _store_on(filesystem, path, False), ""
    except (ImportError, TypeError, ValueError) as error:
        reason = hide(clean(str(error)), options)
        # fsspec knows some schemes only if the library for them is installed.
        known = scheme in fsspec.available_protocols()
        if isinstance(error, ImportError) or (isinstance(error, ValueError) and not known and scheme in _INSTALL):
            message = f"the library that serves {scheme}:// URLs is not installed"
            if scheme not in _INSTALL:
                # The text of fsspec's ImportError names the package to install, for each scheme that fsspec knows.
                message += f": {reason}"
            failure = InvalidURLError(message, url=_shown(url), remedy=_INSTALL.get(scheme) or _on_web(url))
        elif isinstance(error, TypeError) or known:
            # adlfs raises a ValueError when it gets no credentials.
            failure = BucketpointError(
                f"the filesystem does not accept these storage_options: {reason}", url=_shown(url)
            )
        else:
            failure = InvalidURLError(
                f"fsspec does not support this URL: {reason}",
                url=_shown(url),
                remedy="Pass s3://, gs:// or az://, a path, or a scheme of fsspec.available_protocols()",
            )
    except OSError as error:
        # Some filesystems connect to their server when they are made.
        failure = translate(error, f"making the filesystem of {scheme}:// URLs", _shown(url), options)
    raise failure


def check_url(store: Store, url: str) -> str:
    """Return the remedy for a URL without objects. A local path may be a URL without its scheme."""
    if isinstance(store, LocalStore) and _BARE.match(url):
        return f"Check the URL (for a bucket: s3://{url})"
    return "Check the URL"


def _on_web(url: str | os.PathLike[str]) -> str | None:
    """Return the remedy for an `http://` or `https://` URL; None for any other URL."""
    match = _AMAZON.match(os.fspath(url))
    place = "/".join(filter(None, match.groups())) if match else "bucket/prefix, its service's address as endpoint_url"
    return f"Pass s3://{place}" if os.fspath(url).lower().startswith(("http://", "https://")) else None


def _shown(url: str | os.PathLike[str]) -> str:
    """Return a URL for an error, without the query of a web address, which may be a signature."""
    text = os.fspath(url)
    return clean(text) if text.lower().startswith(("http://", "https://")) else text


def _in_one_form(url: str) -> str:
    """Return a URL without the host `localhost` of a folder, and with a colon before an access point's name."""
    return _ACCESS_POINT.sub(r"\1:", _LOCALHOST.sub(r"\1://", url))


def _is_known(scheme: str) -> bool:
    if scheme.lower() in {*S3_SCHEMES, *_INSTALL}:
        return True
    import fsspec

    return scheme.lower() in fsspec.available_protocols()


def _without_bucket(url: str, scheme: str) -> InvalidURLError:
    return InvalidURLError("the URL names no bucket", url=url, remedy=f"Pass something like {scheme}://bucket/prefix")


def _refuse_mistaken(url: str) -> None:
    first = _SCHEME.match(url)
    # Not checked after a scheme such as `s3://`: the rest is then a key, and a key may contain such text.
    folded = _FOLDED.search(url) if first is None or first[2] == "::" else None
    if folded is not None and _LOCAL.match(url) is None and _is_known(folded[1]):
        scheme, path = folded[1], url[folded.end() :]
        if folded[0] == url and not path and scheme.lower() in _BUCKETS:
            raise _without_bucket(url, scheme)
        raise InvalidURLError(
            f"this is a local path and looks like a {scheme}:// URL that went through a Path, which drops a slash",
            url=url,
            remedy=f"Pass the URL as text: {scheme}://{path or 'bucket/prefix'}",
        )
    mistyped = _MISTYPED.search(url) if first is None or first[2] == "::" else None
    if mistyped is not None and _is_known(scheme := mistyped[2] or mistyped[3] or mistyped[4]):
        raise InvalidURLError(
            f"this is a local path and looks like a mistyped {scheme}:// URL",
            url=url,
            remedy="Pass the path without file:"
            if scheme.lower() in _LOCAL_SCHEMES
            else f"Pass {mistyped[1]}{scheme}://{url[mistyped.end() :]}; put ./ before the path of a local folder",
        )
    if holds_password(url):
        raise InvalidURLError(
            "the URL holds a password",
            url=without_password(url),
            remedy="Pass the password in storage_options: URLs are logged, and are stored in the checkpoint",
        )
    if url != url.strip():
        raise InvalidURLError("there is white space before or after the URL", url=repr(url), remedy="Remove it")
    host, local = _HOST.match(url), first is None or first[1].lower() in _LOCAL_SCHEMES
    if host is not None and (host[2] or host.end() == len(url)):
        raise InvalidURLError(
            f"the URL names the host {host[2]!r}, but a folder has no host" if host[2] else "the URL has no path",
            url=url,
            remedy="Pass three slashes before an absolute path (file:///data/run), and a relative path without file://",
        )
    if local and "\\" in url:
        raise InvalidURLError("the path holds a backslash", url=url, remedy="Separate the folders by slashes")
    if first is None and "://" in url:
        raise InvalidURLError(
            "this is a local path that contains ://, but does not begin with a scheme",
            url=url,
            remedy="Pass s3://bucket/prefix, without quotes or other characters before it",
        )


def _refuse_false_chain(url: str) -> None:
    """Refuse `::` after a filesystem that opens no other one: fsspec ends the path there, and writes elsewhere."""
    import fsspec

    for link in url.split("::")[:-1]:
        scheme = link.partition("://")[0]
        known = scheme in fsspec.available_protocols()
        kinds = fsspec.get_filesystem_class(scheme).__mro__ if known else ()
        if not any({"fo", "target_protocol"} & {*inspect.signature(kind.__init__).parameters} for kind in kinds):
            raise InvalidURLError(
                f"no URL can be chained to {scheme!r} by ::",
                url=_shown(url),
                remedy="Check the scheme before ::, and put ./ before the path of a local folder. Other names with :: "
                "are possible in s3:// and gs:// URLs only",
            )


def _has_gcs() -> bool:
    """Return True if Google's storage library is installed. Without it `gs://` URLs go to gcsfs, if installed."""
    try:
        return importlib.util.find_spec("google.cloud.storage") is not None
    except ModuleNotFoundError:
        return False


def _store_on(fs: Any, path: str, follow_links: bool) -> Store:
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    from bucketpoint.stores.fsspec import FsspecStore

    # Exactly these classes: a subclass may keep its files elsewhere.
    inner, inner_path = fs, path
    while type(inner) is DirFileSystem:
        inner, inner_path = inner.fs, inner._join(inner_path)
    if type(inner) is LocalFileSystem:
        return LocalStore(_absolute(inner_path), follow_links)
    return FsspecStore(fs, path.rstrip("/") or "/")


def _follows_links(options: dict[str, Any]) -> bool:
    """Remove the option `follow_links` from `options`, and return its value."""
    follows = options.pop(FOLLOW_LINKS, False)
    if not isinstance(follows, bool):
        raise BucketpointError(f"{FOLLOW_LINKS} in storage_options must be True or False, not {follows!r}")
    return follows


def _absolute(path: str) -> str:
    # `abspath` keeps two slashes at the beginning, as POSIX allows. Here they count as one.
    return "/" + os.path.abspath(os.path.expanduser(path)).lstrip("/")


def _check_scheme(url: str | os.PathLike[str], schemes: Sequence[str]) -> tuple[str, str, str]:
    scheme, root, prefix = parse_url(url)
    if schemes and scheme not in schemes:
        wanted = " or ".join(f"{name}://" for name in schemes)
        problem = f"this class does not serve {scheme}:// URLs" if scheme else "the URL has no scheme"
        remedy = f"Pass one that begins with {wanted}; BucketWriter and BucketReader take any"
        raise InvalidURLError(problem, url=_shown(url), remedy=(_on_web(url) if "s3" in schemes else None) or remedy)
    return scheme, root, prefix
